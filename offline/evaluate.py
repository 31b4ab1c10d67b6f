"""Evaluate: the return that a policy collects in an environment, with its interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from replaylake.datastore.compatibility import compatible
from replaylake.datastore.errors import ConfigInvalid, SchemaMismatch
from replaylake.datastore.policies.policy import Policy
from replaylake.datastore.spaces import (
    Array,
    Space,
    as_batch,
    concatenate,
    describe,
)
from replaylake.offline.environments import Environment, action_mask, make, spaces_of
from replaylake.offline.intervals import student_t_interval


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns of whole episodes.

    ci_low and ci_high bound the mean return at 95% (Student t over episodes); None for one episode.
    seeds: what each episode's environment was reset with.
    """

    env_id: str
    deterministic: bool
    mean_return: float
    ci_low: float | None
    ci_high: float | None
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


@dataclass
class _Slot:
    """One environment, and the episode that runs in it."""

    env: Environment
    episode: int
    observation: Any
    mask: Array | None
    rng: np.random.Generator
    state: Any
    reward: float = 0.0
    total: float = 0.0
    length: int = 0
    ended: bool = False


def evaluate(
    policy: Policy,
    env_id: str,
    *,
    episodes: int = 20,
    seed: int = 0,
    deterministic: bool = True,
    num_envs: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run whole episodes, acting on up to `num_envs` environments in one call.

    Episode i resets its environment with seed + i and draws from its own generator, so the result
    does not depend on num_envs. Masks in info["action_mask"] are honoured.

    Args:
        policy: whose spec has to fit the environment.
        env_id: Gymnasium id.
        episodes: how many.
        seed: of the first episode.
        deterministic: take the mode; otherwise sample. Sampling and policies with a state act for
            one environment at a time.
        num_envs: environments stepped together.
        on_progress: called with (episodes done, episodes) after each.

    Raises: NotFound for the environment, SchemaMismatch if its spaces are not the policy's.
    """
    if episodes < 1 or num_envs < 1:
        raise ConfigInvalid(
            f"evaluate: found {episodes} episodes in {num_envs} environments, expected 1 or more."
        )
    check_spaces(env_id, policy.spec.observation_space, policy.spec.action_space)
    envs = [make(env_id) for _ in range(min(num_envs, episodes))]
    waiting = iter(range(episodes))
    done: list[_Slot] = []
    try:
        running = [_start(env, policy, next(waiting), seed) for env in envs]
        while running:
            _step(policy, running, deterministic)
            for slot in [slot for slot in running if slot.ended]:
                running.remove(slot)
                done.append(slot)
                if on_progress is not None:
                    on_progress(len(done), episodes)
                if (episode := next(waiting, None)) is not None:
                    running.append(_start(slot.env, policy, episode, seed))
    finally:
        for env in envs:
            env.close()  # type: ignore[no-untyped-call]
    done.sort(key=lambda slot: slot.episode)
    returns = [slot.total for slot in done]
    mean, low, high = student_t_interval(returns)
    return Evaluation(
        env_id=env_id,
        deterministic=deterministic,
        mean_return=mean,
        ci_low=low,
        ci_high=high,
        returns=tuple(returns),
        lengths=tuple(slot.length for slot in done),
        seeds=tuple(range(seed, seed + episodes)),
    )


def check_spaces(env_id: str, observation_space: Space, action_space: Space) -> None:
    """Refuse an environment whose spaces differ in kind, shape or number of actions.

    Bounds and float widths may differ: a log seldom states the environment's.
    Raises: NotFound, SchemaMismatch.
    """
    theirs = spaces_of(env_id)
    for what, our, their in zip(
        ("observation", "action"), (observation_space, action_space), theirs, strict=True
    ):
        if not compatible(our, their, any_width=True):
            raise SchemaMismatch(
                f"environment {env_id}: its {what} space is {describe(their)}, expected "
                f"{describe(our)} as the data and its policy have. Name the environment that the "
                "log is from."
            )


def _start(env: Environment, policy: Policy, episode: int, seed: int) -> _Slot:
    observation, info = env.reset(seed=seed + episode)
    rng = np.random.default_rng([seed, episode])
    return _Slot(env, episode, observation, action_mask(info), rng, policy.initial_state(1))


def _step(policy: Policy, slots: list[_Slot], deterministic: bool) -> None:
    """Act and step once in every slot."""
    together = deterministic and all(slot.state is None and slot.mask is None for slot in slots)
    for group in [slots] if together else [[slot] for slot in slots]:
        act = policy.act(
            concatenate([as_batch(slot.observation) for slot in group]),
            group[0].state,
            rng=group[0].rng,
            deterministic=deterministic,
            action_mask=None if group[0].mask is None else group[0].mask[None],
        )
        for slot, action in zip(group, act.actions, strict=True):
            _advance(slot, action)
        if not together:
            group[0].state = policy.observe(act.state, np.array([group[0].reward]))


def _advance(slot: _Slot, action: Any) -> None:
    observation, reward, terminated, truncated, info = slot.env.step(action)
    slot.observation, slot.mask = observation, action_mask(info)
    slot.reward = float(reward)
    slot.total += slot.reward
    slot.length += 1
    slot.ended = bool(terminated or truncated)
