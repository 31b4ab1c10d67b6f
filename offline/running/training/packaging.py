"""Packaging: the policy that a run chose, exported, and evaluated as it was exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.lake.policies.package import load_policy, save_package
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.offline.evaluation.evaluate import Evaluation
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.learner import Learner


def build_package(
    scratch: Path,
    learner: Learner,
    manifest: Mapping[str, Any],
    *,
    encoding: Encoding | None = None,
    evaluate: Callable[[Policy], Evaluation] | None = None,
) -> tuple[Path, Evaluation | None]:
    """Export the learner's policy into a package below `scratch`; return its folder.

    encoding: what the dataset says of its observations' elements. evaluate: measures the policy as
    it was exported, for the package to say what it returned.
    """
    graph = learner.policy()
    spec = replace(graph.spec, encoding=encoding)
    onnx = export_onnx(graph)
    state = learner.state_dict()
    package = scratch / "policy"
    save_package(package, onnx=onnx, spec=spec, manifest=manifest, learner_weights=state)
    if evaluate is None:
        return package, None
    evaluation = evaluate(load_policy(package))
    package = scratch / "evaluated"
    with_evaluation = {**manifest, "evaluation": evaluation.to_json()}
    save_package(package, onnx=onnx, spec=spec, manifest=with_evaluation, learner_weights=state)
    return package, evaluation
