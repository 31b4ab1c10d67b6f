"""Housekeeper: compacts a run's dataset as it grows, in a process of its own that gives way.

A run commits small shards ten times a second; 10,000 of them make a scan take 0.8 s. Whatever goes
wrong here is a remark: the next round tries again, and so does `replaylake maintain run`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.retention import read_retention
from replaylake.datastore.maintenance.vacuum import vacuum

NEW_SHARDS: Final = 256
_POLL_S: Final = 5.0
# A tenth of a core's share beside a process that wants all of it. At 19 it would be a sixtieth, and
# on a machine that is always busy the shards would grow in number faster than they are compacted.
_NICE: Final = 10
_END_S: Final = 5.0


@dataclass(frozen=True)
class CompactionRound:
    """What one round did; `blocked_reason` is what stopped it, if anything did.

    Shards are those of the steps that were live before and after; vacuumed are files, of which
    those are left that the dataset's own `keep_versions_s` still keeps.
    """

    shards_before: int = 0
    shards_after: int = 0
    vacuumed: int = 0
    blocked_reason: str | None = None


class BackgroundCompactor:
    """Starts a round whenever a dataset has so many shards more than the last one left.

    One round at a time, in a child process of low priority, which ends with this one. It leaves
    shards with open episodes alone, and files that a kept version names. Use it as a context
    manager, or close it.
    """

    def __init__(
        self,
        lake: str,
        dataset: Dataset,
        *,
        new_shards: int = NEW_SHARDS,
        look_s: float = _POLL_S,
        on_remark: Callable[[str], None] = lambda remark: None,
    ) -> None:
        """Take what opens the lake, and the dataset, which may be in use.

        look_s: from one look at the log to the next. on_remark: told in the thread that looks what
        went wrong, in one line.
        """
        self.rounds: list[CompactionRound] = []
        self._lake = lake
        self._dataset = dataset
        self._new_shards = new_shards
        self._look_s = look_s
        self._on_remark = on_remark
        self._num_left = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replaylake-keep", daemon=True)
        self._thread.start()

    def __enter__(self) -> BackgroundCompactor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the round that is going on, between two commits or before one, and look no more."""
        self._closing.set()
        # A store that hangs is not waited for: what is at it ends with this process.
        self._thread.join(2 * _END_S)

    def _run(self) -> None:
        while not self._closing.wait(self._look_s):
            # The dataset may be gone, and the store not answer: the run itself says so.
            with suppress(ReplayLakeError):
                num = self._num_shards()
                if num >= self._num_left + self._new_shards:
                    self._round()
                    self._num_left = self._num_shards()

    def _num_shards(self) -> int:
        return len(self._dataset.table.log.newest().files)

    def _round(self) -> None:
        process = _start_process(self._lake, self._dataset.name)
        while process.poll() is None and not self._closing.wait(0.1):
            pass
        error = _wait_or_terminate(process, self._dataset.name)
        if error is None:
            return
        self.rounds.append(error)
        if error.blocked_reason is not None:
            self._on_remark(f"housekeeping of {self._dataset.name!r}: {error.blocked_reason}")


def _start_process(lake: str, dataset: str) -> subprocess.Popen[bytes]:
    # Isolated (-I), then with the paths that this process imports from, as it may not be installed.
    paths = [os.path.abspath(path) for path in sys.path]
    code = (
        f"import sys; sys.path[:] = {paths!r}\n"
        f"from {main.__module__} import main; main({lake!r}, {dataset!r})"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # An interrupt from the keyboard is the run's, which then ends this.
        start_new_session=True,
    )


def _wait_or_terminate(process: subprocess.Popen[bytes], dataset: str) -> CompactionRound | None:
    """Wait for a child that is done, or end it; return what it did, None if it was ended."""
    is_done = process.poll() is not None
    if not is_done:
        process.terminate()
    try:
        # Closes its standard input too, with which it would end by itself.
        output, _ = process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    if not is_done:
        return None
    with suppress(ValueError, TypeError):
        return CompactionRound(**json.loads(output))
    return CompactionRound(
        blocked_reason=f"its process ended with {process.returncode}, expected a report of it. "
        f"Run `replaylake maintain run {dataset}` to see why; nothing is lost meanwhile."
    )


def main(lake: str, dataset: str) -> None:
    """Do one round, in a process of its own, and say what was done as JSON."""
    with suppress(AttributeError, OSError):
        os.nice(_NICE)
    # A parent that was killed leaves nobody else to end this.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    print(json.dumps(vars(compact_and_vacuum(lake, dataset))), flush=True)


def compact_and_vacuum(lake: str, dataset: str) -> CompactionRound:
    """Compact a dataset, and delete the files that nothing needs any more; here and now."""
    try:
        store = open_lake(lake)
        retention = read_retention(store.dataset(dataset).snapshot().table)
        steps, *_ = compact(store, dataset, target_bytes=retention.target_shard_bytes)
        receipt = vacuum(store, [dataset], delete=True)
    except ReplayLakeError as error:
        return CompactionRound(blocked_reason=f"{type(error).__name__}: {error}")
    return CompactionRound(steps.shards_before, steps.shards_after, len(receipt.garbage))


def _exit_with_parent() -> None:
    stream: Any = sys.stdin
    stream.buffer.read()
    os._exit(1)
