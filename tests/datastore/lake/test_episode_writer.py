"""The writer: pieces, time, and that what is produced is accounted for, whatever goes wrong."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    NotFoundError,
    SchemaMismatchError,
    StorageError,
)
from replaylake.datastore.lake import pieces as pieces_module
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.episode_writer import EpisodeWriter
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.pieces import PieceOrder, cut_piece
from replaylake.datastore.storage.storage import LocalStorage

Make = Callable[..., Episode]


@pytest.fixture
def dataset(lake: Lake) -> Dataset:
    return lake.dataset("d")


def totals(dataset: Dataset) -> dict[str, int]:
    """Return the sums over all commits, after checking the identity in each of them."""
    sums: dict[str, int] = {}
    for commit in dataset.history():
        for unit in ("", "_steps"):
            if f"num_produced{unit}" not in commit:
                continue
            committed = commit["num_steps" if unit else "num_episodes"]
            left_out = commit[f"num_rejected{unit}"] + commit[f"num_already_present{unit}"]
            assert commit[f"num_produced{unit}"] == committed + left_out
        for name in ("num_steps", "num_produced", "num_rejected", "num_already_present"):
            sums[name] = sums.get(name, 0) + commit.get(name, 0)
    return sums


def keys(dataset: Dataset) -> list[tuple[str, int]]:
    rows = dataset.snapshot().sql("SELECT episode_id, step FROM steps ORDER BY ALL")
    return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def test_what_waits_is_committed_in_time_though_nobody_writes(
    dataset: Dataset, make_episode: Make
) -> None:
    writer = dataset.writer(flush_interval_s=0.05)
    writer.write(make_episode("a"))
    until = time.monotonic() + 60
    while not (dataset.exists() and dataset.snapshot().num_steps == 3):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert writer.flush() is None


def test_a_flush_that_failed_in_the_background_is_tried_again(
    dataset: Dataset, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, calls = dataset.append, []

    def failing_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise StorageError("no room")
        return append(*args, **kwargs)

    monkeypatch.setattr(dataset, "append", failing_once)
    with dataset.writer(flush_interval_s=0.03) as writer:
        writer.write(make_episode("a"))
        until = time.monotonic() + 60
        while len(calls) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert keys(dataset) == [("a", 0), ("a", 1), ("a", 2)]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {}, "episode e: found step 0 again, expected step 3"),
        ({}, {"first_step": 2}, "found step 2 again, expected step 3"),
        ({}, {"first_step": 5}, r"found step 5, expected step 3 .*steps 3\.\.4 are missing"),
        ({"terminated": True}, {"first_step": 3}, "found step 3 after its end"),
        ({"truncated": True}, {}, "found step 0 after its end"),
    ],
)
@pytest.mark.parametrize("flush", [False, True])
def test_pieces_that_do_not_follow_are_refused(
    dataset: Dataset, make_episode: Make, first: Any, second: Any, message: str, flush: bool
) -> None:
    with dataset.writer(producer="p") as writer:
        writer.write(make_episode("e", **first))
        if flush:
            writer.flush()
        with pytest.raises(EpisodeInvalidError, match=message):
            writer.write(make_episode("e", **second))
        writer.write(make_episode("e", agent_id="other"))
    expected = {"num_steps": 6, "num_produced": 3, "num_rejected": 1, "num_already_present": 0}
    assert totals(dataset) == expected


def test_the_pieces_of_another_writer_may_be_continued(
    dataset: Dataset, make_episode: Make
) -> None:
    with dataset.writer() as writer:
        writer.write(make_episode("e"))
    with dataset.writer() as writer:
        writer.write(make_episode("e", first_step=3, terminated=True))
    (row,) = dataset.snapshot().sql("SELECT num_steps, complete FROM episodes").to_pylist()
    assert row == {"num_steps": 6, "complete": True}


def test_what_is_remembered_of_episodes_is_bounded(make_episode: Make) -> None:
    order = PieceOrder(num_remembered=2)
    for name in "abc":
        order.add(make_episode(name))
    order.add(make_episode("a"))  # forgotten, so it is taken for the first piece that is seen
    with pytest.raises(EpisodeInvalidError, match="episode c: found step 0 again"):
        order.add(make_episode("c"))
    assert pieces_module._MAX_TRACKED == 131_072


def test_a_piece_keeps_what_its_rows_have(make_episode: Make) -> None:
    episode = make_episode(
        "e",
        4,
        first_step=2,
        truncated=True,
        timestamps=np.arange(4),
        extras={"x": [1, 2, 3, 4]},
    )
    head, tail = cut_piece(episode, 0, 3), cut_piece(episode, 3, 4)
    assert (head.first_step, len(head), head.truncated) == (2, 3, False)
    assert (tail.first_step, len(tail), tail.truncated) == (5, 1, True)
    assert head.final_observation.tolist() == episode.observations[3].tolist()
    assert head.extras == {"x": [1, 2, 3]}
    assert tail.timestamps is not None
    assert tail.timestamps.tolist() == [3]


def test_an_episode_lived_step_by_step_is_open_until_it_ends(
    dataset: Dataset, make_episode: Make
) -> None:
    dataset.append([make_episode("first")])
    seen = []
    with dataset.writer(producer="p", flush_steps=3) as writer:
        opened = writer.begin("e")
        for t in range(5):
            now, then = np.full(2, t, np.float32), np.full(2, t + 1, np.float32)
            opened.step(
                now, t % 2, float(t), then, terminated=t == 4, behavior_log_prob=-0.5, note=f"n{t}"
            )
            (row,) = (
                dataset.snapshot()
                .sql(
                    "SELECT count(*) AS n, coalesce(bool_or(complete), false) AS c FROM episodes "
                    "WHERE episode_id = 'e'"
                )
                .to_pylist()
            )
            seen.append((row["n"], row["c"]))
        with pytest.raises(EpisodeInvalidError, match="episode e: found a step after its end"):
            opened.step(now, 0, 0.0, then)
    assert seen == [(0, False), (0, False), (1, False), (1, False), (1, False)]
    rows = dataset.snapshot().sql("SELECT * FROM transitions WHERE episode_id = 'e' ORDER BY step")
    assert rows["step"].to_pylist() == [0, 1, 2, 3, 4]
    assert [x[0] for x in rows["next_observation"].to_pylist()] == [1, 2, 3, 4, 5]
    assert [x is None for x in rows["final_observation"].to_pylist()] == [1, 1, 0, 1, 0]
    assert rows["terminated"].to_pylist() == [False] * 4 + [True]
    assert rows["note"].to_pylist() == ["n0", "n1", "n2", "n3", "n4"]
    assert rows["behavior_log_prob"].to_pylist() == [-0.5] * 5


def test_a_step_that_does_not_fit_is_left_out_with_its_piece(
    dataset: Dataset, make_episode: Make
) -> None:
    with pytest.raises(NotFoundError), dataset.writer() as writer:
        writer.begin()
    dataset.append([make_episode("first")])
    writer = dataset.writer()
    good, bad = writer.begin(), writer.begin()
    with pytest.raises(EpisodeInvalidError, match="is already open"):
        writer.begin(good.episode_id)
    good.step([0.0, 0.0], 0, 1.0, [1.0, 1.0])
    bad.step([0.0, 0.0, 0.0], 0, 1.0, [1.0, 1.0])
    with pytest.raises(EpisodeInvalidError, match="Left out 1"):
        writer.close()
    assert [key[0] for key in keys(dataset) if key[0] != "first"] == [good.episode_id]
    assert totals(dataset)["num_rejected"] == 1


# --- accounting: produced = committed + rejected + already present ---------------------------


def test_rejections_after_the_last_flush_are_told_at_close(
    dataset: Dataset, make_episode: Make
) -> None:
    with dataset.writer(producer="p") as writer:
        writer.write(make_episode("a"))
        writer.flush()
        with pytest.raises(EpisodeInvalidError):
            writer.write(make_episode("b", rewards=[np.nan] * 3))
    last = dataset.history()[-1]
    assert (last["operation"], last["producer"], last["sequence"]) == ("ACCOUNT", "p", 1)
    assert (last["num_produced"], last["num_rejected"], last["num_rejected_steps"]) == (1, 1, 3)
    assert dataset.snapshot().num_steps == 3
    version = dataset.snapshot().version
    writer.close()
    assert dataset.snapshot().version == version, "told once"


def test_a_producer_that_starts_again_may_send_everything_again(
    dataset: Dataset, make_episode: Make
) -> None:
    """A process was killed; the next one cannot know what was committed, and sends it all."""
    for num in (2, 4):
        with dataset.writer(producer="p") as writer:
            for i in range(num):
                writer.write(make_episode(f"e{i}"))
            # A piece of which the first run had written the head.
            writer.write(make_episode("long", 3 * num))
    expected = [(f"e{i}", step) for i in range(4) for step in range(3)]
    assert keys(dataset) == sorted(expected + [("long", step) for step in range(12)])
    sums = totals(dataset)
    assert sums == {
        "num_steps": 24,
        "num_produced": 3 + 5,
        "num_rejected": 0,
        "num_already_present": 2,
    }
    last = dataset.history()[-1]
    assert (last["num_produced_steps"], last["num_already_present_steps"]) == (24, 6 + 6)


def test_nothing_but_present_episodes_is_told_without_rows(
    dataset: Dataset, make_episode: Make
) -> None:
    for _ in range(2):
        with dataset.writer(producer="p") as writer:
            writer.write(make_episode("a"))
    assert dataset.history()[-1]["operation"] == "ACCOUNT"
    assert totals(dataset) == {
        "num_steps": 3,
        "num_produced": 2,
        "num_rejected": 0,
        "num_already_present": 1,
    }


@pytest.mark.parametrize("seed", range(3))
def test_the_accounts_add_up_whatever_fails(
    lake: Lake, make_episode: Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Crashes, lost replies and a full disk, with rejections, retries and everything sent again."""
    rng = np.random.default_rng(seed)
    dataset = lake.dataset("d")
    append = dataset.append

    def unreliable(*args: Any, **kwargs: Any) -> Any:
        luck = rng.random()
        if luck < 0.2:
            raise StorageError("no room")
        commit = append(*args, **kwargs)
        if luck < 0.4:
            raise StorageError("the reply was lost")
        return commit

    monkeypatch.setattr(dataset, "append", unreliable)
    tried = 0
    for run in range(4):  # each is a process that resends from the start, and is then "killed"
        writer = dataset.writer(producer="p", flush_steps=7)
        for i in range(4 * (run + 1)):
            episode = make_episode(f"e{i}", rewards=[np.nan if i % 5 == 3 else 1.0] * 3)
            tried += 1
            try:
                writer.write(episode)
            except EpisodeInvalidError:
                continue
            except StorageError:
                pass  # it is in the buffer
        if run == 3 or rng.random() < 0.5:
            while True:
                try:
                    writer.close()
                    break
                except StorageError:
                    continue
    expected = [(f"e{i}", step) for i in range(16) if i % 5 != 3 for step in range(3)]
    assert keys(dataset) == sorted(expected)
    sums = totals(dataset)
    assert sums["num_steps"] == len(expected)
    assert sums["num_produced"] <= tried, "a killed process could not tell of its last ones"


def test_what_is_sent_again_is_looked_up_after_a_failure_too(
    dataset: Dataset, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataset.writer(producer="p") as writer:
        writer.write(make_episode("a"))
        writer.write(make_episode("b"))
    again = dataset.writer(producer="p")
    again.write(make_episode("c"))

    def full(*args: Any, **names: Any) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(dataset, "append", full)
    with pytest.raises(StorageError):
        again.flush()
    monkeypatch.undo()
    again.write(make_episode("b"))
    again.close()
    assert keys(dataset) == [(name, step) for name in "abc" for step in range(3)]
    assert totals(dataset)["num_already_present"] == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # from Python 3.12 on
def test_a_forked_child_writes_nothing(dataset: Dataset, make_episode: Make) -> None:
    writer = dataset.writer()
    writer.write(make_episode("a"))
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_use_in_child, args=(writer, make_episode("b")))
    with writer.lock:  # as if another thread were at it
        child.start()
        child.join(60)
    assert child.exitcode == 0
    assert not dataset.exists()
    writer.close()
    assert keys(dataset) == [("a", step) for step in range(3)]


def _use_in_child(writer: EpisodeWriter, episode: Episode) -> None:
    with pytest.raises(ConfigInvalidError, match="a fork of process"):
        writer.write(episode)
    with pytest.raises(ConfigInvalidError, match="Create a writer in each"):
        writer.flush()
    writer.close()


def test_half_a_step_is_no_step(dataset: Dataset, make_episode: Make) -> None:
    dataset.append([make_episode("first")])
    writer = dataset.writer()
    lived = writer.begin("lived")
    seen = np.zeros(2, np.float32)
    lived.step(seen, 0, 1.0, seen)
    with pytest.raises(EpisodeInvalidError, match=r"step 1: found .* The step is left out"):
        lived.step(seen, [[0, 1], [2]], 1.0, seen)
    lived.step(seen, 1, 1.0, seen, terminated=True)
    writer.close()
    assert keys(dataset)[3:] == [("lived", 0), ("lived", 1)]


@pytest.mark.parametrize("further", [{"behavior_log_prob": [0.5, 0.5]}, {"x": np.zeros(3)}])
def test_columns_that_do_not_stack_are_refused_and_counted(
    dataset: Dataset, make_episode: Make, further: dict[str, Any]
) -> None:
    dataset.append([make_episode("first")])
    writer = dataset.writer()
    lived = writer.begin("lived")
    seen = np.zeros(2, np.float32)
    lived.step(seen, 0, 1.0, seen, **further)
    lived.step(seen, 0, 1.0, seen, **dict.fromkeys(further, 0.5))
    with pytest.raises((EpisodeInvalidError, SchemaMismatchError), match=next(iter(further))):
        writer.flush()
    writer.close()
    assert totals(dataset)["num_rejected"] == 1


def test_a_flush_looks_at_the_log_three_times(
    dataset: Dataset, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = dataset.writer()
    writer.write(make_episode("a"))
    writer.flush()
    looks: list[str] = []
    read = LocalStorage.get_many

    def counted(storage: LocalStorage, paths: Sequence[str]) -> list[bytes | None]:
        looks.append(paths[0])
        return read(storage, paths)

    writer.write(make_episode("b"))
    monkeypatch.setattr(LocalStorage, "get_many", counted)
    writer.flush()
    assert len(looks) == 3, "whether it is there and what it has to fit; the schema; the commit"


def _write_many(root: Path, number: int, num_episodes: int) -> None:
    with open_lake(root).dataset("d").writer(producer=f"p{number}", flush_steps=20) as writer:
        for i in range(num_episodes):
            episode = Episode(
                f"p{number}/{i}", np.full((3, 2), i, np.float32), [0, 1, 0], np.ones(3)
            )
            writer.write(episode)


@pytest.mark.slow
def test_processes_append_at_once(lake: Lake, dataset: Dataset, make_episode: Make) -> None:
    dataset.append([make_episode("first")])
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write_many, args=(lake.path, n, 40)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    found = keys(dataset)
    assert len(found) == len(set(found)) == 3 + 3 * 40 * 3
    sums = totals(dataset)
    assert (sums["num_produced"], sums["num_steps"]) == (121, 363)
