"""Collection: the loop of a rollout's driver, from asking workers to committing what they made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from replaylake.datastore.errors import FailedInPassing
from replaylake.online.committer import Committer
from replaylake.online.pool import WorkerLost, WorkerPool
from replaylake.online.shipment import Shipment

# Workers' shards are committed in groups, ten times a second at most.
GROUP_INTERVAL_S: Final = 0.1
# From one try to the next while the store refuses.
_RETRY_S: Final = 0.5


def collect(
    pool: WorkerPool,
    flush_steps: int,
    committer: Committer,
    on_shipment: Callable[[Shipment], None],
    pauses: Pauses,
) -> None:
    """Run the workers until their orders are done, committing as shipments arrive."""
    for worker in range(pool.size):
        pool.ask(worker, flush_steps)
    working = set(range(pool.size))
    while working:
        answer = pool.receive(GROUP_INTERVAL_S)
        if answer is None:
            with pauses.where_refused():
                committer.commit_if_due()
        elif isinstance(answer, WorkerLost):
            # Its replacement does again what was not handed over.
            pool.ask(answer.worker, flush_steps)
        elif answer.trouble is not None:
            pauses.wait(f"worker {answer.worker}", answer.trouble)
            pool.ask(answer.worker, flush_steps)
        else:
            pauses.end(f"worker {answer.worker}")
            if answer.exhausted:
                working.discard(answer.worker)
            else:
                # Asked for the next before this one is handled: the worker does not wait.
                pool.ask(answer.worker, flush_steps)
            if answer.written is not None:
                with pauses.where_refused():
                    committer.add(answer.written)
            on_shipment(answer)
    while committer.is_behind:
        with pauses.where_refused():
            committer.flush()


class Pauses:
    """Waits where the store refuses, and says so once, until everybody is served again."""

    def __init__(self, on_trouble: Callable[[str], None] | None) -> None:
        self._on_trouble = on_trouble
        self._refused: set[str] = set()

    def wait(self, who: str, trouble: str) -> None:
        """Wait a while, because `who` was refused; say why unless somebody was before."""
        if not self._refused and self._on_trouble is not None:
            self._on_trouble(trouble)
        self._refused.add(who)
        time.sleep(_RETRY_S)

    def end(self, who: str) -> None:
        """Take note that `who` was not refused."""
        self._refused.discard(who)

    @contextmanager
    def where_refused(self) -> Iterator[None]:
        """Wait if the store refuses: the committer keeps what it could not commit."""
        try:
            yield
        except FailedInPassing as error:
            self.wait("committer", str(error))
        else:
            self.end("committer")
