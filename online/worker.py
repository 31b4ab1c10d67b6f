"""Rollout worker: environments stepped in lockstep with one policy, giving whole episodes.

Episode i resets its environment with seed + i and draws its actions from a stream of its own, so
the episodes do not depend on how many workers or environments collect them. (A network's outputs
may differ in the last bit between batch sizes, which moves an action only if its draw lies there.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from replaylake.datastore.dataset import new_episode_id
from replaylake.datastore.episode import Episode
from replaylake.datastore.errors import ConfigInvalid, RolloutFailed
from replaylake.datastore.policies.package import load_policy
from replaylake.datastore.policies.policy import Policy
from replaylake.datastore.policies.streams import EpisodeStreams
from replaylake.datastore.policies.uniform import UniformPolicy
from replaylake.datastore.spaces import Array, Discrete, as_batch, concatenate, take
from replaylake.offline.environments import action_mask, from_gymnasium, make

RANDOM: Final = "random"
# Further columns of each step: which worker collected it, and what its episode's reset was given.
WORKER: Final = "worker"
SEED: Final = "seed"


@dataclass(frozen=True)
class RolloutConfig:
    """How a rollout worker collects.

    env_id: Gymnasium id. num_envs: stepped together, one call of the policy for all. seed: of the
    first episode. temperature: of a stochastic head; 0 takes the mode. epsilon: probability of a
    uniform action instead (Discrete). flush_steps, flush_interval_s: a worker hands over what it
    has finished after so many steps or seconds, whichever is first.
    """

    env_id: str
    num_envs: int = 8
    seed: int = 0
    temperature: float = 1.0
    epsilon: float = 0.0
    # About a second of CartPole: a crash loses no more, and shards stay few.
    flush_steps: int = 65_536
    flush_interval_s: float = 2.0

    def __post_init__(self) -> None:
        for name, least in (("num_envs", 1), ("seed", 0), ("temperature", 0), ("flush_steps", 1)):
            if not getattr(self, name) >= least:
                raise ConfigInvalid(
                    f"rollout: {name}: found {getattr(self, name)}, expected {least} or more."
                )
        if not 0 <= self.epsilon <= 1 or not self.flush_interval_s > 0:
            raise ConfigInvalid(
                f"rollout: found epsilon {self.epsilon} and flush_interval_s "
                f"{self.flush_interval_s}, expected epsilon from 0 to 1 and an interval above 0."
            )


@dataclass(frozen=True)
class ActingPolicy:
    """Who acts: a registered name and version with its package, or `random`, version 0, without."""

    name: str = RANDOM
    version: int = 0
    package: Path | None = None

    def load(self, env: Any) -> Policy:
        """Return the policy, ready to act in `env`. Raises: PackageInvalid, SpaceUnsupported."""
        if self.package is not None:
            return load_policy(self.package)
        return UniformPolicy(
            from_gymnasium(env.observation_space), from_gymnasium(env.action_space)
        )


@dataclass
class _Lane:
    """One environment and its open episode; the lists have one entry a step."""

    env: Any
    seed: int
    rng: np.random.Generator
    observation: Any
    mask: Array | None
    state: Any
    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    masks: list[Array | None] = field(default_factory=list)
    actors: list[ActingPolicy] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


class RolloutWorker:
    """Collects the episodes whose numbers it is given, in any process and without a lake."""

    def __init__(
        self,
        config: RolloutConfig,
        episodes: Iterator[int],
        acting: ActingPolicy,
        *,
        producer: str,
        worker: int = 0,
    ) -> None:
        """Make the environments and load the policy.

        Args:
            config: how to collect.
            episodes: numbers of the episodes; may be endless.
            acting: who acts at first.
            producer: what the episodes' ids begin with.
            worker: which worker this is, for the `worker` column.

        Raises: NotFound, ExtraMissing, PackageInvalid, SpaceUnsupported, RolloutFailed.
        """
        self._config = config
        self._episodes = episodes
        self._producer = producer
        self._worker = worker
        self._streams = EpisodeStreams(())
        self._lanes: list[_Lane] = []
        env = make(config.env_id)
        self._acting, self.policy = acting, acting.load(env)
        env.close()  # type: ignore[no-untyped-call]
        try:
            for number in _first(episodes, config.num_envs):
                self._lanes.append(self._started(make(config.env_id), number))
        except BaseException:
            self.close()
            raise

    @property
    def exhausted(self) -> bool:
        """Whether every episode has been collected."""
        return not self._lanes

    @property
    def mask_size(self) -> int | None:
        """Width of the environment's action masks now; None if it gives none."""
        mask = self._lanes[0].mask if self._lanes else None
        return None if mask is None else len(mask)

    def set_policy(self, acting: ActingPolicy) -> None:
        """Act with another policy from the next step on; open episodes go on under it."""
        if not self._lanes:
            return
        self._acting, self.policy = acting, acting.load(self._lanes[0].env)
        for lane in self._lanes:
            lane.state = self.policy.initial_state(1)

    def advance(self, num_steps: int, interval_s: float) -> list[Episode]:
        """Step all environments until so many steps or seconds have passed or nothing is left.

        Returns: the episodes that ended, in the order they did; the others stay open for the next
        call. Raises: RolloutFailed naming the episode if the environment raises.
        """
        ended: list[Episode] = []
        until = time.monotonic() + interval_s
        taken = 0
        while self._lanes and taken < num_steps and time.monotonic() < until:
            taken += len(self._lanes)
            together = self._lanes[0].state is None
            for group in [self._lanes] if together else [[lane] for lane in self._lanes]:
                self._step(group)
            if any(lane.ended for lane in self._lanes):
                ended += [self._episode(lane) for lane in self._lanes if lane.ended]
                self._refill()
        return ended

    def close(self) -> None:
        """Close the environments; open episodes are dropped."""
        for lane in self._lanes:
            lane.env.close()
        self._lanes = []

    def _step(self, lanes: Sequence[_Lane]) -> None:
        """Act once for all lanes (a stateful policy has one lane), and step each."""
        observations = concatenate([as_batch(lane.observation) for lane in lanes])
        self._streams.streams = [lane.rng for lane in lanes]
        act = self.policy.act(
            observations,
            lanes[0].state,
            rng=cast(np.random.Generator, self._streams),
            deterministic=False,
            temperature=self._config.temperature,
            epsilon=self._config.epsilon,
            action_mask=_masks([lane.mask for lane in lanes]),
        )
        is_discrete = isinstance(self.policy.spec.action_space, Discrete)
        # Python ints, which the step of an environment handles several times faster.
        actions = act.actions.tolist() if is_discrete else act.actions
        log_probs = [np.nan] * len(lanes) if act.log_probs is None else act.log_probs.tolist()
        for i, lane in enumerate(lanes):
            lane.observations.append(take(observations, i))
            lane.masks.append(lane.mask)
            lane.actions.append(actions[i])
            lane.log_probs.append(log_probs[i])
            lane.actors.append(self._acting)
            # A copy, because an environment may write into what it is given.
            self._step_env(lane, actions[i] if is_discrete else actions[i].copy())
        if lanes[0].state is not None:
            lanes[0].state = self.policy.observe(act.state, np.array(lanes[0].rewards[-1:]))

    def _step_env(self, lane: _Lane, action: Any) -> None:
        try:
            lane.observation, reward, terminated, truncated, info = lane.env.step(action)
        except Exception as error:
            raise self._failure(lane.seed, len(lane.rewards), "step", error) from error
        lane.rewards.append(reward if type(reward) is float else float(np.asarray(reward).item()))
        lane.terminated, lane.truncated = bool(terminated), bool(truncated)
        lane.mask = action_mask(info)

    def _started(self, env: Any, number: int) -> _Lane:
        seed = self._config.seed + number
        try:
            observation, info = env.reset(seed=seed)
        except Exception as error:
            raise self._failure(seed, 0, "reset", error) from error
        # Not default_rng(seed): environments seed theirs so, and actions would follow their draws.
        rng = np.random.default_rng([seed, 1])
        return _Lane(env, seed, rng, observation, action_mask(info), self.policy.initial_state(1))

    def _refill(self) -> None:
        """Start the next episodes where others ended; an environment without one is closed."""
        lanes = []
        for lane in self._lanes:
            if not lane.ended:
                lanes.append(lane)
            elif (number := next(self._episodes, None)) is not None:
                lanes.append(self._started(lane.env, number))
            else:
                lane.env.close()
        self._lanes = lanes

    def _episode(self, lane: _Lane) -> Episode:
        num = len(lane.rewards)
        log_probs = np.array(lane.log_probs, np.float32)
        return Episode(
            episode_id=new_episode_id(self._producer),
            observations=concatenate([as_batch(value) for value in lane.observations]),
            actions=np.stack(lane.actions),
            rewards=np.array(lane.rewards, np.float64),
            terminated=lane.terminated,
            truncated=lane.truncated,
            # Concatenated, because that copies: the environment may reuse its array at the reset.
            final_observation=take(concatenate([as_batch(lane.observation)]), 0),
            behavior_log_probs=None if np.isnan(log_probs).all() else log_probs,
            policies=np.array([actor.name for actor in lane.actors], dtype=object),
            policy_versions=np.array([actor.version for actor in lane.actors], np.int64),
            action_masks=_masks(lane.masks),
            extras={
                WORKER: np.full(num, self._worker, np.int32),
                SEED: np.full(num, lane.seed, np.int64),
            },
        )

    def _failure(self, seed: int, step: int, call: str, error: Exception) -> RolloutFailed:
        return RolloutFailed(
            f"rollout worker {self._worker}: {call} of {self._config.env_id} raised "
            f"{type(error).__name__}: {error}, at step {step} of the episode reset with seed "
            f"{seed}; expected an observation. Mend the environment; the same seed and policy get "
            "there again."
        )


def _masks(masks: Sequence[Array | None]) -> Array | None:
    """Stack masks to bool [N, A]; None if there are none.

    Raises: RolloutFailed if only some are there.
    """
    if masks[0] is None and all(mask is None for mask in masks):
        return None
    if any(mask is None for mask in masks):
        raise RolloutFailed(
            "rollout: found an action_mask in the info of some steps, expected it in all or none."
        )
    return np.stack([np.asarray(mask) for mask in masks])


def _first(numbers: Iterator[int], count: int) -> Iterator[int]:
    for _ in range(count):
        if (number := next(numbers, None)) is None:
            return
        yield number
