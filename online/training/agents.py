"""Agents: a policy of its own for each agent of a game, behind the seams of a trainer for one.

Each agent has a learner, and a supply of the steps that it took itself. They take turns: an update
of the run is one of the next agent that has anything to learn from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, InvalidNameError
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.names import check_policy_name
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.datastore.replay.live.log_reader import FollowTimings, StageTiming
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.ids import make_any
from replaylake.offline.learning.algorithm import OnPolicy
from replaylake.offline.learning.learner import Learner, Update
from replaylake.offline.networks.graph import PolicyGraph
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.training.behavior_source import SingleBehaviorSource
from replaylake.online.training.on_policy_batches import OnPolicyBatches
from replaylake.online.training.replay_batches import ReplayBatches

# Before the agent's name in a metric's.
_AGENT: Final = "agent"


def agents_of(env_id: str, env_args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return who may take part in a game; none where the environment is one of one agent."""
    env = make_any(env_id, env_args)
    env.close()
    return env.agents if isinstance(env, Game) else ()


def policy_names(name: str, agents: Sequence[str]) -> dict[str, str]:
    """Return what each agent's policy is registered as. Raises: InvalidNameError."""
    names = {agent: f"{name}_{agent}" for agent in agents}
    for agent, its_name in names.items():
        try:
            check_policy_name(its_name)
        except InvalidNameError as error:
            raise InvalidNameError(
                f"agents each: found agent {agent!r}, whose policy would be {its_name!r}, expected "
                "[a-z][a-z0-9_-]*, at most 63 characters. Rename the agent in the environment, or "
                "learn one policy for all: `agents` shared."
            ) from error
    return names


def agent_steps_condition(agent: str) -> str:
    """Return the SQL condition over `steps` of those that an agent took."""
    quoted = agent.replace("'", "''")
    return f"agent_id = '{quoted}'"


class AgentViews:
    """The live views of all agents, as one that is followed."""

    def __init__(self, views: Mapping[str, LiveView]) -> None:
        self.by_agent = views

    def close(self) -> None:
        with ExitStack() as stack:
            for view in self.by_agent.values():
                stack.callback(view.close)

    @property
    def version(self) -> int:
        """The newest version of which all agents' steps can be sampled."""
        return min(view.version for view in self.by_agent.values())

    def wait_for(self, version: int | None = None, *, timeout_s: float = 30.0) -> bool:
        """Wait until each has it; timeout_s: for each."""
        views = self.by_agent.values()
        return all(view.wait_for(version=version, timeout_s=timeout_s) for view in views)

    def timings(self) -> FollowTimings:
        """Return what following took since the last call, of all of them together."""
        each = [view.timings() for view in self.by_agent.values()]
        tails, decodes = zip(*each, strict=True)
        return FollowTimings(_sum_timings(tails), _sum_timings(decodes))


class AgentLearners:
    """A Learner made of one for each agent; `turn` is whose batch comes next."""

    def __init__(self, learners: Mapping[str, Learner]) -> None:
        self.by_agent = learners
        self.turn = next(iter(learners))
        self._first = learners[self.turn]

    @property
    def discount(self) -> float:
        return self._first.discount

    @property
    def item(self) -> Transitions | Sequences:
        return self._first.item

    @property
    def on_policy(self) -> OnPolicy | None:
        return self._first.on_policy

    @property
    def config(self) -> Mapping[str, Any]:
        return self._first.config

    @property
    def normalization(self) -> Mapping[str, Any]:
        """The same of all: an online learner knows none of its data beforehand."""
        return self._first.normalization

    def prepare(self, view: ReplayView) -> None:
        for learner in self.by_agent.values():
            learner.prepare(view)

    def update(self, batch: Batch) -> Update:
        """Let the agent whose turn it is learn; its metrics are `agent/<name>/...`."""
        result = self.by_agent[self.turn].update(batch)
        metrics = {f"{_AGENT}/{self.turn}/{name}": v for name, v in result.metrics.items()}
        return Update(metrics, result.priorities)

    def policy(self) -> PolicyGraph:
        """Return the first agent's policy: all have the same spaces and head."""
        return self._first.policy()

    def state_dict(self) -> dict[str, Array]:
        """Return all learners' arrays, each under its agent's name."""
        return {
            f"{agent}/{name}": array
            for agent, learner in self.by_agent.items()
            for name, array in learner.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        for agent, learner in self.by_agent.items():
            own = f"{agent}/"
            learner.load_state_dict(
                {name[len(own) :]: array for name, array in state.items() if name.startswith(own)}
            )


class AgentBatches:
    """A supply made of one for each agent: each batch is the next agent's that has one."""

    def __init__(
        self, supplies: Mapping[str, ReplayBatches | OnPolicyBatches], learners: AgentLearners
    ) -> None:
        self._supplies = supplies
        self._learners = learners
        self._order = deque(supplies)
        first = next(iter(supplies.values()))
        self.samples_once = first.samples_once
        self.num_rows = first.num_rows
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        for supply in self._supplies.values():
            supply.version = version

    @property
    def num_taken(self) -> int:
        """Steps in the last batch."""
        return self._supplies[self._learners.turn].num_taken

    @property
    def is_ready(self) -> bool:
        """Whether any agent has something to learn from."""
        return any(supply.is_ready for supply in self._supplies.values())

    def sample(self) -> Batch | None:
        """Draw for the next agent that has something, whose turn it is then."""
        while not self._supplies[self._order[0]].is_ready:
            self._order.rotate(-1)
        self._learners.turn = self._order[0]
        self._order.rotate(-1)
        return self._supplies[self._learners.turn].sample()

    def update_priorities(self, batch: Batch, result: Update) -> None:
        """Set priorities of the last batch."""
        self._supplies[self._learners.turn].update_priorities(batch, result)

    def take_metrics(self) -> dict[str, float]:
        """Return each one's, by agent; of the staleness, which is the run's, the mean as well."""
        metrics = {agent: supply.take_metrics() for agent, supply in self._supplies.items()}
        values = {f"{_AGENT}/{a}/{name}": v for a, m in metrics.items() for name, v in m.items()}
        staleness = [each["staleness"] for each in metrics.values() if "staleness" in each]
        return values | ({"staleness": float(np.mean(staleness))} if staleness else {})

    def state_dict(self) -> dict[str, Any]:
        """Return each one's position, and who is next."""
        each = {agent: supply.state_dict() for agent, supply in self._supplies.items()}
        return {"agents": each, "order": list(self._order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order = deque(state["order"])
        for agent, supply in self._supplies.items():
            supply.load_state_dict(state["agents"][agent])


class AgentBehaviorSources:
    """Each agent's own policy acts for it."""

    def __init__(self, behaviors: Mapping[str, SingleBehaviorSource]) -> None:
        self._behaviors = behaviors

    @property
    def policies(self) -> Mapping[str, Policy]:
        return {agent: one.policies for agent, one in self._behaviors.items()}

    @property
    def random_steps(self) -> int:
        return max(one.random_steps for one in self._behaviors.values())

    def make_behavior_policy(self, version: int, num_steps: int) -> Mapping[str, BehaviorPolicy]:
        """Return who acts for each; versions rise together."""
        return {
            agent: one.make_behavior_policy(version, num_steps)
            for agent, one in self._behaviors.items()
        }


def _sum_timings(each: Sequence[StageTiming]) -> StageTiming:
    return StageTiming(*(sum(column) for column in zip(*each, strict=True)))


def check_each(agents: Sequence[str], *, env_id: str, has_mix: bool, records: bool) -> None:
    """Refuse what a policy for each agent cannot be learned with. Raises: ConfigInvalidError."""
    if not agents:
        raise ConfigInvalidError(
            f"agents each: found {env_id}, an environment with one agent, expected several. Leave "
            "`agents` out."
        )
    if has_mix:
        raise ConfigInvalidError(
            "agents each: found mix, expected none, because the agents of another dataset cannot "
            "be assigned to these. Leave `mix` out, or learn with `agents` shared."
        )
    if not records:
        raise ConfigInvalidError(
            "agents each: found record off, expected on, because each agent reads its own steps "
            "from the lake. Leave `record` on, or learn with `agents` shared."
        )
