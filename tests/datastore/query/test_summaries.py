"""Summaries: `episodes` and `games` are the same with them, without, and with a part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query import summaries

Make = Callable[..., Episode]
FOLDER = "_derived/episodes"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test begins with nothing in memory."""
    summaries._FILE.forget()
    yield
    summaries._FILE.forget()


@pytest.fixture
def dataset(lake: Lake, make_episode: Make) -> Dataset:
    """Two commits: `a` in two pieces, `b` and `c` whole; 60 steps."""
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", 20), make_episode("b", 10, terminated=True)])
    dataset.append([make_episode("a", 20, first_step=20), make_episode("c", 10, truncated=True)])
    return dataset


def files(dataset: Dataset) -> list[Path]:
    return sorted((dataset.path / FOLDER).glob("*"))


def rows(snapshot: Snapshot, view: str) -> list[dict[str, Any]]:
    order = "episode_id, agent_id" if view == "episodes" else "episode_id"
    found = snapshot.sql(f"SELECT * FROM {view} ORDER BY {order}")
    listed: list[dict[str, Any]] = found.to_pylist()
    return [{"types": str(found.schema)}, *listed]


def forget(dataset: Dataset) -> None:
    summaries.delete_summaries(dataset.table.storage, dataset.name)


def covered(snapshot: Snapshot) -> int:
    known = summaries.read_coverage(snapshot.table)
    return 0 if known is None else len(snapshot.files) - len(known.rest)


# --- equal to what the steps say ---------------------------------------------------------------

piece = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "b", "c"]),
        "agent": st.sampled_from(["", "x"]),
        "num_steps": st.integers(1, 12),
        # What sums exactly, so that the order of the additions is no matter.
        "rewards": st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=12, max_size=12),
        "policy": st.sampled_from([None, "p", "q"]),
        "version": st.sampled_from([None, 1, 2, 9]),
        "time": st.sampled_from([None, 0, 7_000_000]),
        "end": st.sampled_from(["open", "terminated", "truncated"]),
        "source": st.booleans(),
    }
)


def written(pieces: list[dict[str, Any]], make: Make, starts: dict[Any, int]) -> list[Episode]:
    """Return episodes whose pieces of one name and agent follow each other in time."""
    episodes = []
    for drawn in pieces:
        key = drawn["name"], drawn["agent"]
        if key in {(e.episode_id, e.agent_id) for e in episodes}:
            continue  # a commit has at most one piece of each
        num, first = drawn["num_steps"], starts.get(key, 0)
        starts[key] = first + num + 1  # a step is missing between pieces
        known = drawn["policy"] is not None
        episodes.append(
            make(
                drawn["name"],
                num,
                agent_id=drawn["agent"],
                first_step=first,
                rewards=np.array(drawn["rewards"][:num]),
                terminated=drawn["end"] == "terminated",
                truncated=drawn["end"] == "truncated",
                policies=[drawn["policy"]] * num if known else None,
                policy_versions=(
                    [drawn["version"]] * num if known and drawn["version"] is not None else None
                ),
                timestamps=None if drawn["time"] is None else np.arange(num) + drawn["time"],
                source_episode_id=drawn["name"] * 2 if drawn["source"] else None,
            )
        )
    return episodes


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(commits=st.lists(st.lists(piece, min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_same_with_and_without(
    commits: list[list[dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
    make_episode: Make,
) -> None:
    dataset = open_lake(tmp_path_factory.mktemp("lake"), create=True).dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    starts: dict[Any, int] = {}
    for commit in commits:
        dataset.append(written(commit, make_episode, starts))
    newest, first = dataset.snapshot(), dataset.snapshot(1)
    direct = {view: rows(newest, view) for view in ("episodes", "games")}
    direct_first = rows(first, "episodes")
    assert not files(dataset), "so little is not summarized"

    # The first shard alone, the others read as steps.
    summaries._extend(first.table, None, first.files)
    assert covered(newest) == 1
    assert {view: rows(newest, view) for view in direct} == direct
    # All of them, also for a version that has but one.
    if len(newest.files) > 1:
        known = summaries._FILE.load(dataset.table.storage, "d")
        summaries._extend(newest.table, known, newest.files[1:])
    assert covered(newest) == len(newest.files)
    assert {view: rows(newest, view) for view in direct} == direct
    assert rows(first, "episodes") == direct_first


def test_sums_of_floats_are_stable(lake: Lake, make_episode: Make) -> None:
    dataset, rng = lake.dataset("d"), np.random.default_rng(0)
    for start in (40, 0, 20):  # not in the order of the steps
        dataset.append([make_episode("e", 20, first_step=start, rewards=rng.standard_normal(20))])
    snapshot = dataset.snapshot()
    (direct,) = snapshot.sql('SELECT "return" AS r FROM episodes')["r"].to_pylist()
    assert summaries.refresh(snapshot.table)
    found = {snapshot.sql('SELECT "return" AS r FROM episodes')["r"][0].as_py() for _ in range(20)}
    assert len(found) == 1
    assert found.pop() == pytest.approx(direct, rel=1e-12)


@pytest.mark.slow
def test_sql_from_others_gets_it_too(lake: Lake, dataset: Dataset) -> None:
    query = "SELECT * FROM d.episodes e JOIN d.games g USING (episode_id) ORDER BY ALL"
    direct = lake.sql_untrusted(query).rows.to_pylist()
    assert summaries.refresh(dataset.snapshot().table)
    assert lake.sql_untrusted(query).rows.to_pylist() == direct
    query = "SELECT discounted_return(reward, step, 1.0) AS r FROM d.steps WHERE episode_id = 'b'"
    assert lake.sql_untrusted(query).rows.to_pylist() == [{"r": 55.0}]


# --- when it is written, and when not ----------------------------------------------------------


def test_a_reader_writes_what_soon_pays(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, make_episode: Make
) -> None:
    monkeypatch.setattr(summaries, "_WRITE_US", 0.0)
    snapshot = dataset.snapshot()
    before = rows(snapshot, "episodes")
    (file,) = files(dataset)
    assert rows(snapshot, "episodes") == before
    assert files(dataset) == [file], "there was nothing to add"
    summaries._FILE.forget()
    assert covered(snapshot) == 2, "it was read back"

    dataset.append([make_episode("z", 30)])
    assert len(rows(dataset.snapshot(), "episodes")) == len(before) + 1
    assert files(dataset) != [file]
    assert len(files(dataset)) == 1, "the older one went"


def test_it_is_made_in_groups_of_shards(
    dataset: Dataset, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset.append([make_episode("z", 30)])
    snapshot = dataset.snapshot()
    direct = rows(snapshot, "episodes")
    monkeypatch.setattr(summaries, "_WRITE_US", 0.0)
    monkeypatch.setattr(summaries, "_GROUP_STEPS", 50)
    monkeypatch.setattr(summaries, "_MAX_CHUNKS", 1)
    assert summaries.needs_refresh(snapshot.table)
    seen: list[tuple[int, int]] = []

    def stop(num: int, total: int) -> None:
        seen.append((num, total))
        if len(seen) == 2:
            raise KeyboardInterrupt

    # Shards of 30, 30 and 30 steps, of which two are too many at once.
    with pytest.raises(KeyboardInterrupt):
        summaries.refresh(snapshot.table, stop)
    assert covered(dataset.snapshot(2)) == 2, "what was made is kept"
    assert summaries.refresh(snapshot.table, stop)
    assert seen == [(30, 90), (60, 90), (90, 90)]
    assert not summaries.needs_refresh(snapshot.table)
    assert rows(snapshot, "episodes") == direct
    summaries._FILE.forget()
    assert rows(snapshot, "episodes") == direct


def test_a_log_of_single_steps_has_none(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(f"e{number}", 1) for number in range(50)])
    assert not summaries.refresh(dataset.snapshot().table)
    assert files(dataset) == []


def test_steps_and_little_data_write_none(dataset: Dataset) -> None:
    dataset.snapshot().sql("SELECT count(*) FROM steps")
    dataset.snapshot().sql("SELECT count(*) FROM episodes")
    assert not (dataset.path / "_derived").exists()


def test_training_selects_from_the_steps(dataset: Dataset) -> None:
    """What is trained on never depends on a derived file, even a wrong one."""
    snapshot = dataset.snapshot()
    summary = summaries._extend(snapshot.table, None, snapshot.files)
    wrong = summary.pieces.set_column(
        summary.pieces.column_names.index("return"), "return", [[1e9] * summary.pieces.num_rows]
    )
    is_written = summaries._FILE.save(dataset.table.storage, "d", replace(summary, pieces=wrong))
    summaries._FILE.forget()
    assert snapshot.sql('SELECT max("return") AS r FROM episodes')["r"].to_pylist()[0] >= 1e9
    assert is_written
    assert snapshot.replay('"return" < 1e6').num_episodes == 3


# --- it may be deleted, damaged, out of reach, or written twice ----------------------------------


def test_it_may_be_deleted_or_damaged(dataset: Dataset) -> None:
    snapshot = dataset.snapshot()
    direct = rows(snapshot, "episodes")
    for harm in ("delete", "truncate", "flip", "rename", "garbage"):
        forget(dataset)
        assert summaries.refresh(snapshot.table)
        (file,) = files(dataset)
        data = bytearray(file.read_bytes())
        if harm == "delete":
            file.unlink()
        elif harm == "rename":
            file.rename(file.with_name("01m-other.parquet"))
        elif harm == "garbage":
            (file.parent / "zz.parquet").write_bytes(b"PAR1")
        else:
            data[len(data) // 2] ^= 1
            file.write_bytes(data[:-9] if harm == "truncate" else data)
        summaries._FILE.forget()
        assert covered(snapshot) == (2 if harm == "garbage" else 0), harm
        assert rows(snapshot, "episodes") == direct, harm


def test_a_lake_that_may_only_be_read(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = rows(dataset.snapshot(), "episodes")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(dataset.table.storage), "put", refuse)
    monkeypatch.setattr(summaries, "_WRITE_US", 0.0)
    assert rows(dataset.snapshot(), "episodes") == direct
    assert covered(dataset.snapshot()) == 2, "kept in memory"
    assert files(dataset) == []


@pytest.mark.slow
def test_several_at_once(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = rows(dataset.snapshot(), "episodes")
    monkeypatch.setattr(summaries, "_WRITE_US", 0.0)

    def read(_: int) -> list[dict[str, Any]]:
        summaries._FILE.forget()
        return rows(open_lake(dataset.path.parent).dataset("d").snapshot(), "episodes")

    with ThreadPoolExecutor(6) as pool:
        assert all(found == direct for found in pool.map(read, range(24)))
    assert covered(dataset.snapshot()) == 2


def test_compaction_leaves_it_right(dataset: Dataset) -> None:
    before = dataset.snapshot()
    direct = rows(before, "episodes")
    assert summaries.refresh(before.table)
    table = dataset.table
    table.commit(
        [table.write(before.table.read(), since=1)],
        producer="compact/x",
        sequence=0,
        removed=[entry.path for entry in before.files],
        data_change=False,
    )
    after = dataset.snapshot()
    assert covered(after) == 0
    assert rows(after, "episodes") == direct
    assert summaries.refresh(after.table)
    # Pieces of both are in the file now, and each version takes its own.
    assert (covered(after), covered(before)) == (1, 2)
    assert rows(after, "episodes") == rows(before, "episodes") == direct


def test_nothing_of_a_shard_that_was_purged_is_written_again(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = dataset.snapshot()
    storage = dataset.table.storage
    summary = summaries._extend(snapshot.table, None, snapshot.files)
    forget(dataset)
    assert files(dataset) == []
    snapshot.table.paths()[0].unlink()
    summaries._FILE.save(storage, "d", summary)
    written = summaries._FILE.load(storage, "d")
    assert written is not None
    assert written.shards == (snapshot.files[1].path,)
    assert written.pieces["episode_id"].to_pylist() == ["c", "a"]
    assert written.pieces["shard"].to_pylist() == [0, 0]

    # The shard goes while the summary is being written: the writer takes it back.
    forget(dataset)
    put = type(storage).put

    def purge_then_put(self: Any, path: str, data: Any) -> None:
        snapshot.table.paths()[1].unlink()
        put(self, path, data)

    monkeypatch.setattr(type(storage), "put", purge_then_put)
    summaries._FILE.save(storage, "d", summary)
    assert files(dataset) == []


def test_columns_of_few_values_take_a_byte_in_memory_and_none_of_it_is_in_the_file(
    dataset: Dataset, make_episode: Make
) -> None:
    dataset.append([make_episode(f"more/{n}", 10, terminated=True) for n in range(200)])
    snapshot = dataset.snapshot()
    summaries.refresh(snapshot.table)
    made = summaries._FILE.load(snapshot.table.storage, snapshot.table.root)
    summaries._FILE.forget()
    read = summaries._FILE.load(snapshot.table.storage, snapshot.table.root)
    assert made is not None
    assert read is not None
    for summary in (made, read):
        kinds = {field.name: str(field.type) for field in summary.pieces.schema}
        assert kinds["num_steps"] == "dictionary<values=int64, indices=int8, ordered=0>"
        assert kinds["episode_id"] == "string"  # there are 203
        assert summary.num_bytes < summaries._expand(summary.pieces).nbytes
    assert made.pieces.to_pylist() == read.pieces.to_pylist()
    (path,) = files(dataset)
    # As earlier releases write and read it.
    assert {str(one) for one in pq.read_schema(path).types} <= {
        "string",
        "int32",
        "int64",
        "double",
        "bool",
        "timestamp[us, tz=UTC]",
    }
    dataset.append([make_episode("last", 20)])
    summaries.refresh(dataset.snapshot().table)
    assert covered(dataset.snapshot()) == 4


def test_pieces_that_are_dropped_free_their_memory(dataset: Dataset, make_episode: Make) -> None:
    dataset.append([make_episode(f"{'x' * 2000}/{n}", 8) for n in range(200)])
    before = pa.total_allocated_bytes()
    pieces = summaries._pieces(dataset.snapshot().table)
    # Of Arrow's own memory: that of DuckDB's result is one block, which each column would retain.
    assert pa.total_allocated_bytes() - before >= pieces.nbytes
    kept = pieces.select(["num_steps"])
    del pieces
    assert pa.total_allocated_bytes() - before < 4 * kept.nbytes + 10_000
