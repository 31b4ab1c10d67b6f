"""Steps a second that rollout workers collect with a random policy: recorded in the lake, or not.

Two Ray workers of 8 CartPole environments each, and one in process. `ours`: durable shards,
committed in groups. `recording off`: the same workers hand over the same episodes, which are
dropped. `stepped alone`: one process that steps 8 of them with actions drawn before, keeping
nothing. They take turns; the best turn counts. Time to start workers is left out: it ends with
their first shipment.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import numpy as np

from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.offline.environments.ids import make, spaces_of
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.rollout_batch import EpisodeNumbers, RolloutBatch, WorkerSpec
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.pools.local_pool import LocalPool
from replaylake.online.pools.pool import WorkerPool
from replaylake.online.pools.ray_pool import RayPool
from replaylake.online.recording.collection import GROUP_INTERVAL_S
from replaylake.online.recording.episode_committer import EpisodeCommitter

ENV_ID: Final = "CartPole-v1"
NUM_ENVS: Final = 8
NUM_WORKERS: Final = 2
TURN_S: Final = 6.0
INTERVAL_S: Final = 1.0


def orders(lake: Lake, dataset: str, num_workers: int, *, records: bool) -> list[WorkerSpec]:
    """Return what so many workers are to collect, without an end."""
    num = max(1, num_workers)
    config = RolloutConfig(ENV_ID, envs_per_worker=NUM_ENVS)
    producer = f"bench/{'recorded' if records else 'unrecorded'}"
    return [
        WorkerSpec(
            lake.url,
            dataset,
            producer,
            i,
            EpisodeNumbers(i, num),
            BehaviorPolicy(),
            config,
            records=records,
        )
        for i in range(num)
    ]


def collected(
    pool: WorkerPool, recorder: EpisodeCommitter | None, turn_s: float
) -> tuple[float, Timings]:
    """Return the steps a second of all workers together, from their first shipments on.

    Timings are of all that they did meanwhile.
    """
    for worker in range(pool.size):
        pool.request_steps(worker, NUM_ENVS)
    for _ in range(pool.size):
        _shipment(pool)
    flush_steps = RolloutConfig(ENV_ID).flush_steps
    for worker in range(pool.size):
        pool.request_steps(worker, flush_steps)
    timings, num_steps = Timings("workers"), 0
    started = time.perf_counter()
    waiting = set(range(pool.size))
    while waiting:
        shipment = _shipment(pool)
        num_steps += shipment.num_steps
        timings.merge(shipment.timings)
        if time.perf_counter() - started < turn_s:
            pool.request_steps(shipment.worker, flush_steps)
        else:
            waiting.discard(shipment.worker)
        if recorder is not None and shipment.written is not None:
            recorder.add(shipment.written)
    if recorder is not None:
        recorder.flush()
        timings.merge(recorder.timings)
    return num_steps / (time.perf_counter() - started), timings


def stepped(num_steps: int = 200_000) -> float:
    """Return the steps a second of one process that steps 8 environments and nothing else."""
    envs = [make(ENV_ID) for _ in range(NUM_ENVS)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    seed = NUM_ENVS
    actions = np.random.default_rng(0).integers(0, 2, num_steps).tolist()
    started = time.perf_counter()
    for start in range(0, num_steps - NUM_ENVS + 1, NUM_ENVS):
        for i, env in enumerate(envs):
            _, _, terminated, truncated, _ = env.step(actions[start + i])
            if terminated or truncated:
                env.reset(seed=seed)
                seed += 1
    return num_steps / (time.perf_counter() - started)


def rates(
    folder: Path, num_workers: int, *, records: bool, turn_s: float = TURN_S
) -> tuple[float, Timings]:
    """Return the steps a second and what they took of workers in a lake of their own."""
    lake = open_lake(folder / "lake", create=True)
    dataset = lake.dataset("play")
    dataset.create(*spaces_of(ENV_ID))
    given = orders(lake, dataset.name, num_workers, records=records)
    with ExitStack() as stack:
        recorder = None
        if records:
            recorder = stack.enter_context(
                EpisodeCommitter(dataset, "bench", interval_s=GROUP_INTERVAL_S)
            )
        pool = stack.enter_context(closing(_pool(given, num_workers)))
        rate, timings = collected(pool, recorder, turn_s)
        if recorder is not None:
            _check_complete(dataset, recorder)
    return rate, timings


def _pool(given: Sequence[WorkerSpec], num_workers: int) -> WorkerPool:
    if num_workers:
        return RayPool(given, interval_s=INTERVAL_S)
    return LocalPool(given, interval_s=INTERVAL_S)


def _shipment(pool: WorkerPool) -> RolloutBatch:
    while True:
        answer = pool.receive(INTERVAL_S)
        if isinstance(answer, RolloutBatch):
            return answer
        if answer is not None:
            raise SystemExit(f"worker {answer.worker} died: {answer.reason}")


def _check_complete(dataset: Dataset, recorder: EpisodeCommitter) -> None:
    found = dataset.snapshot().num_steps
    expected = sum(one.commit.num_steps for one in recorder.take_acknowledged())
    if found != expected:
        raise SystemExit(f"found {found} steps in the lake, expected {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="holds the lakes meanwhile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-s", type=float, default=TURN_S)
    options = parser.parse_args()
    best: dict[tuple[str, str], tuple[float, Timings]] = {}
    for _ in range(options.rounds):
        for case, found in turn(options.folder, options.turn_s):
            if found[0] > best.get(case, (0.0, None))[0]:
                best[case] = found
    for (workload, system), (rate, timings) in best.items():
        links = {
            link: round(total.seconds / max(1, total.items) * 1e6, 3)
            for (_, link), total in timings.totals.items()
        }
        line = {"workload": workload, "system": system, "figure": round(rate), "unit": "steps/s"}
        print(json.dumps({**line, "us_an_item": links}), flush=True)


def turn(
    folder: Path | None, turn_s: float
) -> Iterator[tuple[tuple[str, str], tuple[float, Timings]]]:
    """Yield (workload, system) and (steps a second, what they took) of each system once."""
    for num_workers in (0, NUM_WORKERS):
        workers = f"{num_workers} Ray workers" if num_workers else "no Ray"
        workload = f"random play of CartPole, {workers} x {NUM_ENVS}"
        for system, records in (("ours", True), ("ours, recording off", False)):
            with tempfile.TemporaryDirectory(prefix="rollout-", dir=folder) as scratch:
                found = rates(Path(scratch), num_workers, records=records, turn_s=turn_s)
            yield (workload, system), found
        if not num_workers:
            yield (workload, "stepped alone"), (stepped(), Timings("workers"))


if __name__ == "__main__":
    main()
