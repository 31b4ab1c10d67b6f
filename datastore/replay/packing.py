"""Packing: shards decoded into one record per step, run by run, ready to be gathered.

A run is a maximal stretch of consecutive steps of one episode and agent. It takes T + 1 records:
the last one holds only the observation after the run, so the successor of record i is i + 1, and a
batch is two gathers of whole records (for B = 256, 13 us against 24 with
one array a field; 2 cores, 2026-11).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore import schema
from replaylake.datastore.errors import SpaceUnsupported
from replaylake.datastore.schema import DatasetSpec, to_numpy
from replaylake.datastore.spaces import (
    Array,
    Space,
    Text,
    Values,
    leaves,
    value_dtype,
    value_shape,
)
from replaylake.datastore.table import TableSnapshot

OnProgress = Callable[[int, int], None]
KEY: Final = "key"
BOOTSTRAPPABLE: Final = "bootstrappable"
_COLUMNS: Final = (
    schema.EPISODE_ID,
    schema.AGENT_ID,
    schema.STEP,
    schema.OBSERVATION,
    schema.FINAL_OBSERVATION,
    schema.ACTION,
    schema.REWARD,
    schema.TERMINATED,
    schema.TRUNCATED,
    schema.BEHAVIOR_LOG_PROB,
)


@dataclass(frozen=True)
class Packed:
    """records [steps + runs] of a structured dtype, and the positions of the steps in it.

    `steps` int64 [num_steps] are all; `bootstrappable` those with a successor or a termination.
    """

    records: NDArray[np.void]
    steps: NDArray[np.int64]
    bootstrappable: NDArray[np.int64]
    num_episodes: int


def record_dtype(spec: DatasetSpec) -> np.dtype[np.void]:
    """Return the record of one step; float64 observations and actions are decoded to float32.

    Raises: SpaceUnsupported for Text, which has no fixed width.
    """
    fields: list[Any] = []
    for column, space in (
        (schema.OBSERVATION, spec.observation_space),
        (schema.ACTION, spec.action_space),
    ):
        for name, leaf in leaves(space, column):
            if isinstance(leaf, Text):
                raise SpaceUnsupported(
                    f"{name}: found a Text space, expected numbers. "
                    "Replay packs fixed-width records; read transcripts with SQL."
                )
            dtype = value_dtype(leaf)
            fields.append((name, np.float32 if dtype == np.float64 else dtype, value_shape(leaf)))
    fields += [
        (schema.REWARD, np.float32),
        (schema.BEHAVIOR_LOG_PROB, np.float32),
        (KEY, np.uint64, (2,)),
        (schema.TERMINATED, np.bool_),
        (BOOTSTRAPPABLE, np.bool_),
    ]
    if spec.mask_size is not None:
        fields.append((schema.ACTION_MASK, np.bool_, (spec.mask_size,)))
    return np.dtype(fields, align=True)


def pack(
    snapshot: TableSnapshot,
    spec: DatasetSpec,
    *,
    selected: pa.Table | None = None,
    rewards: pa.Table | None = None,
    on_progress: OnProgress | None = None,
) -> Packed:
    """Decode a snapshot's shards, each checked against its sha256.

    `selected` (episode_id, agent_id) keeps those episodes; `rewards` replaces the reward column, in
    file and row order. One pass over the data; peak memory is the decoded columns plus the records.
    Raises: ShardCorrupt, SpaceUnsupported.
    """
    dtype = record_dtype(spec)
    names = [*_COLUMNS, *([schema.ACTION_MASK] if spec.mask_size is not None else [])]
    parts = []
    for number, part in enumerate(snapshot.batches(names), 1):
        parts.append(part)
        if on_progress is not None:
            on_progress(number, len(snapshot.files))
    table = pa.concat_tables(parts).unify_dictionaries().combine_chunks() if parts else None
    if table is None or table.num_rows == 0:
        empty = np.zeros(0, np.int64)
        return Packed(np.zeros(0, dtype), empty, empty, 0)
    if rewards is not None:
        index = table.schema.get_field_index(schema.REWARD)
        table = table.set_column(index, schema.REWARD, rewards[schema.REWARD])
    table, episodes, pairs = _with_episode_codes(table, selected)
    if table.num_rows == 0:
        empty = np.zeros(0, np.int64)
        return Packed(np.zeros(0, dtype), empty, empty, 0)
    return _fill(table, episodes, pairs, spec, dtype)


def _with_episode_codes(
    table: pa.Table, selected: pa.Table | None
) -> tuple[pa.Table, NDArray[np.int64], list[str]]:
    """Return the selected rows by episode and step, their episode codes and the names of those."""
    codes, pairs = _codes(table)
    steps = table[schema.STEP].to_numpy()
    if selected is not None:
        wanted = set(_pair_names(selected))
        keep = np.asarray([pair in wanted for pair in pairs], dtype=bool)[codes]
        table, codes, steps = table.filter(pa.array(keep)), codes[keep], steps[keep]
    in_order = (np.diff(codes) > 0) | ((np.diff(codes) == 0) & (np.diff(steps) > 0))
    if not in_order.all():
        order = np.lexsort((steps, codes))
        table, codes = table.take(pa.array(order)), codes[order]
    return table.combine_chunks(), codes, pairs


def _codes(table: pa.Table) -> tuple[NDArray[np.int64], list[str]]:
    episode = table[schema.EPISODE_ID].combine_chunks().dictionary_encode()
    agent = table[schema.AGENT_ID].combine_chunks()
    agent = agent if pa.types.is_dictionary(agent.type) else agent.dictionary_encode()
    agent_codes = agent.indices.to_numpy().astype(np.int64)
    raw = episode.indices.to_numpy().astype(np.int64) * len(agent.dictionary) + agent_codes
    _, first, codes = np.unique(raw, return_index=True, return_inverse=True)
    return codes.reshape(-1), _pair_names(
        table.select([schema.EPISODE_ID, schema.AGENT_ID]).take(pa.array(first))
    )


def _pair_names(table: pa.Table) -> list[str]:
    agents = table[schema.AGENT_ID].cast(pa.string()).to_pylist()
    return [f"{e}\0{a}" for e, a in zip(table[schema.EPISODE_ID].to_pylist(), agents, strict=True)]


def _fill(
    table: pa.Table,
    codes: NDArray[np.int64],
    pairs: list[str],
    spec: DatasetSpec,
    dtype: np.dtype[np.void],
) -> Packed:
    num = table.num_rows
    steps = table[schema.STEP].to_numpy()
    terminated = table[schema.TERMINATED].to_numpy()
    has_final = pc.is_valid(table[schema.FINAL_OBSERVATION]).to_numpy()
    ended = terminated | table[schema.TRUNCATED].to_numpy() | has_final
    adjoins = (np.diff(codes) == 0) & (np.diff(steps) == 1)
    follows = adjoins & ~ended[:-1]
    last = np.append(~follows, True)
    positions = np.arange(num) + np.concatenate(([0], np.cumsum(last)[:-1]))
    records = np.zeros(num + int(last.sum()), dtype)

    _put(records, positions, schema.OBSERVATION, spec.observation_space, table)
    _put(records, positions, schema.ACTION, spec.action_space, table)
    _put_array(records, positions, schema.REWARD, table[schema.REWARD].to_numpy())
    log_probs = table[schema.BEHAVIOR_LOG_PROB].fill_null(np.nan).to_numpy()
    records[schema.BEHAVIOR_LOG_PROB][positions] = log_probs
    records[schema.TERMINATED][positions] = terminated
    records[KEY][positions] = row_keys(pairs, codes, steps)
    if spec.mask_size is not None:
        records[schema.ACTION_MASK] = True
        masks = table[schema.ACTION_MASK].combine_chunks()
        known = masks.is_valid().to_numpy(zero_copy_only=False)
        flat = masks.drop_null().flatten().to_numpy(zero_copy_only=False)
        records[schema.ACTION_MASK][positions[known]] = flat.reshape(-1, spec.mask_size)

    # The record after each run: its final observation, else for a termination the last one (its
    # discount is 0, so the value is never used, but it has to be finite).
    tails = positions[last] + 1
    for name, _ in leaves(spec.observation_space, schema.OBSERVATION):
        records[name][tails] = records[name][tails - 1]
    if has_final.any():
        finals = table[schema.FINAL_OBSERVATION].combine_chunks().drop_null()
        _put_values(
            records,
            positions[has_final] + 1,
            schema.OBSERVATION,
            spec.observation_space,
            to_numpy(spec.observation_space, finals),
        )
    if spec.mask_size is not None:
        # A piece of an episode ends in a final observation, which is the next piece's first one:
        # that row has the mask that goes with it.
        truncated = table[schema.TRUNCATED].to_numpy()
        goes_on = np.flatnonzero(adjoins & has_final[:-1] & ~(terminated | truncated)[:-1])
        masks_of = records[schema.ACTION_MASK]
        masks_of[positions[goes_on] + 1] = masks_of[positions[goes_on + 1]]
    successor = ~last | has_final | terminated
    records[BOOTSTRAPPABLE][positions] = successor
    return Packed(records, positions, positions[successor], len(np.unique(codes)))


def row_keys(pairs: list[str], codes: NDArray[np.int64], steps: Array) -> NDArray[np.uint64]:
    """Return the stable 128-bit key [N, 2] of (episode, agent, step): it survives compaction.

    The first 128 bits of the pair's sha256, each half mixed with the step by splitmix64's
    finaliser (Steele et al. 2014), a bijection of 64 bits: steps of one episode never collide.
    """
    digests = b"".join(hashlib.sha256(pair.encode()).digest()[:16] for pair in pairs)
    halves = np.frombuffer(digests, np.uint64).reshape(-1, 2)[codes]
    mixed = steps.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return halves ^ mixed[:, None]


def _put(
    records: NDArray[np.void], positions: Array, column: str, space: Space, table: pa.Table
) -> None:
    _put_values(records, positions, column, space, to_numpy(space, table[column]))


def _put_values(
    records: NDArray[np.void], positions: Array, column: str, space: Space, values: Values
) -> None:
    for name, _ in leaves(space, column):
        leaf: Any = values
        for key in name.split(".")[1:]:
            leaf = leaf[key]
        _put_array(records, positions, name, leaf)


def _put_array(records: NDArray[np.void], positions: Array, name: str, values: Array) -> None:
    with np.errstate(over="raise"):
        try:
            records[name][positions] = values
        except FloatingPointError as error:
            largest = float(np.abs(values).max())
            raise SpaceUnsupported(
                f"{name}: found {largest:g}, expected numbers that float32 holds, as replay "
                "decodes them. Leave the episode out with `where`, or scale the column."
            ) from error


def gather(records: NDArray[np.void], column: str, space: Space) -> Values:
    """Return a column of gathered records [B] as contiguous arrays, nested as the space is."""
    names = list(leaves(space, column))
    if len(names) == 1 and names[0][0] == column:
        return np.ascontiguousarray(records[column])
    nested: dict[str, Any] = {}
    for name, _ in names:
        *parents, key = name.split(".")[1:]
        target: Any = nested
        for parent in parents:
            target = target.setdefault(parent, {})
        target[key] = np.ascontiguousarray(records[name])
    return nested


def selection_hash(
    snapshot: TableSnapshot, where: str | None, reward: str | None, keys: Array
) -> str:
    """Return sha256 over the sorted shard hashes, the canonical SQL and the sorted row keys."""
    digest = hashlib.sha256()
    for sha256 in sorted(entry.sha256 for entry in snapshot.files):
        digest.update(sha256.encode())
    digest.update(f"\0{where or ''}\0{reward or ''}\0".encode())
    array = np.asarray(keys)
    # The first halves settle the order: two keys that share one are the same key.
    digest.update(array[np.argsort(array[:, 0])].tobytes())
    return digest.hexdigest()
