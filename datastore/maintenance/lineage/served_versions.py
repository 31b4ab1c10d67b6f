"""Served versions: which policy version answered when, as decisions and recorded calls tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaylake.datastore.episodes.schema import POLICY, POLICY_VERSION, TIMESTAMP
from replaylake.datastore.feedback.recorded_calls import CALL_STATUS
from replaylake.datastore.lake.lake import Lake


@dataclass(frozen=True)
class ServedVersion:
    """The decisions that a version made into one dataset: how many, the first and the last.

    A decision of a language model is a recorded call.
    """

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
    Cost: a scan of three narrow columns of every table of decisions, and of every dataset of calls.
    """
    numbers = None if versions is None else set(versions)
    names = lake.datasets()
    tables = [(one, "decisions") for one in names if lake.dataset(one).decisions.exists()]
    tables += [(one, "steps") for one in names if CALL_STATUS in lake.dataset(one).spec.extras]
    # A gateway records the versions of other models as well.
    registered = {name for name, _ in lake.registry.lineages(deleted=True)}
    result = []
    for dataset, view in tables:
        rows = lake.sql(
            f"SELECT {POLICY} AS policy, {POLICY_VERSION} AS version, "
            f"min({TIMESTAMP}) AS first_at, max({TIMESTAMP}) AS last_at, "
            f"count(*) AS num_decisions FROM {dataset}.{view} "
            f"WHERE ($policy IS NULL OR {POLICY} = $policy) AND {POLICY_VERSION} IS NOT NULL "
            "GROUP BY ALL",
            {"policy": policy},
        ).to_pylist()
        result += [
            ServedVersion(dataset=dataset, **row)
            for row in rows
            if (numbers is None or row["version"] in numbers) and row["policy"] in registered
        ]
    return sorted(result, key=lambda one: (one.policy, one.version, one.dataset))
