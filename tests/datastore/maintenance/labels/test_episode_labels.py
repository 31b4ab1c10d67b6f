"""Labels of single episodes: with an origin, undone exactly, and never over another's unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from replaylake.datastore.errors import (
    CommitConflictError,
    ConfigInvalidError,
    NotFoundError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.labels import episode_labels
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.maintenance.labels.episode_labels import (
    EpisodeLabel,
    label_episode,
    list_label_names,
    read_episode_labels,
    undo_label,
)
from replaylake.datastore.maintenance.purge.purge import purge


@pytest.fixture
def labeled(lake: Lake, make_episode: Callable[..., Any]) -> Lake:
    """Episodes a and b of three steps each in one shard, c in another, without labels."""
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", terminated=True), make_episode("b", terminated=True)])
    dataset.append([make_episode("c", terminated=True)])
    return lake


def read(lake: Lake, episode_id: str = "a") -> dict[str, EpisodeLabel]:
    return read_episode_labels(lake.dataset("d").snapshot(), episode_id)


def set_label(lake: Lake, value: Any, *, name: str = "verdict", **fields: Any) -> int:
    given = {"episode_id": "a", "by": "Ada", "seen": read(lake).get(name)}
    return label_episode(lake, "d", name, value, **(given | fields))


def test_a_label_is_in_each_step_with_who_and_when(labeled: Lake) -> None:
    version = set_label(labeled, " bad ")
    rows = labeled.sql("""SELECT episode_id, verdict, verdict_labeled_by,
        verdict_labeled_at BETWEEN now() - INTERVAL 1 HOUR AND now() AS is_recent
        FROM d.steps ORDER BY episode_id, step""").to_pylist()
    assert [tuple(row.values()) for row in rows[:3]] == [("a", "bad", "Ada", True)] * 3
    assert [row["verdict"] for row in rows[3:]] == [None] * 6
    assert read(labeled)["verdict"].by == "Ada"
    assert read(labeled, "b") == {}
    # The log says who labeled, and no id of an episode.
    commit = labeled.dataset("d").commit_info(version)
    assert commit["labeled"] == {"label": "verdict", "by": "Ada", "action": "set"}
    assert commit["operation"] == "LABEL"


def test_a_label_selects_training_data_at_once(labeled: Lake) -> None:
    set_label(labeled, "bad")
    set_label(labeled, True, name="flagged", episode_id="c", seen=None)
    snapshot = labeled.dataset("d").snapshot()
    for condition in ("any(verdict = 'bad')", "verdict = 'bad'", "any(flagged)"):
        assert snapshot.replay(where=condition).num_steps == 3


def test_labels_are_texts_numbers_and_flags(labeled: Lake) -> None:
    set_label(labeled, 4, name="rating")
    set_label(labeled, True, name="flagged")
    set_label(labeled, "4", name="verdict")
    values = {name: label.value for name, label in read(labeled).items()}
    assert values == {"rating": 4.0, "flagged": True, "verdict": "4"}
    with pytest.raises(ConfigInvalidError, match="found 'good', expected a number"):
        set_label(labeled, "good", name="rating")
    assert list_label_names(labeled.dataset("d").snapshot().table.schema) == [*values]


def test_what_was_removed_says_by_whom(labeled: Lake) -> None:
    set_label(labeled, "bad")
    set_label(labeled, None, by="Bob")
    label = read(labeled)["verdict"]
    assert (label.value, label.by) == (None, "Bob")
    assert set(labeled.sql("SELECT verdict FROM d.steps")["verdict"].to_pylist()) == {None}


def test_undo_restores_what_was_before(labeled: Lake) -> None:
    first = set_label(labeled, "bad")
    before = read(labeled)
    second = set_label(labeled, "good", by="Bob")
    compact(labeled, "d")
    third = undo_label(labeled, "d", second, episode_id="a", by="Bob")
    assert read(labeled) == before
    # An undo can be undone too, and the first label as well, after which there was never one.
    undo_label(labeled, "d", third, episode_id="a", by="Bob")
    assert read(labeled)["verdict"].value == "good"
    with pytest.raises(CommitConflictError, match="found 'good' by Bob"):
        undo_label(labeled, "d", first, episode_id="a", by="Ada")
    with pytest.raises(NotFoundError, match="d@3: found no label of episode 'b'"):
        undo_label(labeled, "d", first, episode_id="b", by="Ada")
    with pytest.raises(NotFoundError, match="d@1: found no label"):
        undo_label(labeled, "d", 1, episode_id="a", by="Ada")


def test_an_undone_first_label_leaves_none(labeled: Lake) -> None:
    version = set_label(labeled, "bad")
    undone = undo_label(labeled, "d", version, episode_id="a", by="Ada")
    assert read(labeled) == {}
    info = labeled.dataset("d").commit_info(undone)["labeled"]
    assert info == {"label": "verdict", "by": "Ada", "action": "undo", "undone_version": version}


def test_a_label_that_was_not_seen_stays(labeled: Lake) -> None:
    version = set_label(labeled, "bad")
    with pytest.raises(CommitConflictError, match=r"found 'bad' by Ada at .* expected no label"):
        set_label(labeled, "good", by="Bob", seen=None)
    assert labeled.dataset("d").snapshot().version == version
    assert read(labeled)["verdict"].value == "bad"


@pytest.mark.parametrize("is_same", [False, True])
def test_two_who_label_at_once_lose_nothing(labeled: Lake, is_same: bool) -> None:
    start, results = threading.Barrier(2), {}

    def work(who: str, episode_id: str) -> None:
        start.wait()
        fields = {"episode_id": episode_id, "by": who, "seen": None}
        try:
            results[who] = label_episode(labeled, "d", "verdict", f"of {who}", **fields)
        except CommitConflictError as error:
            results[who] = str(error)

    # a and b are in one shard, which both write again; neither knows of the label's new columns.
    episodes = {"Ada": "a", "Bob": "a" if is_same else "b"}
    threads = [threading.Thread(target=work, args=pair) for pair in episodes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = {who for who, result in results.items() if isinstance(result, int)}
    assert len(done) == (1 if is_same else 2)
    for who in done:
        assert read(labeled, episodes[who])["verdict"].value == f"of {who}"
    for who in {*results} - done:
        (other,) = done
        assert f"found 'of {other}' by {other}" in results[who]


def test_a_large_shard_is_divided_once(
    lake: Lake, make_episode: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(f"e/{n}", 8, terminated=True) for n in range(8)])
    columns = ", ".join(dataset.snapshot().table.schema.names)
    before = lake.sql(f"SELECT {columns} FROM d.steps").to_pylist()
    num_bytes = dataset.snapshot().table.read().nbytes
    monkeypatch.setattr(episode_labels, "_SHARD_BYTES", num_bytes // 3)
    label_episode(lake, "d", "verdict", "bad", episode_id="e/0", by="Ada")
    divided = [entry.num_rows for entry in dataset.snapshot().files]
    assert len(divided) >= 3
    assert sum(divided) == 64
    version = label_episode(lake, "d", "verdict", "bad", episode_id="e/7", by="Ada")
    change = dataset.table.log.read_change(version)
    assert len(change.removed) < len(divided)
    assert sum(entry.num_rows for entry in change.added) <= 2 * max(divided)
    # The rows are the same; those that were written again come after the others of their version.
    after = lake.sql(f"SELECT {columns} FROM d.steps").to_pylist()
    assert sorted(map(str, after)) == sorted(map(str, before))
    compact(lake, "d")
    assert [entry.num_rows for entry in dataset.snapshot().files] == [64]


@pytest.mark.parametrize(
    "name", ["reward", "episode_id", "return", "Num_Steps", "policy", "remark"]
)
def test_columns_of_the_log_are_no_labels(
    lake: Lake, make_episode: Callable[..., Any], name: str
) -> None:
    extras = {"remark": ["x"] * 3}
    lake.dataset("d").append([make_episode("a", terminated=True, extras=extras)])
    with pytest.raises(ConfigInvalidError, match=r"name: found .* that is no label") as caught:
        set_label(lake, "bad", name=name)
    assert caught.value.parameter == "name"
    assert lake.dataset("d").snapshot().version == 1


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"name": "two words"}, "name"),
        ({"name": "x" * 41}, "name"),
        ({"value": "  "}, "value"),
        ({"value": "a\nb"}, "value"),
        ({"value": "x" * 501}, "value"),
        ({"value": float("nan")}, "value"),
        ({"by": ""}, "by"),
        ({"by": "a\x1bb"}, "by"),
    ],
)
def test_a_wrong_label_is_refused_with_its_field(
    labeled: Lake, fields: dict[str, Any], parameter: str
) -> None:
    given = {"value": "bad", **fields}
    with pytest.raises(ConfigInvalidError, match=f"^{parameter}: found") as caught:
        set_label(labeled, given.pop("value"), **given)
    assert caught.value.parameter == parameter
    assert labeled.dataset("d").snapshot().version == 2


def test_what_is_not_there_cannot_be_labeled(labeled: Lake) -> None:
    with pytest.raises(NotFoundError, match="episode 'nobody': found none in d"):
        set_label(labeled, "bad", episode_id="nobody", seen=None)
    with pytest.raises(NotFoundError, match="label verdict: found no such label"):
        set_label(labeled, None)


def test_one_agent_is_labeled_and_other_engines_read_it(
    lake: Lake, make_episode: Callable[..., Any]
) -> None:
    agents = [make_episode("g", terminated=True, agent_id=agent) for agent in ("p", "q")]
    lake.dataset("d").append(agents)
    hostile = "'; DROP TABLE d; --</td><script>\u202e\U0001f469\u200d\U0001f680"
    label_episode(lake, "d", "verdict", hostile, episode_id="g", agent_id="q", by="Ada")
    rows = DeltaTable(lake.dataset("d").path).to_pyarrow_table()
    found = {(row["agent_id"], row["verdict"]) for row in rows.to_pylist()}
    assert found == {("p", None), ("q", hostile)}


def test_a_purge_removes_the_labels_and_the_name_of_who_is_purged(
    labeled: Lake, make_episode: Callable[..., Any]
) -> None:
    person = "customer-4711"
    labeled.dataset("d").append([make_episode(person, terminated=True)])
    set_label(labeled, "bad", episode_id=person, by=person)
    set_label(labeled, "good", episode_id="c", by="Bob", seen=None)
    assert purge(labeled, "d", f"episode_id = '{person}'").is_proven
    infos = [one["labeled"] for one in labeled.dataset("d").history() if "labeled" in one]
    assert [info["by"] for info in infos] == ["<deleted>", "Bob"]
    assert read(labeled, "c")["verdict"].value == "good"


def test_many_episodes_are_labeled_by_annotate(labeled: Lake) -> None:
    at = datetime(2026, 11, 1, 12, tzinfo=UTC)
    labels = pa.table(
        {
            "episode_id": ["a", "b"],
            "verdict": ["bad", "good"],
            "verdict_labeled_by": ["Ada", "Ada"],
            "verdict_labeled_at": pa.array([at, at], pa.timestamp("us", "UTC")),
        }
    )
    added = [name for name in labels.column_names if name != "episode_id"]
    annotate(labeled, "d", labels, on="episode_id", add=added)
    assert read(labeled, "b") == {"verdict": EpisodeLabel("good", "Ada", at)}
    set_label(labeled, "fair")
    assert read(labeled)["verdict"].value == "fair"
