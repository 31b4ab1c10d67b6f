"""Ray workers: rollout workers as Ray actors. The only file that starts Ray for a rollout.

Ray is imported when the workers are made, because it takes a second and most runs need none of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from replaylake.datastore.errors import ReplayLakeError, RolloutFailed
from replaylake.offline import local_ray
from replaylake.online.shipment import Order, Shipment, ShippingWorker


class RayWorkers:
    """One actor an order, in a Ray of this process's own or the one that it is connected to."""

    def __init__(self, orders: Sequence[Order]) -> None:
        """Start Ray where none runs, and the actors. Raises: ExtraMissing, RolloutFailed."""
        self._ray = import_ray()
        self._owns_ray = not self._ray.is_initialized()
        self._actors: list[Any] = []
        try:
            if self._owns_ray:
                self._start(len(orders))
            actor = self._ray.remote(num_cpus=1)(ShippingWorker)
            self._actors += [actor.remote(order) for order in orders]
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def shipments(self, interval_s: float) -> Iterator[Shipment | None]:
        """Yield what the workers hand over, and None whenever nothing came for `interval_s`.

        Raises: what a worker raised; RolloutFailed if one died.
        """
        pending = {actor.ship.remote(): i for i, actor in enumerate(self._actors)}
        while pending:
            ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=interval_s)
            if not ready:
                yield None
            for reference in ready:
                worker = pending.pop(reference)
                shipment = self._received(reference, worker)
                if not shipment.exhausted:
                    # Asked for the next before this one is handled: the worker does not wait.
                    pending[self._actors[worker].ship.remote()] = worker
                yield shipment

    def _start(self, num_cpus: int) -> None:
        try:
            self._ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        except (RuntimeError, OSError, ValueError) as error:
            raise RolloutFailed(
                f"Ray: found {error}, expected it to start on this machine. Run again with "
                "--env-runner local, which needs no Ray."
            ) from error

    def _stop(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._owns_ray:
            self._ray.shutdown()

    def _received(self, reference: Any, worker: int) -> Shipment:
        exceptions = self._ray.exceptions
        try:
            shipment: Shipment = self._ray.get(reference)
        except exceptions.RayTaskError as error:
            # The worker's own error, without the remote traceback that Ray puts into its message.
            if isinstance(error.cause, ReplayLakeError):
                raise error.cause from error
            raise RolloutFailed(
                f"rollout worker {worker}: found {type(error.cause).__name__}: {error.cause}, "
                "expected episodes. Run with --env-runner local for the traceback."
            ) from error
        except exceptions.RayError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise RolloutFailed(
                f"rollout worker {worker}: its process is gone ({reason}), expected episodes. "
                "Check memory and the environment's native code; --env-runner local shows a crash."
            ) from error
        return shipment


def import_ray() -> Any:
    """Return the module, its environment set before it is first read. Raises: ExtraMissing."""
    return local_ray.import_ray(
        "rollout workers: found no ray, expected it for --workers 1 or more, and none for "
        "--env-runner local"
    )
