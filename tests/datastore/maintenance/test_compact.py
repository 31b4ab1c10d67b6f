from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import polars
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    ShardCorruptError,
    StorageError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance import compact as compact_module
from replaylake.datastore.maintenance.compact import compact, plan_groups
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.query.table_files import fingerprint
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table, TableSnapshot

Make = Callable[..., Episode]
HOUR_MS = 3_600_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def later() -> int:
    """A time at which no episode counts as open any more."""
    return now_ms() + 2 * HOUR_MS


def rows_of(snapshot: TableSnapshot) -> Counter[str]:
    return Counter(map(repr, snapshot.read().to_pylist()))


def keys_of(snapshot: TableSnapshot) -> list[tuple[str, int]]:
    rows = snapshot.read(["episode_id", "step"]).to_pylist()
    return [(row["episode_id"], row["step"]) for row in rows]


@pytest.fixture
def many(lake: Lake, make_episode: Make) -> Lake:
    """Ten whole episodes, a commit each."""
    for number in range(10):
        lake.dataset("d").append([make_episode(f"e{number}", terminated=True)])
    return lake


def test_small_shards_become_one_with_the_same_rows(many: Lake) -> None:
    table = many.dataset("d").table
    before = table.snapshot()
    (done,) = compact(many, "d")
    after = table.snapshot()
    assert (done.shards_before, done.shards_after, done.num_rows) == (10, 1, 30)
    assert (done.num_rewritten, done.num_commits, done.num_conflicts) == (10, 1, 0)
    assert done.bytes_after == after.files[0].size_bytes
    assert keys_of(after) == keys_of(before)
    assert rows_of(after) == rows_of(before)
    assert after.files[0].since == 1


def test_the_commit_says_that_no_row_changed(many: Lake) -> None:
    compact(many, "d")
    log = many.dataset("d").table.log
    change = log.read_change(11)
    assert (len(change.added), len(change.removed), len(change.moved)) == (1, 10, 11)
    assert not change.changes_rows
    info = log.info(11)
    assert info["operation"] == "COMPACT"
    assert info["producer"].startswith("compact/")
    assert info["sequence"] == 0


def test_compacting_again_changes_nothing(many: Lake) -> None:
    compact(many, "d")
    (again,) = compact(many, "d")
    assert (again.num_commits, again.version) == (0, 11)


def test_old_versions_still_read_their_rows(many: Lake) -> None:
    table = many.dataset("d").table
    before = [rows_of(table.snapshot(version)) for version in range(11)]
    compact(many, "d")
    assert [rows_of(table.snapshot(version)) for version in range(11)] == before


def test_delta_rs_and_polars_see_the_same_rows(many: Lake, lake: Lake) -> None:
    expected = sorted(keys_of(many.dataset("d").table.snapshot()))
    compact(many, "d")
    folder = str(lake.path / "d")
    theirs = deltalake.DeltaTable(folder).to_pyarrow_table(columns=["episode_id", "step"])
    assert sorted((row["episode_id"], row["step"]) for row in theirs.to_pylist()) == expected
    frame = polars.read_delta(folder, columns=["episode_id", "step"], use_pyarrow=True)
    assert sorted(frame.iter_rows()) == expected


def test_pieces_come_side_by_side_and_episodes_by_first_commit(
    lake: Lake, make_episode: Make
) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("b", 2)])
    dataset.append([make_episode("a", 2), make_episode("c", 1, terminated=True)])
    # Out of order: what came last is the middle of b.
    dataset.append([make_episode("b", 2, first_step=4, terminated=True)])
    dataset.append([make_episode("a", 1, first_step=2, truncated=True)])
    dataset.append([make_episode("b", 2, first_step=2)])
    compact(lake, "d")
    expected = [("b", step) for step in range(6)] + [("a", step) for step in range(3)] + [("c", 0)]
    assert keys_of(dataset.table.snapshot()) == expected


def test_agents_of_an_episode_stay_apart(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    for first in (0, 2):
        for agent in ("x", "y"):
            end = {"terminated": True} if first else {}
            dataset.append([make_episode("g", 2, agent_id=agent, first_step=first, **end)])
    compact(lake, "d")
    rows = dataset.table.snapshot().read(["agent_id", "step"]).to_pylist()
    assert [(row["agent_id"], row["step"]) for row in rows] == [
        (agent, step) for agent in "xy" for step in range(4)
    ]


def test_shards_with_open_episodes_stay_until_those_end(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", terminated=True)])
    dataset.append([make_episode("b", terminated=True)])
    dataset.append([make_episode("open")])
    dataset.append([make_episode("c", terminated=True)])
    dataset.append([make_episode("d", terminated=True)])
    kept = dataset.table.snapshot().files[2]
    (done,) = compact(lake, "d")
    assert done.shards_after == 3
    files = dataset.table.snapshot().files
    assert files[1] == kept
    assert [entry.since for entry in files] == [1, 3, 4]
    dataset.append([make_episode("open", first_step=3, terminated=True)])
    (done,) = compact(lake, "d")
    assert done.shards_after == 1
    keys = keys_of(dataset.table.snapshot())
    assert keys[6:12] == [("open", step) for step in range(6)]


def test_an_old_piece_of_an_episode_that_goes_on_stays(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("open")])
    dataset.append([make_episode("a", terminated=True)])
    old = dataset.table.snapshot().files
    time.sleep(0.02)
    looked = now_ms()
    time.sleep(0.02)
    dataset.append([make_episode("open", first_step=3)])
    # With a limit that only the last piece is younger than, its first one is held, too.
    (done,) = compact(lake, "d", open_s=0.01, now_ms=looked + 10)
    assert done.num_commits == 0
    assert dataset.table.snapshot().files[:2] == old


def test_an_abandoned_episode_is_compacted(lake: Lake, make_episode: Make) -> None:
    for name in ("a", "b"):
        lake.dataset("d").append([make_episode(name)])
    assert compact(lake, "d")[0].num_commits == 0
    assert compact(lake, "d", now_ms=later())[0].shards_after == 1


def test_a_column_that_came_later(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", terminated=True)])
    score = {"score": np.array([0.5, float("nan"), 2.5])}
    dataset.append([make_episode("b", terminated=True, extras=score)])
    before = rows_of(dataset.table.snapshot())
    compact(lake, "d")
    after = dataset.table.snapshot()
    assert len(after.files) == 1
    assert rows_of(after) == before
    assert after.read(["score"])["score"].to_pylist()[:3] == [None] * 3


def test_nested_and_repeated_values_keep_their_bits(lake: Lake, make_episode: Make) -> None:
    kind = pa.struct(
        [
            pa.field("tool", pa.dictionary(pa.int32(), pa.string())),
            pa.field("scores", pa.list_(pa.field("element", pa.float32()))),
        ]
    )
    for number in range(3):
        info = [
            {"tool": f"t{number}", "scores": [1.0, -0.0]},
            None,
            {"tool": None, "scores": [float("nan")] * number},
        ]
        extras = {"info": pa.array(info, kind), "blob": pa.array([b"\0", None, b"x" * number])}
        episode = make_episode(f"e{number}", terminated=True, extras=extras)
        lake.dataset("d").append([episode])
    before = rows_of(lake.dataset("d").table.snapshot())
    compact(lake, "d")
    after = lake.dataset("d").table.snapshot()
    assert len(after.files) == 1
    assert rows_of(after) == before


def test_decisions_and_rewards_are_compacted_in_their_order(many: Lake) -> None:
    schema = pa.schema([pa.field("decision_id", pa.string()), pa.field("reward", pa.float64())])
    rewards = many.dataset("d").rewards
    rewards.create(schema)
    for number in range(5):
        rows = pa.table(
            {"decision_id": [f"i{9 - number}"], "reward": [float(number)]}, schema=schema
        )
        rewards.append(rows, producer="p", sequence=number)
    steps, of_rewards = compact(many, "d")
    assert (steps.table, steps.shards_after) == ("d", 1)
    assert (of_rewards.table, of_rewards.shards_after) == ("d/_rewards", 1)
    assert rewards.snapshot().read()["reward"].to_pylist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_damaged_shard_is_not_copied(many: Lake) -> None:
    table = many.dataset("d").table
    path = table.snapshot().paths()[3]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardCorruptError, match="expected"):
        compact(many, "d")
    assert table.snapshot().version == 10


def test_rows_that_differ_are_not_committed(many: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy with one row twice and another missing has as many rows, and another fingerprint."""
    table = many.dataset("d").table
    real = compact_module._cluster_episodes

    def wrong(tables: list[pa.Table]) -> pa.Table:
        rows = real(tables)
        return pa.concat_tables([rows.slice(0, 1), rows.slice(0, rows.num_rows - 1)])

    monkeypatch.setattr(compact_module, "_cluster_episodes", wrong)
    with pytest.raises(StorageError, match="Nothing was committed"):
        compact(many, "d")
    assert table.snapshot().version == 10


def test_the_fingerprint_is_of_the_multiset(lake: Lake, make_episode: Make) -> None:
    for name in ("a", "b"):
        lake.dataset("d").append([make_episode(name)])
    snapshot = lake.dataset("d").table.snapshot()
    one, two = snapshot.files
    assert fingerprint(snapshot, [one, two]) == fingerprint(snapshot, [two, one])
    assert fingerprint(snapshot, [one, two]) != fingerprint(snapshot, [one, one])
    assert fingerprint(snapshot, [one, one]) != (6, 0)


def test_another_compactor_was_first(many: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one commits while ours has written and not yet committed."""
    real, calls = Table.commit, []

    def commit(self: Table, *arguments: Any, **options: Any) -> Any:
        if options.get("operation") == "COMPACT" and not calls:
            calls.append(1)
            compact(open_lake(many.path), "d")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Table, "commit", commit)
    before = rows_of(many.dataset("d").table.snapshot())
    (done,) = compact(many, "d")
    assert (done.num_conflicts, done.num_commits, done.shards_after) == (1, 0, 1)
    assert rows_of(many.dataset("d").table.snapshot()) == before


def test_a_writer_may_append_meanwhile(
    many: Lake, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Table.commit, []

    def commit(self: Table, *arguments: Any, **options: Any) -> Any:
        if options.get("operation") == "COMPACT" and not calls:
            calls.append(1)
            score = {"score": np.arange(3.0)}
            open_lake(many.path).dataset("d").append(
                [make_episode("new", terminated=True, extras=score)]
            )
        return real(self, *arguments, **options)

    monkeypatch.setattr(Table, "commit", commit)
    (done,) = compact(many, "d")
    assert (done.num_conflicts, done.shards_after) == (0, 2)
    assert len(keys_of(many.dataset("d").table.snapshot())) == 33


def test_what_comes_meanwhile_is_left_to_the_next(many: Lake, make_episode: Make) -> None:
    """Beside a fast writer, it would otherwise never end."""
    dataset = many.dataset("d")
    calls = []

    def append(done: int, total: int) -> None:
        calls.append(done)
        assert len(calls) < 5
        for number in range(3):
            dataset.append([make_episode(f"more{done}.{number}", terminated=True)])

    (done,) = compact(many, "d", on_progress=append)
    assert (done.num_commits, done.num_rewritten) == (1, 10)
    assert done.shards_after == len(dataset.snapshot().files) == 4
    assert compact(many, "d")[0].shards_after == 1


def test_it_ends_beside_one_that_always_replaces_its_shards_first(
    many: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, conflicts = Table.commit, []

    def commit(self: Table, *arguments: Any, **options: Any) -> Any:
        if options.get("operation") == "COMPACT" and len(conflicts) < 50:
            conflicts.append(1)
            rows = pa.table({"episode_id": ["e0"], f"judge{len(conflicts)}": [1.0]})
            annotate(open_lake(many.path), "d", rows, on="episode_id", add=rows.column_names[1:])
        return real(self, *arguments, **options)

    monkeypatch.setattr(Table, "commit", commit)
    (done,) = compact(many, "d")
    assert (done.num_commits, done.num_conflicts) == (0, 10)
    assert len(keys_of(many.dataset("d").table.snapshot())) == 30


def test_a_commit_replaces_a_thousand_shards_at_most(tmp_path: Path) -> None:
    given = version_of(tmp_path, *[0.01] * 2500)
    found = plan_groups(given, target_bytes=128 * MB, written_after_ms=0)
    assert [len(group) for group in found] == [1000, 1000, 500]


@pytest.mark.parametrize("size", [1, (64 << 20) - 1, (256 << 20) + 1])
def test_a_size_that_shards_should_not_have_is_refused(many: Lake, size: int) -> None:
    with pytest.raises(ConfigInvalidError, match="target_bytes: found"):
        compact(many, "d", target_bytes=size)


def test_a_dataset_that_is_not_there(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match="nope"):
        compact(lake, "nope")


def test_progress_reaches_the_end(many: Lake) -> None:
    said: list[tuple[int, int]] = []
    compact(many, "d", on_progress=lambda done, total: said.append((done, total)))
    assert said == [(10, 10)]


_commits = st.lists(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 3), st.sampled_from(["", "terminated"])),
        min_size=1,
        max_size=3,
        unique_by=lambda piece: piece[0],
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@given(commits=_commits)
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_history_keeps_its_rows_and_its_age(
    commits: list[list[tuple[int, int, str]]], tmp_path_factory: Any, make_episode: Make
) -> None:
    path: Path = tmp_path_factory.mktemp("lake")
    dataset = open_lake(path, create=True).dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    begun: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    for commit in commits:
        episodes = []
        for number, num_steps, end in commit:
            name = f"e{number}.{ended[number]}"
            flags = {end: True} if end else {}
            episodes.append(make_episode(name, num_steps, first_step=begun[number], **flags))
            begun[number] = 0 if end else begun[number] + num_steps
            ended[number] += bool(end)
        dataset.append(episodes)
    table = dataset.table
    before = table.snapshot()
    first_seen = list(dict.fromkeys(episode for episode, _ in keys_of(before)))
    compact(open_lake(path), "d", now_ms=later())
    after = table.snapshot()
    assert rows_of(after) == rows_of(before)
    assert rows_of(table.snapshot(before.version)) == rows_of(before)
    keys = keys_of(after)
    assert list(dict.fromkeys(episode for episode, _ in keys)) == first_seen
    assert keys == sorted(keys, key=lambda key: (first_seen.index(key[0]), key[1]))
    assert [entry.since for entry in after.files] == [1]
    assert compact(open_lake(path), "d", now_ms=later())[0].num_commits == 0


MB = 1 << 20
NUMBERS = pa.schema([pa.field("x", pa.int64(), metadata={b"PARQUET:field_id": b"1"})])


def version_of(tmp_path: Path, *sizes: float, rows: int = 10) -> TableSnapshot:
    """A version of shards of these sizes (MB), oldest first, of which no file exists."""
    files = tuple(
        FileEntry(f"shards/{number}", int(size * MB), rows, "", since=number)
        for number, size in enumerate(sizes)
    )
    return TableSnapshot(0, NUMBERS, files, {}, LocalStorage(tmp_path), "t")


def sizes(found: list[tuple[FileEntry, ...]]) -> list[list[float]]:
    return [[entry.size_bytes / MB for entry in group] for group in found]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 1, 1], [[1, 1, 1]]),
        # A large one parts its neighbours: what replaces them would pass it in age.
        ([1, 1, 60, 1, 1], [[1, 1], [1, 1]]),
        ([1, 60, 1], []),
        # Full groups are closed.
        ([40, 40, 40, 40, 40], [[40, 40, 40], [40, 40]]),
        # Little is not worth writing much again, but what is little goes together.
        ([40, 1], []),
        ([40, 1, 1], [[1, 1]]),
        ([40, 10, 10], [[40, 10, 10]]),
        ([1, 40, 1, 2], [[1, 2]]),
        ([3, 0.25], [[3, 0.25]]),
    ],
)
def test_which_go_together(tmp_path: Path, given: list[float], expected: list[list[float]]) -> None:
    found = plan_groups(version_of(tmp_path, *given), target_bytes=128 * MB, written_after_ms=0)
    assert sizes(found) == expected


def test_rows_count_as_well(tmp_path: Path) -> None:
    many = version_of(tmp_path, 1, 1, 1, 1, rows=400_000)
    found = plan_groups(many, target_bytes=128 * MB, written_after_ms=0)
    assert sizes(found) == [[1, 1], [1, 1]]
    full = version_of(tmp_path, 1, 1, rows=524_288)
    assert plan_groups(full, target_bytes=128 * MB, written_after_ms=0) == []


def test_what_decodes_to_much_counts_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that are all black are small at rest, and large for whoever reads them."""
    monkeypatch.setattr(compact_module, "MAX_DECODED_BYTES", 256 << 10)
    table = Table(LocalStorage(tmp_path), "t")
    table.create(pa.schema([pa.field("frame", pa.large_binary())]))
    for sequence, size in enumerate([60, 60, 60, 120, 60]):
        rows = pa.table({"frame": pa.array([bytes(size << 10)], pa.large_binary())})
        table.append(rows, producer="p", sequence=sequence)
    found = table.snapshot()
    assert sum(entry.size_bytes for entry in found.files) < 60 << 10
    assert plan_groups(found, target_bytes=128 * MB, written_after_ms=0) == [found.files[:3]]
