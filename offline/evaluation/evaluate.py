"""Evaluate: the return that a policy collects in an environment, with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from replaylake.datastore.episodes.compatibility import is_compatible
from replaylake.datastore.episodes.spaces import (
    Array,
    Discrete,
    Space,
    as_batch,
    concatenate,
    describe,
)
from replaylake.datastore.errors import ConfigInvalidError, SchemaMismatchError
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.lake.policies.streams import EpisodeStreams
from replaylake.offline.callbacks import Callbacks, EpisodeProgress, OnFrame
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.ids import make_any, spaces_of
from replaylake.offline.environments.rendering import make_rendering, render_frame
from replaylake.offline.environments.spaces import Environment, action_mask, from_gymnasium
from replaylake.offline.evaluation.intervals import student_t_interval
from replaylake.offline.evaluation.self_play import AgentPolicies, GameState, SelfPlay


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns of whole episodes.

    ci_low and ci_high bound the mean return at 95% (Student t over episodes); None for one episode.
    seeds: what each episode's environment was reset with. env_args: what it was made with.
    agent_returns: each agent's mean return where there are several; returns are their sums, lengths
    how often the game was stepped.
    """

    env_id: str
    deterministic: bool
    mean_return: float
    ci_low: float | None
    ci_high: float | None
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    env_args: Mapping[str, Any] = field(default_factory=dict)
    agent_returns: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


@dataclass
class _EnvState:
    """One environment, and its episode; state [1, S] is what the policy remembers of that."""

    env: Environment
    episode: int
    observation: Any
    mask: Array | None
    rng: np.random.Generator
    state: Array | None
    reward: float = 0.0
    total: float = 0.0
    length: int = 0
    ended: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """The environment and number of episodes of an evaluation, and how the policy acts.

    Episode i resets its environment with seed + i and has its own random generator, so the result
    does not depend on num_envs. (The outputs of a network may differ in the last bit between batch
    sizes.)
    """

    # Gymnasium id, or `module:function`; see docs/ENVIRONMENTS.md. env_args: what it is made with.
    env: str
    env_args: Mapping[str, Any] = field(default_factory=dict)
    episodes: int = 20
    # Of the first episode.
    seed: int = 0
    # Take the mode of the policy; otherwise sample.
    deterministic: bool = True
    # Environments stepped together, with one call of the policy.
    num_envs: int = 32
    # The first so many are drawn, where there is a callback on_frame.
    filmed_episodes: int = 1

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.num_envs < 1:
            raise ConfigInvalidError(
                f"evaluate: found {self.episodes} episodes in {self.num_envs} environments, "
                "expected 1 or more."
            )


def evaluate(
    policy: AgentPolicies,
    config: EvaluationConfig | str,
    *,
    callbacks: Callbacks | None = None,
) -> Evaluation:
    """Run whole episodes in an environment and return their returns.

    Args:
        policy: a policy whose spec fits the environment, or a mapping with one for each agent. See
            `load_policy`.
        config: the environment, the number of episodes and so on; a text is the environment, with
            the default options.
        callbacks: on_progress (EpisodeProgress), after each episode; on_frame, with each frame of
            the first `filmed_episodes`. Frames of several episodes may alternate. Rendering may
            take longer than the episodes.

    Masks in info["action_mask"] are applied. In an environment of several agents, one policy acts
    for all of them, and the return of an episode is the sum over its agents.

    Returns: undiscounted returns, in the environment's units, with the 95% interval of their mean.

    Raises: NotFoundError for the environment; SchemaMismatchError if its spaces are not the
    policy's; ConfigInvalidError if a mapping does not have one policy for each agent. With
    `on_frame`: ConfigInvalidError if the environment cannot be rendered or has several agents;
    ExtraMissingError if a library for rendering is missing.
    """
    config = EvaluationConfig(config) if isinstance(config, str) else config
    callbacks = callbacks or Callbacks()
    episodes, seed, arguments = config.episodes, config.seed, dict(config.env_args)
    on_episode = _episode_reporter(callbacks)
    env = make_any(config.env, arguments)
    agents = env.agents if isinstance(env, Game) else ()
    theirs = from_gymnasium(env.observation_space), from_gymnasium(env.action_space)
    env.close()
    policies = _policies_by_agent(config.env, agents, policy)
    for one in policies.values():
        check_spaces_match(config.env, theirs, one.spec.observation_space, one.spec.action_space)
    num_filmed = 0 if callbacks.on_frame is None else min(config.filmed_episodes, episodes)
    envs: list[Any] = []
    try:
        for number in range(min(max(config.num_envs, num_filmed), episodes)):
            make_env = make_rendering if number < num_filmed else make_any
            envs.append(make_env(config.env, arguments))
        if agents:
            play = SelfPlay(policies, seed, deterministic=config.deterministic)
            games = play.play_games(envs, episodes, on_episode)
            outcome = _sum_games(games)
        else:
            run = _EvaluationRun(
                policies[""], seed, config.deterministic, callbacks.on_frame, num_filmed
            )
            ends = run.run_episodes(envs, episodes, on_episode)
            outcome = _EpisodeReturns(
                [slot.total for slot in ends], [slot.length for slot in ends], {}
            )
    finally:
        for env in envs:
            env.close()
    mean, low, high = student_t_interval(outcome.returns)
    return Evaluation(
        env_id=config.env,
        deterministic=config.deterministic,
        mean_return=mean,
        ci_low=low,
        ci_high=high,
        returns=tuple(outcome.returns),
        lengths=tuple(outcome.lengths),
        seeds=tuple(range(seed, seed + episodes)),
        env_args=arguments,
        agent_returns=outcome.by_agent,
    )


def _episode_reporter(callbacks: Callbacks) -> Callable[[int, int], None] | None:
    on_progress = callbacks.on_progress
    if on_progress is None:
        return None
    return lambda done, episodes: on_progress(EpisodeProgress(done, episodes))


def _policies_by_agent(
    env_id: str, agents: Sequence[str], policy: AgentPolicies
) -> Mapping[str, Policy]:
    """Return who acts for each agent; of an environment of one agent, for the one without a name.

    Raises: ConfigInvalidError.
    """
    names = agents or ("",)
    if not isinstance(policy, Mapping):
        return dict.fromkeys(names, policy)
    if set(policy) != set(names):
        raise ConfigInvalidError(
            f"evaluate: {env_id}: found policies for {', '.join(policy) or 'nobody'}, expected "
            f"{'one for each of ' + ', '.join(agents) if agents else 'one policy'}."
        )
    return policy


class _EpisodeReturns(NamedTuple):
    """Each episode's return and length, and of several agents each one's mean return."""

    returns: list[float]
    lengths: list[int]
    by_agent: dict[str, float]


def _sum_games(games: Sequence[GameState]) -> _EpisodeReturns:
    """Sum over the agents, as the view `games` does."""
    by_agent: dict[str, list[float]] = {}
    for game in games:
        for agent, value in game.returns.items():
            by_agent.setdefault(agent, []).append(value)
    return _EpisodeReturns(
        [sum(game.returns.values()) for game in games],
        [game.num_ticks for game in games],
        {agent: float(np.mean(values)) for agent, values in sorted(by_agent.items())},
    )


def check_spaces(
    env_id: str,
    observation_space: Space,
    action_space: Space,
    env_args: Mapping[str, Any] | None = None,
) -> None:
    """Refuse an environment whose spaces differ in kind, shape or number of actions.

    Bounds and float widths may differ: a log seldom states the environment's.
    Raises: NotFoundError, SchemaMismatchError.
    """
    check_spaces_match(env_id, spaces_of(env_id, env_args), observation_space, action_space)


def check_spaces_match(
    env_id: str, theirs: tuple[Space, Space], observation_space: Space, action_space: Space
) -> None:
    """Do the same for spaces that are known. Raises: SchemaMismatchError."""
    for what, our, their in zip(
        ("observation", "action"), (observation_space, action_space), theirs, strict=True
    ):
        if not is_compatible(our, their, any_width=True):
            raise SchemaMismatchError(
                f"environment {env_id}: its {what} space is {describe(their)}, expected "
                f"{describe(our)} as in the data and their policy. Name the environment that "
                "they are from."
            )


class _EvaluationRun:
    """Slots that a policy steps until all episodes have ended."""

    def __init__(
        self,
        policy: Policy,
        seed: int,
        deterministic: bool,
        on_frame: OnFrame | None,
        num_filmed: int,
    ) -> None:
        self._policy = policy
        self._seed = seed
        self._deterministic = deterministic
        self._on_frame = on_frame
        self._num_filmed = num_filmed
        # Python ints, which the step of an environment handles several times faster.
        self._is_discrete = isinstance(policy.spec.action_space, Discrete)

    def run_episodes(
        self,
        envs: Sequence[Environment],
        episodes: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> list[_EnvState]:
        """Return the slots of all episodes, in their order."""
        waiting = iter(range(episodes))
        running = [self._start(env, next(waiting)) for env in envs]
        ends: list[_EnvState] = []
        while running:
            for group in _groups(running):
                self._step(group)
            for slot in [slot for slot in running if slot.ended]:
                running.remove(slot)
                ends.append(slot)
                if on_progress is not None:
                    on_progress(len(ends), episodes)
                if (episode := next(waiting, None)) is not None:
                    running.append(self._start(slot.env, episode))
        return sorted(ends, key=lambda slot: slot.episode)

    def _start(self, env: Environment, episode: int) -> _EnvState:
        observation, info = env.reset(seed=self._seed + episode)
        rng = np.random.default_rng([self._seed, episode])
        state = self._policy.initial_state(1)
        slot = _EnvState(env, episode, observation, action_mask(info), rng, state)
        self._capture_frame(slot)
        return slot

    def _step(self, slots: Sequence[_EnvState]) -> None:
        """Act once for all slots, and step each."""
        masks = [slot.mask for slot in slots if slot.mask is not None]
        states = [slot.state for slot in slots if slot.state is not None]
        act = self._policy.act(
            concatenate([as_batch(slot.observation) for slot in slots]),
            np.concatenate(states) if states else None,
            rng=cast(np.random.Generator, EpisodeStreams([slot.rng for slot in slots])),
            deterministic=self._deterministic,
            action_mask=np.stack(masks) if masks else None,
        )
        actions = act.actions.tolist() if self._is_discrete else act.actions
        for slot, action in zip(slots, actions, strict=True):
            _advance(slot, action)
            self._capture_frame(slot)
        rewards = np.array([slot.reward for slot in slots])
        if (state := self._policy.observe(act.state, rewards)) is not None:
            for row, slot in enumerate(slots):
                slot.state = state[row : row + 1]

    def _capture_frame(self, slot: _EnvState) -> None:
        if self._on_frame is not None and slot.episode < self._num_filmed:
            self._on_frame(slot.episode, render_frame(slot.env))


def _groups(slots: Sequence[_EnvState]) -> list[Sequence[_EnvState]]:
    """Return which slots are acted for together: none that is masked beside one that is not."""
    masked = [slot for slot in slots if slot.mask is not None]
    if not masked or len(masked) == len(slots):
        return [slots]
    return [masked, [slot for slot in slots if slot.mask is None]]


def _advance(slot: _EnvState, action: Any) -> None:
    observation, reward, terminated, truncated, info = slot.env.step(action)
    slot.observation, slot.mask = observation, action_mask(info)
    # Some environments return rewards as arrays of one element.
    slot.reward = reward if type(reward) is float else float(np.asarray(reward).item())
    slot.total += slot.reward
    slot.length += 1
    slot.ended = bool(terminated or truncated)
