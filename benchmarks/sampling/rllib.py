"""RLlib: an episode buffer, which gives a list of episodes of one step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer

from benchmarks.sampling.case import APPEND, STEP, Case, uniform
from benchmarks.sampling.source import NUM_STEPS, Source, source, transitions
from benchmarks.steps import EPISODE_STEPS

OBSERVATIONS = gymnasium.spaces.Box(-np.inf, np.inf, (17,), np.float32)
ACTIONS = gymnasium.spaces.Box(-np.inf, np.inf, (6,), np.float32)


def uniforms(folder: Path) -> Iterator[Case]:
    held = source()
    buffer = EpisodeReplayBuffer(NUM_STEPS)
    for number in range(len(held.rewards)):
        buffer.add(episode(held, number))
    for size in (256, 32):
        yield Case(uniform(size), lambda n=size: drawn(buffer, n), transitions(held, size))


def appends(folder: Path) -> Iterator[Case]:
    """A step is added to its episode, and the episode to the buffer once it ends."""
    held = source(10_000)
    buffer = EpisodeReplayBuffer(100_000)
    compared = transitions(held, 256)
    numbers = itertools.count()
    infos: dict[str, Any] = {}

    def run() -> None:
        for number in range(len(held.rewards)):
            one = SingleAgentEpisode(
                id_=str(next(numbers)), observation_space=OBSERVATIONS, action_space=ACTIONS
            )
            one.add_env_reset(held.observations[number, 0], infos)
            last = held.truncated[number, -1]
            for step in range(EPISODE_STEPS):
                end = step == EPISODE_STEPS - 1
                one.add_env_step(
                    held.observations[number, step + 1],
                    held.actions[number, step],
                    held.rewards[number, step],
                    infos,
                    terminated=bool(end and not last),
                    truncated=bool(end and last),
                )
            buffer.add(one)

    yield Case(APPEND, run, lambda _: compared(drawn(buffer, 256)), STEP, held.rewards.size)


def episode(held: Source, number: int) -> SingleAgentEpisode:
    return SingleAgentEpisode(
        id_=str(number),
        observation_space=OBSERVATIONS,
        action_space=ACTIONS,
        observations=list(held.observations[number]),
        actions=list(held.actions[number]),
        rewards=list(held.rewards[number]),
        terminated=bool(held.terminated[number, -1]),
        truncated=bool(held.truncated[number, -1]),
        len_lookback_buffer=0,
    )


def drawn(buffer: EpisodeReplayBuffer, size: int) -> dict[str, torch.Tensor]:
    found = buffer.sample(num_items=size, n_step=1, sample_episodes=True, to_numpy=True)
    columns = {
        "observations": [one.get_observations(0) for one in found],
        "next_observations": [one.get_observations(-1) for one in found],
        "actions": [one.get_actions(-1) for one in found],
        "rewards": [one.get_rewards(-1) for one in found],
        "terminated": [one.is_terminated for one in found],
    }
    return {name: torch.from_numpy(np.stack(values)) for name, values in columns.items()}


KINDS = {"uniform": uniforms, "append": appends}
