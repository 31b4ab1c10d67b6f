"""XGBoost: the models that `save_model` writes as JSON or UBJSON, as a tree ensemble of ONNX.

Both are documented formats of plain numbers: https://xgboost.readthedocs.io, "Introduction to Model
IO". They are read here, since the library would be needed for nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    Space,
    describe,
    num_elements,
)
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.offline.importing.networks import Conversion, check_num_actions
from replaylake.offline.importing.onnx_model import convert_onnx, make_tree_model

# The meaning of the trees' raw sums, by the objective.
_CATEGORICAL: Final = ("multi:softprob", "multi:softmax")
_BINARY: Final = ("binary:logistic",)
_REGRESSION: Final = ("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror")
_MAX_DEPTH: Final = 64
_ERRORS: Final = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


def convert_xgboost(data: bytes, what: str, observations: Space, actions: Space) -> Conversion:
    """Convert a model for the spaces of a dataset.

    A classifier becomes a categorical policy over its classes. A regressor with several targets
    gives the value of each action, or for a Box the actions themselves.
    Raises: SourceInvalidError if it is damaged, or of an objective or kind that is not converted;
    SpaceUnsupportedError if the spaces are not those of the model.
    """
    model = _parse_model(data, what)
    try:
        learner = model["learner"]
        parameters = learner["learner_model_param"]
        objective = str(learner["objective"]["name"])
        booster = learner["gradient_booster"]
        kind = str(booster["name"])
        num_features = int(parameters["num_feature"])
        num_targets = max(
            int(parameters.get("num_class", 0)), int(parameters.get("num_target", 1)), 1
        )
        base_score = _parse_base_scores(str(parameters["base_score"]))
    except _ERRORS as error:
        raise SourceInvalidError(
            f"{what}: is no model of XGBoost ({type(error).__name__}: {error}). Save it again with "
            "`save_model`."
        ) from error
    if kind != "gbtree":
        raise SourceInvalidError(
            f"{what}: found the booster {kind!r}, expected 'gbtree': others are not converted."
        )
    _check_features(num_features, observations)
    head = _choose_head(objective, num_targets, actions, what)
    attributes = _make_tree_attributes(booster, num_targets, num_features, what)
    attributes["base_values"] = _to_margins(base_score, objective, num_targets, what)
    onnx = make_tree_model(attributes, num_features, is_binary=objective in _BINARY)
    conversion = convert_onnx(onnx, what, observations, actions, head=head)
    version = str(model.get("version", ""))[:100]
    facts = {"library": "xgboost", "library_version": version, "objective": objective}
    notes = ("The model does not say how its features were made of observations.",)
    return Conversion(conversion.onnx, conversion.spec, f"xgboost:{objective}", facts, notes)


def is_model(data: bytes) -> bool:
    """Whether a file looks like a model of XGBoost, in JSON or UBJSON."""
    return data[:1] == b"{" and b"learner" in data[:64]


def _parse_model(data: bytes, what: str) -> Mapping[str, Any]:
    try:
        # In UBJSON a key begins with the type of its length, in JSON with a quote.
        is_json = data.lstrip()[1:].lstrip()[:1] == b'"'
        model = json.loads(data) if is_json else _UbjsonReader(data).read()
    except (IndexError, KeyError, RecursionError, ValueError, struct.error) as error:
        raise SourceInvalidError(
            f"{what}: is neither JSON nor UBJSON ({error}). Save the model again with `save_model`."
        ) from error
    if not isinstance(model, Mapping):
        raise SourceInvalidError(f"{what}: is no model of XGBoost. Save it with `save_model`.")
    return model


def _parse_base_scores(text: str) -> list[float]:
    """Return the base score; from XGBoost 3.1 on it is a list, with one for each target."""
    value = json.loads(text)
    return [float(one) for one in (value if isinstance(value, list) else [value])]


def _to_margins(
    base_scores: Sequence[float], objective: str, num_targets: int, what: str
) -> list[float]:
    """Return what is added to the sums of the trees. Raises: SourceInvalidError."""
    is_probability = objective in _BINARY
    if len(base_scores) not in (1, num_targets) or not all(
        0 < score < 1 if is_probability else np.isfinite(score) for score in base_scores
    ):
        raise SourceInvalidError(
            f"{what}: found base_score {list(base_scores)[:6]} for {num_targets} targets. The file "
            "is damaged."
        )
    scores = list(base_scores) * (num_targets if len(base_scores) == 1 else 1)
    if objective in _BINARY:
        return [float(np.log(score / (1 - score))) for score in scores]
    return scores


def _check_features(num_features: int, observations: Space) -> None:
    if not isinstance(observations, Box) or num_elements(observations) != num_features:
        raise SpaceUnsupportedError(
            f"observations: found {describe(observations)} in the dataset, expected a Box of the "
            f"{num_features} numbers that the model takes. Name the dataset that it is for."
        )


def _choose_head(objective: str, num_targets: int, actions: Space, what: str) -> str:
    """Return the head of a package. Raises: SourceInvalidError, SpaceUnsupportedError."""
    if objective in _BINARY and num_targets != 1:
        raise SourceInvalidError(
            f"{what}: found {num_targets:,} targets for the objective {objective!r}, expected one: "
            "several labels at once are no Discrete action."
        )
    if objective in (*_CATEGORICAL, *_BINARY):
        num = 2 if objective in _BINARY else num_targets
        check_num_actions(num, actions.n if isinstance(actions, Discrete) else 0, actions)
        return "categorical"
    if objective not in _REGRESSION:
        raise SourceInvalidError(
            f"{what}: found the objective {objective!r}, expected one of "
            f"{', '.join((*_CATEGORICAL, *_BINARY, *_REGRESSION))}."
        )
    if isinstance(actions, Discrete):
        check_num_actions(num_targets, actions.n, actions)
        return "q_values"
    check_num_actions(num_targets, num_elements(actions), actions)
    return "deterministic"


def _make_tree_attributes(
    booster: Mapping[str, Any], num_targets: int, num_features: int, what: str
) -> dict[str, Any]:
    """Return the attributes of ONNX's TreeEnsembleRegressor. Raises: SourceInvalidError."""
    columns: dict[str, list[Any]] = {name: [] for name in _NODE_COLUMNS}
    targets: dict[str, list[Any]] = {name: [] for name in _TARGET_COLUMNS}
    try:
        trees, groups = booster["model"]["trees"], booster["model"]["tree_info"]
        for number, (tree, group) in enumerate(zip(trees, groups, strict=True)):
            _add_tree(columns, targets, number, tree, int(group), num_targets)
        if not all(0 <= feature < num_features for feature in columns["nodes_featureids"]):
            raise ValueError(f"another feature than 0 .. {num_features - 1}")
    except _ERRORS as error:
        raise SourceInvalidError(
            f"{what}: its trees cannot be read ({type(error).__name__}: {error}). The file is "
            "damaged, or has categorical features or vector leaves, which are not converted."
        ) from error
    if (
        not targets["target_weights"]
        or not np.isfinite([*targets["target_weights"], *columns["nodes_values"]]).all()
    ):
        raise SourceInvalidError(f"{what}: found no trees, or numbers in them that are not finite.")
    return {**columns, **targets, "n_targets": num_targets, "aggregate_function": "SUM"}


_NODE_COLUMNS: Final = (
    "nodes_treeids",
    "nodes_nodeids",
    "nodes_featureids",
    "nodes_values",
    "nodes_modes",
    "nodes_truenodeids",
    "nodes_falsenodeids",
    "nodes_missing_value_tracks_true",
)
_TARGET_COLUMNS: Final = ("target_treeids", "target_nodeids", "target_ids", "target_weights")


def _add_tree(
    columns: dict[str, list[Any]],
    targets: dict[str, list[Any]],
    number: int,
    tree: Mapping[str, Any],
    group: int,
    num_targets: int,
) -> None:
    left, right = list(tree["left_children"]), list(tree["right_children"])
    features, conditions = list(tree["split_indices"]), list(tree["split_conditions"])
    defaults = list(tree["default_left"])
    num = len(left)
    if str(tree["tree_param"].get("size_leaf_vector", "1")) not in ("0", "1"):
        raise ValueError("leaves with several values")
    if any(tree.get("split_type") or ()) or not 0 <= group < num_targets:
        raise ValueError("a categorical split, or a tree of another target")
    if {len(part) for part in (right, features, conditions, defaults)} != {num} or not num:
        raise ValueError("columns of different lengths")
    reached = _check_is_tree(left, right)
    for node in reached:
        is_leaf = left[node] == -1
        row = (
            number,
            node,
            0 if is_leaf else int(features[node]),
            0.0 if is_leaf else float(conditions[node]),
            # XGBoost goes left where the feature is less than the condition.
            "LEAF" if is_leaf else "BRANCH_LT",
            0 if is_leaf else int(left[node]),
            0 if is_leaf else int(right[node]),
            int(bool(defaults[node])),
        )
        for name, value in zip(_NODE_COLUMNS, row, strict=True):
            columns[name].append(value)
        if is_leaf:
            leaf = (number, node, group, float(conditions[node]))
            for name, value in zip(_TARGET_COLUMNS, leaf, strict=True):
                targets[name].append(value)


def _check_is_tree(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Return the nodes below the root. Raises: ValueError for a loop, IndexError for a lost one."""
    reached: list[int] = []
    seen: set[int] = set()
    pending = [0]
    while pending:
        node = int(pending.pop())
        if node in seen or node < 0:
            raise ValueError("nodes in a loop")
        seen.add(node)
        reached.append(node)
        if left[node] != -1:
            pending += [right[node], left[node]]
    return reached


class _UbjsonReader:
    """Reads UBJSON (ubjson.org, draft 12), with XGBoost's typed arrays."""

    _NUMBERS: Final[Mapping[bytes, str]] = {
        b"i": ">i1",
        b"U": ">u1",
        b"I": ">i2",
        b"l": ">i4",
        b"L": ">i8",
        b"d": ">f4",
        b"D": ">f8",
    }

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._depth = 0

    def read(self) -> Any:
        """Return the value. Raises: ValueError if the data is damaged."""
        return self._read_value(self._take(1))

    def _take(self, num: int) -> bytes:
        part = self._data[self._at : self._at + num]
        if num < 0 or len(part) < num:
            raise ValueError(f"it ends at byte {len(self._data)}")
        self._at += num
        return part

    def _read_value(self, marker: bytes) -> Any:
        if marker in self._NUMBERS:
            return self._read_array(marker, 1)[0].item()
        if marker == b"S":
            return self._take(self._read_length()).decode()
        if marker in (b"Z", b"T", b"F"):
            return {b"Z": None, b"T": True, b"F": False}[marker]
        if marker not in (b"[", b"{"):
            raise ValueError(f"unknown type {marker!r} at byte {self._at}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        value = self._read_list() if marker == b"[" else self._read_object()
        self._depth -= 1
        return value

    def _read_length(self) -> int:
        return int(self._read_value(self._take(1)))

    def _read_list(self) -> Any:
        kind = None
        if self._peek() == b"$":
            self._take(1)
            kind = self._take(1)
        if self._peek() == b"#":
            self._take(1)
            num = self._read_length()
            if kind in self._NUMBERS:
                assert kind is not None  # it is a key
                return self._read_array(kind, num).tolist()
            if num > len(self._data):
                raise ValueError(f"a list of {num} values in {len(self._data)} bytes")
            return [self._read_value(kind or self._take(1)) for _ in range(num)]
        values = []
        while (marker := self._take(1)) != b"]":
            values.append(self._read_value(marker))
        return values

    def _read_object(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while self._peek() != b"}":
            name = self._take(self._read_length()).decode()
            values[name] = self._read_value(self._take(1))
        self._take(1)
        return values

    def _read_array(self, kind: bytes, num: int) -> Array:
        dtype = np.dtype(self._NUMBERS[kind])
        return np.frombuffer(self._take(num * dtype.itemsize), dtype)

    def _peek(self) -> bytes:
        return self._data[self._at : self._at + 1]
