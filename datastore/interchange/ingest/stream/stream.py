"""Stream: ingests JSON lines into a dataset as they arrive, each step once.

A line is a step, a decision (an episode of one step), or a dialogue or rollout (an episode).

Lines are held for a flush interval, put in order, and committed as pieces of their episodes: each
piece follows on what the dataset has of its episode. A step whose predecessor has not come yet
waits for it, for a while. Episode ids are `<stream>/<their id>`, whatever else the stream holds, so
a stream that is delivered again from any place goes on where it was, and adds nothing twice.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.interchange.formats.checks import Finding
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.key_options import parse_ingest_key
from replaylake.datastore.interchange.ingest.stream.grammar import Grammar
from replaylake.datastore.interchange.ingest.stream.ingester import StreamIngester
from replaylake.datastore.interchange.ingest.stream.line_kinds import AUTO, find_line_kind
from replaylake.datastore.interchange.ingest.stream.lines import Lines
from replaylake.datastore.interchange.ingest.stream.receipt import StreamProgress, StreamReceipt
from replaylake.datastore.interchange.ingest.stream.writer import find_written_format
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.unique_keys import OnConflict

FLUSH_EVERY_S: Final = 10.0
# A step waits this many flushes, and no less than so long, for the one before it.
_WAIT_FLUSHES: Final = 3
_MIN_WAIT_S: Final = 30.0
_POLL_S: Final = 0.2
_MAX_LAST_TAKES: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def follow(
    lake: Lake,
    lines: Lines,
    dataset: str,
    *,
    format: str = AUTO,
    stream: str | None = None,
    options: ReadOptions | None = None,
    spaces: tuple[Space, Space] | None = None,
    flush_every_s: float = FLUSH_EVERY_S,
    wait_s: float | None = None,
    stop: threading.Event | None = None,
    on_progress: Callable[[StreamProgress], None] | None = None,
    on_rejected: Callable[[Finding], None] | None = None,
    readmit: bool = False,
    unique: Sequence[str] = (),
    late: Sequence[str] = (),
    on_conflict: OnConflict = "set_aside",
) -> StreamReceipt:
    """Commit lines as they arrive, until they are over or `stop` is set; then what is held.

    Args:
        lake: where the dataset is; both are made with the first commit.
        lines: where lines come from.
        dataset: its name.
        format: kind of the lines: `jsonl`, steps, which need an episode id and a step; `bandit`,
            decisions, which need an id or `unique`; `dsjson`, events with an EventId;
            `transcripts`, dialogues; `nemorl`, `verifiers` and `verl`, rollouts; `auto`: that of
            the stream's earlier commits, or else recognized from the first line, which is a step if
            it has an episode id, a step and an action.
        stream: the stream's name, the same at each start; by default the dataset's.
        options: how to read the lines.
        spaces: an environment's observation and action space. Without them, a new dataset gets
            those of the first flush, which later steps have to fit.
        flush_every_s: seconds that a line waits for its commit, at most.
        wait_s: seconds that a step waits for the one before it; by default three flushes, and at
            least 30 s. It waits no longer than memory has room, and not beyond the end.
        stop: ends it when set.
        on_progress: called after each flush.
        on_rejected: called for each line that is left out, as it is.
        readmit: also commit what was deleted from the dataset; it counts as deleted no more.
        unique: columns whose values no two rows share, as for `ingest`.
        late: as for `ingest`.
        on_conflict: as for `ingest`.

    Raises: ConfigInvalidError, also for a format that cannot be followed; SourceInvalidError if the
    first lines lack the columns that identify steps; StorageError.
    """
    name = stream or dataset
    if not _NAME.fullmatch(name):
        raise ConfigInvalidError(
            f"stream: found {name!r}, expected up to 64 letters, digits, dots, dashes and "
            "underscores. Give the stream such a name, the same at each start.",
            parameter="stream",
        )
    wait = max(_WAIT_FLUSHES * flush_every_s, _MIN_WAIT_S) if wait_s is None else wait_s
    handle = lake.dataset(dataset)
    options = options or ReadOptions()
    written = find_written_format(handle, name) or AUTO
    kind = find_line_kind(format, options) or find_line_kind(written, options)
    key = parse_ingest_key(handle, unique, late)
    if key is not None and handle.exists():
        key = handle.set_unique(key)
    known = key or (handle.spec.unique if handle.exists() else None)
    columns = () if known is None else tuple(known.columns)
    grammar = Grammar(lines.name, options, kind, columns)
    follower = StreamIngester(
        lake, dataset, name, grammar, spaces, wait, on_rejected, readmit, key, on_conflict
    )
    stop = stop or threading.Event()
    due: float | None = None
    while not (stop.is_set() or lines.is_over):
        now = time.monotonic()
        timeout_s = _POLL_S if due is None else min(due - now, _POLL_S)
        for line in lines.take(max(timeout_s, 0.0)):
            follower.add(line, now)
        if due is None and follower.is_holding:
            due = now + flush_every_s
        if follower.is_full or (due is not None and time.monotonic() >= due):
            follower.flush(time.monotonic())
            due = time.monotonic() + flush_every_s if follower.is_holding else None
            if on_progress is not None:
                on_progress(follower.progress)
    for _ in range(_MAX_LAST_TAKES):
        # What has been delivered already; a pipe that never falls silent is left at some point.
        last = lines.take(0.0) if not lines.is_over else []
        for line in last:
            follower.add(line, time.monotonic())
        if not last:
            break
    follower.flush(time.monotonic(), is_last=True)
    if on_progress is not None:
        on_progress(follower.progress)
    return follower.receipt()
