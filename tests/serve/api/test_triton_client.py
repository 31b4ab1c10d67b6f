"""Triton's own client of the Open Inference Protocol against servers in processes of their own."""

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.client import Client

ROWS = np.array([[0.1, 0.2, 0.3, 0.4], [1, 0, 0, 0], [-1, 0, 0, 0]], np.float32)


@pytest.fixture(
    scope="module",
    params=["uvicorn", pytest.param("bentoml", marks=pytest.mark.slow)],
)
def server(request, kit, package, tmp_path_factory):
    lake = open_lake(tmp_path_factory.mktemp("triton") / "lake", create=True)
    running = kit.start_server(
        package=package,
        policy="p",
        version=2,
        lake=lake.path,
        log_to="d",
        server=request.param,
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def triton(server):
    with InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture(scope="module")
def feedback(server):
    with Client(server.url) as client:
        yield client.feedback


def tensor(name, datatype, values, **options):
    made = InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, **options)
    return made


def test_health_and_metadata(triton):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("p")
    assert triton.is_model_ready("p", "2")
    assert not triton.is_model_ready("p", "3")
    assert triton.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    found = triton.get_model_metadata("p")
    assert found["inputs"][0] == {"name": "observation", "datatype": "FP32", "shape": [-1, 4]}
    assert [one["name"] for one in found["outputs"]] == ["action", "log_prob"]


def test_tensors_as_bytes(triton, feedback):
    inputs = [
        tensor("observation", "FP32", ROWS),
        tensor("action_mask", "BOOL", np.array([[False, True], [True, True], [True, True]])),
        tensor("episode_id", "BYTES", np.array(["é", "b", "c"], object)),
        tensor("step", "INT64", np.arange(3)),
    ]
    answer = triton.infer("p", inputs, request_id="r-7", parameters={"seed": 3})
    assert answer.as_numpy("action").tolist() == [1, 0, 1]
    assert answer.as_numpy("log_prob").tolist() == [0, 0, 0]
    response = answer.get_response()
    assert (response["id"], response["model_version"]) == ("r-7", "2")
    ids = response["parameters"]["decision_ids"].split(",")
    for decision_id in ids:
        feedback(1.0, decision_id=decision_id)
    feedback(1.0, episode_id="é", step=0)


def test_tensors_as_json(triton):
    answer = triton.infer(
        "p",
        [tensor("observation", "FP32", ROWS, binary_data=False)],
        outputs=[InferRequestedOutput("action", binary_data=False)],
        headers={"Content-Type": "application/json"},
    )
    assert answer.as_numpy("action").tolist() == [0, 0, 1]
    assert answer.as_numpy("log_prob") is None


def test_errors_have_a_sentence(triton):
    with pytest.raises(InferenceServerException, match=r"found \[3,3\], expected \[-1, 4\]") as got:
        triton.infer("p", [tensor("observation", "FP32", ROWS[:, :3].copy())])
    assert got.value.status() == "400"
    with pytest.raises(InferenceServerException, match="found q, expected one of p") as got:
        triton.get_model_metadata("q")
    assert got.value.status() == "404"
    wrong = ROWS.copy()
    wrong[1, 2] = np.nan
    with pytest.raises(InferenceServerException, match=r"observation\[1, 2\]: found nan"):
        triton.infer("p", [tensor("observation", "FP32", wrong)])
