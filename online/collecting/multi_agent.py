"""Multi-agent worker: games played by several agents, each agent's part an episode of its own.

The agents of a game share its episode_id, and each has its steps under its agent_id, numbered from
0; env_step is the game's own clock: how often it had been stepped. Game i resets with seed + i, and
each agent draws its actions from a stream of its own, so that games do not depend on how many are
played side by side. In turn-based games a reward is kept with the agent's previous action; what is
paid before an agent acted at all, with its first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Array, Discrete, as_batch, concatenate, take
from replaylake.datastore.errors import ConfigInvalidError, RolloutError
from replaylake.datastore.lake.dataset import new_episode_id
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.lake.policies.streams import EpisodeStreams
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.offline.environments.games import Game, Outcome
from replaylake.offline.environments.ids import make_any
from replaylake.offline.environments.spaces import from_gymnasium
from replaylake.offline.evaluation.evaluate import check_spaces_match
from replaylake.online.collecting.actor import Actor
from replaylake.online.collecting.behavior_policy import BehaviorPolicies, BehaviorPolicy
from replaylake.online.collecting.player import Player, stack_masks
from replaylake.online.collecting.step_buffer import EpisodeEnd
from replaylake.online.collecting.worker import RolloutConfig


@dataclass
class _GameSlot:
    """A game that is played: who is or was in it, and who acts next."""

    game: Game
    number: int
    seed: int
    episode_id: str
    tick: int = 0
    players: dict[str, Player] = field(default_factory=dict)
    to_act: list[Player] = field(default_factory=list)


class MultiAgentWorker:
    """Collects the games whose numbers it is given; otherwise as a RolloutWorker."""

    def __init__(
        self,
        config: RolloutConfig,
        episodes: Iterator[int],
        behavior_policy: BehaviorPolicies,
        *,
        producer: str,
        worker: int = 0,
    ) -> None:
        """Make the games and load the policies.

        Args:
            config: how to collect; envs_per_worker games are played side by side.
            episodes: numbers of the games; may be endless.
            behavior_policy: who acts at first: one policy for all agents, or one for each by name.
            producer: what the episodes' ids begin with.
            worker: which worker this is, for the `worker` column.

        Raises: NotFoundError, ExtraMissingError, PackageInvalidError, SpaceUnsupportedError,
        SchemaMismatchError, RolloutError; ConfigInvalidError for an environment of one agent, and
        where an agent has no policy or a policy no agent.
        """
        self._config = config
        self._numbers = episodes
        self._producer = producer
        self._worker = worker
        self._tables: list[_GameSlot] = []
        self._episodes: list[Episode] = []
        self._ends: list[EpisodeEnd] = []
        self._first_at: float | None = None
        self.timings = Timings("workers")
        self._probe = self._make_game()
        try:
            self._agents = AgentActors(config.env, self._probe)
            self._is_discrete = isinstance(self._agents.action_space, Discrete)
            self.set_behavior_policy(behavior_policy)
            for number in islice(episodes, config.envs_per_worker):
                self._tables.append(self._start_game(self._make_game(), number))
        except BaseException:
            self.close()
            raise

    @property
    def exhausted(self) -> bool:
        """Whether every game has been collected."""
        return not self._tables

    @property
    def open_episodes(self) -> list[str]:
        """Ids of the open games of which pieces were taken."""
        return [
            table.episode_id
            for table in self._tables
            if any(player.first_step for player in table.players.values())
        ]

    @property
    def mask_size(self) -> int | None:
        """Width of the game's action masks now; None if it gives none."""
        mask = next((player.mask for table in self._tables for player in table.to_act), None)
        return None if mask is None else len(mask)

    @property
    def first_step_at(self) -> float | None:
        """When (Unix time, s) the first step was made since steps were taken last; None: none."""
        return self._first_at

    @property
    def policy(self) -> Policy:
        """The policy of the agent that is named first."""
        return self._agents.policy

    def set_behavior_policy(self, behavior_policy: BehaviorPolicies) -> None:
        """Act with other policies from the next step on; open games go on under them.

        Of a mapping, agents that are not in it keep theirs. Raises: ConfigInvalidError,
        SchemaMismatchError.
        """
        self._agents.set_behavior_policy(behavior_policy)
        for table in self._tables:
            for player in table.players.values():
                self._agents.reset_state(player)

    def advance(self, num_steps: int, interval_s: float) -> int:
        """Play until so many steps or seconds have passed or nothing is left.

        Returns: the steps that agents made, of all games together; one by each of three agents at
        once is three. Raises: RolloutError naming the game's seed if the environment raises.
        """
        if self._first_at is None and self._tables:
            self._first_at = time.time()
        until = time.monotonic() + interval_s
        num = 0
        while self._tables and num < num_steps and time.monotonic() < until:
            num += self._step()
        return num

    def take_episodes(self, with_open: bool) -> Sequence[Episode]:
        """Return what was recorded since the last call: of games that ended, all agents' episodes.

        with_open: of those that are played as well, as pieces: the steps whose rewards are known.
        """
        episodes, self._episodes, self._first_at = self._episodes, [], None
        if with_open:
            players = [
                (table, player) for table in self._tables for player in table.players.values()
            ]
            episodes += [
                player.take_piece(table.episode_id, table.seed, self._worker)
                for table, player in players
                if player.rewards
            ]
        return episodes

    def take_ends(self) -> list[EpisodeEnd]:
        """Return the agents' episodes of the games that ended since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def close(self) -> None:
        """Close the games; what was not taken is dropped."""
        for game in (self._probe, *(table.game for table in self._tables)):
            game.close()
        self._tables = []

    def _step(self) -> int:
        """Let all act whose turn it is, and step each game."""
        to_act = [player for table in self._tables for player in table.to_act]
        with self.timings.measure("inference", len(to_act)):
            self._agents.act(to_act)
        started = time.perf_counter()
        for table in self._tables:
            self._step_game(table)
        self.timings.add("env_step", time.perf_counter() - started, len(to_act))
        if not all(table.to_act for table in self._tables):
            self._refill()
        return len(to_act)

    def _step_game(self, table: _GameSlot) -> None:
        agents, table.to_act = table.to_act, []
        actions = {}
        for player in agents:
            player.ticks.append(table.tick)
            action = player.actions[-1]
            # Python's int, as PettingZoo's games expect; a copy, because a game may write into it.
            actions[player.agent] = int(action) if self._is_discrete else action.copy()
        try:
            outcomes = table.game.step(actions)
        except Exception as error:
            raise self._game_error(table, "step", error) from error
        table.tick += 1
        for outcome in outcomes:
            self._apply_outcome(table, outcome)

    def _apply_outcome(self, table: _GameSlot, outcome: Outcome) -> None:
        """Write down what an agent's last action led to; it is its turn, unless it is out."""
        player = table.players.get(outcome.agent)
        if player is None:
            player = table.players[outcome.agent] = self._player(table, outcome)
        elif player.has_ended:
            raise RolloutError(
                f"rollout worker {self._worker}: {self._config.env}: agent {player.agent!r} left "
                f"and came back at tick {table.tick} of the game reset with seed {table.seed}, "
                "expected it not to return. Use another name for it."
            )
        reward = player.apply_outcome(outcome)
        if reward is not None:
            self._agents.observe(player, reward)
        if not outcome.has_ended:
            table.to_act.append(player)

    def _refill(self) -> None:
        """Start the next games where others are over; one without a next is closed."""
        tables = []
        for table in self._tables:
            if table.to_act:
                tables.append(table)
                continue
            self._end(table)
            if (number := next(self._numbers, None)) is not None:
                tables.append(self._start_game(table.game, number))
            else:
                table.game.close()
        self._tables = tables

    def _end(self, table: _GameSlot) -> None:
        for player in table.players.values():
            if not player.has_ended:
                player.truncate()
            if not player.num_steps:
                continue
            end = (table.number, table.seed, player.episode_return, player.num_steps, player.agent)
            self._ends.append(EpisodeEnd(*end))
            if player.rewards:
                self._episodes.append(player.take_piece(table.episode_id, table.seed, self._worker))

    def _make_game(self) -> Game:
        game = make_any(self._config.env, self._config.env_args)
        if isinstance(game, Game):
            return game
        game.close()  # type: ignore[no-untyped-call]
        raise ConfigInvalidError(
            f"{self._config.env}: found an environment with one agent, expected several. Name "
            "one policy, and no agents."
        )

    def _start_game(self, game: Game, number: int) -> _GameSlot:
        table = _GameSlot(game, number, self._config.seed + number, new_episode_id(self._producer))
        try:
            outcomes = game.reset(seed=table.seed)
        except Exception as error:
            raise self._game_error(table, "reset", error) from error
        for outcome in outcomes:
            self._apply_outcome(table, outcome)
        if not table.to_act:
            raise RolloutError(
                f"rollout worker {self._worker}: {self._config.env}: found no agent to act after "
                f"a reset with seed {table.seed}, expected at least one agent. Fix its reset()."
            )
        return table

    def _player(self, table: _GameSlot, outcome: Outcome) -> Player:
        agents = self._probe.agents
        if outcome.agent not in agents:
            raise RolloutError(
                f"rollout worker {self._worker}: {self._config.env}: found agent "
                f"{outcome.agent!r} in the game reset with seed {table.seed}, expected one of "
                f"{', '.join(agents)}. Name it in possible_agents."
            )
        # The 1 as in a RolloutWorker: not the stream that the environment seeds with.
        rng = np.random.default_rng([table.seed, 1, agents.index(outcome.agent)])
        state = self._agents.first_state(outcome.agent)
        return Player(outcome.agent, rng, outcome.observation, outcome.mask, state)

    def _game_error(self, table: _GameSlot, call: str, error: Exception) -> RolloutError:
        return RolloutError(
            f"rollout worker {self._worker}: {call} of {self._config.env} raised "
            f"{type(error).__name__}: {error}, at tick {table.tick} of the game reset with seed "
            f"{table.seed}; expected observations. Fix the environment; the same seed and "
            "policies reproduce the error."
        )


class AgentActors:
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
        return self._spaces[1]

    @property
    def policy(self) -> Policy:
        """The policy of the agent that is named first."""
        return self._actors[self._game.agents[0]].policy

    def set_behavior_policy(self, behavior_policy: BehaviorPolicies) -> None:
        """Act with other policies from now on: one for all, or of a mapping those that it names.

        Raises: ConfigInvalidError where an agent has no policy or a policy no agent;
        SchemaMismatchError.
        """
        agents = self._game.agents
        if isinstance(behavior_policy, BehaviorPolicy):
            self._actors = dict.fromkeys(agents, self._load_actor(behavior_policy))
        else:
            self._actors |= {agent: self._load_actor(one) for agent, one in behavior_policy.items()}
        if set(self._actors) != set(agents):
            raise ConfigInvalidError(
                f"{self._env_id}: found policies for {', '.join(self._actors)}, expected one for "
                f"each of {', '.join(agents)}. Name each agent, or one policy for all."
            )
        sizes = [actor.policy.spec.recorded_state_size for actor in self._actors.values()]
        self._state_size = max(sizes)

    def first_state(self, agent: str) -> Array | None:
        """Return what an agent's policy remembers before its first step; None if nothing."""
        state = self._actors[agent].first_state
        return None if state is None else state[0]

    def reset_state(self, player: Player) -> None:
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
        masks = stack_masks([player.mask for player in players])
        act = actor.act(observations, state, masks, cast(Any, self._streams))
        log_probs = [np.nan] * len(players)
        if act.log_probs is not None:
            log_probs = act.log_probs.tolist()
        for i, player in enumerate(players):
            player.observations.append(take(observations, i))
            player.masks.append(player.mask)
            player.states.append(self._pad_state(player))
            player.actions.append(act.actions[i])
            player.log_probs.append(log_probs[i])
            player.actors.append(actor.acting)
            if act.state is not None:
                player.state = act.state[i]

    def _pad_state(self, player: Player) -> Array:
        """Return what is recorded of a policy's state: as wide for all agents, zeros beyond."""
        recorded = np.zeros(self._state_size, np.float32)
        if player.state is not None:
            size = self._actors[player.agent].policy.spec.recorded_state_size
            recorded[:size] = player.state[:size]
        return recorded

    def _load_actor(self, behavior_policy: BehaviorPolicy) -> Actor:
        actor = Actor(behavior_policy, self._game)
        spec = actor.policy.spec
        check_spaces_match(self._env_id, self._spaces, spec.observation_space, spec.action_space)
        return actor
