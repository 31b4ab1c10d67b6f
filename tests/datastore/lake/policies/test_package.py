import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import (
    AlreadyExistsError,
    EpisodeInvalidError,
    FormatTooNewError,
    NotFoundError,
    PackageInvalidError,
)
from replaylake.datastore.lake.policies.graph_policy import graph_inputs
from replaylake.datastore.lake.policies.manifest import GRAPH, LEARNER, MANIFEST
from replaylake.datastore.lake.policies.package import (
    check_package,
    graph_input_names,
    graph_policy,
    load_learner_weights,
    load_policy,
    save_package,
)
from replaylake.datastore.lake.policies.policy import PolicySpec

SOURCE = Path(__file__).parents[4] / "src"
SPEC = PolicySpec(Box((2,)), Discrete(3), "categorical")
WEIGHTS = np.array([[1.0, 0.0, -1.0], [0.0, 2.0, 0.5]], np.float32)
BIAS = np.array([0.0, 0.1, 0.2], np.float32)


def linear_graph(output="logits"):
    """Logits = observations @ WEIGHTS + BIAS, built by hand: no torch in this folder."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["observations", "weights", "bias"], [output])],
        "policy",
        [helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["N", 2])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(WEIGHTS, "weights"), numpy_helper.from_array(BIAS, "bias")],
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


@pytest.fixture
def package(tmp_path):
    directory = tmp_path / "package"
    save_package(
        directory,
        onnx=linear_graph(),
        spec=SPEC,
        manifest={"algorithm": "bc", "metrics": {"loss": 0.5}},
        learner_weights={"a": np.arange(3.0), "steps": np.array(7)},
    )
    return directory


def test_it_acts_as_its_graph_says(package):
    observations = np.array([[1.0, 0.0], [0.0, 1.0], [-2.0, 0.0]], np.float32)
    # Logits: (1, 0.1, -0.8), (0, 2.1, 0.7), (-2, 0.1, 2.2).
    act = load_policy(package).act(observations)
    np.testing.assert_array_equal(act.actions, [0, 1, 2])


def test_the_manifest_says_what_it_is(package):
    manifest = check_package(package)
    assert manifest.spec == SPEC
    assert manifest.body["format_version"] == 1
    assert manifest.body["algorithm"] == "bc"
    assert set(manifest.body["files"]) == {GRAPH, LEARNER}
    assert len(manifest.sha256) == 64


def test_learner_weights_come_back(package):
    weights = load_learner_weights(package)
    np.testing.assert_array_equal(weights["a"], np.arange(3.0))
    assert weights["steps"].shape == ()
    assert weights["steps"] == 7


def test_without_learner_weights_it_acts_and_cannot_resume(tmp_path):
    directory = tmp_path / "p"
    save_package(directory, onnx=linear_graph(), spec=SPEC, manifest={}, learner_weights=None)
    assert sorted(path.name for path in directory.iterdir()) == [MANIFEST, GRAPH]
    load_policy(directory)
    with pytest.raises(NotFoundError, match=LEARNER):
        load_learner_weights(directory)


def test_it_is_never_overwritten(package):
    with pytest.raises(AlreadyExistsError, match="package"):
        save_package(package, onnx=b"", spec=SPEC, manifest={}, learner_weights=None)
    assert [path.name for path in package.parent.iterdir()] == ["package"]


@pytest.mark.parametrize("name", [GRAPH, LEARNER])
def test_one_flipped_bit_is_found(package, name):
    data = bytearray((package / name).read_bytes())
    data[len(data) // 2] ^= 1
    (package / name).write_bytes(data)
    with pytest.raises(PackageInvalidError, match=rf"{name}.*sha256.*altered"):
        load_policy(package)


def test_a_file_name_that_no_folder_can_hold_is_refused(package):
    path = package / MANIFEST
    body = json.loads(path.read_text())
    body["files"]["\0"] = body["files"][GRAPH]
    path.write_text(json.dumps(body))
    with pytest.raises(PackageInvalidError, match="names in the package's own folder"):
        check_package(package)


@pytest.mark.parametrize("space", [{"n": "2"}, {"n": 2, "start": " "}, {"n": 2.5}])
def test_a_space_of_texts_is_refused(package, space):
    path = package / MANIFEST
    body = json.loads(path.read_text())
    body["policy"]["action_space"] = {"type": "discrete", **space}
    path.write_text(json.dumps(body))
    with pytest.raises(PackageInvalidError, match="cannot be interpreted as an integer"):
        check_package(package)


def test_a_graph_of_another_rank_is_refused_when_it_runs(tmp_path):
    shape = helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["N"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N"])
    node = helper.make_node("Neg", ["observations"], ["logits"])
    opset = [helper.make_opsetid("", 17)]
    graph = helper.make_graph([node], "policy", [shape], [logits])
    model = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    spec = PolicySpec(Box((2,)), Discrete(2), "categorical")
    save_package(tmp_path / "p", onnx=model, spec=spec, manifest={}, learner_weights=None)
    policy = load_policy(tmp_path / "p")
    with pytest.raises(PackageInvalidError, match=r"cannot run it: .*[Rr]ank"):
        policy.act(np.zeros((1, 2), np.float32))


def test_a_missing_file_is_named(package):
    (package / GRAPH).unlink()
    with pytest.raises(PackageInvalidError, match=GRAPH):
        check_package(package)


def counting_graph(state_size=1):
    """Return a graph whose logits are its state and minus that, and which adds one to its state."""
    shape = ["N", state_size]
    graph = helper.make_graph(
        [
            helper.make_node("Neg", ["state"], ["less"]),
            helper.make_node("Concat", ["state", "less"], ["logits"], axis=1),
            helper.make_node("Add", ["state", "one"], ["next_state"]),
        ],
        "policy",
        [
            helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["N", 2]),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, shape),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2]),
            helper.make_tensor_value_info("next_state", TensorProto.FLOAT, shape),
        ],
        [numpy_helper.from_array(np.ones(1, np.float32), "one")],
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


STATEFUL = PolicySpec(Box((2,)), Discrete(2), "categorical", state_size=1)


@pytest.fixture
def stateful(tmp_path):
    save_package(
        tmp_path / "p", onnx=counting_graph(), spec=STATEFUL, manifest={}, learner_weights=None
    )
    return tmp_path / "p"


def test_a_policy_with_a_state_acts_on_what_it_is_given_back(stateful):
    policy = load_policy(stateful)
    assert policy.spec == STATEFUL
    observations = np.zeros((3, 2), np.float32)
    state = policy.initial_state(3)
    np.testing.assert_array_equal(state, np.zeros((3, 1)))
    act = policy.act(observations, state)
    np.testing.assert_array_equal(act.state, np.ones((3, 1)))
    # Logits (-2, 2), (0, 0) and (3, -3).
    state = np.array([[-2], [0], [3]], np.float32)
    probs = 1 / (1 + np.exp(-2 * state[:, 0].astype(np.float64)))
    found = policy.action_probs(observations, state, deterministic=False)
    np.testing.assert_allclose(found, np.stack([probs, 1 - probs], axis=1))
    found = policy.log_probs(observations, np.array([0, 0, 1]), state, deterministic=False)
    np.testing.assert_allclose(found, np.log([probs[0], 0.5, 1 - probs[2]]))
    np.testing.assert_array_equal(policy.act(observations, state).actions, [1, 0, 0])
    assert policy.observe(state, np.zeros(3)) is state


@pytest.mark.parametrize(
    "state", [None, np.zeros((2, 1), np.float32), np.zeros((3, 1)), np.zeros(3, np.float32)]
)
def test_a_state_that_does_not_fit_is_refused(stateful, state):
    policy = load_policy(stateful)
    observations = np.zeros((3, 2), np.float32)
    for ask in (policy.act, policy.action_probs, lambda o, s: policy.log_probs(o, [0, 0, 0], s)):
        with pytest.raises(EpisodeInvalidError, match=r"found state .*expected float32 \[3, 1\]"):
            ask(observations, state)


def test_only_a_policy_with_a_state_needs_the_newer_format(package, stateful):
    # Those of an earlier ReplayLake say nothing of a state, as one without does here.
    old = check_package(package).body
    assert old["format_version"] == 1
    assert "state_size" not in old["policy"]
    assert load_policy(package).spec.state_size == 0
    assert load_policy(package).initial_state(2) is None
    new = check_package(stateful).body
    assert new["format_version"] == 2
    assert new["policy"]["state_size"] == 1


def test_a_manifest_remembers_how_many_frames_are_stacked(tmp_path):
    spec = PolicySpec(Box((2,)), Discrete(2), "categorical", state_size=5, frame_stack=3)
    save_package(
        tmp_path / "p", onnx=counting_graph(), spec=spec, manifest={}, learner_weights=None
    )
    assert check_package(tmp_path / "p").spec == spec


def test_a_graph_without_the_state_that_its_manifest_names_is_refused(tmp_path):
    spec = PolicySpec(Box((2,)), Discrete(3), "categorical", state_size=4)
    with pytest.raises(PackageInvalidError, match=r"inputs \['observations'\].*'state'"):
        graph_policy(linear_graph(), spec)


def test_a_newer_format_is_refused_with_the_version_needed(package):
    path = package / MANIFEST
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "format_version": 4, "written_by": "9.8.7"}))
    with pytest.raises(FormatTooNewError, match=r"format 4.*up to 3.*9\.8\.7"):
        load_policy(package)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format_version": 1}',
        '{"format_version": 1, "policy": {"head": "categorical"}, "files": {}}',
        '{"format_version": null}',
    ],
)
def test_a_torn_manifest_is_refused(package, text):
    (package / MANIFEST).write_text(text)
    with pytest.raises(PackageInvalidError, match=MANIFEST):
        check_package(package)


def test_no_file_outside_the_package_is_read(package):
    path = package / MANIFEST
    body = json.loads(path.read_text())
    body["files"]["../secret"] = {"sha256": "0" * 64}
    path.write_text(json.dumps(body))
    with pytest.raises(PackageInvalidError, match="own folder"):
        check_package(package)


def test_a_folder_without_a_package_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match=MANIFEST):
        load_policy(tmp_path)


def test_a_graph_of_another_head_is_refused(tmp_path):
    directory = tmp_path / "p"
    save_package(
        directory, onnx=linear_graph("q_values"), spec=SPEC, manifest={}, learner_weights=None
    )
    with pytest.raises(PackageInvalidError, match=r"outputs \['q_values'\].*\['logits'\]"):
        load_policy(directory)


def test_a_graph_that_does_not_parse_is_refused(tmp_path):
    directory = tmp_path / "p"
    save_package(directory, onnx=b"no graph", spec=SPEC, manifest={}, learner_weights=None)
    with pytest.raises(PackageInvalidError, match="cannot load"):
        load_policy(directory)


@pytest.mark.parametrize(
    "manifest", [{"loss": float("nan")}, {"path": Path("x")}, {"format_version": 3}]
)
def test_a_manifest_that_is_no_json_is_refused_before_anything_is_written(tmp_path, manifest):
    with pytest.raises(PackageInvalidError, match="manifest"):
        save_package(tmp_path / "p", onnx=b"", spec=SPEC, manifest=manifest, learner_weights=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("observations", "message"),
    [
        ([[1.0, 2.0, 3.0]], r"shape \[3\].*\[2\]"),
        ([1.0, 2.0, 3.0, 4.0], "shape"),
        ([[1.0, float("nan")]], "finite"),
        ([["a", "b"]], "numbers"),
        ([[[1.0, 2.0]]], r"shape \[1, 2\]"),
    ],
)
def test_observations_that_do_not_fit_are_refused_not_reshaped(package, observations, message):
    with pytest.raises(EpisodeInvalidError, match=message):
        load_policy(package).act(observations)


def test_dict_observations_are_one_input_a_leaf():
    space = Dict({"position": Box((2,), "float64"), "inner": Dict({"room": Discrete(3)})})
    spec = PolicySpec(space, Discrete(2), "categorical")
    assert graph_input_names(spec) == ("observations.position", "observations.inner.room")
    inputs = graph_inputs(spec, {"position": [[1.0, 2.0]], "inner": {"room": [2]}})
    assert inputs["observations.position"].dtype == np.float32
    assert inputs["observations.inner.room"].dtype == np.int64


def test_a_sampled_head_gets_noise_from_the_rng():
    spec = PolicySpec(Box((1,)), Box((1,)), "sampled", noise_size=4)
    assert graph_input_names(spec) == ("observations", "noise")
    inputs = graph_inputs(spec, np.zeros((3, 1)), np.random.default_rng(0))
    assert inputs["noise"].shape == (3, 4)
    # By default from a generator of the system's entropy.
    without = [graph_inputs(spec, np.zeros((3, 1)))["noise"] for _ in range(2)]
    assert without[0].shape == (3, 4)
    assert (without[0] != without[1]).all()


def test_threads_may_share_one_policy(package):
    policy = load_policy(package)
    observations = np.random.default_rng(0).standard_normal((200, 2)).astype(np.float32)
    expected = policy.act(observations).actions
    wrong = []

    def act():
        for _ in range(50):
            if (policy.act(observations).actions != expected).any():
                wrong.append(1)

    threads = [threading.Thread(target=act) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


ACT = """
import json, sys
from pathlib import Path
from replaylake.datastore.lake.policies.package import load_policy
policy = load_policy(Path(sys.argv[1]))
actions = policy.act([[1.0, 0.0], [0.0, 1.0], [-2.0, 0.0]]).actions
print(json.dumps([actions.tolist(), sorted({name.split(".")[0] for name in sys.modules})]))
"""


def acting_process(python, package, path):
    done = subprocess.run(
        [python, "-c", ACT, str(package)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(path)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_acting_imports_neither_torch_nor_the_store(package):
    actions, modules = acting_process(sys.executable, package, SOURCE)
    assert actions == [0, 1, 2]
    heavy = {"torch", "pyarrow", "duckdb", "d3rlpy", "ray", "gymnasium", "safetensors", "onnx"}
    assert not heavy & set(modules)


@pytest.mark.slow
def test_it_acts_in_an_environment_with_numpy_and_onnxruntime_alone(package, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "numpy", "onnxruntime"],
        check=True,
        capture_output=True,
    )
    assert acting_process(str(python), package, SOURCE)[0] == [0, 1, 2]


def test_onnx_checker_accepts_the_hand_made_graph():
    onnx.checker.check_model(linear_graph())


def test_onnxruntime_reports_nothing_to_its_vendor(package, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    variables = {"HOME": str(home), "PATH": "", "PYTHONPATH": str(SOURCE)}
    code = (
        "import sys; from replaylake.datastore.lake.policies.package import load_policy; "
        "load_policy(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, package], env=variables, check=True)
    assert not list(home.rglob("*onnxruntime*"))
