"""Recorded: what a run has committed, from which it goes on; the dataset alone says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from replaylake.datastore.dataset import Dataset

# In a commit's info: episodes that will not go on, of which only pieces are there.
ABANDONED: Final = "abandoned_episodes"


@dataclass(frozen=True)
class Recorded:
    """What a look at a version of the dataset found.

    num_episodes: that ended. left_open: ids of those that did not, and that no commit names.
    policy_version: the highest that acted, -1 where nothing was committed.
    """

    version: int
    num_steps: int
    num_episodes: int
    left_open: tuple[str, ...]
    policy_version: int


def recorded(dataset: Dataset, run_id: str, *, since: int) -> Recorded:
    """Return what a run has committed after the dataset's version `since`.

    Cost: a look at the summaries of the episodes, and at the infos of the commits since then.
    """
    own: dict[str, object] = {"prefix": f"online/{run_id}"}
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
    named = {episode for info in infos for episode in info.get(ABANDONED, ())}
    left_open = tuple(e for e in rows["episode_id"].to_pylist() if e not in named)
    return Recorded(snapshot.version, **totals, left_open=left_open)
