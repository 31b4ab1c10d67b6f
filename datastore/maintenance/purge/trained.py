"""Trained: which policies learned from some episodes, by running what each was trained on."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.delete import select_episodes


def trained_on(lake: Lake, dataset: str, episodes: pa.Array) -> dict[str, int | None]:
    """Return the policies whose training selected some of the episodes, and how many of them.

    None stands for a policy whose version of the dataset can be read no more: it may have. Cost: a
    scan for each version and condition that some policy was trained with.
    """
    counts: dict[tuple[int, str | None], int | None] = {}
    found: dict[str, int | None] = {}
    # A deleted version may still be served somewhere, from a package of its own.
    for (policy, policy_version), lineage in lake.registry.lineages(deleted=True).items():
        for selection in lineage.get("datasets", ()):
            if selection["dataset"] != dataset:
                continue
            key = (int(selection["version"]), selection.get("where"))
            if key not in counts:
                counts[key] = _num_selected(lake, dataset, key, episodes)
            if counts[key] != 0:
                found[f"{policy}:{policy_version}"] = counts[key]
    return found


def _num_selected(
    lake: Lake, dataset: str, key: tuple[int, str | None], episodes: pa.Array
) -> int | None:
    version, where = key
    try:
        snapshot = lake.dataset(dataset).snapshot(version).table
        selected = select_episodes(snapshot, where or f"{EPISODE_ID} IS NOT NULL")
    except ReplayLakeError:
        return None
    return pc.sum(pc.is_in(selected, value_set=episodes)).as_py() or 0
