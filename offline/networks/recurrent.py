"""Recurrent cores: what stands between an encoder's features and a head that has to remember.

A core keeps one flat state a row, float32 [B, S], zeros where an episode begins, which is what a
policy passes from step to step (PolicySpec.state_size) and a rollout records with each step, in the
column `policy_state`. Learning, it goes over whole sequences:

    outputs, state = core(features, batch.columns["policy_state"][:, 0], starts)

Acting, and in the exported graph, it takes one step:

    outputs, state = core.step(features, state)

Both give the same numbers. The recorded state is that of the policy which acted: older than the
weights that it is gone on from ("stored state" in Kapturowski et al. 2019, R2D2, section 3).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from replaylake.datastore.errors import ConfigInvalidError

CoreKind = Literal["gru", "lstm"]


class RecurrentCore(nn.Module):
    """Maps features to outputs that depend on the steps before, too.

    num_outputs: H, the width of what it gives. state_size: S, the numbers that it keeps a row. Its
    weights are those of one layer of nn.GRU or nn.LSTM, made as those are.
    """

    def __init__(self, layer: nn.GRU | nn.LSTM, state_size: int) -> None:
        super().__init__()
        self._layer = layer
        self.num_outputs: int = layer.hidden_size
        self.state_size = state_size

    def forward(
        self, features: torch.Tensor, state: torch.Tensor, starts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Go over sequences: [B, T, F] and the states before them to [B, T, H] and those after.

        Args:
            features: float [B, T, F]. What stands after an episode's end changes nothing before it,
                so padded sequences need no mask here; the values of what follows a sequence come
                of T + 1 steps: all observations and the next one of the last.
            state: float [B, S], before the first step; gradients do not leave through it unless it
                asks for them.
            starts: bool [B, T], true where an episode begins; the state is zeroed there, so that
                one recorded under another policy does no harm. Only the first step is looked at: no
                sequence holds the beginning of a second episode. None: the state is right as it is.

        Returns: outputs [B, T, H] and the state [B, S] after the T-th step, padding included.
        """
        if starts is not None:
            state = state * ~starts[:, :1]
        return self._scan(features, state)

    def step(
        self, features: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one step: [N, F] and [N, S] to [N, H] and [N, S], by operations that ONNX has."""
        raise NotImplementedError

    def _scan(
        self, features: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def _gates(
        self, features: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what inputs and outputs give the gates, each [N, gates * H]."""
        of_input, of_hidden, input_bias, hidden_bias = self._layer.parameters()
        return F.linear(features, of_input, input_bias), F.linear(hidden, of_hidden, hidden_bias)


class GRUCore(RecurrentCore):
    """A gated recurrent unit (Cho et al. 2014, as in nn.GRU); the state is its output."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(nn.GRU(num_inputs, num_outputs, batch_first=True), num_outputs)

    def step(
        self, features: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_input, of_hidden = self._gates(features, state)
        reset_x, update_x, new_x = of_input.chunk(3, dim=1)
        reset_h, update_h, new_h = of_hidden.chunk(3, dim=1)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        outputs = (1 - update) * new + update * state
        return outputs, outputs

    def _scan(
        self, features: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, last = self._layer(features, state[None].contiguous())
        return outputs, last[0]


class LSTMCore(RecurrentCore):
    """Long short-term memory (Hochreiter and Schmidhuber 1997); the state is output and cell."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(nn.LSTM(num_inputs, num_outputs, batch_first=True), 2 * num_outputs)

    def step(
        self, features: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, cell = state.chunk(2, dim=1)
        of_input, of_hidden = self._gates(features, hidden)
        enter, forget, new, output = (of_input + of_hidden).chunk(4, dim=1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
        outputs = torch.sigmoid(output) * torch.tanh(cell)
        return outputs, torch.cat([outputs, cell], dim=1)

    def _scan(
        self, features: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, cell = (part[None].contiguous() for part in state.chunk(2, dim=1))
        outputs, (hidden, cell) = self._layer(features, (hidden, cell))
        return outputs, torch.cat([hidden[0], cell[0]], dim=1)


def make_core(kind: str, num_inputs: int, num_outputs: int) -> RecurrentCore:
    """Return a core of the kind `gru` or `lstm`. Raises: ConfigInvalidError for another."""
    if kind == "gru":
        return GRUCore(num_inputs, num_outputs)
    if kind == "lstm":
        return LSTMCore(num_inputs, num_outputs)
    raise ConfigInvalidError(
        f"recurrent: found {kind!r}, expected one of {', '.join(get_args(CoreKind))}."
    )
