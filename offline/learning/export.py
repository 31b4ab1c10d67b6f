"""Export: a learner's policy graph as ONNX, checked against torch before it leaves.

torch 2.13 has two exporters. The one used here traces (`dynamo=False`): 0.2 s for a 256x256
network, nothing to install, and it covers the same graphs in every torch that we support (2.5 on).
The newer one takes 3.3 s for the same file, needs onnxscript, and prints its progress to stdout (2
cores, 2026-11). The tracing one announces its end with a DeprecationWarning, which is silenced
below; on the day a torch drops it, `dynamo=True` with dynamic_shapes takes its place in this
function.
"""

from __future__ import annotations

import tempfile
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Space,
    Text,
    Tuple,
    Values,
    bounds,
    children,
    value_dtype,
    value_shape,
)
from replaylake.datastore.errors import PackageInvalidError
from replaylake.datastore.lake.policies.graph_policy import graph_inputs, graph_output_names
from replaylake.datastore.lake.policies.manifest import GRAPH
from replaylake.datastore.lake.policies.package import GraphSession
from replaylake.datastore.lake.policies.policy import NEXT_STATE
from replaylake.offline.networks.graph import PolicyGraph, run_graph

_OPSET: Final = 17  # all that onnxruntime 1.20 and newer run; nothing later is used by a policy
# Sums in another order differ in the last bits; more means that the export changed the mathematics.
_RTOL, _ATOL = 1e-4, 1e-5


def export_onnx(graph: PolicyGraph) -> bytes:
    """Return the graph as ONNX with a free leading dim, the same as torch on random observations.

    Raises: PackageInvalidError if an operation cannot be exported, or onnxruntime's outputs differ
    from torch's on 64 random observations and on one.
    """
    graph = copy_to_cpu(graph)
    onnx = trace_onnx(graph)
    check_same(graph, onnx)
    return onnx


def copy_to_cpu(graph: PolicyGraph) -> PolicyGraph:
    """Return it as it is now, on the CPU: a learner on a GPU goes on training the one there."""
    return PolicyGraph(deepcopy(graph.module).eval().cpu(), graph.spec)


def trace_onnx(graph: PolicyGraph, *, folded: bool = True) -> bytes:
    """Return a graph on the CPU as ONNX, unchecked. Raises: PackageInvalidError, as export_onnx.

    folded: what is computed from weights alone is computed now; else the weights are there as they
    are, and onnxruntime folds them when it loads the graph.
    """
    module = _FlatOutputs(graph.module)
    inputs = random_inputs(graph, 2)
    outputs = graph_output_names(graph.spec)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / GRAPH
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        try:
            torch.onnx.export(
                module,
                tuple(torch.from_numpy(array) for array in inputs.values()),
                path,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_axes={name: {0: "N"} for name in (*inputs, *outputs)},
                opset_version=_OPSET,
                do_constant_folding=folded,
                dynamo=False,
            )
        except (RuntimeError, torch.onnx.errors.OnnxExporterError) as error:
            raise PackageInvalidError(
                f"policy graph {type(graph.module).__name__}: torch {torch.__version__} cannot "
                f"export it to ONNX: {error}"
            ) from error
        return path.read_bytes()


def check_same(graph: PolicyGraph, onnx: bytes) -> None:
    """Refuse ONNX that differs from torch on 64 random observations, or one: PackageInvalidError.

    graph: on the CPU.
    """
    session = GraphSession(onnx, graph.spec, "exported policy graph")
    for num in (64, 1):
        _check_outputs(graph, session, num)


class _FlatOutputs(nn.Module):
    """Makes the outputs a plain tuple, whatever tuple type the module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.module(*inputs))


def _check_outputs(graph: PolicyGraph, session: GraphSession, num: int) -> None:
    inputs = random_inputs(graph, num)
    expected = run_graph(graph, inputs)
    outputs = session.run(inputs)
    for name, array in expected.items():
        same = outputs[name].shape == array.shape
        if same:
            rows = np.isclose(outputs[name], array, _RTOL, _ATOL).reshape(num, -1).all(axis=1)
            # It chooses among draws: of two that are worth the same either may be taken.
            is_choice = graph.spec.head == "sampled"
            same = bool(rows.mean() >= 0.9 or num == 1) if is_choice else bool(rows.all())
        if not same:
            raise PackageInvalidError(
                f"exported policy graph: output {name} {list(outputs[name].shape)} differs from "
                f"torch's {list(array.shape)} on {num} random observations, expected the same "
                f"within {_RTOL}. Is a parameter not finite, or a shape fixed in the module's "
                "forward?"
            )


def random_inputs(graph: PolicyGraph, num: int) -> dict[str, Array]:
    """Return inputs [num, ...] by name, for a graph on the CPU; the same for the same weights.

    A state is that of every second row's beginning, and of the others after two steps.
    """
    spec, rng = graph.spec, _rng()

    def inputs(state: Array) -> dict[str, Array]:
        return graph_inputs(spec, _random_values(spec.observation_space, num, rng), rng, state)

    state = np.zeros((num, spec.state_size), np.float32)
    if spec.state_size:
        for _ in range(2):
            state = run_graph(graph, inputs(state))[NEXT_STATE]
        state[::2] = 0
    return inputs(state)


def _random_values(space: Space, num: int, rng: np.random.Generator) -> Values:
    if isinstance(space, Dict | Tuple):
        return {key: _random_values(sub, num, rng) for key, sub in children(space).items()}
    if isinstance(space, Text):
        raise PackageInvalidError(
            "policy graph: found a Text observation, which ONNX has no input for."
        )
    shape = (num, *value_shape(space))
    if isinstance(space, Box) and value_dtype(space).kind == "f":
        values: Array = rng.standard_normal(shape)
    elif isinstance(space, Box):
        low, high = (np.clip(bound, -1000, 1000) for bound in bounds(space))
        values = rng.integers(low.astype(np.int64), high.astype(np.int64) + 1, shape)
    else:
        low, high = bounds(space)
        values = rng.integers(low, np.asarray(high) + 1, shape)
    return values.astype(value_dtype(space))


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)
