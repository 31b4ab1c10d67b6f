"""ONNX models of others: their inputs and outputs fitted to a dataset, and what is refused."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiBinary
from replaylake.datastore.errors import (
    ConfigInvalidError,
    SourceInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.policies.package import graph_policy
from replaylake.offline.importing.import_policy import ImportOptions, import_policy
from replaylake.offline.importing.onnx_model import add_normalization, convert_onnx

_WEIGHT = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
_VECTOR, _ACTIONS = Box((4,), "float32"), Discrete(3)


def _model(
    nodes=None,
    *,
    inputs=(("x", TensorProto.FLOAT, ["batch", 4]),),
    outputs=("y",),
    weight=_WEIGHT,
    opsets=(("", 17),),
):
    """A model that multiplies its input with a weight, unless other nodes are given."""
    nodes = nodes or [helper.make_node("MatMul", ["x", "weight"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "theirs",
        [helper.make_tensor_value_info(*one) for one in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        initializer=[numpy_helper.from_array(weight, "weight")],
    )
    opset_imports = [helper.make_opsetid(*one) for one in opsets]
    return helper.make_model(graph, opset_imports=opset_imports, ir_version=8)


def _convert(model, observations=_VECTOR, actions=_ACTIONS, head="categorical", outputs=()):
    data = model if isinstance(model, bytes) else model.SerializeToString()
    conversion = convert_onnx(data, "model.onnx", observations, actions, head=head, outputs=outputs)
    return graph_policy(conversion.onnx, conversion.spec)


def _observations(num=5, size=4):
    return np.random.default_rng(1).standard_normal((num, size)).astype(np.float32)


def _softmax(logits):
    exps = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def test_logits_are_those_of_the_model():
    observations = _observations()
    found = _convert(_model()).action_probs(observations, deterministic=False)
    np.testing.assert_allclose(found, _softmax(observations @ _WEIGHT), atol=1e-6)


def test_probabilities_become_logits():
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["z"]),
        helper.make_node("Softmax", ["z"], ["y"], axis=1),
        helper.make_node("ArgMax", ["z"], ["label"], axis=1, keepdims=0),
    ]
    model = _model(nodes, outputs=("label", "y"))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    observations = _observations()
    expected = _softmax(observations @ _WEIGHT)
    policy = _convert(model, head="probabilities", outputs=("y",))
    found = policy.action_probs(observations, deterministic=False)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    policy = _convert(model, head="choices", outputs=("label",), actions=Discrete(3))
    np.testing.assert_array_equal(policy.act(observations).actions, expected.argmax(axis=1))
    with pytest.raises(ConfigInvalidError, match="has the outputs") as caught:
        _convert(model, head="probabilities")
    assert caught.value.parameter == "outputs"


def test_one_log_std_for_all_observations():
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["means"]),
        helper.make_node("Identity", ["constant"], ["log_stds"]),
    ]
    model = _model(nodes, outputs=("log_stds", "means"))
    constant = np.array([-1.0, 0.0, 1.0], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(constant, "constant"))
    actions = Box((3,), "float32", -2, 2)
    observations = _observations()
    policy = _convert(model, actions=actions, head="gaussian")
    outputs = policy._run({"observations": observations})
    np.testing.assert_allclose(outputs["means"], observations @ _WEIGHT, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs["log_stds"], np.tile(constant, (5, 1)))
    with pytest.raises(SpaceUnsupportedError, match="without finite bounds"):
        _convert(model, actions=Box((3,), "float32"), head="squashed_gaussian")


@pytest.mark.parametrize(
    ("dims", "shape", "order"),
    [
        (["N", 12], (2, 2, 3), None),
        (["N", 2, 2, 3], (2, 2, 3), None),
        (["N", 3, 2, 2], (2, 2, 3), (0, 3, 1, 2)),
    ],
)
def test_observations_get_the_shape_and_dtype_of_the_model(dims, shape, order):
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("Cast", ["flat"], ["single"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["single", "weight"], ["y"]),
    ]
    weight = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
    model = _model(nodes, inputs=[("x", TensorProto.DOUBLE, dims)], weight=weight)
    images = np.random.default_rng(1).integers(0, 9, (5, *shape)).astype(np.uint8)
    policy = _convert(model, Box(shape, "uint8", 0, 255), head="q_values")
    arranged = images if order is None else images.transpose(order)
    expected = arranged.reshape(5, 12).astype(np.float32) @ weight
    np.testing.assert_allclose(policy.act(images).q_values, expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_takes_integers_does_not_truncate():
    nodes = [
        helper.make_node("Cast", ["x"], ["single"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["single", "weight"], ["y"]),
    ]
    model = _model(nodes, inputs=[("x", TensorProto.INT64, ["N", 4])])
    with pytest.raises(SpaceUnsupportedError, match="takes int64, expected floats"):
        _convert(model, head="q_values")
    unknown = onnx.load_from_string(model.SerializeToString())
    unknown.graph.input[0].type.tensor_type.elem_type = 125
    with pytest.raises(SpaceUnsupportedError, match="the unknown type 125, expected floats"):
        _convert(unknown, head="q_values")
    space, mean = Box((4,), "int64"), np.zeros(4)
    observations = np.array([[1, 0, 2, 3]])
    found = _convert(model, space, head="q_values").act(observations).q_values
    np.testing.assert_allclose(
        found, observations.astype(np.float32) @ _WEIGHT, rtol=1e-5, atol=1e-6
    )
    data = model.SerializeToString()
    conversion = convert_onnx(data, "model.onnx", space, _ACTIONS, head="q_values")
    with pytest.raises(SpaceUnsupportedError, match="a network that takes int64") as caught:
        add_normalization(conversion, mean, mean + 2, 10.0)
    assert caught.value.parameter == "normalization"


@pytest.mark.parametrize(
    "kind", [TensorProto.FLOAT, TensorProto.DOUBLE], ids=TensorProto.DataType.Name
)
def test_a_model_gets_normalized_integers_as_floats(kind):
    nodes = [
        helper.make_node("Cast", ["x"], ["single"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["single", "weight"], ["y"]),
    ]
    data = _model(nodes, inputs=[("x", kind, ["N", 4])]).SerializeToString()
    space = Box((2, 2), "int64")
    conversion = convert_onnx(data, "model.onnx", space, _ACTIONS, head="q_values")
    onnx = add_normalization(conversion, np.ones((2, 2)), np.full((2, 2), 2.0), 10.0)
    observations = np.array([[[2, 1], [0, 6]]])
    found = graph_policy(onnx, conversion.spec).act(observations).q_values
    expected = np.array([[0.5, 0, -0.5, 2.5]], np.float32) @ _WEIGHT
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_parts_of_an_observation_go_to_the_inputs_of_their_names():
    nodes = [
        helper.make_node("Cast", ["count"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["wide", "number"], ["y"]),
    ]
    inputs = [("wide", TensorProto.FLOAT, ["N", 3]), ("count", TensorProto.INT64, ["N", 1])]
    space = Dict({"count": Discrete(9), "wide": Box((3,), "float32")})
    wide = np.array([[1, 2, 3]], np.float32)
    policy = _convert(_model(nodes, inputs=inputs), space, head="q_values")
    act = policy.act({"count": np.array([4]), "wide": wide})
    np.testing.assert_array_equal(act.q_values, [[4, 8, 12]])
    other = Dict({"length": Discrete(9), "wide": Box((3,), "float32")})
    with pytest.raises(SpaceUnsupportedError, match="one named 'length'"):
        _convert(_model(nodes, inputs=inputs), other)


def _external():
    model = _model()
    (tensor,) = model.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"
    return model


def _random(*, is_nested):
    node = helper.make_node("RandomNormalLike", ["x"], ["y"])
    if not is_nested:
        return _model([node])
    info = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    branch = helper.make_graph([node], "branch", [], [info])
    condition = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
    return _model([condition])


def _truncated():
    model = _model()
    model.graph.initializer[0].raw_data = b"\0" * 8
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_external(), "with its data in another file"),
        (_random(is_nested=False), "draws random numbers"),
        (_random(is_nested=True), "draws random numbers"),
        (_truncated(), "the file is damaged"),
        (_model(weight=_WEIGHT * np.float32("nan")), "that are not finite"),
        (_model(opsets=(("", 17), ("mine", 1))), "operators of the domain 'mine'"),
        (_model(opsets=(("", 9),)), "found opset 9"),
        (b"\x08\x07 this is none", "is no ONNX model"),
        (_model().SerializeToString().replace(b"MatMul", b"Mat\xfful"), "expected UTF-8"),
        (_model().SerializeToString().replace(b"weight", b"\xffeight"), "expected UTF-8"),
        (b"", "without nodes"),
    ],
)
def test_a_model_that_cannot_be_trusted_to_act_is_refused(model, reason):
    with pytest.raises(SourceInvalidError, match=reason):
        _convert(model)


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"head": None}, ConfigInvalidError, "head: found None"),
        ({"head": "uniform"}, ConfigInvalidError, "head: found 'uniform'"),
        ({"outputs": ("z",)}, ConfigInvalidError, r"expected 1 of \['y'\]"),
        ({"head": "deterministic"}, SpaceUnsupportedError, "expected a float Box"),
        ({"actions": MultiBinary(2)}, SpaceUnsupportedError, "expected a Discrete"),
        ({"observations": Box((5,), "float32")}, SpaceUnsupportedError, r"\[0, 4\]"),
        (
            {"observations": Dict({"a": _VECTOR, "b": _VECTOR})},
            SpaceUnsupportedError,
            "expected 2 for the dataset's observations",
        ),
    ],
)
def test_heads_and_spaces_that_do_not_fit_are_refused(arguments, error, reason):
    with pytest.raises(error, match=reason):
        _convert(_model(), **arguments)


def test_a_model_that_mixes_the_rows_of_a_batch_is_refused(policy_lake, tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["z"]),
        helper.make_node("ReduceMean", ["z"], ["mean"], axes=[0]),
        helper.make_node("Sub", ["z", "mean"], ["y"]),
    ]
    (tmp_path / "batch.onnx").write_bytes(_model(nodes).SerializeToString())
    options = ImportOptions(head="categorical")
    with pytest.raises(SourceInvalidError, match="not the same alone"):
        import_policy(policy_lake, "sb3_ppo", "no", tmp_path / "batch.onnx", options=options)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_model(weight=_WEIGHT[:, :2]), "cannot act on the dataset's observations"),
        (_model([helper.make_node("Log", ["x"], ["y"])]), "cannot act on|are not finite"),
        (_model([helper.make_node("NoSuchOperator", ["x"], ["y"])]), "onnxruntime"),
    ],
)
def test_a_model_that_cannot_act_is_refused(policy_lake, tmp_path, model, reason):
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    options = ImportOptions(head="q_values")
    with pytest.raises(SourceInvalidError, match=reason):
        import_policy(policy_lake, "sb3_ppo", "no", tmp_path / "model.onnx", options=options)


def test_an_onnx_model_is_imported_and_compared(policy_lake, kit, tmp_path):
    observations = np.load(kit.POLICIES / "sb3_ppo.observations.npy")
    onnx.save(_model(), tmp_path / "net.onnx")
    result = import_policy(
        policy_lake,
        "sb3_ppo",
        "net",
        tmp_path / "net.onnx",
        options=ImportOptions(head="q_values"),
        expect=(observations @ _WEIGHT).argmax(axis=1),
    )
    assert (result.algorithm, result.head, result.num_compared) == (
        "onnx:q_values",
        "q_values",
        200,
    )
