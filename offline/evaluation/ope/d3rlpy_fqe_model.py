"""FQEModel: d3rlpy's FQE, and what turns our observations, actions and values into its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    Values,
    describe,
    num_values,
    take,
)
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.offline.d3rlpy.algorithms import D3rlpyAlgorithm
from replaylake.offline.d3rlpy.features import observation_features
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.d3rlpy.optimizations import apply_optimizations
from replaylake.offline.d3rlpy.random_state import IsolatedRandomState
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy
from replaylake.offline.evaluation.ope.transition_arrays import TransitionArrays
from replaylake.offline.evaluation.ope.value_network import map_chunks
from replaylake.offline.learning.action_scaling import ActionScaling, action_scaling

# No line of the table: it learns what a policy is worth, and none to act with.
_ROW: Final = D3rlpyAlgorithm(
    "fqe", "continuous", "FQEConfig", "", "", "off-policy", "Le et al. 2019"
)


class _PolicyAdapter:
    """Stands where d3rlpy's FQE expects an algorithm: says what the policy does next."""

    def __init__(self) -> None:
        self.impl = self
        self.next_actions: torch.Tensor | None = None

    def predict_best_action(self, observations: torch.Tensor) -> torch.Tensor | None:
        """Return the actions for the next observations of the batch that is being learned from."""
        return self.next_actions


class FQEModel:
    """d3rlpy's FQE, and what turns our observations, actions and values into its own and back."""

    def __init__(
        self,
        arrays: TransitionArrays,
        config: FQEConfig,
        discount: float,
        seed: int,
        device: torch.device,
        facts: DatasetStatistics,
    ) -> None:
        space = self._action_space = arrays.spec.action_space
        self._scaling: ActionScaling | None = None
        if isinstance(space, Box):
            logged = np.asarray(arrays.actions)
            self._scaling = action_scaling(space, (logged.min(axis=0), logged.max(axis=0)))
            size = len(self._scaling.center)
        elif isinstance(space, Discrete):
            size = space.n
        else:
            raise SpaceUnsupportedError(
                f"d3rlpy's FQE: found action space {describe(space)}, expected Discrete or a float "
                "Box."
            )
        self._device, self._samples = device, config.action_samples
        features, shape = observation_features(_ROW, arrays.spec.observation_space, facts)
        self._features = features.to(device)
        spread = float(arrays.returns.std())
        self._scale = spread if spread > 0 else 1.0
        self._answers = _PolicyAdapter()
        self._randomness = IsolatedRandomState(seed, device)
        self._name = f"{device.type}:{device.index or 0}"
        with self._randomness.activate():
            self._impl = self._create_fqe(config, discount, shape, size)
        apply_optimizations(self._impl)
        self._num_updates = 0

    def update(
        self,
        arrays: TransitionArrays,
        rows: NDArray[np.int64],
        chosen: torch.Tensor,
        rng: np.random.Generator,
    ) -> float:
        """Take one gradient step on some rows; returns the loss."""
        self._answers.next_actions = self._draw_actions(chosen[rows], rng)
        rewards = self._tensor(arrays.rewards[rows])[:, None] / self._scale
        terminals = self._tensor(arrays.discounts[rows] == 0)[:, None].float()
        actions = self._encode_actions(take(arrays.actions, rows))
        batch = load_d3rlpy().TorchMiniBatch(
            observations=self._encode_observations(take(arrays.observations, rows)),
            actions=actions,
            rewards=rewards,
            next_observations=self._encode_observations(take(arrays.next_observations, rows)),
            next_actions=torch.zeros_like(actions),
            returns_to_go=torch.zeros_like(rewards),
            terminals=terminals,
            intervals=torch.ones_like(rewards),
            device=self._name,
        )
        with self._randomness.activate():
            metrics = self._impl.update(batch, self._num_updates)
        self._num_updates += 1
        return float(metrics["loss"])

    def query_policy(
        self,
        target: TargetPolicy,
        observations: Values,
        masks: NDArray[np.bool_] | None,
        rng: np.random.Generator,
    ) -> torch.Tensor:
        """Ask what the policy does: probabilities [N, A], or draws of encoded actions [N, K, D]."""
        if target.is_discrete and not target.is_deterministic:
            return self._tensor(target.action_probs(observations, masks))
        num = 1 if target.is_deterministic else self._samples
        drawn = [self._encode_actions(target.actions(observations, rng, masks)) for _ in range(num)]
        return torch.stack(drawn, dim=1)

    def q(self, observations: Values, actions: Values) -> NDArray[np.float64]:
        """Return the values float64 [N] of actions."""

        def ask(some: slice) -> Array:
            features = self._encode_observations(take(observations, some))
            return self._predict_values(features, self._encode_actions(take(actions, some)))

        return map_chunks(num_values(observations), ask)

    def values(
        self,
        target: TargetPolicy,
        observations: Values,
        masks: NDArray[np.bool_] | None,
        rng: np.random.Generator,
    ) -> NDArray[np.float64]:
        """Return the values float64 [N] of observations under the policy."""

        def ask(some: slice) -> Array:
            part = take(observations, some)
            chosen = self.query_policy(target, part, None if masks is None else masks[some], rng)
            features = self._encode_observations(part)
            if chosen.dim() == 3:
                drawn = [self._predict_values(features, one) for one in chosen.unbind(1)]
                mean: Array = np.mean(drawn, axis=0)
                return mean
            every = [
                self._predict_values(features, torch.full((len(features), 1), float(action)))
                for action in range(chosen.shape[1])
            ]
            expected: Array = (chosen.cpu().numpy() * np.stack(every, axis=1)).sum(axis=1)
            return expected

        return map_chunks(num_values(observations), ask)

    def _create_fqe(
        self, config: FQEConfig, discount: float, shape: tuple[int, ...], size: int
    ) -> Any:
        d3rlpy = load_d3rlpy()
        discrete = isinstance(self._action_space, Discrete)
        fqe_class = d3rlpy.ope.DiscreteFQE if discrete else d3rlpy.ope.FQE
        options: dict[str, Any] = {}
        if len(shape) == 1:
            sizes = list(config.hidden_sizes)
            options["encoder_factory"] = d3rlpy.models.VectorEncoderFactory(hidden_units=sizes)
        made = d3rlpy.ope.FQEConfig(
            learning_rate=config.learning_rate,
            gamma=discount,
            target_update_interval=max(1, round(1 / config.target_tau)),
            **options,
        )
        fqe = fqe_class(algo=self._answers, config=made, device=self._name)
        fqe.create_impl(shape, size)
        return fqe.impl

    def _draw_actions(self, chosen: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Return one action [B, D] for each row of what the policy does."""
        if chosen.dim() == 3:
            return chosen[:, int(rng.integers(chosen.shape[1]))]
        uniforms = self._tensor(rng.random((len(chosen), 1)))
        cumulative = chosen.cumsum(dim=1)
        # Scaled by the total, because float sums end at 1 - 1e-7 and argmax of all-False is 0.
        choices = (cumulative > uniforms * cumulative[:, -1:]).float().argmax(dim=1)
        return choices[:, None].float()

    def _predict_values(self, features: torch.Tensor, actions: torch.Tensor) -> Array:
        actions = actions.to(self._device)
        if self._scaling is None:
            actions = actions.long()
        with torch.no_grad():
            values = self._impl.predict_value(features, actions)
        scaled: Array = self._scale * values.cpu().numpy().astype(np.float64)
        return scaled

    def _encode_actions(self, actions: Values) -> torch.Tensor:
        """Return actions [N, *act] as d3rlpy has them, [N, D], or [N, 1] from 0."""
        given = torch.from_numpy(np.ascontiguousarray(np.asarray(actions))).to(self._device)
        if isinstance(self._action_space, Discrete):
            return (given - self._action_space.start)[:, None].float()
        assert self._scaling is not None, "only a Discrete space has no scaling"
        return self._scaling.normalize(given)

    def _encode_observations(self, observations: Values) -> torch.Tensor:
        with torch.no_grad():
            features: torch.Tensor = self._features(self._tensors(observations))
        return features

    def _tensors(self, values: Values) -> Any:
        if isinstance(values, Mapping):
            return {key: self._tensors(sub) for key, sub in values.items()}
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(np.asarray(array)).float().to(self._device)
