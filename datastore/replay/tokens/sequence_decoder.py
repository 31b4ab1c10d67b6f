"""Sequence decoder: the rows of the view `sequences` as flat arrays, in pieces.

An agent's steps that lie one after another in the shards, from step 0 on and without forks, are one
sequence: they are decoded as they come, at the cost of reading the columns. Episodes with forks,
rewritten contexts, gaps, or steps that do not lie together are left to the SQL view, in batches.
Both give the same sequences, which a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.token_sequences import NO_VERSION, find_trained_tokens
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.expressions import registered
from replaylake.datastore.query.group_views import GROUP_ID
from replaylake.datastore.query.scan import scan
from replaylake.datastore.query.sequence_views import sequences_sql
from replaylake.datastore.query.statements import execute
from replaylake.datastore.replay.arrays import RowGroup, for_each_verified_group
from replaylake.datastore.replay.packing.packing import OnProgress
from replaylake.datastore.storage.arrow_values import combine_chunks, is_list, numbers, scalar
from replaylake.datastore.storage.table.shard import (
    blob_of,
    decode_row_group,
    row_group_batches,
)
from replaylake.datastore.storage.table.table import TableSnapshot
from replaylake.datastore.storage.table.table_schema import conform

# Decoded at once, as values. Pieces of 16 MiB leave the processor's cache: 25.6M tokens then take
# 1.5 s of processor time instead of 1.1 (2 busy cores, 2026-11-27), and more memory.
_CHUNK_BYTES: Final = 4 << 20
_VALUE_BYTES: Final = 4
# Of the columns of episodes that are left to SQL; DuckDB takes some times as much.
_QUERY_BYTES: Final = 64 << 20
# No step has this number.
_NO_STEP: Final = -2
_OBSERVED, _SAMPLED, _FINAL = range(3)
_KEYS: Final = (
    schema.EPISODE_ID,
    schema.AGENT_ID,
    schema.STEP,
    tokens.PARENT_AGENT_ID,
    tokens.PARENT_STEP,
    tokens.IS_CONTINUATION,
)
_CONTENT: Final = (
    schema.REWARD,
    schema.POLICY_VERSION,
    GROUP_ID,
    tokens.OBSERVATION_TOKENS,
    tokens.ACTION_TOKENS,
    tokens.FINAL_OBSERVATION_TOKENS,
    tokens.ACTION_LOG_PROBS,
    tokens.ACTION_LOSS_MASK,
    tokens.ACTION_VERSIONS,
    tokens.IS_TRAINABLE,
)


@dataclass(frozen=True)
class SequenceBlock:
    """Some sequences: S of N tokens together, with R runs of one policy version.

    token_ids int32 [N]; loss_mask bool [N]; log_probs float32 [N], or None: 0 where none is known,
    NaN where also the loss is over the token. columns: further ones, float32 or bool [N], in the
    same way. lengths int64 [S]; returns, and those of the whole episode, float64 [S], NaN where
    unknown; num_runs int64 [S]; has_unversioned bool [S]: whether a sampled token has no version.
    version_starts and version_ends int32 [R], within the sequence; versions int64 [R]. table: as
    TABLE_SCHEMA, a row for each sequence.
    """

    token_ids: Array
    loss_mask: Array
    log_probs: Array | None
    columns: Mapping[str, Array]
    lengths: Array
    returns: Array
    episode_returns: Array
    num_runs: Array
    has_unversioned: Array
    version_starts: Array
    version_ends: Array
    versions: Array
    table: pa.Table = field(repr=False)


TABLE_SCHEMA: Final = pa.schema(
    [
        ("episode_id", pa.string()),
        ("agent_id", pa.string()),
        ("root_agent_id", pa.string()),
        ("first_step", pa.int32()),
        ("last_step", pa.int32()),
        ("num_turns", pa.int64()),
        (GROUP_ID, pa.string()),
    ]
)


def decode_sequences(
    snapshot: TableSnapshot,
    columns: Mapping[str, str],
    selected: pa.Table | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[SequenceBlock]:
    """Decode the sequences of a snapshot, each shard checked against its sha256.

    Args:
        snapshot: the version, with token columns.
        columns: names of further per-token columns, with DuckDB's type of a value of each.
        selected: episode_id and agent_id of the episodes whose sequences are wanted; None for all.
            A sequence is its last step's agent's.
        on_progress: called with (shards decoded, shards).

    First come those that lie together, in the order of the shards, then the others by episode_id,
    agent_id and last_step. Memory: 60 bytes a sequence, and some row groups' pieces.
    Raises: ShardCorruptError, QueryError.
    """
    blobs = [blob_of(snapshot.root, entry) for entry in snapshot.files]
    paths = snapshot.storage.fetch(blobs)
    try:
        runs, groups = _find_runs(snapshot, paths)
        wanted = np.ones(len(runs.nums), np.bool_)
        if selected is not None:
            wanted = _find_selected(runs, selected)
        linear = runs.is_linear()
        yield from _decode_linear(snapshot, columns, runs, linear & wanted, groups, on_progress)
        yield from _query_others(snapshot, paths, columns, runs, ~linear, selected)
    finally:
        snapshot.storage.release(blobs)


@dataclass(frozen=True)
class _Runs:
    """Rows of one episode and agent that follow each other, in the order of the shards.

    nums int64 [S]: rows of each. is_plain bool [S]: from step 0 on, each after the one before it.
    rewards float64 [S]: their sum, NaN if one is unknown.
    """

    episode_ids: pa.Array
    agent_ids: pa.Array
    nums: Array
    is_plain: Array
    rewards: Array

    def sum_episodes(self) -> Array:
        """Return for each the sum of all rewards of its episode, NaN if one is unknown."""
        episodes = numbers(self.episode_ids.dictionary_encode().indices).astype(np.int64)
        sums: Array = np.bincount(episodes, weights=self.rewards)[episodes]
        return sums

    def is_linear(self) -> NDArray[np.bool_]:
        """Return which are a whole sequence: plain, as is all of their episode, and in one run."""
        if not len(self.nums):
            return np.zeros(0, np.bool_)
        episodes = numbers(self.episode_ids.dictionary_encode().indices).astype(np.int64)
        agents = numbers(self.agent_ids.dictionary_encode().indices).astype(np.int64)
        _, pairs, counts = np.unique(
            episodes * (int(agents.max()) + 1) + agents, return_inverse=True, return_counts=True
        )
        is_other = np.zeros(int(episodes.max()) + 1, np.bool_)
        is_other[episodes[~self.is_plain | (counts[pairs] > 1)]] = True
        linear: NDArray[np.bool_] = ~is_other[episodes]
        return linear


@dataclass(frozen=True)
class _GroupRuns:
    """The runs of one row group, of which the first may go on from the group before it.

    is_plain bool [S]: whether the rows after the first are each one step after the one before it.
    is_root bool [S]: whether the first row begins a sequence; can_follow: whether the very first
    row may go on from the row before it.
    """

    heads: pa.Table
    nums: Array
    rewards: Array
    is_plain: Array
    is_root: Array
    can_follow: bool
    first_step: int
    last_step: int


def _find_runs(
    snapshot: TableSnapshot, paths: Sequence[Path]
) -> tuple[_Runs, list[list[RowGroup]]]:
    """Return the runs of all rows, and the row groups of each shard."""
    fields = _select_present(snapshot, (*_KEYS, schema.REWARD))
    found: dict[int, _GroupRuns] = {}

    def find_runs(group: RowGroup) -> None:
        rows = decode_row_group(group.path, group.number, fields.names)
        found[group.start] = _find_group_runs(conform(rows, fields).combine_chunks())

    groups = for_each_verified_group(snapshot, paths, find_runs) if snapshot.files else []
    return _join_runs([found[start] for start in sorted(found)]), groups


def _find_group_runs(rows: pa.Table) -> _GroupRuns:
    steps = numbers(rows[schema.STEP]).astype(np.int64)
    begins = np.ones(len(rows), np.bool_)
    changes = pc.or_(
        *(
            pc.not_equal(rows[name].chunk(0)[1:], rows[name].chunk(0)[:-1])
            for name in (schema.EPISODE_ID, schema.AGENT_ID)
        )
    )
    begins[1:] = numbers(changes)
    can_follow = np.ones(len(rows), np.bool_)
    is_root = steps == 0
    if tokens.IS_CONTINUATION in rows.schema.names:
        can_follow &= numbers(pc.fill_null(rows[tokens.IS_CONTINUATION], scalar(True, np.bool_)))
    if tokens.PARENT_STEP in rows.schema.names and rows[tokens.PARENT_STEP].null_count < len(rows):
        parents = rows[tokens.PARENT_STEP]
        is_named = numbers(parents.is_valid())
        is_root &= ~is_named
        is_before = numbers(pc.fill_null(parents, scalar(_NO_STEP, np.int32))) == steps - 1
        if tokens.PARENT_AGENT_ID in rows.schema.names:
            own = rows[schema.AGENT_ID]
            agents = pc.coalesce(rows[tokens.PARENT_AGENT_ID].cast(own.type), own)
            is_before &= numbers(pc.equal(agents, own))
        can_follow &= ~is_named | is_before
    starts = np.flatnonzero(begins)
    is_next = can_follow.copy()
    is_next[1:] &= steps[1:] == steps[:-1] + 1
    is_next[starts] = True
    return _GroupRuns(
        heads=rows.select([schema.EPISODE_ID, schema.AGENT_ID]).take(pa.array(starts)),
        nums=np.diff(np.append(starts, len(rows))),
        rewards=np.add.reduceat(_read_rewards(rows), starts),
        is_plain=np.logical_and.reduceat(is_next, starts),
        is_root=is_root[starts],
        can_follow=bool(can_follow[0]),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
    )


def _join_runs(groups: Sequence[_GroupRuns]) -> _Runs:
    """Return the runs of all row groups, those that go on from the group before joined."""
    heads: list[pa.Table] = []
    nums: list[Array] = []
    rewards: list[Array] = []
    is_plain: list[Array] = []
    before: _GroupRuns | None = None
    for group in groups:
        own_heads, own_nums, own_rewards = group.heads, group.nums, group.rewards
        own_plain = group.is_plain & group.is_root
        if before is not None and own_heads.slice(0, 1).equals(
            before.heads.slice(len(before.heads) - 1)
        ):
            follows = group.can_follow and group.first_step == before.last_step + 1
            nums[-1][-1] += own_nums[0]
            rewards[-1][-1] += own_rewards[0]
            is_plain[-1][-1] &= follows and bool(group.is_plain[0])
            own_heads, own_nums, own_plain = own_heads.slice(1), own_nums[1:], own_plain[1:]
            own_rewards = own_rewards[1:]
        if len(own_nums):
            heads.append(own_heads)
            nums.append(own_nums.copy())
            rewards.append(own_rewards.copy())
            is_plain.append(own_plain)
        before = group
    if not heads:
        empty = pa.array([], pa.string())
        return _Runs(
            empty, empty, np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0, np.float64)
        )
    table = pa.concat_tables(heads).combine_chunks()
    return _Runs(
        table[schema.EPISODE_ID].chunk(0),
        table[schema.AGENT_ID].chunk(0),
        np.concatenate(nums),
        np.concatenate(is_plain),
        np.concatenate(rewards),
    )


def _find_selected(runs: _Runs, selected: pa.Table) -> NDArray[np.bool_]:
    pairs = _join_pairs(runs.episode_ids, runs.agent_ids)
    chosen = _join_pairs(selected[schema.EPISODE_ID], selected[schema.AGENT_ID])
    found: NDArray[np.bool_] = numbers(pc.is_in(pairs, value_set=combine_chunks(chosen)))
    return found


def _join_pairs(episode_ids: pa.Array, agent_ids: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(
        episode_ids.cast(pa.string()), agent_ids.cast(pa.string()), "\0"
    )


def _select_present(snapshot: TableSnapshot, names: Sequence[str]) -> pa.Schema:
    return snapshot.select_fields([name for name in names if name in snapshot.schema.names])


def _decode_linear(
    snapshot: TableSnapshot,
    columns: Mapping[str, str],
    runs: _Runs,
    wanted: NDArray[np.bool_],
    groups: Sequence[Sequence[RowGroup]],
    on_progress: OnProgress | None,
) -> Iterator[SequenceBlock]:
    """Decode the runs that are wanted."""
    nums, episode_returns = runs.nums, runs.sum_episodes()
    fields = _select_present(snapshot, (*_KEYS, *_CONTENT, *columns))
    ends = np.cumsum(nums)
    carried = fields.empty_table()
    first_row = 0  # of `carried`, among all rows
    for number, shard in enumerate(groups, 1):
        for group in shard:
            for rows in _read_batches(group, fields):
                # A run that goes on in the next piece waits for it.
                carried = pa.concat_tables([carried, rows])
                last_row = first_row + len(carried)
                # The last run of all rows here may go on: it is left out unless its end is known.
                first_run = int(np.searchsorted(ends, first_row, "right"))
                last_run = int(np.searchsorted(ends, last_row, "right"))
                num_whole = (int(ends[last_run - 1]) if last_run else 0) - first_row
                if num_whole <= 0:
                    continue
                own = slice(first_run, last_run)
                if wanted[own].any():
                    whole = carried.slice(0, num_whole)
                    block = _join_rows(whole, nums[own], wanted[own], episode_returns[own], columns)
                    if block is not None:
                        yield block
                carried = carried.slice(num_whole)
                first_row += num_whole
        if on_progress is not None:
            on_progress(number, len(groups))


def _read_batches(group: RowGroup, fields: pa.Schema) -> Iterator[pa.Table]:
    """Read a row group some rows at a time: the columns side by side, and a piece ahead."""
    num_rows = _count_rows_at_once(group, fields.names)
    parts = [
        row_group_batches(group.path, group.number, names, num_rows)
        for names in _divide_columns(fields)
    ]
    with ThreadPoolExecutor(len(parts) + 1, "replaylake-read") as pool:

        def read() -> list[Future[pa.Table | None]]:
            return [pool.submit(next, part, None) for part in parts]

        ahead = read()
        for _ in range(-(-group.num_rows // num_rows)):
            tables = [future.result() for future in ahead]
            ahead = read()
            rows = tables[0]
            assert rows is not None
            for table in tables[1:]:
                assert table is not None
                for name in table.schema.names:
                    rows = rows.append_column(name, table[name])
            yield conform(rows, fields)
        for future in ahead:
            future.result()


def _divide_columns(fields: pa.Schema) -> list[list[str]]:
    """Return the columns that threads read, each: those with a value a token alone."""
    heavy = [f.name for f in fields if is_list(f.type)]
    light = [f.name for f in fields if not is_list(f.type)]
    return [light, *([name] for name in heavy)]


def _count_rows_at_once(group: RowGroup, names: Sequence[str]) -> int:
    metadata = pq.read_metadata(group.path).row_group(group.number)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    # A dictionary's indices take less than the values that they become.
    size = sum(
        max(chunk.total_uncompressed_size, chunk.num_values * _VALUE_BYTES)
        for chunk in chunks
        if chunk.path_in_schema.split(".", 1)[0] in names
    )
    return int(max(1, min(group.num_rows, group.num_rows * _CHUNK_BYTES // max(1, size))))


def _join_rows(
    rows: pa.Table,
    nums: Array,
    wanted: NDArray[np.bool_],
    episode_returns: Array,
    columns: Mapping[str, str],
) -> SequenceBlock | None:
    """Return the sequences of runs of rows, of those that are wanted and have all ids.

    None if there are none. episode_returns float64: of each run's episode.
    """
    rows = rows.combine_chunks()
    starts = np.cumsum(nums) - nums
    has_ids = numbers(rows[tokens.ACTION_TOKENS].is_valid())
    wanted = wanted & np.logical_and.reduceat(has_ids, starts)
    if not wanted.any():
        return None
    if not wanted.all():
        rows = rows.filter(pa.array(np.repeat(wanted, nums))).combine_chunks()
        nums, episode_returns = nums[wanted], episode_returns[wanted]
        starts = np.cumsum(nums) - nums
    observed, acted, final = (
        _count_values(rows, name)
        for name in (
            tokens.OBSERVATION_TOKENS,
            tokens.ACTION_TOKENS,
            tokens.FINAL_OBSERVATION_TOKENS,
        )
    )
    is_last = np.zeros(len(rows), np.bool_)
    is_last[starts + nums - 1] = True
    lengths = observed + acted + np.where(is_last, final, 0)
    parts = _Parts(observed, acted, np.where(is_last, final, 0))
    token_ids = np.empty(int(lengths.sum()), np.int32)
    token_ids[parts.is_sampled] = _flatten(rows[tokens.ACTION_TOKENS])
    token_ids[parts.is_observed] = _flatten(rows[tokens.OBSERVATION_TOKENS])
    if parts.is_final is not None:
        last_rows = rows[tokens.FINAL_OBSERVATION_TOKENS].filter(pa.array(is_last))
        token_ids[parts.is_final] = _flatten(last_rows)
    trained = find_trained_tokens({n: rows[n].chunk(0) for n in rows.schema.names}, acted)
    loss_mask = np.zeros(len(token_ids), np.bool_)
    loss_mask[parts.is_sampled] = trained
    log_probs = None
    if tokens.ACTION_LOG_PROBS in rows.schema.names:
        log_probs = parts.spread(rows[tokens.ACTION_LOG_PROBS], trained, np.dtype(np.float32))
    row_starts = np.cumsum(lengths) - lengths
    first_tokens = np.repeat(row_starts[starts], nums)
    action_starts = row_starts + observed - first_tokens
    num_runs, version_starts, versions = _find_versions(rows, acted, action_starts)
    version_ends = _find_run_ends(version_starts, num_runs, action_starts + acted)
    # A row's runs end with its action, so tokens without a version are before the first one.
    first_runs = np.minimum(np.cumsum(num_runs) - num_runs, max(0, len(version_starts) - 1))
    is_unversioned = num_runs == 0
    if len(version_starts):
        is_unversioned |= version_starts[first_runs] > action_starts
    return SequenceBlock(
        token_ids=token_ids,
        loss_mask=loss_mask,
        log_probs=log_probs,
        columns={
            name: parts.spread(rows[name], trained, _value_dtype(kind))
            for name, kind in columns.items()
        },
        lengths=np.add.reduceat(lengths, starts),
        returns=np.add.reduceat(_read_rewards(rows), starts),
        episode_returns=episode_returns,
        num_runs=np.add.reduceat(num_runs, starts),
        has_unversioned=np.logical_or.reduceat(is_unversioned & (acted > 0), starts),
        version_starts=version_starts,
        version_ends=version_ends,
        versions=versions,
        table=_describe_runs(rows, starts, nums),
    )


class _Parts:
    """Which tokens of some rows are of the observation, the action and the final observation."""

    def __init__(self, observed: Array, acted: Array, final: Array) -> None:
        """Take the number of tokens of each part of each row, int64 [n]."""
        self._acted = acted
        has_final = bool(final.any())
        counts = np.stack([observed, acted, final] if has_final else [observed, acted], axis=1)
        kinds = np.tile(np.arange(counts.shape[1], dtype=np.uint8), len(counts))
        if has_final:
            kind = np.repeat(kinds, counts.ravel())
            self.is_observed, self.is_sampled = kind == _OBSERVED, kind == _SAMPLED
            self.is_final: Array | None = kind == _FINAL
        else:
            self.is_sampled = np.repeat(kinds.astype(np.bool_), counts.ravel())
            self.is_observed, self.is_final = ~self.is_sampled, None

    def spread(self, column: pa.ChunkedArray, trained: Array, dtype: np.dtype[Any]) -> Array:
        """Return a value for each token: of lists with one for each token of the action.

        Elsewhere it is 0; where none is known, it is NaN if the loss is over the token.
        """
        values = _flatten(column).astype(dtype, copy=False)
        if column.null_count:
            known = np.repeat(numbers(column.is_valid()), self._acted)
            own = np.zeros(len(known), dtype)
            if dtype.kind == "f":
                own[trained & ~known] = np.nan
            own[known] = values
            values = own
        spread = np.zeros(len(self.is_sampled), dtype)
        spread[self.is_sampled] = values
        return spread


def _find_versions(
    rows: pa.Table, acted: Array, action_starts: Array
) -> tuple[Array, Array, Array]:
    """Return of each row the number of runs of one version, and the runs' starts and versions.

    action_starts int64 [n]: the first token of each row's action, within its sequence.
    """
    num_runs = np.zeros(len(rows), np.int64)
    versions = np.zeros(0, np.int64)
    is_known = np.zeros(len(rows), np.bool_)
    if schema.POLICY_VERSION in rows.schema.names:
        column = rows[schema.POLICY_VERSION]
        is_known = numbers(column.is_valid()) & (acted > 0)
        num_runs[is_known] = 1
        versions = numbers(pc.fill_null(column, scalar(NO_VERSION, np.int64))).astype(np.int64)
    if tokens.ACTION_VERSIONS not in rows.schema.names or not (
        len(rows) - rows[tokens.ACTION_VERSIONS].null_count
    ):
        return num_runs, action_starts[is_known].astype(np.int32), versions[is_known]
    column = rows[tokens.ACTION_VERSIONS]
    has_own = numbers(column.is_valid())
    num_runs[has_own] = _count_values(rows, tokens.ACTION_VERSIONS)[has_own]
    own = combine_chunks(pc.list_flatten(column))
    is_own = np.repeat(has_own, num_runs)
    starts = np.repeat(action_starts, num_runs)
    values = np.empty(len(starts), np.int64)
    starts[is_own] += numbers(pc.struct_field(own, "start"))
    values[is_own] = numbers(pc.struct_field(own, "version"))
    if not is_own.all():
        values[~is_own] = versions[is_known & ~has_own]
    return num_runs, starts.astype(np.int32), values


def _find_run_ends(version_starts: Array, num_runs: Array, action_ends: Array) -> Array:
    """Return the end of each run: the beginning of the next one of the same action, or its end."""
    ends = np.roll(version_starts, -1)
    lasts = np.cumsum(num_runs)[num_runs > 0] - 1
    ends[lasts] = action_ends[num_runs > 0]
    return ends.astype(np.int32)


def _describe_runs(rows: pa.Table, starts: Array, nums: Array) -> pa.Table:
    heads = rows.select([schema.EPISODE_ID, schema.AGENT_ID]).take(pa.array(starts))
    agents = heads[schema.AGENT_ID].cast(pa.string())
    groups = pa.nulls(len(starts), pa.string())
    if GROUP_ID in rows.schema.names:
        column = rows[GROUP_ID]
        places = np.where(numbers(column.is_valid()), np.arange(len(rows)), len(rows))
        first = np.minimum.reduceat(places, starts)
        is_absent = first == len(rows)
        groups = column.take(pa.array(first, mask=is_absent)).cast(pa.string())
    last_steps = numbers(rows[schema.STEP])[starts + nums - 1].astype(np.int32)
    return pa.table(
        [
            heads[schema.EPISODE_ID].cast(pa.string()),
            agents,
            agents,
            pa.array(np.zeros(len(starts), np.int32)),
            pa.array(last_steps),
            pa.array(nums),
            groups,
        ],
        schema=TABLE_SCHEMA,
    )


def _read_rewards(rows: pa.Table) -> Array:
    return numbers(rows[schema.REWARD]).astype(np.float64)


def _count_values(rows: pa.Table, name: str) -> Array:
    if name not in rows.schema.names:
        return np.zeros(len(rows), np.int64)
    lengths: Array = numbers(
        pc.fill_null(pc.list_value_length(rows[name]), scalar(0, np.int32))
    ).astype(np.int64)
    return lengths


def _flatten(column: pa.ChunkedArray) -> Array:
    return numbers(combine_chunks(pc.list_flatten(column)))


def _value_dtype(kind: str) -> np.dtype[Any]:
    return np.dtype(np.bool_ if kind == "BOOLEAN" else np.float32)


def _query_others(
    snapshot: TableSnapshot,
    paths: Sequence[Path],
    columns: Mapping[str, str],
    runs: _Runs,
    is_other: NDArray[np.bool_],
    selected: pa.Table | None,
) -> Iterator[SequenceBlock]:
    """Query the sequences of the episodes of some runs, in the order of their ids."""
    if not is_other.any():
        return
    ids = pc.unique(runs.episode_ids.filter(pa.array(is_other)))
    others = runs.episode_ids.dictionary_encode()
    steps_each = np.bincount(numbers(others.indices), weights=runs.nums)
    order = pc.sort_indices(ids)
    ids = ids.take(order)
    num_steps = steps_each[numbers(pc.index_in(ids, value_set=others.dictionary))]
    part = np.cumsum(num_steps) // _count_steps_at_once(snapshot, paths)
    steps = f"(FROM {scan(snapshot, paths)} SEMI JOIN wanted_episodes USING (episode_id))"
    select = sequences_sql(steps, snapshot.schema, snapshot.schema.names)
    if selected is not None:
        select = f"FROM ({select}) SEMI JOIN selected_agents USING (episode_id, agent_id)"
    has_log_probs = tokens.ACTION_LOG_PROBS in snapshot.schema.names
    num_final = "0"
    if tokens.FINAL_OBSERVATION_TOKENS in snapshot.schema.names:
        num_final = f"coalesce(len({tokens.FINAL_OBSERVATION_TOKENS}), 0)"
    query = (
        f"SELECT * FROM ({select}) JOIN (SELECT episode_id, agent_id, step AS last_step, "
        f"CAST({num_final} AS BIGINT) AS num_final FROM {steps}) "
        "USING (episode_id, agent_id, last_step) ORDER BY episode_id, agent_id, last_step"
    )
    for number in np.unique(part).tolist():
        tables = {
            "wanted_episodes": pa.table({schema.EPISODE_ID: ids.filter(pa.array(part == number))})
        }
        if selected is not None:
            tables["selected_agents"] = selected
        with session() as connection, registered(connection, tables):
            yield _read_rows(execute(connection, query), columns, has_log_probs)


def _count_steps_at_once(snapshot: TableSnapshot, paths: Sequence[Path]) -> int:
    size = sum(
        metadata.row_group(number).total_byte_size
        for metadata in map(pq.read_metadata, paths)
        for number in range(metadata.num_row_groups)
    )
    return int(max(1, snapshot.num_rows * _QUERY_BYTES // max(1, size)))


def _read_rows(table: pa.Table, columns: Mapping[str, str], has_log_probs: bool) -> SequenceBlock:
    """Return rows of `sequences`."""
    table = table.combine_chunks()
    loss_mask = _flatten(table["loss_mask"]).astype(np.bool_)

    def read(name: str, dtype: np.dtype[Any]) -> Array:
        values = combine_chunks(pc.list_flatten(table[name]))
        known = numbers(values.is_valid())
        array = np.zeros(len(values), dtype)
        array[known] = numbers(values.drop_null()).astype(dtype)
        if dtype.kind == "f":
            array[~known & loss_mask] = np.nan
        return array

    runs = combine_chunks(pc.list_flatten(table["versions"]))
    version_starts = numbers(pc.struct_field(runs, "start")).astype(np.int32)
    version_ends, num_sampled = _find_turn_ends(table, version_starts)
    num_runs = _count_values(table, "versions")
    # `reduceat` has no sum of nothing.
    num_versioned = np.diff(
        np.append(0, np.cumsum(version_ends - version_starts))[np.append(0, np.cumsum(num_runs))]
    )
    return SequenceBlock(
        token_ids=_flatten(table["token_ids"]).astype(np.int32),
        loss_mask=loss_mask,
        log_probs=read("log_probs", np.dtype(np.float32)) if has_log_probs else None,
        columns={name: read(name, _value_dtype(kind)) for name, kind in columns.items()},
        lengths=_count_values(table, "token_ids"),
        returns=numbers(table["return"]).astype(np.float64),
        episode_returns=numbers(table["episode_return"]).astype(np.float64),
        num_runs=num_runs,
        has_unversioned=num_versioned < num_sampled,
        version_starts=version_starts,
        version_ends=version_ends,
        versions=numbers(pc.struct_field(runs, "version")).astype(np.int64),
        table=conform(table.select(TABLE_SCHEMA.names), TABLE_SCHEMA),
    )


def _find_turn_ends(table: pa.Table, version_starts: Array) -> tuple[Array, Array]:
    """Return the end of each run of rows of `sequences`: of the next run, or of its action.

    And the number of tokens that were sampled, of each row.
    """
    lengths, num_turns = _count_values(table, "token_ids"), _count_values(table, "turn_starts")
    offsets = np.cumsum(lengths) - lengths
    ends = offsets + lengths - numbers(table["num_final"])
    action_starts = _flatten(table["action_starts"]) + np.repeat(offsets, num_turns)
    # An action ends where the next turn begins, the last one before the final observation.
    turn_starts = _flatten(table["turn_starts"]) + np.repeat(offsets, num_turns)
    turn_ends = np.roll(turn_starts, -1)
    turn_ends[np.cumsum(num_turns) - 1] = ends
    num_sampled = np.add.reduceat(turn_ends - action_starts, np.cumsum(num_turns) - num_turns)
    run_offsets = np.repeat(offsets, _count_values(table, "versions"))
    starts = version_starts + run_offsets
    own_ends = turn_ends[np.searchsorted(action_starts, starts, "right") - 1]
    run_ends = np.minimum(own_ends, np.append(starts[1:], own_ends[-1:]))
    return (run_ends - run_offsets).astype(np.int32), num_sampled
