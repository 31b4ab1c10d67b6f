"""Expiry: dropping the oldest versions from a log, below a checkpoint that was read back.

What an ingest said of its source is remembered in a commit of the expiry's own: it is looked up for
good, by content, before the same files are taken in again. So is what a commit of scores says of
their scorer, whose id stands beside them in the steps.

Each step leaves a log that every reader, ours or another engine's, opens to the same newest state,
so that a crash costs nothing and the next expiry goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from replaylake.datastore.errors import LogCorruptError
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import EARLIER, CommitLog
from replaylake.datastore.storage.log.folder import LogFolder
from replaylake.datastore.storage.log.state import LogState

_OPERATION: Final = "EXPIRE LOG"
# The entries of commits that are remembered.
_REMEMBERED: Final = frozenset(("source", "scored"))


@dataclass(frozen=True)
class ExpiryResult:
    """The oldest version that is left, and the log files that were dropped, or would be."""

    oldest: int
    paths: tuple[str, ...]


def expire(
    log: CommitLog,
    oldest: int,
    *,
    dry_run: bool = False,
    check: Callable[[], None] | None = None,
) -> ExpiryResult:
    """Drop the versions before `oldest` from a log; shards are not touched.

    `check` is called before the first is dropped, and what it raises is raised: all the reading
    comes before, and a tag may have been set meanwhile.

    Which (producer, sequence) was committed is kept, so nothing can be committed a second time.
    Repeating it after a crash goes on where that stopped. Cost: a checkpoint, one reading of all
    commits, one deletion per file. Raises: NotFoundError if there is no such version,
    LogCorruptError if what would be left cannot be read.
    """
    state = log.at(oldest)
    folder = log.folder
    listing = folder.listing()
    commits = [folder.commit_path(v) for v in listing.commits if v < oldest]
    checkpoints = [folder.checkpoint_path(v) for v in listing.checkpoints if v < oldest]
    # Without version 0 nothing is read from the start any more; then go the checkpoints, which need
    # the commits after them, and at last those, upwards: CommitLog takes one that still stands to
    # mean that none after it has gone.
    paths = [*commits[:1], *checkpoints, *commits[1:]]
    if commits and all(_is_expiry_record(folder, v) for v in listing.commits if v < oldest):
        # Another would take their place, and so on at each expiry: they go with the next others.
        paths = []
    if paths and not dry_run:
        _record_expiry(log, oldest)
        _ensure_checkpoint(folder, state)
        if check is not None:
            check()
        for path in paths:
            folder.storage.delete([path])
    return ExpiryResult(oldest, tuple(paths))


def _record_expiry(log: CommitLog, oldest: int) -> None:
    earlier = [
        info
        for info in log.history()
        if info["version"] < oldest and not _REMEMBERED.isdisjoint(info)
    ]
    if earlier:
        intent = Intent(f"expire/{oldest}", 0, _OPERATION, info={EARLIER: earlier})
        log.commit(lambda _: intent)


def _is_expiry_record(folder: LogFolder, version: int) -> bool:
    """Whether a commit only remembers others; also where another expiry dropped it meanwhile."""
    change = folder.read_change(version)
    return change is None or change.operation == _OPERATION


def _ensure_checkpoint(folder: LogFolder, state: LogState) -> None:
    """See to it that the log can be read from `state.version` on without what came before."""
    if _read(folder, state.version) != state:
        folder.write_checkpoint(state)
        if _read(folder, state.version) != state:
            raise LogCorruptError(
                f"{folder.checkpoint_path(state.version)}: found another state than was written, "
                "expected the same. Nothing was dropped; check the disk with `replaylake fsck`."
            )
    pointed = folder.read_pointer()
    if pointed is None or pointed < state.version or _read(folder, pointed) is None:
        folder.write_pointer(state.version, state.num_actions)


def _read(folder: LogFolder, version: int) -> LogState | None:
    try:
        return folder.read_checkpoint(version)
    except LogCorruptError:
        return None
