"""Agent packages: the policies of a game's agents: exported, evaluated together, registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.lake.policies.package import check_package, load_policy
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.lake.policies.registry import PolicyRef, Registry
from replaylake.offline.evaluation.evaluate import Evaluation
from replaylake.offline.learning.learner import Learner
from replaylake.offline.running.training.packaging import build_package
from replaylake.offline.running.training.run_record import RunRecord

_LINEAGE: Final = ("datasets", "algorithm", "seed", "run_id")


def build_packages(
    scratch: Path,
    learners: Mapping[str, Learner],
    manifests: Mapping[str, Mapping[str, Any]],
    evaluate: Callable[[Mapping[str, Policy]], Evaluation],
) -> tuple[dict[str, Path], Evaluation]:
    """Export each agent's policy into a package below `scratch`; return their folders.

    manifests: of each agent's. evaluate: measures all of them at once, in games that they play
    with one another, for each package to say what those returned. Cost: each is exported twice.
    """
    policies: dict[str, Policy] = {}
    for number, (agent, learner) in enumerate(learners.items()):
        # By number: what an agent is called need be no name of a folder.
        folder, _ = build_package(_make_dir(scratch / f"{number}"), learner, manifests[agent])
        policies[agent] = load_policy(folder)
    evaluation = evaluate(policies)
    folders = {}
    for number, (agent, learner) in enumerate(learners.items()):
        folders[agent], _ = build_package(
            _make_dir(scratch / f"{number}-evaluated"),
            learner,
            manifests[agent],
            evaluate=lambda _: evaluation,
        )
    return folders, evaluation


def register_packages(
    registry: Registry, record: RunRecord, packages: Mapping[str, Path], fields: Mapping[str, Any]
) -> tuple[PolicyRef, dict[str, Any]]:
    """Register each agent's package under the name it says, the run's end with the last one.

    Returns: the last policy, and the record. `policies` in it are the agents' by name and version,
    None for that last one, whose version is known when the record is; there are none where one
    policy acts for all, that of the agent "". Those that a try before had registered stay as they
    are. Raises: as Registry.register.
    """
    mine = {r["policy"]: r["version"] for r in registry.list() if r["run_id"] == record.run_id}
    *others, last = packages
    policies: dict[str, str | None] = {}
    for agent in others:
        name = check_package(packages[agent]).body["name"]
        version = mine.get(name)
        if version is None:
            lineage = _lineage(packages[agent])
            ref = registry.register(name, packages[agent], run_id=record.run_id, lineage=lineage)
            version = ref.version
        policies[agent] = f"{name}:{version}"
    if last:
        policies[last] = None
    finished = record.to_finished({**fields, "policies": policies})
    ref = registry.register(
        check_package(packages[last]).body["name"],
        packages[last],
        run_id=record.run_id,
        lineage=_lineage(packages[last]),
        run=finished,
        replaces=record.body,
    )
    return ref, finished


def load_registered_policies(
    registry: Registry, last: PolicyRef, record: Mapping[str, Any]
) -> dict[str, PolicyRef]:
    """Return the agents' policies that the record of a run that is done names; see register."""
    policies = record.get("policies") or {}
    return {
        agent: last if text is None else registry.resolve(text) for agent, text in policies.items()
    }


def _lineage(package: Path) -> dict[str, Any]:
    body = check_package(package).body
    return {key: body[key] for key in _LINEAGE}


def _make_dir(folder: Path) -> Path:
    folder.mkdir()
    return folder
