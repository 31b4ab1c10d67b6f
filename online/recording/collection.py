"""Collection: the loop of a rollout's driver, from asking workers to recording what they made."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from replaylake.online.collecting.rollout_batch import RolloutBatch
from replaylake.online.pools.pool import WorkerLost, WorkerPool
from replaylake.online.recording.episode_committer import EpisodeCommitter
from replaylake.online.recording.storage_retry import RETRY_S, StorageRetry

# Workers' shards are committed in groups, ten times a second at most.
GROUP_INTERVAL_S: Final = 0.1
# From one look to the next at a recorder that cannot take more now.
_LOOK_S: Final = 0.05


def collect(
    pool: WorkerPool,
    flush_steps: int,
    recorder: EpisodeCommitter,
    storage_retry: StorageRetry,
    on_shipment: Callable[[RolloutBatch], None],
) -> None:
    """Run the workers until their orders are done, and return when all of it is committed."""
    for worker in range(pool.size):
        pool.request_steps(worker, flush_steps)
    working = set(range(pool.size))
    while working:
        _wait_for(recorder, storage_retry)
        answer = pool.receive(GROUP_INTERVAL_S)
        if answer is None:
            continue
        if isinstance(answer, WorkerLost):
            # Its replacement does again what was not handed over.
            pool.request_steps(answer.worker, flush_steps)
            continue
        storage_retry.set_blocked(f"worker {answer.worker}", answer.blocked_reason)
        if answer.blocked_reason is not None:
            time.sleep(RETRY_S)
        if answer.exhausted:
            working.discard(answer.worker)
        else:
            # Asked for the next before this one is handled: the worker does not wait.
            pool.request_steps(answer.worker, flush_steps)
        if answer.written is not None:
            recorder.add(answer.written)
        if answer.blocked_reason is None:
            on_shipment(answer)
    while not recorder.flush(GROUP_INTERVAL_S):
        storage_retry.set_blocked("commit", recorder.blocked_reason)
    storage_retry.set_blocked("commit", None)


def _wait_for(recorder: EpisodeCommitter, storage_retry: StorageRetry) -> None:
    """Wait as long as the store refuses, or is behind: nothing more is to be collected then."""
    while recorder.blocked_reason is not None or recorder.is_behind:
        storage_retry.set_blocked("commit", recorder.blocked_reason)
        time.sleep(_LOOK_S)
    storage_retry.set_blocked("commit", None)
