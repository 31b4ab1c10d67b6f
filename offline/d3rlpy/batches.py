"""Batches: ours as d3rlpy's, and the refusal of what those cannot hold.

d3rlpy takes no action masks, no importance weights, and one discount for all steps. A batch that
would need them is refused, never learned from as if they were not there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Discrete, Space
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.offline.d3rlpy.algorithms import D3rlpyAlgorithm
from replaylake.offline.d3rlpy.features import Features
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.d3rlpy.options import algorithm_label
from replaylake.offline.dataset_statistics import RewardScaling
from replaylake.offline.learning.action_scaling import ActionScaling


class D3rlpyBatches:
    """Makes a TorchMiniBatch of features, actions in -1..1 or from 0, and scaled rewards.

    A step is terminal where its discount is 0: our batches keep the last step of a truncated
    episode, which d3rlpy's own sampler drops.
    """

    def __init__(
        self,
        algorithm: D3rlpyAlgorithm,
        features: Features,
        action_space: Space,
        scaling: ActionScaling | None,
        rewards: RewardScaling,
        *,
        discount: float,
        device: torch.device,
        is_compiled: bool,
    ) -> None:
        """Take how things are scaled.

        is_compiled: give every batch memory of its own, since a captured graph keeps its first one
        and writes later ones into it, which may not be a sampler's.

        Raises: ConfigInvalidError where rewards are shifted and the algorithm learns from returns.
        """
        self._what = algorithm_label(algorithm)
        self._algorithm = algorithm
        self._features = features
        self._start = action_space.start if isinstance(action_space, Discrete) else None
        self._scaling = scaling
        self._rewards = rewards
        self._discount = float(np.float32(discount))
        self._device = device
        # d3rlpy wants an index with every device, the CPU too.
        self.device_name = f"{device.type}:{device.index or 0}"
        self._is_compiled = is_compiled
        self._batch_class = load_d3rlpy().TorchMiniBatch
        if algorithm.needs == "returns" and rewards.shift:
            raise ConfigInvalidError(
                f"{self._what}: found rewards shifted by {rewards.shift:g}, expected only scaled "
                "rewards, because the shift of a return depends on the number of remaining "
                "steps. Leave the "
                "shift out."
            )

    def convert(self, batch: Batch) -> Any:
        """Return d3rlpy's batch of ours, of arrays or of tensors on the device.

        Raises: SpaceUnsupportedError for action masks that are not all true; ConfigInvalidError for
        weights other than 1, where the algorithm bootstraps for discounts other than 0 and gamma
        and for steps without a successor, and for a batch that lacks what its item asks for.
        """
        is_tensors = isinstance(batch.rewards, torch.Tensor)
        tensors: Batch = batch if is_tensors else to_torch(batch, self._device)
        self._refuse_unsupported(tensors)
        with torch.no_grad():
            actions = self.actions(tensors.actions)
            rewards = self._scale_rewards(tensors.rewards, self._rewards.shift)
            next_actions, returns = torch.zeros_like(actions), torch.zeros_like(rewards)
            if self._algorithm.needs == "next_actions":
                next_actions = self.actions(
                    self._require_field(tensors.next_actions, "next_actions")
                )
            if self._algorithm.needs == "returns":
                returns = self._scale_rewards(self._require_field(tensors.returns, "returns"), 0.0)
            values = {
                "observations": self._features(tensors.observations),
                "actions": actions,
                "rewards": rewards,
                "next_observations": self._features(tensors.next_observations),
                "next_actions": next_actions,
                "returns_to_go": returns,
                "terminals": (tensors.discounts == 0)[:, None].float(),
                "intervals": torch.ones_like(rewards),
            }
            if self._is_compiled:
                values = {name: value.clone() for name, value in values.items()}
        return self._batch_class(**values, device=self.device_name)

    def actions(self, actions: Any) -> torch.Tensor:
        """Return actions [B, *act] of the dataset as d3rlpy has them, [B, D], or [B, 1] from 0."""
        if self._start is not None:
            numbers: torch.Tensor = (actions - self._start)[:, None].float()
            return numbers
        assert self._scaling is not None, "only a Discrete space has no scaling"
        return self._scaling.normalize(actions)

    def _scale_rewards(self, rewards: torch.Tensor, shift: float) -> torch.Tensor:
        column = rewards[:, None]
        if (shift, self._rewards.scale) == (0.0, 1.0):
            return column
        return (column - shift) / self._rewards.scale

    def _require_field(self, value: Any, name: str) -> torch.Tensor:
        if value is None:
            raise ConfigInvalidError(
                f"{self._what}: found a batch without {name}, expected one with them. Sample with "
                "the learner's item."
            )
        tensor: torch.Tensor = value
        return tensor

    def _refuse_unsupported(self, batch: Batch) -> None:
        for masks in (batch.action_masks, batch.next_action_masks):
            if masks is not None and not masks.all():
                raise SpaceUnsupportedError(
                    f"{self._what}: found action masks that are not all true, expected none: "
                    "d3rlpy has no masks. Use an algorithm that applies them, such as bc."
                )
        if not (batch.weights == 1).all():
            raise ConfigInvalidError(
                f"{self._what}: found importance weights of {batch.weights.min():g} to "
                f"{batch.weights.max():g}, expected 1: d3rlpy has none. Sample uniformly."
            )
        if not self._algorithm.bootstraps:
            return
        if batch.bootstrappable is not None and not batch.bootstrappable.all():
            raise ConfigInvalidError(
                f"{self._what}: found steps without a next observation, expected none: d3rlpy "
                "would bootstrap from their own observation. Sample with only_bootstrappable."
            )
        discounts = batch.discounts
        fits = (discounts == 0) | (discounts == self._discount)
        if not fits.all():
            raise ConfigInvalidError(
                f"{self._what}: found a discount of {discounts[~fits][0]:g} in a batch, expected 0 "
                f"(terminated) or {self._discount:g}, the discount that was passed to d3rlpy. "
                "Sample with "
                "the learner's discount and single steps."
            )
