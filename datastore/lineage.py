"""Lineage: a served decision, a policy or a dataset, traced through what the lake has recorded.

decision -> policy version -> run -> dataset@version, SQL, content hash -> ingests
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from replaylake.datastore.dataset import Dataset
from replaylake.datastore.errors import NotFound
from replaylake.datastore.lake import Lake
from replaylake.datastore.policies.registry import PolicyRef
from replaylake.datastore.sessions.decision_id import DecisionId, DecisionSigner


def of_decision(lake: Lake, decision_id: str) -> dict[str, Any]:
    """Trace a decision id that the lake signed; `decision`, then what of_policy returns.

    Raises: NotFound if no dataset of this lake signed it.
    """
    dataset, said = _signed_by(lake, decision_id)
    ref = lake.registry.resolve(f"{said.policy}:{said.policy_version}")
    decision = {
        "decision_id": decision_id,
        "dataset": dataset.name,
        "policy": said.policy,
        "version": said.policy_version,
        "decided_at": _time(said.timestamp / 1000),
        "worker": said.worker,
        **_logged(lake, dataset, decision_id),
    }
    return {"decision": decision, **_trace(lake, ref)}


def of_policy(lake: Lake, text: str) -> dict[str, Any]:
    """Trace `name:version`, `name@alias` or `name`: its `policy`, `run`, and `datasets`.

    Each dataset has the version, the SQL (`where`, `where_steps`, `reward`), the options, the
    content hash and the counts of what was selected, and its `ingests` up to that version; None for
    what a policy of an earlier release does not say. Raises: NotFound, NameRefused.
    """
    return _trace(lake, lake.registry.resolve(text))


def of_dataset(lake: Lake, name: str) -> dict[str, Any]:
    """Trace a dataset both ways: its `ingests`, and `policies` trained on it. Raises: NotFound."""
    dataset = lake.dataset(name)
    snapshot = dataset.snapshot()
    policies = []
    for row in lake.registry.list():
        entry = lake.registry.show(lake.registry.resolve(f"{row['policy']}:{row['version']}"))
        for selection in entry["lineage"].get("datasets", ()):
            if selection["dataset"] == name:
                policies.append(
                    {
                        "policy": row["policy"],
                        "version": row["version"],
                        "aliases": row["aliases"],
                        "algorithm": entry["lineage"].get("algorithm"),
                        "run_id": row["run_id"],
                        "trained_on": _selection(lake, row, selection),
                    }
                )
    return {
        "dataset": {
            "dataset": name,
            "version": snapshot.version,
            "num_steps": snapshot.num_steps,
            "num_shards": len(snapshot.files),
        },
        "ingests": _ingests(dataset, snapshot.version),
        "policies": policies,
    }


def _trace(lake: Lake, ref: PolicyRef) -> dict[str, Any]:
    entry = lake.registry.show(ref)
    run = next((run for run in lake.registry.runs() if run["run_id"] == entry["run_id"]), {})
    return {
        "policy": {
            "policy": ref.name,
            "version": ref.version,
            "selected_by": ref.selected_by,
            "aliases": entry["aliases"],
            "registered_at": _time(entry["created_ms"]),
        },
        "run": {
            "run_id": entry["run_id"],
            **{key: run.get(key) for key in ("kind", "algorithm", "seed", "config", "metrics")},
            "started_at": _time(run.get("started_ms")),
            "ended_at": _time(run.get("ended_ms")),
        },
        "datasets": [
            {
                **_selection(lake, {"policy": ref.name, "version": ref.version}, selection),
                "ingests": _ingests(lake.dataset(selection["dataset"]), selection["version"]),
            }
            for selection in entry["lineage"].get("datasets", ())
        ],
    }


def _selection(
    lake: Lake, policy: Mapping[str, Any], selection: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what was selected, whether it can be read again, and which purges took of it."""
    keys = (
        "dataset",
        "version",
        "named",
        "where",
        "where_steps",
        "reward",
        "columns",
        "float64",
        "frame_stack",
        "content_hash",
        "num_episodes",
        "num_steps",
    )
    purges = lake.purges.list(selection["dataset"])
    name = f"{policy['policy']}:{policy['version']}"
    return {
        **{key: selection.get(key) for key in keys},
        "reproducible": not any(purge.broke(selection["version"]) for purge in purges),
        "purged": [purge.id for purge in purges if name in purge.policies],
    }


def _ingests(dataset: Dataset, version: int) -> list[dict[str, Any]]:
    """Return one entry a producer, by first commit: an ingest of much data is several commits."""
    if not dataset.exists():
        return []
    found: dict[str, dict[str, Any]] = {}
    for commit in dataset.history():
        if commit["version"] > version or not commit.get("num_steps"):
            continue
        entry = found.setdefault(
            commit["producer"],
            {
                "producer": commit["producer"],
                "source": commit.get("source"),
                "read_as": commit.get("read_as"),
                "versions": [],
                "num_episodes": 0,
                "num_steps": 0,
                "committed_at": _time(commit.get("timestamp")),
            },
        )
        entry["versions"].append(commit["version"])
        entry["num_episodes"] += commit.get("num_episodes") or 0
        entry["num_steps"] += commit["num_steps"]
    return list(found.values())


def _signed_by(lake: Lake, decision_id: str) -> tuple[Dataset, DecisionId]:
    # A read makes no key: without one, nothing was ever signed.
    with suppress(NotFound):
        key = lake.signing_key(create=False)
        for name in lake.datasets():
            said = DecisionSigner(key, name).read(decision_id)
            if said is not None:
                return lake.dataset(name), said
    raise NotFound(
        f"decision {decision_id!r}: found no dataset of this lake that signed it, expected an id "
        "that /act answered while serving with --log-to. Check the id and --lake; a server without "
        "--log-to keeps no record."
    )


def _logged(lake: Lake, dataset: Dataset, decision_id: str) -> dict[str, Any]:
    """Return what the tables hold of a decision; one not committed yet is `logged` false."""
    rows = (
        _rows(lake, f"{dataset.name}.decisions", decision_id) if dataset.decisions.exists() else []
    )
    rewards = (
        _rows(lake, f"{dataset.name}.rewards", decision_id) if dataset.rewards.exists() else []
    )
    steps = []
    if "decision_id" in dataset.spec.extras:
        steps = _rows(lake, f"{dataset.name}.steps", decision_id)
    kept = ("request_id", "episode_id", "observation", "action", "log_prob", "deterministic")
    return {
        "logged": bool(rows),
        **({key: rows[0][key] for key in kept} if rows else {}),
        "rewards": [
            {key: row[key] for key in ("reward", "terminated", "truncated")} for row in rewards
        ],
        "step": {key: steps[0][key] for key in ("episode_id", "step")} if steps else None,
    }


def _rows(lake: Lake, view: str, decision_id: str) -> list[dict[str, Any]]:
    query = f"SELECT * FROM {view} WHERE decision_id = $id ORDER BY timestamp"
    rows: list[dict[str, Any]] = lake.sql(query, {"id": decision_id}).to_pylist()
    return rows


def _time(milliseconds: float | None) -> str | None:
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
