"""GraphWriter: a policy's graph as ONNX, again and again while its weights change.

Tracing takes 100 ms, as much as a hundred updates. But only the weights differ from one file to the
next, and ONNX holds them as plain bytes: the graph is traced once, with weights that are found
again in the file, and from then on the current ones are put in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from replaylake.datastore.errors import PackageInvalidError
from replaylake.offline.learning.export import check_same, copy_to_cpu, export_onnx, trace_onnx
from replaylake.offline.networks.graph import PolicyGraph


class GraphWriter:
    """Writes one policy graph, with the weights that it has at each call.

    The weights are the parameters and float buffers of the graph's module, which stay the same
    tensors or are replaced by others of the same shapes; what the module keeps elsewhere counts as
    fixed.
    """

    def __init__(self, graph: PolicyGraph) -> None:
        """Trace the graph, and check it against torch. Cost: 0.2 s for a perceptron of 2 x 256."""
        self._graph = graph
        self._template = _template(graph)

    @property
    def is_fast(self) -> bool:
        """Whether only weights are written; else each call exports.

        It has to where the file holds not a weight but a number that was computed from it.
        """
        return self._template is not None

    def onnx(self) -> bytes:
        """Return the graph as it is now, in ONNX.

        Cost: 0.05 ms for a perceptron of 2 x 256, 270 KB. Raises: PackageInvalidError, as
        export_onnx, where it is not fast.
        """
        if self._template is None:
            return export_onnx(self._graph)
        return self._template.fill(_weights(self._graph.module))


class _Template(NamedTuple):
    """A file in pieces: pieces[i] comes before the weights number places[i]; the last one ends it.

    sizes: bytes of those weights.
    """

    pieces: Sequence[bytes]
    places: Sequence[int]
    sizes: Sequence[int]

    def fill(self, weights: Sequence[torch.Tensor]) -> bytes:
        """Return the file with these weights. One copy from the device for all of them."""
        if not self.places:
            return self.pieces[0]
        parts = [weights[place].detach().reshape(-1).view(torch.uint8) for place in self.places]
        data = torch.cat(parts).cpu().numpy().data
        file: list[bytes | memoryview] = []
        start = 0
        for piece, size in zip(self.pieces, self.sizes, strict=False):
            file += (piece, data[start : start + size])
            start += size
        return b"".join((*file, self.pieces[-1]))


def _template(graph: PolicyGraph) -> _Template | None:
    """Return the traced graph without its weights; None where they are not found in it as such."""
    # Not the weights themselves: equal ones (zeros, at first) become one in the file, and whether
    # the file follows the weights shows only on others than it was traced with.
    other = copy_to_cpu(graph)
    _perturb_weights(_weights(other.module))
    try:
        onnx = trace_onnx(other, folded=False)
        check_same(other, onnx)
        template = _cut_template(other, onnx)
        # A weight that is not in the file as such, and matters, shows here.
        if template is not None:
            check_same(copy_to_cpu(graph), template.fill(_weights(graph.module)))
    except PackageInvalidError:
        return None
    return template


def _cut_template(graph: PolicyGraph, onnx: bytes) -> _Template | None:
    """Cut those weights out of a file that are there once; None where two of them overlap."""
    weights = _weights(graph.module)
    spans: list[tuple[int, int, int]] = []
    for number, tensor in enumerate(weights):
        data = tensor.detach().numpy().tobytes()
        if data and onnx.count(data) == 1:
            start = onnx.index(data)
            spans.append((start, start + len(data), number))
    spans.sort()
    ends = [0, *(end for _, end, _ in spans)]
    starts = [*(start for start, _, _ in spans), len(onnx)]
    if any(start < end for end, start in zip(ends, starts, strict=True)):
        return None
    pieces = [onnx[end:start] for end, start in zip(ends, starts, strict=True)]
    return _Template(pieces, [n for *_, n in spans], [end - start for start, end, _ in spans])


def _weights(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and the buffers of floats, in an order that a copy has too."""
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    return [*module.parameters(), *buffers]


def _perturb_weights(weights: Sequence[torch.Tensor]) -> None:
    """Change weights a little, in place, so that no two numbers are alike.

    What is above 0 stays so, as a scale or variance has to.
    """
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in weights:
            noise = torch.rand(tensor.shape, generator=rng, dtype=tensor.dtype)
            tensor.add_((0.1 * tensor.abs() + 0.05) * noise)
