"""Unique keys: what an append does with rows whose keys are there, against a model in Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec, UniqueKeys
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.commit import KeyCounts
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.storage.table import key_index
from replaylake.datastore.storage.table.key_hashes import hash_keys

NAN = math.nan
SPEC = DatasetSpec(
    Box((1,)), Discrete(10), rewards_optional=True, unique=UniqueKeys(("event",), ("score",))
)


def _decision(event: int | None, action: int = 0, reward: float = NAN, **fields: Any) -> Episode:
    score = fields.pop("score", None)
    return _steps([event], [action], [reward], terminated=True, scores=[score], **fields)


def _steps(
    events: list[int | None],
    actions: list[int] | None = None,
    rewards: list[float] | None = None,
    **fields: Any,
) -> Episode:
    num = len(events)
    scores = fields.pop("scores", [None] * num)
    given = {
        "episode_id": f"e{id(events)}-{np.random.default_rng().integers(1 << 60)}",
        "observations": np.array([[float(e or 0)] for e in events], np.float32),
        "actions": np.array(actions or [0] * num),
        "rewards": np.array(rewards or [NAN] * num),
        "extras": {
            "event": pa.array(events, pa.int64()),
            "score": pa.array(scores, pa.float64()),
        },
    }
    return Episode(**(given | fields))


def _rows(dataset: Dataset) -> dict[int, tuple[Any, ...]]:
    rows = dataset.snapshot().table.read(["event", "action", "reward", "score"]).to_pylist()
    found = {row["event"]: (row["action"], row["reward"], row["score"]) for row in rows}
    assert len(found) == len(rows)  # each key once
    return found


def _reopen(lake: Lake) -> Lake:
    """Return a lake as another process has it: a handle remembers what it wrote and read."""
    return open_lake(lake.url)


@pytest.fixture
def dataset(lake: Lake) -> Dataset:
    return lake.dataset("d")


def test_each_key_once_late_values_and_conflicts(dataset: Dataset) -> None:
    dataset.append([_decision(1, 1), _decision(2, 2, 0.5)], spec=SPEC)

    done = dataset.append(
        [
            _decision(1, 1, 7.0),  # the late reward
            _decision(2, 2, 0.5),  # the same
            _decision(2, 3, 0.5),  # another action
            _decision(3, 1),
            _decision(3, 1, score=0.5),  # late, for a row of this append
            _decision(3, 1, 2.0, score=0.25),  # another score than the row before it
        ],
        producer="p",
        sequence=0,
    )

    assert _rows(dataset) == {1: (1, 7.0, None), 2: (2, 0.5, None), 3: (1, None, 0.5)}
    assert done.keys == KeyCounts(1, 2, 2, 0, 1, 3, 2)
    assert (done.num_steps, done.num_quarantined) == (1, 2)
    rejected = dataset.rejected.snapshot().read().to_pylist()
    assert [row["checks"] for row in rejected] == [["conflict"]] * 2
    assert "event 2: found action 3, expected 2" in rejected[0]["reasons"][0]
    info = dataset.commit_info(done.version)
    assert (info["num_steps"], info["num_rejected_steps"], info["num_already_present_steps"]) == (
        1, 2, 3,
    )  # fmt: skip
    # The older log again: a NULL says nothing against a value.
    again = dataset.append([_decision(1, 1), _decision(2, 2)])
    assert (again.keys.duplicates, again.num_steps) == (2, 0)


def test_replace_keeps_history_and_refuse_commits_nothing(dataset: Dataset) -> None:
    first = dataset.append([_decision(1, 1, 1.0), _decision(2, 2)], spec=SPEC)

    with pytest.raises(EpisodeInvalidError, match="event 1: found action 5, expected 1"):
        dataset.append([_decision(3), _decision(1, 5)], on_conflict="refuse")
    assert dataset.snapshot().version == first.version
    done = dataset.append([_decision(1, 5), _decision(1, 6, 2.0)], on_conflict="replace")

    assert _rows(dataset)[1] == (6, 2.0, None)
    assert done.keys.replaced == 2
    old = dataset.snapshot(first.version).table.read(["event", "action"]).to_pylist()
    assert {"event": 1, "action": 1} in old
    with pytest.raises(ConfigInvalidError, match="on_conflict"):
        dataset.append([_decision(9)], on_conflict="other")  # type: ignore[arg-type]


def test_null_keys_are_refused(dataset: Dataset) -> None:
    with pytest.raises(EpisodeInvalidError, match="found NULL in event of step 0"):
        dataset.append([_decision(1), _decision(None)], spec=SPEC)
    assert not dataset.exists()


def test_an_episode_cut_by_a_file_is_continued(dataset: Dataset) -> None:
    dataset.append([_steps([1, 2, 3], episode_id="a")], spec=SPEC)

    done = dataset.append([_steps([2, 3, 4, 5], episode_id="b", terminated=True)])

    rows = dataset.snapshot().table.read(["episode_id", "step", "env_step", "event", "terminated"])
    assert sorted(map(tuple, (row.values() for row in rows.to_pylist()))) == [
        ("a", 0, 0, 1, False),
        ("a", 1, 1, 2, False),
        ("a", 2, 2, 3, False),
        ("a", 3, 3, 4, False),
        ("a", 4, 4, 5, True),
    ]
    assert (done.keys.duplicates, done.num_steps, done.num_episodes) == (2, 2, 1)
    for events, reason in [
        ([4, 5, 6], "event 5: found terminated False, expected True"),
        ([2, 3, 9], "found other steps after step 2"),
        ([9, 1, 2], "before or between"),
    ]:
        done = dataset.append([_steps(events)])
        assert done.keys.conflicts == 3
        reasons = dataset.rejected.snapshot().read()["reasons"].to_pylist()
        assert any(reason in text for (text,) in reasons)
    # A log that was written twice into one episode.
    done = dataset.append([_steps([7, 8, 7, 8, 9])])
    assert (done.keys.duplicates, done.num_steps) == (2, 3)


def test_set_unique_checks_the_rows_first(lake: Lake, dataset: Dataset) -> None:
    plain = DatasetSpec(Box((1,)), Discrete(10), rewards_optional=True)
    dataset.append([_decision(1), _decision(2), _decision(2, 1)], spec=plain)
    with pytest.raises(SchemaMismatchError, match="such as event 2, expected each once"):
        dataset.set_unique(["event"])
    for name, names in (("unique", ["nosuch"]), ("unique", ["reward"]), ("unique", [])):
        with pytest.raises(ConfigInvalidError) as caught:
            dataset.set_unique(names)
        assert caught.value.parameter == name

    other = lake.dataset("other")
    other.append([_decision(1), _decision(2)], spec=plain)
    assert other.set_unique(["event"]) == UniqueKeys(("event",))
    assert other.append([_decision(2), _decision(3)]).keys.duplicates == 1
    assert other.set_unique(["event"], late=["score"]).late == ("score",)
    assert other.set_unique(["event"]).late == ("score",)
    with pytest.raises(ConfigInvalidError, match="unique already"):
        other.set_unique(["score"])
    assert lake.dataset("other").spec.unique == UniqueKeys(("event",), ("score",))


@pytest.mark.parametrize("bits", [64, 3])
def test_against_a_model(lake: Lake, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """With hashes of 3 bits nearly every key has the hash of another."""
    mask = np.uint64((1 << bits) - 1)

    def narrow(columns: Any) -> Any:
        return hash_keys(columns) & mask

    for module in ("lake.unique_keys", "storage.table.key_index"):
        monkeypatch.setattr(f"replaylake.datastore.{module}.hash_keys", narrow)
    monkeypatch.setattr(key_index, "_MAX_HELD_SHARDS", 2)
    rng = np.random.default_rng(bits)
    model: dict[int, list[Any]] = {}
    for number in range(12):
        # Another handle each time: it knows nothing but what is stored.
        dataset = _reopen(lake).dataset("m")
        counts = [0, 0, 0]
        episodes = []
        for _ in range(int(rng.integers(1, 12))):
            event, action = int(rng.integers(20)), int(rng.integers(8) == 0)
            reward, score = (float(v) if (v := rng.integers(4)) < 2 else None for _ in "ab")
            episodes.append(
                _decision(event, action, NAN if reward is None else reward, score=score)
            )
            known = model.get(event)
            own = [action, reward, score]
            if known is None:
                model[event] = own
            elif known[0] != action or any(
                None not in pair and pair[0] != pair[1]
                for pair in zip(known[1:], own[1:], strict=True)
            ):
                counts[2] += 1
            elif any(a is None and b is not None for a, b in zip(known, own, strict=True)):
                counts[1] += 1
                model[event] = [b if a is None else a for a, b in zip(known, own, strict=True)]
            else:
                counts[0] += 1
        done = dataset.append(episodes, spec=None if number else SPEC)
        keys = done.keys
        assert [keys.duplicates, keys.late_values, keys.conflicts] == counts
        assert _rows(dataset) == {event: tuple(row) for event, row in model.items()}


def test_of_two_writers_the_second_sees_the_row_of_the_first(
    lake: Lake, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset.append([_decision(1)], spec=SPEC)
    second = _reopen(lake).dataset("d")
    write = second.table.write
    others = [[_decision(2, 1)], [_decision(1, 0, 5.0)]]

    def write_later(*arguments: Any, **named: Any) -> Any:
        written = write(*arguments, **named)
        if others:
            dataset.append(others.pop(0))
        return written

    monkeypatch.setattr(second.table, "write", write_later)
    done = second.append([_decision(1, 0, 4.0), _decision(2, 1), _decision(3)])

    assert _rows(dataset) == {1: (0, 5.0, None), 2: (1, None, None), 3: (0, None, None)}
    assert (done.keys.duplicates, done.keys.conflicts, done.num_steps) == (1, 1, 1)


def test_written_shards_and_an_index_that_is_lost_or_damaged(
    lake: Lake, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "_MAX_HELD_SHARDS", 1)
    dataset.append([_decision(1), _decision(2)], spec=SPEC)
    parts = [dataset.write([_decision(2), _decision(3)]), dataset.write([_decision(3)])]
    done = dataset.commit(parts, producer="w", sequence=0)
    assert (done.keys.duplicates, done.num_steps) == (2, 1)
    again = dataset.commit(parts, producer="w", sequence=0)
    assert again.already_present

    folder = dataset.path / key_index.FOLDER
    files = sorted(folder.iterdir())
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[-13] ^= 1  # in the hashes or rows
        path.write_bytes(data)
    assert _reopen(lake).dataset("d").append([_decision(1), _decision(3)]).keys.duplicates == 2
    for path in folder.iterdir():
        path.unlink()
    assert _reopen(lake).dataset("d").append([_decision(1), _decision(3)]).keys.duplicates == 2


def test_keys_of_several_columns_and_types(lake: Lake) -> None:
    dataset = lake.dataset("t")
    names = ("text", "number", "when")
    spec = DatasetSpec(Box((1,)), Discrete(10), unique=UniqueKeys(names))

    def decision(text: str, number: float, when: int) -> Episode:
        extras = {
            "text": pa.array([text]).dictionary_encode(),
            "number": pa.array([number], pa.float64()),
            "when": pa.array([when], pa.timestamp("us", tz="UTC")),
        }
        return _steps([1], rewards=[1.0], extras=extras, terminated=True)

    keys = [("ab", 0.0, 1), ("a", 0.0, 1), ("", 0.0, 1), ("ab", NAN, 1), ("ab", 0.0, 2)]
    dataset.append([decision(*key) for key in keys], spec=spec)
    again = [("ab", -0.0, 1), ("ab", NAN, 1), ("b", 0.0, 1)]
    assert dataset.append([decision(*key) for key in again]).keys.duplicates == 2


def test_hashes_are_of_values() -> None:
    def same(one: pa.Array, other: pa.Array) -> bool:
        return bool((hash_keys([one]) == hash_keys([other])).all())

    assert same(pa.array([1, -2], pa.int32()), pa.array([1, -2], pa.int64()))
    assert not same(pa.array([1]), pa.array(["1"]))
    texts = pa.array(["", "a", "12345678", "1234567890" * 3, "ä", "a\0"])
    assert same(texts, texts.dictionary_encode())
    assert same(pa.concat_arrays([texts, texts]).slice(3, 6), texts.take([3, 4, 5, 0, 1, 2]))
    assert len(np.unique(hash_keys([texts]))) == 6
    pairs = [hash_keys([pa.array([a]), pa.array([b])])[0] for a, b in (("ab", "c"), ("a", "bc"))]
    assert pairs[0] != pairs[1]


def test_an_append_under_way_keeps_to_a_key_set_meanwhile(
    lake: Lake, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = DatasetSpec(Box((1,)), Discrete(10), rewards_optional=True)
    dataset.append([_decision(1)], spec=plain)
    written = dataset.write([_decision(1), _decision(3)])
    other = _reopen(lake).dataset("d")
    write = dataset.table.write

    def write_later(*arguments: Any, **named: Any) -> Any:
        done = write(*arguments, **named)
        other.set_unique(["event"])
        return done

    monkeypatch.setattr(dataset.table, "write", write_later)

    assert dataset.append([_decision(1), _decision(2)]).keys.duplicates == 1
    assert dataset.commit([written], producer="w", sequence=0).keys.duplicates == 1
    assert sorted(_rows(dataset)) == [1, 2, 3]


def test_labels_cannot_write_a_column_of_the_key(lake: Lake, dataset: Dataset) -> None:
    dataset.append([_decision(1), _decision(2)], spec=SPEC)
    labels = pa.table({"episode_id": ["e"], "event": pa.array([1], pa.int64())})
    with pytest.raises(ConfigInvalidError, match="event, which is part of the dataset's unique"):
        annotate(lake, "d", labels, on="episode_id", add="event")


def test_steps_whose_number_is_in_the_key_are_not_numbered_anew(dataset: Dataset) -> None:
    spec = DatasetSpec(
        Box((1,)), Discrete(10), unique=UniqueKeys(("source_episode_id", "env_step"))
    )

    def part(name: str, steps: list[int], first: int = 0) -> Episode:
        ticks = np.array(steps, np.int32)
        return Episode(
            name,
            np.array([[float(step)] for step in steps], np.float32),
            np.zeros(len(steps), np.int64),
            np.ones(len(steps)),
            first_step=first,
            env_steps=ticks,
            source_episode_id="run",
        )

    dataset.append([part("a", [5, 6, 7])], spec=spec)
    done = dataset.append([part("b", [6, 7, 8], first=6)])
    assert (done.num_steps, done.keys.conflicts) == (0, 3)
    rows = dataset.snapshot().table.read(["env_step"])["env_step"].to_pylist()
    assert sorted(rows) == [5, 6, 7]


def test_a_flipped_bit_in_the_header_of_an_index(lake: Lake, dataset: Dataset) -> None:
    """Another number of rows of a shard would move the rows of all later ones, unnoticed."""
    for first in range(0, 9, 3):
        dataset.append([_decision(event) for event in range(first, first + 3)], spec=SPEC)
    index = dataset.key_index(SPEC.unique)
    index.delete_all()
    index = dataset.new_key_index(SPEC.unique)
    snapshot = dataset.table.snapshot()
    key_index._MAX_HELD_SHARDS, before = 3, key_index._MAX_HELD_SHARDS
    try:
        index.find(snapshot, hash_keys([pa.chunked_array([pa.array([1, 4], pa.int64())])]))
    finally:
        key_index._MAX_HELD_SHARDS = before
    files = sorted(lake.path.glob("d/_keys/*.keys"))
    assert files
    needles = hash_keys([pa.chunked_array([pa.array(range(9), pa.int64())])])
    expected = dataset.new_key_index(SPEC.unique).find(snapshot, np.sort(needles))
    for path in files:
        whole = path.read_bytes()
        for place in range(0, 8 * (16 + int.from_bytes(whole[8:16], "little")), 11):
            data = bytearray(whole)
            data[place // 8] ^= 1 << place % 8
            path.write_bytes(data)
            found = dataset.new_key_index(SPEC.unique).find(snapshot, np.sort(needles))
            assert sorted(zip(found.query, found.file, found.row, strict=True)) == sorted(
                zip(expected.query, expected.file, expected.row, strict=True)
            ), place
        path.write_bytes(whole)
