"""Decisions and rewards into the lake: written before they are answered, committed soon after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from replaylake.datastore.dataset import Dataset
from replaylake.datastore.policies.policy import Act, PolicySpec
from replaylake.datastore.sessions.decision_id import DecisionId
from replaylake.datastore.sessions.decisions import (
    DEFAULT_WINDOW_S,
    decisions_encoder,
    ensure_feedback_tables,
    recover_feedback,
    rewards_encoder,
)
from replaylake.datastore.sessions.journal import Journal, JournalConfig
from replaylake.datastore.sessions.segments import Recovered
from replaylake.datastore.spaces import Array
from replaylake.serve.bodies import ActRequest, FeedbackRequest


@dataclass(frozen=True)
class Decided:
    """B decisions as they were taken, ready to be logged and answered."""

    asked: ActRequest
    act: Act
    ids: Sequence[str]
    timestamp: int
    policy: str
    policy_version: int
    deterministic: bool


class DecisionLog:
    """One worker's way into a dataset's decisions and rewards."""

    def __init__(
        self,
        dataset: Dataset,
        spec: PolicySpec,
        worker: str,
        *,
        window_s: float = DEFAULT_WINDOW_S,
        config: JournalConfig | None = None,
    ) -> None:
        """Create what is absent, commit what killed servers left, and open this worker's journals.

        Raises: SchemaMismatch if the dataset's spaces are not the policy's.
        """
        ensure_feedback_tables(dataset, spec.observation_space, spec.action_space, spec.encoding)
        self.dataset = dataset
        self.window_s = window_s
        self.takes_masks = dataset.spec.mask_size is not None
        self.recovered: Recovered = recover_feedback(dataset)
        self.decisions = Journal(
            dataset.decisions, decisions_encoder(dataset), worker=worker, config=config
        )
        self.rewards = Journal(
            dataset.rewards, rewards_encoder(dataset), worker=worker, config=config
        )

    @property
    def failure(self) -> str | None:
        """Why nothing more can be logged, or None."""
        return self.decisions.failure or self.rewards.failure

    def write_decisions(self, decided: Decided) -> None:
        """Write decisions; on return a killed process does not lose them. Raises: StorageFailed."""
        self.decisions.append([orjson.dumps(record) for record in _records(decided)])

    def write_reward(self, feedback: FeedbackRequest, timestamp: int) -> None:
        """Write one reward, received at `timestamp` (us). Raises: StorageFailed."""
        record = {
            "decision_id": feedback.decision_id,
            "timestamp": timestamp,
            "reward": feedback.reward,
            "terminated": feedback.terminated,
            "truncated": feedback.truncated,
            "final_observation": feedback.final_observation,
        }
        self.rewards.append([orjson.dumps(record)])

    def is_too_old(self, decision: DecisionId, timestamp: int) -> bool:
        """Whether the reward window of a decision has closed at `timestamp` (us)."""
        return timestamp - decision.timestamp > self.window_s * 1e6

    def close(self) -> None:
        """Commit everything. Raises: ReplayLakeError; the next start then commits what is left."""
        try:
            self.decisions.close()
        finally:
            self.rewards.close()


class Clock:
    """Microseconds since 1970, UTC, never going back: a worker's ids sort in the order of issue."""

    def __init__(self) -> None:
        self._last = 0

    def now(self) -> int:
        """Return the time."""
        self._last = max(self._last, time.time_ns() // 1000)
        return self._last


def _records(decided: Decided) -> list[dict[str, Any]]:
    asked, act = decided.asked, decided.act
    # JSON numbers as Python floats come back bit for bit, float32 included.
    log_probs = json_log_probs(act.log_probs, len(decided.ids))
    masks = [None] * len(decided.ids) if asked.action_mask is None else asked.action_mask.tolist()
    rows = zip(
        decided.ids,
        asked.request_ids,
        asked.episode_ids,
        asked.raw,
        act.actions.tolist(),
        log_probs,
        masks,
        strict=True,
    )
    return [
        {
            "decision_id": decision_id,
            "request_id": request_id,
            "episode_id": episode_id,
            "timestamp": decided.timestamp,
            "policy": decided.policy,
            "policy_version": decided.policy_version,
            "observation": observation,
            "action": action,
            "log_prob": log_prob,
            "deterministic": decided.deterministic,
            "action_mask": mask,
        }
        for decision_id, request_id, episode_id, observation, action, log_prob, mask in rows
    ]


def json_log_probs(log_probs: Array | None, num: int) -> list[float | None]:
    """Return one number or None (unknown) for each of `num` actions."""
    if log_probs is None:
        return [None] * num
    return [value if value == value else None for value in log_probs.tolist()]
