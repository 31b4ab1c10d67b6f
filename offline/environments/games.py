"""Games: environments of several agents, PettingZoo's, all acting at once or in turns.

However it is stepped, a game tells the same: what each agent's previous action led to, and what the
agent sees now. In turns that is known when the agent's next turn comes, or when it is out: what the
others' actions paid it in between is its previous action's reward.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array, copy_value, describe
from replaylake.datastore.errors import (
    ConfigInvalidError,
    ExtraMissingError,
    NotFoundError,
    SchemaMismatchError,
)
from replaylake.offline.environments.spaces import action_mask, from_gymnasium, gymnasium

# Where the classics have their mask: in a Dict, beside the observation.
_MASK: Final = "action_mask"
_OBSERVATION: Final = "observation"


@dataclass(frozen=True)
class Outcome:
    """What an agent's previous action led to; unless it is out of the game the agent acts next.

    observation, mask: copies of what it sees now, its final observation where it is out (None if
    the game gives none). reward: since its previous action; at its first turn since the reset.
    """

    agent: str
    observation: Any
    mask: Array | None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False

    @property
    def has_ended(self) -> bool:
        return self.terminated or self.truncated


class Game:
    """An environment of several agents that have the same spaces.

    agents: all that may take part. observation_space, action_space: each one's, Gymnasium's; of a
    Dict of an observation and its mask the observation's.
    """

    def __init__(self, env: Any, env_id: str) -> None:
        """Wrap an environment of PettingZoo's.

        Raises: ConfigInvalidError if it does not say who may take part, SchemaMismatchError for
        agents with different spaces, SpaceUnsupportedError.
        """
        self._env = env
        possible = list(getattr(env, "possible_agents", None) or [])
        if not possible:
            raise ConfigInvalidError(
                f"environment {env_id}: found no possible_agents, expected the names of all agents "
                "that may take part. Set the attribute."
            )
        self._ids: dict[str, Any] = {str(agent): agent for agent in possible}
        self.agents: tuple[str, ...] = tuple(self._ids)
        space = _common_space(
            env_id, "observation", {a: env.observation_space(a) for a in possible}
        )
        self._keys: list[str] | None = None
        if isinstance(space, gymnasium.spaces.Dict) and _MASK in space.spaces:
            self._keys = [key for key in space.spaces if key != _MASK]
            rest = {key: space.spaces[key] for key in self._keys}
            is_alone = self._keys == [_OBSERVATION]
            space = rest[_OBSERVATION] if is_alone else gymnasium.spaces.Dict(rest)
        self.observation_space = space
        self.action_space = _common_space(
            env_id, "action", {a: env.action_space(a) for a in possible}
        )

    def reset(self, *, seed: int) -> list[Outcome]:
        """Begin anew; return what those see who act first."""
        raise NotImplementedError

    def step(self, actions: Mapping[str, Any]) -> list[Outcome]:
        """Take the actions of all who were to act; return outcomes, among them who acts next.

        Once all outcomes are of agents that are out, the game is over.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what it holds."""
        self._env.close()

    def _split_mask(self, observation: Any, info: Mapping[str, Any]) -> tuple[Any, Array | None]:
        """Take the mask out of an observation or the info; copied, as games reuse arrays."""
        if self._keys is None or observation is None:
            mask = action_mask(info)
            own = None if observation is None else copy_value(observation)
            return own, None if mask is None else mask.copy()
        mask = np.asarray(observation[_MASK]).astype(bool)
        if self._keys == [_OBSERVATION]:
            return copy_value(observation[_OBSERVATION]), mask
        return {key: copy_value(observation[key]) for key in self._keys}, mask


class SimultaneousGame(Game):
    """A ParallelEnv: all who are in it act at once."""

    def reset(self, *, seed: int) -> list[Outcome]:
        """Begin anew; return what those see who act first."""
        observations, infos = self._env.reset(seed=seed)
        return [
            Outcome(str(agent), *self._split_mask(observations[agent], infos.get(agent) or {}))
            for agent in self._env.agents
        ]

    def step(self, actions: Mapping[str, Any]) -> list[Outcome]:
        """Take everyone's action; return everyone's outcome, and what newcomers see."""
        by_name = {self._ids[name]: action for name, action in actions.items()}
        observations, rewards, terminated, truncated, infos = self._env.step(by_name)
        outcomes = []
        for agent in [*by_name, *(agent for agent in self._env.agents if agent not in by_name)]:
            is_in = agent in self._env.agents
            ended = bool(terminated.get(agent, False))
            # One that is gone without a word was cut off.
            cut = bool(truncated.get(agent, False)) or (not is_in and not ended)
            is_out = ended or cut
            observation = observations.get(agent) if is_out else observations[agent]
            array, mask = self._split_mask(observation, infos.get(agent) or {})
            reward = _number(rewards.get(agent, 0.0))
            outcomes.append(Outcome(str(agent), array, mask, reward, ended, cut))
        return outcomes


class TurnBasedGame(Game):
    """An AECEnv: one acts after the other."""

    def reset(self, *, seed: int) -> list[Outcome]:
        """Begin anew; return what the one sees who acts first."""
        self._env.reset(seed=seed)
        return self._advance_to_next()

    def step(self, actions: Mapping[str, Any]) -> list[Outcome]:
        """Take the one action; return what those who are out got, and who acts next."""
        (action,) = actions.values()
        self._env.step(action)
        return self._advance_to_next()

    def _advance_to_next(self) -> list[Outcome]:
        """Go on to the next who can act; those who are out on the way are stepped out."""
        outcomes: list[Outcome] = []
        while self._env.agents:
            observation, reward, terminated, truncated, info = self._env.last()
            name, array = str(self._env.agent_selection), self._split_mask(observation, info)
            outcome = Outcome(name, *array, _number(reward), bool(terminated), bool(truncated))
            outcomes.append(outcome)
            if not outcome.has_ended:
                break
            self._env.step(None)
        return outcomes


def wrap_game(env: Any, env_id: str) -> Game:
    """Return the game of an environment of PettingZoo's.

    Raises: ConfigInvalidError for anything else; as Game.
    """
    kinds = _pettingzoo_kinds()
    if kinds is not None and isinstance(env, kinds[0]):
        return SimultaneousGame(env, env_id)
    if kinds is not None and isinstance(env, kinds[1]):
        return TurnBasedGame(env, env_id)
    raise ConfigInvalidError(
        f"environment {env_id}: returned {type(env).__name__}, expected a "
        "gymnasium.Env, or a ParallelEnv or AECEnv of PettingZoo's. Return one of these."
    )


def make_pettingzoo(name: str, env_args: Mapping[str, Any]) -> Any:
    """Make an environment of PettingZoo's registry; in its parallel form where it has one.

    Raises: NotFoundError; ExtraMissingError without PettingZoo or what the environment imports.
    """
    try:
        import pettingzoo
        from pettingzoo.env_registry import exceptions
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"environment pettingzoo:{name}: found no pettingzoo, expected it. Run: "
            "pip install 'replaylake[multiagent]'."
        ) from error
    try:
        if name in pettingzoo.parallel_registry:
            return pettingzoo.make("parallel", name, **env_args)
        return pettingzoo.make("aec", name, **env_args)
    except exceptions.FailedToImport as error:
        raise ExtraMissingError(
            f"environment pettingzoo:{name}: {error} ({error.__cause__})"
        ) from error
    except exceptions.PettingZooRegistryError as error:
        near = difflib.get_close_matches(name, list(pettingzoo.aec_registry), n=3, cutoff=0.6)
        raise NotFoundError(
            f"environment 'pettingzoo:{name}': not registered with PettingZoo. Expected "
            f"pettingzoo:{' or '.join(near) if near else 'an id such as classic/connect_four-v3'}."
        ) from error


def _pettingzoo_kinds() -> tuple[type, type] | None:
    """Return ParallelEnv and AECEnv; None without PettingZoo, of which nothing can be one then."""
    try:
        from pettingzoo.utils.env import AECEnv, ParallelEnv
    except ModuleNotFoundError:
        return None
    return ParallelEnv, AECEnv


def _common_space(env_id: str, what: str, spaces: Mapping[Any, gymnasium.Space[Any]]) -> Any:
    """Return the space that all agents have. Raises: SchemaMismatchError naming two that differ."""
    (first, space), *others = spaces.items()
    for agent, other in others:
        if other != space:
            ours, theirs = (describe(from_gymnasium(each)) for each in (other, space))
            raise SchemaMismatchError(
                f"environment {env_id}: agent {agent!r} has the {what} space {ours}, {first!r} "
                f"has {theirs}; expected the same space for all agents, because a dataset has "
                "one. Pad them to "
                "one (SuperSuit's pad_observations and pad_action_space do), or collect each "
                "agent's steps into a separate dataset, with your own loop and `Dataset.append`."
            )
    return space


def _number(reward: Any) -> float:
    # Some environments return rewards as arrays of one element.
    return reward if type(reward) is float else float(np.asarray(reward).item())
