"""Reverted fixes: faults that were fixed, brought back in the processes of the cases.

Each takes a guard out of the readers, as they were before its fix. The harness has to find the
fault again by its mutations of valid files: `python tests/fuzz/reverted.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent))
from pool import Report, Target, prepare, run_target
from targets import TARGETS

from replaylake.datastore.episodes import schema as episodes_schema
from replaylake.datastore.episodes import spaces
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generic import (
    arrow,
    encoded_columns,
    parquet,
    standard,
)
from replaylake.datastore.interchange.formats.generic.encoded_columns import ColumnDecoder
from replaylake.datastore.interchange.formats.tabular import tables
from replaylake.datastore.interchange.formats.tabular.reader import Declaration

_STEP: Final = 50


@dataclass(frozen=True)
class Reverted:
    """A fix that is taken out, the seeds whose cases are run, and how many of them at most.

    shows_as: what the faults that it brings back begin with.
    """

    revert: Callable[[], None]
    seeds: Callable[[str], bool]
    num_cases: int
    shows_as: tuple[str, ...]


def find_again(name: str, target: Target, folder: Path) -> tuple[Report, Report, str]:
    """Run cases with a fix taken out until its fault is found.

    Returns the report of these cases, that of the one case with the fix in place, and its id; ""
    if the fault was not found in as many cases as it may take.
    """
    reverted = REVERTED[name]
    some = _SomeSeeds(target, [seed for seed in target.seeds() if reverted.seeds(seed)])
    report = Report(name)
    # The first case of each seed is the seed itself.
    for first in range(len(some.seeds()), reverted.num_cases, _STEP):
        one = run_target(
            some, folder, num_cases=_STEP, first=first, on_process=_in_process(reverted.revert)
        )
        report.num_cases += one.num_cases
        report.wall_s += one.wall_s
        for fault, ids in one.faults.items():
            report.faults.setdefault(fault, []).extend(ids)
            if fault.startswith(reverted.shows_as):
                _, seed, number = ids[0].split(":")
                alone = _SomeSeeds(target, [seed])
                fixed = run_target(alone, folder, num_cases=1, first=int(number))
                return report, fixed, ids[0]
    return report, Report(name), ""


def _in_process(revert: Callable[[], None]) -> Callable[[], Callable[[], None]]:
    def begin() -> Callable[[], None]:
        revert()
        return lambda: None

    return begin


class _SomeSeeds:
    """A target with some of its seeds."""

    def __init__(self, target: Target, seeds: list[str]) -> None:
        self.name, self._target, self._seeds = target.name, target, seeds

    def seeds(self) -> list[str]:
        return self._seeds

    def run(self, seed: str, number: int, folder: Path) -> None:
        self._target.run(seed, number, folder)


def _allow(*_: Any, **__: Any) -> None:
    """Stand for a check that refuses nothing."""


def _decode_whole(self: ColumnDecoder, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    columns = [encoded_columns._decode(column) for column in batch.columns]
    yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _without_decoding_in_parts() -> None:
    ColumnDecoder.parts = _decode_whole  # type: ignore[method-assign]
    parquet._find_dictionaries = lambda file: []


def _without_list_limit() -> None:
    encoded_columns.refuse_bomb = _allow
    parquet.refuse_bomb = _allow


def _without_depth_limit() -> None:
    def read(schemas: Iterable[pa.Schema], options: ReadOptions, where: str) -> Declaration | None:
        metadata = standard._own_metadata(next(iter(schemas)).metadata or {})
        if not metadata:
            return None
        spec = DatasetSpec.from_table(metadata, pa.schema([]))
        return Declaration(spaces=(spec.observation_space, spec.action_space))

    spaces.MAX_DEPTH = 10**9  # type: ignore[misc]
    episodes_schema.parse = lambda text: spaces.from_json(json.loads(text))  # type: ignore[assignment]
    arrow.read_declaration = parquet.read_declaration = read


def _without_column_limit() -> None:
    tables.MAX_COLUMNS = 10**9  # type: ignore[misc]


def _is_arrow(seed: str) -> bool:
    return "arrow" in seed and not seed.startswith("minari")


def _is_columnar(seed: str) -> bool:
    return _is_arrow(seed) or "parquet" in seed


def _is_text(seed: str) -> bool:
    return seed.startswith(("csv", "jsonl", "decisions", "events", "mapped", "sorted", "struct"))


_MEMORY: Final = (
    "takes 2 GiB",
    "takes 3 GiB",
    "MemoryError",
    "ArrowMemoryError",
    "the process ended by",
)
REVERTED: Final[dict[str, Reverted]] = {
    "arrow-runs": Reverted(_without_decoding_in_parts, _is_arrow, 2000, _MEMORY),
    "dictionaries": Reverted(
        _without_decoding_in_parts,
        lambda seed: seed in ("long_arrow", "long_parquet"),
        2000,
        _MEMORY,
    ),
    "long-lists": Reverted(_without_list_limit, _is_columnar, 2000, _MEMORY),
    "nested-spaces": Reverted(_without_depth_limit, _is_columnar, 2000, ("RecursionError",)),
    "many-columns": Reverted(_without_column_limit, _is_text, 2000, ("takes too long",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(REVERTED))
    given = parser.parse_args()
    num_missed = 0
    with tempfile.TemporaryDirectory(prefix="replaylake-fuzz-") as folder:
        target = prepare(TARGETS["formats"], Path(folder))
        for name in given.names or REVERTED:
            start = time.monotonic()
            report, fixed, case = find_again(name, target, Path(folder) / "cases")
            num_missed += not case or bool(fixed.faults)
            found = next((f for f, ids in report.faults.items() if case in ids), "not found")
            print(
                f"{name}: {found} in {report.num_cases} cases, {time.monotonic() - start:.0f} s, "
                f"{case}; with the fix: {fixed.faults or 'no fault'}",
                flush=True,
            )
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
