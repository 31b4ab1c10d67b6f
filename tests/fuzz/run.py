"""Run targets for some minutes each, or replay one case: `python tests/fuzz/run.py --help`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pool import Report, prepare, run_case, run_target
from targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each target")
    parser.add_argument("--cases", type=int, help="at most so many for each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", help="run one case, TARGET:SEED:NUMBER, in this process")
    parser.add_argument("--coverage", action="store_true", help="print lines of readers that ran")
    given = parser.parse_args()
    # In memory where it can be: an ingest waits for the disk several times.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="replaylake-fuzz-", dir=memory) as name:
        folder = Path(name)
        if given.case:
            target, seed, number = given.case.split(":")
            print(
                run_case(prepare(TARGETS[target], folder), seed, int(number), folder / "case")
                or "read"
            )
            return 0
        reports: list[Report] = []
        for target in given.targets or TARGETS:
            report = run_target(
                prepare(TARGETS[target], folder),
                folder / "cases",
                num_cases=given.cases,
                max_s=given.minutes * 60,
                first=given.first,
                on_process=_measure(folder) if given.coverage else None,
            )
            reports.append(report)
            print(report.text(), flush=True)
        if given.coverage:
            _print_coverage(folder)
        return int(any(report.faults for report in reports))


def _measure(folder: Path) -> Callable[[], Callable[[], None]]:
    """Return what measures the lines of readers that a process runs."""
    import coverage

    def begin() -> Callable[[], None]:
        measured = coverage.Coverage(
            data_file=str(folder / "coverage"),
            data_suffix=True,
            include=["*/datastore/interchange/formats/*", "*/datastore/interchange/sources/*"],
        )
        measured.start()

        def end() -> None:
            measured.stop()
            measured.save()

        return end

    return begin


def _print_coverage(folder: Path) -> None:
    import coverage

    measured = coverage.Coverage(data_file=str(folder / "coverage"))
    measured.combine([str(path) for path in folder.glob("coverage.*")])
    measured.report(file=sys.stdout, show_missing=False)


if __name__ == "__main__":
    sys.exit(main())
