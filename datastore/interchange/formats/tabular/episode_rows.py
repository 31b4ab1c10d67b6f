"""Episode rows: whole episodes' arrays, as some formats keep them, laid out one row a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.spaces import Array, Values, concatenate, num_bytes, take
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.tabular.tables import Chunk
from replaylake.datastore.interchange.sources.source import SourceFile

EPISODE_ID: Final = "episode_id"
CHUNK_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class EpisodeRows:
    """One episode of `num_steps` steps.

    columns: by their column's name, values [T, ...]; None where this episode lacks them. finals:
    one value [1, ...] each, which stands on the last row alone. damage: why no row can be trusted.
    """

    episode_id: str
    num_steps: int
    columns: Mapping[str, Values | None]
    finals: Mapping[str, Values | None] = field(default_factory=dict)
    damage: str | None = None


def iter_chunks(file: SourceFile, episodes: Iterable[EpisodeRows]) -> Iterator[Chunk]:
    """Join episodes of one file to chunks of about 16 MiB whose columns have one type each."""
    buffer: list[EpisodeRows] = []
    kinds: dict[str, Any] = {}
    first_row = held_bytes = 0
    for episode in episodes:
        own_kinds = _kinds(episode)
        if buffer and (
            held_bytes >= CHUNK_BYTES
            or any(kinds.get(n, kind) != kind for n, kind in own_kinds.items())
        ):
            chunk = _chunk(file, first_row, buffer)
            yield chunk
            first_row += chunk.table.num_rows
            buffer, kinds, held_bytes = [], {}, 0
        buffer.append(episode)
        kinds |= own_kinds
        held_bytes += sum(num_bytes(v) for v in episode.columns.values() if v is not None)
    if buffer:
        yield _chunk(file, first_row, buffer)


def truncate_to_shortest(
    file: SourceFile, episode: str, columns: Mapping[str, Values]
) -> tuple[dict[str, Values], int, str | None]:
    """Return columns of one length, the length, and what is wrong if they had several.

    Rows of columns that differ in length cannot be trusted to belong together: they are cut to the
    shortest and their episode is rejected with what is said here. Raises: SourceInvalidError if
    nothing is left of an episode that has steps.
    """
    lengths: dict[str, int] = {}
    for name, values in columns.items():
        lengths |= leaf_lengths(values, name)
    num, damage = min(lengths.values()), describe_lengths(file, episode, lengths)
    if damage is None:
        return dict(columns), num, None
    if num == 0:
        raise SourceInvalidError(f"{damage}. Leave the episode out of the file.")
    return {name: take(values, slice(num)) for name, values in columns.items()}, num, damage


def describe_lengths(file: SourceFile, episode: str, lengths: Mapping[str, int]) -> str | None:
    """Return what is wrong with columns of these lengths; None if they have one length."""
    shortest, longest = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
    if lengths[shortest] == lengths[longest]:
        return None
    return (
        f"{file.name} episode {episode}: {shortest!r} has {lengths[shortest]} rows and {longest!r} "
        f"{lengths[longest]}, expected equal lengths"
    )


def leaf_lengths(values: Values, name: str = "") -> dict[str, int]:
    """Return how many rows each part of a struct has, by its dotted name."""
    if not isinstance(values, Mapping):
        return {name: len(values)}
    lengths: dict[str, int] = {}
    for key, sub in values.items():
        lengths |= leaf_lengths(sub, f"{name}.{key}")
    return lengths


def to_column(values: Values, name: str) -> pa.Array:
    """Return values [n, ...] as a column, without copying numbers.

    Values of several dims are fixed-size lists within one another, so that their shape stays known
    inside structs too. Raises: SourceInvalidError for values of no numbers.
    """
    if isinstance(values, Mapping):
        parts = [to_column(sub, f"{name}.{key}") for key, sub in values.items()]
        return pa.StructArray.from_arrays(parts, names=[*values])
    if 0 in values.shape[1:]:
        raise SourceInvalidError(
            f"{name}: found values of shape {list(values.shape[1:])}, expected at least one number "
            "per step. Leave it out of the file."
        )
    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _chunk(file: SourceFile, first_row: int, episodes: list[EpisodeRows]) -> Chunk:
    lengths = np.asarray([episode.num_steps for episode in episodes])
    columns = {EPISODE_ID: pa.array([e.episode_id for e in episodes]).take(_row_episodes(lengths))}
    for name in dict.fromkeys(name for episode in episodes for name in episode.columns):
        columns[name] = _column(name, [episode.columns.get(name) for episode in episodes], lengths)
    for name in dict.fromkeys(name for episode in episodes for name in episode.finals):
        columns[name] = _lasts(name, [episode.finals.get(name) for episode in episodes], lengths)
    damage: dict[int, str] = {}
    starts = np.cumsum(lengths) - lengths
    for episode, start in zip(episodes, starts.tolist(), strict=True):
        if episode.damage is not None:
            damage |= dict.fromkeys(range(start, start + episode.num_steps), episode.damage)
    return Chunk(file, first_row, pa.table(columns), damage)


def _row_episodes(lengths: Array) -> pa.Array:
    return pa.array(np.repeat(np.arange(len(lengths)), lengths))


def _column(name: str, parts: list[Values | None], lengths: Array) -> pa.Array:
    known = [part for part in parts if part is not None]
    if not known:
        return pa.nulls(int(lengths.sum()))
    joined = to_column(concatenate(known) if len(known) > 1 else known[0], name)
    if len(known) == len(parts):
        return joined
    has = np.repeat([part is not None for part in parts], lengths)
    return joined.take(pa.array(np.cumsum(has) - 1, mask=~has))


def _lasts(name: str, parts: list[Values | None], lengths: Array) -> pa.Array:
    known = [part for part in parts if part is not None]
    if not known:
        return pa.nulls(int(lengths.sum()))
    has = np.zeros(int(lengths.sum()), bool)
    has[(np.cumsum(lengths) - 1)[[part is not None for part in parts]]] = True
    return to_column(concatenate(known), name).take(pa.array(np.cumsum(has) - 1, mask=~has))


def _kinds(episode: EpisodeRows) -> dict[str, Any]:
    columns = {**episode.columns, **{f"\0{name}": v for name, v in episode.finals.items()}}
    return {name: _kind(values) for name, values in columns.items() if values is not None}


def _kind(values: Values) -> Any:
    if isinstance(values, Mapping):
        return tuple((key, _kind(sub)) for key, sub in values.items())
    return values.dtype, values.shape[1:]
