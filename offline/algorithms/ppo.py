"""PPO: several passes over what the policy just did, clipped so that it does not go too far.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", algorithm 1. Advantages are those
of Schulman et al. 2016 by the values at the time of the update, over each sequence whole. Ratios
are to the policy that acted, which may be some versions old: what it made less likely since counts
less, and beyond the clip moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from replaylake.datastore.episodes.spaces import Space
from replaylake.offline.algorithms.on_policy import (
    AdvantageEstimates,
    MinibatchTerms,
    SequenceInputs,
    check_on_policy,
    normalize_advantages,
    on_policy_algorithm,
)
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.adam import adam
from replaylake.offline.learning.algorithm import Algorithm
from replaylake.offline.learning.options import expect
from replaylake.offline.losses.policy_gradient import clipped_surrogate, value_loss
from replaylake.offline.losses.returns import generalized_advantages
from replaylake.offline.networks.actors import NO_STATISTICS


@dataclass(frozen=True)
class PPOConfig:
    """Options of `ppo`."""

    hidden_sizes: Sequence[int] = (64, 64)
    learning_rate: float = 1e-3
    # Policy and values by one network up to its last layer. None: where convolutions, or what is
    # remembered, would be computed twice.
    shared: bool | None = None
    # The policy remembers, by a recurrent core behind the features.
    recurrent: bool = False
    core: Literal["gru", "lstm"] = "gru"
    # T: steps of a sequence, by whose end values stand for what follows.
    length: int = 32
    # Sequences that make an update, at most length x num_sequences steps.
    num_sequences: int = 32
    epochs: int = 10
    minibatches: int = 4
    # 0 is the temporal difference of one step, 1 all that follows.
    gae_lambda: float = 0.95
    # How far the ratio of probabilities may go.
    clip: float = 0.2
    # How far a value may go in an update, in units of return; None: anywhere.
    value_clip: float | None = None
    # Of the advantages of an update, to mean 0 and standard deviation 1.
    normalize_advantages: bool = True
    entropy_weight: float = 0.0
    value_weight: float = 0.5
    max_gradient_norm: float = 0.5

    def __post_init__(self) -> None:
        check_on_policy("ppo", self)
        expect(0 <= self.gae_lambda <= 1, "ppo: gae_lambda", self.gae_lambda, "0 to 1")
        expect(self.clip > 0, "ppo: clip", self.clip, "more than 0")
        limit = self.value_clip
        expect(limit is None or limit > 0, "ppo: value_clip", limit, "more than 0")


def ppo(
    observation_space: Space,
    action_space: Space,
    config: PPOConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return PPO for Discrete actions, honoring masks, MultiDiscrete, MultiBinary or a float Box.

    Raises: SpaceUnsupportedError for other actions, and for a Box without bounds.
    """
    return on_policy_algorithm(
        "ppo",
        observation_space,
        action_space,
        config,
        facts,
        rule=_PPO(config),
        optimizer=adam(config.learning_rate, eps=1e-5, max_gradient_norm=config.max_gradient_norm),
    )


@dataclass(frozen=True)
class _PPO:
    config: PPOConfig

    needs_log_rho = False

    def estimate(self, sequences: SequenceInputs) -> AdvantageEstimates:
        """Return generalized advantages, and values with them added."""
        mask = sequences.mask
        # What comes after a sequence's last step is in that step's value: no trace goes on.
        is_inner = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        advantages = generalized_advantages(
            sequences.r_t, sequences.discount_t, sequences.values, is_inner * self.config.gae_lambda
        )
        targets = advantages + sequences.values[:, :-1]
        if self.config.normalize_advantages:
            advantages = normalize_advantages(advantages, mask)
        return AdvantageEstimates(advantages, targets)

    def policy_loss(self, terms: MinibatchTerms) -> torch.Tensor:
        return clipped_surrogate(terms.log_rho_tm1, terms.advantages_tm1, self.config.clip)

    def value_loss(self, terms: MinibatchTerms) -> torch.Tensor:
        """Return the squared error, clipped if so asked."""
        return value_loss(
            terms.v_tm1, terms.targets_tm1, terms.v_before_tm1, self.config.value_clip
        )

    def metrics(self, terms: MinibatchTerms) -> Mapping[str, torch.Tensor]:
        """Return the share of ratios beyond the clip, and how far pi is from mu (nats)."""
        log_rho = terms.log_rho_tm1.detach()
        rho = log_rho.exp()
        return {
            "clipped": ((rho - 1).abs() > self.config.clip).float().mean(),
            # Schulman 2020, "Approximating KL Divergence": unbiased, and never below 0.
            "kl": (rho - 1 - log_rho).mean(),
        }
