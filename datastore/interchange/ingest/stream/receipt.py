"""Stream receipt: what became of the lines of a stream, on the way and in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from replaylake.datastore.interchange.ingest.receipt import Counts
from replaylake.datastore.lake.commit import KeyCounts


@dataclass(frozen=True)
class StreamProgress:
    """Lines so far, steps committed, steps that wait for others, and the last version."""

    num_lines: int
    num_committed: int
    num_waiting: int
    version: int | None


@dataclass(frozen=True)
class Reason:
    """A check that failed: in how many lines, and one example."""

    check: str
    num_lines: int
    example: str


@dataclass(frozen=True)
class StreamReceipt:
    """What became of every line; `lines.read` is the sum of the other counts.

    For dialogues, which have several steps per line, `lines` counts steps, and lines that could not
    be read. num_lines: the number of lines that are not empty. reasons: the checks that failed,
    in how many lines, with an example of each. keys: what became of steps whose keys were there;
    they are counted with what is already present, or rejected.
    """

    dataset: str
    stream: str
    lines: Counts
    num_lines: int = 0
    num_commits: int = 0
    version: int | None = None
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    renames: dict[str, str] = field(default_factory=dict)
    keys: KeyCounts = field(default_factory=KeyCounts)

    def to_json(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "version": self.version,
            "stream": self.stream,
            "lines": self.lines.to_json(),
            "num_lines": self.num_lines,
            "keys": self.keys.to_json(),
            "commits": self.num_commits,
            "rejections": [
                {"check": r.check, "num_lines": r.num_lines, "example": r.example}
                for r in self.reasons
            ],
            "notes": list(self.notes),
            "renames": self.renames,
        }
