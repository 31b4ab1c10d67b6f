"""Node worker: a shipping worker as an actor of Ray's, on whichever node it is."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from replaylake.online.collecting.shipment import Order, Shipment, ShippingWorker
from replaylake.online.pools.nodes import here


class NodeWorker(ShippingWorker):
    """A shipping worker that writes only where its node was seen to see the lake."""

    def __init__(self, order: Order, seeing: frozenset[str] | None) -> None:
        """Keep the order. seeing: Ray's ids of those nodes; None if all are this machine."""
        sees = seeing is None or here() in seeing
        super().__init__(replace(order, records=order.records and sees))
        self._answered_at: float | None = None

    def ship(self, *args: Any, **kwargs: Any) -> Shipment:
        """See ShippingWorker; the time since the last answer is what it waited to be asked."""
        asked_at = time.perf_counter()
        shipment = super().ship(*args, **kwargs)
        if self._answered_at is not None:
            shipment.timings.add("worker_wait", asked_at - self._answered_at)
        self._answered_at = time.perf_counter()
        return shipment
