"""`make bench`: every workload beside its peers in one run, each peer in its own environment.

Prints one JSON line per figure and system, and at the end a table: the middle of the rounds, and
how many times better than ours each system is. The systems of a workload take turns, so that what
disturbs the machine meets all of them. Peers are installed below .bench/ from peers/*.txt, once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ENVIRONMENTS: Final = HERE.parent / ".bench"


@dataclass(frozen=True)
class Workload:
    """A module and the systems it measures; without any it compares by itself, in one process.

    `peers` are the systems that need the environment of that name. `is_repeated`: whether the
    systems take turns several times; those that take long to store their data repeat in one turn.
    """

    module: str
    systems: tuple[str, ...] = ()
    peers: frozenset[str] = frozenset()
    is_repeated: bool = True


WORKLOADS: Final = (
    Workload("append", ("ours", "pyarrow", "minari"), frozenset({"minari"})),
    Workload("load", ("ours", "pyarrow", "pyarrow-table")),
    Workload("log"),
    Workload("sql"),
    Workload("memory", ("ours",)),
    Workload("ingest", ("ours", "by_hand")),
    Workload("learn"),
    Workload("rollout"),
    Workload("transfer"),
    Workload("gateway"),
    Workload("explorer"),
    Workload("ablation"),
    Workload("online", ("ours", "by_hand", "sb3"), frozenset({"sb3"})),
    Workload(
        "serving",
        ("ours", "ours_bentoml", "starlette", "starlette_act", "fastapi", "bentoml_api"),
        frozenset({"fastapi"}),
    ),
    Workload(
        "sampling",
        ("ours", "by_hand", "cpprb", "tianshou", "sb3", "torchrl", "d3rlpy", "rllib"),
        frozenset({"cpprb", "tianshou", "sb3", "torchrl", "d3rlpy", "rllib"}),
    ),
    Workload(
        "language",
        ("ours", "memcpy", "datasets", "torchrl", "transferqueue"),
        frozenset({"datasets", "torchrl", "transferqueue"}),
        is_repeated=False,
    ),
)

Figures = dict[tuple[str, str], dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", help=f"workloads, by commas: {','.join(w.module for w in WORKLOADS)}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--folder", type=Path, help="where to write; must be a real disk")
    options = parser.parse_args()
    known = [workload.module for workload in WORKLOADS]
    wanted = options.only.split(",") if options.only else known
    if unknown := set(wanted) - set(known):
        parser.error(f"--only: found {', '.join(sorted(unknown))}, expected {', '.join(known)}")
    figures: Figures = {}
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.folder or ENVIRONMENTS.parent))
    try:
        for workload in WORKLOADS:
            if workload.module in wanted:
                for line in run(workload, options.rounds, folder):
                    kept = figures.setdefault((line["workload"], line["unit"]), {})
                    kept.setdefault(line["system"], []).append(line["figure"])
    finally:
        shutil.rmtree(folder)
    print_table(figures)


def run(workload: Workload, rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a workload as they come; a system that fails is named and left out."""
    # What compares by itself takes its turns by itself, and memory does not depend on luck.
    turns = rounds if len(workload.systems) > 1 and workload.is_repeated else 1
    failed: set[str] = set()
    for _ in range(turns):
        for system in workload.systems or ("",):
            if system in failed:
                continue
            try:
                yield from lines(workload, system, folder)
            except subprocess.CalledProcessError as error:
                failed.add(system)
                note(f"{workload.module} {system}: exit code {error.returncode}, left out")


def lines(workload: Workload, system: str, folder: Path) -> Iterator[dict[str, Any]]:
    python = environment(system) if system in workload.peers else Path(sys.executable)
    command = [str(python), "-m", f"benchmarks.{workload.module}", *([system] if system else [])]
    print(f"# {workload.module} {system}", file=sys.stderr, flush=True)
    process = subprocess.run(
        [*command, "--folder", str(folder)],
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    for text in process.stdout.splitlines():
        if text.startswith("{"):
            print(text, flush=True)
            yield json.loads(text)
    # After what it had measured before it failed.
    process.check_returncode()


def environment(peer: str) -> Path:
    """Return the Python of a peer's environment, installed first where it is not as the file says.

    Raises: CalledProcessError if it cannot be installed.
    """
    needs = HERE / "peers" / f"{peer}.txt"
    folder = ENVIRONMENTS / peer
    stamp, digest = folder / "installed", hashlib.sha256(needs.read_bytes()).hexdigest()
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != digest:
        note(f"installing {peer} into {folder}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(needs)], check=True)
        stamp.write_text(digest)
    return python


def print_table(figures: Figures) -> None:
    """Print the middle of each system's figures; a ratio above 1 is better than ours."""
    rows = [("workload", "system", "figure", "unit", "ratio to ours")]
    for (workload, unit), systems in figures.items():
        middle = {system: statistics.median(found) for system, found in systems.items()}
        for system, figure in middle.items():
            ratio = ""
            if "ours" in middle and system != "ours":
                better = figure / middle["ours"]
                ratio = f"{better if unit.endswith('/s') else 1 / better:.2f}"
            shown = f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"
            rows.append((workload, system, shown, unit, ratio))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in (2, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    note(f"{os.cpu_count()} cores, load {load}; figures of one run compare, others do not")


def note(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
