"""From a rollout worker to the trainer over two Ray nodes, beside a bare message of as many bytes.

The nodes are two raylets of this machine, each with an object store of its own; the trainer is on
one, the worker on the other. `ours` is what a run measures as `transfer`: from the request to the
episodes in the trainer's process, without what the worker is busy with. `put and get` is an actor
on the worker's node that answers the same request with one array of the same bytes, which Ray puts
into the object store there and the trainer gets. They take turns; the middle of the turns and of
their ratios counts.

    python -m benchmarks.transfer --folder DIR
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.environments.ids import spaces_of
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.rollout_batch import EpisodeNumbers, RolloutBatch, WorkerSpec
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.pools.cluster import import_ray
from replaylake.online.pools.ray_pool import RayPool

ENV_ID: Final = "benchmarks.online.environment:frames"
# Of 84 x 84 bytes each: 0.9, 7.2 and 28.9 MB.
NUM_STEPS: Final = (128, 1_024, 4_096)
STORE_BYTES: Final = 512 << 20
BAR: Final = 1.5


class Sender:
    """Answers with one array, made before."""

    def __init__(self) -> None:
        self._message = np.zeros(0, np.uint8)

    def prepare(self, num_bytes: int) -> None:
        self._message = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)

    def send(self) -> np.ndarray[Any, Any]:
        return self._message


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write")
    parser.add_argument("--turns", type=int, default=51, help="messages of each size and system")
    options = parser.parse_args()
    # The nodes' processes inherit it, to find the environment.
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    ray = import_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES},
    )
    try:
        cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measure(ray, Path(folder), options.turns)
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(ray: Any, folder: Path, num_turns: int) -> None:
    """Print the megabytes a second of both, and the ratio, for each size."""
    lake = open_lake(folder / "lake", create=True)
    lake.dataset("frames").create(*spaces_of(ENV_ID, {}))
    spec = WorkerSpec(
        lake.url,
        "frames",
        "bench/transfer",
        0,
        EpisodeNumbers(),
        BehaviorPolicy(),
        RolloutConfig(ENV_ID, envs_per_worker=1),
        records=False,
    )
    sender = ray.remote(num_cpus=1)(Sender).remote()
    with closing(RayPool([spec], interval_s=600.0, with_open=True)) as pool:
        receive(pool, 8)  # starts the worker
        pool.take_timings()
        for num_steps in NUM_STEPS:
            receive(pool, num_steps)
            num_bytes = take_transfer(pool)[1]
            ray.get(sender.prepare.remote(num_bytes))
            ray.get(sender.send.remote())
            ours, bare = [], []
            for _ in range(num_turns):
                receive(pool, num_steps)
                ours.append(take_transfer(pool)[0])
                started = time.perf_counter()
                ray.get(sender.send.remote())
                bare.append(time.perf_counter() - started)
            report(num_bytes, ours, bare)


def receive(pool: RayPool, num_steps: int) -> RolloutBatch:
    """Request steps and wait for them."""
    pool.request_steps(0, num_steps)
    while True:
        answer = pool.receive(60.0)
        if isinstance(answer, RolloutBatch):
            return answer
        if answer is not None:
            raise SystemExit(f"transfer: lost the worker: {answer}")


def take_transfer(pool: RayPool) -> tuple[float, int]:
    """Return the seconds and bytes of the message since the last call."""
    total = pool.take_timings().totals["workers", "transfer"]
    return total.seconds, total.num_bytes


def report(num_bytes: int, ours: Sequence[float], bare: Sequence[float]) -> None:
    """Print the middle of the seconds of both as rates, and of their ratios."""
    ours_s, bare_s = statistics.median(ours), statistics.median(bare)
    ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    workload = f"worker to trainer over two Ray nodes, {num_bytes / 1e6:.1f} MB"
    for system, seconds in (("ours", ours_s), ("put and get", bare_s)):
        line = {"figure": num_bytes / seconds / 1e6, "unit": "MB/s"}
        print(json.dumps({"workload": workload, "system": system, **line}), flush=True)
    print(
        f"# {workload}: {1e3 * ours_s:.2f} ms, bare {1e3 * bare_s:.2f} ms, "
        f"{ratio:.2f} times (bar {BAR})",
        flush=True,
    )


if __name__ == "__main__":
    main()
