"""Token columns through the lake: each way of moving steps keeps them, and SQL reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.episodes.tokens import TOKEN_TYPES
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.versions.diff import diff
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.copy.copy import copy
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.merge import merge

Make = Callable[..., Episode]
TOKENIZER = Tokenizer("small", "1" * 64, 512, 2, "{{ messages }}")
SPEC = DatasetSpec(Text(), Text(), tokenizer=TOKENIZER)


def _whole(make_dialogue: Make, name: str) -> list[Episode]:
    """A dialogue with every token column, and a branch of another agent that goes on from it."""
    extras = {
        "final_observation_tokens": [None, None, [30, 31]],
        "action_loss_mask": [[True], [True, False], None],
        "proximal_log_probs": [[-0.25], None, [-1.0, -2.0, -3.0]],
        "reference_log_probs": [[-0.75], [-0.5, -0.5], [-1.0, -2.0, -4.0]],
        "action_versions": [
            [{"start": 0, "version": 7}],
            [{"start": 0, "version": 7}, {"start": 1, "version": 8}],
            None,
        ],
        "parent_agent_id": pa.nulls(3, pa.string()),
        "parent_step": [None, None, 1],
        "is_continuation": [True, True, False],
        "is_trainable": [True, None, False],
    }
    branch = make_dialogue(
        name,
        2,
        agent_id="solver~1",
        extras={
            **{column: [None, None] for column in extras},
            "parent_agent_id": ["solver", None],
            "parent_step": [1, 0],
        },
    )
    return [make_dialogue(name, agent_id="solver", extras=extras), branch]


def _rows(lake: Lake, name: str) -> list[dict[str, Any]]:
    rows = lake.snapshot(name).table.read().to_pylist()
    for row in rows:
        row["episode_id"] = row["episode_id"].rpartition("/")[2]
        del row["source_episode_id"]
    return sorted(rows, key=lambda row: (row["episode_id"], row["agent_id"], row["step"]))


@pytest.fixture
def filled(lake: Lake, make_dialogue: Make) -> Lake:
    for name in ("a", "b"):
        lake.dataset("talks").append(_whole(make_dialogue, name), spec=SPEC)
    return lake


def test_columns_and_types(filled: Lake) -> None:
    spec = filled.dataset("talks").spec
    assert spec.tokenizer == TOKENIZER
    assert {name: spec.extras[name] for name in TOKEN_TYPES} == TOKEN_TYPES
    first = filled.sql(
        "SELECT * FROM talks.steps WHERE episode_id = 'a' AND agent_id = 'solver' AND step = 1"
    ).to_pylist()[0]
    assert first["observation_tokens"] == [10, 11]
    assert first["action_tokens"] == [100, 101]
    assert first["action_log_probs"] == [-0.5, -0.5]
    assert first["behavior_log_prob"] == -1.0
    assert first["action_loss_mask"] == [True, False]
    assert first["action_versions"] == [{"start": 0, "version": 7}, {"start": 1, "version": 8}]
    total = filled.sql("SELECT sum(len(action_tokens)) AS n FROM talks.steps").to_pylist()
    assert total == [{"n": 18}]


def test_compaction_copy_and_diff(filled: Lake, tmp_path: Path) -> None:
    before, version = _rows(filled, "talks"), filled.snapshot("talks")
    compact(filled, "talks", open_s=0)
    assert len(filled.snapshot("talks").files) == 1
    assert _rows(filled, "talks") == before
    assert diff(version, filled.snapshot("talks")).is_empty
    other = open_lake(tmp_path / "other", create=True)
    copy(filled, "talks", other)
    assert _rows(other, "talks") == before
    assert other.dataset("talks").spec == filled.dataset("talks").spec
    for lake in (filled, other):
        assert fsck(lake).findings == ()


def test_diff_sees_tokens(filled: Lake, make_dialogue: Make) -> None:
    dataset, before = filled.dataset("talks"), filled.snapshot("talks")
    dataset.set_unique(["episode_id", "agent_id", "step"])
    changed = _whole(make_dialogue, "a")
    changed[0].extras["reference_log_probs"][0] = [-0.5]  # type: ignore[index]
    dataset.append(changed, on_conflict="replace")
    found = diff(before, filled.snapshot("talks"))
    assert [(one.episode_id, one.agent_id) for one in found.changed] == [("a", "solver")]
    assert found.columns_changed == {"reference_log_probs": 1}


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
def test_export_and_ingest(filled: Lake, tmp_path: Path, form: str) -> None:
    export(filled, "talks", tmp_path / f"out.{form}", format=form)
    receipt = ingest(filled, [tmp_path / f"out.{form}"], "again")
    assert receipt.episodes.rejected == 0
    first, second = filled.dataset("talks").spec, filled.dataset("again").spec
    assert {n: second.extras[n] for n in TOKEN_TYPES} == TOKEN_TYPES
    # Lines of JSON have no place for the tokenizer.
    assert second.tokenizer == (None if form == "jsonl" else first.tokenizer)
    assert _rows(filled, "again") == _rows(filled, "talks")


def test_merge(filled: Lake, make_dialogue: Make) -> None:
    filled.dataset("more").append([make_dialogue("c")], spec=SPEC)
    merge(filled, ["talks", "more"], "merged")
    assert filled.dataset("merged").spec.tokenizer == TOKENIZER
    assert {row["episode_id"] for row in _rows(filled, "merged")} == {"a", "b", "c"}
    assert [row for row in _rows(filled, "merged") if row["episode_id"] != "c"] == _rows(
        filled, "talks"
    )


def test_another_tokenizer_is_refused_by_name(
    filled: Lake, make_dialogue: Make, tmp_path: Path
) -> None:
    other = Tokenizer("large", "2" * 64, 512)
    names = r"small \(sha256 1{12}...\) and large \(sha256 2{12}...\), with another sha256"
    episode = make_dialogue("c")
    with pytest.raises(SchemaMismatchError, match=names):
        filled.dataset("talks").append([episode], spec=replace(SPEC, tokenizer=other))
    with pytest.raises(SchemaMismatchError, match=names):
        filled.dataset("talks").set_tokenizer(other)
    filled.dataset("more").append([episode], spec=replace(SPEC, tokenizer=other))
    with pytest.raises(SchemaMismatchError, match=f"merge talks@.* and more@.*: .*{names}"):
        merge(filled, ["talks", "more"], "merged")
    with pytest.raises(SchemaMismatchError, match=r"large .* and small"):
        copy(filled, "talks", filled, as_name="more")
    export(filled, "more", tmp_path / "more.parquet", format="parquet")
    with pytest.raises(SchemaMismatchError, match=f"dataset 'talks': .*{names}"):
        ingest(filled, [tmp_path / "more.parquet"], "talks")
    assert not filled.dataset("merged").exists()
    assert len(_rows(filled, "talks")) == 10


def test_unstated_tokenizers_do_not_mix(filled: Lake, make_dialogue: Make, tmp_path: Path) -> None:
    filled.dataset("unstated").append([make_dialogue("c")])
    with pytest.raises(SchemaMismatchError, match="not stated for the tokens of the other"):
        merge(filled, ["talks", "unstated"], "merged")
    export(filled, "talks", tmp_path / "talks.parquet", format="parquet")
    with pytest.raises(SchemaMismatchError, match="the tokenizer is not stated, and small"):
        ingest(filled, [tmp_path / "talks.parquet"], "unstated")


def test_set_tokenizer(lake: Lake, make_dialogue: Make) -> None:
    dataset = lake.dataset("talks")
    dataset.append([make_dialogue("a")])
    with pytest.raises(SchemaMismatchError, match=r"found token id 202, expected 0\.\.201"):
        dataset.set_tokenizer(Tokenizer("small", vocabulary_size=202))
    assert dataset.set_tokenizer(Tokenizer("small", vocabulary_size=203)) == 2
    assert dataset.set_tokenizer(Tokenizer("small")) == 2
    assert dataset.set_tokenizer(Tokenizer("small", eos_token_id=2)) == 3
    assert dataset.spec.tokenizer == Tokenizer("small", None, 203, 2)
    with pytest.raises(EpisodeInvalidError, match=r"episode b: .*found 300 as token 0, expected"):
        dataset.append([make_dialogue("b", 4)])


def test_parents(lake: Lake, make_dialogue: Make) -> None:
    def step(first: int, agent: str, parent: tuple[str | None, int] | None) -> Episode:
        named = {"parent_agent_id": [parent and parent[0]], "parent_step": [parent and parent[1]]}
        episode = make_dialogue("a", 1, agent_id=agent, extras=named, first_step=first)
        return replace(episode, terminated=False)

    dataset = lake.dataset("talks")
    dataset.append([step(0, "x", None), step(0, "x~1", ("x", 0))])
    # Its parent was stored before.
    dataset.append([step(1, "x", None), step(0, "x~2", ("x~1", 0)), step(1, "x~1", (None, 0))])
    for wrong, message in [
        ([step(2, "x", (None, 2))], "found step 2 of agent 'x' .*expected a step before it"),
        ([step(0, "x~3", ("x", 7))], "found step 7 of agent 'x' .*the episode does not have"),
        ([step(0, "x~3", ("y", 0))], "found step 0 of agent 'y' .*the episode does not have"),
        ([step(0, "x~3", ("x~4", 0)), step(0, "x~4", ("x~3", 0))], "parents form a cycle"),
    ]:
        with pytest.raises(
            EpisodeInvalidError, match=f"episode a: parent_step at step .*{message}"
        ):
            dataset.append(wrong)
    assert len(_rows(lake, "talks")) == 5


def test_positive_log_probs_are_counted(lake: Lake, make_dialogue: Make) -> None:
    dataset = lake.dataset("talks")
    high = make_dialogue("a", extras={"action_log_probs": [[1e-5], [0.0, -1.0], [1e-5, 0, 1e-5]]})
    dataset.append([high])
    with dataset.writer(producer="w") as writer:
        writer.write(replace(high, episode_id="b"))
    counts = [dataset.table.log.read_change(v).info.get("num_positive_log_probs") for v in (1, 2)]
    assert counts == [3, 3]
    stored = lake.sql("SELECT max(list_max(action_log_probs)) AS m FROM talks.steps").to_pylist()
    assert stored == [{"m": 0.0}]


def test_steps_written_one_by_one(lake: Lake) -> None:
    lake.dataset("talks").create(Text(), Text(), tokenizer=TOKENIZER)
    with lake.dataset("talks").writer() as writer:
        episode = writer.begin("a")
        tokens = {"observation_tokens": [1, 2], "action_tokens": [3], "action_log_probs": [-1.0]}
        episode.step("hi", "hello", 0.0, "and now", **tokens)
        writer.flush()  # a piece of its own
        tokens = {"observation_tokens": [], "action_tokens": [4, 5], "action_log_probs": [-1, -2]}
        episode.step("and now", "bye", 1.0, "", terminated=True, **tokens)
    (row,) = lake.sql("SELECT token_ids, log_probs FROM talks.sequences").to_pylist()
    assert row == {"token_ids": [1, 2, 3, 4, 5], "log_probs": [None, None, -1.0, -1.0, -2.0]}


def test_datasets_without_tokens_stay_as_they_are(lake: Lake, make_episode: Make) -> None:
    lake.dataset("plain").append([make_episode("a", extras={"parent_step": [1.5, 2.5, 3.5]})])
    spec = lake.dataset("plain").spec
    assert (spec.extras, spec.tokenizer) == ({"parent_step": pa.float64()}, None)
    assert "replaylake.tokenizer" not in spec.configuration()
