"""The Open Inference Protocol: its tensors, models and errors, and what becomes of hostile bodies.

Requests of Triton's own client are in test_triton_client.py.
"""

import json
import struct

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import Act, PolicySpec
from replaylake.serve.app import create_app
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.safety.tokens import Tokens
from replaylake.serve.versions.router import Router, ServedPolicy

ROW = [0.1, 0.2, 0.3, 0.4]
TENSOR = {"name": "observation", "shape": [1, 4], "datatype": "FP32", "data": ROW}
HEADER = "Inference-Header-Content-Length"


def infer(client, *inputs, path="/v2/models/p/infer", **fields):
    return client.post(path, json={"inputs": list(inputs), **fields})


def infer_bytes(client, fields, data, length=None, **headers):
    text = json.dumps(fields).encode()
    length = str(len(text)) if length is None else length
    headers = {HEADER: length, "content-type": "application/octet-stream", **headers}
    return client.post("/v2/models/p/infer", content=text + data, headers=headers)


def outputs_of(answer):
    assert answer.status_code == 200, answer.text
    return {one["name"]: one for one in answer.json()["outputs"]}


def error_of(answer, status=400):
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert set(content) == {"error"}
    return content["error"]


def logged_rows(logged):
    logged.log.decisions.flush()
    return logged.lake.sql("select * from d.decisions order by decision_id").to_pylist()


@pytest.fixture(scope="module")
def unlogged(app_client, serving, policy, tmp_path_factory):
    """An app in process that logs to a dataset, in which there must be nothing at the end."""
    lake = open_lake(tmp_path_factory.mktemp("unlogged") / "lake", create=True)
    signer = DecisionSigner(lake.signing_key(), "d")
    log = DecisionLog(lake.dataset("d"), policy.spec, signer.worker, window_s=60)
    with app_client(create_app(lambda: serving(policy, log=log, signer=signer))) as client:
        yield client
        log.decisions.flush()
        assert lake.sql("select count(*) from d.decisions").column(0).to_pylist() == [0]


def test_rows_get_the_actions_that_act_gives(logged):
    rows = [ROW, [-1.0, 0.0, 2.0, 0.5]]
    answer = infer(logged, {**TENSOR, "shape": [2, 4], "data": rows}, id="r-1")
    assert answer.json()["id"] == "r-1"
    outputs = outputs_of(answer)
    acted = logged.post("/act", json={"observation": rows}).json()
    assert outputs["action"]["data"] == acted["actions"]
    assert outputs["action"] | {"data": 0} == {
        "name": "action", "datatype": "INT64", "shape": [2], "data": 0
    }  # fmt: skip
    assert outputs["log_prob"]["data"] == acted["log_probs"]


def test_a_body_may_name_the_model_of_its_path_and_no_other(logged):
    answer = infer(logged, TENSOR, model_name="p")
    assert outputs_of(answer)["action"]["data"] == [0]
    pinned = infer(logged, TENSOR, path="/v2/models/p/versions/2/infer", model_name="p")
    assert pinned.json()["model_version"] == "2"
    error = error_of(infer(logged, TENSOR, model_name="q"))
    assert error == "model_name: found q, expected p, the model of the path"
    assert error_of(infer(logged, TENSOR, model_name=3)) == "model_name: found 3, expected a string"


def test_flat_data_is_row_major_and_integers_are_fine_for_floats(logged):
    flat = {**TENSOR, "shape": [2, 4], "datatype": "INT32", "data": [1, 0, 0, 0, -1, 0, 0, 0]}
    nested = {**flat, "data": [[1, 0, 0, 0], [-1, 0, 0, 0]]}
    assert outputs_of(infer(logged, flat))["action"]["data"] == [0, 1]
    assert outputs_of(infer(logged, nested))["action"]["data"] == [0, 1]


def test_decisions_are_logged_with_their_ids_and_the_callers_names(logged, kit):
    answer = infer(
        logged,
        {**TENSOR, "shape": [2, 4], "data": ROW * 2},
        {"name": "episode_id", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
        {"name": "step", "shape": [2], "datatype": "INT64", "data": [4, 7]},
        {"name": "action_mask", "shape": [2, 2], "datatype": "BOOL",
         "data": [[True, False], [False, True]]},
        parameters={"request_id": "q"},
    )  # fmt: skip
    assert outputs_of(answer)["action"]["data"] == [0, 1]
    parameters = answer.json()["parameters"]
    ids = parameters["decision_ids"].split(",")
    assert (parameters["policy"], parameters["version"]) == ("p", 2)
    one = infer(logged, TENSOR).json()["parameters"]["decision_id"]
    assert logged.post("/feedback", json={"decision_id": ids[1], "reward": 1}).status_code == 200
    by_id = {row["decision_id"]: row for row in logged_rows(logged)}
    assert set(by_id) == {*ids, one}
    assert [by_id[key]["episode_id"] for key in ids] == ["a", "b"]
    assert [by_id[key]["step"] for key in ids] == [4, 7]
    assert [by_id[key]["request_id"] for key in ids] == ["q/0", "q/1"]
    assert [by_id[key]["action_mask"] for key in ids] == [[True, False], [False, True]]


def test_tensors_as_bytes_both_ways(logged):
    rows = np.array([ROW, [1, 0, 0, 0]], "<f4")
    names = b"".join(struct.pack("<I", len(one)) + one for one in ("é".encode(), b"b"))
    fields = {
        "inputs": [
            {"name": "observation", "shape": [2, 4], "datatype": "FP32",
             "parameters": {"binary_data_size": 32}},
            {"name": "step", "shape": [2], "datatype": "INT64", "data": [0, 1]},
            {"name": "episode_id", "shape": [2], "datatype": "BYTES",
             "parameters": {"binary_data_size": len(names)}},
        ],
        "outputs": [
            {"name": "log_prob"}, {"name": "action", "parameters": {"binary_data": True}},
        ],
    }  # fmt: skip
    answer = infer_bytes(logged, fields, rows.tobytes() + names)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[HEADER])
    log_prob, action = json.loads(answer.content[:length])["outputs"]
    assert log_prob["data"] == [0.0, 0.0]
    assert action["parameters"] == {"binary_data_size": 16}
    assert np.frombuffer(answer.content[length:], "<i8").tolist() == [0, 0]
    assert {row["episode_id"] for row in logged_rows(logged)} == {"é", "b"}


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64", "INT8", "UINT64"])
def test_numbers_of_every_width_are_read_as_little_endian(limited_client, datatype):
    dtype = (
        f"<{'f' if datatype[0] == 'F' else datatype[0].lower()}{int(datatype.strip('FPINTU')) // 8}"
    )
    data = np.array([[1, 0, 2, 0]], dtype).tobytes()
    tensor = {"name": "observation", "shape": [1, 4], "datatype": datatype,
              "parameters": {"binary_data_size": len(data)}}  # fmt: skip
    found = outputs_of(infer_bytes(limited_client, {"inputs": [tensor]}, data))
    assert found["action"]["data"] == [1]


WRONG = [
    ({"datatype": "BYTES"}, 'observation.datatype: found "BYTES", expected FP32'),
    ({"datatype": "BF16"}, 'observation.datatype: found "BF16"'),
    ({"datatype": ["FP32"]}, "observation.datatype: found a list of 1"),
    ({"shape": [4]}, "observation.shape: found [4], expected [-1, 4]"),
    ({"shape": [1, 5]}, "observation.shape: found [1,5], expected [-1, 4]"),
    ({"shape": [0, 4], "data": []}, "observation.shape: found [0,4]"),
    ({"shape": [-1, 4]}, "observation.shape: found [-1,4]"),
    ({"shape": [True, 4]}, "observation.shape: found [true,4]"),
    ({"shape": [1.0, 4]}, "observation.shape: found [1.0,4]"),
    ({"shape": None}, "observation.shape: found null"),
    ({"shape": [2, 4]}, "observation.data: found a list of 4, expected 8 elements"),
    ({"shape": [10**9, 4]}, "expected 4000000000 elements for the shape [1000000000, 4]"),
    ({"shape": [10**18, 4]}, "expected 4000000000000000000 elements"),
    (
        {"data": [[0, 0], [0, 0]]},
        "observation.data: found a list of 2, expected a list of 1 in nested lists of the shape [1",
    ),
    ({"data": [[0, 0, 0, [0]]]}, "observation.data[3]: found a list of 1"),
    ({"data": [0, 0, "1", 0]}, 'observation.data[2]: found "1", expected elements of FP32'),
    ({"data": [0, True, 0, 0]}, "observation.data[1]: found true"),
    ({"data": [0, 0, None, 0]}, "observation.data[2]: found null"),
    ({"data": [0, 0, 1e39, 0]}, "found [0.0,0.0,1e+39,0.0], expected numbers within"),
    ({"datatype": "INT8", "data": [0, 0, 300, 0]}, "a number is out of the range of INT8"),
    ({"data": {}}, "observation.data: found an object of 0 fields"),
    ({"name": "observations"}, 'inputs[0].name: found "observations", expected an input of the'),
    ({"name": None}, "inputs[0].name: found null"),
    ({"more": 1}, "observation.more: unknown field"),
    ({"parameters": {"shared_memory_region": "x"}}, "observation.parameters.shared_memory_region"),
    ({"parameters": {"binary_data_size": 16}}, "observation: input has both data and"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(case[0])[:40] for case in WRONG])
def test_a_wrong_tensor_is_refused_with_its_value_and_not_logged(unlogged, change, message):
    assert message in error_of(infer(unlogged, TENSOR | change))


REQUESTS = [
    ({"inputs": []}, "observation: required input is missing; send FP32 [-1, 4]"),
    ({}, "inputs: found null, expected a list of tensors"),
    ({"inputs": [7]}, "inputs[0]: found 7"),
    ({"inputs": [TENSOR, TENSOR]}, "observation: input is given twice"),
    ({"inputs": [TENSOR], "outputs": [{"name": "value"}]}, 'outputs[0].name: found "value"'),
    ({"inputs": [TENSOR], "outputs": [{"name": "action"}] * 2}, "action: output is given twice"),
    ({"inputs": [TENSOR], "outputs": [{"name": "action", "parameters": {"classification": 3}}]},
     "outputs[0].parameters.classification: unknown field"),
    ({"inputs": [TENSOR], "parameters": {"sequence_id": 3}},
     "parameters.sequence_id: unknown parameter"),
    ({"inputs": [TENSOR], "parameters": {"temperature": -1}}, "temperature: found -1"),
    ({"inputs": [TENSOR], "parameters": {"binary_data_output": 1}}, "binary_data_output: found 1"),
    ({"inputs": [TENSOR], "id": 3}, "id: found 3, expected a string"),
    ({"inputs": [TENSOR], "more": 3}, "more: unknown field"),
    ({"inputs": [TENSOR, {"name": "step", "shape": [2], "datatype": "INT64", "data": [0, 1]}]},
     "step.shape: found 2 rows, expected 1"),
    ({"inputs": [TENSOR, {"name": "step", "shape": [1], "datatype": "INT64", "data": [0]}],
      "parameters": {"step": 3}}, "step: is both an input and a parameter"),
    ({"inputs": [TENSOR, {"name": "action_mask", "shape": [1, 2], "datatype": "BOOL",
                          "data": [False, False]}]}, "at least one allowed action"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REQUESTS, ids=[case[1][:40] for case in REQUESTS])
def test_a_wrong_request_is_refused_and_not_logged(unlogged, fields, message):
    assert message in error_of(unlogged.post("/v2/models/p/infer", json=fields))


def binary(size, **more):
    tensor = {"name": "observation", "shape": [1, 4], "datatype": "FP32"} | more
    return {"inputs": [tensor | {"parameters": {"binary_data_size": size}}]}


def test_lengths_that_lie_are_refused_and_not_logged(unlogged):
    def refused(*arguments, **options):
        return error_of(infer_bytes(unlogged, *arguments, **options))

    data = np.zeros(4, "<f4").tobytes()
    assert "found 17, expected at most the 16 bytes" in refused(binary(17), data)
    assert "found 1000000000000, expected at most" in refused(binary(10**12), data)
    assert "found 12 bytes, expected 16 bytes" in refused(binary(12), data[:12])
    assert "found 17 bytes behind the JSON, expected 16" in refused(binary(16), data + b"x")
    assert "binary_data_size: found -1" in refused(binary(-1), data)
    assert "binary_data_size: found true" in refused(binary(True), data)
    assert "expected 16000000000 bytes" in refused(binary(16, shape=[10**9, 4]), data)
    for length in ("9999", "-1", "", "1e2", "9" * 5000, "12,12", "\u00b2"):
        error = refused(binary(16), data, length=length.encode("latin-1"))
        assert error.startswith("inference-header-content-length: found"), error
    assert "not valid JSON" in refused(binary(16), data, length="20")
    # Without the header there are no bytes behind the JSON.
    assert "at most the 0 bytes" in error_of(unlogged.post("/v2/models/p/infer", json=binary(16)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused_with_their_place(unlogged, value):
    data = np.array([0, 0, value, 0], "<f4").tobytes()
    error = error_of(infer_bytes(unlogged, binary(16), data))
    assert error == f"observation[0, 2]: found {value}, expected finite numbers"


def test_strings_as_bytes_that_lie_are_refused(unlogged):
    def refused(data, num=1):
        names = {"name": "episode_id", "shape": [num], "datatype": "BYTES",
                 "parameters": {"binary_data_size": len(data)}}  # fmt: skip
        rows = TENSOR | {"shape": [num, 4], "data": [0] * 4 * num if num < 9 else [0]}
        return error_of(infer_bytes(unlogged, {"inputs": [names, rows]}, data))

    assert "episode_id[0]: found 4294967295 bytes" in refused(b"\xff\xff\xff\xffab")
    assert "episode_id[0]: not UTF-8" in refused(b"\x01\x00\x00\x00\xff")
    assert "hold 1 strings, expected 2 strings" in refused(b"\x01\x00\x00\x00a", 2)
    assert "hold 1 strings and more" in refused(b"\x01\x00\x00\x00a\x01")
    assert "hold 1 strings, expected 1000000000" in refused(b"\x01\x00\x00\x00a", 10**9)


def test_content_types_that_a_page_may_send_are_refused_without_the_header(unlogged):
    body = json.dumps({"inputs": [TENSOR]})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = unlogged.post("/v2/models/p/infer", content=body, headers={"content-type": kind})
        assert "Inference-Header-Content-Length" in error_of(answer, 415)
    error_of(infer_bytes(unlogged, binary(0), b"", **{"content-type": "text/plain"}), 415)


def test_too_many_rows(limited_client):
    answer = infer(limited_client, TENSOR | {"shape": [17, 4], "data": [0] * 68})
    assert error_of(answer, 413) == "observation: found 17 observations, expected at most 16"


def test_models_and_versions(unlogged):
    for path in ("p", "p@champion", "p%40champion", "p/versions/2", "p@champion/versions/2"):
        assert unlogged.get(f"/v2/models/{path}/ready").json()["ready"] is True
        found = unlogged.get(f"/v2/models/{path}").json()
        assert found["versions"] == ["2"]
        assert found["inputs"][0] == {"name": "observation", "datatype": "FP32", "shape": [-1, 4]}
    assert "found q, expected one of p, p@champion" in error_of(unlogged.get("/v2/models/q"), 404)
    for version in ("3", "02", "x", "-2"):
        error = error_of(unlogged.get(f"/v2/models/p/versions/{version}/ready"), 404)
        assert error == f"version: found {version}, expected a version that p serves: 2"
    answer = infer(unlogged, TENSOR, path="/v2/models/p/versions/3/infer")
    assert "found 3" in error_of(answer, 404)
    assert "unknown path /v2/models" in error_of(unlogged.get("/v2/models/p/x/y"), 404)
    for method in ("GET", "HEAD"):
        assert unlogged.request(method, "/v2/models/p/ready%0A").status_code == 404
    assert unlogged.request("HEAD", "/v2/models/p/ready").status_code == 200
    answer = unlogged.post("/v2/models/p")
    assert "use GET" in error_of(answer, 405)
    assert answer.headers["allow"] == "GET"
    assert unlogged.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    assert unlogged.get("/v2/health/live").json() == {"live": True}
    assert unlogged.get("/v2/health/ready").json() == {"ready": True}


def test_a_canary_has_its_share_of_the_model_and_a_name_of_its_own(app_client, serving, policy):
    state = serving(policy)
    state.router = Router(
        ServedPolicy("p", 2, policy, "p@champion"),
        [(ServedPolicy("p", 3, policy, "p@challenger"), 0.5)],
    )
    with app_client(create_app(lambda: state)) as client:
        rows = TENSOR | {"shape": [64, 4], "data": ROW * 64}
        names = {"name": "episode_id", "shape": [64], "datatype": "BYTES",
                 "data": [f"e{i}" for i in range(64)]}  # fmt: skip
        answer = infer(client, rows, names).json()
        acted = client.post("/act", json={"observation": [ROW] * 64, "episode_ids": names["data"]})
        versions = answer["parameters"]["versions"]
        assert versions == ",".join(map(str, acted.json()["versions"]))
        assert set(versions) == {"2", "3", ","}
        assert "model_version" not in answer
        by_path = {"p@challenger": "3", "p@champion": "2", "p/versions/3": "3", "p/versions/2": "2"}
        for path, version in by_path.items():
            answer = infer(client, rows, path=f"/v2/models/{path}/infer").json()
            assert answer["model_version"] == version
        assert client.get("/v2/models/p").json()["versions"] == ["2", "3"]
        # The alias moves.
        state.router.replace(0, ServedPolicy("p", 4, policy, "p@champion"))
        assert client.get("/v2/models/p").json()["versions"] == ["3", "4"]
        answer = infer(client, rows, path="/v2/models/p@champion/infer").json()
        assert answer["model_version"] == "4"
        answer = infer(client, rows, path="/v2/models/p/versions/2/infer")
        assert "found 2, expected a version that p serves: 4, 3" in error_of(answer, 404)


class DictPolicy:
    """Takes every leaf of a Dict, and acts by one of them."""

    def __init__(self):
        space = Dict(
            {
                "image": Box((2, 2), "uint8", 0, 255),
                "gear": Discrete(3, start=1),
                "note": Text(),
                "pair": Tuple((Box(()), Box((1,), "bool", 0, 1))),
            }
        )
        self.spec = PolicySpec(space, Box((2,), "float32", -9.0, 9.0), "deterministic")
        self.seen = None

    def act(self, observations, state=None, **options):
        self.seen = observations
        first = observations["image"].reshape(-1, 4)[:, :2].astype(np.float32)
        return Act(first, None)


class FirstActionPolicy:
    """Takes any space, and always acts alike."""

    def __init__(self, space):
        self.spec = PolicySpec(space, Discrete(2), "categorical")

    def act(self, observations, state=None, **options):
        num = len(observations)
        return Act(np.zeros(num, np.int64), np.zeros(num, np.float32))


PLAIN = [
    (Discrete(3), "INT64", [], [0, 2], [0, 3], "observation[1]: found"),
    (MultiDiscrete((2, 3)), "INT64", [2], [1, 2, 0, 0], [1, 2, 2, 0], "observation[1]: found"),
    (Text(), "BYTES", [], ["hé", ""], ["a", 3], "observation.data[1]: found 3"),
    (Box(()), "FP32", [], [0.5, 1], [0.5, "1"], "observation.data[1]: found"),
    (Box((1,), "float64"), "FP64", [1], [[1e300], [2]], [[1], [2, 3]], "found a list of 2"),
    (Box((1,), "bool", 0, 1), "BOOL", [1], [True, False], [1, 0], "observation.data[0]: found 1"),
]


@pytest.mark.parametrize(
    ("space", "datatype", "shape", "good", "wrong", "message"),
    PLAIN,
    ids=[str(c[0]) for c in PLAIN],
)
def test_every_kind_of_space_is_a_tensor(
    app_client, serving, space, datatype, shape, good, wrong, message
):
    with app_client(create_app(lambda: serving(FirstActionPolicy(space)))) as client:
        described = client.get("/v2/models/p").json()["inputs"][0]
        assert described == {"name": "observation", "datatype": datatype, "shape": [-1, *shape]}
        tensor = {"name": "observation", "datatype": datatype, "shape": [2, *shape]}
        found = outputs_of(infer(client, tensor | {"data": good}))
        assert found["action"]["data"] == [0, 0]
        assert message in error_of(infer(client, tensor | {"data": wrong}))


def test_leaves_of_a_dict_are_tensors_and_a_density_that_is_none_is_null(app_client, serving):
    acting = DictPolicy()
    with app_client(create_app(lambda: serving(acting))) as client:
        inputs = {one["name"]: one for one in client.get("/v2/models/p").json()["inputs"]}
        assert [(one["datatype"], one["shape"]) for one in list(inputs.values())[:5]] == [
            ("UINT8", [-1, 2, 2]), ("INT64", [-1]), ("BYTES", [-1]), ("FP32", [-1]),
            ("BOOL", [-1, 1]),
        ]  # fmt: skip
        assert "action_mask" not in inputs
        tensors = {
            "observation.image": {"datatype": "UINT8", "shape": [2, 2, 2], "data": list(range(8))},
            "observation.gear": {"datatype": "INT64", "shape": [2], "data": [1, 3]},
            "observation.note": {"datatype": "BYTES", "shape": [2], "data": ["hé", ""]},
            "observation.pair._0": {"datatype": "FP32", "shape": [2], "data": [0.5, 1]},
            "observation.pair._1": {"datatype": "BOOL", "shape": [2, 1], "data": [True, False]},
        }

        def send(**changed):
            both = {name: {"name": name, **one} for name, one in (tensors | changed).items()}
            return infer(client, *both.values())

        outputs = outputs_of(send())
        assert outputs["action"]["shape"] == [2, 2]
        assert outputs["action"]["data"] == [0, 1, 4, 5]
        assert outputs["log_prob"]["data"] == [None, None]
        assert acting.seen["pair"]["_1"].tolist() == [[True], [False]]
        assert acting.seen["gear"].tolist() == [1, 3]
        wrong = {"observation.gear": tensors["observation.gear"] | {"data": [1, 4]}}
        assert "observation[1].gear: found 4" in error_of(send(**wrong))
        short = {"observation.gear": {"datatype": "INT64", "shape": [1], "data": [1]}}
        assert "found 1 rows, expected 2" in error_of(send(**short))


def test_states_are_continued_by_their_version(app_client, serving, kit, tmp_path):
    spec = PolicySpec(Box((4,)), Discrete(2), "categorical", state_size=3)
    policy = load_policy(kit.save_policy(tmp_path / "p", spec, kit.stateful_graph(4, 3)))
    state = serving(policy)
    state.router = Router(
        ServedPolicy("p", 2, policy, "p@champion"),
        [(ServedPolicy("p", 3, policy, "p@challenger"), 0.5)],
    )
    with app_client(create_app(lambda: state)) as client:
        first = infer(client, TENSOR, path="/v2/models/p/versions/3/infer")
        token = outputs_of(first)["state"]["data"]
        carried = {"name": "state", "shape": [1], "datatype": "BYTES", "data": token}
        for name in ("p", "p@champion", "p/versions/3"):
            answer = infer(client, TENSOR, carried, path=f"/v2/models/{name}/infer")
            assert answer.json()["model_version"] == "3"
        answer = infer(client, TENSOR, carried, path="/v2/models/p/versions/2/infer")
        assert error_of(answer) == "state[0]: found a state of version 3, expected one of version 2"
        begun = infer(client, TENSOR, carried | {"data": [""]}, path="/v2/models/p@champion/infer")
        assert begun.json()["model_version"] == "2"
        assert "state[0]" in error_of(infer(client, TENSOR, carried | {"data": ["forged"]}))


def test_q_values_are_an_output(app_client, serving, kit, tmp_path):
    spec = PolicySpec(Box((4,)), Discrete(2), "q_values")
    graph = kit.linear_graph(kit.WEIGHTS, "q_values", 4)
    policy = load_policy(kit.save_policy(tmp_path / "p", spec, graph))
    with app_client(create_app(lambda: serving(policy, takes_options=False))) as client:
        found = outputs_of(infer(client, TENSOR | {"data": [1, 0, 0, 0]}))
        assert found["q_values"]["shape"] == [1, 2]
        assert found["q_values"]["data"] == [1.0, -1.0]
        asked = outputs_of(infer(client, TENSOR, outputs=[{"name": "action"}]))
        assert list(asked) == ["action"]
        answer = infer(client, TENSOR, parameters={"epsilon": 0.5})
        assert "epsilon: this server takes no exploration options" in error_of(answer)


def test_the_server_explores_as_for_act_and_a_seed_repeats(app_client, serving, policy):
    state = serving(policy, exploration=Exploration(epsilon=0.5))
    rows = TENSOR | {"shape": [64, 4], "data": ROW * 64}
    with app_client(create_app(lambda: state)) as client:
        first = outputs_of(infer(client, rows, parameters={"seed": 7}))
        assert set(first["action"]["data"]) == {0, 1}
        assert len(set(first["log_prob"]["data"])) == 2
        assert outputs_of(infer(client, rows, parameters={"seed": 7})) == first
        acted = client.post("/act", json={"observation": [ROW] * 64, "seed": 7}).json()
        assert acted["actions"] == first["action"]["data"]
        certain = outputs_of(infer(client, rows, parameters={"deterministic": True}))
        assert set(certain["log_prob"]["data"]) == {0.0}


def test_tokens_hosts_and_origins(app_client, serving, policy):
    tokens = Tokens(((b"a" * 20, "act"), (b"b" * 20, "admin")))
    with app_client(create_app(lambda: serving(policy, tokens=tokens))) as client:
        body = {"inputs": [TENSOR]}
        act, admin = ({"authorization": f"Bearer {letter * 20}"} for letter in "ab")
        for method, path in (
            ("POST", "/v2/models/p/infer"),
            ("POST", "/v2/models/p/versions/2/infer"),
            ("GET", "/v2/models/p"),
            ("GET", "/v2/models/p/ready"),
        ):
            more = {"json": body} if method == "POST" else {}
            answer = client.request(method, path, **more)
            assert "token missing" in error_of(answer, 401)
            assert "www-authenticate" in answer.headers
            assert "lacks role act" in error_of(
                client.request(method, path, headers=admin, **more), 403
            )
            assert client.request(method, path, headers=act, **more).status_code == 200
        assert client.get("/v2/health/ready", headers={"host": "elsewhere"}).status_code == 200
        answer = client.get("/v2/models/p", headers={**act, "host": "elsewhere"})
        assert "unknown host" in error_of(answer, 421)
        origin = {**act, "origin": "http://elsewhere"}
        answer = client.post("/v2/models/p/infer", json=body, headers=origin)
        assert "origin http://elsewhere is not allowed" in error_of(answer, 403)
