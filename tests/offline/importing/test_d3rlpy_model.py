"""d3rlpy's `.d3` files: pickles that are never unpickled."""

import json
import pickle

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.offline.importing.d3rlpy_model import convert_model

pytestmark = pytest.mark.needs_d3rlpy
_VECTOR, _ACTIONS = Box((4,), "float32"), Discrete(3)


def _parts(kit, name="d3rlpy_discrete_cql"):
    return pickle.loads((kit.POLICIES / f"{name}.d3").read_bytes())


def _convert(parts, observations=_VECTOR, actions=_ACTIONS):
    data = parts if isinstance(parts, bytes) else pickle.dumps(parts)
    return convert_model(data, "model.d3", observations, actions)


def test_a_planted_pickle_is_not_executed(kit, tmp_path):
    class Planted:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    for planted in (Planted(), {"torch": Planted(), "config": "{}", "version": "2.8.1"}):
        with pytest.raises(SourceInvalidError, match="Nothing in it was executed"):
            _convert(pickle.dumps(planted))
    with pytest.raises(SourceInvalidError, match="Nothing in it was executed"):
        _convert({**_parts(kit), "torch": pickle.dumps(Planted())})
    assert not (tmp_path / "executed").exists()


def test_a_damaged_file_is_refused(kit):
    data = (kit.POLICIES / "d3rlpy_discrete_cql.d3").read_bytes()
    for size in range(1, len(data), 1499):
        with pytest.raises(SourceInvalidError):
            _convert(data[:size])
    with pytest.raises(SourceInvalidError, match="found a pickle of"):
        _convert({"weights": b"", "config": "{}"})


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("hidden_units", [1 << 40, 8], "expected sizes that its weights have"),
        ("n_critics", 1 << 40, "expected sizes that its weights have"),
        ("type", "transformer_of_mine", "cannot create its algorithm"),
        ("observation_shape", "4", "its configuration cannot be read"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(kit, key, value, reason):
    parts = _parts(kit)
    config = json.loads(parts["config"])
    params = config["config"]["params"]
    place = {
        "hidden_units": params["encoder_factory"]["params"],
        "n_critics": params,
        "type": config["config"],
        "observation_shape": config,
    }[key]
    place[key] = value
    with pytest.raises(SourceInvalidError, match=reason):
        _convert({**parts, "config": json.dumps(config)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gamma", 10**400),
        ("observation_scaler", {"type": "standard", "params": {}}),
        ("observation_scaler", {"type": "standard", "params": {"mean": ["x"], "std": [1.0]}}),
        ("observation_scaler", {"type": "min_max", "params": {"minimum": [1], "maximum": None}}),
        ("observation_scaler", {"type": "standard", "params": {"mean": [0, 0], "std": [1, 1, 1]}}),
        ("observation_scaler", {"type": "standard", "params": {"mean": [0.0], "std": [1e999]}}),
        ("encoder_factory", {"type": "vector", "params": {"hidden_units": ""}}),
    ],
    ids=["large", "missing", "text", "none", "lengths", "infinite", "sizes"],
)
def test_statistics_and_options_that_are_no_numbers_are_refused(kit, key, value):
    parts = _parts(kit)
    config = json.loads(parts["config"])
    config["config"]["params"][key] = value
    with pytest.raises(SourceInvalidError):
        _convert({**parts, "config": json.dumps(config)})


def test_an_action_scaler_without_numbers_is_refused(kit):
    parts = _parts(kit, "d3rlpy_iql")
    config = json.loads(parts["config"])
    config["config"]["params"]["action_scaler"]["params"] = {"minimum": [-2, -2], "maximum": ["x"]}
    data = pickle.dumps({**parts, "config": json.dumps(config)}, protocol=4)
    with pytest.raises(SourceInvalidError):
        convert_model(data, "model.d3", _VECTOR, Box((2,), "float32", -2, 2))


def test_other_spaces_are_refused(kit):
    parts = _parts(kit)
    with pytest.raises(SpaceUnsupportedError, match="found 5 numbers"):
        _convert(parts, Box((5,), "float32"))
    with pytest.raises(SpaceUnsupportedError, match="the policy has 3"):
        _convert(parts, actions=Discrete(2))
    with pytest.raises(SpaceUnsupportedError, match="the policy has 3"):
        _convert(parts, actions=Box((2,), "float32"))


def test_a_range_of_actions_other_than_the_dataset_s_is_named(kit):
    data = (kit.POLICIES / "d3rlpy_iql.d3").read_bytes()
    same = convert_model(data, "model.d3", _VECTOR, Box((2,), "float32", -2, 2))
    assert not same.not_carried
    wide = convert_model(data, "model.d3", _VECTOR, Box((2,), "float32", -50, 50))
    assert "of its action scaler" in wide.not_carried[0]
    assert np.isfinite(same.facts["gamma"])
