"""Lineage: a served decision, a policy or a dataset, traced through what the lake has recorded.

decision -> policy version -> run -> dataset@version, SQL, content hash -> ingests

episode_lineage.py has the way back from an episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from replaylake.datastore.episodes.schema import (
    ACTION,
    EPISODE_ID,
    OBSERVATION,
    REWARD,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
)
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.feedback.decision_id import DecisionId, DecisionSigner
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    DETERMINISTIC,
    LOG_PROB,
    PACKAGE_SHA256,
    REQUEST_ID,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.lineage.served_versions import list_served_versions


def trace_decision(lake: Lake, decision_id: str) -> dict[str, Any]:
    """Trace a decision id that the lake signed; `decision`, then what trace_policy returns.

    Also where the version that decided was deleted since. Raises: NotFoundError if no dataset of
    this lake signed it.
    """
    dataset, token = _find_signer(lake, decision_id)
    decision = {
        "decision_id": decision_id,
        "dataset": dataset.name,
        "policy": token.policy,
        "version": token.policy_version,
        "decided_at": _time(token.timestamp / 1000),
        "worker": token.worker,
        **_read_decision(lake, dataset, decision_id),
    }
    trace = _trace(lake, token.policy, token.policy_version, "version")
    return {"decision": decision, **trace}


def trace_policy(lake: Lake, text: str) -> dict[str, Any]:
    """Trace `name:version`, `name@alias` or `name`: its `policy`, `run`, and `datasets`.

    `served` says into which datasets it answered, when and how often, `moves` which aliases came to
    it and left it. Each dataset has the version, the SQL (`where`, `where_steps`, `reward`), the
    options, the content hash and the counts of what was selected, and its `ingests` up to that
    version, from `since` on of a run that followed it; None for what a policy of an earlier release
    does not say. Raises: NotFoundError, InvalidNameError.
    """
    ref = lake.registry.resolve(text)
    return _trace(lake, ref.name, ref.version, ref.selected_by)


def trace_dataset(lake: Lake, name: str) -> dict[str, Any]:
    """Trace a dataset both ways: its `ingests`, and `policies` trained on it.

    Raises: NotFoundError.
    """
    dataset = lake.dataset(name)
    snapshot = dataset.snapshot()
    policies = []
    for row in lake.registry.list():
        entry = lake.registry.entry(row["policy"], row["version"])
        for selection in entry["lineage"].get("datasets") or ():
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
        "ingests": list_ingests(dataset, snapshot.version),
        "policies": policies,
    }


def _trace(lake: Lake, name: str, version: int, selected_by: str) -> dict[str, Any]:
    entry = lake.registry.entry(name, version)
    run = next((run for run in lake.registry.runs() if run["run_id"] == entry["run_id"]), {})
    from_run = ("kind", "algorithm", "seed", "env_id", "config", "metrics")
    return {
        "policy": {
            "policy": name,
            "version": version,
            "selected_by": selected_by,
            "aliases": entry["aliases"],
            "registered_at": _time(entry["created_ms"]),
            "deleted_at": _time(entry["deleted_ms"]),
        },
        "run": {
            "run_id": entry["run_id"],
            **{key: run.get(key) for key in from_run},
            "started_at": _time(run.get("started_ms")),
            "ended_at": _time(run.get("ended_ms")),
        },
        "datasets": [
            {
                **_selection(lake, {"policy": name, "version": version}, selection),
                "ingests": list_ingests(
                    lake.dataset(selection["dataset"]),
                    selection["version"],
                    since=selection.get("since"),
                ),
            }
            for selection in entry["lineage"].get("datasets") or ()
        ],
        "served": [one.to_json() for one in list_served_versions(lake, name, [version])],
        "moves": [
            {**move.to_json(), "at": _time(move.at_ms)}
            for move in lake.registry.alias_history(name)
            if version in (move.from_version, move.to_version)
        ],
    }


def _selection(
    lake: Lake, policy: Mapping[str, Any], selection: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what was selected, whether it can be read again, and which purges took of it."""
    keys = (
        "dataset",
        "version",
        "since",
        "producers",
        "named",
        "where",
        "where_steps",
        "where_sequences",
        "reward",
        "columns",
        "float64",
        "frame_stack",
        "content_hash",
        "num_episodes",
        "num_steps",
        "num_sequences",
        "num_tokens",
    )
    purges = lake.purges.list(selection["dataset"])
    name = f"{policy['policy']}:{policy['version']}"
    return {
        **{key: selection.get(key) for key in keys},
        "reproducible": not any(purge.has_broken(selection["version"]) for purge in purges),
        "purged": [purge.id for purge in purges if name in purge.policies],
    }


def list_ingests(
    dataset: Dataset, version: int, *, since: int | None = None
) -> list[dict[str, Any]]:
    """Return who wrote the steps that came up to a version, one entry a producer.

    In the order of their first commits: an ingest of much data is several. since: leave out what
    was there at this version already, as a run did that followed the dataset.
    """
    if not dataset.exists():
        return []
    ingests: dict[str, dict[str, Any]] = {}
    for commit in dataset.history():
        after = -1 if since is None else since
        if not after < commit["version"] <= version or not commit.get("num_steps"):
            continue
        entry = ingests.setdefault(
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
    return list(ingests.values())


def _find_signer(lake: Lake, decision_id: str) -> tuple[Dataset, DecisionId]:
    # A read makes no key: without one, nothing was ever signed.
    with suppress(NotFoundError):
        key = lake.signing_key(create=False)
        for name in lake.datasets():
            token = DecisionSigner(key, name).read(decision_id)
            if token is not None:
                return lake.dataset(name), token
    raise NotFoundError(
        f"decision {decision_id!r}: found no dataset of this lake that signed it, expected an id "
        "that /act answered while serving with `log_to`. Check the id and `lake`; a server without "
        "`log_to` keeps no record."
    )


def _read_decision(lake: Lake, dataset: Dataset, decision_id: str) -> dict[str, Any]:
    """Return what the tables hold of a decision; one not committed yet is `logged` false."""
    rows = (
        _rows(lake, f"{dataset.name}.decisions", decision_id) if dataset.decisions.exists() else []
    )
    rewards = []
    if dataset.rewards.exists():
        rewards = _reports(lake, dataset, decision_id, rows[0] if rows else {})
    steps = []
    if DECISION_ID in dataset.spec.extras:
        steps = _rows(lake, f"{dataset.name}.steps", decision_id)
    columns = (
        *(REQUEST_ID, EPISODE_ID, OBSERVATION, ACTION, LOG_PROB, DETERMINISTIC),
        PACKAGE_SHA256,
    )
    return {
        "logged": bool(rows),
        # A table that an earlier release wrote lacks the newer ones.
        **({key: rows[0].get(key) for key in columns} if rows else {}),
        "rewards": [{key: row[key] for key in (REWARD, TERMINATED, TRUNCATED)} for row in rewards],
        "step": {key: steps[0][key] for key in (EPISODE_ID, STEP)} if steps else None,
    }


def _reports(
    lake: Lake, dataset: Dataset, decision_id: str, decision: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the reports of a decision's reward, by whichever of its names a client gave."""
    names = dataset.rewards.snapshot().schema.names
    by = [f"{DECISION_ID} = $id"]
    fields: dict[str, object] = {"id": decision_id}
    for keys in ((REQUEST_ID,), (EPISODE_ID, STEP)):
        # Of a table that an earlier release wrote, all name the decision itself.
        if all(key in names and decision.get(key) is not None for key in keys):
            by.append(" AND ".join(f"{key} = ${key}" for key in keys))
            fields |= {key: decision[key] for key in keys}
    query = f"SELECT * FROM {dataset.name}.rewards WHERE ({') OR ('.join(by)}) ORDER BY {TIMESTAMP}"
    rows: list[dict[str, Any]] = lake.sql(query, fields).to_pylist()
    return rows


def _rows(lake: Lake, view: str, decision_id: str) -> list[dict[str, Any]]:
    query = f"SELECT * FROM {view} WHERE {DECISION_ID} = $id ORDER BY {TIMESTAMP}"
    rows: list[dict[str, Any]] = lake.sql(query, {"id": decision_id}).to_pylist()
    return rows


def _time(milliseconds: float | None) -> str | None:
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
