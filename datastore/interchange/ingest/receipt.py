"""Receipt: what an ingest read, committed, rejected and found already present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from replaylake.datastore.interchange.formats.checks import REJECTED, Check, CheckCounts, Finding
from replaylake.datastore.interchange.formats.format import RejectedEpisode
from replaylake.datastore.interchange.ingest.alignment import Alignment
from replaylake.datastore.lake.commit import KeyCounts

# Enough to look at; the counts are always whole.
_MAX_SHOWN: Final = 100


@dataclass(frozen=True)
class Counts:
    """Episodes or steps; `read`, all that the source's files hold, is the sum of the others.

    What is in a further file of the same bytes is already present. deleted_before: left out, as it
    is of what was deleted from the dataset.
    """

    committed: int = 0
    rejected: int = 0
    already_present: int = 0
    deleted_before: int = 0

    @property
    def read(self) -> int:
        """All that were found in the source."""
        return self.committed + self.rejected + self.already_present + self.deleted_before

    def to_json(self) -> dict[str, int]:
        """Return the counts; that of what was deleted before only where there is any."""
        counts = {
            "read": self.read,
            "committed": self.committed,
            "rejected": self.rejected,
            "already_present": self.already_present,
        }
        return counts | ({"deleted_before": self.deleted_before} if self.deleted_before else {})


@dataclass(frozen=True)
class IngestReceipt:
    """What `ingest` did. `version` is None when nothing new was committed.

    num_quarantined: rows that came into the dataset's quarantine now. checks: what was found in the
    source, be it rejected, corrected or only noted; like rejected and renames empty for a repeated
    ingest, because the earlier receipt has them. keys: what became of steps whose keys were there;
    they are counted with what is already present, or rejected.
    """

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
    num_quarantined: int = 0
    checks: tuple[Check, ...] = ()
    rejected: tuple[RejectedEpisode, ...] = ()
    notes: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    alignment: Alignment | None = None
    keys: KeyCounts = field(default_factory=KeyCounts)

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
            "keys": self.keys.to_json(),
            "checks": [check.to_json() for check in self.checks],
            "quarantined_rows": self.num_quarantined,
            "rejected_episodes": [
                {
                    "episode": one.name,
                    "num_steps": one.num_steps,
                    "reasons": [finding.message for finding in one.findings],
                }
                for one in self.rejected
            ],
            "shards": self.num_shards,
            "bytes": self.num_bytes,
            "notes": list(self.notes),
            "renames": dict(self.renames),
            "alignment": None if self.alignment is None else self.alignment.to_json(),
        }


class RejectionTally:
    """Collects rejected episodes."""

    def __init__(self) -> None:
        self.num_episodes = 0
        self.num_steps = 0
        self.shown: list[RejectedEpisode] = []
        self._counts = CheckCounts()

    def add(self, rejected: RejectedEpisode) -> None:
        """Count one episode."""
        self.num_episodes += 1
        self.num_steps += rejected.num_steps
        if len(self.shown) < _MAX_SHOWN:
            # Without what holds the memory that it was read with.
            self.shown.append(replace(rejected, rows=None, places=None))
        by_check: dict[tuple[str, str], list[Finding]] = {}
        for finding in rejected.findings:
            by_check.setdefault((finding.check, finding.column), []).append(finding)
        for (check, column), findings in by_check.items():
            example = f"episode {rejected.name}: {findings[0].message}"
            num_rows = max(finding.num_rows for finding in findings)
            place = findings[0].place
            found = Check(check, REJECTED, 1, num_rows, example, place=place, column=column)
            self._counts.add(found)

    def merge(self, other: RejectionTally) -> None:
        """Count what another one collected too."""
        self.num_episodes += other.num_episodes
        self.num_steps += other.num_steps
        self.shown = [*self.shown, *other.shown][:_MAX_SHOWN]
        for check in other.checks():
            self._counts.add(check)

    def checks(self) -> tuple[Check, ...]:
        """Return each check that failed, the most frequent first."""
        return self._counts.checks()
