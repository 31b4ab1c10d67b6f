"""Frame stacks: a policy that learned from stacked observations, acting on single ones.

Replay stacks the last k observations of an episode when it samples, its first one repeated before
it (`Dataset.replay(frame_stack=k)`, `follow` too), so that a learner is made for

    stack_space(space, k)

and its policy takes [N, k, *obs]. An environment gives one at a time. `wrap_frame_stack` keeps the
others in the policy's state, inside of the graph, so that a rollout, an evaluation and whoever
loads the package act on single observations and know nothing of it:

    graph = wrap_frame_stack(learner.policy(), k)
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Space, describe
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.offline.networks.graph import PolicyGraph

# Of integers wider than these float32, which a state is of, does not hold all.
_MAX_INTEGER_BITS: Final = 16


def stack_space(space: Space, num: int) -> Box:
    """Return the space of `num` observations one after another, as replay stacks them.

    Raises: SpaceUnsupportedError for what is no Box, or one of wide integers.
    """
    _check_float32_exact(space)
    assert isinstance(space, Box)  # the check saw to it
    low, high = (_repeat_bound(bound, num) for bound in (space.low, space.high))
    return Box((num, *space.shape), space.dtype, low, high)


def wrap_frame_stack(graph: PolicyGraph, num: int) -> PolicyGraph:
    """Return a graph that acts as the given one does on stacks of `num`, from single observations.

    Its state is that of the given graph, then the num - 1 observations before this one, the oldest
    first, then 1 where there are any: 0 at an episode's start, which its first observation stands
    in for. Weights are shared, not copied. Cost: 4 bytes a number of state; of 84 x 84 pixels 85 KB
    a stack of 4. Raises: SpaceUnsupportedError for a graph that takes no stacks of `num`.
    """
    stacked = graph.spec.observation_space
    if not isinstance(stacked, Box) or stacked.shape[:1] != (num,) or graph.spec.frame_stack > 1:
        raise SpaceUnsupportedError(
            f"frame stack: found a policy of {describe(stacked)}, expected a Box of {num} "
            "observations, one after another. Create the learner for stacked_space(space, "
            f"{num})."
        )
    _check_float32_exact(stacked)
    bounds = stacked.low, stacked.high
    low, high = (bound[0] if isinstance(bound, tuple) else bound for bound in bounds)
    single = Box(stacked.shape[1:], stacked.dtype, low, high)
    spec = replace(
        graph.spec,
        observation_space=single,
        state_size=graph.spec.state_size + (num - 1) * prod(single.shape) + 1,
        frame_stack=num,
    )
    return PolicyGraph(StackedFrames(graph.module, single, num, graph.spec.state_size), spec)


class StackedFrames(nn.Module):
    """Puts the observations before it, out of the state, before each one; see wrap_frame_stack.

    module: takes [N, num, *obs], then its own state [N, state_size] if that is more than 0, then
    noise if it has any.
    """

    def __init__(self, module: nn.Module, space: Box, num: int, state_size: int = 0) -> None:
        super().__init__()
        self._module = module
        self._shape = (num, *space.shape)
        self._size = prod(space.shape)
        self._state_size = state_size

    def forward(
        self, observations: torch.Tensor, state: torch.Tensor, *noise: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        own, frames = state[:, : self._state_size], state[:, self._state_size : -1]
        count = state[:, -1:]
        newest = observations.reshape(-1, self._size).float()
        first = newest.repeat(1, self._shape[0] - 1)
        stack = torch.cat([torch.where(count > 0, frames, first), newest], dim=1)
        stacked = stack.reshape(-1, *self._shape).to(observations.dtype)
        inputs = (stacked, own, *noise) if self._state_size else (stacked, *noise)
        outputs = tuple(self._module(*inputs))
        states = [stack[:, self._size :], torch.ones_like(count)]
        if self._state_size:
            outputs, states = outputs[:-1], [outputs[-1], *states]
        return (*outputs, torch.cat(states, dim=1))


def _check_float32_exact(space: Space) -> None:
    """Refuse what float32 does not hold exactly. Raises: SpaceUnsupportedError."""
    dtype = np.dtype(space.dtype) if isinstance(space, Box) else None
    if dtype is None or (dtype.kind in "iu" and 8 * dtype.itemsize > _MAX_INTEGER_BITS):
        raise SpaceUnsupportedError(
            f"frame stack: found observations {describe(space)}, expected a Box of floats, or of "
            f"integers of {_MAX_INTEGER_BITS} bits at the most. Stack them in the environment."
        )


def _repeat_bound(bound: Any, num: int) -> Any:
    return (bound,) * num if isinstance(bound, tuple) else bound
