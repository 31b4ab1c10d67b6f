"""Minari's Arrow and Parquet storages: a folder an episode, of T + 1 rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.spaces import Space, Values
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.generic.arrow import ArrowTables
from replaylake.datastore.interchange.formats.generic.arrow_messages import refuse_packed_bomb
from replaylake.datastore.interchange.formats.generic.parquet import ParquetTables
from replaylake.datastore.interchange.formats.minari.storage import (
    FLAGS,
    Spaces,
    episode_rows,
    images,
    members,
    reshape_rows,
)
from replaylake.datastore.interchange.formats.tabular.arrays import decode, is_text
from replaylake.datastore.interchange.formats.tabular.episode_rows import EpisodeRows, iter_chunks
from replaylake.datastore.interchange.formats.tabular.infos import with_times
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error


@dataclass(frozen=True)
class ArrowEpisode:
    """An episode's folder: its number, its parts in order, and what its metadata.json says."""

    number: int
    parts: tuple[SourceFile, ...]
    labels: Mapping[str, Any]


class EpisodeFolders(TableSource):
    """Chunks of Minari's Arrow or Parquet storage: an episode a folder, T + 1 rows each."""

    def __init__(self, episodes: Sequence[ArrowEpisode], spaces: Spaces) -> None:
        self._episodes = episodes
        self._spaces = spaces
        self.notes: dict[str, None] = {}

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for episode in self._episodes:
            file = episode.parts[0]
            try:
                rows = self._episode(episode, file)
            except pa.ArrowException as error:
                raise unreadable_error(file.name, error) from error
            if rows is not None:
                yield from map(with_times, iter_chunks(file, [rows]))

    def _episode(self, episode: ArrowEpisode, file: SourceFile) -> EpisodeRows | None:
        table = pa.concat_tables([_read(part) for part in episode.parts])
        required = ("observations", "actions", "rewards", *FLAGS)
        for name in required:
            if name not in table.schema.names:
                raise SourceInvalidError(
                    f"{file.name}: found the columns {table.schema.names}, expected {name!r} among "
                    "them. The file may have another format."
                )
        if not table.num_rows:
            return None
        # The last row holds the last observation, beside padding.
        has_final = episode.labels.get("total_steps") != table.num_rows
        num = table.num_rows - has_final
        spaces = self._spaces or (None, None)
        columns: dict[str, Values] = {}
        for name, space in zip(required, (*spaces, None, None, None), strict=True):
            column = table.column(name).combine_chunks()
            rows = column if name == "observations" else column.slice(0, num)
            columns[name] = _arrow_values(rows, space, f"{file.name}: {name}")
        infos: dict[str, Values] = {}
        for name in (n for n in table.schema.names if n not in required):
            self._infos(name, table.column(name).combine_chunks(), infos)
        seed = episode.labels.get("seed")
        return episode_rows(file, episode.number, columns, infos, seed, self.notes)

    def _infos(self, name: str, column: pa.Array, columns: dict[str, Values]) -> None:
        if pa.types.is_struct(column.type):
            for i, field in enumerate(column.type):
                sub = pc.struct_field(column, [i])
                if shape := (field.metadata or {}).get(b"shape"):
                    sizes = [int(n) for n in shape.split(b",")]
                    columns[f"{name}/{field.name}"] = decode(sub).values.reshape(-1, *sizes)
                elif shape is not None:
                    columns[f"{name}/{field.name}"] = decode(sub).values[:, 0]
                else:
                    self._infos(f"{name}/{field.name}", sub, columns)
        elif column.null_count or not _is_plain(column.type):
            self.notes[
                f"{name} is left out: {column.type}, {column.null_count} without a value"
            ] = None
        else:
            columns[name] = decode(column).values


def _read(file: SourceFile) -> pa.Table:
    if file.relative.endswith(".parquet"):
        chunks = ParquetTables([file]).chunks()
    else:
        refuse_packed_bomb(file)
        chunks = ArrowTables([file]).chunks()
    return pa.concat_tables([chunk.table for chunk in chunks])


def _arrow_values(column: pa.Array, space: Space | None, where: str) -> Values:
    kind = column.type
    if pa.types.is_struct(kind):
        parts = members([field.name for field in kind], space, where)
        return {
            key: _arrow_values(pc.struct_field(column, name), sub, f"{where}.{key}")
            for key, (name, sub) in parts.items()
        }
    if column.null_count:
        raise SourceInvalidError(
            f"{where}: found {column.null_count} rows without a value, expected one in each. "
            "The file may be damaged: write it again."
        )
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return images(column.to_pylist(), space, where)
    if not _is_plain(kind):
        raise SourceInvalidError(
            f"{where}: found {kind}, expected numbers, text or images. The file may have another "
            "format."
        )
    return reshape_rows(decode(column).values, space)


def _is_plain(kind: pa.DataType) -> bool:
    if pa.types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_number or pa.types.is_boolean(kind) or is_text(kind))
