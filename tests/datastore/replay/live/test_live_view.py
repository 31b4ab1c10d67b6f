from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, NotFoundError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.trim import trim
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.live import commit_follower
from replaylake.datastore.replay.live.live_view import LiveView

Make = Callable[..., Episode]
Check = Callable[..., None]

WRITER = """
import sys
import threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import _make_told
from replaylake.datastore.lake.lake import open_lake
dataset = open_lake(Path(sys.argv[1])).dataset("d")
for commit in range(int(sys.argv[3])):
    pieces = []
    for number in range(20 * commit, 20 * commit + 20):
        # Half of them come in two pieces, one commit apart.
        if number % 2:
            pieces.append(_make_told(number, 10, terminated=True))
        else:
            pieces.append(_make_told(number, 10, final_observation=None))
            if commit:
                pieces.append(_make_told(number - 20, 10, 10, truncated=True))
    dataset.append(pieces)
"""


def steps_of(view: LiveView) -> set[tuple[int, int, float]]:
    """Episode, step and reward of all steps that can be sampled for cloning."""
    candidates = view.candidates(Transitions(only_bootstrappable=False))
    positions = candidates.positions(np.arange(*candidates.bounds()))
    ring = view.assembler(Transitions()).records
    places = positions[positions >= 0]
    told = ring.take("observation", places).astype(int).tolist()
    rewards = np.round(ring.take("reward", places).astype(float), 3).tolist()
    return {(*pair, reward) for pair, reward in zip(told, rewards, strict=True)}


def in_sql(dataset: Dataset) -> set[tuple[int, int, float]]:
    rows = dataset.snapshot().sql("select observation, round(reward, 3) as reward from steps")
    return {(*map(int, r["observation"]), r["reward"]) for r in rows.to_pylist()}


@pytest.mark.slow
def test_commits_can_be_sampled_at_once(
    dataset: Dataset, make_told: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset.append([make_told(0)])
    with dataset.follow(max_steps=10_000) as view:
        assert (view.num_steps, view.version) == (10, 1)
        reader, in_vain = view._follower._reader, []
        look = reader.next

        def noted_look() -> Any:
            started = time.monotonic()
            change = look()
            if change is None:
                in_vain.append(started)
            return change

        monkeypatch.setattr(reader, "next", noted_look)
        sampler = view.uniform(64, seed=0)
        for number in range(1, 51):
            version = dataset.append([make_told(number)]).version
            appended = time.monotonic()
            assert view.wait_for(version, timeout_s=60)
            came = time.monotonic()
            assert number in sampler_numbers(sampler, until=number)
            # The first look after a commit brings it in. How long that takes: docs/REPLAY.md.
            assert not [one for one in in_vain[:-1] if appended < one < came]
        assert view.num_steps == view.num_transitions == 510
        num_looks = len(in_vain)
        while len(in_vain) == num_looks:
            time.sleep(0.001)
        assert view.lag_s < 60
    assert commit_follower._INTERVAL_S <= 0.05


def sampler_numbers(sampler: Any, until: int) -> set[float]:
    found: set[float] = set()
    for _ in range(2000):
        found |= set(sampler.sample().observations[:, 0].tolist())
        if until in found:
            break
    return found


@pytest.mark.slow
def test_nothing_is_torn_while_another_process_appends(
    lake: Lake, dataset: Dataset, check_told: Check
) -> None:
    root = Path(dataset.path).parent
    command = [sys.executable, "-c", WRITER, str(root), str(Path(__file__).parent), "60"]
    num_batches, highest = 0, 0.0
    with dataset.follow(max_steps=400) as view, subprocess.Popen(command) as writer:
        single, three = view.uniform(256, seed=0), view.uniform(64, Transitions(n_step=3), seed=1)
        sequences = view.uniform(16, Sequences(8), seed=2)
        prioritized = view.prioritized(64, seed=3)
        assert view.wait_for(num_steps=1)
        while writer.poll() is None or num_batches < 1000:
            batch = single.sample()
            check_told(batch)
            highest = max(highest, batch.observations[:, 0].max())
            check_told(three.sample(), n_step=3)
            batch = prioritized.sample()
            check_told(batch)
            prioritized.update_priorities(batch.indices, batch.rewards % 7 + 0.1)
            batch = sequences.sample()
            told = batch.observations[..., 0]
            assert ((told == told[:, :1]) | ~batch.mask).all()
            ahead = batch.observations[..., 1] - batch.observations[:, :1, 1]
            assert ((ahead == np.arange(8)) | ~batch.mask).all()
            assert view.num_steps <= 400
            num_batches += 4
        assert writer.returncode == 0
        version = dataset.snapshot().version
        assert view.wait_for(version)
        # 18,000 steps went through a ring of 2,550 records.
        assert dataset.snapshot().num_steps > 7 * view.assembler(Transitions()).records.size
        assert 380 <= view.num_steps <= 400
        assert {1199, 1198} <= sampler_numbers(single, until=1199)


def test_the_oldest_fall_out(dataset: Dataset, make_told: Make, check_told: Check) -> None:
    with dataset.follow(max_steps=2000) as view:
        sampler = view.uniform(256, Transitions(n_step=5), seed=0)
        with pytest.raises(EmptyReplayError):
            sampler.sample()
        # Longer than the view, and than what is written at once.
        version = dataset.append([make_told(1, 7000, terminated=True)]).version
        assert view.wait_for(version)
        assert view.num_steps == view.num_transitions == 2000
        batch = sampler.sample()
        check_told(batch, n_step=5)
        assert batch.observations[:, 1].min() >= 5000
        assert batch.observations[:, 1].max() > 6900
        steps = {step for _, step, _ in steps_of(view)}
        assert steps == set(range(5000, 7000))
        for number in range(2, 12):
            version = dataset.append([make_told(number, 150, truncated=True)]).version
        assert view.wait_for(version)
        assert view.num_steps == view.num_transitions == 2000
        assert {step for number, step, _ in steps_of(view) if number == 1} == set(range(6500, 7000))


def test_only_what_was_there_last_is_decoded(dataset: Dataset, make_told: Make) -> None:
    for number in range(6):
        dataset.append([make_told(number, 50)])
    with dataset.follow(max_steps=120) as view:
        assert {number for number, _, _ in steps_of(view)} == {3, 4, 5}
        assert view.num_steps == 120
    with dataset.follow(since=4) as view:
        assert view.num_steps == 0
        assert view.wait_for(6)
        assert {number for number, _, _ in steps_of(view)} == {4, 5}
    with pytest.raises(NotFoundError):
        dataset.follow(since=77)


@pytest.mark.slow
def test_maintenance_while_it_is_followed(lake: Lake, dataset: Dataset, make_told: Make) -> None:
    for number in range(6):
        dataset.append([make_told(number, 5, terminated=True)])
    with dataset.follow() as view:
        numbers = view.candidates(Transitions()).bounds()
        later = time.time_ns() // 1_000_000 + 7_200_000
        compact(lake, "d", now_ms=later)
        assert view.wait_for(dataset.snapshot().version)
        assert view.candidates(Transitions()).bounds() == numbers
        delete(lake, "d", "episode_id = 'e3'")
        assert view.wait_for(dataset.snapshot().version)
        assert steps_of(view) == in_sql(dataset)
        labels = pa.table({"episode_id": ["e1", "e2"], "score": [50.0, 60.0]})
        annotate(lake, "d", labels, on="episode_id", set={"reward": "score"})
        assert view.wait_for(dataset.snapshot().version)
        assert steps_of(view) == in_sql(dataset)
        assert (1, 4, 50.0) in steps_of(view)
        # In place: they are no new items.
        assert view.candidates(Transitions()).bounds()[1] == numbers[1]
        trim(lake, "d", max_steps=15, now_ms=later)
        assert view.wait_for(dataset.snapshot().version)
        assert steps_of(view) == in_sql(dataset)
        assert view.num_steps == view.num_transitions == 15
        purge(lake, "d", "episode_id = 'e5'")
        assert view.wait_for(dataset.snapshot().version)
        assert steps_of(view) == in_sql(dataset)
        assert view.num_steps == 10
        assert {n for n, _, _ in steps_of(view)} == {2, 4}
        found = set(view.uniform(256, seed=0).sample().observations[:, 0].tolist())
        assert found == {2, 4}


def test_where_steps_follows_labels(lake: Lake, dataset: Dataset, make_told: Make) -> None:
    dataset.append([make_told(0, 5, terminated=True), make_told(1, 5, terminated=True)])
    with dataset.follow(where_steps="reward > 0.5") as view:
        assert (view.num_steps, view.num_transitions) == (10, 5)
        assert {number for number, _, _ in steps_of(view)} == {1}
        labels = pa.table({"episode_id": ["e0"], "score": [3.0]})
        annotate(lake, "d", labels, on="episode_id", set={"reward": "score"})
        assert view.wait_for(dataset.snapshot().version)
        assert (view.num_steps, view.num_transitions) == (10, 6)
        assert (0, 4, 3.0) in steps_of(view)
        with pytest.raises(ConfigInvalidError, match="stream: found a view with where_steps"):
            view.stream("x")


def test_the_same_steps_again_are_there_once(dataset: Dataset, make_told: Make) -> None:
    with dataset.follow() as view:
        dataset.append([make_told(0, 6, final_observation=None)])
        dataset.append([make_told(0, 4, 2, final_observation=None)])
        version = dataset.append([make_told(0, 8, 3, terminated=True)]).version
        assert view.wait_for(version)
        assert view.num_steps == view.num_transitions == 11
        assert {step for _, step, _ in steps_of(view)} == set(range(11))
        batch = view.uniform(64, Transitions(n_step=20), seed=0).sample()
        assert (batch.next_observations[:, 1] == 11).all()


def test_a_sampler_goes_on_from_its_state(dataset: Dataset, make_told: Make) -> None:
    dataset.append([make_told(number, 20, terminated=True) for number in range(5)])
    with dataset.follow() as view:
        for make in (
            lambda seed: view.uniform(32, seed=seed),
            lambda seed: view.prioritized(32, seed=seed),
            lambda seed: view.shuffled(32, seed=seed),
        ):
            sampler = make(5)
            for _ in range(3):
                sampler.sample()
            state = sampler.state_dict()
            following = [sampler.sample() for _ in range(20)]
            other = make(6)
            other.load_state_dict(state)
            for batch in following:
                assert (other.sample().keys == batch.keys).all()


def test_in_order_of_arrival(dataset: Dataset, make_told: Make) -> None:
    dataset.append([make_told(0, 5, terminated=True)])
    with dataset.follow() as view:
        sampler = view.in_order(4)
        taken = [sampler.sample() for _ in range(2)]
        with pytest.raises(EmptyReplayError):
            sampler.sample()
        assert view.wait_for(dataset.append([make_told(1, 3, terminated=True)]).version)
        taken.append(sampler.sample())
        told = np.concatenate([batch.observations for batch in taken]).astype(int).tolist()
        assert told == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4], [1, 0], [1, 1], [1, 2]]


def test_steps_are_counted_once_they_can_be_sampled(
    dataset: Dataset, make_told: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataset.follow() as view:
        items, counts = view._contents.items, []
        came = items.add_runs

        def counted(*arguments: Any, **options: Any) -> None:
            counts.append((view.num_steps, view.num_transitions))
            came(*arguments, **options)

        monkeypatch.setattr(items, "add_runs", counted)
        assert view.wait_for(dataset.append([make_told(0)]).version)
        assert counts == [(0, 0)]
        assert (view.num_steps, view.num_transitions) == (10, 10)


def test_priorities_are_kept_with_the_dataset(dataset: Dataset, make_told: Make) -> None:
    dataset.append([make_told(0), make_told(1)])
    with dataset.follow() as view:
        sampler = view.prioritized(8, seed=0, alpha=1.0)
        values = np.arange(20) + 1.0
        sampler.update_priorities(np.arange(20), values)
        sampler.save_priorities("mine")
    # Of the same rows, whatever numbers they have elsewhere.
    with dataset.follow(max_steps=10) as view:
        other = view.prioritized(8, seed=0, alpha=1.0, restore="mine")
        low, high = view.candidates(Transitions()).bounds()
        kept = other.state_dict()["priorities"]["leaves"][low:high]
        assert kept.tolist() == values[10:].tolist()
    fixed = dataset.snapshot().replay().prioritized(8, seed=0, alpha=1.0, restore="mine")
    assert fixed.state_dict()["priorities"]["leaves"].tolist() == values.tolist()


def test_options_that_cannot_be(dataset: Dataset, lake: Lake) -> None:
    with (
        dataset.follow() as view,
        pytest.raises(ConfigInvalidError, match="weighted: found a view"),
    ):
        view.weighted(32, weight="reward", seed=0)
    with pytest.raises(ConfigInvalidError, match="max_steps 0"):
        dataset.follow(max_steps=0)
    with pytest.raises(NotFoundError):
        lake.dataset("other").follow()
    with pytest.raises(NotFoundError, match="no column"):
        dataset.follow(columns=["nothing"])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"max_steps": 1.5}, "max_steps 1.5"),
        ({"max_steps": 0}, "max_steps 0"),
        ({"since": "yesterday"}, "since 'yesterday'"),
        ({"where_steps": 5}, "where_steps 5"),
        ({"columns": "reward"}, "columns 'reward'"),
        ({"float64": "no"}, "float64 'no'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    lake: Lake, make_episode: Make, arguments: dict[str, Any], found: str
) -> None:
    lake.dataset("d").append([make_episode("e", 3)])
    with pytest.raises(ConfigInvalidError, match=f"found {found}, expected"):
        lake.dataset("d").follow(**arguments)
    assert not [thread for thread in threading.enumerate() if "follow" in thread.name]


def test_it_stays_in_its_process(lake: Lake, make_episode: Make) -> None:
    lake.dataset("d").append([make_episode("e", 3)])
    with (
        lake.dataset("d").follow() as view,
        pytest.raises(ConfigInvalidError, match="cannot be sent to another process"),
    ):
        pickle.dumps(view)
    with pytest.raises(ConfigInvalidError, match="version 'x'"):
        view.wait_for("x")  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["returns", "next_actions"])
def test_what_is_still_to_come_is_not_told(dataset: Dataset, asked: str) -> None:
    with (
        dataset.follow() as view,
        pytest.raises(ConfigInvalidError, match=f"{asked}: found a view|found {asked} in a view"),
    ):
        view.uniform(4, Transitions(**{asked: True}), seed=0)
