"""ONNX: adapt models of other programs to a dataset's observations and a policy head.

The model becomes the middle of a package's graph. Before it observations get the dtype and shape
that it takes; behind it its outputs get the names and shapes of the head. It runs in onnxruntime
as the package's graph, with the operators of ONNX alone, and reads no other file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    describe,
    leaves,
    value_dtype,
    value_shape,
)
from replaylake.datastore.errors import (
    ConfigInvalidError,
    SourceInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.policies.graph_policy import graph_input_names
from replaylake.datastore.lake.policies.policy import HEAD_OUTPUTS, PolicySpec
from replaylake.offline.importing.networks import Conversion, bound_actions

# Heads of a model that gives other numbers than those of a package: by the package's head.
PROBABILITIES: Final = "probabilities"
CHOICES: Final = "choices"
MODEL_HEADS: Final = (
    "categorical",
    "multi_categorical",
    "q_values",
    "gaussian",
    "squashed_gaussian",
    "deterministic",
    PROBABILITIES,
    CHOICES,
)
# com.microsoft: operators that onnxruntime has itself, for example of quantized models.
_DOMAINS: Final = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
_RANDOM: Final = (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)
_FLOATS: Final = (
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
)
_MIN_OPSET: Final = 11
_IR_VERSION: Final = 8  # what onnxruntime 1.20 and newer read
_MODEL: Final = "model/"
# Below, a probability of 0 would have the logit -inf.
_MIN_PROBABILITY: Final = 1e-30


def convert_onnx(
    data: bytes,
    what: str,
    observations: Space,
    actions: Space,
    *,
    head: str | None,
    outputs: Sequence[str] = (),
) -> Conversion:
    """Convert a model for the spaces of a dataset.

    head: what its outputs are, one of MODEL_HEADS. outputs: their names in the model, in the order
    of the head; by default the head's own names, or all of the model's outputs.
    Raises: SourceInvalidError if the model is damaged, reads other files, draws random numbers or
    has operators besides ONNX's; ConfigInvalidError for a head or outputs that it does not have;
    SpaceUnsupportedError if the spaces are not those of the model.
    """
    model = _parse_model(data, what)
    spec = _make_spec(head, observations, actions)
    names = _choose_outputs(model, outputs, _name_outputs(head), what)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    producer = f"{model.producer_name} {model.producer_version}".strip()[:100]
    graph = compose.add_prefix(model, _MODEL).graph
    nodes = _add_inputs(graph, spec, what)
    nodes += graph.node
    constants: list[Any] = []
    _add_outputs(nodes, constants, [_MODEL + name for name in names], head, actions)
    onnx_bytes = _assemble(model, graph, nodes, constants, spec)
    facts = {"library": "onnx", "producer": producer, "opsets": opsets}
    notes = ("An ONNX model does not say what was done to observations before it.",)
    return Conversion(onnx_bytes, spec, f"onnx:{head}", facts, notes)


def add_normalization(conversion: Conversion, mean: Array, std: Array, clip: float) -> bytes:
    """Return the graph with (observations - mean) / std, clipped to [-clip, clip], before it.

    mean, std: [*obs] of a Box of floats or integers. The network behind it gets float32, whatever
    the dtype of the observations. Raises: SpaceUnsupportedError for other observations, for those
    of other shapes, and for a network that takes integers, which would truncate what it gets.
    """
    space = conversion.spec.observation_space
    if not isinstance(space, Box) or mean.shape != space.shape or std.shape != space.shape:
        raise SpaceUnsupportedError(
            f"normalization: found statistics of shape {list(mean.shape)}, expected those of the "
            f"dataset's observations, {describe(space)}.",
            parameter="normalization",
        )
    (name,) = (name for name in graph_input_names(conversion.spec) if name == "observations")
    model = onnx.load_from_string(conversion.onnx)
    for node in model.graph.node:
        if name in node.input:
            _check_takes_floats(node)
        for number, source in enumerate(node.input):
            if source == name:
                node.input[number] = "normalized"
    # In float64: integers above 2^24 are no float32, and their difference from a mean may be small.
    constants = {
        "normalization.mean": mean.astype(np.float64),
        "normalization.std": std.astype(np.float64),
        "normalization.low": np.array(-clip, np.float64),
        "normalization.high": np.array(clip, np.float64),
    }
    limits = ["normalization.centered", "normalization.low", "normalization.high"]
    nodes = [
        helper.make_node("Cast", [name], ["normalization.double"], to=TensorProto.DOUBLE),
        helper.make_node(
            "Sub", ["normalization.double", "normalization.mean"], ["normalization.d"]
        ),
        helper.make_node("Div", ["normalization.d", "normalization.std"], [limits[0]]),
        helper.make_node("Clip", limits, ["normalization.clipped"]),
        helper.make_node("Cast", ["normalization.clipped"], ["normalized"], to=TensorProto.FLOAT),
    ]
    _replace(model.graph.node, [*nodes, *model.graph.node])
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), key) for key, array in constants.items()
    )
    return bytes(model.SerializeToString())


def _check_takes_floats(node: Any) -> None:
    """Refuse a first node that makes integers of normalized observations."""
    targets = [attribute.i for attribute in node.attribute if attribute.name == "to"]
    if node.op_type == "Cast" and targets[0] not in _FLOATS:
        raise SpaceUnsupportedError(
            "normalization: found statistics for a network that takes "
            f"{_describe_type(targets[0])}, expected one that takes floats: "
            "normalized observations are no whole numbers. Leave them out if the network "
            "normalizes its observations itself.",
            parameter="normalization",
        )


def make_tree_model(
    attributes: Mapping[str, Any], num_features: int, *, is_binary: bool = False
) -> bytes:
    """Return a model of one TreeEnsembleRegressor: float [N, num_features] to [N, n_targets].

    attributes: the operator's. is_binary: its single target is the logit of the second of two
    classes, and the output the logits of both.
    """
    name = "margins" if is_binary else "scores"
    nodes = [
        helper.make_node(
            "TreeEnsembleRegressor", ["features"], [name], domain="ai.onnx.ml", **attributes
        )
    ]
    constants = []
    if is_binary:
        constants = [numpy_helper.from_array(np.array(0, np.float32), "zero")]
        nodes += [
            helper.make_node("Mul", ["margins", "zero"], ["zeros"]),
            helper.make_node("Concat", ["zeros", "margins"], ["scores"], axis=1),
        ]
    size = 2 if is_binary else attributes["n_targets"]
    graph = helper.make_graph(
        nodes,
        "trees",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", num_features])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", size])],
        initializer=constants,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
    return bytes(model.SerializeToString())


def _parse_model(data: bytes, what: str) -> Any:
    try:
        model = onnx.load_from_string(data)
    except Exception as error:  # protobuf's errors share no base class but this
        raise SourceInvalidError(f"{what}: is no ONNX model ({error}). Export it again.") from error
    if not model.graph.node:
        raise SourceInvalidError(f"{what}: found a model without nodes. Export it again.")
    for entry in model.opset_import:
        if entry.domain not in _DOMAINS:
            raise SourceInvalidError(
                f"{what}: found operators of the domain {entry.domain!r}, expected those of ONNX: "
                "a library of others would have to be loaded. Export it without them."
            )
        if entry.domain in ("", "ai.onnx") and entry.version < _MIN_OPSET:
            raise SourceInvalidError(
                f"{what}: found opset {entry.version}, expected {_MIN_OPSET} or newer. Export it "
                "with `opset_version=17`."
            )
    if model.functions:
        raise SourceInvalidError(
            f"{what}: found functions of its own, {model.functions[0].name!r} first, expected "
            "operators alone. Export it with functions inlined."
        )
    for graph in _iterate_graphs(model.graph):
        _check_graph(graph, what)
    return model


def _iterate_graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph and those in its nodes."""
    pending = [graph]
    while pending:
        graph = pending.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                pending += [attribute.g] if attribute.HasField("g") else []
                pending += attribute.graphs


def _describe_type(number: int) -> str:
    known: dict[int, str] = {value: key.lower() for key, value in TensorProto.DataType.items()}
    return known.get(number, f"the unknown type {number}")


def _check_graph(graph: Any, what: str) -> None:
    names = [part.name for part in (*graph.input, *graph.output, *graph.initializer)]
    for node in graph.node:
        names += [node.op_type, node.domain, node.name, *node.input, *node.output]
    # Protobuf gives texts that are no UTF-8 as bytes.
    if odd := [name for name in names if not isinstance(name, str)]:
        raise SourceInvalidError(
            f"{what}: found the name {odd[0]!r}, expected UTF-8: the file is damaged. Export it "
            "again."
        )
    tensors = list(graph.initializer)
    tensors += [part.values for part in graph.sparse_initializer]
    for node in graph.node:
        if node.op_type in _RANDOM:
            raise SourceInvalidError(
                f"{what}: found {node.op_type}, which draws random numbers in the model. Export "
                "the numbers that actions are drawn from, such as logits, and state their head."
            )
        for attribute in node.attribute:
            tensors += [attribute.t] if attribute.HasField("t") else []
            tensors += attribute.tensors
    for tensor in tensors:
        if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
            raise SourceInvalidError(
                f"{what}: found {tensor.name!r} with its data in another file, expected all of it "
                "in this one. Save the model with save_as_external_data=False."
            )
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE) and not bool(
            np.isfinite(_to_array(tensor, what)).all()
        ):
            raise SourceInvalidError(
                f"{what}: found numbers in {tensor.name!r} that are not finite. The training "
                "diverged: export an earlier checkpoint."
            )


def _to_array(tensor: Any, what: str) -> Array:
    try:
        array: Array = numpy_helper.to_array(tensor)
    except (TypeError, ValueError) as error:
        raise SourceInvalidError(
            f"{what}: the data of {tensor.name!r} has another size than {list(tensor.dims)} "
            f"({error}): the file is damaged."
        ) from error
    return array


def _name_outputs(head: str | None) -> tuple[str, ...]:
    if head == PROBABILITIES:
        return ("probabilities",)
    if head == CHOICES:
        return ("choices",)
    return HEAD_OUTPUTS.get(head or "", ())


def _make_spec(head: str | None, observations: Space, actions: Space) -> PolicySpec:
    if head not in MODEL_HEADS:
        raise ConfigInvalidError(
            f"head: found {head!r}, expected the meaning of the model's outputs, one of "
            f"{', '.join(MODEL_HEADS)}.",
            parameter="head",
        )
    name = {PROBABILITIES: "categorical", CHOICES: "q_values"}.get(head, head)
    if name in ("gaussian", "squashed_gaussian", "deterministic"):
        actions = bound_actions(actions, None, is_scaled=name == "squashed_gaussian")
    return PolicySpec(observations, actions, name)


def _choose_outputs(
    model: Any, stated: Sequence[str], expected: Sequence[str], what: str
) -> list[str]:
    """Return the model's outputs for the head, in its order."""
    known = [output.name for output in model.graph.output]
    if stated:
        if len(stated) != len(expected) or not set(stated) <= set(known):
            raise ConfigInvalidError(
                f"outputs: found {list(stated)}, expected {len(expected)} of {known}, for "
                f"{', '.join(expected)}.",
                parameter="outputs",
            )
        return list(stated)
    if set(expected) <= set(known):
        return list(expected)
    if len(known) == len(expected):
        return known
    raise ConfigInvalidError(
        f"outputs: {what} has the outputs {known}, expected the names of those that are "
        f"{', '.join(expected)}.",
        parameter="outputs",
    )


def _add_inputs(graph: Any, spec: PolicySpec, what: str) -> list[Any]:
    """Return the nodes that convert observations to the model's inputs."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    sources = graph_input_names(spec)
    found = [value.name.removeprefix(_MODEL) for value in inputs]
    parts = [leaf for _, leaf in leaves(spec.observation_space)]
    if len(inputs) != len(sources):
        raise SpaceUnsupportedError(
            f"{what}: found the inputs {found}, expected {len(sources)} for the dataset's "
            f"observations, {describe(spec.observation_space)}. A model with a state or with noise "
            "as an input is not converted."
        )
    by_name = dict(zip(found, inputs, strict=True))
    nodes: list[Any] = []
    for number, (source, leaf) in enumerate(zip(sources, parts, strict=True)):
        name = source.removeprefix("observations.")
        if len(sources) > 1 and name not in by_name:
            raise SpaceUnsupportedError(
                f"{what}: found the inputs {found}, expected one named {name!r} for each part of "
                "the observation."
            )
        value = by_name[name] if len(sources) > 1 else inputs[0]
        _add_input(nodes, graph, source, leaf, value, f"input.{number}", what)
    return nodes


def _add_input(
    nodes: list[Any], graph: Any, source: str, leaf: Any, value: Any, prefix: str, what: str
) -> None:
    tensor = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in tensor.shape.dim]
    shape = value_shape(leaf)
    target, axes = _fit_input(dims, shape)
    if target is None and axes is None:
        raise SpaceUnsupportedError(
            f"{what}: its input {value.name.removeprefix(_MODEL)!r} has the shape {dims} (0 is any "
            f"size), expected one for the dataset's observations, {describe(leaf)}. Name the "
            "dataset that the policy is for."
        )
    if value_dtype(leaf).kind == "f" and tensor.elem_type not in _FLOATS:
        raise SpaceUnsupportedError(
            f"{what}: its input {value.name.removeprefix(_MODEL)!r} takes "
            f"{_describe_type(tensor.elem_type)}, expected floats for the "
            f"dataset's observations, {describe(leaf)}, which would be truncated. Name the dataset "
            "that the policy is for."
        )
    nodes.append(helper.make_node("Cast", [source], [f"{prefix}.cast"], to=tensor.elem_type))
    if axes is not None:
        node = helper.make_node("Transpose", [f"{prefix}.cast"], [value.name], perm=axes)
    else:
        graph.initializer.append(
            numpy_helper.from_array(np.array(target, np.int64), f"{prefix}.shape")
        )
        node = helper.make_node("Reshape", [f"{prefix}.cast", f"{prefix}.shape"], [value.name])
    nodes.append(node)


def _fit_input(
    dims: Sequence[int], shape: tuple[int, ...]
) -> tuple[list[int] | None, list[int] | None]:
    """Return the shape to give observations, or the axes to permute; neither if nothing fits."""
    rest = list(dims[1:])
    if len(rest) == len(shape) and all(d in (0, n) for d, n in zip(rest, shape, strict=True)):
        return [-1, *shape], None
    is_image = len(rest) == len(shape) == 3
    if is_image and all(d in (0, n) for d, n in zip(rest, (shape[2], *shape[:2]), strict=True)):
        return None, [0, 3, 1, 2]
    if len(rest) == 1 and rest[0] in (0, prod(shape)):
        return [-1, prod(shape)], None
    return None, None


def _add_outputs(
    nodes: list[Any], constants: list[Any], names: Sequence[str], head: str | None, actions: Space
) -> None:
    """Add the nodes that convert the model's outputs to the head's."""
    size = _count_outputs(actions)
    constants.append(numpy_helper.from_array(np.array([-1, size], np.int64), "output.shape"))

    def reshape(source: str, target: str) -> None:
        nodes.append(helper.make_node("Cast", [source], [f"{target}.float"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Reshape", [f"{target}.float", "output.shape"], [target]))

    if head == CHOICES:
        start = actions.start if isinstance(actions, Discrete) else 0
        _add_choices(nodes, constants, names[0], size, start)
    elif head == PROBABILITIES:
        least = np.array(_MIN_PROBABILITY, np.float32)
        constants.append(numpy_helper.from_array(least, "output.least"))
        reshape(names[0], "output.probabilities")
        nodes.append(
            helper.make_node("Max", ["output.probabilities", "output.least"], ["output.positive"])
        )
        nodes.append(helper.make_node("Log", ["output.positive"], ["logits"]))
    elif head in ("gaussian", "squashed_gaussian"):
        reshape(names[0], "means")
        # A model may give one log_std for all observations.
        constants.append(numpy_helper.from_array(np.array(0, np.float32), "output.zero"))
        reshape(names[1], "output.log_stds")
        nodes.append(helper.make_node("Mul", ["means", "output.zero"], ["output.zeros"]))
        nodes.append(helper.make_node("Add", ["output.log_stds", "output.zeros"], ["log_stds"]))
    else:
        reshape(names[0], HEAD_OUTPUTS[head or ""][0])


def _add_choices(nodes: list[Any], constants: list[Any], name: str, size: int, start: int) -> None:
    """Add one-hot values of chosen actions [N], as values of the head q_values."""
    constants += [
        numpy_helper.from_array(np.array([-1], np.int64), "output.flat"),
        numpy_helper.from_array(np.array(start, np.int64), "output.start"),
        numpy_helper.from_array(np.array(size, np.int64), "output.depth"),
        numpy_helper.from_array(np.array([0, 1], np.float32), "output.off_on"),
    ]
    nodes += [
        helper.make_node("Cast", [name], ["output.integer"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["output.integer", "output.flat"], ["output.choices"]),
        helper.make_node("Sub", ["output.choices", "output.start"], ["output.numbers"]),
        helper.make_node(
            "OneHot", ["output.numbers", "output.depth", "output.off_on"], ["q_values"]
        ),
    ]


def _count_outputs(actions: Space) -> int:
    if isinstance(actions, Discrete):
        return actions.n
    if isinstance(actions, MultiDiscrete):
        return sum(actions.nvec)
    if isinstance(actions, MultiBinary):
        return 2 * actions.n
    assert isinstance(actions, Box)  # the spec saw to it
    return prod(actions.shape)


def _assemble(
    model: Any, graph: Any, nodes: Sequence[Any], constants: Sequence[Any], spec: PolicySpec
) -> bytes:
    """Return the whole graph as a model with the inputs and outputs of the spec."""
    parts = [leaf for _, leaf in leaves(spec.observation_space)]
    inputs = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(np.dtype(_find_input_dtype(leaf))),
            ["N", *value_shape(leaf)],
        )
        for name, leaf in zip(graph_input_names(spec), parts, strict=True)
    ]
    size = _count_outputs(spec.action_space)
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size])
        for name in HEAD_OUTPUTS[spec.head]
    ]
    whole = helper.make_graph(
        nodes,
        "policy",
        inputs,
        outputs,
        initializer=[*graph.initializer, *constants],
        sparse_initializer=graph.sparse_initializer,
    )
    opsets = list(model.opset_import)
    if not any(entry.domain in ("", "ai.onnx") for entry in opsets):
        opsets.append(helper.make_opsetid("", 17))
    made = helper.make_model(whole, opset_imports=opsets)
    made.ir_version = max(_IR_VERSION, model.ir_version)
    return bytes(made.SerializeToString())


def _find_input_dtype(leaf: Any) -> Any:
    """Return the dtype in which graph_inputs gives values: floats are float32."""
    dtype = value_dtype(leaf)
    return np.float32 if dtype.kind == "f" else dtype


def _replace(field: Any, values: Sequence[Any]) -> None:
    """Set a repeated field of protobuf."""
    copies = list(values)
    del field[:]
    field.extend(copies)
