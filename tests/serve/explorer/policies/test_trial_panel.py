"""The form on a policy's page: the action of an observation, against the policy itself."""

import hashlib
import json
import re
import subprocess
import sys
from urllib.parse import quote, urlencode

import numpy as np
import pytest
from onnx import TensorProto, helper

from replaylake.datastore.episodes.encoding import CATEGORY, NUMBER, Encoding, Field
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiBinary
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.manifest import describe_model
from replaylake.datastore.lake.policies.package import load_policy, save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.explorer.visits.request_queue import RequestQueue


@pytest.fixture(scope="module")
def tried(served_lake, reader_type):
    return reader_type(served_lake)


def ask(name="clone", **query):
    values = {key.rstrip("_"): value for key, value in query.items()}
    return f"/policies/{name}.json?{urlencode(values)}"


def test_it_answers_as_the_policy_does(tried):
    for version in (1, 2):
        ref = tried.lake.registry.resolve(f"clone:{version}")
        policy = load_policy(ref.path)
        observation = np.array([[0.25, 1.5]], np.float32)
        answer = tried.json(ask(try_=version, observation="[0.25, 1.5]", temperature="2"))["trial"]
        probs = policy.action_probs(observation, deterministic=False, temperature=2.0)[0]
        assert answer["action"] == policy.act(observation).actions[0] == 1
        assert answer["version"] == version
        assert answer["probabilities"] == pytest.approx(probs.tolist())
        assert answer["log_prob"] == pytest.approx(np.log(probs[1]))


def test_the_page_draws_action_and_probabilities(tried):
    page = tried.page("/policies/clone?try=1&observation=[0,0]&temperature=1")
    place = page.texts.index("action, the most likely")
    assert page.texts[place + 1] == "0"
    # Two actions alike: ln 0.5.
    assert "-0.693147" in page.texts
    assert page.texts.count("0.5") == 2
    assert ("option", {"value": "1", "selected": ""}) in page.tags


def test_the_form_begins_with_an_observation_of_its_data(tried):
    page = tried.page("/policies/clone")
    first = tried.lake.sql("SELECT observation FROM live.steps LIMIT 1", at={"live": 1})
    assert json.dumps(first.column(0).to_pylist()[0]) in page.texts
    assert any(text.startswith("SELECT observation FROM live.steps") for text in page.texts)
    assert tried.json("/policies/clone.json")["trial"] is None
    # What the form sends is an address of its own.
    assert ("form", {"action": "/policies/clone#action", "class": "try"}) in page.tags


@pytest.mark.parametrize(
    ("query", "field", "words"),
    [
        ({"observation": "[1"}, "observation", "expected JSON"),
        ({"observation": "[" * 9000}, "observation", "expected JSON"),
        ({"observation": "[1]"}, "observation", "Box float32[2]"),
        ({"observation": '[1, "x"]'}, "observation[1]", "Box float32[2]"),
        ({"observation": "[1, NaN]"}, "observation", ""),
        ({"observation": "[0, 0]" + " " * 20_000}, "observation", "at most 16,000"),
        ({"observation": "[0, 0]", "temperature": "hot"}, "temperature", "1e-6 to 1e6"),
        ({"observation": "[0, 0]", "temperature": "0"}, "temperature", "1e-6 to 1e6"),
    ],
)
def test_what_cannot_be_acted_on_is_said(tried, query, field, words):
    error = tried.json(ask(**query), 422)["trial"]["error"]
    assert error["field"] == field
    assert words in error["message"]
    page = tried.page("/policies/clone?" + urlencode(query), 422)
    assert any(attributes.get("role") == "alert" for _, attributes in page.tags)


def test_hostile_text_stays_text(tried, hostile):
    page = tried.page(f"/policies/clone?try={quote(hostile)}&observation={quote(hostile)}", 422)
    assert hostile in page.texts
    text = json.dumps({"x": hostile})
    tried.page(f"/policies/clone?observation={quote(text)}", 422)


def test_a_link_on_another_site_acts_on_nothing(tried):
    headers = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    answer = tried.client.get("/policies/clone?observation=[0,0]", headers=headers)
    assert answer.status_code == 200
    assert "Press Act to see the action." in answer.text
    assert "most likely" not in answer.text


def test_so_many_trials_run_at_a_time_as_queries(served_lake, reader_type):
    reader = reader_type(served_lake)
    reader.app.sandboxes = RequestQueue(max_running=0, max_waiting=0)
    page = reader.page("/policies/clone?observation=[0,0]", 503)
    assert "queries wait already" in page.text
    reader.page("/policies/clone")


def test_a_policy_without_a_density_has_its_action_alone(tmp_path, kit, reader_type):
    lake = open_lake(tmp_path / "lake", create=True)
    spec = PolicySpec(Box((1,)), Box((2,), "float32", -2.0, 2.0), "deterministic")
    graph = kit.linear_graph(np.array([[1.0, -1.0]], np.float32), "actions", 1)
    lake.registry.register(
        "arm", kit.save_policy(tmp_path / "a", spec, graph), run_id="r", lineage={}
    )
    reader = reader_type(lake)
    answer = reader.json(ask("arm", observation="[0.5]"))["trial"]
    assert answer["action"] == [0.5, -0.5]
    assert answer["log_prob"] is None
    page = reader.page("/policies/arm?observation=[0.5]")
    assert "none: the policy has no density" in page.texts
    assert "This policy has one action for each observation." in page.texts


def test_draws_of_a_gaussian_are_histograms(tmp_path, reader_type):
    """The graph's input is the mean and the log of the standard deviation."""
    lake = open_lake(tmp_path / "lake", create=True)
    names = ("means", "log_stds")
    graph = helper.make_graph(
        [helper.make_node("Split", ["observations"], list(names), axis=1)],
        "gaussian",
        [helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in names],
    )
    opset = helper.make_opsetid("", 17)
    onnx = helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
    spec = PolicySpec(Box((2,)), Box((1,), "float32", -100.0, 100.0), "gaussian")
    save_package(tmp_path / "p", onnx=onnx, spec=spec, manifest={}, learner_weights=None)
    lake.registry.register("arm", tmp_path / "p", run_id="r", lineage={})
    reader = reader_type(lake)
    answer = reader.json(ask("arm", observation="[3, 0]"))["trial"]
    assert answer["action"] == [3.0]
    # Of a normal distribution with standard deviation 1, at its mean: -ln(2 pi) / 2.
    assert answer["log_prob"] == pytest.approx(-0.9189385, abs=1e-5)
    page = reader.page("/policies/arm?observation=[3,0]")
    assert "Action 0" in page.texts
    counts = [
        int(found[1].replace(",", ""))
        for text in page.texts
        if (found := re.search(r": ([\d,]+) draws$", text))
    ]
    assert sum(counts) == 1000
    assert len(counts) == 24


def test_named_fields_are_acted_on_by_name(tmp_path, kit, reader_type):
    lake = open_lake(tmp_path / "lake", create=True)
    encoding = Encoding(
        (Field("age", NUMBER), Field("device", CATEGORY, ("ios", "web"))), ("a", "b")
    )
    spec = PolicySpec(Box((encoding.width,)), Discrete(2), "categorical", encoding=encoding)
    weights = np.zeros((encoding.width, 2), np.float32)
    weights[-1, 1] = 1.0  # of `device = web`
    graph = kit.linear_graph(weights, "logits", encoding.width)
    package = kit.save_policy(tmp_path / "p", spec, graph)
    lake.registry.register("shop", package, run_id="r", lineage={})
    reader = reader_type(lake)
    for device, action in (("web", 1), ("ios", 0)):
        text = json.dumps({"age": 30, "device": device})
        assert reader.json(ask("shop", observation=text))["trial"]["action"] == action
    page = reader.page("/policies/shop?" + urlencode({"observation": text}))
    assert "called" in page.texts
    assert {"0: a", "1: b"} <= set(page.texts)
    error = reader.json(ask("shop", observation='{"age": 30}'), 422)["trial"]["error"]
    assert error["field"] == "observation.device"


def test_actions_of_several_elements_are_drawn(tmp_path, kit, reader_type):
    lake = open_lake(tmp_path / "lake", create=True)
    spec = PolicySpec(Box((1,)), MultiBinary(2), "multi_categorical")
    # Element 0 is almost always 1, element 1 always as likely as not.
    weights = np.array([[-9.0, 9.0, 0.0, 0.0]], np.float32)
    graph = kit.linear_graph(weights, "logits", 1)
    lake.registry.register(
        "pair", kit.save_policy(tmp_path / "a", spec, graph), run_id="r", lineage={}
    )
    page = reader_type(lake).page("/policies/pair?observation=[1]")
    assert "1,000 draws at temperature 1." in page.texts
    assert "Action 0" in page.texts
    assert "1: 1,000 draws" in page.texts


def test_named_parts_of_an_observation_come_from_its_data(tmp_path, kit, reader_type):
    lake = open_lake(tmp_path / "lake", create=True)
    space = Dict({"near": Box((2, 2)), "kind": Discrete(3)})
    observations = {
        "near": np.full((2, 2, 2), 0.1, np.float32),
        "kind": np.array([2, 0]),
    }
    lake.dataset("d").append(
        [Episode("e", observations, np.zeros(2, np.int64), np.zeros(2), terminated=True)]
    )
    spec = PolicySpec(space, Discrete(2), "categorical")
    package = kit.save_policy(tmp_path / "a", spec)
    lineage = {"datasets": [{"dataset": "gone", "version": 1}, {"dataset": "d", "version": 1}]}
    lake.registry.register("p", package, run_id="r", lineage=lineage)
    texts = reader_type(lake).page("/policies/p").texts
    assert '{"kind": 2, "near": [[0.1, 0.1], [0.1, 0.1]]}' in texts or (
        '{"near": [[0.1, 0.1], [0.1, 0.1]], "kind": 2}' in texts
    )


def test_a_broken_package_names_the_fault_and_a_command(tmp_path, kit, reader_type):
    lake = open_lake(tmp_path / "lake", create=True)
    ref = lake.registry.register("p", kit.save_policy(tmp_path / "a"), run_id="r", lineage={})
    (ref.path / "policy.onnx").write_bytes(b"no graph")
    page = reader_type(lake).page("/policies/p?observation=[0,0,0,0]", 400)
    assert "policy.onnx" in page.text
    assert "replaylake serve p:1" in page.texts


def test_a_language_model_has_no_form(tmp_path, reader_type):
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["<b>Llama"], "vocab_size": 8}
    files = {"config.json": json.dumps(config), "tokenizer.json": "{}", "m.safetensors": "0"}
    for name, text in files.items():
        (model / name).write_text(text)
    sha256s = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    lake = open_lake(tmp_path / "lake", create=True)
    manifest = describe_model(model, sha256s, {})
    lake.registry.register_model("agent", model, manifest, run_id="", lineage={})
    page = reader_type(lake).page("/policies/agent?observation=[0,1]")
    assert "replaylake serve agent:1 --log-to DATASET" in page.texts
    assert not any(name == "textarea" for name, _ in page.tags)


def test_the_explorer_starts_without_onnxruntime_and_acts_without_torch(served_lake):
    code = f"""if True:
        import sys
        from starlette.testclient import TestClient
        from replaylake.datastore.lake.lake import open_lake
        from replaylake.serve.explorer.app import create_explorer
        app = create_explorer(open_lake({str(served_lake.path)!r}))
        client = TestClient(app, base_url="http://localhost")
        assert client.get("/policies/clone").status_code == 200
        assert "onnxruntime" not in sys.modules
        answer = client.get("/policies/clone.json?observation=[0,1]").json()
        assert answer["trial"]["action"] == 1
        assert "onnxruntime" in sys.modules and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
