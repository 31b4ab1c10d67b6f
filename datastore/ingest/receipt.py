"""Receipt: what an ingest read, committed, rejected and found already present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from replaylake.datastore.formats.format import Rejected

# Enough to look at; the counts are always whole.
_MAX_SHOWN: Final = 100


@dataclass(frozen=True)
class Counts:
    """Episodes or steps; `read`, all that the source's files hold, is the sum of the other three.

    What is in a further file of the same bytes is already present.
    """

    committed: int = 0
    rejected: int = 0
    already_present: int = 0

    @property
    def read(self) -> int:
        """All that were found in the source."""
        return self.committed + self.rejected + self.already_present

    def to_json(self) -> dict[str, int]:
        """Return the four counts."""
        return {
            "read": self.read,
            "committed": self.committed,
            "rejected": self.rejected,
            "already_present": self.already_present,
        }


@dataclass(frozen=True)
class Reason:
    """A door check that failed: in how many episodes, and one example."""

    check: str
    num_episodes: int
    example: str


@dataclass(frozen=True)
class Receipt:
    """What `ingest` did. `version` is None when nothing new was committed."""

    dataset: str
    version: int | None
    source: tuple[str, ...]
    num_files: int
    content_hash: str
    format: str
    episodes: Counts
    steps: Counts
    num_shards: int
    num_bytes: int
    reasons: tuple[Reason, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; at most 100 rejected episodes are listed one by one."""
        return {
            "dataset": self.dataset,
            "version": self.version,
            "source": {
                "paths": list(self.source),
                "num_files": self.num_files,
                "content_hash": self.content_hash,
            },
            "format": self.format,
            "episodes": self.episodes.to_json(),
            "steps": self.steps.to_json(),
            "rejections": [
                {"check": r.check, "num_episodes": r.num_episodes, "example": r.example}
                for r in self.reasons
            ],
            "rejected_episodes": [
                {
                    "episode": one.source_episode_id,
                    "num_steps": one.num_steps,
                    "reasons": [finding.message for finding in one.findings],
                }
                for one in self.rejected
            ],
            "shards": self.num_shards,
            "bytes": self.num_bytes,
            "notes": list(self.notes),
            "renames": dict(self.renames),
        }


class Tally:
    """Collects rejected episodes."""

    def __init__(self) -> None:
        self.num_episodes = 0
        self.num_steps = 0
        self.shown: list[Rejected] = []
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def add(self, rejected: Rejected) -> None:
        """Count one episode."""
        self.num_episodes += 1
        self.num_steps += rejected.num_steps
        if len(self.shown) < _MAX_SHOWN:
            self.shown.append(rejected)
        for check in dict.fromkeys(finding.check for finding in rejected.findings):
            self._counts[check] = self._counts.get(check, 0) + 1
        for finding in rejected.findings:
            example = f"episode {rejected.source_episode_id}: {finding.message}"
            self._examples.setdefault(finding.check, example)

    def join(self, other: Tally) -> None:
        """Count what another one collected too."""
        self.num_episodes += other.num_episodes
        self.num_steps += other.num_steps
        self.shown = [*self.shown, *other.shown][:_MAX_SHOWN]
        for check, count in other._counts.items():
            self._counts[check] = self._counts.get(check, 0) + count
        self._examples = {**other._examples, **self._examples}

    def reasons(self) -> tuple[Reason, ...]:
        """Return each check that failed, the most frequent first."""
        ordered = sorted(self._counts.items(), key=lambda item: -item[1])
        return tuple(Reason(check, count, self._examples[check]) for check, count in ordered)
