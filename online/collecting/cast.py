"""Cast: who acts for each agent of the games that a worker plays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from replaylake.datastore.episodes.spaces import Array, as_batch, concatenate, take
from replaylake.datastore.errors import ConfigInvalid
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.lake.policies.streams import EpisodeStreams
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.spaces import from_gymnasium
from replaylake.offline.evaluation.evaluate import check_these_spaces
from replaylake.online.collecting.acting import Acting, AgentsActing
from replaylake.online.collecting.actor import Actor
from replaylake.online.collecting.player import Player, stacked_masks


class Cast:
    """An actor for each agent by its name; agents may share one."""

    def __init__(self, env_id: str, game: Game) -> None:
        """game: one of those that are played, for its agents and spaces. Nobody acts yet."""
        self._env_id, self._game = env_id, game
        self._spaces = from_gymnasium(game.observation_space), from_gymnasium(game.action_space)
        self._actors: dict[str, Actor] = {}
        self._streams = EpisodeStreams(())
        self._state_size = 0

    @property
    def action_space(self) -> Any:
        """Of each agent."""
        return self._spaces[1]

    @property
    def policy(self) -> Policy:
        """The policy of the agent that is named first."""
        return self._actors[self._game.agents[0]].policy

    def set_acting(self, acting: AgentsActing) -> None:
        """Act with other policies from now on: one for all, or of a mapping those that it names.

        Raises: ConfigInvalid where an agent has no policy or a policy no agent; SchemaMismatch.
        """
        agents = self._game.agents
        if isinstance(acting, Acting):
            self._actors = dict.fromkeys(agents, self._loaded(acting))
        else:
            self._actors |= {agent: self._loaded(one) for agent, one in acting.items()}
        if set(self._actors) != set(agents):
            raise ConfigInvalid(
                f"{self._env_id}: found policies for {', '.join(self._actors)}, expected one for "
                f"each of {', '.join(agents)}. Name each agent, or one policy for all."
            )
        sizes = [actor.policy.spec.recorded_state_size for actor in self._actors.values()]
        self._state_size = max(sizes)

    def first_state(self, agent: str) -> Array | None:
        """Return what an agent's policy remembers before its first step; None if nothing."""
        state = self._actors[agent].first_state
        return None if state is None else state[0]

    def renew(self, player: Player) -> None:
        """Let a player go on under another policy than before.

        What the last one remembers stays, if the new one remembers as many numbers.
        """
        state = self.first_state(player.agent)
        if player.state is None or state is None or len(player.state) != len(state):
            player.state = state

    def act(self, players: Iterable[Player]) -> None:
        """Choose an action for each, once for all that share an actor, and write down with what."""
        by_actor: dict[int, list[Player]] = {}
        for player in players:
            by_actor.setdefault(id(self._actors[player.agent]), []).append(player)
        for together in by_actor.values():
            self._act(self._actors[together[0].agent], together)

    def observe(self, player: Player, reward: float) -> None:
        """Let a player's policy see the reward of its last action."""
        if player.state is not None:
            policy = self._actors[player.agent].policy
            after = policy.observe(player.state[None], np.array([reward]))
            player.state = None if after is None else after[0]

    def _act(self, actor: Actor, players: Sequence[Player]) -> None:
        observations = concatenate([as_batch(player.observation) for player in players])
        self._streams.streams = [player.rng for player in players]
        state = None
        if actor.first_state is not None:
            state = np.stack([cast(Array, player.state) for player in players])
        masks = stacked_masks([player.mask for player in players])
        chosen = actor.act(observations, state, masks, cast(Any, self._streams))
        log_probs = [np.nan] * len(players)
        if chosen.log_probs is not None:
            log_probs = chosen.log_probs.tolist()
        for i, player in enumerate(players):
            player.observations.append(take(observations, i))
            player.masks.append(player.mask)
            player.states.append(self._recorded(player))
            player.actions.append(chosen.actions[i])
            player.log_probs.append(log_probs[i])
            player.actors.append(actor.acting)
            if chosen.state is not None:
                player.state = chosen.state[i]

    def _recorded(self, player: Player) -> Array:
        """Return what is recorded of a policy's state: as wide for all agents, zeros beyond."""
        recorded = np.zeros(self._state_size, np.float32)
        if player.state is not None:
            size = self._actors[player.agent].policy.spec.recorded_state_size
            recorded[:size] = player.state[:size]
        return recorded

    def _loaded(self, acting: Acting) -> Actor:
        actor = Actor(acting, self._game)
        spec = actor.policy.spec
        check_these_spaces(self._env_id, self._spaces, spec.observation_space, spec.action_space)
        return actor
