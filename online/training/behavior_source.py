"""Behavior: who acts for the workers as a learner learns: its policy, exploring, in turn newer."""

from __future__ import annotations

from typing import Protocol

from replaylake.offline.evaluation.self_play import AgentPolicies
from replaylake.offline.learning.graph_writer import GraphWriter
from replaylake.offline.learning.learner import Learner
from replaylake.offline.networks.graph import TorchPolicy
from replaylake.online.collecting.behavior_policy import (
    BehaviorPolicies,
    BehaviorPolicy,
    GraphBytes,
)
from replaylake.online.training.exploration_schedule import ExplorationSchedule


class BehaviorSource(Protocol):
    """What a trainer broadcasts, and what it judges."""

    @property
    def policies(self) -> AgentPolicies:
        """As they are now, and as they will be: they follow the learner."""
        ...

    @property
    def random_steps(self) -> int:
        """Uniform actions until so many steps were collected."""
        ...

    def make_behavior_policy(self, version: int, num_steps: int) -> BehaviorPolicies:
        """Return who acts as `version`, once `num_steps` steps were collected."""
        ...


class SingleBehaviorSource:
    """A learner's policy, for an environment's one agent or for all of its agents."""

    def __init__(
        self,
        learner: Learner,
        exploring: ExplorationSchedule,
        *,
        name: str,
        device: str,
        is_sent: bool,
    ) -> None:
        """name: whom steps are said to be acted by. is_sent: to other processes, as ONNX."""
        graph = learner.policy()
        self._policy = TorchPolicy(graph, device)
        self._writer = GraphWriter(graph) if is_sent else None
        self._exploring = exploring
        self._name = name

    @property
    def policies(self) -> TorchPolicy:
        return self._policy

    @property
    def random_steps(self) -> int:
        return self._exploring.random_steps

    def make_behavior_policy(self, version: int, num_steps: int) -> BehaviorPolicy:
        """Return the policy with what it has learned by now."""
        source: GraphBytes | TorchPolicy = self._policy
        if self._writer is not None:
            source = GraphBytes(self._writer.onnx(), self._policy.spec)
        return self._exploring.make_behavior_policy(self._name, version, source, num_steps)
