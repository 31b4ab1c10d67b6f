"""TorchScript: archives of `torch.jit.save`, exported to ONNX as they are imported.

An archive has a program in it, in a subset of Python, next to its weights. The program is read
before torch loads it, and refused if it calls anything besides operators that compute on tensors:
others read and write files, loop for ever, or run when they are loaded.
"""

from __future__ import annotations

import ast
import io
import tempfile
import warnings
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from replaylake.datastore.episodes.spaces import (
    Box,
    Discrete,
    Space,
    describe,
    value_dtype,
    value_shape,
)
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.graph_policy import graph_inputs, graph_output_names
from replaylake.datastore.lake.policies.package import GraphSession
from replaylake.offline.importing.networks import Conversion
from replaylake.offline.importing.onnx_model import CHOICES, PROBABILITIES, convert_onnx
from replaylake.offline.importing.weights import MAX_BYTES, Weights

_OPSET: Final = 17
_MAX_CODE_BYTES: Final = 1 << 20
_EXPORT_TOLERANCE: Final = 1e-5
_OPERATORS: Final = frozenset(
    {
        "abs",
        "adaptive_avg_pool2d",
        "add",
        "add_",
        "addmm",
        "annotate",
        "argmax",
        "avg_pool2d",
        "batch_norm",
        "bmm",
        "cat",
        "celu",
        "chunk",
        "clamp",
        "clamp_",
        "clamp_max",
        "clamp_min",
        "contiguous",
        "conv1d",
        "conv2d",
        "cos",
        "detach",
        "dim",
        "div",
        "dropout",
        "elu",
        "elu_",
        "eq",
        "exp",
        "expand",
        "expand_as",
        "flatten",
        "floor",
        "gather",
        "ge",
        "gelu",
        "group_norm",
        "gt",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "hardtanh_",
        "layer_norm",
        "le",
        "leaky_relu",
        "leaky_relu_",
        "len",
        "linear",
        "log",
        "log1p",
        "log_softmax",
        "logsumexp",
        "lt",
        "matmul",
        "max",
        "max_pool2d",
        "maximum",
        "mean",
        "min",
        "minimum",
        "mish",
        "mm",
        "mul",
        "mul_",
        "ne",
        "neg",
        "norm",
        "ones_like",
        "permute",
        "pow",
        "prod",
        "reciprocal",
        "relu",
        "relu6",
        "relu_",
        "reshape",
        "rsqrt",
        "rsub",
        "select",
        "selu",
        "sigmoid",
        "sign",
        "silu",
        "silu_",
        "sin",
        "size",
        "slice",
        "softmax",
        "softplus",
        "softsign",
        "sqrt",
        "square",
        "squeeze",
        "stack",
        "std",
        "sub",
        "sum",
        "t",
        "tanh",
        "to",
        "transpose",
        "type_as",
        "unbind",
        "unsqueeze",
        "var",
        "view",
        "where",
        "zeros_like",
        "__and__",
        "__contains__",
        "__getitem__",
        "__is__",
        "__isnot__",
        "__not__",
        "__or__",
        "unchecked_cast",
    }
)
_BUILTINS: Final = frozenset({"bool", "float", "getattr", "int", "uninitialized", "unchecked_cast"})
_STATEMENTS: Final = (
    ast.AnnAssign,
    ast.Assign,
    ast.ClassDef,
    ast.Expr,
    ast.FunctionDef,
    ast.If,
    ast.Pass,
    ast.Return,
)
_ERRORS: Final = (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


def convert_torchscript(
    data: bytes,
    what: str,
    observations: Space,
    actions: Space,
    *,
    head: str | None,
) -> Conversion:
    """Convert an archive whose `forward` maps observations to the outputs of a head.

    Raises: SourceInvalidError if it is damaged, has a program that is not plain computation, or
    cannot be exported; ConfigInvalidError and SpaceUnsupportedError as convert_onnx.
    """
    _check_program(data, what)
    if not isinstance(observations, Box):
        raise SpaceUnsupportedError(
            f"observations: found {describe(observations)} in the dataset, expected a Box: a "
            "TorchScript module is called with one tensor of floats. Export the policy to ONNX."
        )
    module = _load(data, what)
    Weights({**dict(module.named_parameters()), **dict(module.named_buffers())} or _NONE, what)
    shape = _find_input_shape(module, value_shape(observations), what)
    onnx, num = _export(module, shape, what)
    outputs = [f"output.{number}" for number in range(num)]
    conversion = convert_onnx(onnx, what, observations, actions, head=head, outputs=outputs)
    _check_export(module, shape, conversion, what)
    facts = {"library": "torch", "library_version": torch.__version__}
    notes = ("A TorchScript module does not say what was done to observations before it.",)
    return Conversion(conversion.onnx, conversion.spec, f"torchscript:{head}", facts, notes)


# A module without weights still computes.
_NONE: Final = {"none": torch.zeros(1)}


def is_archive(names: Sequence[str]) -> bool:
    """Whether the entries of a zip archive are those of torch.jit.save."""
    return any(name.endswith("/constants.pkl") for name in names)


def _check_program(data: bytes, what: str) -> None:
    """Refuse programs with anything but computation. Raises: SourceInvalidError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            num_bytes = sum(info.file_size for info in infos)
            code = [info for info in infos if "/code/" in info.filename]
            if num_bytes > MAX_BYTES or sum(info.file_size for info in code) > _MAX_CODE_BYTES:
                raise SourceInvalidError(
                    f"{what}: found {num_bytes:,} bytes in the archive, expected at most "
                    f"{MAX_BYTES:,}, and 1 MiB of code. Export the policy to ONNX."
                )
            programs = [archive.read(info).decode() for info in code if _is_source(info)]
        trees = [ast.parse(program) for program in programs]
    except (RecursionError, SyntaxError, ValueError, zipfile.BadZipFile, OSError) as error:
        raise SourceInvalidError(
            f"{what}: the archive is damaged ({error}). Copy it again."
        ) from error
    if not trees:
        raise SourceInvalidError(f"{what}: found no program, expected one of torch.jit.save.")
    for tree in trees:
        for node in ast.walk(tree):
            _check_node(node, what)


def _is_source(info: zipfile.ZipInfo) -> bool:
    return info.filename.endswith(".py")


def _check_node(node: ast.AST, what: str) -> None:
    if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
        found = type(node).__name__.lower()
        raise SourceInvalidError(
            f"{what}: found a statement {found!r} in its program, expected computation without "
            "loops. Export the policy to ONNX where it was trained."
        )
    if isinstance(node, ast.FunctionDef) and node.name in ("__setstate__", "__getstate__"):
        raise SourceInvalidError(
            f"{what}: found {node.name} in its program, which runs when it is loaded. Export the "
            "policy to ONNX where it was trained."
        )
    refused = ""
    if isinstance(node, ast.Attribute):
        refused = _find_unknown_name(node)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        # Names that begin with _ stand for functions of the archive's own.
        is_known = node.func.id in _BUILTINS or node.func.id.startswith("_")
        refused = "" if is_known else node.func.id
    if refused:
        raise SourceInvalidError(
            f"{what}: found {refused!r} in its program, expected operators on tensors that are "
            "known to do nothing else. Export the policy to ONNX where it was trained."
        )


def _find_unknown_name(node: ast.Attribute) -> str:
    """Return the dotted name of an operator or class that is not known; else an empty text."""
    name = ast.unparse(node)
    if name.startswith("torch."):
        return "" if name.removeprefix("torch.") in _OPERATORS else name
    if name.startswith("ops."):
        return "" if name in ("ops.prim", "ops.prim.NumToTensor") else name
    return name if ".classes" in name else ""


def _load(data: bytes, what: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=DeprecationWarning)
        try:
            load: Any = torch.jit.load  # untyped
            module = load(io.BytesIO(data), map_location="cpu")
            return module.eval()
        except _ERRORS as error:
            raise SourceInvalidError(
                f"{what}: torch {torch.__version__} cannot load it "
                f"({' '.join(str(error).split())[:300]}). Save it again."
            ) from error


def _find_input_shape(module: Any, shape: tuple[int, ...], what: str) -> tuple[int, ...]:
    """Return the shape of observations that it takes: the dataset's, or else flattened."""
    failed: BaseException | None = None
    for candidate in dict.fromkeys((shape, (prod(shape),))):
        try:
            _run(module, torch.zeros(2, *candidate))
        except _ERRORS as error:
            failed = failed or error
        else:
            return candidate
    raise SpaceUnsupportedError(
        f"{what}: its forward cannot take the dataset's observations, float [N, "
        f"{', '.join(map(str, shape))}] ({' '.join(str(failed).split())[-300:]}). Name the "
        "dataset that the policy is for."
    )


def _run(module: Any, observations: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        outputs = module(observations)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        raise TypeError("it returns other values than tensors")
    return tuple(outputs)


def _export(module: Any, shape: tuple[int, ...], what: str) -> tuple[bytes, int]:
    """Return the module as ONNX, and how many outputs it has. Raises: SourceInvalidError."""
    example = torch.zeros(2, *shape)
    num = len(_run(module, example))
    names = [f"output.{number}" for number in range(num)]
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "module.onnx"
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                module,
                (example,),
                path,
                input_names=["observations"],
                output_names=names,
                dynamic_axes={name: {0: "N"} for name in ("observations", *names)},
                opset_version=_OPSET,
                dynamo=False,
            )
        except (*_ERRORS, torch.onnx.errors.OnnxExporterError) as error:
            raise SourceInvalidError(
                f"{what}: torch {torch.__version__} cannot export it to ONNX "
                f"({' '.join(str(error).split())[:300]}). Export it where it was trained."
            ) from error
        return path.read_bytes(), num


def _check_export(module: Any, shape: tuple[int, ...], conversion: Conversion, what: str) -> None:
    """Compare the graph with the module on random observations. Raises: SourceInvalidError."""
    space, actions = conversion.spec.observation_space, conversion.spec.action_space
    assert isinstance(space, Box)  # convert_torchscript saw to it
    session = GraphSession(conversion.onnx, conversion.spec, what)
    for num in (64, 1):
        raw = np.random.default_rng(0).uniform(0, 2, (num, *value_shape(space)))
        raw = raw.astype(value_dtype(space))
        inputs = graph_inputs(conversion.spec, raw)
        values = torch.from_numpy(inputs["observations"]).float().reshape(num, *shape)
        expected = _run(module, values)[0].float().reshape(num, -1).numpy()
        name = graph_output_names(conversion.spec)[0]
        found = session.run(inputs)[name]
        if conversion.algorithm.endswith(f":{PROBABILITIES}"):
            found = np.exp(found)
        elif conversion.algorithm.endswith(f":{CHOICES}"):
            start = actions.start if isinstance(actions, Discrete) else 0
            found = found.argmax(axis=1)[:, None] + start
        allowed = _EXPORT_TOLERANCE * (1 + float(np.abs(expected).max()))
        if not np.allclose(found, expected, rtol=0, atol=allowed):
            raise SourceInvalidError(
                f"{what}: its outputs in ONNX differ from torch's on {num} random observations. "
                "Export it where it was trained."
            )
