"""Stored steps: how far a stream's episodes are in the dataset, and what their steps hold there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode, with_valid_tokens
from replaylake.datastore.episodes.message_media import is_media_column, move_media
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    FINAL_OBSERVATION,
    SOURCE_EPISODE_ID,
    STEP,
)
from replaylake.datastore.episodes.tokens import has_tokens
from replaylake.datastore.interchange.ingest.stream.grammar import Grammar
from replaylake.datastore.interchange.ingest.stream.line_kinds import normalize_json
from replaylake.datastore.lake.dataset import Dataset

Key = tuple[str, str]

# Episodes that are remembered: about 20 MB. Others are looked up again when a step of them comes.
_MAX_CACHED: Final = 65_536
# They depend on where a stream was cut into pieces, or on the id alone.
_IGNORED_COLUMNS: Final = (EPISODE_ID, STEP, FINAL_OBSERVATION, SOURCE_EPISODE_ID)


@dataclass(frozen=True)
class StreamPosition:
    """An episode's steps first..following - 1 are there; `ended` if the last of them ends it.

    `final` is the observation that the log says came after the last, where it says one.
    """

    first: int
    following: int
    ended: bool
    final: Any = None


class StoredSteps:
    """What a dataset has of a stream's episodes, by (episode, agent) under the stream's prefix.

    Empty if the grammar is keyed: then the dataset finds stored rows when rows are appended.
    """

    def __init__(self, dataset: Dataset, prefix: str, grammar: Grammar) -> None:
        self._dataset = dataset
        self._prefix = prefix
        self._grammar = grammar
        self._reached: OrderedDict[Key, StreamPosition | None] = OrderedDict()

    def find(self, keys: Iterable[Key]) -> dict[Key, StreamPosition | None]:
        """Return how far each is; None for one that is not there. Cost: at most one scan."""
        unique_keys = list(dict.fromkeys(keys))
        if self._grammar.is_keyed:
            return dict.fromkeys(unique_keys)
        unknown = [key for key in unique_keys if key not in self._reached]
        if unknown and self._dataset.exists():
            stored = self._look_up({episode for episode, _ in unknown})
            for key in unknown:
                self._cache(key, stored.get(key))
        elif unknown:
            for key in unknown:
                self._cache(key, None)
        result = {key: self._reached[key] for key in unique_keys}
        while len(self._reached) > _MAX_CACHED:
            self._reached.popitem(last=False)
        return result

    def add(self, episode: Episode, key: Key) -> None:
        """Note a piece that was committed."""
        if self._grammar.is_keyed:
            return
        before = self._reached.get(key)
        first = episode.first_step if before is None else before.first
        ended = episode.terminated or episode.truncated
        following = episode.first_step + len(episode)
        self._cache(key, StreamPosition(first, following, ended, episode.final_observation))

    def reset(self) -> None:
        """Look everything up again: another writer has committed under this stream's name."""
        self._reached.clear()

    def are_same(self, pieces: Sequence[tuple[Key, Episode]]) -> list[bool]:
        """Tell of each step of these pieces whether the dataset has the same content.

        True too for a step that is not there though later ones are: it was deleted since.
        Raises: EpisodeInvalidError, SchemaMismatchError if some cannot be stored beside what is
        there.
        """
        names = [
            (f"{self._prefix}{key[0]}", key[1], piece.first_step + n)
            for key, piece in pieces
            for n in range(len(piece))
        ]
        snapshot = self._dataset.snapshot()
        stored = snapshot.sql(
            "SELECT * FROM steps SEMI JOIN (SELECT unnest($ids) AS id, unnest($steps) AS number) "
            f"ON {EPISODE_ID} = id AND {STEP} = number",
            {"ids": [name[0] for name in names], "steps": [name[2] for name in names]},
        )
        # Each under an id of its own: one step may have come several times.
        own = [_renumber(one, i) for i, (_, one) in enumerate(pieces)]
        # The sum of a step's log-probs is stored where its line does not state one.
        own = [
            with_valid_tokens(one, snapshot.spec.tokenizer) if has_tokens(one.extras) else one
            for one in own
        ]
        come = move_media(encode(own, snapshot.spec), snapshot.spec.extras)
        places = _places(stored)
        at = [places.get(name) for name in names]
        there = [i for i, row in enumerate(at) if row is not None]
        same = np.ones(len(names), bool)
        kind = self._grammar.kind
        json_columns = () if kind is None else kind.json_columns
        same[there] = _equal(come.take(there), stored.take([at[i] for i in there]), json_columns)
        return [bool(one) for one in same]

    def _cache(self, key: Key, reached: StreamPosition | None) -> None:
        self._reached[key] = reached
        self._reached.move_to_end(key)

    def _look_up(self, episodes: set[str]) -> dict[Key, StreamPosition]:
        rows = self._dataset.snapshot().sql(
            f"SELECT {EPISODE_ID} AS e, CAST({AGENT_ID} AS VARCHAR) AS a, min({STEP}) AS first, "
            f"max({STEP}) AS last, bool_or(terminated OR truncated) AS ended, "
            # A struct is never null, and so of the last row whatever that holds.
            f"arg_max({{'final': {FINAL_OBSERVATION}}}, {STEP}) AS final FROM steps "
            f"WHERE {EPISODE_ID} IN (SELECT unnest($ids)) GROUP BY ALL",
            {"ids": [f"{self._prefix}{episode}" for episode in episodes]},
        )
        return {
            (row["e"].removeprefix(self._prefix), row["a"]): StreamPosition(
                row["first"], row["last"] + 1, row["ended"], row["final"]["final"]
            )
            for row in rows.to_pylist()
        }


def is_successor(final: Any, observation: Any) -> bool:
    """Whether an observation is the one that was said to come, after rounding to float32."""
    if final is None:
        return True
    if isinstance(final, Mapping) and isinstance(observation, Mapping):
        return all(is_successor(final[key], observation[key]) for key in final)
    first, second = np.asarray(final), np.asarray(observation)
    if first.dtype.kind in "fiub" and second.dtype.kind in "fiub":
        first, second = first.astype(np.float32), second.astype(np.float32)
    return first.size == second.size and bool((first.reshape(-1) == second.reshape(-1)).all())


def _renumber(episode: Episode, number: int) -> Episode:
    return Episode(**{**episode_fields(episode), "episode_id": str(number)})


def episode_fields(episode: Episode) -> dict[str, Any]:
    """Return an episode's fields, without those that a format has added."""
    return {name: getattr(episode, name) for name in Episode.__dataclass_fields__}


def _places(stored: pa.Table) -> dict[tuple[str, str, int], int]:
    columns = [stored.column(name).to_pylist() for name in (EPISODE_ID, AGENT_ID, STEP)]
    return {key: i for i, key in enumerate(zip(*columns, strict=True))}


def _is_media(table: pa.Table, name: str) -> bool:
    return name in table.column_names and is_media_column(name, table.schema.field(name).type)


def _equal(come: pa.Table, stored: pa.Table, json_columns: Collection[str]) -> Any:
    """Compare row by row; a column that one of them lacks counts as null."""
    equal = np.ones(come.num_rows, bool)
    for name in dict.fromkeys([*come.column_names, *stored.column_names]):
        if name in _IGNORED_COLUMNS or _is_media(come, name) or _is_media(stored, name):
            continue  # the messages have the sha256 of their media
        if name not in come.column_names:
            equal &= np.asarray(stored.column(name).is_null())
        elif name not in stored.column_names:
            equal &= np.asarray(come.column(name).is_null())
        else:
            one, other = come.column(name).to_pylist(), stored.column(name).to_pylist()
            if one != other and name in json_columns:
                one, other = [*map(normalize_json, one)], [*map(normalize_json, other)]
            if one != other:
                equal &= np.asarray([a == b for a, b in zip(one, other, strict=True)])
    return equal
