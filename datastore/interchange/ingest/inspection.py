"""Inspection: the first reading of a source, in which every episode is checked, nothing written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec, arrow_schema
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.datastore.interchange.formats.checks import (
    NOTED,
    Check,
    CheckCounts,
    Finding,
    RowLocations,
)
from replaylake.datastore.interchange.formats.format import (
    EncodingReader,
    LoggedEpisode,
    RejectedEpisode,
    SourceReader,
)
from replaylake.datastore.interchange.ingest.alignment import SampledWindows
from replaylake.datastore.interchange.ingest.quarantine import make_rows
from replaylake.datastore.interchange.ingest.receipt import RejectionTally
from replaylake.datastore.interchange.ingest.source_validator import Rejection, SourceValidator
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
# About 150 bytes each.
_MAX_EPISODES: Final = 1_000_000
_ADVICE: Final = (
    "kept: equal episodes may be real where the environment is deterministic; leave one of them "
    "out of the log if it was written twice"
)


@dataclass(frozen=True)
class IngestProgress:
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

OnProgress = Callable[[IngestProgress], None]


class Inspection:
    """Which episodes of a source are accepted, and the spaces they need."""

    def __init__(
        self,
        reading: SourceReader,
        validator: SourceValidator,
        on_invalid: str,
        on_progress: OnProgress | None,
    ) -> None:
        self._reading = reading
        self._validator = validator
        self._aborts = on_invalid == ABORT
        self._on_progress = on_progress
        self._refused: set[_Key] = set()
        self._last: tuple[str, str] | None = None
        self._first_pass: list[Episode | RejectedEpisode] | None = []
        self._kept_bytes = 0
        self._duplicates = Duplicates()
        self.tally = RejectionTally()
        self.windows: SampledWindows | None = None
        self.num_episodes = 0
        self.num_steps = 0

    def run(self) -> None:
        """Read to the end.

        Raises: EpisodeInvalidError at the first invalid episode, when aborting.
        """
        batch: list[Episode] = []
        num_steps = 0
        for item in self._reading:
            if isinstance(item, RejectedEpisode):
                self._reject(item)
                self._buffer([_copy_rows(item)])
                continue
            # Runs of one episode are never parted.
            if num_steps >= _CHECK_STEPS and episode_key(item) != episode_key(batch[-1]):
                self._check(batch)
                batch, num_steps = [], 0
            batch.append(item)
            num_steps += len(item)
        self._check(batch)

    def spec(self) -> DatasetSpec:
        """Return what the dataset has to hold, its further columns too.

        Raises: SourceInvalidError if no episode was accepted; SchemaMismatchError if no table can
        hold it.
        """
        spec = self._validator.spec(self._reading.num_actions)
        spec = replace(spec, extras={**self._reading.extras, **spec.extras})
        if isinstance(self._reading, EncodingReader):
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

    def iter_found(self) -> Iterator[Episode | RejectedEpisode]:
        """Return all that was found, with the rows of what was rejected: kept, or read again."""
        if self._first_pass is not None:
            yield from self._first_pass
            return
        for item in group_runs(self._reading):
            if isinstance(item, RejectedEpisode):
                yield item
            elif reasons := [
                self._validator.explain_rejection(r) for r in item if _key(r) in self._refused
            ]:
                yield with_rows(merge_rejections(reasons, item), item)
            else:
                yield from map(self._validator.reshape, item)

    def _check(self, batch: list[Episode]) -> None:
        accepted, rejections = self._validator.check(batch)
        self._refused |= {_key(run) for _, run in rejections}
        accepted, rejected = reject_whole(accepted, rejections)
        for one, runs in rejected:
            self._reject(one)
            if self._first_pass is not None:
                self._buffer([with_rows(one, runs)])
        self.num_episodes += count_whole(accepted, self._last)
        if accepted:
            self._last = episode_key(accepted[-1])
        self.num_steps += sum(map(len, accepted))
        self._buffer(accepted)
        self._duplicates.add(accepted)
        if self.windows is not None:
            self.windows.add(accepted)
        if self._on_progress is not None:
            self._on_progress(
                IngestProgress("check", self.num_episodes, self.num_steps, self._reading.num_rows)
            )

    def _reject(self, rejected: RejectedEpisode) -> None:
        self.tally.add(rejected)
        if self._aborts:
            reasons = "; ".join(finding.message.rstrip(".") for finding in rejected.findings[:3])
            wrong = "`env` or the log" if self._validator.has_environment else "the log"
            raise EpisodeInvalidError(
                f"episode {rejected.name}: {reasons}. Nothing was ingested. Correct "
                f"{wrong}, or leave such episodes out with `on_invalid` reject."
            )

    def _buffer(self, items: Sequence[Episode | RejectedEpisode]) -> None:
        if self._first_pass is None:
            return
        self._first_pass += items
        self._kept_bytes += sum(map(_num_bytes, items))
        if self._kept_bytes > _KEEP_BYTES:
            self._first_pass = None


def count_whole(episodes: Iterable[Episode], before: tuple[str, str] | None = None) -> int:
    """Count episodes and agents, where the runs of one that was split follow one another.

    `before` is the id and agent of the episode that came before these.
    """
    num = 0
    for episode in episodes:
        key = episode_key(episode)
        num += key != before
        before = key
    return num


def _key(episode: Episode) -> _Key:
    return (episode.episode_id, episode.agent_id, episode.first_step)


def _copy_rows(rejected: RejectedEpisode) -> RejectedEpisode:
    """Copy the rows: a slice of them would hold the block that they were read with."""
    if rejected.rows is None:
        return rejected
    return replace(rejected, rows=rejected.rows.take(pa.array(range(rejected.rows.num_rows))))


def _num_bytes(item: Episode | RejectedEpisode) -> int:
    if isinstance(item, RejectedEpisode):
        return _REJECTED_BYTES + (0 if item.rows is None else int(item.rows.nbytes))
    return num_bytes(item)


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


class Duplicates:
    """Finds episodes that equal an earlier one bit by bit, under another id.

    Decisions of one step are left alone: two equal ones are common, and mean nothing. Beyond a
    million episodes no more are remembered. Cost: one pass over the bytes.
    """

    def __init__(self) -> None:
        self._first: dict[int, str] = {}
        self._counts = CheckCounts()

    def add(self, episodes: Sequence[Episode]) -> None:
        """Look at episodes."""
        for episode in episodes:
            if len(episode) < 2:
                continue
            name = episode.source_episode_id or episode.episode_id
            # Python's hash of bytes is 64 bits of SipHash: quick, and the same within a process.
            key = hash(tuple(_hashes(episode)))
            known = self._first.get(key)
            if known is not None and known != name:
                self._count(episode, name, known)
            elif known is None and len(self._first) < _MAX_EPISODES:
                self._first[key] = name

    def checks(self) -> tuple[Check, ...]:
        """Return what was found."""
        return self._counts.checks()

    def _count(self, episode: Episode, name: str, known: str) -> None:
        places = episode.places if isinstance(episode, LoggedEpisode) else None
        place = "" if places is None else places.text()
        where = place and f"{place}, "
        text = f"episode {name}: {where}the same {len(episode)} steps as episode {known}"
        self._counts.add(Check("duplicate", NOTED, 1, len(episode), text, _ADVICE, place))


def _hashes(episode: Episode) -> Iterator[Any]:
    for values in (episode.observations, episode.actions, episode.rewards):
        yield from _hash_values(values)


def _hash_values(values: Any) -> Iterator[Any]:
    if isinstance(values, Mapping):
        for key in sorted(values):
            yield key
            yield from _hash_values(values[key])
    elif values.dtype == object:
        yield hash(tuple(values.tolist()))
    else:
        yield values.shape, values.dtype.str, hash(np.ascontiguousarray(values).tobytes())


_EpisodeKey = tuple[str, str]


def episode_key(episode: Episode) -> _EpisodeKey:
    """Return the id and agent, which the runs of one episode share."""
    return (episode.episode_id, episode.agent_id)


def group_runs(
    items: Iterable[Episode | RejectedEpisode],
) -> Iterator[list[Episode] | RejectedEpisode]:
    """Put the runs of one episode, which follow one another, together."""
    runs: list[Episode] = []
    for one in items:
        if runs and (isinstance(one, RejectedEpisode) or episode_key(one) != episode_key(runs[0])):
            yield runs
            runs = []
        if isinstance(one, RejectedEpisode):
            yield one
        else:
            runs.append(one)
    if runs:
        yield runs


def reject_whole(
    accepted: list[Episode], rejections: Sequence[Rejection]
) -> tuple[list[Episode], list[tuple[RejectedEpisode, list[Episode]]]]:
    """Take the other runs of refused ones out of those accepted; return the refusals, one each.

    An episode that is half in the dataset and half in quarantine would be counted as both.
    """
    by_key: dict[_EpisodeKey, list[RejectedEpisode]] = {}
    runs: dict[_EpisodeKey, list[Episode]] = {}
    for one, episode in rejections:
        by_key.setdefault(episode_key(episode), []).append(one)
        runs.setdefault(episode_key(episode), []).append(episode)
    for episode in accepted if rejections else ():
        if (known := runs.get(episode_key(episode))) is not None:
            known.append(episode)
    for known in runs.values():
        known.sort(key=lambda run: run.first_step)
    rest = [e for e in accepted if episode_key(e) not in by_key] if rejections else accepted
    return rest, [(merge_rejections(by_key[whole], runs[whole]), runs[whole]) for whole in by_key]


def merge_rejections(parts: Sequence[RejectedEpisode], runs: Sequence[Episode]) -> RejectedEpisode:
    """Return the refusal of an episode whose runs these are, from those of its runs."""
    if len(runs) == 1:
        return parts[0]
    findings: dict[str, Finding] = {}
    for finding in (finding for one in parts for finding in one.findings):
        known = findings.get(finding.check)
        findings[finding.check] = (
            finding if known is None else replace(known, num_rows=known.num_rows + finding.num_rows)
        )
    return replace(
        parts[0],
        num_steps=sum(map(len, runs)),
        findings=tuple(findings.values()),
        places=_concatenate_places(runs),
    )


def with_rows(refusal: RejectedEpisode, runs: Sequence[Episode]) -> RejectedEpisode:
    """Return a refusal with the rows of all runs, as `rows_of` has them: under our names."""
    tables = [make_rows(run) for run in runs]
    rows = pa.concat_tables(tables, promote_options="default") if len(tables) > 1 else tables[0]
    return replace(refusal, rows=rows, mapping={name: name for name in rows.column_names})


def _concatenate_places(runs: Sequence[Episode]) -> RowLocations | None:
    places = [run.places for run in runs if isinstance(run, LoggedEpisode)]
    known = [one for one in places if one is not None]
    if len(known) != len(runs):
        return None
    return RowLocations(np.concatenate([one.rows for one in known]), known[0].locate)
