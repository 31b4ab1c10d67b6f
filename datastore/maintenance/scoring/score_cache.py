"""Score cache: outcomes that were computed, by scorer and by the hash of the scored content.

    <dataset>/_derived/scores/<scorer>/<ulid>.jsonl    a line for each outcome, the last a checksum

A run writes its outcomes as they come, so that one that is killed is resumed where it stopped. The
file of a run is written as a whole each time, and another begun once it is large: readers see all
outcomes of a file or, where it is damaged, none. Failures are not stored; they are tried again.

A purge deletes these files. A run that began before it has texts of what was purged, so that it
stores nothing from then on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Final

from replaylake.datastore.maintenance.scoring.scorer import Outcome
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage import seals
from replaylake.datastore.storage.storage import Storage

FOLDER: Final = "_derived/scores"
_FILE_BYTES: Final = 1 << 18
# At most a fifth of the time is spent on writing outcomes down.
_PAUSE: Final = 4.0


class ScoreCache:
    """The outcomes of one scorer over the contents of one dataset."""

    def __init__(
        self,
        storage: Storage,
        dataset: str,
        scorer_id: str,
        is_purged: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read what is there. Memory: all outcomes of the scorer.

        is_purged: whether a purge of the dataset began since the caller read its episodes.
        """
        self._storage = storage
        self._is_purged = is_purged
        self._is_stopped = False
        self._folder = f"{dataset}/{FOLDER}/{scorer_id}"
        self._outcomes: dict[str, Outcome] = {}
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._is_changed = False
        self._path = ""
        self._due = 0.0
        self._read()

    def find(self, key: str) -> Outcome | None:
        """Return the outcome of a content, or None if it was never computed."""
        return self._outcomes.get(key)

    def add(self, key: str, outcome: Outcome) -> None:
        """Store an outcome; it is durable soon, and with `flush` at once. Raises: StorageError."""
        if outcome.error is not None or self._is_stopped:
            return
        self._outcomes[key] = outcome
        body = {"key": key, "values": outcome.values, "record": outcome.record}
        if outcome.answered_by is not None:
            body["answered_by"] = outcome.answered_by
        self._lines.append(json.dumps(body).encode())
        self._num_bytes += len(self._lines[-1])
        self._is_changed = True
        if self._num_bytes >= _FILE_BYTES or time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Make all outcomes durable. Raises: StorageError."""
        if not self._is_changed or self._stop_if_purged():
            return
        start = time.monotonic()
        self._path = self._path or f"{self._folder}/{new_ulid()}.jsonl"
        self._storage.put(self._path, seals.seal_bytes(b"\n".join(self._lines)))
        # A purge that began meanwhile may have looked into the folder before the file was there.
        if self._stop_if_purged():
            return
        self._is_changed = False
        if self._num_bytes >= _FILE_BYTES:
            self._path, self._lines, self._num_bytes = "", [], 0
        end = time.monotonic()
        self._due = end + _PAUSE * (end - start)

    def _stop_if_purged(self) -> bool:
        """Leave nothing of this run, and store nothing more, once the dataset was purged."""
        if self._is_purged():
            if self._path:
                self._storage.delete([self._path])
            self._path, self._lines, self._num_bytes = "", [], 0
            self._is_changed, self._is_stopped = False, True
        return self._is_stopped

    def _read(self) -> None:
        paths = [f"{self._folder}/{name}" for name in self._storage.names(self._folder)]
        for data in self._storage.get_many(paths):
            try:
                lines = seals.read_bytes(data or b"", is_required=True).split(b"\n")
            except seals.BrokenSealError:
                continue  # what it had is computed again
            for line in lines:
                body = json.loads(line)
                self._outcomes[body["key"]] = Outcome(
                    body["values"], None, body["record"], body.get("answered_by")
                )
