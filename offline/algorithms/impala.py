"""IMPALA: an actor-critic whose value targets and gradients are corrected for who acted.

Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures": V-trace with rho-bar and c-bar of 1, one pass over each batch.
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
from replaylake.offline.learning.adam import OptimizerFunction, adam
from replaylake.offline.learning.algorithm import Algorithm
from replaylake.offline.learning.options import expect
from replaylake.offline.learning.rmsprop import rmsprop
from replaylake.offline.losses.policy_gradient import policy_gradient, value_loss
from replaylake.offline.losses.returns import v_trace
from replaylake.offline.networks.actors import NO_STATISTICS


@dataclass(frozen=True)
class IMPALAConfig:
    """Options of `impala`."""

    hidden_sizes: Sequence[int] = (64, 64)
    # For rewards of about 1; where they are tens, a tenth of it or less (see optimizer).
    learning_rate: float = 6e-3
    # rmsprop, the paper's, with its eps of 0.1, takes small steps where gradients are small: once
    # the policy is good, noise moves it little. adam takes long ones to the end: CartPole reached
    # 475 and then went back to 150 under each of its learning rates (2026-11-22).
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    # Policy and values by one network up to its last layer. None: where convolutions, or what is
    # remembered, would be computed twice.
    shared: bool | None = None
    # The policy remembers, by a recurrent core behind the features.
    recurrent: bool = False
    core: Literal["gru", "lstm"] = "gru"
    # T: steps of a sequence, by whose end values stand for what follows.
    length: int = 32
    # Sequences that make an update, at most length x num_sequences steps.
    num_sequences: int = 8
    # More than one pass, as in PPO, has nothing here that keeps it near who acted.
    epochs: int = 1
    minibatches: int = 1
    # On the traces; the paper has 1.
    lambda_: float = 1.0
    # Greatest importance weight of a TD error and of a policy gradient; traces are cut at 1.
    clip_rho: float = 1.0
    clip_pg_rho: float = 1.0
    # Of the advantages of an update, to mean 0 and standard deviation 1. Then no scale of rewards
    # matters, and noise has that of what is to be learned, too: see optimizer.
    normalize_advantages: bool = False
    entropy_weight: float = 0.01
    value_weight: float = 0.5
    max_gradient_norm: float = 40.0

    def __post_init__(self) -> None:
        check_on_policy("impala", self)
        expect(0 <= self.lambda_ <= 1, "impala: lambda_", self.lambda_, "0 to 1")
        for option in ("clip_rho", "clip_pg_rho"):
            value = getattr(self, option)
            expect(value > 0, f"impala: {option}", value, "more than 0")


def impala(
    observation_space: Space,
    action_space: Space,
    config: IMPALAConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return IMPALA for Discrete actions, with masks, MultiDiscrete, MultiBinary or a float Box.

    Raises: SpaceUnsupportedError for other actions, and for a Box without bounds.
    """
    return on_policy_algorithm(
        "impala",
        observation_space,
        action_space,
        config,
        facts,
        rule=_IMPALA(config),
        optimizer=_optimizer(config),
    )


def _optimizer(config: IMPALAConfig) -> OptimizerFunction:
    norm = config.max_gradient_norm
    if config.optimizer == "rmsprop":
        return rmsprop(config.learning_rate, eps=0.1, max_gradient_norm=norm)
    return adam(config.learning_rate, eps=1e-5, max_gradient_norm=norm)


@dataclass(frozen=True)
class _IMPALA:
    config: IMPALAConfig

    needs_log_rho = True

    def estimate(self, sequences: SequenceInputs) -> AdvantageEstimates:
        """Return V-trace's targets and its advantages, importance weights included."""
        assert sequences.log_rho_tm1 is not None  # as needs_log_rho says
        trace = v_trace(
            sequences.values[:, :-1],
            sequences.values[:, 1:],
            sequences.r_t,
            sequences.discount_t,
            # -inf outside of the mask: such steps weigh nothing, and cut the traces.
            sequences.log_rho_tm1,
            lambda_=self.config.lambda_,
            clip_rho=self.config.clip_rho,
            clip_pg_rho=self.config.clip_pg_rho,
        )
        advantages = trace.advantages
        if self.config.normalize_advantages:
            advantages = normalize_advantages(advantages, sequences.mask)
        return AdvantageEstimates(advantages, trace.targets)

    def policy_loss(self, terms: MinibatchTerms) -> torch.Tensor:
        return policy_gradient(terms.log_probs_tm1, terms.advantages_tm1)

    def value_loss(self, terms: MinibatchTerms) -> torch.Tensor:
        return value_loss(terms.v_tm1, terms.targets_tm1)

    def metrics(self, terms: MinibatchTerms) -> Mapping[str, torch.Tensor]:
        """Return the mean importance weight as it is clipped: 1 where who acted learns."""
        rho = terms.log_rho_tm1.detach().exp()
        return {"rho": rho.clamp(max=self.config.clip_rho).mean()}
