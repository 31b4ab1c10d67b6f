"""Batches out of a replay buffer of 1M steps, us a batch, to torch tensors, in one thread.

Every system holds the same steps (obs 17, act 6), and what it samples is compared with them before
it is timed. A figure is the least of several means; what is odd about one stands behind its name.
The kinds: uniform, n-step, sequences, prioritized; frames (100,000 of 84x84 bytes, 0.7 GB, instead
of 1M); mapped and curve, on disk but warm in the page cache; open, from files to the first batch;
append, a step with all that it holds. The curve's 1e8 steps need 30 GB free below the folder and
are left out without.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from benchmarks.sampling.case import Cases, figure

SYSTEMS: Final = ("ours", "by_hand", "cpprb", "tianshou", "sb3", "torchrl", "d3rlpy", "rllib")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--folder", type=Path, required=True, help="holds files between runs")
    parser.add_argument("--kinds", help="some kinds of workloads, by commas: uniform,frames")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A system's libraries are imported by its own module: each runs in its own environment.
    kinds: Mapping[str, Cases] = importlib.import_module(
        f"benchmarks.sampling.{options.system}"
    ).KINDS
    for kind in options.kinds.split(",") if options.kinds else kinds:
        for case in kinds[kind](options.folder) if kind in kinds else ():
            system = options.system + (f" ({case.note})" if case.note else "")
            line = {"workload": case.workload, "system": system}
            print(json.dumps({**line, "figure": figure(case), "unit": case.unit}), flush=True)


if __name__ == "__main__":
    main()
