"""Games whose every number follows from the clock: `replaylake_games:Ping`, ...

Observations are [ticks so far, number of the agent, seed].
"""

from types import MappingProxyType

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import AECEnv, ParallelEnv


class _Clocked:
    possible_agents = ("ann", "bob")
    metadata = MappingProxyType({"name": "clocked"})
    render_mode = None

    def observation_space(self, agent):
        return Box(0, np.inf, (3,), np.float32)

    def action_space(self, agent):
        return Discrete(2)

    def seen(self, agent):
        # One array that is written over, as some environments have.
        self._seen[:] = self.tick, self.possible_agents.index(agent), self.seed
        return self._seen if self._reuses else self._seen.copy()

    def begin(self, seed, reuses=False):
        self.tick, self.seed, self._reuses = 0, seed, reuses
        self._seen = np.zeros(3, np.float32)


class Ping(_Clocked, AECEnv):
    """In turns: action a pays whoever acts a, and the other one 10 * a; it ends after 5 ticks.

    masked: the classics' way; the action that is allowed at odd ticks is 1 alone.
    """

    def __init__(self, masked=False, broken_at=None):
        super().__init__()
        self._masked = masked
        self._broken_at = broken_at

    def observation_space(self, agent):
        space = super().observation_space(agent)
        if not self._masked:
            return space
        return Dict({"observation": space, "action_mask": Box(0, 1, (2,), np.int8)})

    def reset(self, seed=None, options=None):
        self.begin(seed, reuses=True)
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = "ann"

    def observe(self, agent):
        if not self._masked:
            return self.seen(agent)
        mask = np.array([self.tick % 2 == 0, True], np.int8)
        return {"observation": self.seen(agent), "action_mask": mask}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        if self.tick == self._broken_at:
            raise ValueError("the net is torn")
        assert type(action) is int
        other = "bob" if agent == "ann" else "ann"
        self._cumulative_rewards[agent] = 0
        self.rewards = {agent: action, other: 10 * action}
        self._accumulate_rewards()
        self.tick += 1
        if self.tick == 5:
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = other


class Race(_Clocked, ParallelEnv):
    """At once: each is paid its action plus its number; bob is out after 2 ticks, ann cut at 4.

    late: cleo, the third, joins after the first tick. silent: nobody is told that it is over.
    revives: bob comes back.
    """

    def __init__(self, late=False, silent=False, revives=False, wide=None):
        self.possible_agents = ["ann", "bob", "cleo"] if late else ["ann", "bob"]
        self._late, self._silent, self._revives, self._wide = late, silent, revives, wide

    def observation_space(self, agent):
        if agent == self._wide:
            return Box(0, np.inf, (4,), np.float32)
        return super().observation_space(agent)

    def reset(self, seed=None, options=None):
        self.begin(seed, reuses=True)
        self.agents = ["ann", "bob"]
        return {agent: self.seen(agent).copy() for agent in self.agents}, {}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.tick += 1
        acted = list(self.agents)
        terminated = {agent: agent == "bob" and self.tick == 2 for agent in acted}
        truncated = {agent: self.tick == 4 and not self._silent for agent in acted}
        self.agents = [a for a in acted if not (terminated[a] or truncated[a])]
        if self.tick == 4:
            self.agents = []
        if self._late and self.tick == 1:
            self.agents.append("cleo")
        if self._revives and self.tick == 3:
            self.agents.append("bob")
        rewards = {a: np.float32(actions[a] + self.possible_agents.index(a)) for a in acted}
        observations = {a: self.seen(a).copy() for a in {*acted, *self.agents}}
        return observations, rewards, terminated, truncated, {a: {} for a in acted}
