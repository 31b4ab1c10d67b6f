"""Finding: one thing that a check of the lake has to say, and the collection of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

# Data is lost, damaged or contradicts itself: nothing may be trained on it.
ERROR: Final = "error"
# Worth knowing, and nothing to repair: steps that a log never had, files that vacuum removes.
NOTE: Final = "note"

# Enough to look at of one kind in one dataset; the counts are always whole.
_MAX_SHOWN: Final = 100


@dataclass(frozen=True)
class FsckFinding:
    """What is wrong, where, and what to do.

    `path` is below the lake, "" where no one file is meant; `version` is the one that named the
    file, None where it is of no version. `num_steps` are the rows that it makes unreadable.
    """

    severity: str
    check: str
    dataset: str
    path: str
    message: str
    version: int | None = None
    num_steps: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class FsckFindings:
    """Findings as they come: all are counted, the first hundred of a kind and dataset are kept."""

    def __init__(self) -> None:
        self.shown: list[FsckFinding] = []
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, finding: FsckFinding) -> None:
        key = (finding.severity, finding.check, finding.dataset)
        self._counts[key] += 1
        if self._counts[key] <= _MAX_SHOWN:
            self.shown.append(finding)

    def count(self, severity: str) -> int:
        """Return how many there are of a severity."""
        return sum(num for (kind, _, _), num in self._counts.items() if kind == severity)

    def counts(self) -> dict[str, int]:
        """Return how many there are of each check."""
        totals: Counter[str] = Counter()
        for (_, check, _), num in self._counts.items():
            totals[check] += num
        return dict(sorted(totals.items()))
