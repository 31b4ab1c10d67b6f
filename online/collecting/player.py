"""Player: an agent's part in a game, as it is collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Array, as_batch, concatenate
from replaylake.datastore.errors import RolloutError
from replaylake.offline.environments.games import Outcome
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.step_buffer import POLICY_STATE, SEED, WORKER


@dataclass
class Player:
    """An agent in a game, and its steps that were not taken: an entry a step in each list.

    rewards is one shorter than the others while an action's outcome is not known. carried: what was
    paid before the first action. ticks: of the game's clock. states: what is recorded of the
    policy's, empty where nothing is.
    """

    agent: str
    rng: np.random.Generator
    observation: Any
    mask: Array | None
    state: Array | None
    first_step: int = 0
    episode_return: float = 0.0
    pending_reward: float = 0.0
    observations: list[Any] = field(default_factory=list)
    masks: list[Array | None] = field(default_factory=list)
    states: list[Array] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    actors: list[BehaviorPolicy] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the agent is out of the game."""
        return self.terminated or self.truncated

    @property
    def num_steps(self) -> int:
        """Steps whose outcome is known, taken ones too."""
        return self.first_step + len(self.rewards)

    def apply_outcome(self, outcome: Outcome) -> float | None:
        """Write down what the last action led to; return its reward, None if there was no action.

        What is paid before the first action is kept with it.
        """
        reward = outcome.reward + self.pending_reward
        self.observation, self.mask = outcome.observation, outcome.mask
        self.terminated, self.truncated = outcome.terminated, outcome.truncated
        if len(self.rewards) == len(self.actions):
            self.pending_reward = reward
            return None
        self.pending_reward = 0.0
        self.rewards.append(reward)
        self.episode_return += reward
        return reward

    def truncate(self) -> None:
        """End where the game did so without a word to this agent.

        What its last action led to is not known then, nor what it would see.
        """
        self.rewards += [0.0] * (len(self.actions) - len(self.rewards))
        self.truncated, self.observation = True, None

    def take_piece(self, episode_id: str, seed: int, worker: int) -> Episode:
        """Return the steps that are whole and were not taken, at least one, and drop them.

        seed: what the game was reset with. Raises: RolloutError if only some have a mask.
        """
        num = len(self.rewards)
        log_probs = np.array(self.log_probs[:num], np.float32)
        extras = {WORKER: np.full(num, worker, np.int32), SEED: np.full(num, seed, np.int64)}
        if len(self.states[0]):
            extras[POLICY_STATE] = np.stack(self.states[:num])
        piece = Episode(
            episode_id=episode_id,
            agent_id=self.agent,
            observations=concatenate([as_batch(value) for value in self.observations[:num]]),
            actions=np.stack(self.actions[:num]),
            rewards=np.array(self.rewards, np.float64),
            terminated=self.terminated,
            truncated=self.truncated,
            # Also where an action's outcome is not known yet: this is what it was chosen on.
            final_observation=self.observation,
            first_step=self.first_step,
            behavior_log_probs=None if np.isnan(log_probs).all() else log_probs,
            policies=np.array([acting.name for acting in self.actors[:num]], dtype=object),
            policy_versions=np.array([acting.version for acting in self.actors[:num]], np.int64),
            action_masks=stack_masks(self.masks[:num]),
            env_steps=np.array(self.ticks[:num], np.int32),
            extras=extras,
        )
        self.first_step += num
        choices = (self.observations, self.masks, self.states, self.actions, self.log_probs)
        for column in (*choices, self.actors, self.ticks, self.rewards):
            del column[:num]
        return piece


def stack_masks(masks: Sequence[Array | None]) -> Array | None:
    """Stack masks to bool [N, A]; None if there are none.

    Raises: RolloutError if only some are there.
    """
    masks_set = [mask for mask in masks if mask is not None]
    if masks_set and len(masks_set) < len(masks):
        raise RolloutError(
            "rollout: found an action_mask for some observations, expected it for all or none."
        )
    return np.stack(masks_set) if masks_set else None
