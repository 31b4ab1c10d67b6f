"""Inspection: the first reading of a source, in which every episode is checked, nothing written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec, arrow_schema
from replaylake.datastore.errors import EpisodeInvalid
from replaylake.datastore.interchange.formats.checks import Check, CheckCounts
from replaylake.datastore.interchange.formats.format import EncodedReading, Reading, Rejected
from replaylake.datastore.interchange.ingest.alignment import Windows
from replaylake.datastore.interchange.ingest.door import Door
from replaylake.datastore.interchange.ingest.duplicates import Duplicates
from replaylake.datastore.interchange.ingest.receipt import Tally
from replaylake.datastore.interchange.ingest.runs import (
    in_runs,
    one_refusal,
    refused_whole,
    whole_of,
    with_rows,
)
from replaylake.datastore.storage.table.delta_schema import to_delta

ABORT: Final = "abort"
REJECT: Final = "reject"

# Episodes are kept for the second reading up to this size.
_KEEP_BYTES: Final = 128 << 20
# What a rejected episode takes beside its values: a table of one row has many parts. Measured on
# 99,000 of them with six columns, 12 kB each.
_REJECTED_BYTES: Final = 16 << 10
# Steps that are checked at once: enough that numpy and not Python does the work on short episodes.
_CHECK_STEPS: Final = 65_536


@dataclass(frozen=True)
class Progress:
    """How far an ingest is: `version` is the last commit that was acknowledged, if any.

    stage: `hash`, of the files' bytes; `read`, of rows; `check` and `commit`, of steps. num_bytes
    of total_bytes (unpacked, unless hashing) tell how much of the files was read, where known.
    """

    stage: str
    num_episodes: int
    num_steps: int
    total_steps: int | None = None
    version: int | None = None
    num_bytes: int = 0
    total_bytes: int | None = None


# An episode or, where one has gaps and is split, a run of it.
_Key = tuple[str, str, int]

OnProgress = Callable[[Progress], None]


class Inspection:
    """Which episodes of a source are accepted, and the spaces they need."""

    def __init__(
        self, reading: Reading, door: Door, on_invalid: str, on_progress: OnProgress | None
    ) -> None:
        self._reading = reading
        self._door = door
        self._aborts = on_invalid == ABORT
        self._on_progress = on_progress
        self._refused: set[_Key] = set()
        self._last: tuple[str, str] | None = None
        self._kept: list[Episode | Rejected] | None = []
        self._kept_bytes = 0
        self._duplicates = Duplicates()
        self.tally = Tally()
        self.windows: Windows | None = None
        self.num_episodes = 0
        self.num_steps = 0

    def run(self) -> None:
        """Read to the end. Raises: EpisodeInvalid at the first invalid episode, when aborting."""
        batch: list[Episode] = []
        num_steps = 0
        for found in self._reading:
            if isinstance(found, Rejected):
                self._reject(found)
                self._keep([_alone(found)])
                continue
            # Runs of one episode are never parted.
            if num_steps >= _CHECK_STEPS and whole_of(found) != whole_of(batch[-1]):
                self._check(batch)
                batch, num_steps = [], 0
            batch.append(found)
            num_steps += len(found)
        self._check(batch)

    def spec(self) -> DatasetSpec:
        """Return what the dataset has to hold, its further columns too.

        Raises: SourceInvalid if no episode was accepted; SchemaMismatch if no table can hold it.
        """
        spec = self._door.spec(self._reading.num_actions)
        spec = replace(spec, extras={**self._reading.extras, **spec.extras})
        if isinstance(self._reading, EncodedReading):
            spec = replace(spec, encoding=spec.encoding or self._reading.encoding)
        to_delta(arrow_schema(spec))
        return spec

    def checks(self) -> tuple[Check, ...]:
        """Return what the door found: rejected first, then corrected and noted."""
        counts = CheckCounts()
        for part in (self.tally.checks(), self._reading.checks, self._duplicates.checks()):
            for check in part:
                counts.add(check)
        return counts.checks()

    def found(self) -> Iterator[Episode | Rejected]:
        """Return all that was found, with the rows of what was rejected: kept, or read again."""
        if self._kept is not None:
            yield from self._kept
            return
        for found in in_runs(self._reading):
            if isinstance(found, Rejected):
                yield found
            elif said := [self._door.refusal(r) for r in found if _key(r) in self._refused]:
                yield with_rows(one_refusal(said, found), found)
            else:
                yield from map(self._door.fitted, found)

    def _check(self, batch: list[Episode]) -> None:
        accepted, refused = self._door.check(batch)
        self._refused |= {_key(run) for _, run in refused}
        accepted, rejected = refused_whole(accepted, refused)
        for one, runs in rejected:
            self._reject(one)
            if self._kept is not None:
                self._keep([with_rows(one, runs)])
        self.num_episodes += num_whole(accepted, self._last)
        if accepted:
            self._last = whole_of(accepted[-1])
        self.num_steps += sum(map(len, accepted))
        self._keep(accepted)
        self._duplicates.add(accepted)
        if self.windows is not None:
            self.windows.add(accepted)
        if self._on_progress is not None:
            self._on_progress(
                Progress("check", self.num_episodes, self.num_steps, self._reading.num_rows)
            )

    def _reject(self, rejected: Rejected) -> None:
        self.tally.add(rejected)
        if self._aborts:
            reasons = "; ".join(finding.message.rstrip(".") for finding in rejected.findings[:3])
            wrong = "--env or the log" if self._door.has_environment else "the log"
            raise EpisodeInvalid(
                f"episode {rejected.name}: {reasons}. Nothing was ingested. Correct "
                f"{wrong}, or leave such episodes out with --on-invalid reject."
            )

    def _keep(self, found: Sequence[Episode | Rejected]) -> None:
        if self._kept is None:
            return
        self._kept += found
        self._kept_bytes += sum(map(_num_bytes, found))
        if self._kept_bytes > _KEEP_BYTES:
            self._kept = None


def num_whole(episodes: Iterable[Episode], before: tuple[str, str] | None = None) -> int:
    """Count episodes and agents, where the runs of one that was split follow one another.

    `before` is the id and agent of the episode that came before these.
    """
    num = 0
    for episode in episodes:
        key = whole_of(episode)
        num += key != before
        before = key
    return num


def _key(episode: Episode) -> _Key:
    return (episode.episode_id, episode.agent_id, episode.first_step)


def _alone(rejected: Rejected) -> Rejected:
    """Copy the rows: a slice of them would hold the block that they were read with."""
    if rejected.rows is None:
        return rejected
    return replace(rejected, rows=rejected.rows.take(pa.array(range(rejected.rows.num_rows))))


def _num_bytes(found: Episode | Rejected) -> int:
    if isinstance(found, Rejected):
        return _REJECTED_BYTES + (0 if found.rows is None else int(found.rows.nbytes))
    return num_bytes(found)


def num_bytes(episode: Episode) -> int:
    """Return the bytes of an episode's observations, actions, rewards and further columns."""
    arrays = [episode.observations, episode.actions, episode.rewards, *episode.extras.values()]
    return sum(_nbytes(array) for array in arrays)


def _nbytes(values: Any) -> int:
    if isinstance(values, np.ndarray):
        return values.nbytes
    if isinstance(values, Mapping):
        return sum(_nbytes(sub) for sub in values.values())
    try:
        # `nbytes` of a slice takes 1.9 us (2 cores, 2026-11), half the time of a one-step log of 40
        # columns.
        return int(len(values) * values.type.bit_width // 8)
    except ValueError:  # of several widths
        return int(values.nbytes)
