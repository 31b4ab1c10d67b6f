"""Shipment: what a rollout worker hands to its run's committer, as durable shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from replaylake.datastore.dataset import Dataset, WrittenEpisodes
from replaylake.datastore.lake import open_lake
from replaylake.online.worker import ActingPolicy, RolloutConfig, RolloutWorker


@dataclass(frozen=True)
class Order:
    """What one worker of a run is to collect, and where it goes; may be sent to another process.

    lake: what opens it there, a folder's path or a URL.
    """

    lake: str
    dataset: str
    producer: str
    worker: int
    episodes: range
    acting: ActingPolicy
    config: RolloutConfig


@dataclass(frozen=True)
class Shipment:
    """Whole episodes that one worker finished since its last shipment.

    written is None if none ended; returns has one undiscounted return an episode; exhausted says
    that nothing follows.
    """

    worker: int
    written: WrittenEpisodes | None
    returns: tuple[float, ...]
    exhausted: bool


class ShippingWorker:
    """A rollout worker that writes what it collects; the same class runs in process and in Ray."""

    def __init__(self, order: Order) -> None:
        """Keep the order; nothing can fail before `ship`, whose errors reach the driver whole."""
        self._order = order
        self._worker: RolloutWorker | None = None
        self._dataset: Dataset | None = None

    def set_policy(self, acting: ActingPolicy) -> None:
        """Act with another policy version from the next step on."""
        self._rollout_worker().set_policy(acting)

    def ship(self) -> Shipment:
        """Collect for one flush interval and write the episodes that ended, durably.

        Raises: RolloutFailed, NotFound, EpisodeInvalid, SpaceUnsupported, StorageFailed.
        """
        worker, config = self._rollout_worker(), self._order.config
        episodes = worker.advance(config.flush_steps, config.flush_interval_s)
        if self._dataset is None:
            # Kept, because it reads only what is new in the log.
            self._dataset = open_lake(self._order.lake).dataset(self._order.dataset)
        return Shipment(
            worker=self._order.worker,
            written=self._dataset.write(episodes) if episodes else None,
            returns=tuple(float(episode.rewards.sum()) for episode in episodes),
            exhausted=worker.exhausted,
        )

    def close(self) -> None:
        """Close the environments."""
        if self._worker is not None:
            self._worker.close()

    def _rollout_worker(self) -> RolloutWorker:
        if self._worker is None:
            order = self._order
            self._worker = RolloutWorker(
                order.config,
                iter(order.episodes),
                self._acting(),
                producer=order.producer,
                worker=order.worker,
            )
        return self._worker

    def _acting(self) -> ActingPolicy:
        """Return who acts; on another machine than the driver's the package is copied there."""
        acting = self._order.acting
        if acting.package is None or acting.package.exists():
            return acting
        registry = open_lake(self._order.lake).registry
        return replace(acting, package=registry.resolve(f"{acting.name}:{acting.version}").path)


class LocalWorkers:
    """The same for one order, in this process and without Ray: for debugging and small machines."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._workers = [ShippingWorker(order) for order in orders]

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.close()

    def shipments(self, interval_s: float) -> Iterator[Shipment | None]:
        """Yield what the workers collect, one worker after the other."""
        for worker in self._workers:
            shipment = worker.ship()
            yield shipment
            while not shipment.exhausted:
                shipment = worker.ship()
                yield shipment
