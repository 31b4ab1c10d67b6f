"""Delete: episodes leave a dataset from now on, and what was served for them with them.

An episode goes with all its pieces and all its agents. Earlier versions keep it until vacuum; purge
(purge.py) takes it out of those as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    POLICY,
    SOURCE_EPISODE_ID,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
)
from replaylake.datastore.errors import QueryRefusedError, ReplayLakeError
from replaylake.datastore.feedback.decisions import DECISION_ID, recover_feedback
from replaylake.datastore.feedback.received_table import recover_received
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.tombstones import merge_subjects
from replaylake.datastore.maintenance.episode_condition import EpisodeCondition, make_condition
from replaylake.datastore.maintenance.removal import (
    count_decisions,
    count_hits,
    count_received,
    count_rejected,
    find_decisions,
    find_identities,
    find_returned,
    find_subjects,
    plan_removal,
    recover_spans,
    remove_decisions,
    remove_received,
    remove_rejected,
    remove_spans,
    select_ids,
    select_rejected,
    select_waiting,
    set_aside_of,
)
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    scan_connection,
)
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.rewrite import RewritePlan, rewrite
from replaylake.datastore.storage.table.table import TableSnapshot

# Episodes that a dry run names.
_NUM_LISTED: Final = 10
# What is deleted by its value in one of these stays deleted. An `episode_id` is our own, and often
# deleted to write the episode again; a policy's name goes on to act.
_SUBJECT_COLUMNS: Final = (SOURCE_EPISODE_ID, AGENT_ID)
# A purge means those, too: in transcripts policies are people.
PURGED_COLUMNS: Final = (EPISODE_ID, SOURCE_EPISODE_ID, AGENT_ID, POLICY)


@dataclass(frozen=True)
class DeleteReceipt:
    """What was deleted, or with `dry_run` would be.

    version: the commit; None if nothing was there to delete. Counts of the episodes, their steps,
    and the decisions and rewards that they were made of, or that waited to become one of their
    steps; num_rejected: their rows in quarantine; num_received: those that clients sent as
    episodes. steps_left: what the dataset holds afterwards. num_undecided: episodes in quarantine
    that stay, because the condition depends on values that are not known of them. num_tombstones:
    values that the dataset refuses from now on. policies: those that were trained on the episodes,
    each with the number of these episodes, or None if that version can no longer be read; they act
    as before. In a dry run, num_bytes: the bytes of the shards, in proportion to the deleted steps;
    first_episodes: the first ids, sorted.
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
    num_tombstones: int = 0
    policies: Mapping[str, int | None] = field(default_factory=dict)
    num_bytes: int | None = None
    first_episodes: tuple[str, ...] = ()

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


def delete(
    lake: Lake, dataset: str, where: str | EpisodeCondition | None, *, dry_run: bool = False
) -> DeleteReceipt:
    """Delete the episodes that a condition selects, from the newest version on.

    Args:
        lake: the lake.
        dataset: its name.
        where: an SQL condition over episodes, as for Snapshot.replay, which may have subqueries, or
            a condition of `condition_of_ids`. It also selects episodes in quarantine, for which
            the ids, num_steps, policy and its versions and the log's own columns are known, and
            received episodes that have no step in the dataset yet. None selects what was deleted
            before and is stored again, for example after a backup was restored.
        dry_run: only count, and name the first episodes. Records in the journals of killed servers
            are then not counted.

    If the condition consists of nothing but comparisons of source_episode_id, agent_id or further
    columns with values, rows with one of these values, and the deleted episodes, are refused from
    now on. Otherwise, if another writer appends to such an episode later, the new steps are stored:
    close the episode first, or delete it again. Raises: NotFoundError, QueryRefusedError,
    QueryError, ShardCorruptError.
    """
    handle = lake.dataset(dataset)
    snapshot = handle.snapshot().table
    condition = make_condition(lake, dataset, where) if isinstance(where, str) else where
    if not dry_run and handle.decisions.exists() and handle.rewards.exists():
        recover_feedback(handle)
    if not dry_run:
        recover_received(handle)
        recover_spans(handle)
    chosen = _choose(handle, snapshot, condition)
    episodes, num_undecided = chosen.episodes, len(chosen.undecided)
    policies = find_trained_policies(lake, dataset, episodes)
    if dry_run:
        hits = count_hits(snapshot, EPISODE_ID, episodes)
        num_steps = sum(num for _, num in hits)
        keys = find_feedback(handle, snapshot, episodes)
        keys = pa.chunked_array([keys, chosen.decisions]).combine_chunks().unique()
        decisions, rewards = count_decisions(handle, keys)
        num_left = snapshot.num_rows - num_steps
        others = (count_rejected(handle, episodes), count_received(handle, episodes))
        counts = (num_steps, decisions, rewards, *others)
        return DeleteReceipt(
            dataset,
            True,
            None,
            len(episodes),
            *counts,
            num_left,
            num_undecided,
            policies=policies,
            # In proportion: what is left of a shard is written again.
            num_bytes=round(sum(e.size_bytes * num / e.num_rows for e, num in hits)),
            first_episodes=tuple(sorted(episodes.to_pylist())[:_NUM_LISTED]),
        )
    num_tombstones = 0
    subjects: dict[str, list[str]] = {}
    if condition is not None:
        subjects = find_subjects(handle, condition, columns=_SUBJECT_COLUMNS)
    if subjects:
        # Before they go: a source that sends them meanwhile is refused.
        num_tombstones = handle.tombstones.add(
            merge_subjects(subjects, find_identities(handle, episodes))
        )
        # What was appended meanwhile goes, too; whoever commits from here on finds the tombstones.
        chosen = _choose(handle, handle.snapshot().table, condition)
        episodes, num_undecided = chosen.episodes, len(chosen.undecided)
    more = remove_decisions(handle, chosen.decisions, "DELETE")
    receipt = remove_episodes(handle, episodes, operation="DELETE", producer=f"delete/{new_ulid()}")
    return DeleteReceipt(
        dataset,
        False,
        receipt.version,
        len(episodes),
        receipt.num_steps,
        receipt.num_decisions + more[0],
        receipt.num_rewards + more[1],
        receipt.num_rejected,
        receipt.num_received,
        handle.table.snapshot().num_rows,
        num_undecided,
        num_tombstones,
        policies,
    )


def readmit(lake: Lake, dataset: str, where: str) -> int:
    """Let what was deleted by a condition come again; return how many values of it had been.

    `where` asks for values of columns and for nothing else, such as `source_episode_id = 'x'`.
    Nothing comes back by itself. Raises: NotFoundError, QueryRefusedError, QueryError.
    """
    handle = lake.dataset(dataset)
    condition = make_condition(lake, dataset, where)
    values = find_subjects(handle, condition, columns=PURGED_COLUMNS)
    if not values:
        raise QueryRefusedError(
            f"readmit {dataset}: found {where!r}, expected values of columns and nothing else, "
            "such as source_episode_id = 'a' or agent_id IN ('b', 'c')."
        )
    return handle.tombstones.lift(values)


@dataclass(frozen=True)
class _Choice:
    """Ids of episodes to delete, of decisions that are in none of them, and of undecided ones."""

    episodes: pa.Array
    decisions: pa.Array
    undecided: pa.Array


def _choose(
    handle: Dataset, snapshot: TableSnapshot, condition: EpisodeCondition | None
) -> _Choice:
    none = pa.array([], pa.string())
    if condition is None:
        returned = find_returned(handle)
        return _Choice(returned.episodes, returned.decisions, none)
    ids = [select_episode_ids(snapshot, condition)]
    undecided = none
    if handle.rejected.exists():
        rejected = select_rejected(handle.rejected.snapshot(), condition)
        ids.append(rejected.selected)
        undecided = rejected.undecided
    ids.append(select_waiting(handle, snapshot, condition))
    episodes = pa.chunked_array(ids, pa.string()).combine_chunks().unique()
    return _Choice(
        episodes, none, undecided.filter(pc.invert(pc.is_in(undecided, value_set=episodes)))
    )


def select_episode_ids(snapshot: TableSnapshot, condition: str | EpisodeCondition) -> pa.Array:
    """Return the ids of the episodes that a condition, as text in DuckDB's spelling, selects."""
    check_shards_present(snapshot)
    if isinstance(condition, str):
        condition = EpisodeCondition(condition)
    return select_ids(snapshot, condition)


def remove_episodes(
    handle: Dataset, episodes: pa.Array, *, operation: str, producer: str
) -> RemovalCounts:
    """Take episodes out of the newest version, and before them what else is theirs.

    That is their decisions, rewards, rows in quarantine, received steps and received spans.
    """
    nums = [0, 0, 0, 0, 0]

    def plan(snapshot: TableSnapshot) -> RewritePlan:
        decisions = find_feedback(handle, snapshot, episodes)
        counts = remove_decisions(handle, decisions, operation)
        nums[0], nums[1] = nums[0] + counts[0], nums[1] + counts[1]
        nums[4] += remove_received(handle, episodes, operation)
        remove_spans(handle, snapshot, episodes, operation)
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


def find_trained_policies(lake: Lake, dataset: str, episodes: pa.Array) -> dict[str, int | None]:
    """Return the policies whose training selected some of the episodes, and how many of them.

    None stands for a policy whose version of the dataset can be read no more: it may have. Cost: a
    scan for each version and condition that some policy was trained with.
    """
    counts: dict[tuple[int, str | None], int | None] = {}
    policies: dict[str, int | None] = {}
    # A deleted version may still be served somewhere, from a package of its own.
    for (policy, policy_version), lineage in lake.registry.lineages(deleted=True).items():
        for selection in lineage.get("datasets", ()):
            if selection["dataset"] != dataset:
                continue
            key = (int(selection["version"]), selection.get("where"))
            if key not in counts:
                counts[key] = _num_selected(lake, dataset, key, episodes)
            if counts[key] != 0:
                policies[f"{policy}:{policy_version}"] = counts[key]
    return policies


def _num_selected(
    lake: Lake, dataset: str, key: tuple[int, str | None], episodes: pa.Array
) -> int | None:
    version, where = key
    try:
        snapshot = lake.dataset(dataset).snapshot(version).table
        selected = select_episode_ids(snapshot, where or f"{EPISODE_ID} IS NOT NULL")
    except ReplayLakeError:
        return None
    return pc.sum(pc.is_in(selected, value_set=episodes)).as_py() or 0
