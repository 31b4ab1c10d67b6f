"""Cases: what is asked of every server alike, and of what policy.

Needs nothing but the standard library, numpy and onnx: peers' environments import it too.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OBSERVATION: Final = [0.01, -0.02, 0.03, 0.04]
HIDDEN: Final = 64
BATCH: Final = 256
ONE_BODY: Final = json.dumps({"observation": OBSERVATION})
BATCH_BODY: Final = json.dumps({"observations": [OBSERVATION] * BATCH})


def graph() -> bytes:
    """Return a perceptron 4-64-64-2 as ONNX: `observations` float32 [n, 4] in, `logits` out."""
    rng = np.random.default_rng(0)
    sizes = [4, HIDDEN, HIDDEN, 2]
    nodes, weights, value = [], [], "observations"
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        is_last = i == len(sizes) - 2
        out = "logits" if is_last else f"h{i}"
        drawn = rng.normal(0, fan_in**-0.5, (fan_in, fan_out)).astype(np.float32)
        weights += [
            numpy_helper.from_array(drawn, f"w{i}"),
            numpy_helper.from_array(np.zeros(fan_out, np.float32), f"b{i}"),
        ]
        nodes.append(helper.make_node("Gemm", [value, f"w{i}", f"b{i}"], [out]))
        if not is_last:
            nodes.append(helper.make_node("Tanh", [out], [f"t{i}"]))
            value = f"t{i}"
    made = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2])],
        weights,
    )
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(made, opset_imports=[opset], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()  # type: ignore[no-any-return]


def graph_file(folder: Path) -> Path:
    """Write the graph where a peer reads it."""
    path = folder / "serving-policy.onnx"
    path.write_bytes(graph())
    return path
