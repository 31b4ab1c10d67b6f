"""Export: a snapshot, or a selection of it, as a file or folder of another format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.message_media import is_media_column
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    ReplayLakeError,
    StorageError,
)
from replaylake.datastore.interchange.export.export_selection import (
    ExportSelection,
    select_for_export,
)
from replaylake.datastore.interchange.export.stored_episodes import iter_stored_episodes
from replaylake.datastore.interchange.export.trainers.targets import TARGETS
from replaylake.datastore.interchange.export.trainers.writer import TargetOptions, TargetWriter
from replaylake.datastore.interchange.formats.catalog import FORMATS
from replaylake.datastore.interchange.formats.format import WritableFormat, WriteResult
from replaylake.datastore.interchange.sources.source import SourceFile, find_source
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.storage import fsync_folder
from replaylake.datastore.storage.table.presence import check_shards_present

# Formats that keep the dataset's spaces and encoding in their metadata, and those of text.
_WITH_SPACES: Final = ("arrow", "parquet", "rllib")
_TEXTS: Final = ("csv", "jsonl")
# Called with (rows read, rows of the snapshot).
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportReceipt:
    """What an export wrote. `where` and `where_steps` are in DuckDB's own spelling.

    num_pieces: as how many runs of consecutive steps the episodes were written. num_rows: rows in
    a trainer's format; None for formats whose rows are steps.
    """

    dataset: str
    version: int
    format: str
    path: str
    num_episodes: int
    num_pieces: int
    num_steps: int
    num_bytes: int
    where: str | None = None
    where_steps: str | None = None
    notes: tuple[str, ...] = ()
    num_rows: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes)}


def export(
    lake: Lake,
    name: str,
    path: str | Path,
    *,
    format: str,
    where: str | None = None,
    where_steps: str | None = None,
    where_pairs: str | None = None,
    label: str | None = None,
    threshold: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> ExportReceipt:
    """Write `NAME`, `NAME@VERSION` or `NAME@TAG` as a file, or a directory, of another format.

    The export is written under a temporary name and renamed when it is durable, so it exists
    completely or not at all. Episodes are written in the order of their first rows, each as a whole
    unless steps are missing, and with the ids of their source if these are unique. Ingesting the
    export gives equal rows, except for values that the format cannot store, which the receipt's
    notes list. The formats of trainers (`targets.TARGETS`) have dialogues, prompts, preference
    pairs or token sequences as rows, and cannot be ingested again.

    Args:
        lake: the lake.
        name: the snapshot.
        path: the path to write; it must not exist.
        format: a name from `formats.catalog.FORMATS` that can be written, or from
            `targets.TARGETS`.
        where: SQL condition over the columns of `episodes`; selects whole episodes.
        where_steps: SQL condition over the columns of `steps`; selects steps. Each run of
            consecutive steps becomes a piece with its step numbers. Not for trainers' formats.
        where_pairs: SQL condition over the columns of `preference_pairs`, computed from the
            selected episodes; by default `pair = 1`. For targets of pairs.
        label: the further column, or the key of the metadata, that has the right answer. For
            targets of prompts.
        threshold: samples with a return above it are desirable; by default 0. For trl-kto and
            marti-kto.
        force: replace an existing file, or a directory of the same format.
        on_progress: called while rows are read.

    Cost: memory stays below 1 GiB, whatever the size of the dataset; episodes whose steps were
    written in alternation are buffered on disk, next to `path`. Pairs need memory for the
    ids of their episodes, and for the first sample of a pair until the second is read; prompts
    need 32 bytes each.

    Raises: NotFoundError, InvalidNameError; ConfigInvalidError for an unknown format;
    AlreadyExistsError; QueryRefusedError or QueryError for a condition; EmptyReplayError if it
    selects nothing; SpaceUnsupportedError if the format cannot store the observations or actions;
    ShardCorruptError; StorageError.
    """
    check_format(format)
    options = TargetOptions(where_pairs, label, threshold)
    options.check(format)
    if format in TARGETS and where_steps is not None:
        raise ConfigInvalidError(
            f"where_steps: cannot be used with {format}, whose rows are whole dialogues. "
            "Select episodes with `where`.",
            parameter="where_steps",
        )
    snapshot = lake.snapshot(name)
    target = Path(os.path.abspath(path))
    check_shards_present(snapshot.table)
    selection = select_for_export(snapshot, where, where_steps)
    if format in TARGETS:
        writer: _Writer = TargetWriter(TARGETS[format], snapshot, selection, options)
    else:
        writer = _writable_formats()[format]
    _check_target(target, writer, force)
    job = _Export(snapshot, selection, writer, target, on_progress)
    return job.run(force)


class _Writer(Protocol):
    """A writer of episodes: a format, or a target for trainers."""

    @property
    def name(self) -> str: ...

    @property
    def is_folder(self) -> bool: ...

    def recognizes(self, files: Sequence[SourceFile]) -> bool: ...

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult: ...


def _writable_formats() -> dict[str, WritableFormat]:
    return {known.name: known for known in FORMATS if isinstance(known, WritableFormat)}


def check_format(name: str) -> None:
    """Refuse a format that cannot be written. Raises: ConfigInvalidError."""
    if name not in (writable := {*_writable_formats(), *TARGETS}):
        raise ConfigInvalidError(
            f"format: found {name!r}, expected one that can be written: "
            f"{', '.join(sorted(writable))}.",
            parameter="format",
        )


class _Export:
    """One export, from a temporary name to its own."""

    def __init__(
        self,
        snapshot: Snapshot,
        selection: ExportSelection,
        known: _Writer,
        target: Path,
        on_progress: OnProgress | None,
    ) -> None:
        self._snapshot = snapshot
        self._selection = selection
        self._format = known
        self._target = target
        spec = snapshot.spec
        # Episodes have their media in their messages.
        columns = {n: kind for n, kind in spec.extras.items() if not is_media_column(n, kind)}
        self._spec = replace(spec, extras=columns)
        self._on_progress = on_progress
        self._num_pieces = 0
        self._num_steps = 0
        self._num_episodes = 0
        self._last: tuple[str, str] | None = None

    def run(self, force: bool) -> ExportReceipt:
        target = self._target
        beside = target.with_name(f".{target.name}.{new_ulid()}.part")
        try:
            beside.mkdir()
            # Under its own name, which some formats keep inside too.
            path = beside / "o" / target.name
            path.parent.mkdir()
            written = self._format.write(self._episodes(beside), self._spec, path)
            self._check_not_empty()
            num_bytes = _make_durable(path)
            _publish(path, target, force)
        except OSError as error:
            raise StorageError(
                f"{target}: {error.strerror or error}, expected to write there. Nothing was "
                "written; free some space or choose another path."
            ) from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return ExportReceipt(
            dataset=self._snapshot.dataset,
            version=self._snapshot.version,
            format=self._format.name,
            path=str(target),
            num_episodes=self._num_episodes,
            num_pieces=self._num_pieces,
            num_steps=self._num_steps,
            num_bytes=num_bytes,
            where=self._selection.where,
            where_steps=self._selection.where_steps,
            notes=(*written.notes, *self._notes()),
            num_rows=written.num_rows,
        )

    def _episodes(self, scratch: Path) -> Iterator[Episode]:
        for episode in iter_stored_episodes(
            self._snapshot, self._selection, scratch, self._report_progress
        ):
            self._num_pieces += 1
            self._num_steps += len(episode)
            key = (episode.episode_id, episode.agent_id)
            self._num_episodes += key != self._last
            self._last = key
            if self._format.name in TARGETS:
                yield episode
                continue
            name = self._selection.export_name(episode.episode_id, episode.source_episode_id)
            yield replace(episode, episode_id=name)

    def _report_progress(self, num_rows: int) -> None:
        if self._on_progress is not None:
            self._on_progress(num_rows, self._snapshot.num_steps)

    def _check_not_empty(self) -> None:
        if not self._num_steps:
            raise EmptyReplayError(
                f"{self._snapshot.dataset}@{self._snapshot.version}: found no step that meets "
                "the conditions, expected one or more. Nothing was written; widen `where`."
            )

    def _notes(self) -> Iterator[str]:
        spec = self._snapshot.spec
        if self._format.name in TARGETS:
            return
        if spec.encoding is not None and self._format.name not in _WITH_SPACES:
            yield (
                f"{self._format.name} has no place for the rules by which named columns became "
                "the observation: export to parquet or arrow to keep them"
            )
        if spec.rewards_optional and self._format.name in _TEXTS:
            yield "rewards that are not known are empty: `replaylake ingest --no-reward` reads them"
        if self._num_pieces > self._num_episodes:
            yield (
                f"{self._num_episodes:,} episodes are written as {self._num_pieces:,} pieces, as "
                "steps between them are missing or left out; `replaylake ingest --gaps split` "
                "reads them"
            )
        if shared := len(self._selection.shared_ids):
            yield (
                f"{shared:,} ids of the source are of several episodes, which keep the store's ids"
            )


def _check_target(target: Path, known: _Writer, force: bool) -> None:
    if not target.parent.is_dir():
        raise NotFoundError(f"{target.parent}: found no such folder, expected one to write into.")
    if not os.path.lexists(target):
        return
    if not force:
        raise AlreadyExistsError(
            f"{target}: found an existing file or folder, expected a path that does not exist. "
            "Choose another, or replace "
            "it with `force`."
        )
    if target.is_dir() and not target.is_symlink() and not _is_of_format(target, known):
        raise AlreadyExistsError(
            f"{target}: found a folder that holds no {known.name}, expected an earlier export. "
            "Remove it yourself, or choose another path."
        )


def _is_of_format(folder: Path, known: _Writer) -> bool:
    if not any(folder.iterdir()):
        return True
    try:
        return known.is_folder and known.recognizes(find_source([folder]).files)
    except ReplayLakeError:
        return False


def _make_durable(path: Path) -> int:
    """Force a file, or all files of a folder, to the disk; return their bytes."""
    if path.is_dir():
        num_bytes = sum(_make_durable(child) for child in sorted(path.iterdir()))
        fsync_folder(path)
        return num_bytes
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size


def _publish(path: Path, target: Path, force: bool) -> None:
    """Give what was made its name. Raises: AlreadyExistsError if that was taken meanwhile."""
    if not os.path.lexists(target):
        os.rename(path, target)
    elif not force:
        raise AlreadyExistsError(
            f"{target}: found that another process created it meanwhile, expected a path that "
            "does not exist. Choose "
            "another, or replace it with `force`."
        )
    elif path.is_file() and not (target.is_dir() and not target.is_symlink()):
        os.replace(path, target)
    else:
        # A folder cannot be replaced in one step: the old one steps aside, and goes with the rest.
        os.rename(target, path.parents[1] / "old")
        os.rename(path, target)
    fsync_folder(target.parent)
