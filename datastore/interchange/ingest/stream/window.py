"""Window: lines of a stream that are looked at together, decoded as the rows of a file are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from replaylake.datastore.episodes.encoding import NO_ENCODING
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.checks import Finding
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.ingest.stream.grammar import GROUP, Grammar, StreamRow
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_bytes import SourceBytes


class Window:
    """Rows in one table; those whose values fit no column are in `faults`, by their index."""

    def __init__(self, rows: Sequence[StreamRow], grammar: Grammar) -> None:
        self.rows = rows
        self.faults: dict[int, Finding] = {}
        self._grammar = grammar
        columns = {}
        for name, known in grammar.types.items():
            column = None if name == grammar.group_column else self._column(name)
            if column is None or (column.null_count == len(rows) and name not in grammar.fields):
                continue
            columns[name] = column
            if pa.types.is_null(known):
                grammar.types[name] = column.type
        self._table = pa.table(columns)

    def key(self, i: int) -> tuple[str, str]:
        """Return a row's episode and agent."""
        return self.rows[i].episode, self.rows[i].agent

    def decode(self, groups: Sequence[Sequence[int]]) -> list[Episode | Finding]:
        """Return for each group of rows the episode that they are, or why they are none."""
        if not groups:
            return []
        try:
            return self._decode(groups)
        except SourceInvalidError as error:
            # Said of a column as a whole: it is some rows that made it so.
            if len(groups) == 1:
                return [Finding("dtype", str(error))]
        middle = len(groups) // 2
        return [*self.decode(groups[:middle]), *self.decode(groups[middle:])]

    def _decode(self, groups: Sequence[Sequence[int]]) -> list[Episode | Finding]:
        grammar = self._grammar
        indices = [i for group in groups for i in group]
        numbers = [str(n) for n, group in enumerate(groups) for _ in group]
        table = self._table.take(pa.array(indices, pa.int64()))
        table = table.append_column(GROUP, pa.array(numbers, pa.string()))
        reading = TabularReader(
            _Rows(table, grammar.name), grammar.read_options, grammar.name, grammar.declared
        )
        results: list[Episode | Finding] = [
            Finding("missing", f"{grammar.name}: no step was found in these lines") for _ in groups
        ]
        for one in reading:
            if isinstance(one, Episode):
                results[int(one.episode_id)] = one
            else:
                results[int(one.source_episode_id.partition(" ")[0])] = one.findings[0]
        if grammar.options.encoding is None:
            # What texts stand for is settled by the first rows, for good.
            grammar.options = replace(grammar.options, encoding=reading.encoding or NO_ENCODING)
        grammar.num_actions = reading.num_actions or grammar.num_actions
        return results

    def _column(self, name: str) -> pa.Array:
        values = [row.values.get(name) for row in self.rows]
        known = self._grammar.types[name]
        if self._grammar.are_actions_whole and name in self._known_actions:
            values = [self._reject_fraction(name, i, value) for i, value in enumerate(values)]
        kind = self._grammar.kind
        try:
            column = pa.array(values, None if kind is None else kind.types.get(name))
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            column = pa.array(self._reject_other_kinds(name, values, known))
        return column.cast(known) if pa.types.is_null(column.type) else column

    @property
    def _known_actions(self) -> Sequence[str]:
        layout = self._grammar.layout
        return () if layout is None else layout.fields["action"]

    def _reject_fraction(self, name: str, i: int, value: Any) -> Any:
        """Keep one fraction from making fractions of all the other rows' actions."""
        if not isinstance(value, float):
            return value
        if value.is_integer():
            return int(value)
        self.faults[i] = self._grammar.make_finding("not_whole", self.rows[i], name, value)
        return None

    def _reject_other_kinds(self, name: str, values: list[Any], known: pa.DataType) -> list[Any]:
        """Blame the rows whose values are of another kind than most, and return the others'."""
        kinds = [_kind(value) for value in values]
        counted = Counter(kind for kind in kinds if kind not in ("null", None))
        expected = _plain(known) if not pa.types.is_null(known) else None
        if expected is None or expected not in counted:
            expected = counted.most_common(1)[0][0] if counted else "null"
        rest = []
        for i, (value, kind) in enumerate(zip(values, kinds, strict=True)):
            if kind not in (expected, "null"):
                self.faults[i] = self._grammar.make_finding("dtype", self.rows[i], name, value)
            rest.append(value if kind == expected else None)
        return rest


class _Rows(TableSource):
    """One table of rows as the tables of a format."""

    def __init__(self, table: pa.Table, name: str) -> None:
        self._chunk = Chunk(SourceFile(SourceBytes(Path(name), 0, 0), name, name, 0, ""), 0, table)

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        yield self._chunk


def _kind(value: Any) -> str | None:
    try:
        return _plain(pa.array([value]).type)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None


def _plain(kind: pa.DataType) -> str:
    return str(kind).replace("int64", "double")
