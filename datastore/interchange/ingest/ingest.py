"""Ingest: foreign files into a dataset, checked at the door, once however often they are sent.

The source is read twice: first to check every episode and to find the spaces, then to commit. Small
sources stay in memory in between. Nothing is written before the first reading is over, so a source
that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Final

from replaylake.datastore.episodes.encoding import NO_ENCODING
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.checks import REJECTED, Check
from replaylake.datastore.interchange.formats.detect import AUTO, find_format
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.ingest.alignment import Align, Alignment, SampledWindows
from replaylake.datastore.interchange.ingest.commit_job import CommitJob
from replaylake.datastore.interchange.ingest.inspection import (
    ABORT,
    REJECT,
    IngestProgress,
    Inspection,
    OnProgress,
)
from replaylake.datastore.interchange.ingest.previous_ingests import (
    find_containing_commit,
    note_changed_files,
)
from replaylake.datastore.interchange.ingest.receipt import IngestReceipt
from replaylake.datastore.interchange.ingest.source_validator import SourceValidator
from replaylake.datastore.interchange.sources.source import (
    OnBytes,
    OnRows,
    Source,
    SourceFile,
    find_source,
)
from replaylake.datastore.lake.commit import DropCounts
from replaylake.datastore.lake.lake import Lake

# One shard of the store (64 to 256 MB); a kill loses at most this much work.
_COMMIT_STEPS: Final = 1_000_000


def ingest(
    lake: Lake,
    sources: Sequence[Path | str],
    dataset: str,
    *,
    format: str = AUTO,
    options: ReadOptions | None = None,
    observation_space: Space | None = None,
    action_space: Space | None = None,
    on_invalid: str = REJECT,
    on_progress: OnProgress | None = None,
    align: Align | None = None,
    commit_steps: int = _COMMIT_STEPS,
) -> IngestReceipt:
    """Read foreign files into a dataset, which is made where it does not exist.

    Args:
        lake: where the dataset is.
        sources: files, or folders that are walked.
        dataset: its name.
        format: `auto`, or a name from `formats.catalog.FORMATS`.
        options: how to read them; see `formats.format.ReadOptions`.
        observation_space: the environment's, if one is given: values outside are refused.
        action_space: likewise.
        on_invalid: `reject` puts an invalid episode into the dataset's quarantine, with its
            reasons; `abort` refuses the whole source for one.
        on_progress: called as reading proceeds and after each commit is acknowledged.
        align: checks a sample of steps against an environment; `offline.align` makes one.
        commit_steps: steps a commit, at least; whole episodes.

    Raises: NotFoundError, SourceInvalidError, EpisodeInvalidError, SchemaMismatchError,
    ConfigInvalidError, InvalidNameError; in each case nothing was committed, except
    SourceInvalidError for a file that changed in the middle.
    """
    if on_invalid not in (ABORT, REJECT):
        raise ConfigInvalidError(
            f"on_invalid: found {on_invalid!r}, expected {ABORT!r} or {REJECT!r}.",
            parameter="on_invalid",
        )
    spaces = _check_both_spaces(observation_space, action_space)
    handle = lake.dataset(dataset)
    source = find_source(sources, None if on_progress is None else _hashing_progress(on_progress))
    spec = handle.spec if handle.exists() else None
    history = [] if spec is None else handle.history()
    whole = find_containing_commit(source, history, dataset)
    options = options or ReadOptions()
    known = find_format(format, source.files)
    read_as = options if spec is None else replace(options, encoding=spec.encoding or NO_ENCODING)
    on_rows = None if on_progress is None else _parsing_progress(on_progress, source)
    reader = known.read(source.files, replace(read_as, on_rows=on_rows))
    validator = SourceValidator(
        spec, spaces, reader.spaces, rewards_optional=reader.rewards_optional
    )
    inspection = Inspection(reader, validator, on_invalid, on_progress)
    inspection.windows = None if align is None else SampledWindows()
    inspection.run()
    if inspection.num_episodes:
        inspection.spec()  # refuses what no table can hold, before anything is made
    elif spec is None:
        raise NothingValidError(inspection.checks())
    job = CommitJob(handle, source, known.name, options, commit_steps, on_progress)
    job.repeated = _count_repeated(
        [known.read([f], read_as) for f in source.repeated], validator, inspection
    )
    lake.registry.create()  # the handle may be of a lake not made yet: a refused source makes none
    if whole is None:
        job.run(inspection)
    else:
        job.already_present = (inspection.num_episodes, inspection.num_steps)
        job.notes.append(f"nothing to add: version {whole['version']} has these files, with others")
    if job.version is not None:
        job.notes[:0] = note_changed_files(source, history)
    alignment = _run_alignment(inspection, align)
    if align is not None and alignment is None:
        job.notes.append(
            "alignment was not checked: the environment's state cannot be set from an observation"
        )
    return IngestReceipt(
        dataset=dataset,
        version=job.version,
        source=tuple(map(str, sources)),
        num_files=len(source.files) + len(source.repeated),
        content_hash=source.content_hash,
        format=known.name,
        episodes=job.count_episodes(inspection.tally),
        steps=job.count_steps(inspection.tally),
        num_shards=job.num_shards,
        num_bytes=job.num_bytes,
        num_quarantined=job.num_quarantined,
        checks=inspection.checks(),
        rejected=tuple(inspection.tally.shown),
        notes=(*source.notes, *reader.notes, *job.notes),
        renames=dict(reader.renames),
        alignment=alignment,
    )


def _hashing_progress(on_progress: OnProgress) -> OnBytes:
    return lambda done, total: on_progress(
        IngestProgress("hash", 0, 0, num_bytes=done, total_bytes=total)
    )


def _parsing_progress(on_progress: OnProgress, source: Source) -> OnRows:
    sizes = [file.num_bytes for file in source.files]
    starts = dict(
        zip([file.sha256 for file in source.files], accumulate(sizes, initial=0), strict=False)
    )
    rows: dict[str, int] = {}
    num_rows = 0

    def tell(file: SourceFile, num_read: int, num_bytes: int) -> None:
        nonlocal num_rows
        # A file may be begun again, as where a column of numbers turns out to be text.
        num_rows += num_read - rows.get(file.sha256, 0)
        rows[file.sha256] = num_read
        done = starts.get(file.sha256, 0) + num_bytes
        on_progress(IngestProgress("read", 0, num_rows, num_bytes=done, total_bytes=sum(sizes)))

    return tell


class NothingValidError(SourceInvalidError):
    """No episode of a source passed the door, and there is no dataset to put them into quarantine.

    checks: what they failed; details: the same as JSON.
    """

    def __init__(self, checks: Sequence[Check]) -> None:
        self.checks = tuple(checks)
        self.details = {"checks": [check.to_json() for check in self.checks]}
        found = ", ".join(
            f"{check.name} in {check.num_episodes}, such as {check.example.rstrip('.')}"
            for check in checks
            if check.outcome == REJECTED
        )
        super().__init__(
            f"found no valid episode, expected at least one: {found}. Nothing was written, "
            "because a dataset takes its spaces from a valid episode. Correct the log, `mapping` "
            "or `env`."
        )


def _check_both_spaces(
    observation_space: Space | None, action_space: Space | None
) -> tuple[Space, Space] | None:
    if observation_space is not None and action_space is not None:
        return observation_space, action_space
    if observation_space is None and action_space is None:
        return None
    raise ConfigInvalidError("ingest: expected both spaces of an environment, or neither.")


def _count_repeated(
    readings: Sequence[SourceReader], validator: SourceValidator, inspection: Inspection
) -> DropCounts:
    """Count what is in files that the source has twice; what is refused there joins the tally."""
    drops = DropCounts()
    for reader in readings:
        again = Inspection(reader, validator, REJECT, None)
        again.run()
        inspection.tally.merge(again.tally)
        drops += DropCounts(0, 0, again.num_episodes, again.num_steps)
    return drops


def _run_alignment(inspection: Inspection, align: Align | None) -> Alignment | None:
    if align is None or inspection.windows is None:
        return None
    return align(inspection.windows.episodes())
