"""Peak resident memory of a run's driver that collects 50M steps, and how many shards it leaves.

The limit is 1,024 MiB beside the replay budget. Pieces of CartPole's shape are made here instead of
in workers, as fast as they are taken; all the rest is a run's own: written (`lake`: then followed,
as what Ray's workers ship; `direct`: put into the view, and recorded by a thread), committed ten
times a second, sampled from a view of 1M steps, and compacted meanwhile. torch, Ray and onnxruntime
are loaded, as they are in a driver. There is no peer: no other system here records what it learns
from.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime  # noqa: F401
import ray  # noqa: F401
import torch  # noqa: F401

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.online.recording.background_compactor import BackgroundCompactor
from replaylake.online.recording.episode_committer import EpisodeCommitter

LANES: Final = 16
ROUND_STEPS: Final = 256  # of each lane
EPISODE_STEPS: Final = 200
MAX_STEPS: Final = 1_000_000
PRODUCER: Final = "online/bench"
# Parts that were handed over and are not committed: a run stops collecting then.
MOST_WAITING: Final = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=["lake", "direct"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50_000_000)
    options = parser.parse_args()
    base = open_lake(options.folder / "online_memory", create=True)
    dataset = base.dataset("run")
    dataset.create(Box((4,)), Discrete(2))
    at_start = peak_mib()
    without = [PRODUCER] if options.system == "direct" else []
    started = time.monotonic()
    with (
        dataset.follow(max_steps=MAX_STEPS, without_producers=without) as view,
        EpisodeCommitter(dataset, PRODUCER, interval_s=0.1) as recorder,
        BackgroundCompactor(base.url, dataset, on_remark=print) as keeper,
    ):
        half = collect(options.system, options.steps, dataset, view, recorder)
        recorder.flush()
        view.wait_for(recorder.last_version)
        seconds = time.monotonic() - started
        records, grown = view.num_bytes / 2**20, resident_mib() - half
    report(
        options.steps,
        {
            "peak of the driver beside its replay budget": (peak_mib() - records, "MiB"),
            "replay budget": (records, "MiB"),
            "before it began": (at_start, "MiB"),
            "grown in its second half": (grown, "MiB"),
            "commits": (dataset.next_sequence(PRODUCER), ""),
            "live shards at the end": (len(dataset.snapshot().files), ""),
            "rounds of compaction": (len(keeper.rounds), ""),
            "steps/s": (options.steps / seconds, "1/s"),
        },
    )
    shutil.rmtree(options.folder / "online_memory")


def collect(
    system: str, num_steps: int, dataset: Dataset, view: LiveView, recorder: EpisodeCommitter
) -> float:
    """Hand over rounds of pieces as a run's feed does, and draw a batch after each.

    Returns what was resident after half of them, in MiB.
    """
    sampler, half = None, 0.0
    made = num_done = 0
    for num_parts, pieces in enumerate(rounds(), 1):
        if system == "direct":
            view.put(pieces)
            recorder.add(pieces)
        else:
            recorder.add(dataset.write(pieces))
        made += LANES * ROUND_STEPS
        if view.num_steps:
            sampler = sampler or view.uniform(256, seed=0)
            sampler.sample()
        if made >= num_steps // 2 and not half:
            half = resident_mib()
        if made >= num_steps:
            break
        while num_parts - num_done > MOST_WAITING:
            time.sleep(0.01)
            num_done = max([num_done, *(done.last + 1 for done in recorder.take_acknowledged())])
    return half


def rounds() -> Iterator[list[Episode]]:
    """Yield pieces of all lanes; episodes go on from one round to the next."""
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(LANES, EPISODE_STEPS + 1, 4)).astype(np.float32)
    actions = rng.integers(0, 2, (LANES, EPISODE_STEPS))
    numbers, at = np.arange(LANES), np.arange(LANES) * EPISODE_STEPS // LANES
    first = at.copy()
    while True:
        pieces = []
        for lane in range(LANES):
            left = ROUND_STEPS
            while left:
                begin = int(at[lane])
                end = min(begin + left, EPISODE_STEPS)
                pieces.append(
                    Episode(
                        episode_id=f"{PRODUCER}/{numbers[lane]}",
                        first_step=begin - int(first[lane]),
                        observations=observations[lane, begin:end],
                        actions=actions[lane, begin:end],
                        rewards=np.ones(end - begin),
                        behavior_log_probs=np.full(end - begin, -0.7, np.float32),
                        policies=np.full(end - begin, "run:bench", object),
                        policy_versions=np.full(end - begin, numbers[lane] // 1000),
                        terminated=end == EPISODE_STEPS,
                        final_observation=observations[lane, end],
                    )
                )
                left -= end - begin
                at[lane] = end
                if end == EPISODE_STEPS:
                    numbers[lane] += LANES
                    at[lane] = first[lane] = 0
        yield pieces


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def report(num_steps: int, figures: dict[str, tuple[float, str]]) -> None:
    for name, (figure, unit) in figures.items():
        line = {"workload": f"a run of {num_steps:,} steps: {name}", "system": "ours"}
        print(json.dumps({**line, "figure": round(figure, 1), "unit": unit}), flush=True)


if __name__ == "__main__":
    main()
