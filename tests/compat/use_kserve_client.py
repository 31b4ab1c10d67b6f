"""KServe's Python client against a real server: each answer is compared with that of /act.

python tests/compat/use_kserve_client.py PYTHON: an interpreter that has kserve.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import replaylake as rl
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.lake.policies.package import save_package
from replaylake.datastore.lake.policies.policy import PolicySpec

# Rows of an observation with a leaf of each kind of number.
_LEAVES = {
    "camera": (Box((2, 2), "uint8", 0, 255), [[[0, 255], [9, 7]], [[255, 0], [1, 2]]]),
    "gear": (Discrete(3), [0, 2]),
    "speed": (Box((2,), "float64", -1e300, 1e300), [[0.5, -1.25], [-3.0, 8.0]]),
    "torque": (Box((3,)), [[0.5, 1.0, -2.0], [-4.0, 0.25, 3.0]]),
    "brake": (Box((1,), "bool", 0, 1), [[True], [False]]),
}
_DATATYPES = {
    "camera": "UINT8",
    "gear": "INT64",
    "speed": "FP64",
    "torque": "FP32",
    "brake": "BOOL",
}
# The oldest release that this was tried with; .ci/compat-kserve asks pip for no older one.
_OLDEST = (0, 21)
_INFER = """
    import asyncio, importlib.metadata, json, sys
    import httpx, numpy as np
    from kserve import InferenceRESTClient, InferInput, InferRequest
    from kserve.inference_client import RESTConfig
    from kserve.protocol.infer_type import RequestedOutput

    url, asked = sys.argv[1], json.load(sys.stdin)
    DTYPES = {"FP16": "f2", "FP32": "f4", "FP64": "f8", "BOOL": "?", "BYTES": "O",
              **{f"INT{n}": f"i{n // 8}" for n in (8, 16, 32, 64)},
              **{f"UINT{n}": f"u{n // 8}" for n in (8, 16, 32, 64)}}

    def tensor(name, datatype, rows, binary):
        values = np.array(rows, DTYPES[datatype])
        made = InferInput(name, list(values.shape), datatype)
        made.set_data_from_numpy(values, binary_data=binary)
        return made

    async def main():
        found = {"version": importlib.metadata.version("kserve"), "answers": [], "refused": []}
        config = RESTConfig(protocol="v2")
        async with InferenceRESTClient(config) as client:
            found["live"] = await client.is_server_live(url)
            found["ready"] = await client.is_server_ready(url)
            found["model_ready"] = [
                await client.is_model_ready(url, name) for name in ("mixed", "other")
            ]
            for case in asked["cases"]:
                outputs = None
                parameters = dict(case["parameters"])
                if case["binary"]:
                    parameters["binary_data_output"] = True
                if case["outputs"]:
                    outputs = [RequestedOutput(name) for name in case["outputs"]]
                request = InferRequest(
                    case["model"],
                    [tensor(*one, case["binary"]) for one in case["tensors"]],
                    request_id="r-1",
                    parameters=parameters,
                    request_outputs=outputs,
                )
                try:
                    answer = await client.infer(url, request, model_name=case["path"])
                except httpx.HTTPStatusError as error:
                    found["refused"].append([error.response.status_code, str(error)])
                    continue
                found["answers"].append({
                    "id": answer.id,
                    "model": answer.model_name,
                    "parameters": answer.parameters,
                    "outputs": {
                        one.name: [one.datatype, one.as_numpy().tolist()] for one in answer.outputs
                    },
                })
        print(json.dumps(found))

    asyncio.run(main())
"""


def main(python: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        lake = rl.open(home / "lake", create=True)
        lake.registry.register("mixed", _save_policy(home / "policy"), run_id="by hand", lineage={})
        command = [str(Path(sys.executable).with_name("replaylake")), "serve", "mixed"]
        server = subprocess.Popen(
            [*command, "--log-to", "served", "--port", "0", "--server", "uvicorn", "--json"],
            env={**os.environ, "REPLAYLAKE_LAKE": str(home / "lake")},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            _check(python, json.loads(server.stdout.readline())["url"])
        finally:
            server.terminate()
            server.wait(30)


def _save_policy(folder: Path) -> Path:
    """Save a policy whose logits are a linear function of the numbers of all leaves."""
    elements = {"uint8": TensorProto.UINT8, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}
    nodes, inputs, constants = [], [], []
    sizes = {name: np.array(rows)[0].size for name, (_, rows) in _LEAVES.items()}
    for name, (space, rows) in _LEAVES.items():
        element = elements.get(getattr(space, "dtype", "int64"), TensorProto.FLOAT)
        shape = ["n", *np.array(rows).shape[1:]]
        inputs.append(helper.make_tensor_value_info(f"observations.{name}", element, shape))
        cast, flat, flat_shape = f"{name}_float", f"{name}_flat", f"{name}_shape"
        nodes.append(
            helper.make_node("Cast", [f"observations.{name}"], [cast], to=TensorProto.FLOAT)
        )
        nodes.append(helper.make_node("Reshape", [cast, flat_shape], [flat]))
        constants.append(numpy_helper.from_array(np.array([-1, sizes[name]]), flat_shape))
    nodes.append(helper.make_node("Concat", [f"{name}_flat" for name in _LEAVES], ["all"], axis=1))
    nodes.append(helper.make_node("MatMul", ["all", "weights"], ["logits"]))
    weights = np.random.default_rng(0).normal(size=(sum(sizes.values()), 2)) / 100
    constants.append(numpy_helper.from_array(weights.astype(np.float32), "weights"))
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph(nodes, "linear", inputs, [logits], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save_package(
        folder,
        onnx=model.SerializeToString(),
        spec=PolicySpec(
            Dict({name: space for name, (space, _) in _LEAVES.items()}), Discrete(2), "categorical"
        ),
        manifest={"algorithm": "by_hand"},
        learner_weights=None,
    )
    return folder


def _case(
    datatypes: dict[str, str] | None = None,
    rows: Sequence[int] = (0, 1),
    further: Sequence[list[Any]] = (),
    **options: Any,
) -> dict[str, Any]:
    """Return a request: the tensors of these rows, with other datatypes than those of the space."""
    chosen = _DATATYPES | (datatypes or {})
    tensors = [
        [f"observation.{name}", chosen[name], [values[row] for row in rows]]
        for name, (_, values) in _LEAVES.items()
    ]
    case = {"model": "mixed", "path": "mixed", "parameters": {}, "outputs": [], "binary": True}
    return {**case, "tensors": [*tensors, *further], "rows": rows, **options}


def _check(python: str, url: str) -> None:
    sampled = {"deterministic": False, "temperature": 2.0, "seed": 7}
    narrow = {"camera": "INT16", "gear": "UINT8", "speed": "FP32", "torque": "FP16"}
    wide = {"camera": "UINT64", "gear": "INT8", "speed": "FP64", "torque": "FP64"}
    named = [
        ["episode_id", "BYTES", ["\u00e9-1", "visit-2"]],
        ["step", "INT32", [0, 3]],
        ["action_mask", "BOOL", [[True, False], [False, True]]],
    ]
    answered = [
        _case(),
        _case(binary=False),
        _case(narrow, parameters=sampled),
        _case(wide, binary=False, parameters=sampled),
        _case(rows=[1]),
        _case(rows=[0, 1] * 100, parameters=sampled),
        _case(further=named),
        _case(further=named, binary=False),
        _case(path="mixed/versions/1", outputs=["action"], binary=False),
    ]
    refused = [
        (404, "found other, expected one of mixed", _case(path="other", model="other")),
        (404, "found 2, expected a version", _case(path="mixed/versions/2")),
        (400, "found other, expected mixed", _case(model="other")),
        (400, "expected FP64, or a datatype", _case({"speed": "BYTES"}, binary=False)),
        (400, "3 rows, expected 2", _case(further=[["step", "INT64", [1, 2, 3]]])),
        (400, "unknown parameter", _case(parameters={"sequence_id": 1})),
    ]
    asked = {"cases": [*answered, *(case for _, _, case in refused)]}
    command = [python, "-c", textwrap.dedent(_INFER), url]
    ran = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    if ran.returncode:
        sys.exit(ran.stderr)
    found = json.loads(ran.stdout)
    version = tuple(int(part) for part in found["version"].split(".")[:2])
    assert version >= _OLDEST, f"kserve {found['version']}: pip installed an old release"
    assert (found["live"], found["ready"], found["model_ready"]) == (True, True, [True, False])
    assert (len(found["answers"]), len(found["refused"])) == (len(answered), len(refused)), found
    num_actions = 0
    for case, answer in zip(answered, found["answers"], strict=True):
        _compare(url, case, answer)
        num_actions += len(case["rows"])
    for (status, sentence, _), got in zip(refused, found["refused"], strict=True):
        assert got[0] == status, (got, status, sentence)
        assert sentence in got[1], (got, status, sentence)
    report = {"reward": 1.0, "episode_id": "visit-2", "step": 3}
    _post(f"{url}/feedback", report)
    print(
        f"kserve {found['version']}: {num_actions} actions in {len(answered)} answers are those of "
        f"/act, {len(refused)} refusals as expected"
    )


def _compare(url: str, case: dict[str, Any], answer: dict[str, Any]) -> None:
    """Compare an answer with that of /act to the same rows."""
    observations = [
        {name: values[row] for name, (_, values) in _LEAVES.items()} for row in case["rows"]
    ]
    fields = {"observations": observations, **case["parameters"]}
    further = {name: rows for name, _, rows in case["tensors"] if not name.startswith("obs")}
    names = {"episode_id": "episode_ids", "step": "steps", "action_mask": "action_masks"}
    # Other steps than those of the answer: a report by episode and step means one decision.
    further.pop("step", None)
    acted = _post(f"{url}/act", fields | {names[name]: rows for name, rows in further.items()})
    outputs = answer["outputs"]
    assert outputs["action"] == ["INT64", acted["actions"]], (case, answer, acted)
    if case["outputs"]:
        assert set(outputs) == set(case["outputs"]), answer
    else:
        assert outputs["log_prob"] == ["FP64", acted["log_probs"]], (case, answer, acted)
    assert (answer["id"], answer["model"]) == ("r-1", "mixed"), answer
    parameters = answer["parameters"]
    ids = parameters["decision_id" if len(case["rows"]) == 1 else "decision_ids"].split(",")
    assert len(set(ids)) == len(case["rows"]), answer
    assert (parameters["policy"], parameters["version"]) == ("mixed", 1), answer


def _post(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(fields).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


if __name__ == "__main__":
    main(sys.argv[1])
