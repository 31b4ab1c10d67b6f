"""Episodes as rows: the one encoder that every writer goes through."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import (
    EpisodeColumns,
    TextColumn,
    as_text_array,
)
from replaylake.datastore.episodes.schema import (
    NAMES_TYPE,
    TIMESTAMP_TYPE,
    DatasetSpec,
    arrow_schema,
    arrow_type,
    as_column,
    check_names,
    to_arrow,
    vector_type,
    widen,
    widen_type,
)
from replaylake.datastore.episodes.spaces import Array, Space, as_batch, concatenate
from replaylake.datastore.episodes.tokens import ACTION_LOG_PROBS, clip_log_probs, has_tokens
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.storage.arrow_values import hash_texts, is_list
from replaylake.datastore.storage.table.delta_schema import plain_type
from replaylake.datastore.storage.table.table_schema import conform


def encode(episodes: Sequence[Episode], spec: DatasetSpec) -> pa.Table:
    """Lay checked episodes out as rows of the dataset, in order.

    Columns in `extras` that the spec lacks are added at the end, as nullable.
    Raises: SchemaMismatchError; EpisodeInvalidError, also for a step that is there twice.
    """
    outline = _collect_episode_fields(episodes)
    _check_episode_fields(outline)
    _check_distinct(outline)
    # What there is one of a step comes in as many parts as it was handed over in.
    parts = [episodes.steps] if isinstance(episodes, EpisodeColumns) else episodes
    nums = np.asarray([len(part) for part in parts])
    lengths = outline.lengths
    ends = lengths.cumsum() - 1
    num = int(lengths.sum())
    last = np.zeros(num, dtype=bool)
    last[ends] = True
    steps = np.arange(num, dtype=np.int64)
    steps += np.repeat(outline.first_steps - (ends - lengths + 1), lengths)
    steps = steps.astype(np.int32)
    env_steps = _or_default([p.env_steps for p in parts], steps, nums)
    columns: dict[str, Any] = {
        schema.EPISODE_ID: _per_episode(outline.episode_ids, lengths, "").cast(pa.string()),
        schema.STEP: steps,
        schema.ENV_STEP: _without_absent(episodes, "env_steps", env_steps, steps),
        schema.AGENT_ID: _per_episode(outline.agent_ids, lengths, ""),
        schema.OBSERVATION: to_arrow(
            spec.observation_space, concatenate([p.observations for p in parts])
        ),
        schema.FINAL_OBSERVATION: _final_observations(episodes, spec.observation_space, ends, num),
        schema.ACTION: to_arrow(spec.action_space, concatenate([p.actions for p in parts])),
        schema.REWARD: _rewards([p.rewards for p in parts], spec),
        schema.TERMINATED: last & np.repeat(outline.terminated, lengths),
        schema.TRUNCATED: last & np.repeat(outline.truncated, lengths),
        schema.BEHAVIOR_LOG_PROB: _log_probs([p.behavior_log_probs for p in parts], nums),
        schema.POLICY: _optional([p.policies for p in parts], nums, NAMES_TYPE),
        schema.POLICY_VERSION: _without_absent(
            episodes,
            "policy_versions",
            _optional([p.policy_versions for p in parts], nums, pa.int64()),
        ),
        schema.TIMESTAMP: _without_absent(
            episodes, "timestamps", _optional([p.timestamps for p in parts], nums, TIMESTAMP_TYPE)
        ),
        schema.SOURCE_EPISODE_ID: _per_episode(outline.source_ids, lengths, None).cast(pa.string()),
    }
    if spec.mask_size is not None or any(p.action_masks is not None for p in parts):
        columns[schema.ACTION_MASK] = _without_absent(
            episodes, "action_masks", _masks(parts, spec, nums)
        )
    extras = _encode_extras(parts, spec, nums) if _has_extras(parts) else {}
    fields = arrow_schema(spec)
    arrays = {name: pa.array(column) for name, column in columns.items()}
    arrays |= {name: extras.pop(name) for name in spec.extras if name in extras}
    known = pa.schema([field for field in fields if field.name in arrays])
    table = conform(pa.table({field.name: arrays[field.name] for field in known}), known)
    for name, array in extras.items():
        table = table.append_column(pa.field(name, array.type), array)
    return table


@dataclass(frozen=True)
class _EpisodeFields:
    """What there is one of an episode, [E] each."""

    episode_ids: Sequence[str]
    agent_ids: Sequence[str] | None
    """None if all are ""."""
    source_ids: Sequence[str | None] | None
    """None if none has one."""
    lengths: Array
    first_steps: Array
    terminated: Array
    truncated: Array


def _collect_episode_fields(episodes: Sequence[Episode]) -> _EpisodeFields:
    if isinstance(episodes, EpisodeColumns):
        return _EpisodeFields(
            episodes.episode_ids,
            episodes.agent_ids,
            episodes.source_ids,
            episodes.lengths,
            episodes.first_steps,
            episodes.terminated,
            episodes.truncated,
        )
    return _EpisodeFields(
        [episode.episode_id for episode in episodes],
        [episode.agent_id for episode in episodes],
        [episode.source_episode_id for episode in episodes],
        np.asarray([len(episode) for episode in episodes]),
        np.asarray([episode.first_step for episode in episodes]),
        np.asarray([episode.terminated for episode in episodes]),
        np.asarray([episode.truncated for episode in episodes]),
    )


def check_ids(episodes: Sequence[Episode]) -> None:
    """Refuse ids that no column could hold or no key tell apart. Raises: EpisodeInvalidError."""
    _check_episode_fields(_collect_episode_fields(episodes))


def _check_episode_fields(outline: _EpisodeFields) -> None:
    ids = outline.episode_ids
    if isinstance(ids, TextColumn) and isinstance(outline.agent_ids, TextColumn | None):
        known = [ids.array, *([] if outline.agent_ids is None else [outline.agent_ids.array])]
        has_nul = [pc.any(pc.match_substring(texts, "\0")).as_py() for texts in known]
        if not any(has_nul) and not pc.any(pc.equal(ids.array, "")).as_py():
            return
    for episode_id, agent_id in zip(ids, outline.agent_ids or [""] * len(ids), strict=True):
        for what, value in (("episode_id", episode_id), ("agent_id", agent_id)):
            if not isinstance(value, str) or "\0" in value:
                raise EpisodeInvalidError(
                    f"episode {episode_id!r}: {what}: found {value!r}, expected a string "
                    "without NUL."
                )
        if not episode_id:
            raise EpisodeInvalidError("episode_id: found '', expected the id of an episode.")


def check_encodable(episode: Episode, spec: DatasetSpec) -> None:
    """Check of a checked episode what `encode` would refuse: ids, mask and further columns.

    Raises: EpisodeInvalidError, SchemaMismatchError.
    """
    lengths = np.asarray([len(episode)])
    check_ids([episode])
    if episode.action_masks is not None:
        _masks([episode], spec, lengths)
    if episode.extras:
        _encode_extras([episode], spec, lengths)


def _has_extras(episodes: Sequence[Episode]) -> bool:
    return any(episode.extras for episode in episodes)


def _check_distinct(outline: _EpisodeFields) -> None:
    """Refuse one step of an episode and agent twice: which of the two happened is not known."""
    numbers: dict[tuple[str, str], int] = {}
    agents: Sequence[str] = outline.agent_ids or [""] * len(outline.episode_ids)
    if isinstance(outline.episode_ids, TextColumn) and isinstance(
        outline.agent_ids, TextColumn | None
    ):
        names = outline.episode_ids.array
        if outline.agent_ids is not None:
            names = pc.binary_join_element_wise(names, outline.agent_ids.array, "\0")
        # Texts with distinct hashes are distinct, and sorting hashes takes a fifth of the time.
        hashes = np.sort(hash_texts(names))
        if not (hashes[1:] == hashes[:-1]).any():
            return
        if pc.count_distinct(names).as_py() == len(names):
            return
    keys = zip(outline.episode_ids, agents, strict=True)
    codes = np.asarray([numbers.setdefault(key, len(numbers)) for key in keys])
    if len(numbers) == len(codes):
        return
    first = outline.first_steps
    order = np.lexsort((first, codes))
    ends = first + outline.lengths
    before, after = order[:-1], order[1:]
    overlap = (codes[before] == codes[after]) & (first[after] < ends[before])
    if overlap.any():
        row = int(after[np.argmax(overlap)])
        agent = f" of agent {agents[row]!r}" if agents[row] else ""
        source_id = None if outline.source_ids is None else outline.source_ids[row]
        raise EpisodeInvalidError(
            f"episode {source_id or outline.episode_ids[row]}: found step "
            f"{first[row]}{agent} twice, expected each step once. Give every episode an id "
            "of its own, and the pieces of one episode their first_step."
        )


def _per_episode(
    values: Sequence[str | None] | None, lengths: Array, default: str | None
) -> pa.Array:
    """Return each episode's text for each of its steps, or the default for all."""
    if values is None:
        indices = pa.array(np.zeros(int(lengths.sum()), np.int32))
        return pa.DictionaryArray.from_arrays(indices, pa.array([default], pa.string()))
    if isinstance(values, TextColumn):
        is_single = len(lengths) == int(lengths.sum())
        rows = None if is_single else pa.array(np.repeat(np.arange(len(values)), lengths))
        return values.array if rows is None else values.array.take(rows)
    codes = as_text_array(values).dictionary_encode()
    indices = codes.indices.take(pa.array(np.repeat(np.arange(len(values)), lengths)))
    return pa.DictionaryArray.from_arrays(indices, codes.dictionary)


def _without_absent(
    episodes: Sequence[Episode], name: str, column: Any, default: Array | None = None
) -> Any:
    """Return a column with the default, or nothing, in the rows of episodes that lack the field."""
    absent = episodes.lacks(name) if isinstance(episodes, EpisodeColumns) else None
    if absent is None:
        return column
    if default is not None:
        return np.where(absent, default, column)
    rows = pa.array(np.arange(len(absent)), mask=absent)
    return column.take(rows)


def _final_observations(
    episodes: Sequence[Episode], space: Space, ends: Array, num: int
) -> pa.Array:
    finals: Any
    if isinstance(episodes, EpisodeColumns):
        having, finals = episodes.having_final, episodes.final_observations
    else:
        having = np.flatnonzero([episode.final_observation is not None for episode in episodes])
        finals = [as_batch(episodes[i].final_observation) for i in having.tolist()]
        finals = concatenate(finals) if finals else None
    # A selection of columns may have lost every episode that had one, and keeps an empty array.
    if finals is None or not len(having):
        return pa.nulls(num, arrow_type(space))
    kind = arrow_type(space)
    if pa.types.is_fixed_size_list(kind) and isinstance(finals, np.ndarray):
        return _sparse_vectors(finals, kind, ends[having], num)
    # A take by indices that are null nearly everywhere stores nothing for the other rows.
    rows = np.zeros(num, dtype=np.int64)
    absent = np.ones(num, dtype=bool)
    rows[ends[having]] = np.arange(len(having))
    absent[ends[having]] = False
    return to_arrow(space, finals).take(pa.array(rows, mask=absent))


def _sparse_vectors(vectors: Array, kind: pa.DataType, rows: Array, num: int) -> pa.Array:
    """Lay vectors out at `rows` of `num`, the others null: a tenth of the time of a take.

    Pages of zeros that nobody writes to take no memory.
    """
    flat = vectors.reshape(len(vectors), -1)
    element = kind.value_type.to_pandas_dtype()
    values, absent = np.zeros((num, kind.list_size), element), np.ones(num, dtype=bool)
    values[rows], absent[rows] = flat, False
    return pa.FixedSizeListArray.from_arrays(
        pa.array(values.reshape(-1)), type=kind, mask=pa.array(absent)
    )


def _or_default(arrays: list[Array | None], default: Array, lengths: Array) -> Array:
    if all(array is None for array in arrays):
        return default
    parts = np.split(default, lengths.cumsum()[:-1])
    return np.concatenate([p if a is None else a for a, p in zip(arrays, parts, strict=True)])


def _rewards(arrays: list[Array], spec: DatasetSpec) -> Array | pa.Array:
    rewards = np.concatenate(arrays)
    # An unknown one is null where that is allowed; elsewhere none is there.
    return pa.array(rewards, from_pandas=True) if spec.rewards_optional else rewards


def _log_probs(arrays: list[Array | None], lengths: Array) -> pa.Array:
    if all(array is None for array in arrays):
        return pa.nulls(int(lengths.sum()), pa.float32())
    parts = [
        np.full(num, np.nan, np.float32) if array is None else array
        for array, num in zip(arrays, lengths, strict=True)
    ]
    return pa.array(np.concatenate(parts), from_pandas=True)


def _optional(arrays: list[Array | None], lengths: Array, kind: pa.DataType) -> pa.Array:
    if all(array is None for array in arrays):
        return pa.nulls(int(lengths.sum()), kind)
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    known = [array for array in arrays if array is not None]
    if len(known) == len(arrays):
        return pa.array(np.concatenate(known), plain).cast(kind)
    parts = [
        pa.nulls(num, plain) if array is None else pa.array(array, plain)
        for array, num in zip(arrays, lengths.tolist(), strict=True)
    ]
    return pa.concat_arrays(parts).cast(kind)


def _masks(episodes: Sequence[Episode], spec: DatasetSpec, lengths: Array) -> pa.Array:
    if spec.mask_size is None:
        raise SchemaMismatchError(
            "found action masks, expected none: the dataset was created without. Ingest into a "
            "new dataset, or leave the masks out."
        )
    kind = vector_type(pa.bool_(), spec.mask_size)
    known = [e.action_masks for e in episodes if e.action_masks is not None]
    if len(known) == len(episodes) and {m.shape[1] for m in known} == {spec.mask_size}:
        flat = pa.array(np.concatenate(known).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    parts = []
    for episode, num in zip(episodes, lengths.tolist(), strict=True):
        masks = episode.action_masks
        if masks is None:
            parts.append(pa.nulls(num, kind))
        elif masks.shape[1] != spec.mask_size:
            raise EpisodeInvalidError(
                f"episode {episode.episode_id}: action_mask: found {masks.shape[1]} actions, "
                f"expected {spec.mask_size}."
            )
        else:
            parts.append(pa.FixedSizeListArray.from_arrays(pa.array(masks.reshape(-1)), type=kind))
    return pa.concat_arrays(parts)


def _encode_extras(
    episodes: Sequence[Episode], spec: DatasetSpec, lengths: Array
) -> dict[str, pa.Array]:
    names = dict.fromkeys(name for episode in episodes for name in episode.extras)
    check_names(dict.fromkeys((*spec.extras, *names)))
    columns = {}
    for name in names:
        parts = [as_column(e.extras[name], name) if name in e.extras else None for e in episodes]
        parts, nums = _concatenate_uniform(parts, lengths)
        kind = spec.extras.get(name) or _common_type(parts, name)
        for part in parts:
            if part is not None and not _is_same_kind(part.type, kind):
                raise SchemaMismatchError(
                    f"column {name!r}: expected {kind} as the dataset has it; found {part.type}. "
                    "Convert or rename it."
                )
        try:
            columns[name] = pa.concat_arrays(
                [
                    pa.nulls(num, kind) if part is None else _cast_column(kind, _plain(part))
                    for part, num in zip(parts, nums, strict=True)
                ]
            )
        except pa.ArrowException as error:
            whose = "as the dataset has it" if name in spec.extras else "as other episodes have it"
            raise SchemaMismatchError(
                f"column {name!r}: expected {kind} {whose}; {error}. Convert or rename it."
            ) from error
    if has_tokens(columns) and ACTION_LOG_PROBS in columns:
        columns[ACTION_LOG_PROBS] = clip_log_probs(columns[ACTION_LOG_PROBS])
    return columns


def _concatenate_uniform(
    parts: list[pa.Array | None], lengths: Array
) -> tuple[list[pa.Array | None], list[int]]:
    """Join parts of one type to one, to be looked at once: one-step episodes are many."""
    if all(part is not None for part in parts):
        with suppress(pa.ArrowException):  # they differ in type
            return [pa.concat_arrays(parts)], [int(lengths.sum())]
    return parts, lengths.tolist()


def _is_same_kind(found: pa.DataType, expected: pa.DataType) -> bool:
    """Whether values may be cast: Arrow would make texts of numbers, and numbers of such texts."""
    found, expected = plain_type(found), plain_type(expected)
    if pa.types.is_null(found):
        return True
    if is_list(found) and is_list(expected):
        return _is_same_kind(found.value_type, expected.value_type)
    tests = (_is_number, pa.types.is_boolean, _is_text, _is_binary, pa.types.is_temporal)
    return all(test(found) == test(expected) for test in (*tests, is_list, pa.types.is_struct))


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _common_type(parts: Sequence[pa.Array | None], name: str) -> pa.DataType:
    """Return the type that holds a new column of all episodes; one of nulls alone takes part."""
    kinds = [part for part in parts if part is not None]
    typed = [widen(part, name).type for part in kinds if part.null_count < len(part)]
    if not typed:
        return widen_type(kinds[0].type, name)
    try:
        schemas = [pa.schema([(name, kind)]) for kind in dict.fromkeys(typed)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(name).type
    except pa.ArrowException as error:
        raise SchemaMismatchError(
            f"column {name!r}: found {' and '.join(map(str, dict.fromkeys(typed)))} in different "
            "episodes, expected one type. Convert it."
        ) from error


def _cast_column(kind: pa.DataType, column: pa.Array) -> pa.Array:
    # Arrow refuses to cast vectors to their own type where one of them is null.
    return column if column.type.equals(kind) else column.cast(kind)


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
