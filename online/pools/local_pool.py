"""Local pool: rollout workers in this process and without Ray."""

from __future__ import annotations

from collections.abc import Sequence

from replaylake.datastore.lake.runs.timings import Timings
from replaylake.online.collecting.behavior_policy import BehaviorPolicies
from replaylake.online.collecting.rollout_batch import RecordingWorker, RolloutBatch, WorkerSpec


class LocalPool:
    """A WorkerPool of this process: for debugging and small machines."""

    remarks: tuple[str, ...] = ()

    def __init__(
        self, orders: Sequence[WorkerSpec], *, interval_s: float, with_open: bool = False
    ) -> None:
        """Keep the orders; the work is done in `receive`, one ask after the other.

        interval_s, with_open: of each shipment, see RecordingWorker.collect_batch.
        """
        self._workers = [RecordingWorker(spec) for spec in orders]
        self._interval_s = interval_s
        self._with_open = with_open
        self._requests: dict[int, int] = {}
        self._behavior: list[BehaviorPolicies | None] = [None] * len(orders)

    @property
    def size(self) -> int:
        return len(self._workers)

    def request_steps(self, worker: int, num_steps: int) -> None:
        """Let a worker that owes no answer collect so many steps and hand them over."""
        self._requests[worker] = num_steps

    def broadcast(self, policy: BehaviorPolicies) -> None:
        """Let whatever is asked from now on be collected with this policy."""
        self._behavior = [policy] * self.size

    def receive(self, timeout_s: float) -> RolloutBatch | None:
        """Do the first request; None if there is none. Raises: as RecordingWorker.collect_batch."""
        if not self._requests:
            return None
        worker = next(iter(self._requests))
        num_steps = self._requests.pop(worker)
        policy, self._behavior[worker] = self._behavior[worker], None
        return self._workers[worker].collect_batch(
            num_steps, self._interval_s, policy, self._with_open
        )

    def take_timings(self) -> Timings:
        """Return nothing: no worker waits, and no message is sent."""
        return Timings("workers")

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
