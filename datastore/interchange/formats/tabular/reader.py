"""Tabular readings: tables of one row a step, block by block, into episodes.

Small sources are one block. In larger ones the rows of episodes that go on in later blocks are
carried along, so memory holds one block and the open episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import TextColumn
from replaylake.datastore.episodes.score_reference import ScoreReference
from replaylake.datastore.episodes.spaces import Array, Space
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.checks import Check
from replaylake.datastore.interchange.formats.format import (
    LoggedColumns,
    ReadOptions,
    RejectedEpisode,
)
from replaylake.datastore.interchange.formats.tabular.arrays import (
    decode_names,
    find_unfilled,
    flags,
    is_text,
    to_storable,
    whole_numbers,
)
from replaylake.datastore.interchange.formats.tabular.census import Census
from replaylake.datastore.interchange.formats.tabular.decoding import decode_steps
from replaylake.datastore.interchange.formats.tabular.fields import (
    EPISODE,
    ColumnLayout,
    lay_out,
    without_fields,
)
from replaylake.datastore.interchange.formats.tabular.grouping import (
    Groups,
    group,
    select_logged_columns,
)
from replaylake.datastore.interchange.formats.tabular.row_plan import find_known_columns, plan_rows
from replaylake.datastore.interchange.formats.tabular.steps import RowFault
from replaylake.datastore.interchange.formats.tabular.struct_fields import (
    StructFieldTables,
    find_struct_fields,
)
from replaylake.datastore.interchange.formats.tabular.tables import (
    ORIGIN,
    CachedTables,
    TableSource,
    survey,
    uniform_chunks,
)
from replaylake.datastore.storage.arrow_values import hash_texts

_BLOCK_BYTES: Final = 16 << 20
# What the row of one decision says of itself by being one: it ends there.
_ENDS: Final = ("terminated", "truncated")


@dataclass(frozen=True)
class Declaration:
    """What a format knows of its files beside the rows.

    fields: ours=theirs, which aliases do not decide and `--map` overrides. spaces: as the files
    state them. one_step_episodes: each row is an episode of one decision, which ends there.
    has_events: each episode is one event, whose slots are its steps. notes: what a person should
    know of the files. rewards_optional: a missing reward column, or a null in it, is an unknown
    reward; elsewhere that is an error unless the options say so. encoding: how the observations
    that are there were made of named fields, where the files say it. observed: the column whose
    next and final values the format knows; of another one they say nothing. score_reference: what
    returns are normalized by. env_spec: see DatasetSpec. tokenizer: of the token columns.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    spaces: tuple[Space, Space] | None = None
    one_step: bool = False
    has_events: bool = False
    notes: Sequence[str] = ()
    rewards_optional: bool = False
    encoding: Encoding | None = None
    observed: str = ""
    score_reference: ScoreReference | None = None
    env_spec: str | None = None
    tokenizer: Tokenizer | None = None


class TabularReader:
    """A columnar source as episodes. Raises: SourceInvalidError on opening and on iteration."""

    def __init__(
        self,
        tables: TableSource,
        options: ReadOptions,
        where: str = "source",
        declared: Declaration | None = None,
        *,
        block_bytes: int = _BLOCK_BYTES,
    ) -> None:
        self._tables = (
            tables
            if isinstance(tables, CachedTables)
            else CachedTables(tables, on_rows=options.on_rows)
        )
        if options.head_rows is not None:
            self._tables = self._tables.head(options.head_rows)
        self._options = options
        self._declared = declared or Declaration()
        self._block_bytes = block_bytes
        self._facts = survey(self._tables)
        self._add_struct_fields()
        if self._facts.num_rows == 0:
            # The notes say what was left out, and so why nothing remains.
            message = f"{where}: found no rows, expected at least one step."
            raise SourceInvalidError(" ".join([message, *(f"{n}." for n in self._declared.notes)]))
        names = self._facts.schema.names
        known = find_known_columns(options, names)
        self._refuse_idle_mapping(where)
        mapping = {**self._declared_fields(), **known, **options.mapping}
        self.rewards_optional = self._declared.rewards_optional or options.reward_unknown
        layout = lay_out(
            names,
            mapping,
            where,
            rewards_optional=self.rewards_optional,
            episode_by=options.episode_by,
            order_by=options.order_by,
        )
        self._refuse_partial(layout)
        self._refuse_idle(layout)
        self._own_notes: list[str] = []
        self._repeated: frozenset[str] = frozenset()
        layout = self._with_own_observations(layout)
        if self._one_step:
            layout = self._with_one_step(layout)
        self._ready = plan_rows(
            self._tables,
            self._facts,
            self._without_lone_agent(layout),
            options,
            where,
            encodes_lone=self._one_step,
            is_stated=self._declared.spaces is not None,
        )
        layout = self._ready.layout
        self._facts = self._ready.preparation.survey()
        kinds = {
            n: to_storable(pa.array([], self._facts.schema.field(n).type), n) for n in layout.extras
        }
        self._dropped = [name for name, kind in kinds.items() if kind is None]
        for name in (n for n, kind in kinds.items() if kind is not None):
            self._dropped += find_unfilled(self._facts.schema.field(name).type, name)
        extras = {n: ours for n, ours in layout.extras.items() if kinds[n] is not None}
        self._layout = replace(layout, extras=extras)
        self._extras = {extras[n]: kind.type for n, kind in kinds.items() if kind is not None}
        if not (self._by_id or self._one_step or self._has_flags):
            raise SourceInvalidError(
                f"{where}: found no column that separates episodes, expected an episode id, or "
                "terminated flags in rows that are in order. Name it with `mapping` "
                "episode_id=COLUMN."
            )
        self._head_widths: set[int] = set()
        self._census = Census()
        self._ahead: LookAhead | None = None

    @property
    def renames(self) -> Mapping[str, str]:
        return {n: ours for n, ours in self._layout.renames.items() if n in self._layout.extras}

    @property
    def extras(self) -> Mapping[str, pa.DataType]:
        return self._extras

    @property
    def num_rows(self) -> int:
        return self._facts.num_rows

    @property
    def num_actions(self) -> int | None:
        if self.encoding is not None and self.encoding.action_names is not None:
            return len(self.encoding.action_names)
        return next(iter(self._head_widths)) if len(self._head_widths) == 1 else None

    @property
    def encoding(self) -> Encoding | None:
        return self._declared.encoding or self._ready.encoder.encoding

    @property
    def score_reference(self) -> ScoreReference | None:
        return self._declared.score_reference

    @property
    def env_spec(self) -> str | None:
        return self._declared.env_spec

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._declared.tokenizer

    @property
    def spaces(self) -> tuple[Space, Space] | None:
        return self._declared.spaces

    @property
    def has_events(self) -> bool:
        return self._declared.has_events

    @property
    def notes(self) -> Sequence[str]:
        notes = [*self._declared.notes, *self._own_notes, *self._ready.notes()]
        if self._dropped:
            notes.append(f"columns that hold nothing, left out: {', '.join(self._dropped)}")
        if self._options.reward_scale is not None:
            notes.append(f"rewards are {self._options.reward_scale:g} times those logged")
        layout, limit = self._layout, self._options.time_limit
        if layout.done and layout.one("truncated") is None and limit is not None:
            notes.append(
                f"{layout.done} used as terminated, but for episodes that reached the time limit "
                f"of {limit} steps: the log has no truncated flags"
            )
        elif layout.done and layout.one("truncated") is None:
            notes.append(
                f"{layout.done} used as terminated: the log has no truncated flags, so a time "
                "limit in it counts as a termination unless `time_limit` names it"
            )
        elif layout.done:
            notes.append(f"terminated is {layout.done} and not {layout.one('truncated')}")
        if self._census.num_longer:
            notes.append(
                f"{self._census.num_longer} episodes are longer than the time limit {limit}"
            )
        return notes

    @property
    def mapping(self) -> Mapping[str, str]:
        return self._layout.mapping()

    @property
    def known_columns(self) -> Mapping[str, str]:
        renamed = {ours: theirs for theirs, ours in self.renames.items()}
        # A name with a comma cannot be one of several.
        fields = {
            ours: ",".join(theirs)
            for ours, theirs in self._layout.fields.items()
            if EPISODE not in theirs and (len(theirs) == 1 or "," not in "".join(theirs))
        }
        return {**renamed, **fields}

    def read_rows(self, origins: Array) -> pa.Table:
        wanted = np.unique(origins)
        parts: list[pa.Table] = []
        start = 0
        for table in self._ready.preparation.chunks(self._tables):
            first, end = np.searchsorted(wanted, [start, start + table.num_rows])
            if not parts or end > first:
                rows = select_logged_columns(table).take(pa.array(wanted[first:end] - start))
                parts.append(rows)
            start += table.num_rows
            if end == len(wanted):
                break
        return pa.concat_tables(parts).take(pa.array(np.searchsorted(wanted, origins)))

    @property
    def checks(self) -> Sequence[Check]:
        return self._census.checks(self._options.time_limit, has_events=self.has_events)

    def __iter__(self) -> Iterator[Episode | RejectedEpisode]:
        for item in self.iter_columns():
            if isinstance(item, RejectedEpisode):
                yield item
            else:
                yield from item

    def iter_columns(self) -> Iterator[LoggedColumns | RejectedEpisode]:
        self._ahead = self._ahead or self._look_ahead()
        self._census = Census(counts_from_1=self._ahead.least_step == 1)
        self._head_widths = set()
        if self._one_step:
            yield from self._by_rows()
        else:
            yield from self._by_ids() if self._by_id else self._by_flags()

    @property
    def _by_id(self) -> bool:
        return self._layout.one("episode_id") is not None

    @property
    def _one_step(self) -> bool:
        return self._declared.one_step

    @property
    def _has_flags(self) -> bool:
        ends = (self._layout.one("terminated"), self._layout.one("truncated"), self._layout.done)
        return any(name is not None for name in ends)

    def _by_rows(self) -> Iterator[LoggedColumns | RejectedEpisode]:
        num_before = 0
        for table in self._blocks(whole=self._tables.fill()):
            num = table.num_rows
            ids = pa.array(np.arange(num_before, num_before + num)).cast(pa.string())
            num_before += num
            if (name := self._layout.one("episode_id")) is not None:
                ids = decode_names(_combine_column(table, name), name).fill_null("null")
            agents = None
            if (agent := self._layout.one("agent_id")) is not None:
                names = decode_names(_combine_column(table, agent), agent)
                agents = TextColumn(names.fill_null("null"))
            groups = Groups(np.arange(num), TextColumn(ids), agents)
            yield from self._episodes(table, groups, self._find_reused(table, ids))

    def _by_ids(self) -> Iterator[LoggedColumns | RejectedEpisode]:
        name = str(self._layout.one("episode_id"))
        carried: pa.Table | None = None
        for block in self._blocks(whole=self._tables.fill()):
            table = block if carried is None else pa.concat_tables([carried, block])
            last = block.column(ORIGIN)[-1].as_py()
            if self._ahead is not None and self._ahead.last_rows is not None:
                is_whole = self._is_whole(table, name, last, self._ahead.last_rows)
                carried = table.filter(pa.array(~is_whole))
                table = table.filter(pa.array(is_whole))
            if table.num_rows:
                yield from self._episodes(table, self._groups(table, name))

    def _by_flags(self) -> Iterator[LoggedColumns | RejectedEpisode]:
        if self._layout.one("agent_id") is not None:
            raise SourceInvalidError(
                f"column {self._layout.one('agent_id')!r}: found several agents and no episode id, "
                "expected one. Name it with `mapping` episode_id=COLUMN."
            )
        carried: pa.Table | None = None
        num_before = 0
        blocks = self._blocks(whole=self._tables.fill())
        block = next(blocks, None)
        while block is not None:
            following = next(blocks, None)
            table = block if carried is None else pa.concat_tables([carried, block])
            ended = self._find_ends(table)
            # What comes after the last end goes on in the next block, if there is one.
            ends = np.flatnonzero(ended)
            num_whole = table.num_rows
            if following is not None:
                num_whole = int(ends[-1]) + 1 if len(ends) else 0
            carried, table = table.slice(num_whole), table.slice(0, num_whole)
            if num_whole:
                codes = np.cumsum(np.append(0, ended[: num_whole - 1]))
                ids = [str(num_before + i) for i in range(int(codes[-1]) + 1)]
                num_before += len(ids)
                yield from self._episodes(table, Groups(codes, ids))
            block = following

    @cached_property
    def _repeated_id_array(self) -> pa.Array:
        return pa.array(self._repeated, pa.string())

    def _find_reused(self, table: pa.Table, ids: pa.Array) -> list[RowFault]:
        """Mark the rows of one decision whose key other rows have too."""
        if not self._repeated:
            return []
        rows = np.asarray(pc.is_in(ids, self._repeated_id_array))
        if not rows.any():
            return []
        name = str(self._layout.one("episode_id"))
        origins = np.asarray(table.column(ORIGIN))[rows].tolist()
        again = ids.filter(pa.array(rows)).to_pylist()
        places = {
            origin: f"{self._facts.place(origin)}, column {name!r}: found {one!r} in several rows, "
            "expected an id of each decision's own"
            for origin, one in zip(origins, again, strict=True)
        }
        return [RowFault("id_reused", name, rows, places)]

    def _episodes(
        self, table: pa.Table, groups: Groups, faults: Sequence[RowFault] = ()
    ) -> Iterator[LoggedColumns | RejectedEpisode]:
        if self._layout.order_by:
            table, groups = sort_rows(table, groups, self._layout.order_by)
        steps = decode_steps(
            table,
            self._layout,
            self._facts,
            self._ready.encoder,
            self._ready.units,
            self._options.reward_scale,
        )
        if self._one_step:
            steps.terminated = np.ones(len(steps), dtype=np.bool_)
        steps.faults += faults
        self._head_widths |= steps.head_widths
        mapping = self._layout.mapping()
        yield from group(steps, groups, table, mapping, self._facts, self._options, self._census)

    def _find_ends(self, table: pa.Table) -> Array:
        names = [self._layout.one("terminated"), self._layout.one("truncated"), self._layout.done]
        ended = np.zeros(table.num_rows, bool)
        for name in names:
            if name is not None:
                # What is no flag ends nothing here; decoding marks its row.
                ended |= flags(_combine_column(table, name)).values
        return ended

    def _groups(self, table: pa.Table, name: str) -> Groups:
        ids = decode_names(_combine_column(table, name), name).fill_null("null").dictionary_encode()
        codes = np.asarray(ids.indices).astype(np.int64)
        labels = ids.dictionary.to_pylist()
        if (agent := self._layout.one("agent_id")) is None:
            return Groups(codes, labels)
        agents = (
            decode_names(_combine_column(table, agent), agent).fill_null("null").dictionary_encode()
        )
        pairs = codes * len(agents.dictionary) + np.asarray(agents.indices)
        distinct, codes = np.unique(pairs, return_inverse=True)
        episode, one = np.divmod(distinct, len(agents.dictionary))
        who = agents.dictionary.to_pylist()
        return Groups(codes, [labels[i] for i in episode], [who[i] for i in one])

    def _blocks(self, *, whole: bool) -> Iterator[pa.Table]:
        buffer: list[pa.Table] = []
        num_bytes = 0
        for table in self._ready.preparation.chunks(self._tables):
            buffer.append(table)
            num_bytes += table.nbytes
            if num_bytes >= self._block_bytes and not whole:
                yield pa.concat_tables(buffer)
                buffer, num_bytes = [], 0
        if any(table.num_rows for table in buffer):
            yield pa.concat_tables(buffer)

    def _look_ahead(self) -> LookAhead:
        by_id = None if self._one_step or self._tables.fill() else self._layout.one("episode_id")
        step = self._layout.one("step")
        columns = [name for name in (by_id, step) if name is not None]
        if not columns:
            return LookAhead()
        return look_ahead(self._ready.preparation.chunks(self._tables, columns), by_id, step)

    def _is_whole(self, table: pa.Table, name: str, last: int, last_rows: LastRows) -> Array:
        ids = decode_names(_combine_column(table, name), name).fill_null("null").dictionary_encode()
        known = last_rows.find(ids.dictionary) <= last
        return np.asarray(known[np.asarray(ids.indices)])

    def _add_struct_fields(self) -> None:
        """Make columns of the fields of structs that the options name."""
        options = self._options
        spelled = {*options.mapping.values(), *options.episode_by, *options.order_by}
        spelled |= {part.strip() for text in options.mapping.values() for part in text.split(",")}
        paths = find_struct_fields(sorted(spelled), self._facts.schema)
        if paths:
            flags = {options.mapping[ours] for ours in _ENDS if ours in options.mapping}
            self._tables = CachedTables(StructFieldTables(self._tables, paths, flags))
            self._facts = survey(self._tables)

    def _declared_fields(self) -> Mapping[str, str]:
        """Return what the format knows, without what `--map` says in another way."""
        mapping, fields = self._options.mapping, dict(self._declared.fields)
        for ours, other in (
            ("behavior_prob", "behavior_log_prob"),
            ("behavior_log_prob", "behavior_prob"),
        ):
            if ours in mapping:
                fields.pop(other, None)
        return fields

    def _with_own_observations(self, layout: ColumnLayout) -> ColumnLayout:
        """Return the layout without next and final values of what is not the observation."""
        mapping, observed = self._options.mapping, self._declared.observed
        if not observed or mapping.get("observation", observed) == observed:
            return layout
        fields = [
            ours
            for ours in ("next_observation", "final_observation")
            if ours in layout.fields and ours not in mapping
        ]
        rest = without_fields(layout, fields)
        for ours in fields:
            name = layout.fields[ours][0]
            self._own_notes.append(
                f"{name} is of {observed} and not of {mapping['observation']}: kept as "
                f"{rest.extras[name]}"
            )
        return rest

    def _with_one_step(self, layout: ColumnLayout) -> ColumnLayout:
        """Return the layout of rows that end by themselves, keyed where a column tells them apart.

        Columns that say otherwise are further columns. A key that `--map` does not name has to be
        one: ids that stand in several rows name something else, such as a session.
        """
        layout = without_fields(layout, _ENDS)
        if (name := layout.one("episode_id")) is None:
            return layout
        self._repeated = find_repeated_ids(
            lambda: uniform_chunks(self._tables, self._facts, [name]), name
        )
        if not self._repeated or "episode_id" in self._options.mapping:
            return layout
        layout = without_fields(layout, ["episode_id"])
        self._own_notes.append(
            f"column {name!r} has one id in several rows, as {min(self._repeated)!r}, so it tells "
            f"no decisions apart: kept as {layout.extras[name]}"
        )
        return layout

    def _refuse_idle_mapping(self, where: str) -> None:
        """Refuse what `--map` says and nothing would follow."""
        mapping, options = self._options.mapping, self._options
        if self._one_step and (idle := [ours for ours in _ENDS if ours in mapping]):
            raise ConfigInvalidError(
                f"mapping {idle[0]}={mapping[idle[0]]}: cannot be mapped with format bandit "
                f"({where}), whose rows are terminated decisions. Keep the column under another "
                "name: `mapping` "
                f"logged_{idle[0]}={mapping[idle[0]]}.",
                parameter="mapping",
            )
        if options.episode_by and "episode_id" in mapping:
            raise ConfigInvalidError(
                f"mapping episode_id={mapping['episode_id']}: cannot be combined with "
                f"`episode_by` {','.join(options.episode_by)}. Omit one.",
                parameter="mapping",
            )
        if {"behavior_prob", "behavior_log_prob"} <= mapping.keys():
            raise ConfigInvalidError(
                f"mapping behavior_prob={mapping['behavior_prob']}: has the same meaning "
                f"as behavior_log_prob={mapping['behavior_log_prob']}. Omit one.",
                parameter="mapping",
            )

    def _refuse_partial(self, layout: ColumnLayout) -> None:
        for name in layout.columns():
            if (file := self._facts.incomplete.get(name)) is not None:
                raise SourceInvalidError(
                    f"{file.name}: found no column {name!r}, expected it as in the other files. "
                    "Ingest files of different columns one kind at a time."
                )

    def _refuse_idle(self, layout: ColumnLayout) -> None:
        """Refuse what would change nothing, and would be taken for having done so."""
        if self._one_step and (self._options.episode_by or layout.order_by):
            raise ConfigInvalidError(
                "episode_by, order_by: each row of this format is one episode. Omit them.",
                parameter="episode_by",
            )
        if layout.order_by and layout.one("episode_id") is None:
            raise ConfigInvalidError(
                f"order_by {','.join(layout.order_by)}: found no episode id, expected one, because "
                "rows are sorted within their episode. Name it with `episode_by`.",
                parameter="order_by",
            )

    def _without_lone_agent(self, layout: ColumnLayout) -> ColumnLayout:
        """RLlib numbers the one agent of a single-agent log too; it stays as a further column."""
        name = layout.one("agent_id")
        if name != "agent_index" or "agent_id" in self._options.mapping:
            return layout
        agents: set[Any] = set()
        for table in uniform_chunks(self._tables, self._facts, [name]):
            agents |= set(pc.unique(table.column(name)).to_pylist())
            if len(agents) > 1:
                return layout
        fields = {ours: theirs for ours, theirs in layout.fields.items() if ours != "agent_id"}
        return replace(layout, fields=fields, extras={**layout.extras, name: name})


def _combine_column(table: pa.Table, name: str) -> pa.Array:
    return table.column(name).combine_chunks()


@dataclass(frozen=True)
class LookAhead:
    """The least step of a source, and each episode's last row, as its number in the source.

    Either is None where it was not looked for.
    """

    least_step: int | None = None
    last_rows: LastRows | None = None


class LastRows:
    """The last row of each episode, by a hash of its id: 16 bytes each, however long the ids.

    Ids of one hash are taken to end where the later of them does, so that both are read whole.
    """

    def __init__(self, hashes: Sequence[Array], rows: Sequence[Array]) -> None:
        self._hashes, places = np.unique(_concatenate(hashes), return_inverse=True)
        self._rows = np.zeros(len(self._hashes), np.int64)
        np.maximum.at(self._rows, places, _concatenate(rows))

    def find(self, ids: pa.Array) -> Array:
        """Return the last row of each of some ids, which are all known, int64 [n]."""
        return np.asarray(self._rows[np.searchsorted(self._hashes, _hash_texts(ids))])


def look_ahead(tables: Iterable[pa.Table], episode_id: str | None, step: str | None) -> LookAhead:
    """Read the columns of ids and of steps, where they are named; memory: 16 bytes an id."""
    hashes: list[Array] = []
    last_rows: list[Array] = []
    minima: list[int] = []
    for table in tables:
        if step is not None:
            numbers = whole_numbers(table.column(step).combine_chunks())
            wrong = np.any([np.zeros(table.num_rows, bool), *numbers.faults.values()], axis=0)
            minima += [] if wrong.all() else [int(numbers.values[~wrong].min())]
        if episode_id is not None:
            column = table.column(episode_id).combine_chunks()
            ids = decode_names(column, episode_id).fill_null("null").dictionary_encode()
            last = np.zeros(len(ids.dictionary), np.int64)
            np.maximum.at(last, np.asarray(ids.indices), np.asarray(table.column(ORIGIN)))
            hashes.append(_hash_texts(ids.dictionary))
            last_rows.append(last)
    least = min(minima, default=None)
    return LookAhead(least, None if episode_id is None else LastRows(hashes, last_rows))


def find_repeated_ids(read: Callable[[], Iterable[pa.Table]], name: str) -> frozenset[str]:
    """Return the ids that stand in several rows; `read` begins to read the column anew.

    Cost: a pass, and where two ids may be one, another; memory: 8 bytes a row, and the ids found.
    """
    hashes = np.sort(_concatenate(_hash_texts(_texts(table, name)) for table in read()))
    several = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    if not len(several):
        return frozenset()
    found: Counter[str] = Counter()
    for table in read():
        texts = _texts(table, name)
        found.update(texts.filter(pa.array(np.isin(_hash_texts(texts), several))).to_pylist())
    return frozenset(text for text, num in found.items() if num > 1)


def _concatenate(parts: Iterable[Array]) -> Array:
    """Join arrays of int64, of which there may be none."""
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _texts(table: pa.Table, name: str) -> pa.Array:
    return decode_names(table.column(name).combine_chunks(), name).drop_null()


def _hash_texts(texts: pa.Array) -> Array:
    """Return a hash of each, int64 [n]."""
    return hash_texts(texts).view(np.int64)


def sort_rows(table: pa.Table, groups: Groups, columns: Sequence[str]) -> tuple[pa.Table, Groups]:
    """Sort rows by group, then by each column, first to last: times, numbers, text or flags.

    Rows that are alike in all of them stay in the source's order. Raises: SourceInvalidError for a
    column of another kind.
    """
    keys = {"group": pa.array(groups.codes)}
    for number, name in enumerate(columns):
        kind = table.schema.field(name).type
        if not _is_ordered(kind):
            raise SourceInvalidError(
                f"column {name!r}: found {kind}, expected times, numbers or text to sort rows "
                "by. Correct `order_by`."
            )
        keys[str(number)] = table.column(name)
    order = pc.sort_indices(pa.table(keys), sort_keys=[(key, "ascending") for key in keys])
    rows = np.asarray(order).astype(np.int64)
    if (np.diff(rows) == 1).all():
        return table, groups
    return table.take(order), replace(groups, codes=groups.codes[rows])


def _is_ordered(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_temporal(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_boolean(kind)
        or types.is_null(kind)
        or is_text(kind)
    )
