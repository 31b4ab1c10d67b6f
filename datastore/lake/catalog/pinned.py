"""Pinned: the lake as SQL sees it with some datasets at other versions, or under further names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from replaylake.datastore.errors import NameRefused, QueryRefused
from replaylake.datastore.lake.catalog import relations
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.names import check_dataset_name, parse_snapshot
from replaylake.datastore.storage.table.table import TableSnapshot

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake


class Pinned:
    """A catalogue for queries, in which `at` says what a name stands for.

    A value is a version or a tag of the dataset of that name, or `OTHER@VERSION`, `OTHER@TAG`: then
    the name is a further one, and a query can set two versions side by side.

    Raises: NotFound, NameRefused.
    """

    def __init__(self, lake: Lake, at: Mapping[str, str | int]) -> None:
        self._lake = lake
        self._snapshots = {name: _snapshot(lake, name, value) for name, value in at.items()}

    def datasets(self) -> list[str]:
        """Return the names of all datasets, and the further ones."""
        return sorted({*self._lake.datasets(), *self._snapshots})

    def table(self, dataset: str, view: str) -> TableSnapshot | None:
        """Return the files behind a view. Raises: NotFound; QueryRefused for what is not pinned."""
        if (pinned := self._snapshots.get(dataset)) is None:
            return self._lake.table(dataset, view)
        if view in ("decisions", "rewards", "received", "quarantine"):
            raise QueryRefused(
                f"{dataset}.{view}: found {dataset} pinned at version {pinned.version}, which is "
                "one of its steps: decisions, rewards, received and quarantine are tables of "
                f"their own and have other versions. Leave {dataset} out of `at` (--at), or ask "
                "for the two apart."
            )
        return pinned.table

    def relation(self, name: str) -> pa.Table | None:
        """Return a lake-wide relation; `datasets` and `shards` show what is pinned."""
        if name not in ("datasets", "shards"):
            return self._lake.relation(name)
        snapshots = {
            dataset: self._snapshots.get(dataset) or self._lake.dataset(dataset).snapshot()
            for dataset in self.datasets()
        }
        if name == "datasets":
            return relations.datasets(snapshots, self._lake.tags)
        return relations.shards(snapshots)


def _snapshot(lake: Lake, name: str, value: str | int) -> Snapshot:
    check_dataset_name(name)
    if not isinstance(value, str) or "@" not in value:
        return lake.snapshot(f"{name}@{value}")
    dataset, _ = parse_snapshot(value)
    if dataset != name and lake.dataset(name).exists():
        raise NameRefused(
            f"at {name}={value}: found a dataset {name} in the lake, expected a further name for "
            f"{dataset}. Choose another, such as before={value}."
        )
    return lake.snapshot(value)
