"""Received spans: spans that a server received, at rest, and the sessions that they become.

They are rows of `<dataset>/_spans`, a table that is only appended to: spans of a trace come in
several requests, in any order, children before their parents. A trace is complete once its root
ended and nothing came for a moment, or once nothing came for longer. The sessions of complete
traces are read as the format `otlp` reads them from a file, and become episodes. Where a span comes
later still, its session is read again once that trace is complete too, and its rows are replaced
in one commit; until then they stay. Labels of the old rows are carried over. Rewards that were
reported are applied to the new rows, unless they were corrected since: such a reward is a label.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    FINAL_OBSERVATION,
    POLICY,
    REWARD,
    SPAN_IDS,
    TERMINATED,
    TIMESTAMP,
    TIMESTAMP_TYPE,
    TRACE_ID,
    TRUNCATED,
)
from replaylake.datastore.episodes.tokens import (
    IS_CONTINUATION,
    PARENT_AGENT_ID,
    PARENT_STEP,
)
from replaylake.datastore.errors import (
    AlreadyExistsError,
    EpisodeInvalidError,
    SchemaMismatchError,
    SourceInvalidError,
    StorageError,
)
from replaylake.datastore.interchange.formats.format import LoggedColumns, ReadOptions
from replaylake.datastore.interchange.formats.generations.messages import clean_text
from replaylake.datastore.interchange.formats.generations.rows import EXTRAS, REWARD_COMPONENTS
from replaylake.datastore.interchange.formats.otlp.otlp import OtlpFormat
from replaylake.datastore.interchange.formats.otlp.spans import GENERATION, SPANS, Span, read_spans
from replaylake.datastore.interchange.ingest.inspection import Inspection
from replaylake.datastore.interchange.ingest.source_validator import SourceValidator
from replaylake.datastore.interchange.sources.source import peek_source
from replaylake.datastore.interchange.sources.temporary_files import new_file
from replaylake.datastore.lake.commit import DropCounts, commit_counts
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_rows,
    scan_connection,
)
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.rewrite import ChangeRows, RewritePlan, rewrite, with_values
from replaylake.datastore.storage.table.table import TableSnapshot

PREFIX: Final = "otlp/"
# A further column of the steps: of which spans their session was read.
SPANS_DIGEST: Final = "spans_digest"
_SPAN_ID, _PARENT_ID, _CONVERSATION = "span_id", "parent_id", "conversation_id"
_IS_CALL, _RECEIVED_AT, _BODY = "is_call", "received_at", "body"
_SCHEMA: Final = pa.schema(
    [
        pa.field(TRACE_ID, pa.string(), nullable=False),
        pa.field(_SPAN_ID, pa.string(), nullable=False),
        pa.field(_PARENT_ID, pa.string()),
        pa.field(_CONVERSATION, pa.string()),
        pa.field(_IS_CALL, pa.bool_(), nullable=False),
        pa.field(_RECEIVED_AT, TIMESTAMP_TYPE, nullable=False),
        pa.field(_BODY, pa.string(), nullable=False),
    ]
)
REWARDED_AT: Final = "rewarded_at"
# Columns that are read from spans: where a new row has none, that of the old one is no longer true.
_OF_SPANS: Final = frozenset(
    (
        *EXTRAS,
        FINAL_OBSERVATION,
        IS_CONTINUATION,
        PARENT_AGENT_ID,
        PARENT_STEP,
        POLICY,
        REWARD_COMPONENTS,
        TIMESTAMP,
        "finish_reason",
        "sampling",
    )
)
_OPERATION: Final = "SESSIONS"
_SCOPES: Final = ("scopeSpans", "instrumentationLibrarySpans")
_REJECT: Final = "reject"
_OF_ONE_SESSION: Final = (EpisodeInvalidError, SchemaMismatchError, SourceInvalidError)
_logger = logging.getLogger(__name__)

FindCorrected = Callable[[TableSnapshot, Collection[str]], Set[tuple[FileEntry, int]]]

# Of each span that was received more than once the first counts, as in a file.
_FIRST: Final = f"""
SELECT {TRACE_ID}, {_SPAN_ID}, {_PARENT_ID}, {_CONVERSATION}, {_IS_CALL},
       epoch_us({_RECEIVED_AT}) AS us{{more}}
FROM {{spans}}{{where}}
QUALIFY row_number() OVER (
    PARTITION BY {TRACE_ID}, {_SPAN_ID} ORDER BY {_RECEIVED_AT}, file_index, file_row_number
) = 1
"""
_TRACES: Final = f"""
SELECT {TRACE_ID}, list(DISTINCT {_CONVERSATION}) FILTER ({_CONVERSATION} IS NOT NULL),
       bool_or({_PARENT_ID} IS NULL), max(us), bool_or({_IS_CALL}),
       count(*) || ':' || CAST(bit_xor(md5_number({_SPAN_ID})) AS VARCHAR), min(us)
FROM firsts GROUP BY {TRACE_ID}
"""


class _Trace(NamedTuple):
    trace_id: str
    conversations: Sequence[str] | None
    has_root: bool
    last_at: int
    has_call: bool
    digest: str
    first_at: int


@dataclass(frozen=True)
class _Session:
    """The complete traces of one conversation, or one trace, and a digest of their spans."""

    name: str
    trace_ids: Sequence[str]
    digest: str

    @property
    def episode_id(self) -> str:
        return f"{PREFIX}{self.name}"


@dataclass(frozen=True)
class AssemblyResult:
    """What one run did: sessions that it wrote, new or again, and their steps; traces that wait.

    version: its commit, None if it wrote nothing.
    """

    version: int | None = None
    num_sessions: int = 0
    num_steps: int = 0
    num_waiting: int = 0
    num_without_calls: int = 0


def ensure_spans_table(dataset: Dataset) -> None:
    """Create the table where it is absent; the dataset has to exist."""
    if not dataset.spans.exists():
        with suppress(AlreadyExistsError):  # another server did, this moment
            dataset.spans.create(_SCHEMA)


def encode_spans(records: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the rows of a journal's records. Raises: EpisodeInvalidError."""
    columns = []
    for field in _SCHEMA:
        try:
            columns.append(pa.array([record.get(field.name) for record in records], field.type))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise EpisodeInvalidError(f"{field.name}: {error}, expected {field.type}.") from error
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def split_request(request: Mapping[str, Any]) -> Iterator[tuple[Span, dict[str, Any]] | str]:
    """Yield each span of a request with a request of it alone, or what is wrong with it.

    The spans lack their resource. request: of spans, as OTLP JSON. Raises: SourceInvalidError for
    one that is malformed otherwise.
    """
    for group in _objects(request, SPANS):
        about = {name: value for name, value in group.items() if name not in _SCOPES}
        # Read once, and not again with each span: it may be larger than they are.
        fault = next(read_spans({SPANS: [about]}), None)
        for scopes in _SCOPES:
            for scope in _objects(group, scopes):
                of_scope = {name: value for name, value in scope.items() if name != "spans"}
                for record in _objects(scope, "spans"):
                    own = {scopes: [{**of_scope, "spans": [record]}]}
                    span = fault or next(read_spans({SPANS: [own]}), None)
                    if isinstance(span, Span):
                        yield span, {SPANS: [{**about, **own}]}
                    else:
                        yield str(span)


def make_span_record(span: Span, request: Mapping[str, Any], received_at: int) -> bytes:
    """Return a span as a journal keeps it. request: of it alone; received_at: us since 1970."""
    fields = {
        TRACE_ID: span.trace_id,
        _SPAN_ID: span.span_id,
        _PARENT_ID: span.parent_id,
        _CONVERSATION: span.conversation_id,
        _IS_CALL: span.kind == GENERATION,
        _RECEIVED_AT: received_at,
        # Half of a surrogate pair is no character of UTF-8: it stays an escape.
        _BODY: json.dumps(request, separators=(",", ":")),
    }
    return json.dumps(fields).encode()


class SessionAssembler:
    """Makes episodes of the spans of one dataset. Several processes may do so at once."""

    def __init__(
        self, dataset: Dataset, *, settle_s: float, idle_s: float, find_corrected: FindCorrected
    ) -> None:
        """Read nothing yet.

        settle_s: how long nothing more has to come for a trace whose root ended. idle_s: for one
        whose root did not come, as it is in another service or the process was killed.
        find_corrected: returns the shard and row of each step of some episodes that has a reward
        by reports which would not give it again.
        """
        self._dataset, self._find_corrected = dataset, find_corrected
        self._settle_us, self._idle_us = int(settle_s * 1e6), int(idle_s * 1e6)
        # Of sessions without a step: those that cannot be read, have no content, or were deleted.
        self._without_steps: dict[str, str] = {}

    def run(self, now_us: int) -> AssemblyResult:
        """Write the sessions whose spans are others than those that they were written from.

        now_us: the time, in us since 1970. Raises: ShardCorruptError, StorageError. Cost: a scan of
        the ids of all spans, and of the dataset's short columns; of changed sessions all spans.
        """
        dataset = self._dataset
        if not dataset.spans.exists():
            return AssemblyResult()
        producer = f"spans:{dataset.name}"
        while True:
            # Two processes at once get the same sequence: the later finds it taken and reads anew.
            sequence = dataset.next_sequence(producer)
            work = _Work(dataset, self._without_steps, self._find_corrected)
            traces = work.read_traces()
            ready = [one for one in traces if self._is_complete(one, now_us)]
            waiting = {one.trace_id for one in traces} - {one.trace_id for one in ready}
            num_waiting, skipped = len(waiting), sum(not one.has_call for one in ready)
            work.select(_group_sessions(ready), waiting)
            done = None
            if work.changed or work.moved:
                with suppress(_DeletedMeanwhileError):
                    done = rewrite(
                        dataset.table,
                        work.plan,
                        producer=producer,
                        sequence=sequence,
                        operation=_OPERATION,
                    )
            self._without_steps |= work.without_steps
            if done is None:
                return AssemblyResult(num_waiting=num_waiting, num_without_calls=skipped)
            if not done.already_present:
                return AssemblyResult(
                    done.version, len(work.written), work.num_steps, num_waiting, skipped
                )

    def _is_complete(self, trace: _Trace, now_us: int) -> bool:
        quiet = now_us - trace.last_at
        return quiet >= self._idle_us or (trace.has_root and quiet >= self._settle_us)


class _DeletedMeanwhileError(Exception):
    """An episode was deleted while it was read: the next run knows."""


class _Work:
    """One run over one version of the spans."""

    def __init__(
        self, dataset: Dataset, without_steps: Mapping[str, str], find_corrected: FindCorrected
    ) -> None:
        self._dataset, self._find_corrected = dataset, find_corrected
        self._known = without_steps
        self._spans, self._stored = dataset.spans.snapshot(), set[str]()
        self.without_steps: dict[str, str] = {}
        self.changed: list[_Session] = []
        self.moved: list[str] = []  # episodes whose traces belong to others now
        self.written: set[str] = set()
        self.num_steps = 0

    def read_traces(self) -> list[_Trace]:
        """Return what is known of each trace."""
        if not self._spans.files:
            return []
        with fetch_files(self._spans, self._spans.files) as paths, scan_connection() as connection:
            source = from_clause(self._spans, paths)
            firsts = _FIRST.format(spans=source, more="", where="")
            rows = query_rows(connection, f"WITH firsts AS ({firsts}) {_TRACES}")
        return sorted(map(_Trace._make, rows), key=lambda one: (one.first_at, one.trace_id))

    def select(self, sessions: Sequence[_Session], waiting: Set[str]) -> None:
        """Select the sessions that are not stored as they are now.

        One that has steps of a waiting trace stays as it is stored: without that trace it would
        lose those steps, and their labels with them.
        """
        stored = self._read_stored()
        self._stored = {*stored}
        held = _find_held(sessions, stored, waiting)
        sessions = [one for one in sessions if one.episode_id not in held]
        digests = {name: digest for name, (digest, _) in stored.items()} | dict(self._known)
        self.changed = [one for one in sessions if digests.get(one.episode_id) != one.digest]
        names = {one.episode_id for one in sessions}
        taken = {trace_id for one in self.changed for trace_id in one.trace_ids}
        self.moved = [
            name
            for name, (_, trace_ids) in stored.items()
            if name not in names and taken & {*trace_ids}
        ]

    def plan(self, snapshot: TableSnapshot) -> RewritePlan:
        """Return the change of a version: rows of changed sessions in place of the old ones."""
        mark = self._dataset.tombstones.mark
        rows = self._read_sessions()
        old = self._find_rows(snapshot, [*(one.episode_id for one in self.changed), *self.moved])
        if rows is not None and old and SPAN_IDS in snapshot.schema.names:
            rows = _carry_over(rows, _read_old(snapshot, old, self._find_corrected))
        if self._dataset.tombstones.mark != mark:
            raise _DeletedMeanwhileError
        changes = {entry: _drop_rows(numbers) for entry, numbers in old.items()}
        # By how much the dataset grows: most rows of a session that is written again were there.
        num_new = max(self.num_steps - sum(map(len, old.values())), 0)
        counts = commit_counts(len(self.written - self._stored), num_new, DropCounts())
        info = {"num_sessions": len(self.written), **counts}
        return RewritePlan(changes, info, added=rows)

    def _read_stored(self) -> dict[str, tuple[str, Sequence[str]]]:
        """Return the digest and the traces of each session that has steps."""
        snapshot = self._dataset.table.snapshot()
        if SPANS_DIGEST not in snapshot.schema.names or not snapshot.files:
            return {}
        with fetch_files(snapshot, snapshot.files) as paths, scan_connection() as connection:
            rows = query_rows(
                connection,
                f"SELECT {EPISODE_ID}, any_value({SPANS_DIGEST}), list(DISTINCT {TRACE_ID}) "
                f"FROM {from_clause(snapshot, paths)} WHERE {SPANS_DIGEST} IS NOT NULL "
                f"GROUP BY {EPISODE_ID}",
            )
        return {name: (digest, trace_ids) for name, digest, trace_ids in rows}

    def _find_rows(
        self, snapshot: TableSnapshot, episodes: Sequence[str]
    ) -> dict[FileEntry, list[int]]:
        """Return where the rows of episodes are."""
        if not snapshot.files:
            return {}
        tables = {"chosen": pa.table({"id": pa.array(episodes, pa.string())})}
        found: dict[FileEntry, list[int]] = {}
        with (
            fetch_files(snapshot, snapshot.files) as paths,
            scan_connection(tables) as connection,
        ):
            rows = query_rows(
                connection,
                f"SELECT file_index, file_row_number FROM {from_clause(snapshot, paths)} "
                f"SEMI JOIN chosen ON chosen.id = {EPISODE_ID}",
            )
        for file, number in rows:
            found.setdefault(snapshot.files[file], []).append(number)
        return found

    def _read_sessions(self) -> pa.Table | None:
        """Return the rows of the changed sessions; None if they have none."""
        self.written, self.num_steps = set(), 0
        self.without_steps = {one.episode_id: one.digest for one in self.changed}
        parts = self._read_parts(self.changed)
        if not parts:
            return None
        rows = pa.concat_tables(parts, promote_options="default")
        gone = self._dataset.tombstones.find(rows)
        rows = rows.filter(pa.array(~gone))
        self.written = {*rows.column(EPISODE_ID).unique().to_pylist()}
        for name in self.written:
            del self.without_steps[name]
        self.num_steps = rows.num_rows
        return rows if rows.num_rows else None

    def _read_parts(self, sessions: Sequence[_Session]) -> list[pa.Table]:
        """Return the rows of sessions, without those that cannot be read.

        One of these, or one that the dataset cannot hold, must not hold up the others: it is found
        by halves, as each attempt scans all spans.
        """
        try:
            rows = self._read_rows(sessions)
        except _OF_ONE_SESSION as error:
            if len(sessions) > 1:
                half = len(sessions) // 2
                return [*self._read_parts(sessions[:half]), *self._read_parts(sessions[half:])]
            _logger.warning("session %s has no steps: %s", sessions[0].name, error)
            return []
        return [] if rows is None else [rows]

    def _read_rows(self, sessions: Sequence[_Session]) -> pa.Table | None:
        trace_ids = [trace_id for one in sessions for trace_id in one.trace_ids]
        bodies, parents = self._read_spans(trace_ids)
        by_name = {one.name: one for one in sessions}
        episodes = []
        for episode in _read_episodes(bodies, self._dataset):
            session = by_name.get(str(episode.source_episode_id or episode.episode_id))
            if session is None:
                raise SourceInvalidError(
                    f"found the session {episode.source_episode_id}, expected one of those read"
                )
            episodes.append(_describe(episode, session, parents))
        return self._dataset.encode(episodes).rows if episodes else None

    def _read_spans(
        self, trace_ids: Sequence[str]
    ) -> tuple[Iterator[str], dict[tuple[str, str], str | None]]:
        """Return the spans of traces, each as a request, and the parent of each span."""
        if not trace_ids:
            return iter(()), {}
        tables = {"chosen": pa.table({"id": pa.array(trace_ids, pa.string())})}
        with (
            fetch_files(self._spans, self._spans.files) as paths,
            scan_connection(tables) as connection,
        ):
            text = _FIRST.format(
                spans=from_clause(self._spans, paths),
                more=f", {_BODY}",
                where=f" WHERE {TRACE_ID} IN (SELECT id FROM chosen)",
            )
            found = query_rows(connection, text)
        rows = [(row[0], row[1], row[2], row[-1]) for row in found]
        parents = {(trace_id, span_id): parent for trace_id, span_id, parent, _ in rows}
        return (body for *_, body in rows), parents


def _group_sessions(traces: Sequence[_Trace]) -> list[_Session]:
    """Group complete traces, as the format `otlp` does: by the one conversation that they name."""
    groups: dict[str, list[_Trace]] = {}
    for one in traces:
        named = one.conversations or ()
        name = clean_text(named[0]) if len(named) == 1 else one.trace_id
        groups.setdefault(name, []).append(one)
    sessions = []
    for name, several in groups.items():
        if any(one.has_call for one in several):
            text = "\n".join(sorted(f"{one.trace_id}:{one.digest}" for one in several))
            digest = blake2b(text.encode(), digest_size=16).hexdigest()
            sessions.append(_Session(name, [one.trace_id for one in several], digest))
    return sessions


def _find_held(
    sessions: Sequence[_Session],
    stored: Mapping[str, tuple[str, Sequence[str]]],
    waiting: Set[str],
) -> set[str]:
    """Return the episodes with steps of waiting traces, and those that would take traces of them.

    Were the latter written, the traces that they take would be in two episodes.
    """
    new = {name for name, (_, trace_ids) in stored.items() if not waiting.isdisjoint(trace_ids)}
    held: set[str] = set()
    while new:
        held |= new
        taken = {trace_id for name in held if name in stored for trace_id in stored[name][1]}
        new = {one.episode_id for one in sessions if not taken.isdisjoint(one.trace_ids)} - held
    return held


def _read_episodes(bodies: Iterator[str], dataset: Dataset) -> Iterator[Episode]:
    """Read spans, each as a request, as the format `otlp` reads a file of them."""
    try:
        descriptor, path = new_file(".jsonl")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{body}\n" for body in bodies)
    except OSError as error:
        raise StorageError(
            f"TMPDIR: spans could not be written ({error.strerror}). Free disk space, or set "
            "TMPDIR to a directory on another disk."
        ) from error
    try:
        yield from _inspect(path, dataset)
    finally:
        path.unlink(missing_ok=True)


def _inspect(path: Path, dataset: Dataset) -> Iterator[Episode]:
    if not path.stat().st_size:
        return
    reader = OtlpFormat().read(peek_source([path]).files, ReadOptions())
    spec = dataset.spec
    validator = SourceValidator(spec, None, reader.spaces, rewards_optional=spec.rewards_optional)
    inspection = Inspection(reader, validator, _REJECT, None)
    inspection.run()
    for item in inspection.iter_found():
        if isinstance(item, LoggedColumns):
            yield from item[:]
        else:
            reasons = "; ".join(finding.message for finding in item.findings[:3])
            _logger.warning("session %s has no steps: %s", item.name, reasons)


def _describe(
    episode: Episode, session: _Session, parents: Mapping[tuple[str, str], str | None]
) -> Episode:
    """Return an episode under the id of its session, with the spans of each step."""
    traces, paths = [], []
    for text in _to_list(episode.extras["metadata"]):
        about = json.loads(text)
        trace_id, span_id = about["trace_id"], about["span_id"]
        path = [span_id]
        while (parent := parents.get((trace_id, path[-1]))) is not None and parent not in path:
            path.append(parent)
        traces.append(trace_id)
        paths.append(path)
    own = {
        TRACE_ID: pa.array(traces, pa.string()),
        SPAN_IDS: pa.array(paths, pa.list_(pa.field("element", pa.string()))),
        SPANS_DIGEST: pa.array([session.digest] * len(paths), pa.string()),
    }
    return replace(
        Episode(**{name: getattr(episode, name) for name in Episode.__dataclass_fields__}),
        episode_id=session.episode_id,
        source_episode_id=session.name,
        extras={**episode.extras, **own},
    )


def _to_list(column: Any) -> list[Any]:
    return list(column.to_pylist() if hasattr(column, "to_pylist") else column)


def _read_old(
    snapshot: TableSnapshot, old: Mapping[FileEntry, Sequence[int]], find_corrected: FindCorrected
) -> pa.Table:
    """Return the rows that are replaced; without rewards that reports will give again."""
    parts = [
        replace(snapshot, files=(entry,)).read().take(pa.array(numbers))
        for entry, numbers in old.items()
    ]
    rows = pa.concat_tables(parts, promote_options="default")
    if (
        REWARDED_AT not in rows.column_names
        or not rows.column(REWARDED_AT).is_valid().to_numpy().any()
    ):
        return rows
    corrected = find_corrected(snapshot, rows[EPISODE_ID].unique().to_pylist())
    places = [(entry, number) for entry, numbers in old.items() for number in numbers]
    is_corrected = pa.array([place in corrected for place in places])
    is_kept = pc.or_(rows.column(REWARDED_AT).is_null(), is_corrected)
    for name in (REWARD, REWARDED_AT):
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(name), pc.if_else(is_kept, rows[name], None))
    return rows


def _carry_over(rows: pa.Table, before: pa.Table) -> pa.Table:
    """Give new rows the values, such as labels, that only the old rows of their spans have."""
    places = {key: number for number, key in enumerate(_keys(before))}
    pairs = [(i, places[key]) for i, key in enumerate(_keys(rows)) if key in places]
    if not pairs:
        return rows
    at, sources = (np.asarray(one, np.int64) for one in zip(*pairs, strict=True))
    before = before.take(pa.array(sources))
    rows = _carry_ends(rows, at, before)
    for name in before.column_names:
        if name in _OF_SPANS or before[name].null_count == len(before):
            continue
        column = before[name].combine_chunks()
        is_carried = column.is_valid().to_numpy(zero_copy_only=False)
        if name in rows.column_names:
            is_carried &= rows[name].is_null().to_numpy()[at]
            column = column.cast(rows[name].type)
        if is_carried.any():
            rows = with_values(rows, name, at[is_carried], column.filter(pa.array(is_carried)))
    return rows


def _carry_ends(rows: pa.Table, at: NDArray[np.int64], before: pa.Table) -> pa.Table:
    """Give agents the end that came with a reward which no report gives again."""
    if REWARDED_AT not in before.column_names:
        return rows
    episodes = before.filter(before[REWARDED_AT].is_valid())[EPISODE_ID].unique()
    agents = zip(rows[EPISODE_ID].to_pylist(), rows[AGENT_ID].to_pylist(), strict=True)
    lasts = {*{agent: number for number, agent in enumerate(agents)}.values()}
    has_end = pc.or_(rows[TERMINATED], rows[TRUNCATED]).to_pylist()
    is_carried = pc.is_in(before[EPISODE_ID], episodes).to_numpy() & np.array(
        [number in lasts and not has_end[number] for number in at.tolist()]
    )
    for name in (TERMINATED, TRUNCATED):
        values = before[name].filter(pa.array(is_carried)).combine_chunks()
        rows = with_values(rows, name, at[is_carried], values)
    return rows


def _keys(rows: pa.Table) -> Iterator[tuple[str, str, int]]:
    """Yield for each row its trace, its span, and which of the span's answers it is."""
    counts: dict[tuple[str, str], int] = {}
    spans = pc.list_element(rows.column(SPAN_IDS), 0).to_pylist()
    for key in zip(rows.column(TRACE_ID).to_pylist(), spans, strict=True):
        counts[key] = counts.get(key, -1) + 1
        yield (*key, counts[key])


def _drop_rows(numbers: Sequence[int]) -> ChangeRows:
    def change(rows: pa.Table) -> pa.Table:
        mask = np.ones(rows.num_rows, np.bool_)
        mask[np.asarray(numbers)] = False
        return rows.filter(pa.array(mask))

    return change


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    several = value.get(name) if isinstance(value, dict) else None
    if several is None and isinstance(value, dict):
        return []
    if not isinstance(several, list) or not all(isinstance(one, dict) for one in several):
        raise SourceInvalidError(f"{name}: found another value, expected a list of objects")
    return several
