"""Sequences of language agents: ingest, batches to tensors, opening, bytes at rest.

The kinds: `ingest`, NeMo-RL's JSONL into a lake with fsync and all checks, beside
`datasets.load_dataset` of the same file, in MB of the file a second, and the bytes a token that
each leaves on the disk; `sample`, a batch of 64 whole sequences of 2,048 tokens with ids, loss
mask and log-probs as torch tensors in one thread, each compared with what was stored, beside one
memcpy of the same bytes from a random place; `open`, a snapshot of a million sequences to its first
batch, with the page cache dropped where the system allows it (root), and again from the cache;
`trajectory`, one of 200,000 tokens in a process of its own. 10 GB free below the folder, and 8 GB
of memory. `--small` runs the same code on little data.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.language.case import FULL, SMALL, Measure

SYSTEMS: Final = ("ours", "memcpy", "datasets", "torchrl", "transferqueue")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--folder", type=Path, required=True, help="holds files between runs")
    parser.add_argument("--kinds", help="some kinds, by commas: ingest,sample,open,trajectory")
    parser.add_argument("--small", action="store_true", help="little data, to try it out")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    # A system's libraries are imported by its own module: each runs in its own environment.
    kinds: Mapping[str, Measure] = importlib.import_module(
        f"benchmarks.language.{options.system}"
    ).KINDS
    for kind in options.kinds.split(",") if options.kinds else kinds:
        if kind in kinds:
            for workload, figure, unit in kinds[kind](
                options.folder.resolve(), SMALL if options.small else FULL
            ):
                line = {"workload": workload, "system": options.system}
                print(json.dumps({**line, "figure": figure, "unit": unit}), flush=True)


if __name__ == "__main__":
    main()
