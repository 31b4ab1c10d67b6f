"""Models of XGBoost: what is read of them by hand, and what is refused."""

import json
import struct

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.package import graph_policy
from replaylake.offline.importing.xgboost_model import convert_xgboost

_PAIR, _TWO = Box((2,), "float32"), Discrete(2)


def _tree(**changes):
    """x[1] < 0.5 ? 1.0 : (x[0] < -1 ? 2.0 : 4.0)."""
    tree = {
        "left_children": [1, -1, 3, -1, -1],
        "right_children": [2, -1, 4, -1, -1],
        "split_indices": [1, 0, 0, 0, 0],
        "split_conditions": [0.5, 1.0, -1.0, 2.0, 4.0],
        "default_left": [1, 0, 0, 0, 0],
        "split_type": [0, 0, 0, 0, 0],
        "tree_param": {"size_leaf_vector": "1"},
    }
    return {**tree, **changes}


def _model(trees, groups, *, objective="reg:squarederror", booster="gbtree", **parameters):
    return {
        "learner": {
            "learner_model_param": {
                "num_feature": "2",
                "num_class": "0",
                "num_target": "2",
                "base_score": "[1E-1,2E-1]",
                **parameters,
            },
            "objective": {"name": objective},
            "gradient_booster": {
                "name": booster,
                "model": {"trees": trees, "tree_info": groups},
            },
        },
        "version": [3, 2, 0],
    }


def _convert(model, observations=_PAIR, actions=_TWO):
    data = model if isinstance(model, bytes) else json.dumps(model).encode()
    conversion = convert_xgboost(data, "model.json", observations, actions)
    return graph_policy(conversion.onnx, conversion.spec)


def test_trees_are_summed_by_target():
    policy = _convert(_model([_tree(), _tree(), _tree()], [0, 1, 1]))
    # On the condition itself it goes right: XGBoost goes left where the feature is less.
    observations = np.array([[0, 0.4], [-2, 0.5], [-1, 9]], np.float32)
    found = policy.act(observations).q_values
    np.testing.assert_allclose(found, [[1.1, 2.2], [2.1, 4.2], [4.1, 8.2]], rtol=1e-6, atol=1e-6)


def test_a_binary_classifier_adds_the_logit_of_its_base_score():
    model = _model([_tree()], [0], objective="binary:logistic", num_target="1", base_score="2.5E-1")
    found = _convert(model).action_probs(np.zeros((1, 2), np.float32), deterministic=False)
    odds = np.exp(1.0) * 0.25 / 0.75
    np.testing.assert_allclose(found, [[1 / (1 + odds), odds / (1 + odds)]], rtol=1e-6, atol=1e-6)


def _ubjson(value):
    """UBJSON as XGBoost writes it: lengths as L, arrays of one type with their count."""
    if isinstance(value, dict):
        parts = [_text(key) + _ubjson(one) for key, one in value.items()]
        return b"{" + b"".join(parts) + b"}"
    if isinstance(value, str):
        return b"S" + _text(value)
    if isinstance(value, int):
        return b"l" + struct.pack(">i", value)
    if value and all(isinstance(one, float) for one in value):
        count = b"L" + struct.pack(">q", len(value))
        return b"[$d#" + count + np.array(value, ">f4").tobytes()
    return b"[" + b"".join(_ubjson(one) for one in value) + b"]"


def _text(value):
    return b"L" + struct.pack(">q", len(value)) + value.encode()


def test_ubjson_is_the_same_as_json():
    model = _model([_tree(), _tree()], [0, 1])
    observations = np.random.default_rng(0).standard_normal((20, 2)).astype(np.float32)
    found = _convert(_ubjson(model)).act(observations).q_values
    np.testing.assert_array_equal(found, _convert(model).act(observations).q_values)


def test_damaged_ubjson_is_refused(kit):
    data = (kit.POLICIES / "xgboost_binary.ubj").read_bytes()
    for size in range(1, len(data) - 1, 211):
        with pytest.raises(SourceInvalidError):
            _convert(data[:size], Box((4,), "float32"))
    for planted in (
        b"{L" + struct.pack(">q", 1 << 60) + b"x",
        b"{L" + struct.pack(">q", -5) + b"x",
        b"[#L" + struct.pack(">q", 1 << 60),
        b"[$d#L" + struct.pack(">q", 1 << 60),
        b"[" * 100_000,
        b"{i\x01a[" * 100_000,
    ):
        with pytest.raises(SourceInvalidError):
            _convert(planted)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"learner": {}}, "is no model of XGBoost"),
        ([], "is no model of XGBoost"),
        (b"{", "is neither JSON nor UBJSON"),
        (_model([_tree()], [0], booster="dart"), "the booster 'dart'"),
        (_model([_tree()], [0], objective="rank:ndcg"), "the objective 'rank:ndcg'"),
        (_model([_tree()], [0], base_score="[1, 2, 3]"), "base_score"),
        (_model([_tree(split_type=[1, 0, 0, 0, 0])], [0]), "a categorical split"),
        (_model([_tree(tree_param={"size_leaf_vector": "3"})], [0]), "several values"),
        (_model([_tree(left_children=[0, -1, 3, -1, -1])], [0]), "nodes in a loop"),
        (_model([_tree(left_children=[9, -1, 3, -1, -1])], [0]), "IndexError"),
        (_model([_tree(right_children=[2])], [0]), "different lengths"),
        (_model([_tree()], [5]), "another target"),
        (_model([_tree(split_conditions=[0.5, 1e999, -1.0, 2.0, 4.0])], [0]), "not finite"),
        (_model([], []), "found no trees"),
        (_model([_tree()], [0], base_score="[" * 100_000), "RecursionError"),
        (_model([_tree()], [0], objective="binary:logistic", num_target="2"), "found 2 targets"),
    ],
)
def test_models_that_are_not_converted_are_refused(model, reason):
    with pytest.raises(SourceInvalidError, match=reason):
        _convert(model)


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (Box((3,), "float32"), Discrete(2)),
        (Discrete(2), Discrete(2)),
        (_PAIR, Discrete(3)),
        (_PAIR, Box((3,), "float32")),
    ],
)
def test_other_spaces_are_refused(observations, actions):
    with pytest.raises(SpaceUnsupportedError):
        _convert(_model([_tree()], [0]), observations, actions)


def test_features_beyond_those_of_the_model_are_refused():
    with pytest.raises(SourceInvalidError, match="another feature"):
        _convert(_model([_tree(split_indices=[7, 0, 0, 0, 0])], [0]))
