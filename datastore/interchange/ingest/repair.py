"""Repair: quarantined rows read once more, with a fix or another mapping, into the dataset.

What passes the checks now is committed and leaves the quarantine; what does not stays there as it
was. Dataset and quarantine are two tables: the commit of the episodes says which rows it repaired,
so that a repair that was killed in between is finished by the next one, and nothing is there twice.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.encoding import NO_ENCODING
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    NotFoundError,
    ShardCorruptError,
)
from replaylake.datastore.interchange.formats.checks import Check
from replaylake.datastore.interchange.formats.format import (
    LoggedColumns,
    LoggedEpisode,
    ReadOptions,
    RejectedEpisode,
)
from replaylake.datastore.interchange.formats.generic.jsonl import parse_rows
from replaylake.datastore.interchange.formats.tabular.json_rows import to_column
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.ingest.inspection import REJECT, Inspection
from replaylake.datastore.interchange.ingest.quarantine import COLUMNS
from replaylake.datastore.interchange.ingest.quarantine_rows import (
    POSITION,
    QuarantineSelection,
    digest_rows,
    measure_rows,
    remove_rows,
    select_rows,
)
from replaylake.datastore.interchange.ingest.receipt import RejectionTally
from replaylake.datastore.interchange.ingest.source_validator import SourceValidator
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_bytes import SourceBytes
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.query.query import run_table_query
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.table import TableSnapshot

# What a fix selects from, and the column by which its rows are known.
TABLE: Final = "quarantine"
ROW_ID: Final = "quarantine_id"
# As JSON; as Python's values they take ten times as much.
_PART_CHARACTERS: Final = 32 << 20
_OPERATION: Final = "REPAIR"
_INGESTS: Final = "ingest/"
_REPAIRED: Final = "repaired"
# A field that no log has, for the ids of logs that have no column with them.
_OWN_ID: Final = "\0source_episode_id"
_OneEpisode = tuple[str, str]
# How rows in conflict with stored ones are read: by the mapping beside them, with the steps that
# they would have had.
_STORED: Final[Mapping[str, Any]] = {"read_as": {"gaps": "split"}}


@dataclass(frozen=True)
class RepairReceipt:
    """What a repair did, or would do.

    version: of the dataset, None where nothing was committed. num_skipped_rows: rows that were
    selected and cannot be read again, because they are not of an ingested file, or could not be
    read as a row. checks: what failed again. num_left_rows: all that the quarantine holds after it.
    """

    dataset: str
    dry_run: bool
    version: int | None
    num_repaired_episodes: int = 0
    num_repaired_rows: int = 0
    num_failed_episodes: int = 0
    num_failed_rows: int = 0
    num_skipped_rows: int = 0
    num_left_rows: int = 0
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        entries = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **entries,
            "checks": [check.to_json() for check in self.checks],
            "notes": list(self.notes),
        }


def repair(
    dataset: Dataset,
    *,
    selection: QuarantineSelection | None = None,
    fix: str | None = None,
    options: ReadOptions | None = None,
    spaces: tuple[Space, Space] | None = None,
    dry_run: bool = False,
) -> RepairReceipt:
    """Read quarantined rows again and commit the episodes that pass; these leave the quarantine.

    Rows have the names, values and types of the log, and are read with the options of their ingest.
    Whole episodes are repaired, some 32 MiB of rows at a time.

    Args:
        dataset: whose quarantine it is.
        selection: which episodes are meant; all by default.
        fix: one SELECT over the table `quarantine`, whose columns are the log's and
            `quarantine_id`, which the rows that it returns have to keep. A column with values of
            several types is text there, and a value that the fix leaves alone stays what it was.
            Rows that it leaves out of an episode that it returns leave the quarantine with it.
        options: what differs from the options of the ingest.
        spaces: an environment's observation and action space; by default the dataset's.
        dry_run: check and report, and change nothing.

    Raises: NotFoundError, QueryError and QueryRefusedError for the fix, ConfigInvalidError,
    SourceInvalidError; what was repaired before in the same call stays repaired.
    """
    dataset.snapshot()
    if not dry_run:
        finish_repairs(dataset)
    chosen = selection or QuarantineSelection()
    done = RepairReceipt(dataset.name, dry_run, None)
    if not dataset.rejected.exists() or not (snapshot := dataset.rejected.snapshot()).files:
        return done
    tally = RejectionTally()
    notes: list[str] = []
    readings = _find_readings(dataset)
    measured = measure_rows(snapshot, chosen)
    num_total = sum(entry.num_rows for entry in snapshot.files)
    for producer, is_conflict, span in _parts(measured):
        rows = select_rows(snapshot, chosen, span)
        readable = rows.filter(pa.array([row.is_valid for row in rows.column("row")]))
        if not producer.startswith(_INGESTS) or not readable.num_rows:
            done = replace(done, num_skipped_rows=done.num_skipped_rows + rows.num_rows)
            continue
        reading: Mapping[str, Any] = readings.get(producer, {})
        if is_conflict:
            reading = _STORED  # these rows are as the dataset would have them
        part = _Part(dataset, snapshot, readable, reading, options or ReadOptions(), spaces)
        part.run(fix)
        version = None if dry_run else part.commit(fix)
        tally.merge(part.tally)
        notes += [note for note in part.notes if note not in notes]
        num_skipped = rows.num_rows - readable.num_rows
        done = replace(
            done,
            version=done.version if version is None else version,
            num_repaired_episodes=done.num_repaired_episodes + part.num_repaired,
            num_repaired_rows=done.num_repaired_rows + len(part.repaired),
            num_failed_episodes=done.num_failed_episodes + part.num_failed,
            num_failed_rows=done.num_failed_rows + readable.num_rows - len(part.repaired),
            num_skipped_rows=done.num_skipped_rows + num_skipped,
        )
    left = num_total - (0 if dry_run else done.num_repaired_rows)
    return replace(done, num_left_rows=left, checks=tally.checks(), notes=tuple(notes))


def finish_repairs(dataset: Dataset) -> None:
    """Take out of the quarantine what earlier repairs committed and were killed before they did."""
    if not dataset.rejected.exists():
        return
    for commit in dataset.history():
        if (done := commit.get(_REPAIRED)) is None:
            continue
        producer = str(commit["producer"])
        if dataset.rejected.find_commit(producer, 0) is not None:
            continue
        try:
            before = dataset.rejected.snapshot(int(done["version"]))
            check_shards_present(before)
            rows = select_rows(before, QuarantineSelection())
        except (NotFoundError, ShardCorruptError):
            # Its files are gone: it is old, and was finished or compacted since, or some of its
            # rows were purged. What is left of them stays in quarantine, as it is in the dataset.
            continue
        kept = _in_ranges(rows.column(POSITION).to_numpy(), done["rows"])
        digests = digest_rows(rows.filter(pa.array(kept)))
        remove_rows(dataset.rejected, digests, producer=producer, operation=_OPERATION)


def _group_runs(columns: LoggedColumns) -> Iterator[list[Episode]]:
    """Return the runs of each episode."""
    starts = np.flatnonzero(np.diff(columns.whole_numbers(), prepend=-1)).tolist()
    for start, stop in itertools.pairwise([*starts, len(columns)]):
        yield columns[start:stop]


class _Part:
    """Some quarantined episodes of one ingest, read again."""

    def __init__(
        self,
        dataset: Dataset,
        snapshot: TableSnapshot,
        rows: pa.Table,
        reading: Mapping[str, Any],
        options: ReadOptions,
        spaces: tuple[Space, Space] | None,
    ) -> None:
        self._dataset, self._snapshot, self._rows = dataset, snapshot, rows
        self._reading, self._given = reading, options
        self._spec = dataset.spec
        self._spaces = spaces or (self._spec.observation_space, self._spec.action_space)
        names = ("episode_id", "agent_id", "source_episode_id")
        ids, agents, sources = (rows.column(name).to_pylist() for name in names)
        self._prefix = ids[0].removesuffix(sources[0])
        self._sources = sources
        self._owners: list[_OneEpisode] = list(zip(ids, agents, strict=True))
        self._episodes: list[Episode] = []
        self._read: list[tuple[list[Episode], set[_OneEpisode]]] = []
        self.repaired: list[int] = []
        self.num_repaired = self.num_failed = 0
        self.tally = RejectionTally()
        self.notes: list[str] = []

    def run(self, fix: str | None) -> None:
        """Read the rows, and find the episodes that pass."""
        texts = self._rows.column("row").to_pylist()
        laid_out = _LoggedRows([json.loads(text) for text in texts], self._schema(), self._flaws())
        table, misfits, order = laid_out.fixed(fix)
        if not len(order):
            self.num_failed = len(set(self._owners))
            return
        read_as = _merge(_read_options(self._reading), self._given, table.column_names)
        table, known = self._with_ids(table, order, read_as)
        is_stored = self._reading is _STORED
        encoding = NO_ENCODING if is_stored else self._spec.encoding or NO_ENCODING
        read_as = replace(read_as, encoding=encoding)
        declared = Declaration(
            known,
            one_step=self._reading.get("read_as", {}).get("format") == "bandit",
            rewards_optional=self._spec.rewards_optional,
        )
        where = f"quarantine of {self._dataset.name}"
        reader = TabularReader(_FixedRows(table, misfits, where), read_as, where, declared)
        validator = SourceValidator(
            self._spec, self._spaces, rewards_optional=reader.rewards_optional
        )
        inspection = Inspection(reader, validator, REJECT, None)
        inspection.run()
        self.tally.merge(inspection.tally)
        self.notes += reader.notes
        self._settle(inspection, order)

    def commit(self, fix: str | None) -> int | None:
        """Commit the episodes and take their rows out of the quarantine; return the version."""
        if not self._episodes:
            return None
        # Two repairs of the same rows at the same time are one commit, whichever is first.
        rows = hashlib.sha256(b"".join(sorted(digest_rows(self._rows)))).hexdigest()
        producer = f"repair/{self._snapshot.version}-{rows[:32]}"
        info: dict[str, Any] = {
            _REPAIRED: {"version": self._snapshot.version, "rows": _to_ranges(self._positions())},
        }
        if fix is not None:
            # Not the text, which may name whom a purge has to take out.
            info["fix_sha256"] = hashlib.sha256(fix.encode()).hexdigest()
        while self._episodes:
            try:
                done = self._dataset.append(
                    self._episodes, producer=producer, sequence=0, info=info, on_conflict="refuse"
                )
                break
            except EpisodeInvalidError:
                # Another writer has come with one of their keys: it stays, the others do not.
                if not self._hold_conflicts():
                    raise
                info[_REPAIRED]["rows"] = _to_ranges(self._positions())
        else:
            return None
        if done.already_present:
            self.notes.append("another repair has committed these rows meanwhile")
            self.num_repaired, self.repaired = 0, []
            return None
        if done.num_deleted_before:
            self.notes.append(
                f"{done.num_deleted_before} of these episodes were deleted before: they left the "
                "quarantine and were not stored"
            )
            self.num_repaired -= done.num_deleted_before
        digests = digest_rows(self._rows.take(pa.array(self.repaired, pa.int64())))
        remove_rows(self._dataset.rejected, digests, producer=producer, operation=_OPERATION)
        return done.version

    def _positions(self) -> list[int]:
        positions = self._rows.column(POSITION).to_pylist()
        return [positions[row] for row in self.repaired]

    def _settle(self, inspection: Inspection, order: Sequence[int]) -> None:
        """Repair the quarantined episodes of which all rows that the fix returns pass."""
        bad: set[_OneEpisode] = set()
        read: list[tuple[list[Episode], set[_OneEpisode]]] = []
        for item in inspection.iter_found():
            if isinstance(item, RejectedEpisode):
                bad |= self._owners_of([item], order)
            else:
                read += [(runs, self._owners_of(runs, order)) for runs in _group_runs(item)]
        present = self._find_present([runs[0] for runs, _ in read])
        for runs, owners in read:
            if (self._prefix + runs[0].episode_id, runs[0].agent_id) in present:
                bad |= owners
        if present:
            self.notes.append(
                f"{len(present)} episodes have an id that the dataset has already, such as "
                f"{min(present)[0]!r}: they stay in quarantine"
            )
        # An episode may be made of rows of several: one that fails holds the others back.
        while True:
            held = set().union(*(own for _, own in read if own & bad)) - bad
            if not held:
                break
            bad |= held
        good = set().union(*(own for _, own in read)) - bad
        self._read = [
            ([replace(run, episode_id=f"{self._prefix}{run.episode_id}") for run in runs], own)
            for runs, own in read
            if own <= good
        ]
        self._accept()
        while self._hold_conflicts():
            pass

    def _accept(self) -> None:
        """Take the episodes that are read and pass as those to be committed."""
        good = set().union(*(own for _, own in self._read))
        self._episodes = [run for runs, _ in self._read for run in runs]
        self.repaired = [row for row, owner in enumerate(self._owners) if owner in good]
        self.num_repaired = len(good)
        self.num_failed = len(set(self._owners)) - len(good)

    def _hold_conflicts(self) -> bool:
        """Leave those in quarantine that differ from the stored rows of their keys, if any do.

        Of those that differ from one another the first may pass.
        """
        conflicts = self._dataset.find_conflicts(self._episodes)
        if not conflicts:
            return False
        numbers = [number for number, (runs, _) in enumerate(self._read) for _ in runs]
        held = {owner for run, _ in conflicts for owner in self._read[numbers[run]][1]}
        while more := set().union(*(own for _, own in self._read if own & held)) - held:
            held |= more
        self._read = [(runs, own) for runs, own in self._read if not own & held]
        self.notes.append(
            f"{len(held)} episodes have keys that the dataset has with other values, such as "
            f"{conflicts[0][1][0]} They stay in quarantine"
        )
        self._accept()
        return True

    def _owners_of(
        self, items: Sequence[Episode | RejectedEpisode], order: Sequence[int]
    ) -> set[_OneEpisode]:
        owners: set[_OneEpisode] = set()
        for item in items:
            assert isinstance(item, LoggedEpisode | RejectedEpisode)
            assert item.places is not None
            owners |= {self._owners[order[int(row)]] for row in item.places.rows}
        return owners

    def _find_present(self, episodes: Sequence[Episode]) -> set[_OneEpisode]:
        """Return which of these the dataset has."""
        keys = {(f"{self._prefix}{one.episode_id}", one.agent_id) for one in episodes}
        if not keys:
            return set()
        rows = self._dataset.snapshot().sql(
            "SELECT DISTINCT episode_id, agent_id FROM steps "
            "WHERE starts_with(episode_id, $prefix)",
            {"prefix": self._prefix},
        )
        columns = [rows.column(name).to_pylist() for name in ("episode_id", "agent_id")]
        return keys & set(zip(*columns, strict=True))

    def _schema(self) -> pa.Schema | None:
        if (text := self._reading.get(COLUMNS)) is None:
            return None
        return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(text)))

    def _flaws(self) -> list[str]:
        """Return of each row the reasons why it is here, in one text."""
        return ["\n".join(reasons) for reasons in self._rows.column("reasons").to_pylist()]

    def _with_ids(
        self, table: pa.Table, order: Sequence[int], options: ReadOptions
    ) -> tuple[pa.Table, dict[str, str]]:
        """Return the rows and what is known of their columns; with ids where the log had none."""
        known = {
            ours: theirs
            for ours, theirs in self._known_columns().items()
            if _has_all(theirs, table.column_names)
        }
        if options.episode_by or "episode_id" in options.mapping:
            known.pop("episode_id", None)
        elif "episode_id" not in known:
            ids = pa.array([self._sources[row] for row in order], pa.string())
            table = table.append_column(_OWN_ID, ids)
            known["episode_id"] = _OWN_ID
        return table, known

    def _known_columns(self) -> Mapping[str, str]:
        known: Mapping[str, str] | None = self._reading.get("known_columns")
        if known is not None:
            return known
        # A quarantine of an older release: what it knows is beside each row.
        texts = self._rows["mapping"] if "mapping" in self._rows.column_names else [pa.scalar(None)]
        text = texts[0].as_py()
        return {} if text is None else dict(json.loads(text))


@dataclass
class _LoggedRows:
    """Rows as the log had them: its names, values and types.

    flaws: of each row what was found wrong with it, by which a text in a column of numbers, such as
    NaN, is told from the number that it may stand for.
    """

    rows: list[dict[str, Any]]
    schema: pa.Schema | None
    flaws: list[str]
    table: pa.Table = field(init=False)
    misfits: dict[int, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.table, self.misfits = self._lay_out(self.rows, self.flaws)

    def fixed(self, fix: str | None) -> tuple[pa.Table, Mapping[int, Mapping[str, Any]], list[int]]:
        """Return the rows that a fix returns, their misfits, and of each its number before it.

        Raises: QueryError, QueryRefusedError, ConfigInvalidError.
        """
        if fix is None:
            return self.table, self.misfits, list(range(len(self.rows)))
        mixed = {name for cells in self.misfits.values() for name in cells}
        found = run_table_query(fix, {TABLE: self._as_texts(mixed)})
        order = _check_ids(found, len(self.rows))
        found = found.drop_columns([ROW_ID])
        by_log = np.argsort(np.asarray(order, np.int64), kind="stable")
        found, order = found.take(pa.array(by_log)), [order[i] for i in by_log.tolist()]
        columns = {name: _plain_numbers(found.column(name)) for name in found.column_names}
        table = pa.table(columns)
        again = [n for n in table.column_names if n in mixed and pa.types.is_string(table[n].type)]
        if not again:
            return table, {}, order
        values = {name: table.column(name).to_pylist() for name in again}
        rows = [
            {name: self._restore(row, name, values[name][i]) for name in again}
            for i, row in enumerate(order)
        ]
        restored, misfits = self._lay_out(rows, [self.flaws[row] for row in order])
        for name in again:
            column = table.schema.get_field_index(name)
            table = table.set_column(column, name, restored.column(name))
        return table, misfits, order

    def _as_texts(self, mixed: set[str]) -> pa.Table:
        """Return the rows for SQL, each column of one type."""
        table = self.table
        for name in mixed:
            texts = pa.array([_to_text(row.get(name)) for row in self.rows], pa.string())
            index = table.schema.get_field_index(name)
            if index < 0:
                table = table.append_column(name, texts)
            else:
                table = table.set_column(index, name, texts)
        return table.append_column(ROW_ID, pa.array(np.arange(len(self.rows))))

    def _restore(self, row: int, name: str, text: str | None) -> Any:
        """Return a text's value: what the log had if the fix left it alone."""
        value = self.rows[row].get(name)
        return value if _to_text(value) == text else text

    def _lay_out(
        self, rows: Sequence[dict[str, Any]], flaws: Sequence[str]
    ) -> tuple[pa.Table, dict[int, dict[str, Any]]]:
        if self.schema is None:
            return parse_rows(rows)
        columns: dict[str, pa.Array] = {}
        misfits: dict[int, dict[str, Any]] = {}
        rest = {name for row in rows for name in row}.difference(self.schema.names)
        for name in [n for n in self.schema.names if any(n in row for row in rows)]:
            kind = self.schema.field(name).type
            # As the check `dtype` says it: a number that is not finite stands without quotes.
            flawed = [f"column {name!r}: found '" in text for text in flaws]
            columns[name], wrong = to_column([row.get(name) for row in rows], kind, flawed)
            for i, value in wrong.items():
                misfits.setdefault(i, {})[name] = value
        if rest:
            others, more = parse_rows([{n: v for n, v in row.items() if n in rest} for row in rows])
            columns |= {name: others.column(name) for name in others.column_names}
            for i, cells in more.items():
                misfits.setdefault(i, {}).update(cells)
        return pa.table(columns), misfits


class _FixedRows(TableSource):
    """Rows whose types are settled."""

    def __init__(
        self, table: pa.Table, misfits: Mapping[int, Mapping[str, Any]], name: str
    ) -> None:
        file = SourceFile(SourceBytes(Path(name), 0, 0), name, name, 0, "")
        self._chunk = Chunk(file, 0, table, misfits=misfits)

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        yield self._chunk

    @property
    def settled(self) -> frozenset[str]:
        return frozenset(self._chunk.table.column_names)


def _find_readings(dataset: Dataset) -> dict[str, Mapping[str, Any]]:
    """Return by producer how the rows of a quarantine were read."""
    infos: dict[str, Mapping[str, Any]] = {}
    for table in (dataset.table, dataset.rejected):
        for commit in table.history():
            producer = str(commit.get("producer", ""))
            if producer.startswith(_INGESTS) and "read_as" in commit:
                infos[producer] = commit
    return infos


def _read_options(reading: Mapping[str, Any]) -> ReadOptions:
    known = {f.name for f in fields(ReadOptions)}
    stated: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in reading.get("read_as", {}).items()
        if name in known
    }
    return ReadOptions(**stated)


def _merge(before: ReadOptions, given: ReadOptions, names: Sequence[str]) -> ReadOptions:
    """Return the options of the ingest, with what is given instead.

    What the ingest said of columns that a fix has taken out is left out.
    """
    plain = ReadOptions()
    stated = {f.name: getattr(given, f.name) for f in fields(given)}
    changed = {name: value for name, value in stated.items() if value != getattr(plain, name)}
    mapping = {ours: t for ours, t in before.mapping.items() if _has_all(t, names)}
    fill = {name: value for name, value in before.fill.items() if name in names}
    return replace(
        before,
        **{
            **changed,
            "mapping": {**mapping, **given.mapping},
            "fill": {**fill, **given.fill},
            "on_rows": None,
        },
    )


def _has_all(theirs: str, names: Sequence[str]) -> bool:
    """Whether the columns that a mapping names are there; patterns find what there is."""
    if theirs in names:
        return True
    return all(part.strip() in names or set(part) & {*"*?["} for part in theirs.split(","))


def _parts(measured: pa.Table) -> Iterator[tuple[str, bool, tuple[int, int]]]:
    """Yield (producer, whether in conflict, positions from and up to) of whole episodes.

    Those of a part are of one ingest, and either rows of the log or, in conflict with stored ones,
    rows as the dataset would have them.
    """
    names = ("producer", "episode_id", "agent_id", POSITION, "num_characters", "is_conflict")
    rows = zip(*(measured.column(name).to_pylist() for name in names), strict=True)
    start, last, size = 0, None, 0
    end = 0
    for producer, episode, agent, position, num, is_conflict in rows:
        key = (producer, is_conflict, episode, agent)
        if last is None:
            start = position
        elif key[:2] != last[:2] or (key != last and size >= _PART_CHARACTERS):
            yield *last[:2], (start, end)
            start, size = position, 0
        last, end, size = key, position + 1, size + num
    if last is not None:
        yield *last[:2], (start, end)


def _check_ids(found: pa.Table, num_rows: int) -> list[int]:
    """Return which row each one of a fix is. Raises: ConfigInvalidError."""
    if found.column_names.count(ROW_ID) != 1:
        raise ConfigInvalidError(
            f"fix: found the columns {', '.join(found.column_names[:20])}, expected one that is "
            f"{ROW_ID}: it says which row is which. Select it too, as SELECT * REPLACE does.",
            parameter="fix",
        )
    if len(set(found.column_names)) < found.num_columns:
        raise ConfigInvalidError(
            f"fix: found a column twice in {', '.join(found.column_names[:20])}, expected each "
            "once.",
            parameter="fix",
        )
    order: list[int] = found.column(ROW_ID).to_pylist()
    if any(type(one) is not int or not 0 <= one < num_rows for one in order):
        raise ConfigInvalidError(
            f"fix: found a {ROW_ID} that is none of the rows', expected it as it is.",
            parameter="fix",
        )
    if len(set(order)) < len(order):
        raise ConfigInvalidError(
            f"fix: found a {ROW_ID} in several rows, expected each row at most once.",
            parameter="fix",
        )
    return order


def _plain_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return decimals, which DuckDB makes of 0.5, as the numbers that logs have."""
    if not pa.types.is_decimal(column.type):
        return column
    if column.type.scale == 0:
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid:
            return column.cast(pa.float64())
    return column.cast(pa.float64())


def _to_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _to_ranges(positions: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers as [first, last] runs."""
    ranges: list[list[int]] = []
    for one in positions:
        if ranges and one == ranges[-1][1] + 1:
            ranges[-1][1] = one
        else:
            ranges.append([one, one])
    return ranges


def _in_ranges(positions: Any, ranges: Sequence[Sequence[int]]) -> Any:
    starts = np.asarray([first for first, _ in ranges], np.int64)
    ends = np.asarray([last for _, last in ranges], np.int64)
    at = np.searchsorted(starts, positions, side="right") - 1
    return (at >= 0) & (positions <= ends[np.maximum(at, 0)])
