"""Inspection: the first reading of a source, in which every episode is checked, nothing written."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import EpisodeColumns
from replaylake.datastore.episodes.schema import DatasetSpec, arrow_schema
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.datastore.interchange.formats.checks import (
    NOTED,
    Check,
    CheckCounts,
    Finding,
    RowLocations,
)
from replaylake.datastore.interchange.formats.format import (
    DescribedReader,
    EncodingReader,
    EventReader,
    LoggedColumns,
    LoggedEpisode,
    RejectedEpisode,
    RowReader,
    SourceReader,
    TokenizedReader,
)
from replaylake.datastore.interchange.ingest.alignment import SampledWindows
from replaylake.datastore.interchange.ingest.quarantine import make_rows
from replaylake.datastore.interchange.ingest.receipt import RejectionTally
from replaylake.datastore.interchange.ingest.source_validator import (
    SourceValidator,
    episode_form,
)
from replaylake.datastore.storage.spans import span
from replaylake.datastore.storage.table.delta_schema import to_delta

ABORT: Final = "abort"
REJECT: Final = "reject"

# Episodes are kept for the second reading up to this size.
_KEEP_BYTES: Final = 128 << 20
# What a rejected episode takes beside its values: a table of one row has many parts. Measured on
# 99,000 of them with six columns, 12 kB each.
_REJECTED_BYTES: Final = 16 << 10
# Rows of refused episodes that are fetched from the log at once, in one pass over it.
_FETCH_ROWS: Final = 65_536
_FETCH_BYTES: Final = 64 << 20
# What an episode takes beside the values of its steps: its id, its length, its ends.
_EPISODE_BYTES: Final = 100
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
        # Of runs, by their number among all those that were read as valid.
        self._refused = array("q")
        self._num_read = 0
        self._first_pass: list[LoggedColumns | RejectedEpisode] | None = []
        self._kept_bytes = 0
        self._row_bytes = 1
        self._duplicates = Duplicates()
        # Slots of two events may be filled alike, by chance.
        self._has_events = isinstance(reading, EventReader) and reading.has_events
        self.tally = RejectionTally()
        self.windows: SampledWindows | None = None
        self.num_episodes = 0
        self.num_steps = 0

    def run(self) -> None:
        """Read to the end.

        Raises: EpisodeInvalidError at the first invalid episode, when aborting.
        """
        batch: list[LoggedColumns] = []
        num_steps = 0
        for item in self._iter_columns():
            if isinstance(item, RejectedEpisode):
                self._reject(item)
                self._buffer([_copy_rows(item)])
                continue
            rest = item
            while len(rest):
                # Runs of one episode are never parted.
                if num_steps >= _CHECK_STEPS:
                    self._check(batch)
                    batch, num_steps = [], 0
                cut = rest.find_cut(_CHECK_STEPS - num_steps)
                part = rest if cut == len(rest) else rest.part(0, cut)
                rest = rest.part(cut, len(rest))
                batch.append(part)
                num_steps += part.num_steps
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
        if isinstance(self._reading, DescribedReader):
            spec = replace(
                spec,
                score_reference=self._reading.score_reference,
                env_spec=self._reading.env_spec,
            )
        if isinstance(self._reading, TokenizedReader):
            spec = replace(spec, tokenizer=spec.tokenizer or self._reading.tokenizer)
        to_delta(arrow_schema(spec))
        return spec

    @property
    def known_columns(self) -> Mapping[str, str]:
        """Which column of the log is which field of ours; nothing for a log without rows."""
        return self._reading.known_columns if isinstance(self._reading, RowReader) else {}

    def checks(self) -> tuple[Check, ...]:
        """Return what the door found: rejected first, then corrected and noted."""
        counts = CheckCounts()
        for part in (self.tally.checks(), self._reading.checks, self._duplicates.checks()):
            for check in part:
                counts.add(check)
        return counts.checks()

    def iter_found(self) -> Iterator[LoggedColumns | RejectedEpisode]:
        """Return all that was found, with the rows of what was rejected: kept, or read again.

        The rows are as the log has them. Those of episodes that were refused only once they were
        laid out are fetched for many at a time, so these may come later than in the log.
        """
        waiting: list[RejectedEpisode] = []
        num_rows = 0
        for item in self._iter_read():
            if isinstance(item, RejectedEpisode) and self._is_fetched(item):
                waiting.append(item)
                num_rows += item.num_steps
                if num_rows >= min(_FETCH_ROWS, _FETCH_BYTES // self._row_bytes):
                    yield from self._fetch_rows(waiting)
                    waiting, num_rows = [], 0
            else:
                yield item
        yield from self._fetch_rows(waiting)

    def _iter_read(self) -> Iterator[LoggedColumns | RejectedEpisode]:
        if self._first_pass is not None:
            yield from self._first_pass
            return
        refused, num_read = np.sort(np.asarray(self._refused, np.int64)), 0
        for item in self._iter_columns():
            if isinstance(item, RejectedEpisode):
                yield item
                continue
            columns = self._validator.reshape_columns(item)
            first, last = np.searchsorted(refused, [num_read, num_read + len(item)])
            numbers = refused[first:last] - num_read
            num_read += len(item)
            start = 0
            for runs in _whole_episodes(item, numbers):
                if runs.start > start:
                    yield columns.part(start, runs.start)
                start = runs.stop
                reasons = [
                    self._validator.explain_rejection(item[number])
                    for number in numbers[(numbers >= runs.start) & (numbers < runs.stop)].tolist()
                ]
                yield self._with_rows(merge_rejections(reasons, item[runs]), item[runs])
            if start < len(columns):
                yield columns.part(start, len(columns))

    def _iter_columns(self) -> Iterator[LoggedColumns | RejectedEpisode]:
        """Yield the reader's items; only what it takes to read them is measured."""
        items = self._reading.iter_columns()
        while True:
            with span("assemble") as work:
                item = next(items, None)
                if item is None:
                    return
                work.items = item.num_steps
            yield item

    def _is_fetched(self, rejected: RejectedEpisode) -> bool:
        """Whether the rows of a refused episode are fetched from the log."""
        is_known = rejected.rows is None and rejected.places is not None
        return is_known and isinstance(self._reading, RowReader)

    def _with_rows(self, rejected: RejectedEpisode, runs: Sequence[Episode]) -> RejectedEpisode:
        """Return a refusal with its rows, unless they are fetched later."""
        return rejected if self._is_fetched(rejected) else with_rows(rejected, runs)

    def _fetch_rows(self, rejected: Sequence[RejectedEpisode]) -> Iterator[RejectedEpisode]:
        origins = [one.places.rows for one in rejected if one.places is not None]
        if not origins or not isinstance(self._reading, RowReader):
            return
        start = 0
        with span("assemble") as work:
            rows = self._reading.read_rows(np.concatenate(origins))
            work.items = rows.num_rows
        for one, own in zip(rejected, origins, strict=True):
            part = rows.slice(start, len(own))
            yield replace(one, rows=part, mapping=self._reading.mapping)
            start += len(own)

    def _check(self, batch: Sequence[LoggedColumns]) -> None:
        with span("validate") as work:
            self._check_steps(batch)
            work.items = sum(columns.num_steps for columns in batch)
        if self._on_progress is not None:
            self._on_progress(
                IngestProgress("check", self.num_episodes, self.num_steps, self._reading.num_rows)
            )

    def _check_steps(self, batch: Sequence[LoggedColumns]) -> None:
        for columns, rejected in self._validator.check_columns(join_alike(batch)):
            self._refused.extend(self._num_read + one.number for one in rejected)
            self._num_read += len(columns)
            is_accepted = np.ones(len(columns), np.bool_)
            by_number = {one.number: one.why for one in rejected}
            for runs in _whole_episodes(columns, np.asarray([*by_number], np.int64)):
                is_accepted[runs] = False
                episodes = columns[runs]
                reasons = [by_number[n] for n in range(runs.start, runs.stop) if n in by_number]
                one = merge_rejections(reasons, episodes)
                self._reject(one)
                self._row_bytes = max(self._row_bytes, math.ceil(columns.num_bytes_per_step()))
                if self._first_pass is not None:
                    self._buffer([self._with_rows(one, episodes)])
            accepted = columns if is_accepted.all() else columns.select(is_accepted)
            if len(accepted):
                self._accept(accepted)

    def _accept(self, columns: LoggedColumns) -> None:
        self.num_episodes += columns.num_whole
        self.num_steps += columns.num_steps
        self._buffer([columns])
        if not self._has_events:
            self._duplicates.add(columns)
        if self.windows is not None:
            self.windows.add(columns)

    def _reject(self, rejected: RejectedEpisode) -> None:
        self.tally.add(rejected)
        if self._aborts:
            reasons = "; ".join(finding.message.rstrip(".") for finding in rejected.findings[:3])
            wrong = "`env` or the log" if self._validator.has_environment else "the log"
            raise EpisodeInvalidError(
                f"episode {rejected.name}: {reasons}. Nothing was ingested. Correct "
                f"{wrong}, or leave such episodes out with `on_invalid` reject."
            )

    def _buffer(self, items: Sequence[LoggedColumns | RejectedEpisode]) -> None:
        if self._first_pass is None:
            return
        self._first_pass += items
        self._kept_bytes += sum(map(_num_bytes, items))
        if self._kept_bytes > _KEEP_BYTES:
            self._first_pass = None


def join_alike(parts: Sequence[LoggedColumns]) -> list[LoggedColumns]:
    """Join parts that follow one another, where their values have the same shapes and kinds."""
    runs: list[list[LoggedColumns]] = []
    for part in parts:
        if runs and episode_form(runs[-1][0].steps) == episode_form(part.steps):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [joined for run in runs for joined in _join(run)]


def _join(parts: list[LoggedColumns]) -> list[LoggedColumns]:
    try:
        return [parts[0].concatenate(parts[1:])]
    except (ValueError, KeyError, TypeError, pa.ArrowException):
        return parts  # as with final observations, or masks, of several shapes


def _whole_episodes(columns: LoggedColumns, numbers: Array) -> Iterator[slice]:
    """Yield the runs of each episode that one of these runs is of, in the order of these."""
    whole = columns.whole_numbers()
    for one in dict.fromkeys(whole[numbers].tolist()):
        yield slice(*np.searchsorted(whole, [one, one + 1]).tolist())


def _copy_rows(rejected: RejectedEpisode) -> RejectedEpisode:
    """Copy the rows: a slice of them would hold the block that they were read with."""
    if rejected.rows is None:
        return rejected
    return replace(rejected, rows=rejected.rows.take(pa.array(range(rejected.rows.num_rows))))


def _num_bytes(item: LoggedColumns | RejectedEpisode) -> int:
    if isinstance(item, RejectedEpisode):
        return _REJECTED_BYTES + (0 if item.rows is None else int(item.rows.nbytes))
    return int(item.num_steps * item.num_bytes_per_step()) + len(item) * _EPISODE_BYTES


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
        if isinstance(episodes, EpisodeColumns):
            numbers = np.flatnonzero(episodes.lengths > 1).tolist()
        else:
            numbers = [i for i, episode in enumerate(episodes) if len(episode) > 1]
        for number in numbers:
            episode = episodes[number]
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


def merge_rejections(parts: Sequence[RejectedEpisode], runs: Sequence[Episode]) -> RejectedEpisode:
    """Return the refusal of an episode whose runs these are, from those of its runs."""
    if len(runs) == 1:
        return parts[0]
    findings: dict[tuple[str, str], Finding] = {}
    for finding in (finding for one in parts for finding in one.findings):
        key = (finding.check, finding.column)
        known = findings.get(key)
        findings[key] = (
            finding if known is None else replace(known, num_rows=known.num_rows + finding.num_rows)
        )
    return replace(
        parts[0],
        num_steps=sum(map(len, runs)),
        findings=tuple(findings.values()),
        places=_concatenate_places(runs),
    )


def with_rows(refusal: RejectedEpisode, runs: Sequence[Episode]) -> RejectedEpisode:
    """Return a refusal with the rows of all runs under our names, for a log without rows."""
    tables = [make_rows(run) for run in runs]
    rows = pa.concat_tables(tables, promote_options="default") if len(tables) > 1 else tables[0]
    return replace(refusal, rows=rows, mapping={name: name for name in rows.column_names})


def _concatenate_places(runs: Sequence[Episode]) -> RowLocations | None:
    places = [run.places for run in runs if isinstance(run, LoggedEpisode)]
    known = [one for one in places if one is not None]
    if len(known) != len(runs):
        return None
    return RowLocations(np.concatenate([one.rows for one in known]), known[0].locate)
