"""Commit job: the second reading of an ingest, which commits what is not there yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from replaylake.datastore.episodes.compatibility import find_spec_mismatch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import AlreadyExistsError, SchemaMismatchError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, RejectedEpisode
from replaylake.datastore.interchange.ingest.inspection import (
    IngestProgress,
    Inspection,
    OnProgress,
    count_whole,
    num_bytes,
)
from replaylake.datastore.interchange.ingest.previous_ingests import (
    DIGITS,
    is_complete,
    source_producer,
)
from replaylake.datastore.interchange.ingest.quarantine import QuarantineWriter, make_checks_info
from replaylake.datastore.interchange.ingest.receipt import Counts, RejectionTally
from replaylake.datastore.interchange.sources.source import Source
from replaylake.datastore.lake.commit import Commit, DropCounts, commit_counts
from replaylake.datastore.lake.dataset import Dataset

# As many bytes end a commit too, as memory holds several times as much meanwhile: frames weigh a
# hundred times what numbers do.
_COMMIT_BYTES: Final = 96 << 20


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
    ) -> None:
        self._dataset = dataset
        self._source = source
        self._options: dict[str, Any] = {"format": format, **_changed_options(options)}
        self._producer = source_producer(source)
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
        self.num_quarantined = 0
        self.already_present = (0, 0)
        self.repeated = DropCounts()
        self._reported_drops = DropCounts()
        self._skipped: tuple[str, str] | None = None
        self.notes: list[str] = []

    def run(self, inspection: Inspection) -> None:
        """Commit in chunks of whole episodes, each under the next sequence of this source.

        What was rejected is in quarantine before the last of them: an ingest that is complete has
        nothing left to do.
        """
        rejected = QuarantineWriter(
            self._dataset, producer=self._producer, sequence=0, prefix=self._prefix
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
                self.already_present = (inspection.num_episodes, inspection.num_steps)
                return
        self._create(inspection)
        self._take(rejected, inspection)

    def count_episodes(self, tally: RejectionTally) -> Counts:
        """Return what became of the source's episodes."""
        present = self.already_present[0] + self.repeated.num_already_present
        return Counts(self.num_episodes, tally.num_episodes, present)

    def count_steps(self, tally: RejectionTally) -> Counts:
        """Return what became of the source's steps."""
        present = self.already_present[1] + self.repeated.num_already_present_steps
        return Counts(self.num_steps, tally.num_steps, present)

    def _take(self, rejected: QuarantineWriter, inspection: Inspection) -> None:
        batch: list[Episode] = []
        num_steps = num_held = 0
        for item in inspection.iter_found():
            if isinstance(item, RejectedEpisode):
                rejected.add(item)
                continue
            own = replace(item, episode_id=f"{self._prefix}{item.episode_id}")
            # Not before another one comes: the last commit has to wait for the quarantine. Runs of
            # one episode are never parted, or what is present could not be told by its id.
            is_full = num_steps >= self._commit_steps or num_held >= _COMMIT_BYTES
            is_new = _key(own) not in self._present
            if is_full and is_new and _key(own) != _key(batch[-1]):
                self._commit(batch, inspection)
                batch, num_steps, num_held = [], 0, 0
            # After it, as it may have met another ingest of the same content.
            if _key(own) in self._present:
                self._skip([own])
                continue
            batch.append(own)
            num_steps += len(own)
            num_held += num_bytes(own)
        self.num_quarantined = rejected.commit(inspection.checks())
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
            num_episodes = count_whole(batch)
            tally, present = inspection.tally, self.already_present
            drops = DropCounts(tally.num_episodes, tally.num_steps, *present) + self.repeated
            info = {
                # The runs of an episode that was split are one.
                **commit_counts(num_episodes, sum(map(len, batch)), drops - self._reported_drops),
                "source": self._source.content_hash,
                "read_as": self._options,
                "num_through": self.num_episodes + present[0] + num_episodes,
                "num_of": inspection.num_episodes,
            }
            if self._sequence == 0:
                info["source_files"] = [f.sha256[:DIGITS] for f in self._source.files]
                info["source_names"] = [f.name for f in self._source.files]
                info |= make_checks_info(inspection.checks())
            commit = self._dataset.append(
                batch, producer=self._producer, sequence=self._sequence, info=info
            )
            if not commit.already_present:
                self._reported_drops = drops
                self._count(commit, num_episodes)
                self._report(commit.version, inspection.num_steps)
                return
            # Another ingest of the same content is running and took this sequence, perhaps for
            # other episodes: see what is there now, and try again with what is not.
            self._catch_up(is_contested=True)
            here = [e for e in batch if _key(e) in self._present]
            batch = [e for e in batch if _key(e) not in self._present]
            self._skip(here)

    def _count(self, commit: Commit, num_episodes: int) -> None:
        self._sequence += 1
        self.version = commit.version
        self.num_episodes += num_episodes
        self.num_steps += commit.num_steps
        self.num_shards += commit.num_shards
        self.num_bytes += commit.num_bytes

    def _report(self, version: int, total_steps: int) -> None:
        if self._on_progress is not None:
            num_episodes = self.num_episodes + self.already_present[0]
            num_steps = self.num_steps + self.already_present[1]
            self._on_progress(
                IngestProgress("commit", num_episodes, num_steps, total_steps, version)
            )

    def _skip(self, episodes: Sequence[Episode]) -> None:
        num_episodes, num_steps = self.already_present
        num_episodes += count_whole(episodes, self._skipped)
        self._skipped = _key(episodes[-1]) if episodes else self._skipped
        self.already_present = (num_episodes, num_steps + sum(map(len, episodes)))

    def _create(self, inspection: Inspection) -> None:
        if self._dataset.exists():
            return
        spec = inspection.spec()
        try:
            self._dataset.create(
                spec.observation_space,
                spec.action_space,
                mask_size=spec.mask_size,
                rewards_optional=spec.rewards_optional,
                encoding=spec.encoding,
            )
        except AlreadyExistsError:
            # Another writer was first; `append` checks against its spaces, not what they mean.
            if (differs := find_spec_mismatch(self._dataset.spec, spec)) is not None:
                raise SchemaMismatchError(
                    f"dataset {self._dataset.name!r}: another ingest made it meanwhile, and "
                    f"{differs}. Run this one again."
                ) from None
            return

    def _refuse_mixture(self, last: Mapping[str, Any]) -> None:
        """Refuse the same files under other options: what one rejects, the other may commit."""
        before = {name: value for name, value in last.get("read_as", {}).items() if value}
        if before == self._options:
            return
        end = "has them" if is_complete(last) else "was cut short"
        raise SourceInvalidError(
            f"an earlier ingest of these files into {self._dataset.name!r} {end} (version "
            f"{last['version']}) and read them as {before}, found {self._options}, expected the "
            "same, as episodes would be there twice or be called present that are not. Run it as "
            "it was, or ingest into a new dataset."
        )

    def _note_previous(self, last: Mapping[str, Any]) -> None:
        if is_complete(last):
            self.notes.append("already ingested: the dataset has this content, nothing was added")
        else:
            self.notes.append("an earlier ingest of this content was cut short: continued")


def _key(episode: Episode) -> tuple[str, str]:
    return (episode.episode_id, episode.agent_id)


def _changed_options(options: ReadOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults, as JSON has them."""
    plain = ReadOptions()
    stated = {f.name: getattr(options, f.name) for f in fields(options)}
    changed = {name: value for name, value in stated.items() if value != getattr(plain, name)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in changed.items()}
