"""Self-play: games that one policy plays for all agents, or one for each, for returns alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from replaylake.datastore.episodes.spaces import Array, Discrete, as_batch, concatenate
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.lake.policies.streams import EpisodeStreams
from replaylake.offline.environments.games import Game, Outcome

# One for all agents, or one for each by its name.
AgentPolicies = Policy | Mapping[str, Policy]


@dataclass
class _Player:
    """An agent in a game; state [1, S] is what the policy remembers for it."""

    agent: str
    policy: Policy
    rng: np.random.Generator
    state: Array | None
    observation: Any
    mask: Array | None
    has_acted: bool = False
    total: float = 0.0


@dataclass
class GameState:
    """A game: how often it was stepped, and who is or was in it."""

    game: Game
    episode: int
    num_ticks: int = 0
    players: dict[str, _Player] = field(default_factory=dict)
    to_act: list[_Player] = field(default_factory=list)

    @property
    def returns(self) -> dict[str, float]:
        """Undiscounted, by agent."""
        return {agent: player.total for agent, player in self.players.items()}


class SelfPlay:
    """Games that are stepped side by side; game i resets with seed + i, whichever it is played in.

    Each agent draws from a stream of its own.
    """

    def __init__(self, policies: Mapping[str, Policy], seed: int, *, deterministic: bool) -> None:
        """policies: who plays for each agent; a policy is asked once for all for whom it plays."""
        self._policies = policies
        self._seed = seed
        self._deterministic = deterministic
        a_policy = next(iter(policies.values()))
        self._is_discrete = isinstance(a_policy.spec.action_space, Discrete)

    def play_games(
        self,
        games: Sequence[Game],
        episodes: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> list[GameState]:
        """Play so many; return them in their order. on_progress: called after each one."""
        waiting = iter(range(episodes))
        running = [self._start(game, next(waiting)) for game in games]
        ends: list[GameState] = []
        while running:
            self._step(running)
            for played in [played for played in running if not played.to_act]:
                running.remove(played)
                ends.append(played)
                if on_progress is not None:
                    on_progress(len(ends), episodes)
                if (episode := next(waiting, None)) is not None:
                    running.append(self._start(played.game, episode))
        return sorted(ends, key=lambda played: played.episode)

    def _start(self, game: Game, episode: int) -> GameState:
        played = GameState(game, episode)
        self._apply_outcomes(played, game.reset(seed=self._seed + episode))
        return played

    def _step(self, running: Sequence[GameState]) -> None:
        """Let all act whose turn it is, and step each game."""
        to_act = [player for played in running for player in played.to_act]
        policies = {id(player.policy): player.policy for player in to_act}
        actions: dict[int, Any] = {}
        for policy in policies.values():
            players = [player for player in to_act if player.policy is policy]
            actions |= zip(map(id, players), self._actions(policy, players), strict=True)
        for played in running:
            inputs = {player.agent: actions[id(player)] for player in played.to_act}
            played.to_act = []
            played.num_ticks += 1
            self._apply_outcomes(played, played.game.step(inputs))

    def _actions(self, policy: Policy, players: Sequence[_Player]) -> list[Any]:
        """Act once for all these players."""
        masks = [player.mask for player in players if player.mask is not None]
        states = [player.state for player in players if player.state is not None]
        act = policy.act(
            concatenate([as_batch(player.observation) for player in players]),
            np.concatenate(states) if states else None,
            rng=cast(np.random.Generator, EpisodeStreams([player.rng for player in players])),
            deterministic=self._deterministic,
            action_mask=np.stack(masks) if masks else None,
        )
        for row, player in enumerate(players):
            player.has_acted = True
            if act.state is not None:
                player.state = act.state[row : row + 1]
        return act.actions.tolist() if self._is_discrete else list(act.actions)

    def _apply_outcomes(self, played: GameState, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            player = played.players.get(outcome.agent)
            if player is None:
                index = played.game.agents.index(outcome.agent)
                rng = np.random.default_rng([self._seed, played.episode, index])
                policy = self._policies[outcome.agent]
                player = _Player(outcome.agent, policy, rng, policy.initial_state(1), None, None)
                played.players[outcome.agent] = player
            player.total += outcome.reward
            if player.has_acted and player.state is not None:
                reward = np.array([outcome.reward])
                player.state = player.policy.observe(player.state, reward)
            player.observation, player.mask = outcome.observation, outcome.mask
            if not outcome.has_ended:
                played.to_act.append(player)
