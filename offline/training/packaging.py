"""Packaging: the policy that a run chose, exported, and evaluated as it was exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from replaylake.datastore.policies.package import load_policy, save_package
from replaylake.offline.evaluate import Evaluation, evaluate
from replaylake.offline.export import export_onnx
from replaylake.offline.training.job import TrainingJob


def packaged(
    scratch: Path, job: TrainingJob, manifest: Mapping[str, Any]
) -> tuple[Path, Evaluation | None]:
    """Export the learner's policy into a package below `scratch`; return its folder.

    Where the request names an environment the exported policy is evaluated there, on seeds that the
    selection did not use, and the package says what it returned.
    """
    request, graph = job.request, job.learner.policy()
    spec = replace(graph.spec, encoding=job.data.view.spec.encoding)
    onnx = export_onnx(graph)
    state = job.learner.state_dict()
    package = scratch / "policy"
    save_package(package, onnx=onnx, spec=spec, manifest=manifest, learner_weights=state)
    if request.env_id is None:
        return package, None
    evaluation = evaluate(
        load_policy(package),
        request.env_id,
        episodes=request.config.evaluation_episodes,
        seed=request.config.seed,
    )
    package = scratch / "evaluated"
    with_evaluation = {**manifest, "evaluation": evaluation.to_json()}
    save_package(package, onnx=onnx, spec=spec, manifest=with_evaluation, learner_weights=state)
    return package, evaluation
