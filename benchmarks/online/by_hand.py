"""A minimal loop around our learner: numpy arrays, one environment, nothing recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import torch

from benchmarks.online.case import LEARNING, SECONDS, Figure, Learning, Measure
from replaylake.datastore.episodes.batch import Batch
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.offline.environments.spaces import from_gymnasium
from replaylake.offline.learning.learner import Learner


def learning(folder: Path, options: Any) -> Iterator[Figure]:
    for case in LEARNING:
        if options.algorithm in (None, case.algorithm):
            env = gymnasium.make(case.env_id)
            learner = made(case, env)
            started = time.perf_counter()
            run(case, env, learner)
            yield Figure(case.workload, time.perf_counter() - started, SECONDS)


def made(case: Learning, env: Any) -> Learner:
    return make_learner(
        case.algorithm,
        from_gymnasium(env.observation_space),
        from_gymnasium(env.action_space),
        options=options_of(case),
        seed=0,
        discount=case.discount,
    )


def options_of(case: Learning) -> dict[str, Any]:
    """Return our algorithm's options."""
    if case.algorithm == "dqn":
        return {
            "hidden_sizes": case.sizes,
            "learning_rate": case.learning_rate,
            "target_update_period": case.target_period,
            # SB3's DQN, where ours would take what learns faster by default.
            "double": False,
            "dueling": False,
            "n_step": 1,
            "tau": 1.0,
        }
    rates = ("actor", "critic", "temperature")
    return {
        "hidden_sizes": case.sizes,
        **{f"{name}_learning_rate": case.learning_rate for name in rates},
    }


def run(case: Learning, env: Any, learner: Learner) -> None:
    """Take the steps and make the updates."""
    rng = np.random.default_rng(0)
    act = _acting(case, env, learner, rng)
    size = env.observation_space.shape[0]
    actions = np.zeros(case.num_steps, np.int64)
    if case.algorithm == "sac":
        actions = np.zeros((case.num_steps, *env.action_space.shape), np.float32)
    observations = np.zeros((case.num_steps, size), np.float32)
    next_observations = np.zeros_like(observations)
    rewards, discounts = (np.zeros(case.num_steps, np.float32) for _ in range(2))
    weights = torch.ones(case.batch_size)
    observation, _ = env.reset(seed=0)
    for step in range(case.num_steps):
        action = act(observation, step)
        after, reward, terminated, truncated, _ = env.step(action)
        observations[step], actions[step], rewards[step] = observation, action, reward
        next_observations[step], discounts[step] = after, 0.0 if terminated else case.discount
        observation = env.reset()[0] if terminated or truncated else after
        if step < case.learning_starts:
            continue
        rows = rng.integers(0, step + 1, case.batch_size)
        update = learner.update(
            Batch(
                observations=torch.from_numpy(observations[rows]),
                actions=torch.from_numpy(actions[rows]),
                rewards=torch.from_numpy(rewards[rows]),
                discounts=torch.from_numpy(discounts[rows]),
                next_observations=torch.from_numpy(next_observations[rows]),
                behavior_log_probs=None,
                weights=weights,
                keys=None,
            )
        )
        for value in update.metrics.values():
            float(value)


def _acting(case: Learning, env: Any, learner: Any, rng: np.random.Generator) -> Any:
    """Return what chooses an action, by the learner's own network."""
    networks = learner._networks

    @torch.no_grad()
    def by_values(observation: Any, step: int) -> int:
        epsilon = max(0.05, 1 - 0.95 * step / case.explore_steps)
        if rng.random() < epsilon:
            return int(rng.integers(env.action_space.n))
        return int(networks["q"](torch.from_numpy(observation[None])).argmax())

    @torch.no_grad()
    def by_policy(observation: Any, step: int) -> Any:
        if step < case.learning_starts:
            return env.action_space.sample()
        means, log_stds = networks["policy"](torch.from_numpy(observation[None]))
        u = means + log_stds.exp() * torch.randn_like(means)
        return env.action_space.high * torch.tanh(u)[0].numpy()

    return by_values if case.algorithm == "dqn" else by_policy


KINDS: Final[Mapping[str, Measure]] = {"learning": learning}
