"""Delete: episodes leave a dataset from now on, and what was served for them with them.

An episode goes with all its pieces and all its agents. Earlier versions keep it until vacuum; purge
(purge.py) takes it out of those as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import (
    EPISODE_ID,
    SOURCE_EPISODE_ID,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
)
from replaylake.datastore.feedback.decisions import DECISION_ID, recover_feedback
from replaylake.datastore.feedback.received_table import recover_received
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.removal import (
    count_decisions,
    count_received,
    count_rejected,
    find_decisions,
    plan_removal,
    remove_decisions,
    remove_received,
    remove_rejected,
    select_rejected,
    select_waiting,
    set_aside_of,
)
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.expressions import canonical_expression, select_episode_keys
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    scan_connection,
)
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.rewrite import RewritePlan, rewrite
from replaylake.datastore.storage.table.table import TableSnapshot


@dataclass(frozen=True)
class DeleteReceipt:
    """What was deleted, or with `dry_run` would be.

    version: the commit; None if nothing was there to delete. Counts of the episodes, their steps,
    and the decisions and rewards that they were made of, or that waited to become one of their
    steps; num_rejected: their rows in quarantine; num_received: those that clients sent as
    episodes. steps_left: what the dataset holds afterwards. num_undecided: episodes in quarantine
    that stay, as the condition asks what is not known of them.
    """

    dataset: str
    dry_run: bool
    version: int | None
    num_episodes: int
    num_steps: int
    num_decisions: int
    num_rewards: int
    num_rejected: int
    num_received: int
    steps_left: int
    num_undecided: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RemovalCounts:
    """What left the newest versions; `version` is None if no step did."""

    version: int | None
    num_steps: int
    num_decisions: int
    num_rewards: int
    num_rejected: int
    num_received: int


def delete(lake: Lake, dataset: str, where: str, *, dry_run: bool = False) -> DeleteReceipt:
    """Delete the episodes that a condition selects, from the newest version on.

    Args:
        lake: the lake.
        dataset: its name.
        where: an SQL condition over the columns of `episodes`, as for Snapshot.replay. It selects
            from the quarantine too, of whose episodes the ids, num_steps, policy and its versions
            are known, and from what was received of episodes that have no step in the dataset yet.
        dry_run: only count. What waits in the journals of killed servers is then not counted.

    What another writer appends to such an episode afterwards comes back: close it before, or delete
    again. Raises: NotFoundError, QueryRefusedError, QueryError, ShardCorruptError.
    """
    handle = lake.dataset(dataset)
    condition = canonical_expression(where)
    snapshot = handle.snapshot().table
    if not dry_run and handle.decisions.exists() and handle.rewards.exists():
        recover_feedback(handle)
    if not dry_run:
        recover_received(handle)
    ids = [select_episode_ids(snapshot, condition)]
    undecided = pa.array([], pa.string())
    if handle.rejected.exists():
        rejected = select_rejected(handle.rejected.snapshot(), condition)
        ids.append(rejected.selected)
        undecided = rejected.undecided
    ids.append(select_waiting(handle, snapshot, condition))
    episodes = pa.chunked_array(ids, pa.string()).combine_chunks().unique()
    num_undecided = len(undecided.filter(pc.invert(pc.is_in(undecided, value_set=episodes))))
    if dry_run:
        num_steps = plan_removal(snapshot, EPISODE_ID, episodes).num_rows
        decisions, rewards = count_decisions(handle, find_feedback(handle, snapshot, episodes))
        num_left = snapshot.num_rows - num_steps
        others = (count_rejected(handle, episodes), count_received(handle, episodes))
        counts = (num_steps, decisions, rewards, *others)
        return DeleteReceipt(dataset, True, None, len(episodes), *counts, num_left, num_undecided)
    receipt = remove_episodes(handle, episodes, operation="DELETE", producer=f"delete/{new_ulid()}")
    return DeleteReceipt(
        dataset,
        False,
        receipt.version,
        len(episodes),
        receipt.num_steps,
        receipt.num_decisions,
        receipt.num_rewards,
        receipt.num_rejected,
        receipt.num_received,
        handle.table.snapshot().num_rows,
        num_undecided,
    )


def select_episode_ids(snapshot: TableSnapshot, condition: str) -> pa.Array:
    """Return the ids of the episodes that a condition in DuckDB's spelling selects."""
    check_shards_present(snapshot)
    ids = select_episode_keys(snapshot, condition).column(EPISODE_ID)
    return ids.combine_chunks().unique()


def remove_episodes(
    handle: Dataset, episodes: pa.Array, *, operation: str, producer: str
) -> RemovalCounts:
    """Take episodes out of the newest version, and before them what else is theirs.

    That is their decisions, rewards, rows in quarantine and received ones.
    """
    nums = [0, 0, 0, 0, 0]

    def plan(snapshot: TableSnapshot) -> RewritePlan:
        decisions = find_feedback(handle, snapshot, episodes)
        counts = remove_decisions(handle, decisions, operation)
        nums[0], nums[1] = nums[0] + counts[0], nums[1] + counts[1]
        nums[4] += remove_received(handle, episodes, operation)
        planned = plan_removal(snapshot, EPISODE_ID, episodes, {"episodes_removed": len(episodes)})
        nums[2] = planned.num_rows
        nums[3] += remove_rejected(handle, episodes, operation)
        return planned.plan

    sequence = handle.next_sequence(producer)
    result = rewrite(handle.table, plan, producer=producer, sequence=sequence, operation=operation)
    num_steps = nums[2] if result else 0
    return RemovalCounts(result.version if result else None, num_steps, nums[0], nums[1], *nums[3:])


def find_feedback(handle: Dataset, steps: TableSnapshot, episodes: pa.Array) -> pa.Array:
    """Return the decisions that episodes are made of, and those that would be again.

    Those would continue open ones, or were set aside.
    """
    columns = [find_decisions(handle, steps, episodes), set_aside_of(handle, steps, episodes)]
    if len(columns[0]) and handle.decisions.exists():
        columns.append(_find_continuing(handle.decisions.snapshot(), steps, episodes))
    return pa.chunked_array(columns).combine_chunks().unique()


def _find_continuing(
    decisions: TableSnapshot, steps: TableSnapshot, episodes: pa.Array
) -> pa.Array:
    """Return decisions of no step, later than any, under a client's id whose last episode is open.

    Only where that last one is among `episodes`: what follows an end begins another episode.
    """
    if not decisions.files:
        return pa.array([], pa.string())
    tables = {"chosen": pa.table({"key": episodes})}
    with (
        fetch_files(steps, steps.files) as step_paths,
        fetch_files(decisions, decisions.files) as paths,
        scan_connection(tables) as connection,
    ):
        written = from_clause(steps, step_paths)
        last = (
            f"SELECT {SOURCE_EPISODE_ID} AS source, max({TIMESTAMP}) AS decided, "
            f"arg_max({EPISODE_ID}, {TIMESTAMP}) AS episode, "
            f"arg_max({TERMINATED} OR {TRUNCATED}, {TIMESTAMP}) AS has_ended "
            f"FROM {written} WHERE {DECISION_ID} IS NOT NULL AND {SOURCE_EPISODE_ID} IS NOT NULL "
            "GROUP BY source"
        )
        rows = query_arrow(
            connection,
            f"SELECT {DECISION_ID} AS key FROM {from_clause(decisions, paths)} d JOIN ({last}) "
            f"ON d.{EPISODE_ID} = source AND d.{TIMESTAMP} > decided "
            "WHERE NOT has_ended AND episode IN (SELECT key FROM chosen)",
        )
    return rows.column("key").combine_chunks()
