"""Commit job: the second reading of an ingest, which commits what is not there yet."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes.episode_columns import TextColumn, as_text_array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import (
    LoggedColumns,
    ReadOptions,
    RejectedEpisode,
)
from replaylake.datastore.interchange.formats.tabular.arrays import Mask
from replaylake.datastore.interchange.ingest.inspection import (
    IngestProgress,
    Inspection,
    OnProgress,
    join_alike,
)
from replaylake.datastore.interchange.ingest.previous_ingests import (
    DIGITS,
    is_complete,
    source_producer,
)
from replaylake.datastore.interchange.ingest.quarantine import QuarantineWriter, make_checks_info
from replaylake.datastore.interchange.ingest.receipt import Counts, RejectionTally
from replaylake.datastore.interchange.sources.source import Source
from replaylake.datastore.lake.commit import Commit, DropCounts, KeyCounts, commit_counts
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.lake.unique_keys import OnConflict
from replaylake.datastore.storage.spans import span

# As many bytes end a commit too, as memory holds several times as much meanwhile: frames weigh a
# hundred times what numbers do.
_COMMIT_BYTES: Final = 96 << 20
_DIGEST: Final = np.dtype([("high", ">u8"), ("low", ">u8")])


class CommitJob:
    """The second reading: commits what is not there yet."""

    def __init__(
        self,
        dataset: Dataset,
        source: Source,
        format: str,
        options: ReadOptions,
        commit_steps: int,
        on_progress: OnProgress | None,
        *,
        readmit: bool = False,
        on_conflict: OnConflict = "set_aside",
    ) -> None:
        self._on_conflict: OnConflict = on_conflict
        self._dataset = dataset
        self._source = source
        self._options: dict[str, Any] = {"format": format, **_changed_options(options)}
        self._producer = source_producer(source)
        self._prefix = f"{source.content_hash[:DIGITS]}/"
        self._sequence = 0
        self._present = _EpisodeSet()
        self._commit_steps = commit_steps
        self._on_progress = on_progress
        self._readmit = readmit
        self.version: int | None = None
        self.num_episodes = 0
        self.num_steps = 0
        self.num_shards = 0
        self.num_bytes = 0
        self.num_quarantined = 0
        # Of steps whose keys were there; and episodes that went through, whatever became of them.
        self.keys = KeyCounts()
        self._num_through = 0
        self.already_present = (0, 0)
        self.deleted_before = (0, 0)
        self.repeated = DropCounts()
        self._reported_drops = DropCounts()
        self.notes: list[str] = []

    def run(self, inspection: Inspection) -> None:
        """Commit in chunks of whole episodes, each under the next sequence of this source.

        What was rejected is in quarantine before the last of them: an ingest that is complete has
        nothing left to do.
        """
        rejected = QuarantineWriter(
            self._dataset,
            producer=self._producer,
            sequence=0,
            prefix=self._prefix,
            readmit=self._readmit,
        )
        if inspection.num_episodes == 0:
            self.notes.append("nothing to commit: no valid episode in the source")
            self._take(rejected, inspection)
            return
        if (last := self._catch_up()) is not None:
            self._refuse_mixture(last)
            self._note_previous(last)
            # What was deleted from an ingest that ended stays deleted: its rows are not looked at.
            if is_complete(last):
                if not self._readmit:
                    self.already_present = (inspection.num_episodes, inspection.num_steps)
                    return
                self._catch_up(is_contested=True)
        self._take(rejected, inspection)

    def count_episodes(self, tally: RejectionTally) -> Counts:
        """Return what became of the source's episodes."""
        present = self.already_present[0] + self.repeated.num_already_present
        return Counts(
            self.num_episodes,
            tally.num_episodes + self.keys.conflicting_episodes,
            present + self.keys.present_episodes,
            self.deleted_before[0],
        )

    def count_steps(self, tally: RejectionTally) -> Counts:
        """Return what became of the source's steps."""
        present = self.already_present[1] + self.repeated.num_already_present_steps
        return Counts(
            self.num_steps,
            tally.num_steps + self.keys.conflicts,
            present + self.keys.present,
            self.deleted_before[1],
        )

    def _take(self, rejected: QuarantineWriter, inspection: Inspection) -> None:
        batch: list[LoggedColumns] = []
        num_steps = num_held = 0
        for item in inspection.iter_found():
            if isinstance(item, RejectedEpisode):
                with span("quarantine") as work:
                    rejected.add(item)
                    work.items = item.num_steps
                continue
            rest = _with_prefix(item, self._prefix)
            step_bytes = max(1.0, rest.num_bytes_per_step())
            while len(rest):
                # What is present does not end a commit, and has to be told apart again after one,
                # as that may have met another ingest of the same content.
                rest = self._skip_first(rest)
                if not len(rest):
                    break
                # Not before another one comes: the last commit has to wait for the quarantine.
                if num_steps >= self._commit_steps or num_held >= _COMMIT_BYTES:
                    self._commit(batch, inspection)
                    batch, num_steps, num_held = [], 0, 0
                    continue
                # Runs of one episode are never parted, or what is present could not be told by
                # its id.
                room = math.ceil((_COMMIT_BYTES - num_held) / step_bytes)
                cut = rest.find_cut(min(self._commit_steps - num_steps, room))
                part = self._without_present(rest.part(0, cut))
                rest = rest.part(cut, len(rest))
                batch.append(part)
                num_steps += part.num_steps
                num_held += math.ceil(part.num_steps * step_bytes)
        reading = {"read_as": self._options, "known_columns": dict(inspection.known_columns)}
        with span("quarantine"):
            self.num_quarantined += rejected.commit(inspection.checks(), reading)
        self._commit(batch, inspection)

    def _skip_first(self, columns: LoggedColumns) -> LoggedColumns:
        """Count the first ones that are present, and return the others behind them."""
        is_present = self._present.find(columns)
        if not len(columns) or not is_present[0]:
            return columns
        num = len(columns) if is_present.all() else int(np.argmin(is_present))
        self._skip(columns.part(0, num))
        return columns.part(num, len(columns))

    def _without_present(self, columns: LoggedColumns) -> LoggedColumns:
        """Count those that are present, and return the others."""
        is_present = self._present.find(columns)
        if not is_present.any():
            return columns
        self._skip(columns.select(is_present))
        return columns.select(~is_present)

    def _catch_up(self, *, is_contested: bool = False) -> Mapping[str, Any] | None:
        """Read from one version what this source has committed; return its last commit, if any.

        The episodes of a complete ingest are looked up only when `is_contested`: when another one
        is committing them at the same time.
        """
        if not self._dataset.exists():
            return None
        snapshot = self._dataset.snapshot()
        earlier = [
            commit
            for commit in self._dataset.history()
            if commit.get("producer") == self._producer and commit["version"] <= snapshot.version
        ]
        if not earlier:
            return None
        last = max(earlier, key=lambda commit: int(commit["sequence"]))
        self._sequence = int(last["sequence"]) + 1
        if is_complete(last) and not is_contested:
            return last
        self._present = _EpisodeSet.read(snapshot, self._prefix)
        return last

    def _commit(self, parts: Sequence[LoggedColumns], inspection: Inspection) -> None:
        # Values of several shapes are joined by nothing; the dataset's are of one.
        with span("assemble"):
            batches = join_alike(parts)
        for batch in batches:
            self._commit_one(batch, inspection)

    def _commit_one(self, batch: LoggedColumns, inspection: Inspection) -> None:
        while len(batch):
            num_episodes = batch.num_whole
            tally, present = inspection.tally, self.already_present
            drops = DropCounts(tally.num_episodes, tally.num_steps, *present) + self.repeated
            info = {
                "source": self._source.content_hash,
                "read_as": self._options,
                "num_through": self._num_through + present[0] + num_episodes,
                "num_of": inspection.num_episodes,
            }
            spec = None if self._dataset.exists() else inspection.spec()
            if (self._dataset.spec if spec is None else spec).unique is None:
                # The runs of an episode that was split are one.
                counts = commit_counts(num_episodes, batch.num_steps, drops - self._reported_drops)
                info |= counts
            if self._sequence == 0:
                info["source_files"] = [f.sha256[:DIGITS] for f in self._source.files]
                info["source_names"] = [f.name for f in self._source.files]
                info |= make_checks_info(inspection.checks())
            commit = self._dataset.append(
                batch,
                producer=self._producer,
                sequence=self._sequence,
                info=info,
                readmit=self._readmit,
                spec=None if spec is None else replace(spec, extras={}),
                drops=drops - self._reported_drops,
                on_conflict=self._on_conflict,
            )
            if not commit.already_present:
                self._reported_drops = drops
                self._count(commit, num_episodes)
                self._report(commit.version, inspection.num_steps)
                return
            # Another ingest of the same content is running and took this sequence, perhaps for
            # other episodes: see what is there now, and try again with what is not.
            self._catch_up(is_contested=True)
            batch = self._without_present(batch)

    def _count(self, commit: Commit, num_episodes: int) -> None:
        self._sequence += 1
        self._num_through += num_episodes
        keys = commit.keys
        self.keys += keys
        self.num_quarantined += commit.num_quarantined
        if commit.num_steps or keys.late_values or keys.replaced or not keys:
            self.version = commit.version
        self.deleted_before = (
            self.deleted_before[0] + commit.num_deleted_before,
            self.deleted_before[1] + commit.num_deleted_before_steps,
        )
        # Those of which no step was new are counted with what is present, or in conflict.
        left_out = commit.num_deleted_before + keys.present_episodes + keys.conflicting_episodes
        self.num_episodes += num_episodes - left_out
        self.num_steps += commit.num_steps
        self.num_shards += commit.num_shards
        self.num_bytes += commit.num_bytes

    def _report(self, version: int, total_steps: int) -> None:
        if self._on_progress is not None:
            num_episodes = self.num_episodes + self.already_present[0] + self.deleted_before[0]
            num_steps = self.num_steps + self.already_present[1] + self.deleted_before[1]
            self._on_progress(
                IngestProgress("commit", num_episodes, num_steps, total_steps, version)
            )

    def _skip(self, columns: LoggedColumns) -> None:
        num_episodes, num_steps = self.already_present
        self.already_present = (num_episodes + columns.num_whole, num_steps + columns.num_steps)

    def _refuse_mixture(self, last: Mapping[str, Any]) -> None:
        """Refuse the same files under other options: what one rejects, the other may commit."""
        before = {name: value for name, value in last.get("read_as", {}).items() if value}
        if before == self._options:
            return
        end = "has them" if is_complete(last) else "was cut short"
        raise SourceInvalidError(
            f"an earlier ingest of these files into {self._dataset.name!r} {end} (version "
            f"{last['version']}) and read them as {before}, found {self._options}, expected the "
            "same options: otherwise episodes would be stored twice, or wrongly be counted as "
            "present. Use the "
            "same options, or ingest into a new dataset."
        )

    def _note_previous(self, last: Mapping[str, Any]) -> None:
        if is_complete(last) and self._readmit:
            self.notes.append(
                "already ingested: of its episodes those are added that the dataset no longer has"
            )
        elif is_complete(last):
            self.notes.append("already ingested: the dataset has this content, nothing was added")
        else:
            self.notes.append("an earlier ingest of this content was cut short: continued")


class _EpisodeSet:
    """Episodes and agents by 128 bits of md5: 16 bytes of memory each, however long their ids.

    Two of 10 million differ in them but for a chance of 1 in 10**25.
    """

    def __init__(self, digests: NDArray[np.void] | None = None) -> None:
        self._digests = np.zeros(0, _DIGEST) if digests is None else np.sort(digests)

    @staticmethod
    def read(snapshot: Snapshot, prefix: str) -> _EpisodeSet:
        """Read those of a version whose ids have a prefix."""
        # Each has a first row, and pieces of it have theirs: fewer rows than to look at all.
        rows = snapshot.sql(
            "SELECT DISTINCT unhex(md5(concat(episode_id, chr(0), agent_id))) AS digest "
            "FROM steps WHERE starts_with(episode_id, $prefix)",
            {"prefix": prefix},
        )
        column = rows.column("digest").combine_chunks().cast(pa.binary(16))
        return _EpisodeSet(np.frombuffer(column.buffers()[1], _DIGEST, len(column)))

    def find(self, columns: LoggedColumns) -> Mask:
        """Return which of some episodes are among them, bool [E]."""
        known = self._digests
        if not len(known):
            return np.zeros(len(columns), np.bool_)
        agents = columns.agent_ids or [""] * len(columns)
        pairs = zip(columns.episode_ids, agents, strict=True)
        digests = np.frombuffer(b"".join(_digest(*pair) for pair in pairs), _DIGEST)
        places = np.minimum(np.searchsorted(known, digests), len(known) - 1)
        return np.asarray(known[places] == digests)


def _digest(episode_id: str, agent_id: str) -> bytes:
    text = f"{episode_id}\0{agent_id}".encode()
    return hashlib.md5(text, usedforsecurity=False).digest()


def _with_prefix(columns: LoggedColumns, prefix: str) -> LoggedColumns:
    return replace(
        columns, episode_ids=TextColumn(as_text_array(columns.episode_ids)).add_prefix(prefix)
    )


def _changed_options(options: ReadOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults, as JSON has them."""
    plain = ReadOptions()
    stated = {f.name: getattr(options, f.name) for f in fields(options)}
    changed = {name: value for name, value in stated.items() if value != getattr(plain, name)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in changed.items()}
