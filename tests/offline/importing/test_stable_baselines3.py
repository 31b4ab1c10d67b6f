"""Archives of Stable-Baselines3: damaged, planted and of networks that are not converted."""

import base64
import io
import json
import pickle
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import (
    ReplayLakeError,
    SourceInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.policies.package import graph_policy
from replaylake.offline.importing import weights
from replaylake.offline.importing.stable_baselines3 import convert_archive
from replaylake.offline.networks.frame_stack import stack_space

_VECTOR, _ACTIONS = Box((4,), "float32"), Discrete(3)


def _convert(path, observations=_VECTOR, actions=_ACTIONS, num_frames=1):
    return convert_archive(path.read_bytes(), "ppo.zip", observations, actions, num_frames)


def _read_parts(kit, name="sb3_ppo"):
    with zipfile.ZipFile(kit.POLICIES / f"{name}.zip") as archive:
        data = json.loads(archive.read("data"))
        tensors = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
    return tensors, data


class _Planted:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_in_an_archive_are_not_executed(kit, tmp_path):
    sentinel = tmp_path / "executed"
    tensors, data = _read_parts(kit)
    text = base64.b64encode(pickle.dumps(_Planted(sentinel))).decode()
    for value in (data["policy_class"], data["policy_kwargs"], data["observation_space"]):
        value[":serialized:"] = text
    _convert(kit.write_archive(tmp_path / "planted.zip", tensors, **data))
    assert not sentinel.exists()
    planted = {**tensors, "action_net.weight": _Planted(sentinel)}
    with pytest.raises(SourceInvalidError, match="Nothing in it was executed"):
        _convert(kit.write_archive(tmp_path / "planted.zip", planted, **data))
    assert not sentinel.exists()


def test_a_damaged_archive_is_refused(kit, tmp_path):
    data = (kit.POLICIES / "sb3_ppo.zip").read_bytes()
    path = tmp_path / "damaged.zip"
    for size in range(0, len(data), 997):
        path.write_bytes(data[:size])
        with pytest.raises(SourceInvalidError):
            _convert(path)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(data), 60):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        with suppress(ReplayLakeError):  # and no other error
            _convert(path)


def test_an_archive_without_a_policy_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("data", "{}")
    with pytest.raises(SourceInvalidError, match=r"found no policy\.pth"):
        _convert(tmp_path / "other.zip")


def test_weights_that_are_not_finite_are_refused(kit, tmp_path):
    tensors, data = _read_parts(kit)
    tensors["action_net.bias"][1] = float("nan")
    with pytest.raises(SourceInvalidError, match=r"'action_net\.bias' that are not finite"):
        _convert(kit.write_archive(tmp_path / "nan.zip", tensors, **data))


def test_what_would_take_too_much_memory_is_refused(kit, tmp_path, monkeypatch):
    tensors, data = _read_parts(kit)
    wide = {**tensors, "action_net.weight": torch.zeros(1).expand(1 << 40)}
    path = kit.write_archive(tmp_path / "wide.zip", wide, **data)
    with pytest.raises(SourceInvalidError, match="expected all of them"):
        _convert(path)
    monkeypatch.setattr(weights, "MAX_BYTES", 1000)
    with pytest.raises(SourceInvalidError, match="expected at most 1,000"):
        weights.load_tensors(path.read_bytes(), "wide.zip")
    with pytest.raises(SourceInvalidError, match=r"has .* bytes, expected at most 1,000"):
        weights.read_entry(path.read_bytes(), "policy.pth", "wide.zip", max_bytes=1000)
    with pytest.raises(SourceInvalidError, match="expected at most 1,000"):
        weights.read_file(path, 1000)


def test_networks_of_ones_own_are_refused(kit, tmp_path):
    tensors, data = _read_parts(kit)
    path = tmp_path / "own.zip"
    own = {**tensors, **kit.layer_weights("attention.0", nn.Linear(2, 2))}
    with pytest.raises(SourceInvalidError, match=r"the tensors attention\.0\.weight"):
        _convert(kit.write_archive(path, own, **data))
    norm = {**tensors, "mlp_extractor.policy_net.1.weight": torch.ones(8)}
    with pytest.raises(SourceInvalidError, match="expected a Linear or a Conv2d"):
        _convert(kit.write_archive(path, norm, **data))
    options = data["policy_kwargs"]
    for changes, reason in (
        ({"features_extractor_class": "<class 'mine.Extractor'>"}, "extractor 'Extractor'"),
        ({"activation_fn": "<class 'mine.Swish'>"}, "the activation 'Swish'"),
        ({"squash_output": True}, "squash_output=True"),
    ):
        changed = {**data, "policy_kwargs": {**options, **changes}}
        with pytest.raises(SourceInvalidError, match=reason):
            _convert(kit.write_archive(path, tensors, **changed))
    with pytest.raises(SourceInvalidError, match="expected those of PPO"):
        _convert(kit.write_archive(path, {"weight": torch.ones(2)}, **data))
    lstm = {**tensors, "lstm_actor.weight_ih_l0": torch.ones(2, 2)}
    with pytest.raises(SourceInvalidError, match="RecurrentPPO"):
        _convert(kit.write_archive(path, lstm, **data))


@pytest.mark.parametrize("text", ["", [], "\ud800", "<class ''>"])
def test_classes_without_a_name_are_refused(kit, tmp_path, text):
    tensors, data = _read_parts(kit)
    for option in ("features_extractor_class", "activation_fn"):
        changed = {**data, "policy_kwargs": {option: text}}
        with pytest.raises(SourceInvalidError, match="Export the policy to ONNX"):
            _convert(kit.write_archive(tmp_path / "odd.zip", tensors, **changed))


@pytest.mark.parametrize(
    "limit",
    ["x", None, 0, float("nan"), 10**400],
    ids=["text", "none", "zero", "nan", "large"],
)
def test_a_limit_of_means_that_is_no_number_is_refused(kit, tmp_path, limit):
    tensors, data = _read_parts(kit, "sb3_sac")
    size = tensors["actor.mu.weight"].shape[1]
    for name in ("weight", "bias"):
        tensors[f"actor.mu.0.{name}"] = tensors.pop(f"actor.mu.{name}")
        tensors.pop(f"actor.log_std.{name}")
    tensors["actor.log_std"] = torch.zeros(size, 2)
    spaces = Box((3,), "float32"), Box((2,), "float32", -2, 2)
    changed = {**data, "policy_kwargs": {"clip_mean": 1.5}}
    _convert(kit.write_archive(tmp_path / "sde.zip", tensors, **changed), *spaces)
    changed = {**data, "policy_kwargs": {"clip_mean": limit}}
    with pytest.raises(SourceInvalidError, match="found clip_mean"):
        _convert(kit.write_archive(tmp_path / "sde.zip", tensors, **changed), *spaces)


def test_numbers_that_no_float_holds_are_left_out(kit, tmp_path):
    tensors, data = _read_parts(kit)
    changed = {**data, "gamma": 10**400, "num_timesteps": float("inf")}
    path = kit.write_archive(tmp_path / "large.zip", tensors, **changed)
    facts = _convert(path).facts
    assert (facts["gamma"], facts["num_timesteps"]) == (None, None)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        (f"mlp_extractor.policy_net.{'9' * 5000}.weight", (2, 2), "tensors mlp_extractor"),
        ("features_extractor.cnn.0.weight", (2, 2), "found kernels of"),
        ("features_extractor.cnn.0.weight", (2, 4, 8, 4), r"found kernels of \[\[8, 4\]\]"),
    ],
)
def test_layers_of_odd_names_and_shapes_are_refused(kit, tmp_path, name, shape, reason):
    tensors, data = _read_parts(kit)
    path = kit.write_archive(tmp_path / "odd.zip", {**tensors, name: torch.ones(shape)}, **data)
    with pytest.raises(SourceInvalidError, match=reason):
        _convert(path)


def _cnn(channels, size):
    """NatureCNN with 5 features, and the weights that PPO's CnnPolicy saves of it."""
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(channels, 4, 8, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 4, 2),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, 1),
        nn.ReLU(),
        nn.Flatten(),
    )
    num = cnn(torch.zeros(1, channels, *size)).shape[1]
    linear, head = nn.Sequential(nn.Linear(num, 5), nn.ReLU()), nn.Linear(5, 3)
    weights = {
        f"features_extractor.{part}.{key}": value
        for part, module in (("cnn", cnn), ("linear", linear))
        for key, value in module.state_dict().items()
    }
    weights |= {f"action_net.{key}": value for key, value in head.state_dict().items()}
    return nn.Sequential(cnn, linear, head), weights


@pytest.mark.parametrize("is_last", [True, False])
def test_images_are_scaled_and_their_channels_put_first(kit, tmp_path, is_last):
    module, tensors = _cnn(3, (40, 36))
    path = kit.write_archive(tmp_path / "cnn.zip", tensors)
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 40, 36)).astype(np.uint8)
    expected = module(torch.from_numpy(images).float() / 255).detach().numpy()
    shown = np.moveaxis(images, 1, 3) if is_last else images
    conversion = _convert(path, Box(shown.shape[1:], "uint8", 0, 255))
    policy = graph_policy(conversion.onnx, conversion.spec)
    np.testing.assert_allclose(
        policy.action_probs(shown, deterministic=False),
        torch.softmax(torch.from_numpy(expected), 1).numpy(),
        atol=1e-5,
    )


@pytest.mark.parametrize("shape", [(40, 36), (40, 36, 1)])
def test_a_frame_stack_is_carried_where_its_length_is_stated(kit, tmp_path, shape):
    module, tensors = _cnn(4, (40, 36))
    path = kit.write_archive(tmp_path / "stack.zip", tensors)
    space = Box(shape, "uint8", 0, 255)
    with pytest.raises(SpaceUnsupportedError, match="trained on 4 frames") as caught:
        _convert(path, space)
    assert caught.value.parameter == "frame_stack"
    conversion = _convert(path, stack_space(space, 4), num_frames=4)
    assert any("VecFrameStack has zeros" in note for note in conversion.not_carried)
    policy = graph_policy(conversion.onnx, conversion.spec)
    frames = np.random.default_rng(0).integers(0, 256, (6, 40, 36)).astype(np.uint8)
    state = policy.initial_state(1)
    for frame in frames:
        act = policy.act(frame.reshape(1, *shape), state)
        state = act.state
    stack = torch.from_numpy(frames[-4:][None]).float() / 255
    assert act.actions[0] == module(stack).argmax()


def test_the_parts_of_an_observation_are_joined_as_in_the_training(kit, tmp_path):
    torch.manual_seed(0)
    head = nn.Linear(5, 3)
    tensors = kit.layer_weights("action_net", head)
    spaces = "OrderedDict({'wide': Box(2,), 'count': Discrete(3)})"
    path = kit.write_archive(tmp_path / "dict.zip", tensors, observation_space={"spaces": spaces})
    space = Dict({"count": Discrete(3), "wide": Box((2,), "float32")})
    conversion = _convert(path, space)
    wide, counts = np.array([[0.5, -1.0]], np.float32), np.array([2])
    logits = head(torch.tensor([[0.5, -1.0, 0.0, 0.0, 1.0]]))
    policy = graph_policy(conversion.onnx, conversion.spec)
    np.testing.assert_allclose(
        policy.action_probs({"count": counts, "wide": wide}, deterministic=False),
        torch.softmax(logits, 1).detach().numpy(),
        atol=1e-6,
    )
    with pytest.raises(SpaceUnsupportedError, match="expected the keys of the policy's"):
        _convert(path, Dict({"other": Box((5,), "float32")}))


def test_noise_of_an_exploration_matrix_depends_on_the_features(kit, tmp_path):
    log_std = torch.tensor([[-1.0, 0.0], [0.5, -0.5]])
    layer = nn.Linear(2, 2)
    tensors = {**kit.layer_weights("action_net", layer), "log_std": log_std}
    path = kit.write_archive(tmp_path / "sde.zip", tensors, use_sde=True)
    conversion = _convert(path, Box((2,), "float32"), Box((2,), "float32"))
    policy = graph_policy(conversion.onnx, conversion.spec)
    features = np.array([[1.0, 2.0]], np.float32)
    outputs = policy._run({"observations": features})
    # By hand: features^2 @ std^2, with Stable-Baselines3's 1e-6.
    variances = np.array(
        [[np.exp(-2.0) + 4 * np.exp(1.0) + 1e-6, np.exp(0.0) + 4 * np.exp(-1.0) + 1e-6]]
    )
    np.testing.assert_allclose(outputs["log_stds"], 0.5 * np.log(variances), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [float("nan"), {":type:": "numpy.float64"}, True, "0.9"])
def test_what_is_stated_but_is_no_number_is_left_out(kit, tmp_path, gamma):
    tensors, data = _read_parts(kit)
    data = {**data, "gamma": gamma, "num_timesteps": float("inf")}
    conversion = _convert(kit.write_archive(tmp_path / "gamma.zip", tensors, **data))
    assert conversion.facts["gamma"] is None
    assert conversion.facts["num_timesteps"] is None
