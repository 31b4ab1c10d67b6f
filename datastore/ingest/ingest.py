"""Ingest: foreign files into a dataset, checked at the door, once however often they are sent.

The source is read twice: first to check every episode and to find the spaces, then to commit. Small
sources stay in memory in between. Nothing is written before the first reading is over, so a source
that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.dataset import Commit, Dataset
from replaylake.datastore.episode import Episode
from replaylake.datastore.errors import AlreadyExists, ConfigInvalid
from replaylake.datastore.formats.detect import AUTO, find_format
from replaylake.datastore.formats.format import ReadOptions
from replaylake.datastore.formats.source import Source, find_source
from replaylake.datastore.ingest.door import Door
from replaylake.datastore.ingest.earlier import (
    DIGITS,
    is_complete,
    notes_of_grown,
    part_of,
    producer_of,
)
from replaylake.datastore.ingest.inspection import (
    ABORT,
    REJECT,
    Inspection,
    OnProgress,
    Progress,
    num_bytes,
)
from replaylake.datastore.ingest.receipt import Counts, Receipt
from replaylake.datastore.lake import Lake
from replaylake.datastore.spaces import Space
from replaylake.datastore.writer.accounting import LeftOut

# One shard of the store (64 to 256 MB); a kill loses at most this much work.
_COMMIT_STEPS: Final = 1_000_000
# As many bytes end a commit too, as memory holds several times as much meanwhile: frames weigh a
# hundred times what numbers do.
_COMMIT_BYTES: Final = 96 << 20


def ingest(
    lake: Lake,
    sources: Sequence[Path | str],
    dataset: str,
    *,
    format: str = AUTO,
    mapping: Mapping[str, str] | None = None,
    observation_space: Space | None = None,
    action_space: Space | None = None,
    time_limit: int | None = None,
    on_invalid: str = ABORT,
    on_progress: OnProgress | None = None,
    commit_steps: int = _COMMIT_STEPS,
) -> Receipt:
    """Read foreign files into a dataset, which is made where it does not exist.

    Args:
        lake: where the dataset is.
        sources: files, or folders that are walked.
        dataset: its name.
        format: `auto`, or a name from `formats.detect.FORMATS`.
        mapping: ours=theirs, for columns that no alias names; see `formats.format.ReadOptions`.
        observation_space: the environment's, if one is given: values outside are refused.
        action_space: likewise.
        time_limit: episodes of exactly this many steps were truncated, whatever the log says.
        on_invalid: `abort` refuses the whole source for one invalid episode, `reject` leaves that
            episode out and lists it in the receipt.
        on_progress: called as reading proceeds and after each commit is acknowledged.
        commit_steps: steps a commit, at least; whole episodes.

    Raises: NotFound, SourceInvalid, EpisodeInvalid, SchemaMismatch, ConfigInvalid, NameRefused; in
    each case nothing was committed, except SourceInvalid for a file that changed in the middle.
    """
    if on_invalid not in (ABORT, REJECT):
        raise ConfigInvalid(f"on_invalid: found {on_invalid!r}, expected {ABORT!r} or {REJECT!r}.")
    if (observation_space is None) != (action_space is None):
        raise ConfigInvalid("ingest: expected both spaces of an environment, or neither.")
    handle = lake.dataset(dataset)
    source = find_source(sources)
    history = handle.history() if handle.exists() else []
    whole = part_of(source, history, dataset)
    options = ReadOptions(dict(mapping or {}), time_limit)
    known = find_format(format, source.files)
    reading = known.read(source.files, options)
    spaces = None
    if observation_space is not None and action_space is not None:
        spaces = (observation_space, action_space)
    spec = handle.spec if handle.exists() else None
    door = Door(spec, spaces)
    inspection = Inspection(reading, door, on_invalid, on_progress)
    inspection.run()
    if inspection.num_episodes:
        inspection.spec()  # refuses what no table can hold, before anything is made
    again = [Inspection(known.read([f], options), door, REJECT, None) for f in source.repeated]
    for inspected in again:
        inspected.run()
        inspection.tally.join(inspected.tally)
    job = _Job(handle, source, known.name, options, commit_steps, on_progress)
    num_repeated = sum(inspected.num_episodes for inspected in again)
    num_repeated_steps = sum(inspected.num_steps for inspected in again)
    job.repeated = LeftOut(0, 0, num_repeated, num_repeated_steps)
    lake.registry.create()  # the handle may be of a lake not made yet: a refused source makes none
    if whole is None:
        job.run(inspection)
    else:
        job.already_present = (inspection.num_episodes, inspection.num_steps)
        job.notes.append(f"nothing to add: version {whole['version']} has these files, with others")
    num_episodes, num_steps = job.already_present
    num_episodes += num_repeated
    num_steps += num_repeated_steps
    tally = inspection.tally
    grown = [] if job.version is None else notes_of_grown(source, history)
    return Receipt(
        dataset=dataset,
        version=job.version,
        source=tuple(map(str, sources)),
        num_files=len(source.files) + len(source.repeated),
        content_hash=source.content_hash,
        format=known.name,
        episodes=Counts(job.num_episodes, tally.num_episodes, num_episodes),
        steps=Counts(job.num_steps, tally.num_steps, num_steps),
        num_shards=job.num_shards,
        num_bytes=job.num_bytes,
        reasons=tally.reasons(),
        rejected=tuple(tally.shown),
        notes=(*source.notes, *reading.notes, *grown, *job.notes),
        renames=dict(reading.renames),
    )


class _Job:
    """The second reading: commits what is not there yet."""

    def __init__(
        self,
        dataset: Dataset,
        source: Source,
        format: str,
        options: ReadOptions,
        commit_steps: int,
        on_progress: OnProgress | None,
    ) -> None:
        self._dataset = dataset
        self._source = source
        self._options: dict[str, Any] = {
            "format": format,
            "mapping": dict(options.mapping),
            "time_limit": options.time_limit,
        }
        self._producer = producer_of(source)
        self._prefix = f"{source.content_hash[:DIGITS]}/"
        self._sequence = 0
        self._present: set[tuple[str, str]] = set()
        self._commit_steps = commit_steps
        self._on_progress = on_progress
        self.version: int | None = None
        self.num_episodes = 0
        self.num_steps = 0
        self.num_shards = 0
        self.num_bytes = 0
        self.already_present = (0, 0)
        self.repeated = LeftOut()
        self._told = LeftOut()
        self.notes: list[str] = []

    def run(self, inspection: Inspection) -> None:
        """Commit in chunks of whole episodes, each under the next sequence of this source."""
        if inspection.num_episodes == 0:
            self.notes.append("nothing to commit: no valid episode in the source")
            return
        if (last := self._catch_up()) is not None:
            self._note_earlier(last)
            # What was deleted from an ingest that ended stays deleted: its rows are not looked at.
            if is_complete(last):
                self.already_present = (inspection.num_episodes, inspection.num_steps)
                return
        self._create(inspection)
        batch: list[Episode] = []
        num_steps = num_held = 0
        for episode in inspection.episodes():
            own = replace(episode, episode_id=f"{self._prefix}{episode.episode_id}")
            if (own.episode_id, own.agent_id) in self._present:
                self._skip([own])
                continue
            batch.append(own)
            num_steps += len(own)
            num_held += num_bytes(own)
            if num_steps >= self._commit_steps or num_held >= _COMMIT_BYTES:
                self._commit(batch, inspection)
                batch, num_steps, num_held = [], 0, 0
        self._commit(batch, inspection)

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
        rows = snapshot.sql(
            "SELECT DISTINCT episode_id, agent_id FROM steps "
            "WHERE starts_with(episode_id, $prefix)",
            {"prefix": self._prefix},
        )
        columns = [rows.column(name).to_pylist() for name in ("episode_id", "agent_id")]
        self._present = set(zip(*columns, strict=True))
        return last

    def _commit(self, batch: list[Episode], inspection: Inspection) -> None:
        while batch:
            through = self.num_episodes + self.already_present[0] + len(batch)
            info = {
                "source": self._source.content_hash,
                "read_as": self._options,
                "num_through": through,
                "num_of": inspection.num_episodes,
            }
            if self._sequence == 0:
                info["source_files"] = [f.sha256[:DIGITS] for f in self._source.files]
                info["source_names"] = [f.name for f in self._source.files]
            tally, present = inspection.tally, self.already_present
            left_out = LeftOut(tally.num_episodes, tally.num_steps, *present) + self.repeated
            commit = self._dataset.append(
                batch,
                producer=self._producer,
                sequence=self._sequence,
                info=info,
                left_out=left_out - self._told,
            )
            if not commit.already_present:
                self._told = left_out
                self._count(commit)
                self._report(commit.version, inspection.num_steps)
                return
            # Another ingest of the same content is running and took this sequence, perhaps for
            # other episodes: see what is there now, and try again with what is not.
            self._catch_up(is_contested=True)
            here = [e for e in batch if (e.episode_id, e.agent_id) in self._present]
            batch = [e for e in batch if (e.episode_id, e.agent_id) not in self._present]
            self._skip(here)

    def _count(self, commit: Commit) -> None:
        self._sequence += 1
        self.version = commit.version
        self.num_episodes += commit.num_episodes
        self.num_steps += commit.num_steps
        self.num_shards += commit.num_shards
        self.num_bytes += commit.num_bytes

    def _report(self, version: int, total_steps: int) -> None:
        if self._on_progress is not None:
            num_episodes = self.num_episodes + self.already_present[0]
            num_steps = self.num_steps + self.already_present[1]
            self._on_progress(Progress("commit", num_episodes, num_steps, total_steps, version))

    def _skip(self, episodes: Sequence[Episode]) -> None:
        num_episodes, num_steps = self.already_present
        self.already_present = (num_episodes + len(episodes), num_steps + sum(map(len, episodes)))

    def _create(self, inspection: Inspection) -> None:
        if self._dataset.exists():
            return
        spec = inspection.spec()
        try:
            self._dataset.create(
                spec.observation_space, spec.action_space, mask_size=spec.mask_size
            )
        except AlreadyExists:
            # Another writer was first; `append` checks against its spaces.
            return

    def _note_earlier(self, last: Mapping[str, Any]) -> None:
        if is_complete(last):
            self.notes.append("already ingested: the dataset has this content, nothing was added")
        else:
            self.notes.append("an earlier ingest of this content was cut short: continued")
        if last.get("read_as") != self._options:
            self.notes.append(
                f"this content is in the dataset as it was read before ({last.get('read_as')}); to "
                "read it in another way, ingest it into a new dataset"
            )
