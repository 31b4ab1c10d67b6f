"""Receipt: what `replaylake ingest` answers to a person."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from replaylake.cli.output.command_output import cell_text, count, size, table_lines

if TYPE_CHECKING:
    from replaylake.datastore.interchange.formats.checks import Check
    from replaylake.datastore.interchange.ingest.preview import IngestPreview
    from replaylake.datastore.interchange.ingest.receipt import IngestReceipt
    from replaylake.datastore.interchange.ingest.repair import RepairReceipt
    from replaylake.datastore.lake.commit import KeyCounts

_CHECK_COLUMNS: Final = ("check", "outcome", "episodes", "rows")
# A note may list names without end, and a word of one (a path, a JSON object) may be as long.
_MAX_NOTE: Final = 240
_MAX_WORD: Final = 60
_MAX_RENAMES: Final = 3
_RANGE_COLUMNS: Final = ("column", "type", "least", "greatest", "missing", "stored_as")


def receipt_lines(receipt: IngestReceipt) -> Iterator[str]:
    """Return the receipt, what matters most first; what --json has in full is shortened."""
    episodes, steps = receipt.episodes, receipt.steps
    if receipt.version is None:
        yield f"{receipt.dataset}: nothing added"
    else:
        yield (
            f"{receipt.dataset}@{receipt.version}: {count(episodes.committed, 'episode')}, "
            f"{count(steps.committed, 'step')} committed in {count(receipt.num_shards, 'shard')}, "
            f"{size(receipt.num_bytes)}"
        )
    yield (
        f"  read {count(receipt.num_files, 'file')} ({receipt.format}): "
        f"{count(episodes.read, 'episode')}, {count(steps.read, 'step')}; rejected "
        f"{episodes.rejected:,} and {steps.rejected:,}; already present "
        f"{episodes.already_present:,} and {steps.already_present:,}"
        + (
            f"; deleted before {episodes.deleted_before:,} and {steps.deleted_before:,}"
            if episodes.deleted_before
            else ""
        )
    )
    yield from key_lines(receipt.keys)
    yield from check_lines(receipt.checks)
    if episodes.rejected:
        was = "was" if episodes.rejected == 1 else "were"
        when = "" if receipt.num_quarantined else "already "
        yield (
            f"  {count(episodes.rejected, 'episode')} {was} {when}quarantined: "
            f"SELECT file, file_row, reasons, row FROM {receipt.dataset}.quarantine"
        )
    yield from rename_lines(receipt.renames)
    for note in receipt.notes:
        yield f"  note: {shorten_line(note)}"
    if receipt.alignment is not None:
        yield from (f"  alignment: {line}" for line in receipt.alignment.lines())


def preview_lines(seen: IngestPreview) -> Iterator[str]:
    """Return what an ingest would do with the first rows of a source."""
    rest = "all rows" if seen.is_whole else "the rest was not read"
    yield (
        f"{seen.dataset}: {count(seen.num_rows, 'row')} read of "
        f"{count(seen.num_files, 'file')} ({seen.format}); {rest}, nothing was stored"
    )
    if seen.spaces is not None:
        observation, action = seen.spaces
        yield f"  observation {shorten_line(observation)}, action {shorten_line(action)}"
    rows = [
        {**vars(one), "missing": f"{one.missing:.1%}", "stored_as": ", ".join(one.stored_as)}
        for one in seen.columns
    ]
    yield from (f"  {line}" for line in table_lines(rows, _RANGE_COLUMNS))
    yield f"  first rows of {count(seen.num_episodes, 'episode')} that would be stored:"
    for row in seen.rows:
        cells = (f"{name}={cell_text(value)}" for name, value in row.items() if value is not None)
        yield f"    {shorten_line(' '.join(cells))}"
    yield from check_lines(seen.checks)
    yield from rename_lines(seen.renames)
    for note in seen.notes:
        yield f"  note: {shorten_line(note)}"


def repair_lines(receipt: RepairReceipt) -> Iterator[str]:
    """Return what a repair did, and what failed again."""
    at = "" if receipt.version is None else f"@{receipt.version}"
    verb = "would be repaired" if receipt.dry_run else "repaired"
    yield (
        f"{receipt.dataset}{at}: {count(receipt.num_repaired_episodes, 'episode')}, "
        f"{count(receipt.num_repaired_rows, 'row')} {verb}; "
        f"{count(receipt.num_failed_episodes, 'episode')}, "
        f"{count(receipt.num_failed_rows, 'row')} failed; "
        f"{count(receipt.num_left_rows, 'row')} left in quarantine"
    )
    yield from check_lines(receipt.checks)
    if receipt.num_skipped_rows:
        yield (
            f"  {count(receipt.num_skipped_rows, 'row')} skipped: they are not of an ingested "
            "file, or could not be read as rows"
        )
    for note in receipt.notes:
        yield f"  note: {shorten_line(note)}"


def key_lines(keys: KeyCounts) -> Iterator[str]:
    """Say what became of steps whose keys were there."""
    if keys:
        yield (
            f"  rows with a stored key: {count(keys.duplicates, 'duplicate')}, "
            f"{count(keys.late_values, 'late value')}, {count(keys.conflicts, 'conflict')}, "
            f"{keys.replaced:,} replaced"
        )


def check_lines(checks: Sequence[Check]) -> Iterator[str]:
    """Say what the door found, as a table, and under each check an example and what may be done."""
    if not checks:
        return
    rows = [
        {
            "check": f"{check.name} ({check.column})" if check.column else check.name,
            "outcome": check.outcome,
            "episodes": check.num_episodes,
            "rows": check.num_rows,
        }
        for check in checks
    ]
    header, *lines = table_lines(rows, _CHECK_COLUMNS)
    yield f"  {header}"
    for line, check in zip(lines, checks, strict=True):
        yield f"  {line}"
        if check.example:
            yield f"    such as {shorten_line(check.example)}"
        if check.advice:
            yield f"    {check.advice}"


def rename_lines(renames: Mapping[str, str]) -> Iterator[str]:
    """Name the columns that got another name; of many only the first, and their number."""
    if len(renames) > _MAX_RENAMES:
        theirs, ours = next(pair for pair in renames.items() if pair[0])
        yield (
            f"  {len(renames):,} columns renamed, such as {shorten_line(repr(theirs))} -> {ours}; "
            "--json lists all"
        )
        return
    for theirs, ours in renames.items():
        yield f"  column {shorten_line(repr(theirs))} is now {ours}"


def shorten_line(text: str) -> str:
    """Return one line of at most 240 characters; long words lose their middle, as in `part...7`."""
    words = (_elide_middle(word) for word in re.split(r"\s+", text))
    line = " ".join(words)
    return line if len(line) <= _MAX_NOTE else f"{line[:_MAX_NOTE]}... (--json has all)"


def _elide_middle(word: str) -> str:
    if len(word) <= _MAX_WORD:
        return word
    half = _MAX_WORD // 2 - 2
    return f"{word[:half]}...{word[-half:]}"
