"""Annotate: labels that came after the fact, written to the steps or episodes that they are of.

What is decided, and why:
    - One commit. Its producer is the hash of the labels, their key and what is assigned, so the
      same call again changes nothing; earlier versions keep what they had.
    - A label that is NULL leaves the value as it is: a table of labels is rarely whole.
    - A column that is added goes to every step of an episode that a label names. A reward goes to
      the last step alone, which is what a judge's score means, unless `to` says each.
    - What cannot be told apart is left alone and counted: a key that the labels have with several
      values, one of a single step that names several, and one that names several episodes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.schema import REWARD, STEP
from replaylake.datastore.errors import ConfigInvalid, NotFound
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.labels.columns import check_assigned, typed_columns
from replaylake.datastore.maintenance.labels.expression import LabelExpression, parse_expression
from replaylake.datastore.maintenance.labels.labels import (
    Key,
    Labels,
    check_key,
    parse_key,
    prepare,
    renamed,
)
from replaylake.datastore.maintenance.labels.match import Match, match
from replaylake.datastore.query.table_files import arrow_of, scanning
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.rewrite import ChangeRows, Plan, rewrite, with_values
from replaylake.datastore.storage.table.table import TableSnapshot

To = Literal["last", "each"]
OnProgress = Callable[[int, int], None]

_INFO: Final = "annotated"
_COUNTS: Final = (
    "labels",
    "matched",
    "unmatched",
    "ambiguous",
    "repeated",
    "steps",
    "unchanged",
    "open_episodes",
    "shards",
)


@dataclass(frozen=True)
class AnnotationReceipt:
    """What an annotation found and changed.

    version: the commit; None if nothing was changed. already_present: an earlier call was the same,
    and these are its counts, 0 once its commit was dropped from the log. refused: nothing was
    written, because `strict` was asked for and some label is unmatched or ambiguous.

    labels: rows given; they are matched, unmatched (no step has the key, or the row has none),
    ambiguous or repeated (the same again). steps: rows whose values changed. unchanged: rows that
    had these values. open_episodes: those whose last step so far got the reward, and which have not
    ended. shards: how many were written again. The keys are the first few, as examples; not kept.
    """

    dataset: str
    version: int | None
    already_present: bool
    refused: bool
    labels: int
    matched: int
    unmatched: int
    ambiguous: int
    repeated: int
    steps: int
    unchanged: int
    open_episodes: int
    shards: int
    columns: tuple[str, ...]
    unmatched_keys: tuple[tuple[Any, ...], ...] = ()
    ambiguous_keys: tuple[tuple[Any, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def annotate(
    lake: Lake,
    dataset: str,
    labels: pa.Table,
    *,
    on: str | Sequence[str] | Mapping[str, str],
    set: Mapping[str, str] | None = None,
    add: str | Sequence[str] | Mapping[str, str] = (),
    to: To = "last",
    again: bool = False,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> AnnotationReceipt:
    """Write labels to the steps that they are of, in one commit.

    Args:
        lake: the lake.
        dataset: its name.
        labels: one row a label.
        on: the key: decision_id, request_id, or episode_id or source_episode_id with step and
            agent_id as need be. As a mapping it says what the labels call each.
        set: `reward`, and an SQL expression over the columns of a label and of its step, which has
            the name `steps`, such as `steps.reward + 0.5 * score`.
        add: further columns of the dataset, or which columns of the labels they are.
        to: which step of an episode gets the reward, where the key names one: last or each.
        again: apply the same labels once more, to steps that came since. Refused for a reward that
            builds on what the step has.
        strict: write nothing if a label is unmatched or ambiguous.
        on_progress: called with (shards looked through, shards).

    Raises: NotFound, ConfigInvalid, SchemaMismatch, QueryRefused, QueryFailed, ShardCorrupt. Cost:
    two scans of the key's columns; memory is one shard and a few numbers a label and matched step.
    """
    handle = lake.dataset(dataset)
    schema = handle.snapshot().table.schema
    key = parse_key(on)
    check_key(key, schema)
    added = renamed(add)
    check_assigned(set or {}, added, key, to)
    expression = None
    if set:
        expression = parse_expression(set[REWARD], labels.column_names, schema.names)
        if again and expression.step_columns:
            raise ConfigInvalid(
                f"--again: found a reward of {', '.join(expression.step_columns)} of the step, "
                "expected one of the labels alone: applied twice, it would count twice."
            )
    used = [*added.values(), *(expression.label_columns if expression else ())]
    ready = prepare(labels, key, used)
    producer = _producer(key, ready, expression, added, to)
    sequence = handle.next_sequence(producer) if again else 0
    work = _Work(dataset, key, ready, expression, typed_columns(ready, added, schema), to, strict)
    work.on_progress = on_progress
    done = rewrite(
        handle.table, work.plan, producer=producer, sequence=sequence, operation="ANNOTATE"
    )
    if done is None:
        return work.receipt
    if done.already_present:
        counts = _counts(handle, done.version)
        return replace(work.receipt, **counts, version=done.version, already_present=True)
    return replace(work.receipt, version=done.version)


def _counts(handle: Dataset, version: int) -> dict[str, Any]:
    """Return what an annotation counted; nothing where its commit was dropped from the log."""
    try:
        return dict(handle.commit_info(version)[_INFO])
    except NotFound:
        return {}


def _producer(
    key: Key,
    labels: Labels,
    expression: LabelExpression | None,
    added: Mapping[str, str],
    to: To,
) -> str:
    """Return a name for these labels, this key and what is assigned."""
    assigned = None if expression is None else [expression.text, to]
    content = [labels.content_hash, sorted(key.columns.items()), sorted(added.items()), assigned]
    return f"annotate/{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]}"


class _Work:
    """An annotation as it is planned, perhaps several times; `receipt` is of the last plan."""

    def __init__(
        self,
        dataset: str,
        key: Key,
        labels: Labels,
        expression: LabelExpression | None,
        added: Mapping[str, pa.Array],
        to: To,
        strict: bool,
    ) -> None:
        self.on_progress: OnProgress | None = None
        self._key, self._labels, self._to = key, labels, to
        self._expression, self._added, self._strict = expression, added, strict
        columns = ([REWARD] if expression else []) + list(added)
        self.receipt = AnnotationReceipt(
            dataset, None, False, False, labels.num_given, 0, 0, labels.num_ambiguous,
            labels.num_repeated, 0, 0, 0, 0, tuple(columns),
        )  # fmt: skip

    def plan(self, snapshot: TableSnapshot) -> Plan:
        """Find the steps of the labels, and the shards of which some step changes."""
        if self._expression is not None:
            # What DuckDB refuses is refused also where no label finds a step.
            self._expression.evaluate(
                self._labels.values.slice(0, 0), snapshot.schema.empty_table()
            )
        only_last = self._expression is not None and self._to == "last"
        found = match(snapshot, self._key, self._labels, only_last=only_last)
        self.receipt = replace(
            self.receipt,
            matched=found.num_matched,
            unmatched=found.num_unmatched + self._labels.num_without_key,
            ambiguous=found.num_ambiguous + self._labels.num_ambiguous,
            open_episodes=found.num_open if only_last else 0,
            unmatched_keys=found.unmatched_keys,
            ambiguous_keys=(*self._labels.ambiguous_keys, *found.ambiguous_keys)[:10],
        )
        if self._strict and (self.receipt.unmatched or self.receipt.ambiguous):
            self.receipt = replace(self.receipt, refused=True)
            return Plan({})
        return self._planned(snapshot, found)

    def _planned(self, snapshot: TableSnapshot, found: Match) -> Plan:
        changes: dict[FileEntry, ChangeRows] = {}
        num_steps = num_matched = 0
        for index, entry in enumerate(snapshot.files):
            hits = found.of_file(index)
            if not self._added:
                hits = hits.filter(hits.column("is_target"))
            if hits.num_rows:
                changed = self._num_changed(snapshot, entry, hits)
                num_steps += changed
                num_matched += hits.num_rows
                if changed:
                    changes[entry] = self._change(hits)
            if self.on_progress is not None:
                self.on_progress(index + 1, len(snapshot.files))
        self.receipt = replace(
            self.receipt,
            steps=num_steps,
            unchanged=num_matched - num_steps,
            shards=len(changes),
        )
        # Counts alone: keys and expressions may name people, and a purge cannot reach the log.
        body = asdict(self.receipt)
        return Plan(changes, {_INFO: {name: body[name] for name in _COUNTS}})

    def _num_changed(self, snapshot: TableSnapshot, entry: FileEntry, hits: pa.Table) -> int:
        """Count the steps of a shard that change, reading only the columns that it takes."""
        names = {STEP, *(name for name in self._added if name in snapshot.schema.names)}
        if self._expression is not None:
            names |= {REWARD, *self._expression.step_columns}
        ordered = [name for name in snapshot.schema.names if name in names]
        rows = replace(snapshot, files=(entry,)).read(ordered)
        is_changed = np.zeros(rows.num_rows, dtype=bool)
        for _, at, _ in self._new_values(rows, hits):
            is_changed[at] = True
        return int(is_changed.sum())

    def _change(self, hits: pa.Table) -> ChangeRows:
        def change(rows: pa.Table) -> pa.Table:
            for name, at, values in self._new_values(rows, hits):
                rows = with_values(rows, name, at, values)
            return rows

        return change

    def _new_values(
        self, rows: pa.Table, hits: pa.Table
    ) -> list[tuple[str, NDArray[np.int64], pa.Array]]:
        """Return for each column the places in a shard whose value changes, and the new values."""
        found = []
        if self._expression is not None:
            chosen = hits.filter(hits.column("is_target"))
            labels = self._labels.values.take(chosen.column("label"))
            at = chosen.column("row").combine_chunks()
            rewards = self._expression.evaluate(labels, rows.take(at))
            found.append((REWARD, at, rewards))
        for name, column in self._added.items():
            values = column.take(hits.column("label").combine_chunks())
            found.append((name, hits.column("row").combine_chunks(), values))
        changed = [(name, *_differing(rows, name, at, values)) for name, at, values in found]
        return [(name, at, values) for name, at, values in changed if len(at)]


def _differing(
    rows: pa.Table, name: str, at: pa.Array, values: pa.Array
) -> tuple[NDArray[np.int64], pa.Array]:
    """Leave out values that are null, and those that the step has already."""
    differs = values.is_valid()
    if name in rows.column_names:
        old = rows.column(name).take(at).combine_chunks()
        pairs = pa.table({"old": _plain(old), "new": _plain(values), "place": range(len(at))})
        with scanning({"pairs": pairs}) as connection:
            query = "SELECT old IS DISTINCT FROM new AS differs FROM pairs ORDER BY place"
            other = arrow_of(connection, query).column("differs").combine_chunks()
        differs = pc.and_(differs, other)
    return at.filter(differs).to_numpy().astype(np.int64), values.filter(differs)


def _plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
