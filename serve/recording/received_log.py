"""Received steps into the lake: written before they are acknowledged, committed soon after."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence, Set
from typing import Final

from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.received_table import (
    ReceivedPiece,
    encode_received,
    ensure_received_table,
    recover_received,
)
from replaylake.datastore.lake.dataset import Dataset

# Steps that a worker remembers, to tell a contradiction at once: about 15 MB.
_MAX_REMEMBERED_STEPS: Final = 131_072


class ContradictionError(Exception):
    """A piece, by its place, that says otherwise than what this worker holds."""

    def __init__(self, piece: int, message: str) -> None:
        super().__init__(message)
        self.piece = piece


class ReceivedLog:
    """One worker's way into a dataset's received steps. Safe for threads."""

    def __init__(self, dataset: Dataset, worker: str, config: JournalConfig | None = None) -> None:
        """Create the table if it is absent, commit what killed servers left, open a journal."""
        ensure_received_table(dataset)
        self.num_damaged = recover_received(dataset).num_damaged
        self._columns = frozenset(dataset.received.snapshot().schema.names)
        self.dataset = dataset
        self.journal = Journal(dataset.received, encode_received, worker=worker, config=config)
        self._recent: OrderedDict[tuple[str, str], _EpisodeSteps] = OrderedDict()
        self._num_held = 0
        self._lock = threading.Lock()

    @property
    def failure(self) -> str | None:
        """Why nothing more can be written, or None."""
        return self.journal.failure

    def write(self, pieces: Sequence[ReceivedPiece]) -> None:
        """Write pieces of episodes, all or none; what this worker holds already is left out.

        On return a killed process does not lose them. Raises: Contradiction, StorageError.
        """
        with self._lock:
            fresh: dict[tuple[str, str], _EpisodeSteps] = {}
            new = []
            for number, piece in enumerate(pieces):
                key = piece.key
                if key not in fresh:
                    known = self._recent.get(key)
                    fresh[key] = _EpisodeSteps() if known is None else known.copy()
                if fresh[key].add(piece, number):
                    new.append(piece)
            if new:
                self._add_columns({name for piece in new for name in piece.rows.column_names})
                self.journal.append([piece.record for piece in new])
            # Only now: what could not be written is not held.
            self._remember(fresh)

    def close(self) -> None:
        """Commit everything. Raises: ReplayLakeError; the next start then commits what is left."""
        self.journal.close()

    def _add_columns(self, columns: Set[str]) -> None:
        """Give the table the columns that steps came with for the first time."""
        if columns <= self._columns:
            return
        ensure_received_table(self.dataset, columns)
        self._columns |= columns

    def _remember(self, fresh: dict[tuple[str, str], _EpisodeSteps]) -> None:
        for key, steps in fresh.items():
            before = self._recent.get(key)
            self._num_held += len(steps.contents) - (0 if before is None else len(before.contents))
            self._recent[key] = steps
            self._recent.move_to_end(key)
        while self._num_held > _MAX_REMEMBERED_STEPS and self._recent:
            _, oldest = self._recent.popitem(last=False)
            self._num_held -= len(oldest.contents)


class _EpisodeSteps:
    """What is known of an episode's steps: what each says, and which one ended it."""

    def __init__(self) -> None:
        self.contents: dict[int, int] = {}
        self.end: int | None = None

    def copy(self) -> _EpisodeSteps:
        same = _EpisodeSteps()
        same.contents, same.end = dict(self.contents), self.end
        return same

    def add(self, piece: ReceivedPiece, number: int) -> bool:
        """Note a piece; return whether it had anything new. Raises: Contradiction."""
        is_new, last = False, 0
        for last, content in piece.contents.items():
            if last not in self.contents:
                self.contents[last] = content
                is_new = True
            elif self.contents[last] != content:
                message = (
                    f"step {last} was received before with other values; "
                    "send the same values, or another episode_id"
                )
                raise ContradictionError(number, message)
        if piece.ends:
            self.end = last if self.end is None else min(last, self.end)
        if self.end is not None and (highest := max(self.contents)) > self.end:
            message = (
                f"step {highest} comes after step {self.end}, which ended the episode; "
                "send it under another episode_id"
            )
            raise ContradictionError(number, message)
        return is_new
