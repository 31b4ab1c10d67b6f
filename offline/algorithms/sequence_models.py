"""Steps seen: how a network looks at the steps of sequences, one by one or one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import nn

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.action_heads import ActionHead, Parameters
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.algorithm import PolicyModule, tensor
from replaylake.offline.learning.minibatches import take_rows
from replaylake.offline.networks.actor_critic import (
    Outputs,
    RecurrentActorCritic,
    SeparateActorCritic,
    SharedActorCritic,
    map_leaves,
)
from replaylake.offline.networks.graph import PolicyGraph

# What a policy that remembers knew before each step: recorded by who collects.
POLICY_STATE: Final = "policy_state"


class ForwardResult(NamedTuple):
    """What a network says of a batch [B, T] before it learns from it.

    steps: the M steps of the mask, single ones. values: float [B, T + 1]; of the observations of
    the mask, and after each sequence's last one of what followed; elsewhere anything finite.
    parameters: of those M observations, or None.
    """

    steps: Batch
    values: torch.Tensor
    parameters: Parameters | None


class SequenceModel(Protocol):
    """How the steps of a batch of sequences get to a network."""

    spec: PolicySpec

    def network(self) -> nn.Module:
        """Make the network."""
        ...

    def policy(self, network: Any) -> PolicyGraph:
        """Return the graph that acts by it."""
        ...

    def forward_batch(
        self, network: Any, batch: Batch, mask: torch.Tensor, *, with_parameters: bool
    ) -> ForwardResult:
        """Look at all of a batch [B, T]; mask: the steps to learn from."""
        ...

    def rows(
        self, batch: Batch, steps: Batch, mask: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Batch:
        """Return what minibatches are drawn from, with further columns [B, T]."""
        ...

    def outputs(self, network: Any, batch: Batch) -> tuple[Batch, Outputs]:
        """Return the single steps of a minibatch, and what the network says of them."""
        ...


class FeedforwardModel:
    """Each observation by itself; a minibatch is of single steps."""

    def __init__(
        self,
        head: ActionHead,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics,
        *,
        shared: bool,
    ) -> None:
        self._head, self._hidden_sizes, self._facts = head, hidden_sizes, facts
        self._kind = SharedActorCritic if shared else SeparateActorCritic
        self.spec = head.spec

    def network(self) -> nn.Module:
        head = self._head
        return self._kind(
            head.spec.observation_space,
            head.num_outputs,
            head.num_stds,
            self._hidden_sizes,
            self._facts,
        )

    def policy(self, network: Any) -> PolicyGraph:
        """Return the graph of its actor."""
        return PolicyGraph(PolicyModule(network.policy_network(), self.spec), self.spec)

    def forward_batch(
        self, network: Any, batch: Batch, mask: torch.Tensor, *, with_parameters: bool
    ) -> ForwardResult:
        """Look at the mask's observations, and at what followed each that no other one follows."""
        steps = take_rows(_drop_successors(batch, mask), mask)
        ends = mask.clone()
        ends[:, :-1] &= ~mask[:, 1:]
        following = map_leaves(batch.next_observations, lambda values: values[ends])
        parameters = None
        if with_parameters:
            parameters, of_steps = network(steps.observations)
        else:
            of_steps = network.compute_values(steps.observations)
        values = mask.new_zeros((len(mask), mask.shape[1] + 1), dtype=torch.float32)
        values[:, :-1][mask] = of_steps
        values[:, 1:][ends] = network.compute_values(following)
        return ForwardResult(steps, values, parameters)

    def rows(
        self, batch: Batch, steps: Batch, mask: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Batch:
        return replace(steps, columns={name: value[mask] for name, value in columns.items()})

    def outputs(self, network: Any, batch: Batch) -> tuple[Batch, Outputs]:
        """Return the minibatch as it is."""
        return batch, network(batch.observations)


class RecurrentModel:
    """Each observation after those before it, by a core that remembers; minibatches of sequences.

    A sequence begins with the state that was recorded before its first step: its policy's, which
    may be some versions old (the stored state of Kapturowski et al. 2019, R2D2).
    """

    def __init__(
        self, head: ActionHead, hidden_sizes: Sequence[int], facts: DatasetStatistics, *, core: str
    ) -> None:
        self._head, self._hidden_sizes, self._facts, self._core = head, hidden_sizes, facts, core
        self.spec = replace(head.spec, state_size=self._make_actor_critic("meta").state_size)

    def network(self) -> nn.Module:
        """Make an actor-critic with a core."""
        return self._make_actor_critic("cpu")

    def policy(self, network: Any) -> PolicyGraph:
        """Return the graph of one step."""
        return PolicyGraph(_OneStep(network, self.spec), self.spec)

    def forward_batch(
        self, network: Any, batch: Batch, mask: torch.Tensor, *, with_parameters: bool
    ) -> ForwardResult:
        """Go over all observations and what followed each sequence's last one."""
        # The first step past a sequence's end shows what followed its last one.
        known = _up_to_last(mask)
        reached = torch.cat([known[:, :1], known], dim=1)
        observed = _fill_unknown(_append_last(batch.observations, batch.next_observations), reached)
        parameters, values = network(observed, self._states(batch))
        steps = take_rows(_drop_successors(batch, mask), mask)
        shape = reached.shape
        of_steps = tuple(p.view(*shape, -1)[:, :-1][mask] for p in parameters)
        return ForwardResult(steps, values.view(shape), of_steps if with_parameters else None)

    def rows(
        self, batch: Batch, steps: Batch, mask: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Batch:
        """Return the sequences that have a step to learn from."""
        states = tensor((batch.columns or {})[POLICY_STATE])
        sequences = replace(
            _drop_successors(batch, mask),
            observations=_fill_unknown(batch.observations, _up_to_last(mask)),
            mask=mask,
            columns={**columns, POLICY_STATE: states},
        )
        return take_rows(sequences, mask.any(dim=1).nonzero()[:, 0])

    def outputs(self, network: Any, batch: Batch) -> tuple[Batch, Outputs]:
        """Go over the sequences; return their steps."""
        mask = tensor(batch.mask)
        parameters, values = network(batch.observations, self._states(batch))
        flat = mask.flatten()
        steps = take_rows(replace(batch, mask=None), mask)
        return steps, Outputs(tuple(p[flat] for p in parameters), values[flat])

    def _states(self, batch: Batch) -> torch.Tensor:
        """Return the states [B, S] before the first steps. Raises: ConfigInvalidError."""
        if batch.columns is None or POLICY_STATE not in batch.columns:
            raise ConfigInvalidError(
                f"recurrent: found no column {POLICY_STATE!r} in the batch, expected the policy's "
                "state before each step. Make the view with "
                f"columns=[{POLICY_STATE!r}], of steps that a recurrent policy took."
            )
        # A policy that stacks frames keeps those behind its core's state.
        return tensor(batch.columns[POLICY_STATE])[:, 0, : self.spec.state_size]

    def _make_actor_critic(self, device: str) -> RecurrentActorCritic:
        head = self._head
        with torch.device(device):
            return RecurrentActorCritic(
                head.spec.observation_space,
                head.num_outputs,
                head.num_stds,
                self._hidden_sizes,
                self._facts,
                self._core,
            )


class _OneStep(PolicyModule):
    """Takes the state after the observations, and gives the next one last."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        network: Any = self.network
        outputs: tuple[torch.Tensor, ...] = network.step(self.nest(inputs[:-1]), inputs[-1])
        return outputs


def _drop_successors(batch: Batch, mask: torch.Tensor) -> Batch:
    """Return a batch [B, T] whose fields all are so; what followed is left out: it is estimated."""
    weights = tensor(batch.weights)
    if weights.dim() == 1:
        weights = weights[:, None].expand(mask.shape)
    return replace(
        batch,
        weights=weights,
        indices=None,
        mask=None,
        bootstrappable=None,
        next_observations={},
        next_action_masks=None,
        columns=None,
    )


def _up_to_last(mask: torch.Tensor) -> torch.Tensor:
    """Return what is true up to the last true of each row of a mask [B, T]."""
    return mask.flip(1).cumsum(dim=1).flip(1) > 0


def _fill_unknown(observations: Any, known: torch.Tensor) -> Any:
    """Put the first observation where none is known: not all spaces have the zeros of padding."""

    def fill(values: torch.Tensor) -> torch.Tensor:
        some = known.view(*known.shape, *(1,) * (values.dim() - 2))
        return torch.where(some, values, values[:, :1])

    return map_leaves(observations, fill)


def _append_last(observations: Any, following: Any) -> Any:
    """Return [B, T + 1, *obs]: all observations, and what followed the last one."""
    if isinstance(observations, Mapping):
        return {key: _append_last(value, following[key]) for key, value in observations.items()}
    return torch.cat([observations, following[:, -1:]], dim=1)
