"""Lineage of an episode: the versions that hold it, what learned from it, when that served.

episode -> versions and tags of its dataset -> policy versions -> when they answered, into what
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final, Literal

import pyarrow.parquet as pq

from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.errors import NotFoundError, ReplayLakeError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.lineage.lineage import list_ingests
from replaylake.datastore.maintenance.lineage.served_versions import (
    ServedVersion,
    list_served_versions,
)
from replaylake.datastore.query.expressions import reproducible_views
from replaylake.datastore.query.statements import execute
from replaylake.datastore.storage.log.folder import FETCH_BATCH
from replaylake.datastore.storage.log.state import Change, FileEntry
from replaylake.datastore.storage.table.shard import blob_of

HoldsAnswer = Literal["yes", "no", "unknown"]
_UNREADABLE: Final = "its shards are gone, or cannot be read"


@dataclass(frozen=True)
class VersionSpan:
    """Consecutive versions that hold an episode, or of which that is not known."""

    first: int
    last: int
    holds: HoldsAnswer


@dataclass(frozen=True)
class TrainingUse:
    """Whether a policy version was trained on an episode, and how that is known.

    trained: `yes` where its selection has the episode; of a run that followed the dataset, where
    the episode came while it went on (which of those it drew is not kept). deleted: the version is
    no longer there.
    """

    policy: str
    version: int
    trained: HoldsAnswer
    why: str
    deleted: bool
    served: tuple[ServedVersion, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "served": [one.to_json() for one in self.served]}


def trace_episode(lake: Lake, name: str, episode_id: str) -> dict[str, Any]:
    """Trace an episode of a dataset up: its `versions`, `tags`, `ingests` and `policies`.

    policies are those whose training names the dataset, but such as did not have the episode;
    where that cannot be told they are there with `unknown`. Cost: the episode ids of every shard
    that the log still names, and a query for each version and condition that a policy was trained
    with. Raises: NotFoundError if there is no such dataset, or no readable version has the episode.
    """
    dataset = lake.dataset(name)
    dataset.snapshot()  # Raises: NotFoundError, with the advice that goes with it
    spans = list(_spans(dataset, episode_id))
    if not any(span.holds == "yes" for span in spans):
        unknown = sum(span.last - span.first + 1 for span in spans)
        beside = f" ({unknown} versions cannot be read any more)" if unknown else ""
        raise NotFoundError(
            f"dataset {name!r}, episode {episode_id!r}: found in no version of it{beside}, "
            f'expected an id as in {name}.episodes. `replaylake sql "SELECT episode_id FROM '
            f'{name}.episodes"` lists them.'
        )
    first = next(span.first for span in spans if span.holds == "yes")
    return {
        "episode": {"dataset": name, "episode_id": episode_id},
        "versions": [asdict(span) for span in spans],
        "tags": [
            {"tag": tag.name, "version": tag.version, "holds": span.holds}
            for tag in lake.tags.list(name)
            for span in spans
            if span.first <= tag.version <= span.last
        ],
        "ingests": [one for one in list_ingests(dataset, first) if first in one["versions"]],
        "policies": [
            one.to_json() for one in _trace_training(lake, name, episode_id, first, spans)
        ],
    }


def _spans(dataset: Dataset, episode_id: str) -> Iterator[VersionSpan]:
    """Yield the versions that hold the episode or may, joined where they follow each other."""

    def each() -> Iterator[tuple[int, HoldsAnswer]]:
        live: dict[str, HoldsAnswer] = {}
        for version, added, removed in _changes(dataset):
            for path in removed:
                live.pop(path, None)
            for entry in added:
                if (answer := _shard_holds(dataset, entry, episode_id)) != "no":
                    live[entry.path] = answer
            paths = set(live.values())
            yield version, "yes" if "yes" in paths else "unknown" if paths else "no"

    for answer, group in groupby(each(), key=lambda pair: pair[1]):
        versions = [version for version, _ in group]
        if answer != "no":
            yield VersionSpan(versions[0], versions[-1], answer)


def _changes(dataset: Dataset) -> Iterator[tuple[int, Sequence[FileEntry], Sequence[str]]]:
    """Yield each version that can be read, oldest first: shards that came with it, and that went.

    With the oldest, all of its shards come.
    """
    log = dataset.table.log
    first, newest = log.oldest(), log.newest().version
    yield first, list(log.at(first).files.values()), []
    for start in range(first + 1, newest + 1, FETCH_BATCH):
        versions = range(start, min(start + FETCH_BATCH, newest + 1))
        for version, change in zip(versions, log.folder.read_changes(versions), strict=True):
            change = change or Change(version)  # it expired in this moment
            yield version, change.added, change.removed


def _shard_holds(dataset: Dataset, entry: FileEntry, episode_id: str) -> HoldsAnswer:
    try:
        (path,) = dataset.table.storage.fetch([blob_of(dataset.table.root, entry)])
        # Row groups are skipped by their statistics, and one column is read of the others.
        rows = pq.read_table(path, columns=[EPISODE_ID], filters=[(EPISODE_ID, "==", episode_id)])
    except (ReplayLakeError, OSError):
        return "unknown"
    return "yes" if rows.num_rows else "no"


def _trace_training(
    lake: Lake, name: str, episode_id: str, first: int, spans: Sequence[VersionSpan]
) -> Iterator[TrainingUse]:
    there = lake.registry.lineages()
    answers: dict[str, tuple[HoldsAnswer, str]] = {}
    for (policy, version), lineage in sorted(lake.registry.lineages(deleted=True).items()):
        if lineage.get("datasets") is None:
            all_answers: set[tuple[HoldsAnswer, str]] = {
                ("unknown", "its lineage names no training episodes")
            }
        else:
            all_answers = set()
            for selection in lineage["datasets"]:
                if selection["dataset"] == name:
                    key = repr([selection.get(k) for k in ("version", "since", "where")])
                    key += repr(selection.get("where_steps"))
                    if key not in answers:
                        answers[key] = _selects(lake, selection, episode_id, first, spans)
                    all_answers.add(answers[key])
        # One selection that has it is enough, whatever is not known of others.
        trained = sorted(one for one in all_answers if one[0] != "no")
        if trained:
            answer, why = trained[-1]
            yield TrainingUse(
                policy,
                version,
                answer,
                why,
                deleted=(policy, version) not in there,
                served=tuple(list_served_versions(lake, policy, [version])),
            )


def _selects(
    lake: Lake,
    selection: Mapping[str, Any],
    episode_id: str,
    first: int,
    spans: Sequence[VersionSpan],
) -> tuple[HoldsAnswer, str]:
    """Evaluate a stored selection for one episode."""
    name, version = selection["dataset"], int(selection["version"])
    if (since := selection.get("since")) is not None:
        if any(span.holds == "unknown" for span in spans):
            return "unknown", f"the run followed {name} from version {since} to {version}"
        came = int(since) < first <= version
        return "yes" if came else "no", f"came while the run followed {name}@{since} to {version}"
    try:
        answer = _is_selected_by_query(lake, selection, episode_id)
    except ReplayLakeError:
        purge = lake.purges.find_breaking(name, version)
        by = _UNREADABLE if purge is None else f"purge {purge.id} took shards out of it"
        return "unknown", f"of {name}@{version}, which it was trained on, {by}"
    condition = selection.get("where") or "all episodes"
    return ("yes" if answer else "no"), f"in {name}@{version}, {condition}"


def _is_selected_by_query(lake: Lake, selection: Mapping[str, Any], episode_id: str) -> bool:
    snapshot = lake.dataset(selection["dataset"]).snapshot(int(selection["version"]))
    key = {"id": episode_id}
    with reproducible_views(snapshot.table) as connection:
        where = selection.get("where") or "true"
        query = f"SELECT 1 FROM episodes WHERE ({where}) AND {EPISODE_ID} = $id LIMIT 1"
        if not execute(connection, query, key).num_rows:
            return False
        where_steps = selection.get("where_steps") or "true"
        query = f"SELECT 1 FROM steps WHERE ({where_steps}) AND {EPISODE_ID} = $id LIMIT 1"
        return bool(execute(connection, query, key).num_rows)
