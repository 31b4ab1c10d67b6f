"""Writer actor: writes, on the driver's node, for workers on nodes that do not see the lake."""

from __future__ import annotations

from dataclasses import replace

from replaylake.datastore.errors import FailedInPassing
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.online.collecting.shipment import Shipment


class ShipmentWriter:
    """Turns shipments of episodes into shipments of durable shards; keeps nothing in between."""

    def __init__(self, lake: str, dataset: str) -> None:
        """Keep the names; nothing can fail before `write`, whose errors reach the driver whole."""
        self._lake = lake
        self._name = dataset
        self._dataset: Dataset | None = None

    def write(self, shipment: Shipment) -> Shipment:
        """Write what a worker handed over, and return its shipment as if it had written itself.

        Where the storage refuses, what is returned says so in `trouble` and holds nothing else.
        Raises: EpisodeInvalid, SchemaMismatch.
        """
        if self._dataset is None:
            self._dataset = open_lake(self._lake).dataset(self._name)
        try:
            written = self._dataset.write(shipment.pieces)
        except FailedInPassing as error:
            return Shipment(shipment.worker, trouble=str(error))
        return replace(shipment, pieces=(), written=written)
