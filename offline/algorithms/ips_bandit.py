"""IPS bandit: the policy with the greatest importance-weighted reward in a log of decisions.

Swaminathan & Joachims 2015, "Batch Learning from Logged Bandit Feedback through Counterfactual Risk
Minimization", its clipped estimator (without the penalty on variance), and "The
Self-Normalized Estimator for Counterfactual Learning". Nothing that follows an action counts.

A log with few rewards above the usual is soon learned by heart: judge the policy on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.discrete_actions import (
    action_indices,
    discrete,
    log_softmax,
)
from replaylake.offline.algorithms.network_options import check_network
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.adam import adam_with_decay
from replaylake.offline.learning.algorithm import (
    Algorithm,
    Losses,
    Networks,
    tensor,
)
from replaylake.offline.learning.options import expect, to_options
from replaylake.offline.losses.bandit import (
    importance_weights,
    ips_value,
    self_normalized_value,
)
from replaylake.offline.losses.q_learning import gather_values
from replaylake.offline.networks.actors import NO_STATISTICS, CategoricalNetwork


@dataclass(frozen=True)
class IPSBanditConfig:
    """Options of `ips_bandit`."""

    hidden_sizes: Sequence[int] = (256, 256)
    learning_rate: float = 1e-3
    # Values each batch by sum(w r) / sum(w) in place of mean(w r): biased by one part in the batch
    # size, and deaf to a constant added to all rewards. Without it a policy gains by repeating the
    # log where rewards are above 0, and by avoiding it where they are below.
    self_normalized: bool = True
    # Greatest pi / mu; a row beyond it no longer moves the policy.
    max_weight: float = 100.0
    # Decoupled, of all weights: what keeps a policy from learning single rows by heart.
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_network("ips_bandit", self)
        expect(self.max_weight > 0, "ips_bandit: max_weight", self.max_weight, "more than 0")
        expect(self.weight_decay >= 0, "ips_bandit: weight_decay", self.weight_decay, "0 or more")


def ips_bandit(
    observation_space: Space,
    action_space: Space,
    config: IPSBanditConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return importance-weighted policy learning for one-step logs with known propensities.

    Discrete actions, honoring action masks. Raises: SpaceUnsupportedError for others.
    """
    space = discrete("ips_bandit", action_space)
    value = self_normalized_value if config.self_normalized else ips_value

    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        log_pi = log_softmax(networks["policy"](batch.observations), batch.action_masks)
        log_pi_taken = gather_values(log_pi, action_indices(batch, space))
        log_mu = tensor(batch.behavior_log_probs)
        # w = pi(a|x) / mu(a|x), times the sampler's own
        weights = importance_weights(log_pi_taken, log_mu, config.max_weight)
        weights = weights * tensor(batch.weights)
        # -V(pi): mean(w r), or sum(w r) / sum(w)
        loss = -value(tensor(batch.rewards), weights)
        constant = log_pi.detach()
        entropy = -(constant.exp() * constant).sum(dim=-1).mean()
        return Losses({"policy": loss}, metrics={"weight_mean": weights.mean(), "entropy": entropy})

    def networks() -> Networks:
        network = CategoricalNetwork(observation_space, space.n, config.hidden_sizes, facts)
        return Networks({"policy": network})

    return Algorithm(
        spec=PolicySpec(observation_space, space, "categorical"),
        losses=losses,
        networks=networks,
        optimizer=adam_with_decay(config.learning_rate, config.weight_decay),
        needs_bootstrap=False,
        needs_propensities=True,
        config=to_options(config),
    )
