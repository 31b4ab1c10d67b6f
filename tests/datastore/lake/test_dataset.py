from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple
from replaylake.datastore.errors import (
    AlreadyExistsError,
    EpisodeInvalidError,
    InvalidNameError,
    NotFoundError,
    ReplayLakeError,
    SchemaMismatchError,
    StorageError,
)
from replaylake.datastore.lake import dataset as dataset_module
from replaylake.datastore.lake.dataset import Dataset, new_episode_id
from replaylake.datastore.lake.lake import Lake, open_lake

Make = Callable[..., Episode]


@pytest.fixture
def dataset(lake: Lake) -> Dataset:
    return lake.dataset("d")


def listing(lake: Lake) -> list[str]:
    return sorted(str(path.relative_to(lake.path)) for path in lake.path.rglob("*"))


def delta_rows(dataset: Dataset, version: int | None = None) -> pa.Table:
    table = deltalake.DeltaTable(str(dataset.path), version=version)
    return table.to_pyarrow_table()


def assert_delta_rs_agrees(dataset: Dataset) -> None:
    ours = dataset.snapshot().table.read()
    theirs = delta_rows(dataset).select(ours.column_names)

    def in_order(rows: pa.Table) -> list[dict[str, Any]]:
        return sorted(rows.to_pylist(), key=lambda r: (r["episode_id"], r["agent_id"], r["step"]))

    assert in_order(theirs) == in_order(ours)


def test_append_creates_and_commits(dataset: Dataset, make_episode: Make) -> None:
    assert not dataset.exists()
    commit = dataset.append([make_episode("a", 2), make_episode("b", 3)])
    assert (commit.num_episodes, commit.num_steps, commit.num_shards) == (2, 5, 1)
    assert not commit.already_present
    assert dataset.spec.action_space == Discrete(2)
    snapshot = dataset.snapshot()
    assert (snapshot.version, snapshot.num_steps) == (commit.version, 5)
    assert snapshot.files[0].size_bytes == commit.num_bytes
    assert dataset.history()[-1]["num_episodes"] == 2


def test_a_dataset_that_is_not_there(dataset: Dataset) -> None:
    for use in (lambda: dataset.spec, dataset.snapshot, lambda: dataset.write([])):
        with pytest.raises(NotFoundError, match="dataset 'd': not in this lake"):
            use()
    assert dataset.find_commit("p", 0) is None


def test_names_are_refused_by_pattern(lake: Lake) -> None:
    for name in ("..", "cartpole/../x", "select", "main", "Cartpole", "/etc", "_lake"):
        with pytest.raises(InvalidNameError, match="dataset name: found"):
            lake.dataset(name)


def test_a_linked_folder_is_no_dataset(lake: Lake, tmp_path: Path, make_episode: Make) -> None:
    (tmp_path / "elsewhere").mkdir()
    (lake.path / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidNameError, match="inside of the lake"):
        lake.dataset("linked").append([make_episode()])
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert lake.datasets() == []


def test_a_dataset_is_created_once(dataset: Dataset) -> None:
    dataset.create(Box((2,)), Discrete(3), mask_size=3, extras={"n": pa.uint8()})
    with pytest.raises(AlreadyExistsError):
        dataset.create(Box((2,)), Discrete(3))
    spec = dataset.spec
    assert (spec.observation_space, spec.action_space) == (Box((2,)), Discrete(3))
    assert (spec.mask_size, spec.extras) == (3, {"n": pa.int16()})
    with pytest.raises(SchemaMismatchError, match="column 'Reward'"):
        dataset_module.Dataset(dataset._storage, "e").create(
            Box((2,)), Discrete(3), extras={"Reward": pa.int64()}
        )


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rewards": [1.0, np.nan, 1.0]}, EpisodeInvalidError, "episode bad: reward at step 1"),
    ({"observations": np.zeros((3, 9))}, EpisodeInvalidError, "observation"),
    ({"action_masks": [[True]] * 3}, ReplayLakeError, r"action[_ ]mask"),
    ({"extras": {"reward": [1, 2, 3]}}, SchemaMismatchError, "column 'reward'"),
    ({"extras": {"x": [None] * 3}}, SchemaMismatchError, "column 'x'"),
    ({"episode_id": ""}, EpisodeInvalidError, "episode_id"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BAD)
@pytest.mark.parametrize("exists", [False, True])
def test_one_bad_episode_changes_nothing(
    lake: Lake,
    make_episode: Make,
    fields: dict[str, Any],
    error: type[Exception],
    message: str,
    exists: bool,
) -> None:
    dataset = lake.dataset("d")
    if exists:
        dataset.append([make_episode("before")])
    before = listing(lake)
    with pytest.raises(error, match=message):
        dataset.append([make_episode("fine"), make_episode("bad", **fields)])
    assert listing(lake) == before


def test_nothing_to_append_and_half_an_identity(dataset: Dataset, make_episode: Make) -> None:
    with pytest.raises(EpisodeInvalidError, match="found no episodes"):
        dataset.append([])
    with pytest.raises(EpisodeInvalidError, match="expected both or neither"):
        dataset.append([make_episode()], producer="p")
    assert not dataset.exists()


def test_exactly_once(dataset: Dataset, lake: Lake, make_episode: Make) -> None:
    first = dataset.append([make_episode("a")], producer="p", sequence=4)
    for handle in (dataset, open_lake(lake.path).dataset("d")):
        again = handle.append([make_episode("a")], producer="p", sequence=4)
        assert (again.version, again.already_present) == (first.version, True)
        assert (again.num_episodes, again.num_steps) == (0, 0)
    assert dataset.append([make_episode("b")], producer="p", sequence=2).num_steps == 3
    assert dataset.next_sequence("p") == 5
    assert dataset.snapshot().num_steps == 6


def test_spaces_are_fixed_at_creation(dataset: Dataset, make_episode: Make) -> None:
    dataset.append([make_episode("a")])
    with pytest.raises(EpisodeInvalidError, match="action at step 0: found 2"):
        dataset.append([make_episode("b", actions=[2, 0, 0])])
    with pytest.raises(SchemaMismatchError, match="found action masks, expected none"):
        dataset.append([make_episode("b", action_masks=np.ones((3, 2), bool))])
    assert dataset.snapshot().version == 1


def test_further_columns_may_come_later(dataset: Dataset, make_episode: Make) -> None:
    dataset.append([make_episode("a", 1, extras={"first": [1]})])
    dataset.append([make_episode("b", 1, extras={"second": [["x", "y"]]})])
    dataset.append([make_episode("c", 1)])
    rows = dataset.snapshot().table.read(["first", "second"]).to_pydict()
    assert rows == {"first": [1, None, None], "second": [None, ["x", "y"], None]}
    assert list(dataset.spec.extras) == ["first", "second"]
    with pytest.raises(SchemaMismatchError, match="column 'First'"):
        dataset.append([make_episode("d", 1, extras={"First": [1]})])
    with pytest.raises(SchemaMismatchError, match="column 'first': expected int64"):
        dataset.append([make_episode("d", 1, extras={"first": ["text"]})])
    assert_delta_rs_agrees(dataset)


def everything(make_episode: Make, name: str, **fields: Any) -> Episode:
    rng = np.random.default_rng(7)
    observations = {
        "camera": rng.integers(0, 256, (3, 4, 5), np.uint8),
        "inner": {"speed": rng.normal(size=3), "say": ["", "ü", "x"]},
        "pair": (rng.normal(size=(3, 2)).astype(np.float32), [4, 3, 2]),
    }
    final = {
        "camera": np.zeros((4, 5), np.uint8),
        "inner": {"speed": 1.5, "say": "end"},
        "pair": (np.ones(2, np.float32), 1),
    }
    given = {
        "observations": observations,
        "final_observation": final,
        "actions": {"gear": [[0, 1], [1, 2], [0, 0]], "gas": [0.1, 0.2, 0.3]},
    }
    return make_episode(name, **(given | fields))


def test_nested_spaces_round_trip_and_delta_rs_sees_them(
    dataset: Dataset, make_episode: Make
) -> None:
    observation = Dict(
        {
            "camera": Box((4, 5), "uint8", 0, 255),
            "inner": Dict({"speed": Box((), "float64"), "say": Text()}),
            "pair": Tuple((Box((2,)), Discrete(5))),
        }
    )
    action = Dict({"gear": MultiDiscrete((2, 3)), "gas": Box((), "float64")})
    dataset.create(observation, action)
    dataset.append([everything(make_episode, "a"), everything(make_episode, "b")])
    dataset.append([everything(make_episode, "c", final_observation=None)])
    rows = dataset.snapshot().table.read().to_pylist()
    assert [row["final_observation"] is not None for row in rows] == [0, 0, 1, 0, 0, 1, 0, 0, 0]
    expected = everything(make_episode, "a").observations
    assert rows[1]["observation"]["camera"] == expected["camera"][1].tobytes()
    assert rows[1]["observation"]["inner"] == {"speed": expected["inner"]["speed"][1], "say": "ü"}
    assert rows[1]["observation"]["pair"] == {"_0": expected["pair"][0][1].tolist(), "_1": 3}
    assert rows[2]["action"] == {"gear": [0, 0], "gas": 0.3}
    assert_delta_rs_agrees(dataset)


def test_delta_rs_agrees_after_a_checkpoint(dataset: Dataset, make_episode: Make) -> None:
    for i in range(5):
        dataset.append([make_episode(f"e{i}", policies=["p"] * 3, timestamps=[i, i, i])])
    dataset.table.log.checkpoint(3)
    assert deltalake.DeltaTable(str(dataset.path)).version() == 5
    assert_delta_rs_agrees(dataset)
    assert delta_rows(dataset, version=2).num_rows == 6


def test_a_reader_s_snapshot_is_pinned(dataset: Dataset, make_episode: Make) -> None:
    dataset.append([make_episode("a")])
    pinned = dataset.snapshot()
    dataset.append([make_episode("b", extras={"later": [1, 2, 3]})])
    assert pinned.sql("SELECT count(*) AS n FROM steps").to_pydict() == {"n": [3]}
    assert "later" not in pinned.describe()["columns"]
    assert dataset.snapshot(pinned.version).files == pinned.files
    with pytest.raises(NotFoundError, match=r"dataset 'd': found no version 9, expected 0\.\.2"):
        dataset.snapshot(9)


def test_describe(dataset: Dataset, make_episode: Make) -> None:
    dataset.append(
        [
            make_episode("a", 2, terminated=True),
            make_episode("b", 3, truncated=True),
            make_episode("c", 1),
        ]
    )
    described = dataset.snapshot().describe()
    expected = {
        "dataset": "d",
        "version": 1,
        "num_episodes": 3,
        "num_steps": 6,
        "mean_return": (3 + 6 + 1) / 3,
        "min_return": 1.0,
        "max_return": 6.0,
        "num_terminated": 1,
        "num_truncated": 1,
        "num_incomplete": 1,
        "observation_space": "Box float32[2]",
        "action_space": "Discrete(2)",
        "num_shards": 1,
    }
    assert {key: described[key] for key in expected} == expected


def test_episode_ids_begin_with_their_producer() -> None:
    first, second = new_episode_id("w"), new_episode_id("w")
    assert first != second
    assert first.startswith("w/")


def test_feedback_tables_are_kept_beside_the_steps(dataset: Dataset) -> None:
    assert dataset.decisions.root == "d/_decisions"
    assert dataset.rewards.root == "d/_rewards"
    assert not dataset.decisions.exists()


# --- the writer -----------------------------------------------------------------------------


def test_a_writer_flushes_by_steps(dataset: Dataset, make_episode: Make) -> None:
    with dataset.writer(producer="p", flush_steps=5) as writer:
        for i in range(4):
            writer.write(make_episode(f"e{i}"))
        assert dataset.snapshot().num_steps == 12, "after the second and the fourth episode"
        writer.write(make_episode("e4"))
    assert dataset.snapshot().num_steps == 15
    written = [c for c in dataset.history() if c["producer"] == "p"]
    assert [(c["sequence"], c["num_episodes"]) for c in written] == [(0, 2), (1, 2), (2, 1)]
    assert writer.flush() is None


def test_a_writer_flushes_by_bytes(dataset: Dataset, make_episode: Make) -> None:
    frames = {"camera": np.zeros((3, 10, 10), np.uint8), "speed": np.zeros(3)}
    with dataset.writer(flush_bytes=2 * (300 + 24)) as writer:
        for name in "abc":
            writer.write(make_episode(name, observations=frames, final_observation=None))
        assert dataset.snapshot().num_steps == 6


def test_an_open_episode_is_continued_in_pieces(dataset: Dataset, make_episode: Make) -> None:
    with dataset.writer(flush_steps=1) as writer:
        writer.write(make_episode("e", 2))
        first = dataset.snapshot()
        writer.write(make_episode("e", 2, first_step=2, terminated=True))
    for snapshot, *expected in ((first, False, 3.0, 2), (dataset.snapshot(), True, 10.0, 4)):
        (row,) = snapshot.sql('SELECT complete, "return", num_steps FROM episodes').to_pylist()
        assert list(row.values()) == expected


def test_a_writer_checks_where_the_dataset_exists(dataset: Dataset, make_episode: Make) -> None:
    dataset.append([make_episode("a")])
    writer = dataset.writer()
    with pytest.raises(EpisodeInvalidError, match="episode b: action at step 0"):
        writer.write(make_episode("b", actions=[7, 0, 0]))
    writer.write(make_episode("c"))
    writer.close()
    assert dataset.snapshot().num_steps == 6


def test_a_producer_goes_on_where_it_ended(dataset: Dataset, make_episode: Make) -> None:
    """A second run under the same name is new data, not a repetition of the first."""
    for name in ("a", "b"):
        with dataset.writer(producer="p") as writer:
            writer.write(make_episode(name))
    assert dataset.snapshot().num_steps == 6
    one, other = dataset.writer(producer="p"), dataset.writer(producer="p")
    for writer, name in ((one, "c"), (other, "d"), (one, "e")):
        writer.write(make_episode(name))
        commit = writer.flush()
        assert commit is not None
        assert not commit.already_present
    assert dataset.snapshot().num_steps == 15


def test_a_flush_that_failed_after_its_commit_is_not_repeated(
    dataset: Dataset, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = dataset.append

    def lost_reply(*args: Any, **kwargs: Any) -> None:
        append(*args, **kwargs)
        raise StorageError("the reply was lost")

    writer = dataset.writer(producer="p")
    writer.write(make_episode("a"))
    with monkeypatch.context() as patched:
        patched.setattr(dataset, "append", lost_reply)
        with pytest.raises(StorageError, match="lost"):
            writer.flush()
    commit = writer.flush()
    assert commit is not None
    assert commit.already_present
    writer.write(make_episode("b"))
    writer.close()
    assert dataset.snapshot().num_steps == 6


def test_writers_of_one_producer_lose_nothing_to_each_other(
    dataset: Dataset, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush fails; the sequence it was to have is another live writer's by the next one."""
    one, other = dataset.writer(producer="p"), dataset.writer(producer="p")
    one.write(make_episode("a"))
    with monkeypatch.context() as patched:
        patched.setattr(dataset, "append", _no_room)
        with pytest.raises(StorageError, match="no room"):
            one.flush()
    other.write(make_episode("b"))
    other.close()
    one.close()
    rows = dataset.snapshot().sql("SELECT DISTINCT episode_id AS e FROM steps ORDER BY e")
    assert rows["e"].to_pylist() == ["a", "b"]


def _no_room(*_: Any, **__: Any) -> None:
    raise StorageError("no room")


def test_what_is_written_after_a_lost_reply_is_not_lost_with_it(
    dataset: Dataset, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = dataset.append

    def lost_reply(*args: Any, **kwargs: Any) -> None:
        append(*args, **kwargs)
        raise StorageError("the reply was lost")

    writer = dataset.writer(producer="p")
    writer.write(make_episode("a"))
    with monkeypatch.context() as patched:
        patched.setattr(dataset, "append", lost_reply)
        with pytest.raises(StorageError, match="lost"):
            writer.flush()
    writer.write(make_episode("b"))
    writer.close()
    rows = dataset.snapshot().sql("SELECT DISTINCT episode_id AS e FROM steps ORDER BY e")
    assert rows["e"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": [1.0, np.nan, 3.0]}, "episode bad: reward at step 1"),
        ({"observations": np.zeros((3, 5)), "final_observation": None}, "episode bad: observation"),
        ({"actions": [0.5, 0.5, 0.5]}, "episode bad: action: found Discrete"),
        ({"agent_id": None}, "episode 'bad': agent_id"),
        ({"extras": {"a-b": [1, 2, 3]}}, "episode bad: column 'a-b'"),
        ({"extras": {"x": [1, "a", None]}}, "episode bad: column 'x'"),
    ],
)
def test_a_writer_checks_before_the_dataset_exists(
    dataset: Dataset, make_episode: Make, fields: dict[str, Any], message: str
) -> None:
    with dataset.writer() as writer:
        writer.write(make_episode("a"))
        with pytest.raises((EpisodeInvalidError, SchemaMismatchError), match=message):
            writer.write(make_episode("bad", **fields))
        # The spaces are not fixed yet: another action widens them.
        writer.write(make_episode("b", actions=[4, 0, 0]))
    assert dataset.snapshot().num_steps == 6
    assert dataset.spec.action_space == Discrete(5)


def test_what_only_a_flush_can_refuse_holds_up_nothing(
    dataset: Dataset, make_episode: Make
) -> None:
    writer = dataset.writer()
    for name in "abc":
        writer.write(make_episode(name, extras={"x": [1, 2, 3]}))
    writer.write(make_episode("bad", extras={"x": ["text"] * 3}))
    writer.write(make_episode("worse", extras={"x": [b"bytes"] * 3}))
    writer.write(make_episode("d"))
    with pytest.raises(
        SchemaMismatchError, match=r"episode bad: .*Left out 2 of the episodes written"
    ):
        writer.flush()
    assert [(episode.episode_id, type(error)) for episode, error in writer.rejected] == [
        ("bad", SchemaMismatchError),
        ("worse", SchemaMismatchError),
    ]
    writer.write(make_episode("e"))
    writer.close()
    rows = dataset.snapshot().sql("SELECT DISTINCT episode_id AS e FROM steps ORDER BY e")
    assert rows["e"].to_pylist() == list("abcde")


def test_episodes_that_are_refused_create_nothing(dataset: Dataset, make_episode: Make) -> None:
    spec = DatasetSpec(Box((2,)), Discrete(7))
    refused = [
        make_episode("a", extras={"next_observation": [1, 2, 3]}),
        make_episode("a", actions=[0, 7, 0]),
    ]
    for episode in refused:
        with pytest.raises((EpisodeInvalidError, SchemaMismatchError)):
            dataset.append([make_episode("fine"), episode], spec=spec)
        with pytest.raises((EpisodeInvalidError, SchemaMismatchError)):
            dataset.check([episode, episode])
    assert not dataset.exists()
    dataset.append([make_episode("a")], spec=spec)
    assert dataset.spec.action_space == Discrete(7)
    dataset.check([make_episode("b", actions=[6, 6, 6])])
    assert dataset.snapshot().version == 1


def test_an_exception_keeps_what_was_written_before_it(
    dataset: Dataset, make_episode: Make
) -> None:
    with pytest.raises(KeyError, match="theirs"):
        _write_and_raise(dataset, make_episode("a"))
    assert dataset.snapshot().num_steps == 3


def _write_and_raise(dataset: Dataset, episode: Episode) -> None:
    with dataset.writer() as writer:
        writer.write(episode)
        raise KeyError("theirs")


def test_the_first_error_is_the_one_that_is_raised(
    dataset: Dataset, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(dataset, "append", failing)
    with pytest.raises(KeyError, match="theirs") as caught:
        _write_and_raise(dataset, make_episode("a"))
    assert caught.value.__notes__ == ["The episodes written before it were not committed: no room"]
    with pytest.raises(StorageError, match="no room"), dataset.writer() as writer:
        writer.write(make_episode("a"))


# --- several processes ----------------------------------------------------------------------


def _make(name: str, num_actions: int) -> Episode:
    actions = np.arange(num_actions)
    return Episode(name, np.zeros((num_actions, 2), np.float32), actions, np.ones(num_actions))


def _append_after(barrier: Any, root: Path, name: str, num_actions: int) -> None:
    dataset = open_lake(root).dataset("d")
    barrier.wait()
    try:
        dataset.append([_make(name, num_actions)], producer=name, sequence=0)
    except EpisodeInvalidError:
        sys.exit(3)


def test_two_processes_create_with_different_spaces(lake: Lake) -> None:
    """Whichever loses is checked against the winner's spaces."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [
        context.Process(target=_append_after, args=(barrier, lake.path, f"w{n}", n)) for n in (2, 5)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    dataset = lake.dataset("d")
    rows = dataset.snapshot().sql("SELECT DISTINCT episode_id AS e FROM steps ORDER BY e")
    exits = [process.exitcode for process in processes]
    if dataset.spec.action_space == Discrete(5):
        assert (exits, rows["e"].to_pylist()) == ([0, 0], ["w2", "w5"])
    else:
        assert (exits, rows["e"].to_pylist()) == ([0, 3], ["w2"])


def test_the_loser_of_a_creation_takes_the_winner_s_spaces(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, winner = lake.dataset("d"), open_lake(lake.path).dataset("d")
    infer_spec = dataset_module.infer_spec

    def interrupted(episodes: Any) -> Any:
        monkeypatch.setattr(dataset_module, "infer_spec", infer_spec)
        winner.append([_make("w", 2)])
        return infer_spec(episodes)

    monkeypatch.setattr(dataset_module, "infer_spec", interrupted)
    with pytest.raises(EpisodeInvalidError, match=r"episode late: action at step 2: found 2"):
        dataset.append([_make("late", 5)])
    monkeypatch.setattr(dataset_module, "infer_spec", infer_spec)
    assert dataset.spec.action_space == Discrete(2)
    assert dataset.snapshot().num_steps == 2


WRITER = """
import sys
import numpy as np
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import open_lake
dataset = open_lake(sys.argv[1]).dataset("d")
sequence = int(sys.argv[2])
while True:
    episode = Episode(f"e{sequence}", np.zeros((7, 2), np.float32), np.zeros(7, int), np.ones(7))
    dataset.append([episode], producer="p", sequence=sequence)
    print(sequence, flush=True)
    sequence += 1
"""


def kill_writers(lake: Lake, num_kills: int, seed: int) -> None:
    """Kill a writer again and again; each new one begins at the last sequence acknowledged."""
    rng = np.random.default_rng(seed)
    dataset, acknowledged = lake.dataset("d"), -1
    for _ in range(num_kills):
        command = [sys.executable, "-c", WRITER, str(lake.path), str(max(acknowledged, 0))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            time.sleep(rng.uniform(0, 0.2))
            os.kill(process.pid, signal.SIGKILL)
            lines += process.stdout.read().splitlines()
        acknowledged = max([acknowledged, *(int(line) for line in lines if line.strip())])
        snapshot = open_lake(lake.path).dataset("d").snapshot()
        rows = snapshot.sql("SELECT episode_id, count(*) AS n FROM steps GROUP BY 1").to_pylist()
        assert {row["n"] for row in rows} == {7}, "a version is seen whole or not at all"
        present = {row["episode_id"] for row in rows}
        assert present >= {f"e{i}" for i in range(acknowledged + 1)}
        assert len(present) - (acknowledged + 1) in (0, 1), "at most one that was not acknowledged"
    assert dataset.snapshot().table.read().num_rows == 7 * len(present)


def test_a_killed_writer_loses_and_doubles_nothing(lake: Lake) -> None:
    kill_writers(lake, num_kills=2, seed=0)


@pytest.mark.chaos
def test_many_killed_writers_lose_and_double_nothing(lake: Lake) -> None:
    kill_writers(lake, num_kills=30, seed=1)


# --- random layouts -------------------------------------------------------------------------


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    pieces=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(0, 40),
            st.integers(1, 6),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_layout_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, make_episode: Make, pieces: list[Any]
) -> None:
    dataset = open_lake(tmp_path_factory.mktemp("l"), create=True).dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    expected = []
    for name, first, num, terminated, has_final in pieces:
        episode = make_episode(name, num, first_step=first, terminated=terminated)
        if not has_final:
            episode = make_episode(
                name, num, first_step=first, terminated=terminated, final_observation=None
            )
        dataset.append([episode])
        expected += [
            (
                name,
                step,
                [step, -step],
                step + 1.0,
                terminated and step == first + num - 1,
                [step + 1, -step - 1] if has_final and step == first + num - 1 else None,
            )
            for step in range(first, first + num)
        ]
    rows = dataset.snapshot().table.read().to_pylist()
    keys = ("episode_id", "step", "observation", "reward", "terminated", "final_observation")
    assert [tuple(row[key] for key in keys) for row in rows] == expected


def test_a_column_of_vectors_is_there_before_the_first_step_that_has_it(dataset: Dataset) -> None:
    dataset.create(Box((2,)), Discrete(2))
    dataset.add_vectors("remembered", 3)
    version = dataset.snapshot().version
    dataset.add_vectors("remembered", 3)
    assert dataset.snapshot().version == version
    with pytest.raises(SchemaMismatchError, match="remembered"):
        dataset.add_vectors("remembered", 4)
    with pytest.raises(SchemaMismatchError, match="step"):
        dataset.add_vectors("step", 1)


@pytest.mark.parametrize("name", ["steps", "quarantine", "runs", "metrics"])
def test_no_new_dataset_has_the_name_of_a_view(lake: Lake, make_episode: Any, name: str) -> None:
    with pytest.raises(InvalidNameError, match="is a view's name in SQL"):
        lake.dataset(name).append([make_episode("a")])
    assert lake.datasets() == []
