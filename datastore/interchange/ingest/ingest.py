"""Ingest: foreign files into a dataset, checked at the door, once however often they are sent.

The source is read twice: first to check every episode and to find the spaces, then to commit. Small
sources stay in memory in between. Nothing is written before the first reading is over, so a source
that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Final

from replaylake.datastore.episodes.encoding import NO_ENCODING
from replaylake.datastore.episodes.schema import (
    KEY_COLUMNS,
    STANDARD_COLUMNS,
    DatasetSpec,
    UniqueKeys,
    arrow_schema,
)
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.episodes.tokenizer import Tokenizer, find_tokenizer_mismatch
from replaylake.datastore.episodes.tokens import has_tokens
from replaylake.datastore.errors import (
    ConfigInvalidError,
    SchemaMismatchError,
    SourceInvalidError,
)
from replaylake.datastore.interchange.formats.checks import REJECTED, Check
from replaylake.datastore.interchange.formats.detect import AUTO, find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    SourceReader,
    TokenizedReader,
)
from replaylake.datastore.interchange.ingest.alignment import Align, Alignment, SampledWindows
from replaylake.datastore.interchange.ingest.commit_job import CommitJob
from replaylake.datastore.interchange.ingest.inspection import (
    ABORT,
    REJECT,
    IngestProgress,
    Inspection,
    OnProgress,
)
from replaylake.datastore.interchange.ingest.key_options import parse_ingest_key
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
from replaylake.datastore.lake.unique_keys import (
    CHECK,
    REPLACE,
    SET_ASIDE,
    OnConflict,
    check_key_types,
)
from replaylake.datastore.storage.spans import span

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
    readmit: bool = False,
    unique: Sequence[str] = (),
    late: Sequence[str] = (),
    on_conflict: OnConflict = "set_aside",
) -> IngestReceipt:
    """Read files of another tool into a dataset, which is created if it does not exist.

    Args:
        lake: the lake of the dataset.
        sources: files, or directories that are read recursively.
        dataset: its name.
        format: `auto`, or a name from `formats.catalog.FORMATS`.
        options: how to read the files; see `formats.format.ReadOptions`.
        observation_space: the space of the environment, if there is one: episodes with values
            outside it are rejected.
        action_space: the same for actions.
        on_invalid: `reject` puts an invalid episode into the dataset's quarantine, with the
            reasons; `abort` refuses the whole source for one invalid episode.
        on_progress: called while the source is read, and after each commit is acknowledged.
        align: compares a sample of steps with an environment; `offline.align` creates one.
        commit_steps: minimum number of steps per commit; episodes are not divided.
        readmit: also commit what was deleted from the dataset before; it can then be ingested
            again without this argument.
        unique: columns whose values no two rows share. The dataset keeps them, and all later
            writers obey them. Rows that the dataset has already are checked first.
        late: columns that, like the reward, a stored row without a value takes from a later row
            with its key.
        on_conflict: `set_aside` puts an episode that differs from the stored rows with its keys
            into quarantine, `replace` puts its rows in their place.

    Raises: NotFoundError, SourceInvalidError, EpisodeInvalidError, SchemaMismatchError,
    ConfigInvalidError, InvalidNameError. In each case nothing was committed, except for a
    SourceInvalidError for a file that changed while it was read.
    """
    if on_invalid not in (ABORT, REJECT):
        raise ConfigInvalidError(
            f"on_invalid: found {on_invalid!r}, expected {ABORT!r} or {REJECT!r}.",
            parameter="on_invalid",
        )
    if on_conflict not in (SET_ASIDE, REPLACE):
        raise ConfigInvalidError(
            f"on_conflict: found {on_conflict!r}, expected {SET_ASIDE!r} or {REPLACE!r}.",
            parameter="on_conflict",
        )
    spaces = _check_both_spaces(observation_space, action_space)
    handle = lake.dataset(dataset)
    given = parse_ingest_key(handle, unique, late)
    on_bytes = None if on_progress is None else _hashing_progress(on_progress)
    with span("hash") as work:
        source = find_source(sources, on_bytes)
        if source.repeated and find_format(format, source.files).is_folder:
            source = source.keep_repeated()
        work.items = len(source.files)
        work.num_bytes = sum(file.num_bytes for file in source.files)
    spec = handle.spec if handle.exists() else None
    history = [] if spec is None else handle.history()
    key = given or (None if spec is None else spec.unique)
    if on_conflict == REPLACE and key is None:
        raise ConfigInvalidError(
            f"on_conflict: found {REPLACE!r} for a dataset without a unique key, expected `unique` "
            "with it.",
            parameter="on_conflict",
        )
    whole = find_containing_commit(source, history, dataset, is_unique=key is not None)
    options = options or ReadOptions()
    read_as = options if spec is None else replace(options, encoding=spec.encoding or NO_ENCODING)
    on_rows = None if on_progress is None else _parsing_progress(on_progress, source)
    with span("parse") as work:
        known = find_format(format, source.files)
        reader = known.read(source.files, replace(read_as, on_rows=on_rows))
        work.items = reader.num_rows or 0
        work.num_bytes = sum(file.num_bytes for file in source.files)
    tokenizer = reader.tokenizer if isinstance(reader, TokenizedReader) else None
    if spec is not None and tokenizer is not None:
        _check_tokenizer(dataset, spec, tokenizer)
    validator = SourceValidator(
        spec,
        spaces,
        reader.spaces,
        rewards_optional=reader.rewards_optional,
        unique=key,
        tokenizer=tokenizer,
    )
    inspection = Inspection(reader, validator, on_invalid, on_progress)
    inspection.windows = None if align is None else SampledWindows()
    inspection.run()
    if key is not None:
        _check_columns(key, [*reader.extras, *(() if spec is None else spec.extras)], reader.extras)
    if inspection.num_episodes:
        # Refuses what no table can hold, before anything is made.
        planned = inspection.spec()
        if key is not None:
            check_key_types(key, arrow_schema(planned))
    elif spec is None:
        raise NothingValidError(inspection.checks())
    job = CommitJob(
        handle,
        source,
        known.name,
        options,
        commit_steps,
        on_progress,
        readmit=readmit,
        on_conflict=on_conflict,
    )
    job.repeated = _count_repeated(
        [known.read([f], read_as) for f in source.repeated], validator, inspection
    )
    lake.registry.create()  # the handle may be of a lake not made yet: a refused source makes none
    if given is not None and handle.exists():
        handle.set_unique(given)
    if tokenizer is not None and handle.exists():
        handle.set_tokenizer(tokenizer)
    if whole is None:
        job.run(inspection)
    else:
        job.already_present = (inspection.num_episodes, inspection.num_steps)
        job.notes.append(f"nothing to add: version {whole['version']} has these files, with others")
    if job.version is not None:
        job.notes[:0] = note_changed_files(source, history, is_unique=key is not None)
    if num_deleted := job.deleted_before[0]:
        job.notes.append(
            f"episodes left out because they were deleted from {dataset!r} before: "
            f"{num_deleted:,}; to commit them, use `readmit`"
        )
    # All was present, or in quarantine: the receipt of the earlier ingest has what was found.
    is_repeated = (
        job.version is None
        and job.num_quarantined == 0
        and job.already_present == (inspection.num_episodes, inspection.num_steps)
    )
    alignment = _run_alignment(inspection, align)
    if isinstance(alignment, str):
        job.notes.append(f"alignment was not checked: {alignment}")
        alignment = None
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
        checks=() if is_repeated else (*_conflict_checks(job), *inspection.checks()),
        rejected=() if is_repeated else tuple(inspection.tally.shown),
        notes=(*source.notes, *(() if is_repeated else reader.notes), *job.notes),
        renames={} if is_repeated else dict(reader.renames),
        alignment=alignment,
        keys=job.keys,
    )


def _check_tokenizer(dataset: str, spec: DatasetSpec, tokenizer: Tokenizer) -> None:
    """Refuse files whose token ids mean something else than those of a dataset."""
    if spec.tokenizer is not None:
        mismatch = find_tokenizer_mismatch(spec.tokenizer, tokenizer)
    elif has_tokens(spec.extras):
        mismatch = f"the tokenizer is not stated, and {tokenizer.describe()} in the files"
    else:
        mismatch = None
    if mismatch is not None:
        raise SchemaMismatchError(
            f"dataset {dataset!r}: {mismatch}, expected one. Ingest into a new dataset."
        )


def _check_columns(key: UniqueKeys, names: Sequence[str], logged: Collection[str]) -> None:
    """Refuse a source without the columns of the key. Raises: ConfigInvalidError."""
    for name in key.columns:
        if name not in STANDARD_COLUMNS and name not in logged:
            raise ConfigInvalidError(
                f"unique: found no column {name} in the source, expected it: one of "
                f"{', '.join([*dict.fromkeys(names), *KEY_COLUMNS])}.",
                parameter="unique",
            )


def _conflict_checks(job: CommitJob) -> list[Check]:
    keys = job.keys
    if not keys.conflicts:
        return []
    advice = (
        "rows whose key is stored with other values: the reasons are in quarantine; with "
        "`on_conflict` replace they take the place of the stored rows"
    )
    example = ""
    return [Check(CHECK, REJECTED, keys.conflicting_episodes, keys.conflicts, example, advice)]


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


def _run_alignment(inspection: Inspection, align: Align | None) -> Alignment | str | None:
    if align is None or inspection.windows is None:
        return None
    windows = inspection.windows.episodes()
    return align(windows) if windows else "no episode is valid"
