"""Unique keys: what becomes of rows about to be committed whose keys are in the dataset, or twice.

Each row is new, a duplicate (it says nothing that the stored one does not), a late value (it gives
the reward, or a column named for it, where the stored row has NULL), or in conflict with what is
there. A column that the pending rows lack is not compared. Rows are judged by episode:

    - none of its keys is there: it is new.
    - all are there: each row is a duplicate or a late value.
    - the first ones are there, they are the last ones of one stored episode so far, and that has
      not ended: the others continue the stored episode.
    - anything else is a conflict, and no row of the episode is taken.

The earlier of two rows counts as stored for the later one, also within what is committed at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    ENV_STEP,
    EPISODE_ID,
    FINAL_OBSERVATION,
    KEY_COLUMNS,
    SOURCE_EPISODE_ID,
    STANDARD_COLUMNS,
    STEP,
    TERMINATED,
    TRUNCATED,
    UniqueKeys,
)
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    EpisodeInvalidError,
)
from replaylake.datastore.lake.commit import KeyCounts
from replaylake.datastore.lake.rejected import REJECTED_SCHEMA, temporal_as_text, to_json_value
from replaylake.datastore.query.statements import literal
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_rows,
    scan_connection,
)
from replaylake.datastore.storage.arrow_values import combine_chunks, numbers, row_numbers
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.key_hashes import (
    Hashes,
    as_integers,
    canonical_bits,
    find_nulls,
    hash_keys,
    is_hashable,
)
from replaylake.datastore.storage.table.key_index import KeyIndex
from replaylake.datastore.storage.table.rewrite import with_values
from replaylake.datastore.storage.table.table import Table, TableSnapshot
from replaylake.datastore.storage.table.table_schema import conform, merge_schemas

OnConflict = Literal["set_aside", "replace", "refuse"]
SET_ASIDE: Final = "set_aside"
REPLACE: Final = "replace"
ON_CONFLICT: Final = (SET_ASIDE, REPLACE, "refuse")
CHECK: Final = "conflict"
_OPERATION: Final = "SET ASIDE"
_WAITING, _NEW, _DUPLICATE, _LATE, _CONFLICT, _REPLACED = range(-1, 5)
# What says where a row is, and not what happened; compared apart, or not at all.
_PLACE_COLUMNS: Final = (EPISODE_ID, SOURCE_EPISODE_ID, STEP, ENV_STEP, FINAL_OBSERVATION)
# Columns of numbers that are assigned anew where steps continue an episode, or some are left out.
_NUMBERS: Final = frozenset({STEP, ENV_STEP})
_MAX_EXAMPLES: Final = 3
_MAX_SHOWN: Final = 60

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]
# The file and row in the source of each of some pending rows, where that is known.
Locate = Callable[[Sequence[int]], Sequence[tuple[str | None, int | None]]]


@dataclass(frozen=True)
class Conflict:
    """An episode that was not taken: its pending rows, by number, and why."""

    rows: Sequence[int]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Resolution:
    """What becomes of pending rows.

    rows: those to be written. changes: of stored shards, the columns that change: name, places and
    new values. is_whole: whether `rows` are the pending ones, all and as they were.
    """

    rows: pa.Table
    counts: KeyCounts
    is_whole: bool
    changes: Mapping[FileEntry, list[tuple[str, Numbers, pa.Array]]] = field(default_factory=dict)
    conflicts: Sequence[Conflict] = ()


def parse_unique(unique: UniqueKeys | Sequence[str], late: Sequence[str] = ()) -> UniqueKeys:
    """Return unique keys of names that were given. Raises: ConfigInvalidError."""
    if isinstance(unique, UniqueKeys):
        return unique
    keys = UniqueKeys(tuple(unique), tuple(late))
    if not keys.columns or len(set(keys.columns)) < len(keys.columns):
        raise ConfigInvalidError(
            f"unique: found {list(keys.columns)}, expected one column or several different ones.",
            parameter="unique",
        )
    reserved = {*STANDARD_COLUMNS} - {*KEY_COLUMNS}
    if wrong := [name for name in keys.columns if name in reserved]:
        raise ConfigInvalidError(
            f"unique: found {wrong[0]}, expected columns that say which event a row is of: further "
            f"columns of the log, or some of {', '.join(KEY_COLUMNS)}.",
            parameter="unique",
        )
    fixed = {*_PLACE_COLUMNS, AGENT_ID, TERMINATED, TRUNCATED, *keys.columns}
    if wrong := [name for name in keys.late if name in fixed]:
        raise ConfigInvalidError(
            f"late: found {wrong[0]}, expected columns that a row may get later. The key, the ids "
            "and the ends of episodes do not change.",
            parameter="late",
        )
    return keys


def check_key_types(unique: UniqueKeys, schema: pa.Schema) -> None:
    """Refuse key columns that a dataset lacks, or of which no key is made; late ones may come.

    Raises: ConfigInvalidError.
    """
    if missing := [name for name in unique.columns if name not in schema.names]:
        further = [name for name in schema.names if name not in STANDARD_COLUMNS]
        raise ConfigInvalidError(
            f"unique: found no column {missing[0]}, expected some of "
            f"{', '.join([*further, *KEY_COLUMNS])}.",
            parameter="unique",
        )
    for name in unique.columns:
        kind = schema.field(name).type
        if not is_hashable(kind):
            raise ConfigInvalidError(
                f"unique: found column {name} of {kind}, expected one number, text, flag or time a "
                "row.",
                parameter="unique",
            )


def check_keys_known(rows: pa.Table, unique: UniqueKeys) -> None:
    """Refuse rows in which a value of the key is NULL. Raises: EpisodeInvalidError."""
    for name in unique.columns:
        if name not in rows.column_names:
            raise EpisodeInvalidError(
                f"episode {_first_name(rows, 0)}: found no column {name}, expected one: the "
                f"dataset is unique by {', '.join(unique.columns)}."
            )
    missing = find_nulls([rows[name] for name in unique.columns])
    if missing is not None:
        at = int(np.argmax(missing))
        names = [name for name in unique.columns if not rows[name][at].is_valid]
        raise EpisodeInvalidError(
            f"episode {_first_name(rows, at)}: found NULL in {', '.join(names)} of step "
            f"{rows[STEP][at].as_py()}, expected a value: the dataset is unique by it."
        )


def _first_name(rows: pa.Table, at: int) -> str:
    return str(rows[SOURCE_EPISODE_ID][at].as_py() or rows[EPISODE_ID][at].as_py())


def hash_rows(rows: pa.Table, unique: UniqueKeys) -> Hashes:
    """Return the hash of each row's key."""
    return hash_keys([rows[name] for name in unique.columns])


def find_doubled(
    snapshot: TableSnapshot, index: KeyIndex, unique: UniqueKeys, num: int = _MAX_EXAMPLES
) -> list[str]:
    """Return some keys that two stored rows have, as text; none if all are different.

    Raises: ShardCorruptError.
    """
    found: list[str] = []
    for file, row in index.iter_equal(snapshot):
        keys = pa.concat_tables(
            [
                _read_rows(snapshot, snapshot.files[one], np.array([at]), unique.columns)
                for one, at in zip(file.tolist(), row.tolist(), strict=True)
            ]
        )
        codes = encode_rows([keys[name] for name in unique.columns])
        _, first, counts = np.unique(codes, return_index=True, return_counts=True)
        for at in first[counts > 1].tolist():
            found.append(_key_text(keys, at, unique))
        if len(found) >= num:
            break
    return found[:num]


def find_null(snapshot: TableSnapshot, unique: UniqueKeys) -> int:
    """Count the stored rows that lack a value of the key. Raises: QueryError."""
    if not snapshot.files:
        return 0
    missing = " OR ".join(f'"{name}" IS NULL' for name in unique.columns)
    with fetch_files(snapshot, snapshot.files) as paths, scan_connection() as connection:
        text = f"SELECT count(*) FROM {from_clause(snapshot, paths)} WHERE {missing}"
        ((num,),) = query_rows(connection, text)
    return int(num)


def resolve(
    snapshot: TableSnapshot,
    index: KeyIndex,
    unique: UniqueKeys,
    rows: pa.Table,
    hashes: Hashes,
    on_conflict: OnConflict,
) -> Resolution:
    """Decide what becomes of pending rows, which have a whole key each, at a version.

    Cost: one search of the index; for rows whose key is there, the columns of their shards.
    Raises: EpisodeInvalidError for a conflict where it is `refuse`d; ShardCorruptError.
    """
    matches = index.find(snapshot, hashes)
    is_touched = np.zeros(len(hashes), np.bool_)
    is_touched[matches.query] = True
    ordered = np.sort(hashes)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        is_touched |= np.isin(hashes, twice)
    starts = find_episode_starts(rows)
    if not is_touched.any():
        return Resolution(rows, KeyCounts(committed_episodes=len(starts)), True)
    episode = np.zeros(rows.num_rows, np.int64)
    episode[starts[1:]] = 1
    episode = np.cumsum(episode)
    touched = np.zeros(len(starts), np.bool_)
    touched[episode[is_touched]] = True
    at = np.flatnonzero(touched[episode])
    places = np.unique(np.stack([matches.file, matches.row], axis=1), axis=0)
    work = _Work(snapshot, unique, rows, at, episode[at], places, on_conflict)
    return work.run(len(starts))


def find_episode_starts(rows: pa.Table) -> Numbers:
    """Return the first row of each run of rows of one episode and agent."""
    if not rows.num_rows:
        return np.empty(0, np.int64)
    differs = np.zeros(rows.num_rows, np.bool_)
    differs[0] = True
    for name in (EPISODE_ID, AGENT_ID):
        column = combine_chunks(rows[name])
        if pa.types.is_dictionary(column.type):
            column = column.indices if not column.null_count else column.dictionary_decode()
        differs[1:] |= numbers(pc.not_equal(column.slice(1), column.slice(0, len(column) - 1)))
    return np.flatnonzero(differs)


def encode_rows(columns: Sequence[pa.ChunkedArray]) -> Numbers:
    """Return a number [N] for each row that is the same where all values are, NULLs too."""
    parts = [_as_rows(part, len(part)) for column in columns for part in _comparable(column)]
    wide = np.concatenate(parts, axis=1)
    if wide.shape[1] == 1:
        return np.unique(wide[:, 0], return_inverse=True)[1]
    return np.unique(wide, axis=0, return_inverse=True)[1].reshape(-1)


def _as_rows(part: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    return part.reshape(num, part.size // num if num else 1)


def _comparable(column: pa.Array | pa.ChunkedArray) -> list[NDArray[np.int64]]:
    """Return int64 arrays, [N] or [N, K], that are equal in two rows where their values are."""
    array = column
    if isinstance(array, pa.ChunkedArray):
        array = array.unify_dictionaries() if pa.types.is_dictionary(array.type) else array
        array = combine_chunks(array)
    kind, num = array.type, len(array)
    if pa.types.is_dictionary(kind):
        return _comparable(array.dictionary_decode())
    if pa.types.is_null(kind):
        return [np.zeros(num, np.int64)]
    valid = np.ones(num, np.bool_)
    if array.null_count:
        valid = numbers(pc.is_valid(array)).copy()
    known = array.filter(pa.array(valid)) if array.null_count else array
    parts: list[NDArray[np.int64]] = [valid.astype(np.int64)] if array.null_count else []
    types = pa.types
    if types.is_struct(kind):
        inner = [part for child in known.flatten() for part in _comparable(child)]
    elif types.is_fixed_size_list(kind):
        inner = [_as_rows(part, len(known)) for part in _comparable(known.flatten())]
    elif types.is_floating(kind):
        inner = [canonical_bits(numbers(known))]
    elif types.is_integer(kind) or types.is_boolean(kind) or types.is_temporal(kind):
        inner = [as_integers(known)]
    elif types.is_nested(kind):
        texts = pa.array([repr(value) for value in known.to_pylist()], pa.large_string())
        inner = [numbers(texts.dictionary_encode().indices).astype(np.int64)]
    else:
        inner = [numbers(known.dictionary_encode().indices).astype(np.int64)]
    for part in inner:
        if array.null_count:
            whole = np.zeros((num, *part.shape[1:]), np.int64)
            whole[valid] = part
            part = whole
        parts.append(part)
    return parts


def _read_rows(
    snapshot: TableSnapshot, entry: FileEntry, at: Numbers, names: Sequence[str]
) -> pa.Table:
    rows = replace(snapshot, files=(entry,)).read(names)
    return rows.take(row_numbers(at))


@dataclass(frozen=True)
class _Tail:
    """The last step of an episode, and whether that ended it."""

    step: int
    ended: bool


class _Work:
    """The rows of the episodes that share a key with another row, decided one after the other.

    Rows are numbered with the stored ones first: `t` is such a number, `r` counts the pending rows
    alone.
    """

    def __init__(
        self,
        snapshot: TableSnapshot,
        unique: UniqueKeys,
        pending: pa.Table,
        at: Numbers,
        episode: Numbers,
        places: Numbers,
        on_conflict: OnConflict,
    ) -> None:
        self._snapshot, self._unique = snapshot, unique
        self._pending, self._at = pending, at
        self._places, self._on_conflict = places, on_conflict
        schema = merge_schemas(snapshot.schema, pending.schema)
        names = list(pending.column_names)
        fields = pa.schema([schema.field(name) for name in names])
        merged = replace(snapshot, schema=schema)
        stored = [fields.empty_table()]
        for file in np.unique(places[:, 0]).tolist():
            rows = places[places[:, 0] == file, 1]
            stored.append(_read_rows(merged, snapshot.files[file], rows, names))
        self._all = pa.concat_tables([*stored, conform(pending.take(row_numbers(at)), fields)])
        self._all = self._all.unify_dictionaries().combine_chunks()
        self._num_stored = len(places)
        num = self._all.num_rows
        self._code = encode_rows([self._all[name] for name in unique.columns])
        self._where = np.full(int(self._code.max()) + 1, -1, np.int64)
        self._where[self._code[: self._num_stored][::-1]] = np.arange(self._num_stored)[::-1]
        self._late = [name for name in unique.late_columns if name in names]
        apart = {*_PLACE_COLUMNS, *unique.columns, *unique.late_columns}
        self._fixed = {name: _comparable(self._all[name]) for name in names if name not in apart}
        self._final = _null_as_negative(self._all[FINAL_OBSERVATION])
        self._step = as_integers(combine_chunks(self._all[STEP]))
        self._env_step = as_integers(combine_chunks(self._all[ENV_STEP]))
        flags = [numbers(self._all[name]) for name in (TERMINATED, TRUNCATED)]
        self._ended: Mask = flags[0] | flags[1]
        # What a row of the dataset, stored or just taken, has by now: of which row its values are.
        self._content = np.arange(num)
        self._late_own = {name: _null_as_negative(self._all[name]) for name in self._late}
        self._late_now = {name: own.copy() for name, own in self._late_own.items()}
        self._late_from = {name: np.arange(num) for name in self._late}
        self._outcome = np.full(len(at), _WAITING)
        first = np.flatnonzero(np.diff(episode, prepend=-1))
        self._start = np.append(first, len(at))
        self._episode = np.repeat(np.arange(len(first)), np.diff(self._start))
        self._dropped = np.zeros(len(at), np.bool_)
        self._reasons: dict[int, tuple[str, ...]] = {}
        # Rows that continue a stored episode: id, agent and source id.
        self._moved: dict[int, tuple[str, str, str | None]] = {}
        self._tails: dict[tuple[str, str], _Tail | None] = {}
        self._is_single = np.diff(self._start) == 1

    def run(self, num_episodes: int) -> Resolution:
        self._drop_repeats()
        while len(rows := np.flatnonzero(self._outcome == _WAITING)):
            self._take_ready(rows)
            rows = rows[self._outcome[rows] == _WAITING]
            self._take_settled(rows[self._is_single[self._episode[rows]]])
        return self._result(num_episodes)

    def _take_ready(self, rows: Numbers) -> None:
        """Decide the episodes of which no key is in an earlier one that waits."""
        code = self._code[self._num_stored + rows]
        first = np.full(len(self._where), -1, np.int64)
        first[code[::-1]] = rows[::-1]
        edges = np.flatnonzero(np.diff(self._episode[rows], prepend=-1))
        is_ready = np.logical_and.reduceat(first[code] == rows, edges)
        sizes = np.diff(np.append(edges, len(rows)))
        rows = rows[np.repeat(is_ready, sizes)]
        sizes = sizes[is_ready]
        edges = np.cumsum(sizes) - sizes
        where, differs, fills = self._compare(rows)
        num_there = np.add.reduceat((where >= 0).astype(np.int64), edges)
        has_difference = np.logical_or.reduceat(differs, edges)
        is_new, is_there = num_there == 0, num_there == sizes

        def select(episodes: Mask) -> Mask:
            return np.repeat(episodes, sizes)

        self._take_new(rows[select(is_new)])
        same = select(is_there & ~has_difference)
        self._take_same(rows[same], where[same], fills[same])
        other = is_there & has_difference
        if self._on_conflict == "replace" and other.any():
            self._replace(rows, where, differs, fills, edges, sizes, other)
        else:
            chosen = select(other)
            self._set_aside(rows[chosen], where[chosen], differs[chosen])
        mixed = np.flatnonzero(~is_new & ~is_there)
        if len(mixed):
            self._load_tails(where[select(~is_new & ~is_there)])
        for number in mixed.tolist():
            span = slice(int(edges[number]), int(edges[number] + sizes[number]))
            self._continue(rows[span], where[span], differs[span], fills[span])

    def _take_settled(self, rows: Numbers) -> None:
        """Decide rows alone in their episodes, of which nothing that waits changes what they are.

        A value that is not NULL stays, so a difference does, and so does what says nothing new.
        """
        if not len(rows):
            return
        where, differs, fills = self._compare(rows)
        there = where >= 0
        same = there & ~differs & ~fills
        if self._on_conflict != "replace":
            self._take_same(rows[same], where[same], fills[same])
            other = there & differs
            self._set_aside(rows[other], where[other], differs[other])

    def _compare(self, rows: Numbers) -> tuple[Numbers, Mask, Mask]:
        """Return for each row where its key is (-1: nowhere), whether it differs, and adds."""
        t = self._num_stored + rows
        where = self._where[self._code[t]]
        at = np.flatnonzero(where >= 0)
        differs, fills = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
        for _, mask in self._differences(t[at], where[at]):
            differs[at] |= mask
        for name in self._late:
            own, now = self._late_own[name][t[at]], self._late_now[name][where[at]]
            fills[at] |= (own >= 0) & (now < 0)
        return where, differs, fills & ~differs

    def _differences(self, t: Numbers, where: Numbers) -> Iterator[tuple[str, Mask]]:
        """Yield each column, and which rows differ in it from those where their keys are."""
        now = self._content[where]
        for name, parts in self._fixed.items():
            mask = np.zeros(len(t), np.bool_)
            for part in parts:
                other = part[t] != part[now]
                mask |= other if other.ndim == 1 else other.any(axis=1)
            yield name, mask
        own, before = self._final[t], self._final[now]
        yield FINAL_OBSERVATION, (own >= 0) & (before >= 0) & (own != before)
        shifts = [self._env_step[rows] - self._step[rows] for rows in (t, now)]
        yield ENV_STEP, (self._env_step[t] != self._env_step[now]) & (shifts[0] != shifts[1])
        for name in self._late:
            own, known = self._late_own[name][t], self._late_now[name][where]
            yield name, (own >= 0) & (known >= 0) & (own != known)

    def _take_new(self, rows: Numbers) -> None:
        t = self._num_stored + rows
        self._where[self._code[t]] = t
        self._outcome[rows] = _NEW
        if self._is_single.all():
            return
        for r in rows.tolist():
            self._note_tail(r)

    def _note_tail(self, r: int) -> None:
        t = self._num_stored + r
        key = self._key_of(t)
        known = self._tails.get(key)
        if known is None or known.step <= self._step[t]:
            self._tails[key] = _Tail(int(self._step[t]), bool(self._ended[t]))

    def _take_same(self, rows: Numbers, where: Numbers, fills: Mask) -> None:
        t = self._num_stored + rows
        self._outcome[rows] = np.where(fills, _LATE, _DUPLICATE)
        for name in self._late:
            own = self._late_own[name][t]
            at = (own >= 0) & (self._late_now[name][where] < 0)
            self._late_now[name][where[at]] = own[at]
            self._late_from[name][where[at]] = t[at]

    def _replace(
        self,
        rows: Numbers,
        where: Numbers,
        differs: Mask,
        fills: Mask,
        edges: Numbers,
        sizes: Numbers,
        chosen: Mask,
    ) -> None:
        """Put rows in the place of those with their keys, where that leaves the episodes whole."""
        changes_end = differs & (self._ended[self._num_stored + rows] != self._ended[where])
        at = np.repeat(chosen, sizes) & changes_end
        if at.any():
            self._load_tails(where[at])
        for number in np.flatnonzero(chosen).tolist():
            span = slice(int(edges[number]), int(edges[number] + sizes[number]))
            inside = where[span][changes_end[span]].tolist()
            if any(self._is_inside(t) for t in inside):
                reason = "ends, or no longer ends, an episode in the middle of which the row is"
                self._reject(rows[span], (f"{self._names(rows[span])}: {reason}",))
                continue
            same = ~differs[span]
            self._take_same(rows[span][same], where[span][same], fills[span][same])
            other, to = rows[span][~same], where[span][~same]
            t = self._num_stored + other
            self._outcome[other] = _REPLACED
            self._content[to] = t
            self._ended[to] = self._ended[t]
            for name in self._late:
                own = self._late_own[name][t]
                known = own >= 0
                self._late_now[name][to[known]] = own[known]
                self._late_from[name][to[known]] = t[known]

    def _is_inside(self, t: int) -> bool:
        tail = self._tails.get(self._key_of(t))
        return tail is not None and tail.step > self._step[t]

    def _continue(self, rows: Numbers, where: Numbers, differs: Mask, fills: Mask) -> None:
        """Let an episode of which some keys are there continue the stored one, or set it aside."""
        num = int(np.argmin(where >= 0))
        there = where[:num]
        first = self._name_step(rows[0])
        reason = None
        if differs.any():
            self._set_aside(rows, where, differs)
            return
        keys = {self._key_of(t) for t in there.tolist()}
        if num == 0 or (where[num:] >= 0).any():
            reason = f"{first}: found new keys before or between those of stored rows"
        elif len(keys) > 1:
            reason = f"{first}: found keys of {len(keys)} stored episodes, and new ones after them"
        else:
            (key,) = keys
            shifts = self._step[there] - self._step[self._num_stored + rows[:num]]
            tail = self._tails.get(key)
            last = int(self._step[there[-1]])
            if len(set(shifts.tolist())) > 1:
                reason = f"{first}: found its steps in another order than the stored ones"
            elif tail is None or tail.step > last:
                reason = (
                    f"{first}: found other steps after step {last} of stored episode {key[0]} than "
                    "it has"
                )
            elif tail.ended:
                reason = f"{first}: found steps after step {last}, the end of the stored episode"
            elif shifts[0] and not _NUMBERS.isdisjoint(self._unique.columns):
                reason = (
                    f"{first}: found steps that continue a stored episode under other numbers, and "
                    "the number of a step is part of the key"
                )
        if reason is not None:
            expected = "expected rows that are all there, or that continue one stored episode"
            self._reject(rows, (f"{reason}, {expected}.",))
            return
        self._take_same(rows[:num], there, fills[:num])
        source = self._all[SOURCE_EPISODE_ID][int(there[-1])].as_py()
        if (moved := self._moved.get(int(there[-1]))) is not None:
            source = moved[2]
        for r in rows[num:].tolist():
            t = self._num_stored + r
            if self._env_step[t] == self._step[t]:
                self._env_step[t] += shifts[0]
            self._step[t] += shifts[0]
            self._moved[t] = (*key, source)
        self._take_new(rows[num:])

    def _load_tails(self, where: Numbers) -> None:
        """Look up the last steps of stored episodes, by one scan of those not known yet."""
        stored = where[(where >= 0) & (where < self._num_stored)]
        keys = {self._key_of(t) for t in stored.tolist()} - self._tails.keys()
        if not keys:
            return
        ids = ", ".join(literal(episode) for episode in sorted({episode for episode, _ in keys}))
        with (
            fetch_files(self._snapshot, self._snapshot.files) as paths,
            scan_connection() as connection,
        ):
            found = query_rows(
                connection,
                f"SELECT {EPISODE_ID}, CAST({AGENT_ID} AS VARCHAR), max({STEP}), "
                f"arg_max({TERMINATED} OR {TRUNCATED}, {STEP}) "
                f"FROM {from_clause(self._snapshot, paths)} WHERE {EPISODE_ID} IN ({ids}) "
                "GROUP BY ALL",
            )
        for episode, agent, step, ended in found:
            self._tails.setdefault((episode, agent), _Tail(int(step), bool(ended)))

    def _key_of(self, t: int) -> tuple[str, str]:
        if (moved := self._moved.get(int(t))) is not None:
            return moved[:2]
        return str(self._all[EPISODE_ID][int(t)].as_py()), str(self._all[AGENT_ID][int(t)].as_py())

    def _drop_repeats(self) -> None:
        """Drop rows that repeat one of their own episode, as a log that was written twice has."""
        code = self._code[self._num_stored :]
        pairs = self._episode * len(self._where) + code
        if len(np.unique(pairs)) == len(pairs):
            return
        _, first, counts = np.unique(pairs, return_index=True, return_counts=True)
        for number in np.unique(self._episode[first[counts > 1]]).tolist():
            rows = np.arange(self._start[number], self._start[number + 1])
            _, own_first, inverse = np.unique(code[rows], return_index=True, return_inverse=True)
            leader = rows[own_first[inverse]]
            again = rows[leader != rows]
            t, other = self._num_stored + again, self._num_stored + leader[leader != rows]
            differs = [
                (name, mask)
                for name, mask in self._differences(t, other)
                if name != ENV_STEP and mask.any()
            ]
            if differs:
                at = int(np.argmax(differs[0][1]))
                text = self._difference_text(int(t[at]), int(other[at]), [differs[0][0]])
                self._reject(rows, (f"{text}. Its key is twice in this episode.",))
                continue
            if _NUMBERS.isdisjoint(self._unique.columns):
                t = self._num_stored + rows[leader == rows]
                steps = self._step[t[0]] + np.arange(len(t))
                is_own = self._env_step[t] == self._step[t]
                self._env_step[t] = np.where(is_own, steps, self._env_step[t])
                self._step[t] = steps
            self._outcome[again] = _DUPLICATE
            self._dropped[again] = True

    def _set_aside(self, rows: Numbers, where: Numbers, differs: Mask) -> None:
        """Put whole episodes aside, with what differs in their rows."""
        if not len(rows):
            return
        at = np.flatnonzero(differs)
        t, to = self._num_stored + rows[at], where[at]
        columns: list[list[str]] = [[] for _ in range(len(at))]
        for name, mask in self._differences(t, to):
            for place in np.flatnonzero(mask).tolist():
                columns[place].append(name)
        texts: dict[int, list[str]] = {}
        for place, names in enumerate(columns):
            own = texts.setdefault(int(self._episode[rows[at[place]]]), [])
            if len(own) < _MAX_EXAMPLES:
                own.append(f"{self._difference_text(int(t[place]), int(to[place]), names)}.")
        for number, reasons in texts.items():
            whole = np.arange(self._start[number], self._start[number + 1])
            self._reject(whole, tuple(reasons))

    def _reject(self, rows: Numbers, reasons: tuple[str, ...]) -> None:
        if self._on_conflict == "refuse":
            raise EpisodeInvalidError(
                f"{reasons[0]} Nothing was committed: `on_conflict` set_aside leaves such rows "
                "out, replace puts them in the place of the stored ones."
            )
        rows = rows[~self._dropped[rows]]
        self._outcome[rows] = _CONFLICT
        self._reasons[int(self._episode[rows[0]])] = reasons

    def _difference_text(self, t: int, to: int, names: Sequence[str]) -> str:
        parts = []
        for name in names[:_MAX_EXAMPLES]:
            before = int(self._content[to])
            if name in self._late:
                before = int(self._late_from[name][to])
            values = [_short(self._all[name][row].as_py()) for row in (t, before)]
            parts.append(f"{name} {values[0]}, expected {values[1]}")
        found = "; ".join(parts)
        return f"{self._name_step(t - self._num_stored)}: found {found} as the row before it has"

    def _name_step(self, r: int) -> str:
        return _key_text(self._all, self._num_stored + int(r), self._unique)

    def _names(self, rows: Numbers) -> str:
        return self._name_step(int(rows[0]))

    def _result(self, num_episodes: int) -> Resolution:
        at, outcome = self._at, self._outcome
        keep = np.ones(self._pending.num_rows, np.bool_)
        keep[at[outcome != _NEW]] = False
        new = np.flatnonzero(outcome == _NEW)
        rows = self._pending.filter(pa.array(keep)) if not keep.all() else self._pending
        place = np.cumsum(keep) - 1
        rows = self._change_new(rows, new, place[at[new]])
        num = np.bincount(outcome, minlength=5).tolist()
        sizes = np.diff(self._start)
        is_new = np.add.reduceat((outcome == _NEW).astype(np.int64), self._start[:-1]) > 0
        is_aside = np.add.reduceat((outcome == _CONFLICT).astype(np.int64), self._start[:-1]) > 0
        counts = KeyCounts(
            duplicates=num[_DUPLICATE],
            late_values=num[_LATE],
            conflicts=num[_CONFLICT],
            replaced=num[_REPLACED],
            committed_episodes=num_episodes - len(sizes) + int(is_new.sum()),
            present_episodes=int((~is_new & ~is_aside).sum()),
            conflicting_episodes=int(is_aside.sum()),
        )
        conflicts = [
            Conflict(
                at[
                    (inside := np.arange(self._start[number], self._start[number + 1]))[
                        outcome[inside] == _CONFLICT
                    ]
                ].tolist(),
                reasons,
            )
            for number, reasons in sorted(self._reasons.items())
        ]
        is_whole = rows is self._pending
        return Resolution(rows, counts, is_whole, self._changes(), conflicts)

    def _change_new(self, rows: pa.Table, new: Numbers, place: Numbers) -> pa.Table:
        """Give new rows what rows after them had of them, and those that continue their place."""
        t = self._num_stored + new
        for name, source in self._sources():
            other = source[t] != t
            if other.any():
                rows = with_values(rows, name, place[other], self._take(name, source[t[other]]))
        steps = [(STEP, self._step), (ENV_STEP, self._env_step)]
        for name, values in steps:
            own = as_integers(combine_chunks(self._all[name]))
            other = values[t] != own[t]
            if other.any():
                kind = rows.schema.field(name).type
                array = pa.array(values[t[other]].tolist(), kind)
                rows = with_values(rows, name, place[other], array)
        moved = [
            (p, names)
            for one, p in zip(t.tolist(), place.tolist(), strict=True)
            if (names := self._moved.get(one)) is not None
        ]
        if moved:
            at = np.array([p for p, _ in moved], np.int64)
            for number, name in enumerate((EPISODE_ID, AGENT_ID, SOURCE_EPISODE_ID)):
                kind = rows.schema.field(name).type
                values = pa.array([names[number] for _, names in moved], pa.string()).cast(kind)
                rows = with_values(rows, name, at, values)
        return rows

    def _sources(self) -> Iterator[tuple[str, Numbers]]:
        """Yield each column, and of which row each row has its value by now."""
        for name in (*self._fixed, FINAL_OBSERVATION):
            yield name, self._content
        for name in self._late:
            yield name, self._late_from[name]

    def _take(self, name: str, t: Numbers) -> pa.Array:
        return combine_chunks(self._all[name].take(row_numbers(t)))

    def _changes(self) -> dict[FileEntry, list[tuple[str, Numbers, pa.Array]]]:
        changes: dict[FileEntry, list[tuple[str, Numbers, pa.Array]]] = {}
        stored = np.arange(self._num_stored)
        for name, source in self._sources():
            at = np.flatnonzero(source[: self._num_stored] != stored)
            for file in np.unique(self._places[at, 0]).tolist():
                own = at[self._places[at, 0] == file]
                values = self._take(name, source[own])
                change = (name, self._places[own, 1], values)
                changes.setdefault(self._snapshot.files[file], []).append(change)
        return changes


def apply_changes(rows: pa.Table, changes: Sequence[tuple[str, Numbers, pa.Array]]) -> pa.Table:
    """Return the rows of a shard with the changes of a resolution."""
    for name, at, values in changes:
        rows = with_values(rows, name, at, values)
    return rows


def _null_as_negative(column: pa.ChunkedArray) -> Numbers:
    """Return a number for each value, the same for equal ones, and -1 for NULL."""
    codes = encode_rows([column]) if len(column) else np.empty(0, np.int64)
    if column.null_count:
        codes = codes.copy()
        codes[numbers(pc.is_null(column))] = -1
    return codes


def _key_text(rows: pa.Table, at: int, unique: UniqueKeys) -> str:
    values = [f"{name} {_short(rows[name][at].as_py())}" for name in unique.columns]
    return ", ".join(values)


def _short(value: Any) -> str:
    text = "NULL" if value is None else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def quarantine_conflicts(
    table: Table,
    rows: pa.Table,
    conflicts: Sequence[Conflict],
    *,
    producer: str,
    locate: Locate | None,
) -> int:
    """Put the rows of conflicts into a dataset's quarantine, each once; return how many are new.

    A row is known by its producer, episode, agent and step, so that a writer which was killed
    before its commit, and starts again, adds nothing. Raises: StorageError.
    """
    if not conflicts:
        return 0
    if not table.exists():
        with suppress(AlreadyExistsError):  # another writer was first
            table.create(REJECTED_SCHEMA)
    name = f"{producer}/{CHECK}"
    while True:
        sequence = table.next_sequence(name)
        known = _read_known(table, producer)
        fresh = _rejected_rows(rows, conflicts, known, producer, locate)
        if not fresh.num_rows:
            return 0
        done = table.append(fresh, producer=name, sequence=sequence, operation=_OPERATION)
        if not done.already_present:
            return int(fresh.num_rows)


def _read_known(table: Table, producer: str) -> set[tuple[str, str, int]]:
    known: set[tuple[str, str, int]] = set()
    names = [EPISODE_ID, AGENT_ID, "row_number", "producer", "checks"]
    for rows in table.snapshot().batches(names):
        own = rows.filter(pc.equal(rows["producer"], producer))
        columns = [own[name].to_pylist() for name in (*names[:3], "checks")]
        known |= {
            (episode, agent, number)
            for episode, agent, number, checks in zip(*columns, strict=True)
            if CHECK in checks
        }
    return known


def _rejected_rows(
    rows: pa.Table,
    conflicts: Sequence[Conflict],
    known: set[tuple[str, str, int]],
    producer: str,
    locate: Locate | None,
) -> pa.Table:
    numbers_of = [row for conflict in conflicts for row in conflict.rows]
    reasons = [conflict.reasons for conflict in conflicts for _ in conflict.rows]
    taken = rows.take(row_numbers(np.array(numbers_of, np.int64)))
    places = [(None, None)] * len(numbers_of) if locate is None else locate(numbers_of)
    ids = [taken[name].to_pylist() for name in (EPISODE_ID, AGENT_ID, SOURCE_EPISODE_ID, STEP)]
    own = [name for name in taken.column_names if name not in (EPISODE_ID, SOURCE_EPISODE_ID)]
    cells = [temporal_as_text(taken[name]).to_pylist() for name in own]
    mapping = json.dumps({name: name for name in own if name in STANDARD_COLUMNS})
    now = datetime.now(UTC)
    columns: dict[str, list[Any]] = {name: [] for name in REJECTED_SCHEMA.names}
    for episode, agent, source, step, why, (file, file_row), *values in zip(
        *ids, reasons, places, *cells, strict=True
    ):
        if (episode, agent, step) in known:
            continue
        row = json.dumps(
            to_json_value(dict(zip(own, values, strict=True))), ensure_ascii=False, default=str
        )
        entry = (
            episode, agent, source or episode, step, file, file_row, [CHECK], list(why), row,
            mapping, producer, now,
        )  # fmt: skip
        for name, value in zip(REJECTED_SCHEMA.names, entry, strict=True):
            columns[name].append(value)
    arrays = [pa.array(columns[field.name], field.type) for field in REJECTED_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=REJECTED_SCHEMA)
