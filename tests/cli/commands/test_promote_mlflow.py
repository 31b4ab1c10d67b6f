"""`promote --mlflow`: an alias in MLflow's registry. compat-mlflow has MLflow's own server."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.package import save_package
from replaylake.datastore.lake.policies.policy import PolicySpec

TO_MLFLOW = ("--to", "champion", "--mlflow", "cart poles")


@pytest.fixture
def two(lake: Path, tmp_path: Path) -> Lake:
    """Two versions of p, one package; the first was trained by the run 01abc."""
    opened = open_lake(lake, create=True)
    weights = numpy_helper.from_array(np.eye(2, dtype=np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["observations", "w"], ["logits"])],
        "linear",
        [helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save_package(
        tmp_path / "package",
        onnx=model.SerializeToString(),
        spec=PolicySpec(Box((2,)), Discrete(2), "categorical"),
        manifest={},
        learner_weights=None,
    )
    for run_id in ("01abc", "02def"):
        opened.registry.register("p", tmp_path / "package", run_id=run_id, lineage={})
    return opened


def add_run(tracking: Any, run_id: str) -> None:
    """Add the MLflow run of a run of ours, in an experiment after another one."""
    tracking.experiments |= {"other": "1", "training": "2"}
    tags = {"replaylake.run_id": run_id}
    tracking.runs["m0"] = {"experiment": "2", "name": run_id, "tags": tags, "status": "FINISHED"}


def champions(lake: Lake, tracking: Any) -> tuple[int | None, dict[str, str]]:
    """Return the version of p@champion here, and the aliases there."""
    aliases = tracking.models.get("cart poles", {"aliases": {}})["aliases"]
    return lake.registry.alias_version("p", "champion"), aliases


def test_a_promotion_uploads_a_model_to_the_run_and_sets_the_alias(
    run: Any, two: Lake, tracking: Any
) -> None:
    add_run(tracking, "01abc")
    ran = run("promote", "p:1", *TO_MLFLOW, "--json")
    assert ran.code == 0, ran
    assert champions(two, tracking) == (1, {"champion": "1"})
    (version,) = tracking.models["cart poles"]["versions"]
    source = "mlflow-artifacts:/2/m0/artifacts/policies/p/1"
    assert (version["source"], version["run_id"]) == (source, "m0")
    sha256 = two.registry.resolve("p:1").manifest_sha256
    assert {tag["key"]: tag["value"] for tag in version["tags"]} == {
        "replaylake.policy": "p",
        "replaylake.version": "1",
        "replaylake.package_sha256": sha256,
    }
    files = {path.removeprefix("2/m0/artifacts/policies/p/1/") for path in tracking.artifacts}
    assert {"MLmodel", "code/replaylake_pyfunc.py", "data/manifest.json"} <= files
    assert ran.json["promoted"] is True
    assert ran.json["mlflow"] == {
        "model": "cart poles", "alias": "champion", "version": "1", "source": source,
        "is_created": True, "url": f"{tracking.url}/#/models/cart%20poles/versions/1",
    }  # fmt: skip


def test_each_version_is_created_once_and_aliases_follow_a_rollback(
    run: Any, two: Lake, tracking: Any
) -> None:
    assert run("promote", "p:1", *TO_MLFLOW).code == 0
    assert run("promote", "p:2", *TO_MLFLOW).out.splitlines()[0] == "p@champion is p:2, was p:1"
    assert champions(two, tracking) == (2, {"champion": "2"})
    assert run("promote", "p:1", "--to", "stable", "--mlflow", "cart poles").code == 0
    ran = run("rollback", "p", "--mlflow", "cart poles")
    page = f"{tracking.url}/#/models/cart%20poles/versions/1"
    assert ran.out.splitlines() == [
        "p@champion is p:1, was p:2",
        f"MLflow: cart poles@champion is version 1: {page}",
    ]
    assert champions(two, tracking) == (1, {"champion": "1", "stable": "1"})
    sources = [one["source"] for one in tracking.models["cart poles"]["versions"]]
    # Without the runs that trained them, each has one of its own.
    assert sources == [
        f"mlflow-artifacts:/1/m{number}/artifacts/policies/p/{number + 1}" for number in (0, 1)
    ]
    assert [one["status"] for one in tracking.runs.values()] == ["FINISHED", "FINISHED"]


STEPS: dict[str, Callable[[str], bool]] = {
    "registry": lambda path: path == "registered-models/get",
    "upload": lambda path: path.endswith("manifest.json"),
    "version": lambda path: path == "model-versions/create",
    "alias": lambda path: path == "registered-models/alias",
}


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_leaves_the_promotion_and_is_retried_by_the_command_in_its_message(
    run: Any, two: Lake, lake: Path, tracking: Any, step: str
) -> None:
    # Writing a model takes half a second.
    source = () if step == "upload" else ("--mlflow-source", "s3://models/p-1")
    tracking.fail = lambda path: 503 if STEPS[step](path) else None
    ran = run("promote", "p:1", *TO_MLFLOW, *source, "--json")
    assert ran.code == 1
    error, _, command = ran.err.strip().partition(" Repeat it for MLflow: replaylake ")
    assert "error: MLflow: cart poles@champion is not set: " in error
    assert error.endswith("status 503, out of order. The lake's p@champion is p:1.")
    options = ["--mlflow-only", "--mlflow", "cart poles", *source, "--lake", str(lake)]
    assert shlex.split(command) == ["promote", "p:1", "--to", "champion", *options]
    assert ran.json["promoted"] is True
    assert "status 503" in ran.json["mlflow"]["error"]
    assert champions(two, tracking) == (1, {})
    tracking.fail = lambda path: None
    ran = run(*shlex.split(command))
    assert ran.code == 0, ran
    assert ran.out.startswith("p@champion is p:1 already\nMLflow: cart poles@champion is version 1")
    assert champions(two, tracking) == (1, {"champion": "1"})
    assert len(tracking.models["cart poles"]["versions"]) == 1
    assert len(tracking.runs) == (step == "upload")
    assert len(two.registry.alias_history("p")) == 1


def test_a_server_that_is_not_there(
    run: Any, two: Lake, tracking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    run("promote", "p:1", *TO_MLFLOW).failed("is not set", "Connection refused")
    assert two.registry.alias_version("p", "champion") == 1


def test_an_alias_that_moved_during_the_upload_is_not_set_back(
    run: Any, two: Lake, tracking: Any
) -> None:
    def move(path: str) -> None:
        if path == "model-versions/create":
            two.registry.set_alias("p", "champion", 2)

    tracking.fail = move
    ran = run("promote", "p:1", *TO_MLFLOW, "--mlflow-source", "s3://models/p-1")
    ran.failed("the lake's p@champion is at version 2, expected version 1")
    assert "Repeat it" not in ran.err
    assert champions(two, tracking) == (2, {})


@pytest.mark.parametrize(("version", "found"), [(None, "not set"), (2, "p:2")])
def test_mlflow_only_never_moves_the_alias_of_the_lake(
    run: Any, two: Lake, tracking: Any, version: int | None, found: str
) -> None:
    if version is not None:
        two.registry.set_alias("p", "champion", version)
    run("promote", "p:1", *TO_MLFLOW, "--mlflow-only").failed(
        f"promote: p@champion is {found}, expected p:1: MLflow's alias is not set."
    )
    assert champions(two, tracking) == (version, {})
    assert tracking.models == {}


def test_a_source_that_the_user_stored(run: Any, two: Lake, tracking: Any) -> None:
    ran = run("promote", "p:1", *TO_MLFLOW, "--mlflow-source", "s3://models/p-1")
    assert ran.code == 0, ran
    (version,) = tracking.models["cart poles"]["versions"]
    assert version["source"] == "s3://models/p-1"
    assert "run_id" not in version
    assert (tracking.artifacts, tracking.runs) == ({}, {})


def test_artifacts_that_the_server_does_not_take(run: Any, two: Lake, tracking: Any) -> None:
    tracking.artifact_root = "s3://bucket/mlflow"
    run("promote", "p:1", *TO_MLFLOW).failed(
        "found s3://bucket/mlflow/1/m0/artifacts, expected a URI of mlflow-artifacts:",
        "give its URI as --mlflow-source",
    )
    assert champions(two, tracking) == (1, {})


def test_a_registry_of_its_own(
    run: Any, two: Lake, tracking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = type(tracking)()
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", registry.url)
    ran = run("promote", "p:1", *TO_MLFLOW, "--mlflow-source", "s3://models/p-1", "--json")
    registry.close()
    assert ran.json["mlflow"]["url"].startswith(registry.url)
    assert champions(two, registry) == (1, {"champion": "1"})
    assert tracking.models == {}


@pytest.mark.parametrize(
    ("variables", "options", "code", "message"),
    [
        ({"MLFLOW_TRACKING_URI": "sqlite:///x"}, TO_MLFLOW, 1, "MLFLOW_TRACKING_URI: found"),
        ({"MLFLOW_REGISTRY_URI": "sqlite:///x"}, TO_MLFLOW, 1, "MLFLOW_REGISTRY_URI: found"),
        ({}, ("--to", "champion", "--mlflow", " "), 2, "found an empty one"),
        ({}, ("--to", "champion", "--mlflow-source", "s3://x"), 2, "requires --mlflow"),
        ({}, ("--to", "champion", "--mlflow-only"), 2, "requires --mlflow"),
        ({}, (*TO_MLFLOW, "--mlflow-only", "--note", "x"), 2, "found --note too"),
    ],
)
def test_a_configuration_that_cannot_work_moves_nothing(
    run: Any,
    two: Lake,
    tracking: Any,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    options: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ran = run("promote", "p:1", *options)
    assert ran.code == code
    assert message in ran.err
    assert two.registry.alias_version("p", "champion") is None
