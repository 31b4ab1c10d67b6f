"""Games that are learned in seconds: `replaylake_crowds:Opposites`, `replaylake_crowds:Stakes`."""

from types import MappingProxyType

import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import AECEnv, ParallelEnv


class Opposites(ParallelEnv):
    """At once, 8 ticks: ann is paid 1 for doing what a random signal says, bob for the opposite.

    Observations are [signal, 1 - signal, who] with who 0 for both, unless they are told. What one
    policy gains for one of those who are not told it loses for the other: 8 a game of 16.
    """

    metadata = MappingProxyType({"name": "opposites"})
    render_mode = None

    def __init__(self, is_told=False, names=("ann", "bob")):
        self.possible_agents = list(names)
        self._is_told = is_told

    def observation_space(self, agent):
        return Box(0, 1, (3,), np.float32)

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self._rng = np.random.default_rng(seed)
        self.agents, self._tick = list(self.possible_agents), 0
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions):
        rewards = {
            agent: float(action == (self._signal if number == 0 else 1 - self._signal))
            for number, (agent, action) in enumerate(actions.items())
        }
        self._tick += 1
        ended = dict.fromkeys(self.agents, self._tick == 8)
        going_on = dict.fromkeys(self.agents, False)
        infos = {agent: {} for agent in self.agents}
        observations = self._seen()
        if self._tick == 8:
            self.agents = []
        return observations, rewards, ended, going_on, infos

    def _seen(self):
        self._signal = int(self._rng.integers(2))
        seen = [self._signal, 1 - self._signal]
        return {
            agent: np.array([*seen, number if self._is_told else 0], np.float32)
            for number, agent in enumerate(self.possible_agents)
        }


class Stakes(AECEnv):
    """In turns, 6 of them: who takes 1 gains 1 from the other; 0 is a pass. Sums are always 0."""

    metadata = MappingProxyType({"name": "stakes"})
    render_mode = None

    def __init__(self):
        super().__init__()
        self.possible_agents = ["ann", "bob"]

    def observation_space(self, agent):
        return Box(0, 6, (1,), np.float32)

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self._tick = list(self.possible_agents), 0
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = "ann"

    def observe(self, agent):
        return np.array([self._tick], np.float32)

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        other = "bob" if agent == "ann" else "ann"
        self._cumulative_rewards[agent] = 0
        self.rewards = {agent: action, other: -action}
        self._accumulate_rewards()
        self._tick += 1
        if self._tick == 6:
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = other
