"""Values for each token after the episode: checked, written once, and read in the views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.tokens import TOKEN_TYPES
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.labels.annotate import AnnotationReceipt, annotate

Make = Callable[..., Episode]
KEY = ("episode_id", "agent_id", "step")


@pytest.fixture
def talks(lake: Lake, make_dialogue: Make) -> Lake:
    """Two episodes, whose generations have one, two and three tokens, in two shards."""
    lake.dataset("talks").append([make_dialogue("a")])
    lake.dataset("talks").append([make_dialogue("b", agent_id="solver")])
    return lake


def _labels(rows: list[tuple[Any, ...]], **columns: list[Any]) -> pa.Table:
    keys = {name: [row[i] for row in rows] for i, name in enumerate(KEY)}
    return pa.table(keys | columns)


def _add(lake: Lake, labels: pa.Table, *names: str, **more: Any) -> AnnotationReceipt:
    return annotate(lake, "talks", labels, on=more.pop("on", KEY), add=names, **more)


def _column(lake: Lake, name: str, view: str = "steps") -> list[Any]:
    order = "episode_id, agent_id, " + ("step" if view == "steps" else "last_step")
    rows = lake.sql(f"SELECT {name} AS v FROM talks.{view} ORDER BY {order}").to_pylist()
    return [row["v"] for row in rows]


def test_values_come_in_commits_of_their_own(talks: Lake) -> None:
    some = [("a", "", 0), ("a", "", 2), ("b", "solver", 1)]
    first = _labels(
        some,
        proximal_log_probs=[[-0.25], [-1.0, -2.0, -3.0], [-0.5, -0.5]],
        action_entropies=[[0.5], None, [1.0, 2.0]],
    )
    receipt = _add(talks, first, "proximal_log_probs", "action_entropies")
    assert (receipt.version, receipt.matched, receipt.steps, receipt.shards) == (3, 3, 3, 2)
    # Later, by a trainer that had but one of them.
    second = _labels([("a", "", 1)], action_entropies=[[4, 5]], action_advantages=[[-1.5, 1.5]])
    assert _add(talks, second, "action_entropies", "action_advantages").version == 4
    mask = _labels([("a", "", 2)], action_loss_mask=[[True, False, True]])
    assert _add(talks, mask, "action_loss_mask").version == 5

    assert _column(talks, "proximal_log_probs") == [
        [-0.25], None, [-1, -2, -3], None, [-0.5, -0.5], None,
    ]  # fmt: skip
    assert _column(talks, "action_entropies") == [[0.5], [4, 5], None, None, [1, 2], None]
    # As the tokens stand: observations of two, and what was not annotated, have none.
    assert _column(talks, "proximal_log_probs", "sequences")[0] == [
        None, None, -0.25, None, None, None, None, None, None, -1, -2, -3,
    ]  # fmt: skip
    assert _column(talks, "action_entropies", "sequences")[0][2:7] == [0.5, None, None, 4, 5]
    assert _column(talks, "action_advantages", "sequences")[0][5:7] == [-1.5, 1.5]
    assert _column(talks, "loss_mask", "sequences")[0][-3:] == [1, 0, 1]
    assert len(_column(talks, "action_advantages", "sequences")[1]) == 12
    # Each version has what was known then.
    before = talks.snapshot("talks@3").sql("SELECT * FROM sequences").column_names
    assert "action_entropies" in before
    assert "action_advantages" not in before
    # Nothing happens twice.
    assert _add(talks, second, "action_entropies", "action_advantages").already_present


def test_values_keep_their_type(talks: Lake) -> None:
    """Of a new column what it has, of one that is there the dataset's."""
    precise = pa.array([[0.1]], pa.list_(pa.float64()))
    _add(talks, _labels([("a", "", 0)]).append_column("action_advantages", precise),
         "action_advantages")  # fmt: skip
    assert _column(talks, "action_advantages", "sequences")[0][2] == 0.1
    single = pa.array([[0.5, 1.5]], pa.list_(pa.float32()))
    _add(talks, _labels([("a", "", 1)]).append_column("action_advantages", single),
         "action_advantages")  # fmt: skip
    whole = _labels([("a", "", 2)], action_advantages=[[1, 2, 3]])
    _add(talks, whole, "action_advantages")
    assert _column(talks, "action_advantages")[:3] == [[0.1], [0.5, 1.5], [1, 2, 3]]
    kind = talks.dataset("talks").snapshot().table.schema.field("action_advantages").type
    assert kind.value_type == pa.float64()
    texts = _labels([("a", "", 2)], action_advantages=[["1", "2", "3"]])
    with pytest.raises(SchemaMismatchError, match="column 'action_advantages': found list"):
        _add(talks, texts, "action_advantages")


def test_values_of_token_columns_have_the_types_of_their_names(
    talks: Lake, make_dialogue: Make
) -> None:
    rows = [("a", "", 0), ("a", "", 1), ("a", "", 2)]
    columns = {
        "action_loss_mask": [[1], None, [1, 0, 1]],
        "is_trainable": [1, 0, None],
        "proximal_log_probs": [[-1], [0, -2], None],
        "action_a": [[1], [2, 3], None],
    }
    _add(talks, _labels(rows, **columns), *columns)
    schema = talks.dataset("talks").snapshot().table.schema
    for name in ("action_loss_mask", "is_trainable", "proximal_log_probs"):
        assert schema.field(name).type.equals(TOKEN_TYPES[name])
    assert schema.field("action_a").type.value_type == pa.float64()
    assert _column(talks, "action_loss_mask")[:3] == [[True], None, [True, False, True]]
    assert _column(talks, "is_trainable")[:3] == [True, False, None]
    assert _column(talks, "loss_mask", "sequences")[0][-3:] == [1, 0, 1]
    # Values of the same meaning can be added later, by labels and by episodes.
    later = {"action_loss_mask": [[True, False]], "action_a": [[0.5, 1.5]]}
    _add(talks, _labels(rows[1:2], **later), *later)
    whole = make_dialogue("c", 1)
    extras = {**whole.extras, "action_loss_mask": [[False]], "action_a": [[0.25]]}
    talks.dataset("talks").append([make_dialogue("c", 1, extras=extras)])
    assert _column(talks, "action_a") == [[1], [0.5, 1.5], None, None, None, None, [0.25]]
    floats = _labels(rows[:1], mask=[[0.0]], prox=talks.sql("SELECT [-0.5] AS v")["v"].to_pylist())
    added = {"action_loss_mask": "mask", "proximal_log_probs": "prox"}
    annotate(talks, "talks", floats, on=KEY, add=added)
    assert _column(talks, "action_loss_mask")[0] == [False]
    assert _column(talks, "proximal_log_probs")[0] == [-0.5]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("action_loss_mask", [[1], [7, 0]], "found 7, expected true and false, or 1 and 0"),
        ("action_loss_mask", [None, [0.5, 0.0]], "found 0.5, expected true and false"),
        ("action_loss_mask", [None, ["1", "0"]], "found list<item: string>, expected list<"),
        ("is_trainable", [None, "no"], "found string, expected bool"),
        ("is_trainable", [1, 2], "found 2, expected true and false"),
        ("proximal_log_probs", [None, -0.5], "found double, expected list<element: float>"),
        ("reference_log_probs", [None, ["x"]], "found list<item: string>, expected list<"),
        ("action_a", [[1], [1 << 60, (1 << 60) + 1]], "Integer value .* not in range"),
    ],
)
def test_values_of_other_types_name_their_step(
    talks: Lake, name: str, values: list[Any], message: str
) -> None:
    labels = _labels([("a", "", 0), ("b", "solver", 1)], **{name: values})
    at = f"column '{name}', label of episode_id b, agent_id solver, step 1: {message}"
    with pytest.raises(SchemaMismatchError, match=at):
        _add(talks, labels, name)
    assert talks.dataset("talks").snapshot().version == 2
    if name == "is_trainable":
        none = labels.slice(0, 0).set_column(3, name, pa.array([], pa.string()))
        with pytest.raises(SchemaMismatchError, match="column 'is_trainable': found string"):
            _add(talks, none, name)


def test_values_of_a_query(talks: Lake) -> None:
    """A number with a point is a decimal in SQL."""
    query = "SELECT episode_id, agent_id, step, [0.5, 1.5] AS v FROM talks.steps WHERE step = 1"
    annotate(talks, "talks", talks.sql(query), on=KEY, add={"action_weights": "v"})
    assert _column(talks, "action_weights", "sequences")[0][5:7] == [0.5, 1.5]
    other = talks.sql(query.replace("[0.5, 1.5]", "[0.25]"))
    with pytest.raises(EpisodeInvalidError, match="action_weights at step 1 of episode a: found 1"):
        annotate(talks, "talks", other, on=KEY, add={"action_weights": "v"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("proximal_log_probs", [-1.0], "found 1 values, expected 2, one for each of its action_to"),
        ("reference_log_probs", [-1.0, 0.5], "found 0.5 for token 1, expected at most 0"),
        ("action_advantages", [1.0, 2.0, 3.0], "found 3 values, expected 2, one for each"),
        ("action_entropies", [0.5, float("nan")], "found nan for token 1, expected a finite"),
        ("action_entropies", [0.5, None], "found NULL within it, expected a value for each token"),
        ("action_loss_mask", [True], "found 1 values, expected 2"),
    ],
)
def test_values_that_do_not_fit_name_their_step(
    talks: Lake, name: str, value: list[Any], message: str
) -> None:
    fits: dict[str, list[Any]] = {"action_loss_mask": [False]}
    rows = [("a", "", 0), ("b", "solver", 1)]
    labels = _labels(rows).append_column(name, pa.array([fits.get(name, [-0.5]), value]))
    at = f"{name} at step 1 of episode b of agent solver: {message}"
    with pytest.raises(EpisodeInvalidError, match=at):
        _add(talks, labels, name)
    assert talks.dataset("talks").snapshot().version == 2
    # A probability of 0 under another policy is possible.
    if name == "reference_log_probs":
        _add(talks, _labels(rows[:1], **{name: [[float("-inf")]]}), name)


def test_steps_without_ids_have_nothing_to_annotate(lake: Lake, make_dialogue: Make) -> None:
    unknown: dict[str, Any] = dict.fromkeys(
        ("observation_tokens", "action_tokens", "action_log_probs")
    )
    whole = make_dialogue("a", 1)
    lists = {name: [*whole.extras[name], None] for name in unknown}
    lake.dataset("talks").append([make_dialogue("a", 2, extras=lists)])
    labels = _labels([("a", "", 1)], action_advantages=[[1.0]])
    with pytest.raises(EpisodeInvalidError, match="action_tokens at step 1 of episode a: found NU"):
        _add(lake, labels, "action_advantages")


def test_a_key_of_episodes(talks: Lake, make_dialogue: Make) -> None:
    talks.dataset("talks").append([make_dialogue("c", 1)])
    one = pa.table({"episode_id": ["c"], "action_advantages": [[2.0]]})
    _add(talks, one, "action_advantages", on="episode_id")
    assert _column(talks, "action_advantages")[-1] == [2]
    several = pa.table({"episode_id": ["a"], "action_advantages": [[2.0]]})
    message = "a label of 3 steps for action_advantages, .* of episode a, .*Add step to `on`"
    with pytest.raises(ConfigInvalidError, match=message) as refused:
        _add(talks, several, "action_advantages", on="episode_id")
    assert refused.value.parameter == "on"
    # What is not for each token goes to all of them.
    _add(talks, several.append_column("judge", pa.array(["x"])), "judge", on="episode_id")
    assert _column(talks, "judge")[:4] == ["x", "x", "x", None]


@pytest.mark.parametrize("name", ["action_tokens", "action_log_probs", "is_continuation"])
def test_facts_of_the_log_stay(talks: Lake, name: str) -> None:
    labels = _labels([("a", "", 0)], given=[[-1.0]])
    with pytest.raises(ConfigInvalidError, match=f"add: found {name}, which is part of the log"):
        annotate(talks, "talks", labels, on=KEY, add={name: "given"})


@pytest.mark.parametrize("name", ["action_starts", "action_Starts"])
def test_names_of_the_columns_of_sequences_are_taken(talks: Lake, name: str) -> None:
    labels = _labels([("a", "", 0)], given=[[1.0]])
    message = f"add: found {name}, which is a column of `sequences`.*{name}_2=given"
    with pytest.raises(ConfigInvalidError, match=message) as refused:
        annotate(talks, "talks", labels, on=KEY, add={name: "given"})
    assert refused.value.parameter == "add"
    annotate(talks, "talks", labels, on=KEY, add={f"{name}_2": "given"})
    assert _column(talks, f"{name}_2", "sequences")[0][2] == 1


def test_flags_for_each_token(talks: Lake) -> None:
    labels = _labels([("a", "", 1)], action_is_tool=[[True, False]])
    _add(talks, labels, "action_is_tool")
    flags = _column(talks, "action_is_tool", "sequences")[0]
    assert flags == [None] * 5 + [True, False] + [None] * 5
    kind = talks.sql("SELECT action_is_tool FROM talks.sequences").schema.field(0).type
    assert kind.value_type == pa.bool_()
    short = _labels([("b", "solver", 1)], action_is_tool=[[True]])
    with pytest.raises(EpisodeInvalidError, match=r"step 1 of episode b .*: found 1 values, exp"):
        _add(talks, short, "action_is_tool")


def test_other_datasets_have_no_streams(lake: Lake, make_episode: Make) -> None:
    lake.dataset("talks").append([make_episode("a")])
    labels = _labels([("a", "", 0)], action_weights=[[1.0, float("nan"), 2.0]])
    assert _add(lake, labels, "action_weights").steps == 1
