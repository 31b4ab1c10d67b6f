"""Learning online: ours with every step recorded in a lake, and not, beside Stable-Baselines3.

learning   seconds from the first step to the last update: same networks, batches, updates a step
slow       steps/s of updates and an environment that takes 5 ms a step: asynchronous and in turns
latency    ms from a step taken to that step being there to sample

One torch thread in each process. Time is of the run's loop: making the environments, the networks
and Ray's processes comes before, the closing evaluation after.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from benchmarks.online.case import Measure

SYSTEMS: Final = ("ours", "by_hand", "sb3")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--folder", type=Path, required=True, help="holds lakes between runs")
    parser.add_argument("--kinds", help="some of the kinds above, by commas: learning,slow")
    parser.add_argument("--algorithm", choices=("dqn", "sac"), help="learning: only this one")
    parser.add_argument("--turns", type=int, default=1, help="learning: repeats, taking turns")
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        help='ours: some of them, "" is ours itself',
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A system's libraries are imported by its own module: each runs in its own environment.
    kinds: Mapping[str, Measure] = importlib.import_module(
        f"benchmarks.online.{options.system}"
    ).KINDS
    for kind in options.kinds.split(",") if options.kinds else kinds:
        for found in kinds[kind](options.folder, options) if kind in kinds else ():
            system = options.system + (f", {found.variant}" if found.variant else "")
            line = {"workload": found.workload, "system": system}
            print(json.dumps({**line, "figure": found.figure, "unit": found.unit}), flush=True)


if __name__ == "__main__":
    main()
