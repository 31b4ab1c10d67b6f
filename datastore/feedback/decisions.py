"""Decisions and rewards at rest: their two tables, and how rows get in.

A served decision and the reward that follows it are written by different requests, often through
different workers, so they are rows of two tables that are never updated: `<dataset>/_decisions` and
`<dataset>/_rewards`. `join.py` joins them into episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.compatibility import find_encoding_mismatch, is_compatible
from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.schema import (
    ACTION,
    ACTION_MASK,
    EPISODE_ID,
    FINAL_OBSERVATION,
    OBSERVATION,
    POLICY,
    POLICY_VERSION,
    REWARD,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TIMESTAMP_TYPE,
    TRUNCATED,
    arrow_type,
    to_arrow,
    vector_type,
)
from replaylake.datastore.episodes.spaces import Space, as_values, describe, gather, num_actions
from replaylake.datastore.errors import AlreadyExistsError, EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.feedback.row_encoder import Encode, RowEncoder
from replaylake.datastore.feedback.segments import (
    NOTHING_RECOVERED,
    Recovered,
    journal_folder,
    recover,
)
from replaylake.datastore.lake.dataset import Dataset

# The columns that datasets do not have by these names, or only once served steps are in them.
DECISION_ID: Final = "decision_id"
REQUEST_ID: Final = "request_id"
LOG_PROB: Final = "log_prob"
DETERMINISTIC: Final = "deterministic"
# The sha256 of the manifest of the package that decided; NULL in rows of earlier releases.
PACKAGE_SHA256: Final = "package_sha256"
# Whether the client took the decision itself and sent it later; of served steps, NULL where not.
DECIDED_BY_CLIENT: Final = "decided_by_client"
# Of served steps: when the outcome that a step has was reported, and whether the step was written
# before that.
REWARDED_AT: Final = "rewarded_at"
REWARD_LATE: Final = "reward_late"
# Of served steps whose reward is a sum: what the reports came to, such as `1.5 terminated`. By it a
# part of the sum that is found later is told from a label that has replaced it.
REPORTED: Final = "reported"
# Of reports: the client's own name for one, and whether its reward replaces or adds.
FEEDBACK_ID: Final = "feedback_id"
MODE: Final = "mode"
LAST: Final = "last"
SUM: Final = "sum"

# How long a decision takes rewards, and its episode waits for them: a day, for clients that report
# in nightly jobs.
DEFAULT_WINDOW_S: Final = 86_400.0


def decisions_schema(observation_space: Space, action_space: Space) -> pa.Schema:
    """Return the columns of `<dataset>/_decisions`; `step` is the client's own number, if any."""
    num = num_actions(action_space)
    mask = [] if num is None else [pa.field(ACTION_MASK, vector_type(pa.bool_(), num))]
    return pa.schema(
        [
            pa.field(DECISION_ID, pa.string(), nullable=False),
            pa.field(REQUEST_ID, pa.string()),
            pa.field(EPISODE_ID, pa.string()),
            pa.field(STEP, pa.int32()),
            pa.field(TIMESTAMP, TIMESTAMP_TYPE, nullable=False),
            pa.field(POLICY, pa.string(), nullable=False),
            pa.field(POLICY_VERSION, pa.int64(), nullable=False),
            pa.field(OBSERVATION, arrow_type(observation_space), nullable=False),
            pa.field(ACTION, arrow_type(action_space), nullable=False),
            pa.field(LOG_PROB, pa.float32()),
            pa.field(DETERMINISTIC, pa.bool_(), nullable=False),
            pa.field(PACKAGE_SHA256, pa.string()),
            pa.field(DECIDED_BY_CLIENT, pa.bool_()),
            *mask,
        ]
    )


def rewards_schema(observation_space: Space) -> pa.Schema:
    """Return the columns of `<dataset>/_rewards`.

    A report names its decision by decision_id, by request_id, or by episode_id and step.
    """
    return pa.schema(
        [
            pa.field(DECISION_ID, pa.string()),
            pa.field(REQUEST_ID, pa.string()),
            pa.field(EPISODE_ID, pa.string()),
            pa.field(STEP, pa.int32()),
            pa.field(FEEDBACK_ID, pa.string()),
            pa.field(MODE, pa.string()),
            pa.field(TIMESTAMP, TIMESTAMP_TYPE, nullable=False),
            pa.field(REWARD, pa.float64(), nullable=False),
            pa.field(TERMINATED, pa.bool_(), nullable=False),
            pa.field(TRUNCATED, pa.bool_(), nullable=False),
            pa.field(FINAL_OBSERVATION, arrow_type(observation_space)),
        ]
    )


def ensure_feedback_tables(
    dataset: Dataset,
    observation_space: Space,
    action_space: Space,
    encoding: Encoding | None = None,
) -> None:
    """Create the dataset and its two feedback tables where they are absent.

    Tables of earlier releases get the columns that came since.

    Raises: SchemaMismatchError if the dataset exists with other spaces, or another encoding: its
    episodes could not be joined by those that this policy makes.
    """
    if not dataset.exists():
        with suppress(AlreadyExistsError):  # another worker did, this moment
            dataset.create(
                observation_space,
                action_space,
                mask_size=num_actions(action_space),
                encoding=encoding,
            )
    spec = dataset.spec
    _check_same(dataset.name, "observation", spec.observation_space, observation_space)
    _check_same(dataset.name, "action", spec.action_space, action_space)
    differs = find_encoding_mismatch(spec.encoding, encoding)
    if differs is not None:
        raise SchemaMismatchError(
            f"dataset {dataset.name!r} and the policy: {differs}, expected one encoding. Log to "
            "another dataset."
        )
    for table, schema in (
        (dataset.decisions, decisions_schema(spec.observation_space, spec.action_space)),
        (dataset.rewards, rewards_schema(spec.observation_space)),
    ):
        if not table.exists():
            with suppress(AlreadyExistsError):
                table.create(schema)
        table.extend(schema)


def decisions_encoder(dataset: Dataset) -> Encode:
    """Return the function from journal records to rows of the decisions table."""
    spec = dataset.spec
    schema = decisions_schema(spec.observation_space, spec.action_space)
    typed = {OBSERVATION: spec.observation_space, ACTION: spec.action_space}
    return RowEncoder(lambda records: _to_table(records, schema, typed), schema)


def rewards_encoder(dataset: Dataset) -> Encode:
    """Return the function from journal records to rows of the rewards table."""
    spec = dataset.spec
    schema = rewards_schema(spec.observation_space)
    typed = {FINAL_OBSERVATION: spec.observation_space}
    return RowEncoder(lambda records: _to_table(records, schema, typed), schema)


def recover_feedback(dataset: Dataset) -> Recovered:
    """Commit what killed servers had written and not yet committed; live servers are left alone."""
    total = NOTHING_RECOVERED
    for table, encoder in (
        (dataset.decisions, decisions_encoder),
        (dataset.rewards, rewards_encoder),
    ):
        if journal_folder(table).is_dir():
            total += recover(table, encoder(dataset))
    return total


def _to_table(
    records: Sequence[Mapping[str, Any]], schema: pa.Schema, typed: Mapping[str, Space]
) -> pa.Table:
    columns = []
    for field in schema:
        cells = [record.get(field.name) for record in records]
        if not field.nullable and None in cells:
            raise EpisodeInvalidError(
                f"record {cells.index(None)}: found no {field.name}, expected {field.type}."
            )
        columns.append(_column(field, cells, typed.get(field.name)))
    return pa.Table.from_arrays(columns, schema=schema)


def _column(field: pa.Field, cells: list[Any], space: Space | None) -> pa.Array:
    try:
        return pa.array(cells, field.type) if space is None else _encode_cells(space, cells)
    except (pa.ArrowException, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise EpisodeInvalidError(f"{field.name}: {error}, expected {field.type}.") from error


def _encode_cells(space: Space, cells: list[Any]) -> pa.Array:
    """Encode one value a cell, None as null."""
    present = [i for i, cell in enumerate(cells) if cell is not None]
    if not present:
        return pa.nulls(len(cells), arrow_type(space))
    values = as_values(space, gather(space, [cells[i] for i in present]), "observation")
    array = to_arrow(space, values)
    if len(present) == len(cells):
        return array
    positions: list[int | None] = [None] * len(cells)
    for position, row in enumerate(present):
        positions[row] = position
    return array.take(pa.array(positions, pa.int64()))


def _check_same(dataset: str, what: str, theirs: Space, ours: Space) -> None:
    """Compare what is stored. Box bounds may differ: a log's are often unknown."""
    if not is_compatible(theirs, ours):
        raise SchemaMismatchError(
            f"dataset {dataset}: the policy's {what} space is {describe(ours)}, the dataset's is "
            f"{describe(theirs)}. Log to another dataset, or serve a policy trained on this one."
        )
