"""GraphPolicy: a Policy made of a graph, whoever runs that, and of the head that its spec names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Dict,
    Space,
    Tuple,
    Values,
    as_values,
    children,
    num_values,
)
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.datastore.lake.policies.heads import act_from_head, or_default_rng
from replaylake.datastore.lake.policies.log_probs import (
    check_has_density,
    head_action_probs,
    head_log_probs,
)
from replaylake.datastore.lake.policies.policy import (
    HEAD_OUTPUTS,
    NEXT_STATE,
    STATE,
    Act,
    PolicySpec,
)


class GraphPolicy:
    """Acts with a graph; what it remembers, if anything, the caller keeps from call to call.

    run: maps the graph's inputs by name, as `graph_inputs` makes them, to its outputs by the names
    that `graph_output_names` lists.
    """

    def __init__(
        self, spec: PolicySpec, run: Callable[[dict[str, Array]], dict[str, Array]]
    ) -> None:
        self._spec = spec
        self._run = run

    @property
    def spec(self) -> PolicySpec:
        return self._spec

    def initial_state(self, n: int) -> Array | None:
        """Return zeros float32 [n, S] for n fresh episodes; None if it is stateless."""
        size = self._spec.state_size
        return np.zeros((n, size), np.float32) if size else None

    def act(
        self,
        observations: Values,
        state: Array | None = None,
        *,
        rng: np.random.Generator | None = None,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Act:
        outputs = self._run(graph_inputs(self._spec, observations, rng, state))
        act = act_from_head(
            self._spec,
            outputs,
            rng,
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=action_mask,
        )
        return replace(act, state=outputs[NEXT_STATE]) if self._spec.state_size else act

    def action_probs(
        self,
        observations: Values,
        state: Array | None = None,
        *,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Array:
        """Return the probability of each action; see Policy.action_probs."""
        return head_action_probs(
            self._spec,
            self._run(graph_inputs(self._spec, observations, state=state)),
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=action_mask,
        )

    def log_probs(
        self,
        observations: Values,
        actions: Values,
        state: Array | None = None,
        *,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Array:
        """Return log-probabilities of given actions; see Policy.log_probs."""
        # Before the graph is run, whose noise nobody has drawn.
        check_has_density(self._spec, deterministic=deterministic, temperature=temperature)
        return head_log_probs(
            self._spec,
            self._run(graph_inputs(self._spec, observations, state=state)),
            actions,
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=action_mask,
        )

    def observe(self, state: Array | None, rewards: Array) -> Array | None:
        """Return the state unchanged."""
        return state


def graph_input_names(spec: PolicySpec) -> tuple[str, ...]:
    """Return the graph's inputs: `observations`, or one `observations.<leaf>` a leaf, and so on.

    After them `state`, then `noise`, where the spec has them.
    """
    names = tuple(_leaf_values(spec.observation_space, None, "observations"))
    names += (STATE,) if spec.state_size else ()
    return (*names, "noise") if spec.noise_size else names


def graph_output_names(spec: PolicySpec) -> tuple[str, ...]:
    """Return the graph's outputs: the head's, then `next_state` where there is a state."""
    names = HEAD_OUTPUTS[spec.head]
    return (*names, NEXT_STATE) if spec.state_size else names


def graph_inputs(
    spec: PolicySpec,
    observations: Values,
    rng: np.random.Generator | None = None,
    state: Array | None = None,
) -> dict[str, Array]:
    """Check observations [N, *obs] and state [N, S]; returns the graph's inputs by name, in order.

    Floats become float32, as replay decodes them for learning; other dtypes stay. Raises:
    EpisodeInvalidError if a shape or dtype differs or a number is not finite: nothing is reshaped.
    """
    checked = as_values(spec.observation_space, observations, "observation")
    inputs = {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array
        for name, array in _leaf_values(spec.observation_space, checked, "observations").items()
    }
    if spec.state_size:
        inputs[STATE] = _check_state(spec, state, num_values(checked))
    if spec.noise_size:
        noise = or_default_rng(rng).standard_normal((num_values(checked), spec.noise_size))
        inputs["noise"] = noise.astype(np.float32)
    return inputs


def _check_state(spec: PolicySpec, state: Array | None, num: int) -> Array:
    found = "none" if state is None else f"{state.dtype} {list(state.shape)}"
    if state is None or state.shape != (num, spec.state_size) or state.dtype != np.float32:
        raise EpisodeInvalidError(
            f"act: found state {found}, expected float32 [{num}, {spec.state_size}]: the policy "
            "remembers. Pass what the last call returned, and initial_state where an episode "
            "begins."
        )
    return state


def _leaf_values(space: Space, values: Any, name: str) -> dict[str, Any]:
    """Return a Dict's or Tuple's leaves by dotted name, depth first; values may be None."""
    if not isinstance(space, Dict | Tuple):
        return {name: values}
    leaves: dict[str, Any] = {}
    for key, sub in children(space).items():
        leaves |= _leaf_values(sub, None if values is None else values[key], f"{name}.{key}")
    return leaves
