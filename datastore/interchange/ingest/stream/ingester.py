"""Follower: the lines that a stream has delivered and that wait, and what becomes of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from replaylake.datastore.episodes.schema import UniqueKeys
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.interchange.formats.checks import Finding
from replaylake.datastore.interchange.formats.format import RejectedEpisode
from replaylake.datastore.interchange.ingest.quarantine import quarantine
from replaylake.datastore.interchange.ingest.receipt import Counts
from replaylake.datastore.interchange.ingest.stream.grammar import Grammar, StreamRow
from replaylake.datastore.interchange.ingest.stream.lines import Line
from replaylake.datastore.interchange.ingest.stream.receipt import (
    Reason,
    StreamProgress,
    StreamReceipt,
)
from replaylake.datastore.interchange.ingest.stream.stored_steps import Key, StreamPosition
from replaylake.datastore.interchange.ingest.stream.writer import StreamWriter
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.unique_keys import OnConflict
from replaylake.datastore.names import new_ulid

# Text of the lines between two flushes, and of those that wait; in memory they are ten times that.
_WINDOW_BYTES: Final = 4 << 20
_WAITING_BYTES: Final = 8 << 20
# Lines that were refused before there is a dataset whose quarantine takes them.
_MAX_BUFFERED_REJECTED: Final = 10_000
_AFTER_END: Final = "which is after the step that ended it. Give a new episode an id of its own"


class StreamIngester:
    """Holds the lines between two flushes, and those that wait for others."""

    def __init__(
        self,
        lake: Lake,
        dataset: str,
        name: str,
        grammar: Grammar,
        spaces: tuple[Space, Space] | None,
        wait_s: float,
        on_rejected: Callable[[Finding], None] | None,
        readmit: bool,
        unique: UniqueKeys | None,
        on_conflict: OnConflict,
    ) -> None:
        self._name = name
        self._grammar = grammar
        self._wait_s = wait_s
        self._on_rejected = on_rejected
        self._pieces = StreamWriter(
            lake, dataset, name, grammar, spaces, readmit, unique, on_conflict
        )
        self._new: list[StreamRow] = []
        self._waiting: list[StreamRow] = []
        self._num_bytes = 0
        self._num_lines = 0
        self._num_without_steps = 0
        self._refused: list[tuple[StreamRow, Finding]] = []
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}
        self._starts = {0}

    @property
    def is_holding(self) -> bool:
        """Whether there is anything to flush."""
        return bool(self._new or self._waiting or self._refused)

    @property
    def is_full(self) -> bool:
        """Whether memory is: it is time to flush before the interval is over."""
        return self._num_bytes >= _WINDOW_BYTES

    @property
    def progress(self) -> StreamProgress:
        """How far it is."""
        pieces = self._pieces
        return StreamProgress(self._num_lines, pieces.num_steps, len(self._waiting), pieces.version)

    def add(self, line: Line, now: float) -> None:
        """Take a line."""
        found = self._grammar.parse(line, now)
        if found is None:
            return
        self._num_lines += 1
        self._num_bytes += len(line.text)
        if isinstance(found, Finding):
            row = StreamRow(
                line.number, 0, now, {"line": line.text[:4096].decode(errors="replace")}
            )
            self._reject(row, found)
        else:
            self._num_without_steps += not found
            self._new += found

    def flush(self, now: float, *, is_last: bool = False) -> None:
        """Commit what can be, and give up what has waited too long. Raises: StorageError."""
        if self._new:
            self._grammar.learn(self._new)
        rows = [*self._waiting, *self._place_rows()]
        cutoff = float("inf") if is_last else max(now - self._wait_s, _memory_cutoff(rows))
        # Where nothing is new, nothing has changed for those that wait.
        has_changed = bool(self._new) or any(row.arrived_s <= cutoff for row in rows)
        self._new, self._num_bytes = [], 0
        while rows and has_changed:
            remaining = self._process(rows, cutoff)
            has_changed = len(remaining) < len(rows)
            rows = remaining
        self._waiting = []
        for row in rows:
            if row.arrived_s <= cutoff:
                self._reject(row, self._gap(row))
            else:
                self._waiting.append(row)
        self._quarantine()
        if is_last:
            self._pieces.account()

    def receipt(self) -> StreamReceipt:
        """Return what became of the lines."""
        pieces = self._pieces
        rejected = sum(self._counts.values()) + pieces.keys.conflicts
        ordered = sorted(self._counts.items(), key=lambda item: -item[1])
        return StreamReceipt(
            dataset=pieces.dataset,
            stream=self._name,
            lines=Counts(
                pieces.num_steps,
                rejected,
                pieces.num_present + pieces.keys.present,
                pieces.num_deleted_before,
            ),
            num_commits=pieces.num_commits,
            version=pieces.version,
            reasons=tuple(Reason(check, n, self._examples[check]) for check, n in ordered),
            num_lines=self._num_lines,
            notes=(*pieces.notes, *self._note_without_steps(), *self._note_equal_samples()),
            renames=dict(self._grammar.renames),
            keys=pieces.keys,
        )

    def _note_without_steps(self) -> list[str]:
        if not self._num_without_steps:
            return []
        num = self._num_without_steps
        return [f"{num:,} lines without a turn of an assistant, and so without a step"]

    def _note_equal_samples(self) -> list[str]:
        kind = self._grammar.kind
        if kind is None or not kind.has_numbered_ids or not self._pieces.num_present:
            return []
        return [
            f"{self._pieces.num_present:,} steps of samples without an id equal stored ones, and "
            "are taken for these; a log is read from its first line to tell equal samples apart"
        ]

    def _place_rows(self) -> list[StreamRow]:
        placed = []
        for row in self._new:
            finding = self._grammar.place(row)
            if finding is None:
                placed.append(row)
            else:
                self._reject(row, finding)
        return placed

    def _process(self, rows: Sequence[StreamRow], cutoff: float) -> list[StreamRow]:
        """Decide what can be decided of the rows, and return the others, in their order."""
        window = self._pieces.window(rows)
        decided = set(window.faults)
        for i, finding in window.faults.items():
            self._reject(rows[i], finding)
        groups: dict[Key, list[int]] = {}
        for i, row in enumerate(rows):
            if i not in decided:
                groups.setdefault((row.episode, row.agent), []).append(i)
        reached = self._pieces.present.find(groups)
        runs: list[list[int]] = []
        again: list[int] = []
        for key, indices in groups.items():
            indices.sort(key=lambda i: rows[i].step)
            run, old, after = self._partition_rows(rows, indices, reached[key], cutoff)
            again += old
            runs += [run] if run else []
            for i in after:
                self._reject(rows[i], self._finding("end_inside", rows[i], _AFTER_END))
                decided.add(i)
        # What is there already is compared first: a commit would move what is compared with.
        for i, difference in self._pieces.compare(window, again):
            decided.add(i)
            if difference is not None:
                self._reject(rows[i], difference)
        done, rejections = self._pieces.commit(window, runs, reached)
        decided.update(done)
        for i, finding in rejections:
            self._reject(rows[i], finding)
            decided.add(i)
        return [row for i, row in enumerate(rows) if i not in decided]

    def _partition_rows(
        self,
        rows: Sequence[StreamRow],
        indices: Sequence[int],
        reached: StreamPosition | None,
        cutoff: float,
    ) -> tuple[list[int], list[int], list[int]]:
        """Part an episode's rows: the run that follows, those there before, those after its end."""
        old: list[int] = []
        if reached is None:
            following = rows[indices[0]].step
            has_waited = any(rows[i].arrived_s <= cutoff for i in indices)
            is_start = following in self._starts or self._grammar.is_decision
            if not is_start and not has_waited:
                return [], [], []
            if following == 1:
                # Steps of this stream count from 1: its episodes need not wait for a step 0.
                self._starts.add(1)
        else:
            following = reached.following
            old = [i for i in indices if reached.first <= rows[i].step < following]
            indices = [i for i in indices if rows[i].step >= following]
            if reached.ended:
                return [], old, list(indices)
        run = []
        for i in indices:
            # Of a step that came twice the first counts; the other is compared with it later.
            if rows[i].step == following:
                run.append(i)
                following += 1
        return run, old, []

    def _gap(self, row: StreamRow) -> Finding:
        key = (row.episode, row.agent)
        reached = self._pieces.present.find([key])[key]
        if reached is None or row.step < reached.first:
            first = "none" if reached is None else f"{reached.first} and later ones"
            reason = f"which came after {first} of its episode had been committed"
        else:
            reason = f"whose predecessors from {reached.following} on have not come"
        return self._finding("gap", row, f"{reason}. Send the lines of the episode again")

    def _finding(self, check: str, row: StreamRow, reason: str) -> Finding:
        return Finding(
            check,
            f"{self._grammar.name} line {row.line}: found step {row.step} of episode "
            f"{row.episode}, {reason}",
        )

    def _reject(self, row: StreamRow, finding: Finding) -> None:
        self._counts[finding.check] = self._counts.get(finding.check, 0) + 1
        self._examples.setdefault(finding.check, finding.message)
        self._pieces.num_rejected += 1
        if len(self._refused) < _MAX_BUFFERED_REJECTED or self._pieces.exists:
            self._refused.append((row, finding))
        if self._on_rejected is not None:
            self._on_rejected(finding)

    def _quarantine(self) -> None:
        if not self._pieces.exists:
            return  # kept until there is a dataset to lie beside
        self._pieces.quarantine_rejected(
            [self._to_rejected(*one) for one in self._refused], quarantine
        )
        self._refused = []

    def _to_rejected(self, row: StreamRow, finding: Finding) -> RejectedEpisode:
        # A line that names no episode gets an id of its own: lines of several people under one id
        # could only be deleted together.
        episode = row.episode or f"line-{row.line}/{new_ulid()}"
        layout = self._grammar.layout
        mapping = None if layout is None else layout.mapping()
        return RejectedEpisode(episode, 1, (finding,), row.agent, _to_table(row), mapping=mapping)


def _memory_cutoff(rows: Sequence[StreamRow]) -> float:
    """Return when the last of those rows came that memory has no room for, oldest first."""
    excess = sum(row.num_bytes for row in rows) - _WINDOW_BYTES - _WAITING_BYTES
    cutoff = float("-inf")
    for row in rows:
        if excess <= 0:
            break
        excess -= row.num_bytes
        cutoff = row.arrived_s
    return cutoff


def _to_table(row: StreamRow) -> pa.Table:
    """Return a line's values; those that no column takes as their JSON."""
    columns = {}
    for name, value in row.values.items():
        try:
            columns[name] = pa.array([value])
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            columns[name] = pa.array([json.dumps(value)])
    return pa.table(columns)
