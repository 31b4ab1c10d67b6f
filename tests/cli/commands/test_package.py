"""`replaylake policies package`: what it builds, says and refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import save_package
from replaylake.datastore.lake.policies.policy import PolicySpec


@pytest.fixture(autouse=True)
def policy(lake: Path, tmp_path: Path) -> None:
    """`pick:1` in the lake: it takes the larger of two numbers."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2])
        for name in ("observations", "logits")
    ]
    node = helper.make_node("Identity", ["observations"], ["logits"])
    graph = helper.make_graph([node], "pick", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save_package(
        tmp_path / "package",
        onnx=model.SerializeToString(),
        spec=PolicySpec(Box((2,)), Discrete(2), "categorical"),
        manifest={"algorithm": "by_hand"},
        learner_weights=None,
    )
    registry = open_lake(lake, create=True).registry
    registry.register("pick", tmp_path / "package", run_id="run", lineage={})


@pytest.mark.slow
def test_it_says_what_it_built_how_large_and_how_to_run_it(run: Any, tmp_path: Path) -> None:
    output = tmp_path / "bento"
    ran = run("policies", "package", "pick", "--output", output)
    assert ran.code == 0, ran.err
    assert ran.err.splitlines()[0] == "policy pick:1 (newest)"
    first, *lines = ran.out.splitlines()
    assert re.fullmatch(rf"packaged pick:1 in {re.escape(str(output))}, [12]\.\d MB", first)
    assert any(re.fullmatch(r"  holds a lock of the \d+ libraries .*", line) for line in lines)
    assert "  without torch, ray, d3rlpy, gymnasium" in lines
    installed, install, serve, image = lines[-4:]
    assert re.fullmatch(r"installed it takes [\d.]+ MB: pyarrow [\d.]+ MB, duckdb .*", installed)
    assert install == f"install it: cd {output}/env/python && pip install -r requirements.txt"
    assert serve == f"serve it: bentoml serve {output}"
    dockerfile = f"{output}/env/docker/Dockerfile"
    assert image == f"as an image: docker build -f {dockerfile} -t pick:1 {output}"
    assert Path(dockerfile).is_file()
    again = run("policies", "package", "pick", "--output", output)
    assert again.code == 1
    assert again.err.splitlines()[-1].startswith(f"error: {output}: ")


@pytest.mark.slow
def test_as_json(run: Any, tmp_path: Path) -> None:
    output = tmp_path / "bento"
    body = run("policies", "package", "pick:1", "--output", output, "--json").json
    assert (body["tag"], body["policy"], body["version"]) == ("pick:1", "pick", 1)
    assert (body["output"], body["selected_by"]) == (str(output), "version")
    assert body["dockerfile"] == str(output / "env" / "docker" / "Dockerfile")
    assert body["wheel"] == next((output / "env" / "python" / "wheels").iterdir()).name
    assert len(body["wheel_sha256"]) == len(body["package_sha256"]) == 64
    names = [pin["name"] for pin in body["requirements"]]
    assert "bentoml" in names
    assert not {"torch", "ray", "d3rlpy", "gymnasium"} & set(names)
    manifest = json.loads((output / "src" / "policy" / "manifest.json").read_text())
    assert manifest["algorithm"] == "by_hand"


def test_an_absent_policy_and_a_folder_that_is_not_there(run: Any, tmp_path: Path) -> None:
    run("policies", "package", "absent", "--output", tmp_path / "bento").failed("absent")
    assert not (tmp_path / "bento").exists()
    ran = run("policies", "package", "pick", "--output", tmp_path / "nowhere" / "bento")
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith(
        f"error: {tmp_path / 'nowhere'}: found no such directory"
    )
