"""TransferQueue with our storage backend, beside its SimpleStorage: put, get and handouts.

Each sample has 4,096 tokens with ids (int64), a loss mask (bool) and log-probs (float32). The
systems take turns in one process, each with a controller of its own: `simple`, SimpleStorage with
its two storage units; `ours`, where acknowledged means written and fsynced in groups; `synced`,
where each put is fsynced first; each get is of what the same turn has put, compared with it, and
cleared afterwards. Prints one JSON line per figure, in ms, with the middle, least and most of the
rounds, and at last the ratios of the middles. A handout is what a controller does for a batch of
2,000 rows by GRPOGroupNSampler, whose cache keeps all batches, with and without our log of it.

    .ci/compat transferqueue    # once: makes the environment
    .bench/compat-transferqueue/bin/python -m benchmarks.transferqueue [--rounds 30] [--folder F]

The bars of issue 22: at most 1.3 times SimpleStorage, `synced` at most 3 times. Ray's actors and
this process share the cores: with fewer than four idle ones, they wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TQ_LOGGING_LEVEL"] = "ERROR"

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.utils.perf_utils import IntervalPerfMonitor
from transfer_queue.utils.zmq_utils import (
    ZMQMessage,
    ZMQRequestType,
    process_zmq_server_info,
)

from replaylake.online.recorders.transferqueue.backend import NAME
from replaylake.online.recorders.transferqueue.controller import install

NUM_SAMPLES: Final = 64
NUM_TOKENS: Final = 4_096
NUM_ROWS: Final = 2_000
_WARM_UP: Final = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="where to write; must be a real disk")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(num_cpus=8, include_dashboard=False, logging_level="error", namespace="bench")
    try:
        with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
            tq.init()
            # Ray ends an actor whose handle is gone.
            controller, ours = _connect(Path(folder) / "ours", sync_every=False)
            another, synced = _connect(Path(folder) / "synced", sync_every=True)
            clients = {"simple": tq.get_client(), "ours": ours, "synced": synced}
            figures = measure(clients, options.rounds)
            report(figures, f"of {NUM_SAMPLES} x {NUM_TOKENS:,} tokens", "SimpleStorage")
            figures = measure_handouts(Path(folder) / "handouts", options.rounds)
            report(figures, f"of {NUM_ROWS:,} rows by GRPO", "the controller alone")
            ray.kill(controller)
            ray.kill(another)
            tq.close()
    finally:
        ray.shutdown()


def measure(clients: Mapping[str, Any], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return ms by (system, put or get), of each round."""
    shape = (NUM_SAMPLES, NUM_TOKENS)
    data = TensorDict(
        {
            "ids": torch.randint(0, 150_000, shape),
            "loss_mask": torch.rand(shape) < 0.5,
            "log_probs": torch.randn(shape),
        },
        [NUM_SAMPLES],
    )
    figures: dict[tuple[str, str], list[float]] = {}
    names = list(clients)
    for number in range(_WARM_UP + rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            client = clients[name]
            start_s = time.perf_counter()
            metadata = client.put(data, partition_id="train")
            put_s = time.perf_counter()
            found = client.get_data(metadata)
            get_s = time.perf_counter()
            for field, expected in data.items():
                assert torch.equal(torch.stack(list(found[field].unbind())), expected)
            client.clear_samples(metadata)
            if number >= _WARM_UP:
                figures.setdefault((name, "put"), []).append(1e3 * (put_s - start_s))
                figures.setdefault((name, "get"), []).append(1e3 * (get_s - put_s))
    return figures


def measure_handouts(folder: Path, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return ms by (system, handout), of each round."""
    make = TransferQueueController.__ray_metadata__.modified_class
    controllers = {
        name: make(sampler=GRPOGroupNSampler(8), polling_mode=True) for name in ("simple", "ours")
    }
    field = {"dtype": torch.int64, "shape": (1,), "is_nested": False, "is_non_tensor": False}
    for controller in controllers.values():
        num_rows = NUM_ROWS * (_WARM_UP + rounds)
        rows = controller.get_metadata(["x"], "train", mode="insert", batch_size=num_rows)
        controller.update_production_status("train", rows.global_indexes, {"x": field}, None)
    install(controllers["ours"], str(folder), False)
    monitor = IntervalPerfMonitor("handouts")
    figures: dict[tuple[str, str], list[float]] = {}
    for number in range(_WARM_UP + rounds):
        place = {"partition_id": "train", "task_name": "actor"}
        body = {
            **place,
            "data_fields": ["x"],
            "batch_size": NUM_ROWS,
            "mode": "fetch",
            "sampling_config": {**place, "dp_rank": 0, "batch_index": number},
        }
        for name in sorted(controllers, reverse=number % 2 == 0):
            request = ZMQMessage.create(ZMQRequestType.GET_META, name, body=body)
            start_s = time.perf_counter()
            reply = controllers[name]._handle_request(request, monitor)
            took_s = time.perf_counter() - start_s
            assert reply.body["metadata"].size == NUM_ROWS
            if number >= _WARM_UP:
                figures.setdefault((name, "handout"), []).append(1e3 * took_s)
    return figures


def report(figures: Mapping[tuple[str, str], list[float]], size: str, peer: str) -> None:
    """Print the figures, and the ratios to those of `simple`, which is `peer`."""
    middle = {key: statistics.median(rounds) for key, rounds in figures.items()}
    for (system, action), rounds in figures.items():
        line = {"workload": f"{action} {size}", "system": system}
        spread = {"least": round(min(rounds), 1), "most": round(max(rounds), 1)}
        figure = round(middle[system, action], 1)
        print(json.dumps({**line, "figure": figure, "unit": "ms", **spread}), flush=True)
    for system, action in sorted(figures):
        if system != "simple":
            ratio = middle[system, action] / middle["simple", action]
            line = {"workload": f"{action} beside {peer}", "system": system}
            print(json.dumps({**line, "figure": round(ratio, 2), "unit": "times"}), flush=True)


def _connect(folder: Path, *, sync_every: bool) -> tuple[Any, Any]:
    """Start a controller of its own, as `tq.init` makes one alone, and return it and a client."""
    controller = TransferQueueController.options(name=folder.name).remote()
    run: Any = controller.__ray_call__
    restored = ray.get(run.remote(install, str(folder), sync_every))
    server = process_zmq_server_info(controller)
    client = TransferQueueClient(f"client-{folder.name}", server)
    options = {"path": str(folder), "attempt": restored["attempt"], "sync_every_put": sync_every}
    client.initialize_storage_manager(NAME, options)
    return controller, client


if __name__ == "__main__":
    main()
