"""Annotate: labels that came after the fact, written to the steps or episodes that they are of.

What is decided, and why:
    - One commit. Its producer is the hash of the labels, their key and what is assigned, so the
      same call again changes nothing; earlier versions keep what they had.
    - A label that is NULL leaves the value as it is: a table of labels is rarely whole.
    - A column that is added goes to every step of an episode that a label names. A reward goes to
      the last step alone, which is what a judge's score means, unless `to` says each.
    - A column with one value for each token of an action is checked against the action of its step,
      and refused if it does not match, before anything is written.
    - What cannot be told apart is left alone and counted: a key that the labels have with several
      values, one of a single step that names several, and one that names several episodes.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    REWARD,
    STANDARD_COLUMNS,
    STEP,
    TERMINATED,
    TRUNCATED,
    check_names,
)
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.tokens import (
    ACTION_TOKENS,
    TOKEN_FACTS,
    TOKEN_TYPES,
    cast_decimals,
    cast_to_token_type,
    check_per_token,
    has_tokens,
    is_per_token,
)
from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    SchemaMismatchError,
)
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    REPORTED,
    REQUEST_ID,
    REWARD_LATE,
    REWARDED_AT,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.labels.expression import LabelExpression, parse_expression
from replaylake.datastore.maintenance.labels.labels import (
    MAX_EXAMPLES,
    LabelKey,
    Labels,
    check_key,
    parse_key,
    parse_names,
    prepare_labels,
)
from replaylake.datastore.query.sequence_views import SEQUENCE_SOURCES
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    scan_connection,
)
from replaylake.datastore.storage.arrow_values import is_list
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.rewrite import ChangeRows, RewritePlan, rewrite, with_values
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
_RESERVED: Final = (
    *STANDARD_COLUMNS,
    DECISION_ID,
    REPORTED,
    REQUEST_ID,
    REWARDED_AT,
    REWARD_LATE,
)
_HITS: Final = pa.schema(
    [
        ("file", pa.int64()),
        ("row", pa.int64()),
        ("label", pa.int64()),
        ("is_target", pa.bool_()),
    ]
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
    """Write labels to the steps that they match, in one commit.

    Args:
        lake: the lake.
        dataset: its name.
        labels: one row per label.
        on: the key: decision_id or request_id, or else episode_id or source_episode_id, to which
            step and agent_id may be added. A mapping gives the column of the labels for each.
        set: `reward` and an SQL expression over the columns of a label and of its step, which has
            the name `steps`, for example `steps.reward + 0.5 * score`.
        add: further columns of the dataset to write, or a mapping from them to columns of the
            labels. In a dataset with token columns, those that have one value for each token of an
            action (`tokens.is_per_token`) are checked against the step's.
        to: which step of an episode gets the reward if the key identifies an episode: last or each.
        again: apply the same labels also to steps that were added since. Refused for a reward that
            uses the step's own columns.
        strict: write nothing if a label is unmatched or ambiguous.
        on_progress: called with (shards searched, shards).

    Raises: NotFoundError, ConfigInvalidError, SchemaMismatchError, QueryRefusedError, QueryError,
    ShardCorruptError; EpisodeInvalidError for values that are not one for each token. Cost: two
    scans of the key's columns; memory for one shard and a few numbers per label and matched step.
    """
    handle = lake.dataset(dataset)
    schema = handle.snapshot().table.schema
    key = parse_key(on)
    check_key(key, schema)
    added = parse_names(add)
    check_assigned(set or {}, added, key, to, schema)
    _check_not_unique(handle, added)
    expression = None
    if set:
        expression = parse_expression(set[REWARD], labels.column_names, schema.names)
        if again and expression.step_columns:
            raise ConfigInvalidError(
                f"again: found a reward of {', '.join(expression.step_columns)} of the step, "
                "expected one of label columns alone, because repeating it would add to the "
                "reward twice.",
                parameter="again",
            )
    used = [*added.values(), *(expression.label_columns if expression else ())]
    ready = prepare_labels(labels, key, used)
    producer = _producer(key, ready, expression, added, to)
    sequence = handle.next_sequence(producer) if again else 0
    work = _Annotation(
        dataset, key, ready, expression, cast_columns(ready, added, schema), to, strict
    )
    work.on_progress = on_progress
    return _write(handle, work, producer, sequence, "ANNOTATE")


def overwrite_columns(
    lake: Lake,
    dataset: str,
    labels: pa.Table,
    *,
    on: Sequence[str],
    add: Sequence[str],
    operation: str,
    info: Mapping[str, Any],
    check: Callable[[TableSnapshot], None] | None = None,
    shard_bytes: int | None = None,
    on_progress: OnProgress | None = None,
) -> AnnotationReceipt:
    """Write columns of labels to the steps that they match, NULL included, in one commit.

    Args:
        lake: the lake.
        dataset: its name.
        labels: one row per label.
        on: the key, as that of `annotate`.
        add: columns of the labels; a step that a label names has its values afterwards.
        operation: what the log calls the commit.
        info: what is recorded in the commit, besides the counts.
        check: called with each version on which the change is planned; what it raises ends this.
        shard_bytes: a larger shard is divided when it is written again, into shards with as much
            data, as Arrow counts it. For those who change a few steps at a time, many times.
        on_progress: called with (shards searched, shards).

    The same labels again change what was changed since; nothing is committed where nothing was.
    Raises: as annotate.
    """
    handle = lake.dataset(dataset)
    schema = handle.snapshot().table.schema
    key, added = parse_key(on), parse_names(add)
    check_key(key, schema)
    check_assigned({}, added, key, "last", schema)
    _check_not_unique(handle, added)
    ready = prepare_labels(labels, key, list(added.values()))
    # A label may add a column that has no value in any of its rows.
    typed = {
        name: column
        for name, column in cast_columns(ready, added, schema).items()
        if name in schema.names or column.null_count < len(column)
    }
    work = _Annotation(dataset, key, ready, None, typed, "last", strict=False)
    work.is_overwriting, work.info, work.on_progress = True, info, on_progress
    work.check = check
    producer = _producer(key, ready, None, added, "last", operation.lower())
    sequence = handle.next_sequence(producer)
    return _write(handle, work, producer, sequence, operation, shard_bytes)


def _check_not_unique(handle: Dataset, added: Mapping[str, str]) -> None:
    unique = handle.spec.unique
    if unique is not None and (keys := sorted({*added} & {*unique.columns})):
        raise ConfigInvalidError(
            f"add: found {keys[0]}, which is part of the dataset's unique key, expected another "
            "column: labels would give several steps one key.",
            parameter="add",
        )


def _write(
    handle: Dataset,
    work: _Annotation,
    producer: str,
    sequence: int,
    operation: str,
    shard_bytes: int | None = None,
) -> AnnotationReceipt:
    result = rewrite(
        handle.table,
        work.plan,
        producer=producer,
        sequence=sequence,
        operation=operation,
        shard_bytes=shard_bytes,
    )
    if result is None:
        return work.receipt
    if result.already_present:
        counts = _counts(handle, result.version)
        return replace(work.receipt, **counts, version=result.version, already_present=True)
    return replace(work.receipt, version=result.version)


def _counts(handle: Dataset, version: int) -> dict[str, Any]:
    """Return what an annotation counted; nothing where its commit was dropped from the log."""
    try:
        return dict(handle.commit_info(version)[_INFO])
    except NotFoundError:
        return {}


def _producer(
    key: LabelKey,
    labels: Labels,
    expression: LabelExpression | None,
    added: Mapping[str, str],
    to: To,
    verb: str = "annotate",
) -> str:
    """Return a name for these labels, this key and what is assigned."""
    assigned = None if expression is None else [expression.text, to]
    content = [labels.content_hash, sorted(key.columns.items()), sorted(added.items()), assigned]
    return f"{verb}/{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]}"


class _Annotation:
    """An annotation as it is planned, perhaps several times; `receipt` is of the last plan."""

    def __init__(
        self,
        dataset: str,
        key: LabelKey,
        labels: Labels,
        expression: LabelExpression | None,
        added: Mapping[str, pa.Array],
        to: To,
        strict: bool,
    ) -> None:
        self.on_progress: OnProgress | None = None
        # Whether a label that is NULL makes the value NULL; and what else the commit records.
        self.is_overwriting = False
        self.info: Mapping[str, Any] = {}
        self.check: Callable[[TableSnapshot], None] | None = None
        self._key, self._labels, self._to = key, labels, to
        self._expression, self._added, self._strict = expression, added, strict
        columns = ([REWARD] if expression else []) + list(added)
        self.receipt = AnnotationReceipt(
            dataset, None, False, False, labels.num_given, 0, 0, labels.num_ambiguous,
            labels.num_repeated, 0, 0, 0, 0, tuple(columns),
        )  # fmt: skip

    def plan(self, snapshot: TableSnapshot) -> RewritePlan:
        """Find the steps of the labels, and the shards of which some step changes."""
        if self.check is not None:
            self.check(snapshot)
        if self._expression is not None:
            # What DuckDB refuses is refused also where no label finds a step.
            self._expression.evaluate(
                self._labels.values.slice(0, 0), snapshot.schema.empty_table()
            )
        only_last = self._expression is not None and self._to == "last"
        match = match_labels(snapshot, self._key, self._labels, only_last=only_last)
        self.receipt = replace(
            self.receipt,
            matched=match.num_matched,
            unmatched=match.num_unmatched + self._labels.num_without_key,
            ambiguous=match.num_ambiguous + self._labels.num_ambiguous,
            open_episodes=match.num_open if only_last else 0,
            unmatched_keys=match.unmatched_keys,
            ambiguous_keys=(*self._labels.ambiguous_keys, *match.ambiguous_keys)[:10],
        )
        if self._strict and (self.receipt.unmatched or self.receipt.ambiguous):
            self.receipt = replace(self.receipt, refused=True)
            return RewritePlan({})
        return self._plan_changes(snapshot, match)

    def _plan_changes(self, snapshot: TableSnapshot, match: LabelMatch) -> RewritePlan:
        changes: dict[FileEntry, ChangeRows] = {}
        # All shards get the same new columns, in one order, by which they get their field ids.
        new_columns: set[str] = set()
        step_counts = np.bincount(match.hits.column("label").to_numpy())
        num_steps = num_matched = 0
        for index, entry in enumerate(snapshot.files):
            hits = match.hits_in_file(index)
            if not self._added:
                hits = hits.filter(hits.column("is_target"))
            if hits.num_rows:
                self._check_per_token(snapshot, entry, hits, step_counts)
                changed, names = self._find_changed(snapshot, entry, hits)
                num_steps += changed
                num_matched += hits.num_rows
                if changed:
                    changes[entry] = self._change(hits, new_columns)
                    new_columns |= names - {*snapshot.schema.names}
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
        counts = {_INFO: {name: body[name] for name in _COUNTS}}
        return RewritePlan(changes, {**counts, **self.info})

    def _check_per_token(
        self, snapshot: TableSnapshot, entry: FileEntry, hits: pa.Table, step_counts: Array
    ) -> None:
        """Refuse lists that do not have one value for each token of the action of their step.

        step_counts: number of steps that each label matches, by label.
        """
        per_token = {
            name: column
            for name, column in self._added.items()
            if has_tokens(snapshot.schema.names) and is_per_token(name, column.type)
        }
        if not per_token:
            return
        wanted = (EPISODE_ID, AGENT_ID, STEP, ACTION_TOKENS)
        names = [name for name in snapshot.schema.names if name in wanted]
        rows = replace(snapshot, files=(entry,)).read(names).take(hits.column("row"))

        def name_row(row: int) -> str:
            agent = str(rows.column(AGENT_ID)[row])
            whose = f" of agent {agent}" if agent else ""
            return (
                f"at step {rows.column(STEP)[row]} of episode {rows.column(EPISODE_ID)[row]}{whose}"
            )

        labels = hits.column("label").combine_chunks()
        shared = np.flatnonzero(step_counts[labels.to_numpy()] > 1)
        if len(shared):
            raise ConfigInvalidError(
                f"on: found a label of {step_counts[labels[int(shared[0])].as_py()]} steps for "
                f"{next(iter(per_token))}, one of them {name_row(int(shared[0]))}, expected a "
                "label of one step, since its values belong to one generation. Add step to `on`.",
                parameter="on",
            )
        actions = rows.column(ACTION_TOKENS).combine_chunks()
        for name, column in per_token.items():
            check_per_token(name, column.take(labels), actions, name_row)

    def _find_changed(
        self, snapshot: TableSnapshot, entry: FileEntry, hits: pa.Table
    ) -> tuple[int, set[str]]:
        """Count the steps of a shard that change, and name the columns in which they do.

        Reads only the columns that it takes.
        """
        names = {STEP, *(name for name in self._added if name in snapshot.schema.names)}
        if self._expression is not None:
            names |= {REWARD, *self._expression.step_columns}
        ordered = [name for name in snapshot.schema.names if name in names]
        rows = replace(snapshot, files=(entry,)).read(ordered)
        is_changed = np.zeros(rows.num_rows, dtype=bool)
        columns = set()
        for name, at, _ in self._new_values(rows, hits):
            is_changed[at] = True
            columns.add(name)
        return int(is_changed.sum()), columns

    def _change(self, hits: pa.Table, new_columns: Collection[str]) -> ChangeRows:
        def change(rows: pa.Table) -> pa.Table:
            for name, column in self._added.items():
                if name in new_columns and name not in rows.column_names:
                    rows = rows.append_column(name, pa.nulls(rows.num_rows, column.type))
            for name, at, values in self._new_values(rows, hits):
                rows = with_values(rows, name, at, values)
            return rows

        return change

    def _new_values(
        self, rows: pa.Table, hits: pa.Table
    ) -> list[tuple[str, NDArray[np.int64], pa.Array]]:
        """Return for each column the places in a shard whose value changes, and the new values."""
        columns = []
        if self._expression is not None:
            targets = hits.filter(hits.column("is_target"))
            labels = self._labels.values.take(targets.column("label"))
            at = targets.column("row").combine_chunks()
            rewards = self._expression.evaluate(labels, rows.take(at))
            columns.append((REWARD, at, rewards))
        for name, column in self._added.items():
            values = column.take(hits.column("label").combine_chunks())
            columns.append((name, hits.column("row").combine_chunks(), values))
        changed = [
            (name, *_drop_unchanged(rows, name, at, values, self.is_overwriting))
            for name, at, values in columns
        ]
        return [(name, at, values) for name, at, values in changed if len(at)]


def _drop_unchanged(
    rows: pa.Table, name: str, at: pa.Array, values: pa.Array, takes_null: bool
) -> tuple[NDArray[np.int64], pa.Array]:
    """Leave out values that the step has already, and nulls, unless these are taken too."""
    is_new = name not in rows.column_names
    differs = values.is_valid() if is_new or not takes_null else pa.array(np.ones(len(at), bool))
    if not is_new:
        old = rows.column(name).take(at).combine_chunks()
        pairs = pa.table({"old": _plain(old), "new": _plain(values), "place": range(len(at))})
        with scan_connection({"pairs": pairs}) as connection:
            query = "SELECT old IS DISTINCT FROM new AS differs FROM pairs ORDER BY place"
            other = query_arrow(connection, query).column("differs").combine_chunks()
        differs = pc.and_(differs, other)
    return at.filter(differs).to_numpy().astype(np.int64), values.filter(differs)


def _plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def check_assigned(
    assignments: Mapping[str, str],
    added: Mapping[str, str],
    key: LabelKey,
    to: str,
    schema: pa.Schema,
) -> None:
    """Refuse what labels may not write to a dataset of this schema. Raises: ConfigInvalidError."""
    if not assignments and not added:
        raise ConfigInvalidError(
            "annotate: found nothing to write, expected `set` of reward, or `add`."
        )
    if other := sorted({*assignments} - {REWARD}):
        raise ConfigInvalidError(
            f"set: found {other[0]}, expected reward: the other columns of a step are part of "
            "the log. Ends are set by the log or by feedback, new columns with `add`.",
            parameter="set",
        )
    if clashes := sorted({*added} & {*_RESERVED}):
        raise ConfigInvalidError(
            f"add: found {clashes[0]}, expected none of the columns that every step has. Name it "
            f"otherwise, as in `add` my_{clashes[0]}={added[clashes[0]]}; a reward is `set`.",
            parameter="add",
        )
    if to not in ("last", "each"):
        raise ConfigInvalidError(f"to: found {to!r}, expected last or each.", parameter="to")
    if to == "each" and (not assignments or key.is_step_key):
        raise ConfigInvalidError(
            "to each: expected a reward and a key of episodes: other labels go to all steps that "
            "they name. Leave it out."
        )
    if has_tokens(schema.names):
        _check_beside_tokens(added)


def _check_beside_tokens(added: Mapping[str, str]) -> None:
    if facts := sorted({*added} & {*TOKEN_FACTS}):
        raise ConfigInvalidError(
            f"add: found {facts[0]}, which is part of the log, expected another column: tokens "
            "that were read and sampled, and the policy's log-probs of them, cannot be changed.",
            parameter="add",
        )
    per_token = [name for name in added if is_per_token(name, pa.list_(pa.float64()))]
    if taken := [name for name in per_token if name.lower() in SEQUENCE_SOURCES]:
        raise ConfigInvalidError(
            f"add: found {taken[0]}, which is a column of `sequences` that has other values, "
            "expected another name: the view would not have the values. Name it otherwise, as in "
            f"`add` {taken[0]}_2={added[taken[0]]}.",
            parameter="add",
        )


def cast_columns(
    labels: Labels, added: Mapping[str, str], schema: pa.Schema
) -> dict[str, pa.Array]:
    """Return the columns to add in the types that the dataset keeps.

    In a dataset with tokens, columns of `tokens.TOKEN_TYPES` have the types of their names, and new
    per-token columns of whole numbers are floats: later values may have fractions.

    Raises: SchemaMismatchError.
    """
    check_names(name for name in added if name not in schema.names)
    typed = {}
    for name, source in added.items():
        values = labels.values.column(source).unify_dictionaries().combine_chunks()
        if has_tokens(schema.names):
            values = _cast_beside_tokens(name, values, labels.keys, name not in schema.names)
        if name in schema.names and not values.type.equals(schema.field(name).type):
            values = _cast(values, name, schema.field(name).type)
        typed[name] = values
    return typed


def _cast_beside_tokens(name: str, values: pa.Array, keys: pa.Table, is_new: bool) -> pa.Array:
    cast: Callable[[pa.Array], pa.Array] | None = None
    values = cast_decimals(name, values)
    kind = values.type
    if name in TOKEN_TYPES:
        cast = partial(cast_to_token_type, name)
    elif is_new and is_per_token(name, kind) and pa.types.is_integer(kind.value_type):
        cast = partial(pa.Array.cast, target_type=pa.list_(pa.field("element", pa.float64())))
    if cast is None:
        return values
    try:
        return cast(values)
    except (SchemaMismatchError, pa.ArrowInvalid) as error:
        label = ""
        if len(values):
            row = _find_first_refused(cast, values)
            key = {ours: str(keys.column(ours)[row]) for ours in keys.column_names}
            label = ", label of " + ", ".join(f"{ours} {key[ours]}" for ours in key if key[ours])
        raise SchemaMismatchError(
            f"column {name!r}{label}: {error}. Cast the values, or add them under another name."
        ) from error


def _find_first_refused(cast: Callable[[pa.Array], pa.Array], values: pa.Array) -> int:
    """Return the first row that a cast refuses; if it refuses the type, the first value's row."""

    def is_refused(num_rows: int) -> bool:
        try:
            # A slice of lists shares the values of the others, which Arrow casts too.
            cast(values.take(pa.array(np.arange(num_rows))))
        except (SchemaMismatchError, pa.ArrowInvalid):
            return True
        return False

    num = bisect_left(range(len(values)), True, key=is_refused)
    return num - 1 if num else max(0, pc.index(values.is_valid(), True).as_py())


def _cast(values: pa.Array, name: str, kind: pa.DataType) -> pa.Array:
    actual, types = values.type, pa.types
    texts = types.is_string(actual) and types.is_dictionary(kind)
    texts |= types.is_dictionary(actual) and types.is_string(kind)
    numbers = types.is_integer(actual) and (types.is_floating(kind) or types.is_integer(kind))
    numbers |= types.is_floating(actual) and types.is_floating(kind)
    # Values for each token may have been read as integers, or with more digits.
    lists = is_list(actual) and is_list(kind) and types.is_floating(kind.value_type)
    lists = lists and (types.is_floating(actual.value_type) or types.is_integer(actual.value_type))
    try:
        if texts or numbers or lists:
            return values.dictionary_encode().cast(kind) if texts else values.cast(kind)
    except pa.ArrowException as error:
        raise _type_mismatch_error(name, f"{actual} ({error})", kind) from error
    raise _type_mismatch_error(name, str(actual), kind)


def _type_mismatch_error(name: str, found: str, kind: pa.DataType) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"column {name!r}: found {found}, expected {kind} as the dataset has it. Cast it, or add "
        f"it under another name, as in `add` {name}_2={name}."
    )


@dataclass(frozen=True)
class LabelMatch:
    """Which labels name what.

    hits: one row a matched step, by `file` (its place in the snapshot) and `row`: `label`, the row
    of the label, and `is_target`, whether it is the step that a reward goes to. num_open: matched
    labels of episodes that have not ended.
    """

    hits: pa.Table
    num_matched: int
    num_unmatched: int
    num_ambiguous: int
    num_open: int
    unmatched_keys: tuple[tuple[Any, ...], ...]
    ambiguous_keys: tuple[tuple[Any, ...], ...]

    def hits_in_file(self, index: int) -> pa.Table:
        """Return the hits in one file, by row."""
        files = self.hits.column("file").to_numpy()
        begin, end = np.searchsorted(files, [index, index + 1])
        return self.hits.slice(begin, end - begin)


def match_labels(
    snapshot: TableSnapshot, key: LabelKey, labels: Labels, *, only_last: bool
) -> LabelMatch:
    """Find the steps of labels.

    `only_last` says that a label of an episode is for its last step, which has to be one: an
    episode of several agents has several. Raises: ShardCorruptError.
    """
    num = labels.keys.num_rows
    if not snapshot.files or not num:
        hits = _HITS.empty_table()
        return LabelMatch(hits, 0, num, 0, 0, _examples(labels, np.arange(num)), ())
    keyed = labels.keys.append_column("label", pa.array(np.arange(num)))
    same = " AND ".join(f's."{name}" = l."{name}"' for name in key.columns)
    with (
        fetch_files(snapshot, snapshot.files) as paths,
        scan_connection({"labels": keyed}) as connection,
    ):
        pairs = f"labels l JOIN {from_clause(snapshot, paths)} s ON {same}"
        groups = query_arrow(
            connection,
            f"SELECT l.label, {_is_match_sql(key, only_last)} AS is_good, max(s.{STEP}) AS last, "
            f"bool_or(s.{TERMINATED} OR s.{TRUNCATED}) AS has_ended "
            f"FROM {pairs} GROUP BY l.label ORDER BY l.label",
        )
        good = groups.filter(groups.column("is_good"))
        connection.register("good", good)
        is_target = f"s.{STEP} = good.last" if only_last and not key.is_step_key else "true"
        hits = query_arrow(
            connection,
            f"SELECT s.file_index::BIGINT AS file, s.file_row_number::BIGINT AS row, l.label, "
            f"{is_target} AS is_target "
            f"FROM {pairs} JOIN good ON good.label = l.label ORDER BY file, row",
        )
    bad = groups.filter(pc.invert(groups.column("is_good"))).column("label").to_numpy()
    unmatched = np.setdiff1d(np.arange(num), groups.column("label").to_numpy())
    num_ended = pc.sum(good.column("has_ended")).as_py() or 0
    return LabelMatch(
        hits=hits,
        num_matched=good.num_rows,
        num_unmatched=len(unmatched),
        num_ambiguous=len(bad),
        num_open=0 if key.is_step_key else good.num_rows - num_ended,
        unmatched_keys=_examples(labels, unmatched),
        ambiguous_keys=_examples(labels, bad),
    )


def _is_match_sql(key: LabelKey, only_last: bool) -> str:
    """Return an aggregate that is true where a label names one step, or one episode."""
    if key.is_step_key:
        return "count(*) = 1"
    one = f"min(s.{EPISODE_ID}) = max(s.{EPISODE_ID})"
    return f"{one} AND min(s.{AGENT_ID}) = max(s.{AGENT_ID})" if only_last else one


def _examples(labels: Labels, rows: np.ndarray[Any, Any]) -> tuple[tuple[Any, ...], ...]:
    keys = labels.keys.take(pa.array(rows[:MAX_EXAMPLES], pa.int64()))
    return tuple(tuple(row.values()) for row in keys.to_pylist())
