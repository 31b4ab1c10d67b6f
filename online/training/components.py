"""The components of an online run, which run.py puts together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replaylake.datastore.lake.runs.timings import Timings
from replaylake.offline.evaluation.self_play import AgentPolicies
from replaylake.offline.learning.learner import Learner
from replaylake.offline.running.training.policy_selection import PolicySelection
from replaylake.offline.running.training.trainer import Observer
from replaylake.online.pools.pool import WorkerPool
from replaylake.online.recording.feed import Feed
from replaylake.online.recording.storage_retry import StorageRetry
from replaylake.online.training.behavior_source import BehaviorSource
from replaylake.online.training.limiter import RateLimiter
from replaylake.online.training.replay_batches import LearnerBatches


@dataclass(frozen=True)
class Components:
    """What a trainer is made of; measure: judges a policy, higher is better; None: not at all."""

    learner: Learner
    batches: LearnerBatches
    pool: WorkerPool
    feed: Feed
    limiter: RateLimiter
    behavior: BehaviorSource
    selection: PolicySelection
    observer: Observer
    timings: Timings
    storage_retry: StorageRetry
    measure: Callable[[AgentPolicies], float] | None = None
