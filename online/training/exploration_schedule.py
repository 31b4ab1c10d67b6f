"""Exploring: how a learner's policy acts while it collects, step by step of the run."""

from __future__ import annotations

from dataclasses import dataclass

from replaylake.datastore.episodes.spaces import Box
from replaylake.datastore.lake.policies.policy import Policy, PolicySpec
from replaylake.online.collecting.behavior_policy import BehaviorPolicy, GraphBytes
from replaylake.online.training.config import OnlineConfig


@dataclass(frozen=True)
class ExplorationSchedule:
    """What a config says of exploring, for the head of a policy.

    random_steps: uniform actions until so many steps were collected.
    """

    config: OnlineConfig
    spec: PolicySpec
    random_steps: int

    def make_behavior_policy(
        self, name: str, version: int, source: GraphBytes | Policy, num_steps: int
    ) -> BehaviorPolicy:
        """Return who acts once `num_steps` steps were collected."""
        if num_steps < self.random_steps:
            return BehaviorPolicy()
        config, head = self.config, self.spec.head
        if head == "q_values":
            return BehaviorPolicy(
                name, version, source, temperature=0.0, epsilon=self._epsilon(num_steps)
            )
        if head in ("deterministic", "sampled"):
            return BehaviorPolicy(name, version, source, noise=config.action_noise)
        return BehaviorPolicy(name, version, source, temperature=config.temperature)

    def _epsilon(self, num_steps: int) -> float:
        """Fall linearly from the first to the second (Mnih et al. 2015)."""
        config = self.config
        over = config.explore_steps or max(1, config.steps // 10)
        share = min(1.0, num_steps / over)
        return config.epsilon_start + share * (config.epsilon_end - config.epsilon_start)


def make_exploration_schedule(
    config: OnlineConfig, spec: PolicySpec, *, takes_once: bool
) -> ExplorationSchedule:
    """Return how a run explores; samples_once: whether its algorithm corrects for who acted."""
    steps = config.random_steps
    if steps is None:
        is_box = isinstance(spec.action_space, Box)
        steps = config.min_size if is_box and not takes_once else 0
    return ExplorationSchedule(config, spec, steps)
