"""Recorded: what a run has committed, from which it goes on; the dataset alone says it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.dataset import Dataset

# In a commit's info: episodes that will not go on, of which only pieces are there.
ABANDONED: Final = "abandoned_episodes"


@dataclass(frozen=True)
class CommittedSteps:
    """What a look at a version of the dataset found.

    num_episodes: that ended. left_open: ids of those that did not, and that no commit names.
    policy_version: the highest that acted, -1 where nothing was committed.
    """

    version: int
    num_steps: int
    num_episodes: int
    left_open: tuple[str, ...]
    policy_version: int


@dataclass(frozen=True)
class CollectedData:
    """What a run has collected when it ends, as its policy's lineage keeps it.

    version: of the dataset, after the run's last commit. num_episodes: of which steps were
    recorded, also those without an end; each agent's part in a game is one. producers: whose
    commits they came by, one for each attempt. content_hash: sha256 over the sorted sha256 of the
    shards of `version` that were not there when the run began, as hex; None where it recorded
    nothing.
    """

    version: int
    num_steps: int
    num_episodes: int
    producers: tuple[str, ...]
    content_hash: str | None


def producer_of(run_id: str, attempt: int = 0) -> str:
    """Return the producer of a run's commits; attempt: how often it has gone on."""
    return f"online/{run_id}" + (f"/{attempt}" if attempt else "")


def read_collected(dataset: Dataset, run_id: str, *, since: int) -> CollectedData:
    """Return what a run has collected after the dataset's version `since`.

    Cost: as `recorded`; the shards are not read, their hashes are in the log.
    """
    snapshot = dataset.snapshot()
    (totals,) = snapshot.sql(
        "SELECT CAST(coalesce(sum(num_steps), 0) AS BIGINT) AS num_steps, "
        "count(*) AS num_episodes FROM episodes WHERE starts_with(episode_id, $prefix)",
        {"prefix": producer_of(run_id)},
    ).to_pylist()
    known = (info.get("producer") for info in dataset.table.log.history(since))
    own = dict.fromkeys(p for p in known if p and p.startswith(producer_of(run_id)))
    files = set(snapshot.files)
    # Gone from the log where old versions are not kept: then all that there is counts.
    with suppress(NotFoundError):
        files -= set(dataset.snapshot(since).files)
    digest = hashlib.sha256()
    for sha256 in sorted(entry.sha256 for entry in files):
        digest.update(sha256.encode())
    content_hash = digest.hexdigest() if totals["num_steps"] else None
    return CollectedData(
        snapshot.version, **totals, producers=tuple(own), content_hash=content_hash
    )


def read_committed(dataset: Dataset, run_id: str, *, since: int) -> CommittedSteps:
    """Return what a run has committed after the dataset's version `since`.

    Cost: a look at the summaries of the episodes, and at the infos of the commits since then.
    """
    own: dict[str, object] = {"prefix": producer_of(run_id)}
    snapshot = dataset.snapshot()
    (totals,) = snapshot.sql(
        "SELECT CAST(coalesce(sum(num_steps), 0) AS BIGINT) AS num_steps, "
        "count(*) FILTER (complete) AS num_episodes, "
        "coalesce(max(max_policy_version), -1) AS policy_version "
        "FROM episodes WHERE starts_with(episode_id, $prefix)",
        own,
    ).to_pylist()
    rows = snapshot.sql(
        "SELECT DISTINCT episode_id FROM episodes "
        "WHERE starts_with(episode_id, $prefix) AND NOT complete ORDER BY episode_id",
        own,
    )
    infos = dataset.table.log.history(since)
    abandoned = {episode for info in infos for episode in info.get(ABANDONED, ())}
    left_open = tuple(e for e in rows["episode_id"].to_pylist() if e not in abandoned)
    return CommittedSteps(snapshot.version, **totals, left_open=left_open)
