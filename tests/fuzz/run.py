"""Run targets for some minutes each, or replay one case: `python tests/fuzz/run.py --help`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
_READERS = ["*/datastore/interchange/formats/*", "*/datastore/interchange/sources/*"]
_LEAST_COVERAGE = 85.0
# What writes is no reader: modules, and below the functions and classes among readers.
_WRITERS = [
    "*/formats/hdf5/writer.py",
    "*/formats/minari/export.py",
    "*/formats/generic/text_rows.py",
    "*/formats/rllib/columns.py",
]
_EXCLUDED = [
    r"def write\(",
    # d4rl.py and d3rlpy.py
    r"def write_d4rl\(|class _D4rlWriter:|def _refuse_nested\(|def _refuse_spaces\(",
    r"def _write_episode\(|def _write_values\(",
    # tabular/infos.py
    r"def collect_infos\(|def require_rewards\(|def _plain\(column",
    # generic/standard.py
    r"def write_tables\(|def standard_(table|names|schema)\(|def _batches\(episodes",
    r"def _faithful\(|def _scatter\(|def _tensors\(values",
    # minari/spaces.py
    r"def to_json_text\(space|def _plain\(space|def _fill_bound\(|def _clip\(value",
    # transcripts.py
    r"def make_record\(|def _turns\(|class _TickRow|def _rows_values\(|def _rewards\(rewards",
    # hdf5/column_names.py
    r"def label_columns\(",
    # An extra that is not installed, and what protocols and base classes leave to others.
    r"except ImportError",
    r"raise NotImplementedError",
]
# Lines that run on import run here, before the processes of the cases.
_imports: Any = None
if {"--coverage", "--missing"} & {*sys.argv}:
    import coverage

    _imports = coverage.Coverage(include=_READERS, omit=_WRITERS)
    _imports.start()
from pool import Report, prepare, run_case, run_target  # noqa: E402
from targets import TARGETS  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each target")
    parser.add_argument("--cases", type=int, help="at most so many for each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", help="run one case, TARGET:SEED:NUMBER, in this process")
    parser.add_argument("--coverage", action="store_true", help="print lines of readers that ran")
    parser.add_argument("--missing", action="store_true", help="the same, with lines that did not")
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
                on_process=_measure(folder) if _imports is not None else None,
            )
            reports.append(report)
            print(report.text(), flush=True)
        if _imports is not None:
            _print_coverage(folder, show_missing=given.missing)
        return int(any(report.faults for report in reports))


def _measure(folder: Path) -> Callable[[], Callable[[], None]]:
    """Return what measures the lines of readers that a process runs."""
    import coverage

    _imports.stop()
    at_import = coverage.CoverageData(str(folder / "coverage.imports"))
    at_import.update(_imports.get_data())
    at_import.write()

    def begin() -> Callable[[], None]:
        measured = coverage.Coverage(
            data_file=str(folder / "coverage"),
            data_suffix=True,
            include=_READERS,
            omit=_WRITERS,
        )
        measured.start()

        def end() -> None:
            measured.stop()
            measured.save()

        return end

    return begin


def _print_coverage(folder: Path, *, show_missing: bool) -> None:
    import coverage

    measured = coverage.Coverage(data_file=str(folder / "coverage"))
    for pattern in _EXCLUDED:
        measured.exclude(pattern)
    measured.combine([str(path) for path in folder.glob("coverage.*")])
    measured.report(file=sys.stdout, show_missing=show_missing)
    below = [
        f"{path.relative_to(Path.cwd())} {percent:.0f}%"
        for path in map(Path, measured.get_data().measured_files())
        if (percent := _percent(measured, path)) < _LEAST_COVERAGE
    ]
    print(f"{len(below)} readers below {_LEAST_COVERAGE:.0f}%: {', '.join(below) or 'none'}")


def _percent(measured: Any, path: Path) -> float:
    _, lines, _, missing, _ = measured.analysis2(str(path))
    return 100.0 * (1 - len(missing) / len(lines)) if lines else 100.0


if __name__ == "__main__":
    sys.exit(main())
