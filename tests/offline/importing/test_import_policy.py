"""Imported policies act, are evaluated and served as those of the library; others are refused."""

import io
import json
import os
import zipfile

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    InvalidNameError,
    NotFoundError,
    SourceInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.package import graph_policy, load_policy
from replaylake.offline.evaluation.ope.evaluate_policy import evaluate_policy
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest
from replaylake.offline.importing import import_policy as import_module
from replaylake.offline.importing.cleanrl import convert_state_dict
from replaylake.offline.importing.import_policy import ImportOptions, import_policy
from replaylake.offline.importing.onnx_model import add_normalization

_NAMES = (
    "cleanrl_dqn",
    "d3rlpy_discrete_cql",
    "d3rlpy_iql",
    "sb3_cartpole",
    "sb3_dqn",
    "sb3_ppo",
    "sb3_ppo_box",
    "sb3_sac",
    "sb3_td3",
    "sklearn_forest",
    "xgboost_binary",
    "xgboost_classes",
    "xgboost_regressor",
)


def _file(kit, name):
    return kit.POLICIES / kit.read_entries()[name]["file"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.needs_d3rlpy if name[0] == "d" else ())
        for name in _NAMES
    ],
)
def test_a_policy_acts_as_in_its_library(policy_lake, kit, name):
    entry = kit.read_entries()[name]
    expected = np.load(kit.POLICIES / f"{name}.expect.npy")
    observations = np.load(kit.POLICIES / f"{name}.observations.npy")
    outputs = tuple(entry.get("outputs", ()))
    options = ImportOptions(head=entry.get("head"), outputs=outputs)
    file = kit.POLICIES / entry["file"]
    result = import_policy(policy_lake, name, name, file, options=options)
    assert (result.num_observations, result.num_compared) == (200, 0)
    policy = load_policy(result.policy.path, result.policy.manifest_sha256)
    actions = policy.act(observations).actions
    np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)


def test_all_committed_policies_are_tested(kit):
    assert sorted(kit.read_entries()) == sorted(_NAMES)


@pytest.mark.parametrize("name", ["sb3_ppo", "xgboost_binary", "xgboost_classes"])
def test_log_probabilities_are_those_of_the_library(policy_lake, kit, name):
    observations, actions, expected = (
        np.load(kit.POLICIES / f"{name}.{what}.npy")
        for what in ("observations", "actions", "log_probs")
    )
    result = import_policy(policy_lake, name, f"drawn_{name}", _file(kit, name))
    policy = load_policy(result.policy.path)
    found = policy.log_probs(observations, actions, deterministic=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_registry_says_where_a_policy_comes_from(policy_lake, kit):
    expect = kit.POLICIES / "sb3_dqn.expect.npy"
    result = import_policy(policy_lake, "sb3_dqn@1", "origin", _file(kit, "sb3_dqn"), expect=expect)
    assert (result.policy.name, result.policy.version) == ("origin", 1)
    entry = policy_lake.registry.show(policy_lake.registry.resolve("origin"))
    assert entry["lineage"]["algorithm"] == "sb3:dqn"
    assert entry["lineage"]["imported"]["library_version"] == "2.9.2"
    assert "datasets" not in entry["lineage"]
    imported = load_policy(result.policy.path).manifest.body["imported"]
    assert imported["checked"] == {
        "dataset": "sb3_dqn",
        "version": 1,
        "num_observations": 200,
        "agreement": result.agreement,
        "num_compared": 200,
        "num_distinct": 2,
        "max_difference": None,
        "num_ties": 0,
    }
    assert any("epsilon 0.05" in note for note in imported["not_carried"])
    assert result.to_json()["version"] == 1


def test_texts_of_a_file_are_registered_as_utf_8(policy_lake, kit, tmp_path):
    with zipfile.ZipFile(_file(kit, "sb3_ppo")) as archive:
        data = json.loads(archive.read("data"))
        tensors = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
    data["policy_class"] = {"__module__": "half \ud800"}
    path = kit.write_archive(tmp_path / os.fsdecode(b"ppo\xff.zip"), tensors, **data)
    result = import_policy(policy_lake, "sb3_ppo", "texts", path)
    imported = load_policy(result.policy.path).manifest.body["imported"]
    assert (imported["file"], imported["policy_module"]) == ("ppo?.zip", "half ?")


def test_a_policy_is_refused_where_its_actions_differ(policy_lake, kit):
    expected = np.load(kit.POLICIES / "sb3_ppo.expect.npy")
    expected[7] = (expected[7] + 1) % 3
    before = policy_lake.registry.list()
    with pytest.raises(SourceInvalidError, match=r"for observation 7 is .*; 1 of 200 differ"):
        import_policy(policy_lake, "sb3_ppo", "differs", _file(kit, "sb3_ppo"), expect=expected)
    assert policy_lake.registry.list() == before


def test_continuous_actions_are_compared_to_1e_5(policy_lake, kit):
    expected = np.load(kit.POLICIES / "sb3_td3.expect.npy")
    observations = np.load(kit.POLICIES / "sb3_td3.observations.npy")
    arguments = policy_lake, "sb3_td3", "compared", _file(kit, "sb3_td3")
    given = {"observations": observations[::-1], "expect": expected[::-1].astype(np.float64)}
    result = import_policy(*arguments, **given)
    assert result.max_difference < 1e-5
    with pytest.raises(SourceInvalidError, match="1 of 200 differ"):
        import_policy(*arguments, expect=expected + 1e-3 * (np.arange(200) == 3)[:, None])


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"observations": np.zeros((2, 4), np.float32)}, "observations"),
        ({"expect": np.zeros(201, np.int64)}, "expect"),
        ({"expect": np.zeros((3, 2), np.int64)}, "expect"),
        ({"expect": np.full(3, 0.5)}, "expect"),
        ({"expect": np.zeros(3, int), "observations": np.zeros((2, 4))}, "observations"),
        ({"expect": np.zeros(3, int), "observations": np.zeros((3, 5))}, "observations"),
        ({"options": ImportOptions(format="keras")}, "format"),
        ({"options": ImportOptions(head="categorical")}, "head"),
        ({"options": ImportOptions(frame_stack=0)}, "frame_stack"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(policy_lake, kit, arguments, parameter):
    with pytest.raises(ConfigInvalidError) as caught:
        import_policy(policy_lake, "sb3_ppo", "refused", _file(kit, "sb3_ppo"), **arguments)
    assert caught.value.parameter == parameter


def test_actions_that_are_no_array_of_numpy_are_refused(policy_lake, kit, tmp_path):
    planted = np.array([{"a": 1}], dtype=object)
    np.save(tmp_path / "objects.npy", planted, allow_pickle=True)
    (tmp_path / "text.npy").write_text("1, 2, 3")
    for name in ("objects.npy", "text.npy"):
        with pytest.raises(ConfigInvalidError, match="cannot be read"):
            import_policy(
                policy_lake, "sb3_ppo", "no", _file(kit, "sb3_ppo"), expect=tmp_path / name
            )


def test_what_is_named_has_to_be_there(policy_lake, kit, tmp_path):
    file = _file(kit, "sb3_ppo")
    with pytest.raises(InvalidNameError):
        import_policy(policy_lake, "sb3_ppo", "No!", file)
    with pytest.raises(NotFoundError, match="no such file"):
        import_policy(policy_lake, "sb3_ppo", "no", tmp_path / "absent.zip")
    with pytest.raises(SourceInvalidError, match="is not a file"):
        import_policy(policy_lake, "sb3_ppo", "no", tmp_path)
    with pytest.raises(NotFoundError):
        import_policy(policy_lake, "absent", "no", file)
    (tmp_path / "unknown.bin").write_bytes(b"weights")
    with pytest.raises(SourceInvalidError, match="was not recognized"):
        import_policy(policy_lake, "sb3_ppo", "no", tmp_path / "unknown.bin")


def test_a_dataset_without_steps_cannot_be_tried_on(policy_lake, kit):
    policy_lake.dataset("empty").create(Box((4,), "float32"), Discrete(3))
    with pytest.raises(EmptyReplayError, match="found no steps"):
        import_policy(policy_lake, "empty", "no", _file(kit, "sb3_ppo"))


def test_a_policy_of_other_spaces_is_refused(policy_lake, kit):
    with pytest.raises(SpaceUnsupportedError, match="found 3 numbers"):
        import_policy(policy_lake, "sb3_sac", "no", _file(kit, "sb3_ppo"))
    for name, size, num in (("three", 3, 3), ("two", 4, 2)):
        observations = np.zeros((4, size), np.float32)
        space = Box((size,), "float32")
        kit.add_dataset(policy_lake, name, space, Discrete(num), observations)
    with pytest.raises(SpaceUnsupportedError, match="expected a float Box"):
        import_policy(policy_lake, "three", "no", _file(kit, "sb3_sac"))
    with pytest.raises(SpaceUnsupportedError, match="the policy has 3"):
        import_policy(policy_lake, "two", "no", _file(kit, "sb3_ppo"))


def test_bounds_of_actions_are_those_of_the_training(policy_lake, kit):
    observations = np.load(kit.POLICIES / "sb3_sac.observations.npy")
    space = Box((3,), "float32")
    unbounded, other = Box((2,), "float32"), Box((2,), "float32", -1, 1)
    kit.add_dataset(policy_lake, "unbounded", space, unbounded, observations)
    kit.add_dataset(policy_lake, "other_bounds", space, other, observations)
    expect = kit.POLICIES / "sb3_sac.expect.npy"
    result = import_policy(policy_lake, "unbounded", "bounds", _file(kit, "sb3_sac"), expect=expect)
    assert load_policy(result.policy.path).spec.action_space.low == -2.0
    with pytest.raises(SpaceUnsupportedError, match=r"bounds \[-1, 1\] of element 0"):
        import_policy(policy_lake, "other_bounds", "no", _file(kit, "sb3_sac"))


def test_statistics_of_normalized_observations_go_into_the_graph(policy_lake, kit, tmp_path):
    file, observations = (
        _file(kit, "sb3_ppo"),
        np.load(kit.POLICIES / "sb3_ppo.observations.npy"),
    )
    mean, var = np.array([0.1, -0.2, 0.0, 1.0]), np.array([4.0, 0.25, 1.0, 9.0])
    np.savez(tmp_path / "stats.npz", mean=mean, var=var, clip=1.5)
    options = ImportOptions(normalization=tmp_path / "stats.npz")
    plain = load_policy(import_policy(policy_lake, "sb3_ppo", "plain", file).policy.path)
    normalized = ((observations - mean) / np.sqrt(var + 1e-8)).clip(-1.5, 1.5)
    expected = plain.act(normalized.astype(np.float32)).actions
    assert len(np.unique(expected)) > 1
    result = import_policy(
        policy_lake, "sb3_ppo", "normalized", file, options=options, expect=expected
    )
    assert not any("VecNormalize" in note for note in result.not_carried)
    for arrays in ({"mean": mean}, {"mean": mean, "var": -var}, {"mean": mean[:2], "var": var[:2]}):
        np.savez(tmp_path / "stats.npz", **arrays)
        with pytest.raises((SourceInvalidError, SpaceUnsupportedError)) as caught:
            import_policy(policy_lake, "sb3_ppo", "no", file, options=options)
        assert caught.value.parameter == "normalization"


def test_arrays_that_are_damaged_or_too_large_are_refused(policy_lake, kit, tmp_path, monkeypatch):
    file, path = _file(kit, "sb3_ppo"), tmp_path / "stats.npz"
    options = ImportOptions(normalization=path)

    def refuse(reason):
        with pytest.raises(SourceInvalidError, match=reason) as caught:
            import_policy(policy_lake, "sb3_ppo", "no", file, options=options)
        assert caught.value.parameter == "normalization"

    np.savez(path, mean=np.full(4, 1j), var=np.ones(4))
    refuse("cannot be read.*complex128")
    np.savez_compressed(path, mean=np.zeros(4), var=np.arange(4.0))
    data = bytearray(path.read_bytes())
    start = data.index(b"mean.npy") + len(b"mean.npy") + 20
    data[start : start + 8] = b"\xff" * 8
    path.write_bytes(data)
    refuse("cannot be read")
    np.savez_compressed(path, mean=np.zeros(1_000_000), var=np.ones(4))
    monkeypatch.setattr(import_module, "_MAX_ARRAY_BYTES", 1_000_000)
    refuse("expected at most 1,000,000")
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }"
    header = header.ljust(117) + b"\n"
    (tmp_path / "huge.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header)
    with pytest.raises(ConfigInvalidError, match="cannot be read"):
        import_policy(policy_lake, "sb3_ppo", "no", file, expect=tmp_path / "huge.npy")


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_normalized_integers_are_not_truncated(kit, tmp_path, dtype):
    space = Box((2,), dtype, 0, 255)
    observations = np.array([[3, 20], [9, 2], [1, 255]], dtype)
    lake = open_lake(tmp_path / "lake", create=True)
    kit.add_dataset(lake, "counts", space, Discrete(2), observations, episodes=1)
    # By hand: (x - [5, 10]) / [4, 16] is [-0.5, 0.625], [1, -0.5], [-1, 5 (15.3, clipped)].
    np.savez(tmp_path / "stats.npz", mean=[5, 10], var=[16, 256], epsilon=0, clip=5)
    weights = {"network.0.weight": torch.tensor([[1.0, 2.0], [4.0, -2.0]])}
    weights["network.0.bias"] = torch.tensor([0.25, 0.0])
    torch.save(weights, tmp_path / "dqn.cleanrl_model")
    options = ImportOptions(normalization=tmp_path / "stats.npz")
    result = import_policy(lake, "counts", "dqn", tmp_path / "dqn.cleanrl_model", options=options)
    found = load_policy(result.policy.path).act(observations).q_values
    np.testing.assert_allclose(found, [[1.0, -3.25], [0.25, 5.0], [9.25, -14.0]], atol=1e-6)


def test_large_integers_are_normalized_exactly(kit):
    space = Box((1,), "int64")
    observations = np.array([[1_800_000_001], [1_800_000_003]])  # both 1,800,000,000 in float32
    buffer = io.BytesIO()
    torch.save({"network.0.weight": torch.tensor([[1.0]])}, buffer)
    conversion = convert_state_dict(buffer.getvalue(), "dqn", space, Discrete(1))
    onnx = add_normalization(conversion, np.array([1_800_000_000.0]), np.array([2.0]), 10.0)
    found = graph_policy(onnx, conversion.spec).act(observations).q_values
    np.testing.assert_array_equal(found, [[0.5], [1.5]])


def test_stacked_observations_are_compared_along_the_episodes(policy_lake, kit):
    observations = np.load(kit.POLICIES / "sb3_ppo.observations.npy")[:, :2]
    kit.add_dataset(policy_lake, "halves", Box((2,), "float32"), Discrete(3), observations)
    file, before = _file(kit, "sb3_ppo"), np.roll(observations, 1, axis=0)
    for start in (0, 100):  # two episodes: the first observation is repeated before each
        before[start] = observations[start]
    stacked = np.concatenate([before, observations], axis=1)
    plain = load_policy(import_policy(policy_lake, "sb3_ppo", "whole", file).policy.path)
    expected = plain.act(stacked).actions
    options = ImportOptions(frame_stack=2)
    result = import_policy(policy_lake, "halves", "stacked", file, options=options, expect=expected)
    assert (result.num_compared, result.num_distinct) == (200, 3)
    assert load_policy(result.policy.path).spec.frame_stack == 2
    with pytest.raises(ConfigInvalidError, match="for a policy that stacks frames"):
        import_policy(
            policy_lake,
            "halves",
            "no",
            file,
            options=options,
            expect=expected,
            observations=observations,
        )
    with pytest.raises(SourceInvalidError, match="of 200 differ"):
        import_policy(
            policy_lake, "halves", "no", file, options=options, expect=np.roll(expected, 1)
        )


def test_an_imported_policy_is_evaluated_on_a_log(policy_lake, kit):
    import_policy(policy_lake, "sb3_ppo", "evaluated", _file(kit, "sb3_ppo"))
    request = EvaluationRequest(
        "sb3_ppo",
        "evaluated",
        behavior_prob="1.0 / 3",
        estimators=("snips",),
        exploration=Exploration(epsilon=0.1),
    )
    report = evaluate_policy(policy_lake, request)
    assert report.notes == ("evaluated:1: its lineage names no training episodes",)
    assert report.training_discount == 0.99
    import_policy(policy_lake, "sb3_td3", "deterministic", _file(kit, "sb3_td3"))
    request = EvaluationRequest(
        "sb3_td3", "deterministic", behavior_prob="0.1", estimators=("wpdis",)
    )
    report = evaluate_policy(policy_lake, request)
    assert report.estimates.refused["wpdis"].startswith("head deterministic")
