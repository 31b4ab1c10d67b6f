"""Acting: who acts in a rollout, and how it explores; sent to workers as it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.policies.package import graph_policy, load_policy
from replaylake.datastore.lake.policies.policy import Policy, PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.offline.environments.spaces import from_gymnasium
from replaylake.offline.learning.options import expect

RANDOM: Final = "random"


@dataclass(frozen=True)
class GraphBytes:
    """A policy graph as ONNX: what a learner broadcasts, for processes without torch."""

    onnx: bytes
    spec: PolicySpec


@dataclass(frozen=True)
class BehaviorPolicy:
    """Who acts: a name and version, what it acts with, and how it explores.

    source: a registered policy's package, a learner's graph, a policy of this process (which cannot
    be sent to another), or None for uniform actions. temperature: of a stochastic head; 0 takes the
    mode. epsilon: probability of a uniform action instead (Discrete). noise: standard deviation of
    Gaussian noise on a Box's actions, in halves of its range, clipped to its bounds (Lillicrap et
    al. 2016; Fujimoto et al. 2018, section 6.1); such an action has no density.
    manifest_sha256: what a registered policy's package is checked against wherever it is loaded.
    """

    name: str = RANDOM
    version: int = 0
    source: Path | GraphBytes | Policy | None = None
    temperature: float = 1.0
    epsilon: float = 0.0
    noise: float = 0.0
    manifest_sha256: str | None = None

    def __post_init__(self) -> None:
        expect(self.temperature >= 0, "acting: temperature", self.temperature, "0 or more")
        expect(0 <= self.epsilon <= 1, "acting: epsilon", self.epsilon, "0 to 1")
        expect(self.noise >= 0, "acting: noise", self.noise, "0 or more")

    def load(self, env: Any) -> Policy:
        """Return the policy, ready to act in `env`.

        Raises: PackageInvalidError, SpaceUnsupportedError.
        """
        if isinstance(self.source, GraphBytes):
            return graph_policy(self.source.onnx, self.source.spec)
        if isinstance(self.source, Path):
            return load_policy(self.source, self.manifest_sha256)
        if self.source is not None:
            return self.source
        return UniformPolicy(
            from_gymnasium(env.observation_space), from_gymnasium(env.action_space)
        )


# One for all agents, or one for each by its name.
BehaviorPolicies = BehaviorPolicy | Mapping[str, BehaviorPolicy]


def require_single(policy: BehaviorPolicies) -> BehaviorPolicy:
    """Return who acts in an environment of one agent. Raises: ConfigInvalidError for a mapping."""
    if isinstance(policy, BehaviorPolicy):
        return policy
    raise ConfigInvalidError(
        f"rollout: found policies for {', '.join(policy)}, expected one policy, because "
        "the environment has one agent."
    )


def num_bytes_sent(policy: BehaviorPolicies) -> int:
    """Return the bytes of the graphs that go to other processes; 0 where nothing is sent."""
    each = [policy] if isinstance(policy, BehaviorPolicy) else policy.values()
    return sum(len(one.source.onnx) for one in each if isinstance(one.source, GraphBytes))
