"""Served versions: which policy version answered when, as the tables of decisions tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaylake.datastore.episodes.schema import POLICY, POLICY_VERSION, TIMESTAMP
from replaylake.datastore.lake.lake import Lake


@dataclass(frozen=True)
class ServedVersion:
    """The decisions that a version made into one dataset: how many, the first and the last."""

    policy: str
    version: int
    dataset: str
    first_at: datetime
    last_at: datetime
    num_decisions: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, times in ISO 8601."""
        return {
            "policy": self.policy,
            "version": self.version,
            "dataset": self.dataset,
            "first_at": self.first_at.isoformat(timespec="milliseconds"),
            "last_at": self.last_at.isoformat(timespec="milliseconds"),
            "num_decisions": self.num_decisions,
        }


def list_served_versions(
    lake: Lake, policy: str | None = None, versions: Iterable[int] | None = None
) -> list[ServedVersion]:
    """Return when versions of a policy, or of all, answered, by policy, version and dataset.

    versions: which of its versions; None: all. What servers have not committed yet is not in it.
    Cost: a scan of three narrow columns of every table of decisions.
    """
    tables = [name for name in lake.datasets() if lake.dataset(name).decisions.exists()]
    numbers = None if versions is None else set(versions)
    result = []
    for dataset in tables:
        rows = lake.sql(
            f"SELECT {POLICY} AS policy, {POLICY_VERSION} AS version, "
            f"min({TIMESTAMP}) AS first_at, max({TIMESTAMP}) AS last_at, "
            f"count(*) AS num_decisions FROM {dataset}.decisions "
            f"WHERE $policy IS NULL OR {POLICY} = $policy GROUP BY ALL",
            {"policy": policy},
        ).to_pylist()
        result += [
            ServedVersion(dataset=dataset, **row)
            for row in rows
            if numbers is None or row["version"] in numbers
        ]
    return sorted(result, key=lambda one: (one.policy, one.version, one.dataset))
