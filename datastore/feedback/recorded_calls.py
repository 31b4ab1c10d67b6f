"""Recorded calls: calls of language models that a gateway passed on, as steps of their dataset.

Unlike a decision, a call waits for nothing: its row is a step of an open episode from the moment
that it is committed. So a gateway's journal is one of the dataset's own table, and its records are
rows, with the columns of `calls_schema`. Outcomes are reported later (call_outcomes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import pyarrow as pa

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.compatibility import is_compatible
from replaylake.datastore.episodes.message_media import CommittedMedia, move_media
from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    ENV_STEP,
    EPISODE_ID,
    SOURCE_EPISODE_ID,
    STANDARD_COLUMNS,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
    DatasetSpec,
)
from replaylake.datastore.episodes.spaces import Text, describe
from replaylake.datastore.errors import (
    AlreadyExistsError,
    EpisodeInvalidError,
    SchemaMismatchError,
)
from replaylake.datastore.feedback.row_encoder import RowEncoder
from replaylake.datastore.feedback.segments import NOTHING_RECOVERED, Recovered, journal_folder
from replaylake.datastore.feedback.segments import recover as recover_segments
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_rows,
    scan_connection,
)

# The further columns of a dataset of calls, beside those of the messages themselves.
COMPLETION_ID: Final = "completion_id"
CALL_STATUS: Final = "call_status"
CONTEXT: Final = "context"
SAMPLE_INDEX: Final = "sample_index"
IDEMPOTENCY_KEY: Final = "idempotency_key"
CALL_COLUMNS: Final[Mapping[str, pa.DataType]] = {
    COMPLETION_ID: pa.string(),
    SAMPLE_INDEX: pa.int64(),
    IDEMPOTENCY_KEY: pa.string(),
    "run_id": pa.string(),
    "train_step": pa.int64(),
    "user_id": pa.string(),
    CALL_STATUS: pa.string(),
    "finish_reason": pa.string(),
    "sampling": pa.string(),
    "tools": pa.string(),
    "first_byte_s": pa.float64(),
    "duration_s": pa.float64(),
    CONTEXT: pa.string(),
    **{
        name: tokens.TOKEN_TYPES[name]
        for name in (
            tokens.OBSERVATION_TOKENS,
            tokens.ACTION_TOKENS,
            tokens.ACTION_LOG_PROBS,
            tokens.PARENT_AGENT_ID,
            tokens.PARENT_STEP,
            tokens.IS_CONTINUATION,
            tokens.IS_TRAINABLE,
        )
    },
}


Fit = Callable[[Any], Any]
"""Takes a value that is not None, and returns it, or None where its column cannot hold it."""


class RecentCall(NamedTuple):
    """The part of a recorded step that a gateway needs to continue it.

    context: as the gateway wrote it. ends: whether it ended its episode. sample_index: which of the
    samples of its answer it is. idempotency_key: that of its request.
    """

    episode_id: str
    agent_id: str
    step: int
    env_step: int
    source_episode_id: str | None
    completion_id: str | None
    context: str
    timestamp: int
    ends: bool
    group_id: str | None = None
    group_id_source: str | None = None
    sample_index: int = 0
    idempotency_key: str | None = None


def ensure_calls_dataset(dataset: Dataset, message_columns: Mapping[str, pa.DataType]) -> None:
    """Create the dataset where it is absent; give an existing one the columns that it lacks.

    message_columns: names and types of the columns that hold messages.
    Raises: SchemaMismatchError for a dataset whose steps are no calls of language models.
    """
    extras = {**message_columns, **CALL_COLUMNS}
    if not dataset.exists():
        with suppress(AlreadyExistsError):  # another gateway did, this moment
            dataset.create(Text(), Text(), extras=extras, rewards_optional=True)
    spec = dataset.spec
    _check_takes_calls(dataset.name, spec)
    dataset.table.extend(pa.schema(list(extras.items())))


def calls_encoder(dataset: Dataset, message_columns: Mapping[str, pa.DataType]) -> RowEncoder:
    """Return the function from journal records to steps; a record has the columns of a step.

    A record of another process may have further columns of the dataset, which are encoded too.
    """
    names = (*STANDARD_COLUMNS, *message_columns, *CALL_COLUMNS)
    table = dataset.table.snapshot().schema
    return _StepEncoder(dataset, [name for name in names if name in table.names])


class _StepEncoder(RowEncoder):
    """Encodes records as rows with some columns of a dataset, and whichever others they have.

    The media of their messages are stored beside them, each once in an episode.
    """

    def __init__(self, dataset: Dataset, names: Sequence[str]) -> None:
        table = dataset.table.snapshot().schema
        self._dataset = dataset
        self._media = CommittedMedia()
        super().__init__(self._encode_all, pa.schema([table.field(name) for name in names]))

    def prepare_commit(self, rows: pa.Table) -> pa.Table:
        return self._media.leave_out(move_media(rows, self._dataset.spec.extras))

    def note_commit(self, rows: pa.Table) -> None:
        self._media.add(rows)

    def _encode_all(self, records: Sequence[Mapping[str, Any]]) -> pa.Table:
        own = self.schema
        others = {name for record in records for name in record} - {*own.names}
        if others:
            # The dataset may have got them since: a recorder and a gateway share its journals.
            table = self._dataset.table.snapshot().schema
            for name in sorted(others & {*table.names}):
                own = own.append(table.field(name))
        return _to_table(records, own)


def make_fits(encoder: RowEncoder) -> dict[str, Fit]:
    """Return for each column the function that leaves of a value what the column can hold."""
    return {field.name: _make_fit(field.type) for field in encoder.schema}


def fit_call(row: Mapping[str, Any], fits: Mapping[str, Fit]) -> dict[str, Any]:
    """Return a row that can be stored: values of another type than their column's become NULL.

    They come from clients, engines and their functions. A record that does not fit would only fail
    at the commit, after the client was answered. Lists are as the caller made them. Columns that
    are NULL are left out, which is the same to the encoder, and shorter.
    """
    return {
        name: fitted
        for name, value in row.items()
        if value is not None and name in fits and (fitted := fits[name](value)) is not None
    }


def recover_calls(dataset: Dataset, encoder: RowEncoder) -> Recovered:
    """Commit the calls that killed gateways recorded and did not commit."""
    if not journal_folder(dataset.table).is_dir():
        return NOTHING_RECOVERED
    return recover_segments(dataset.table, encoder)


_RECENT: Final = f"""
SELECT {EPISODE_ID}, CAST({AGENT_ID} AS VARCHAR), {STEP}, {ENV_STEP}, {SOURCE_EPISODE_ID},
       {COMPLETION_ID}, {CONTEXT}, epoch_us({TIMESTAMP}), {TERMINATED} OR {TRUNCATED},
       group_id, group_id_source, coalesce({SAMPLE_INDEX}, 0), {IDEMPOTENCY_KEY}
FROM {{steps}} SEMI JOIN {{episodes}} ON episodes.id = {EPISODE_ID}
WHERE {CONTEXT} IS NOT NULL
"""


def read_recent_calls(dataset: Dataset, since: int) -> list[RecentCall]:
    """Return the calls of every episode that has one since a time (us since 1970, UTC).

    They are in the order of their episodes' steps. Cost: a scan of the short columns of the shards
    written since then; of all others too, where some episode began before.
    """
    snapshot = dataset.table.snapshot()
    recent = [entry for entry in snapshot.files if entry.modified_ms * 1000 >= since]
    if not recent:
        return []
    with fetch_files(snapshot, recent) as paths, scan_connection() as connection:
        steps = from_clause(snapshot, paths)
        episodes = (
            f"(SELECT DISTINCT {EPISODE_ID} AS id FROM {steps} WHERE {CONTEXT} IS NOT NULL "
            f"AND epoch_us({TIMESTAMP}) >= {since}) AS episodes"
        )
        rows = query_rows(connection, _RECENT.format(steps=steps, episodes=episodes))
    found: dict[str, set[int]] = {}
    for row in rows:
        found.setdefault(row[0], set()).add(row[3])
    partial = [name for name, env_steps in found.items() if len(env_steps) <= max(env_steps)]
    older = [entry for entry in snapshot.files if entry.modified_ms * 1000 < since]
    if partial and older:
        ids = {"episodes": pa.table({"id": pa.array(partial, pa.string())})}
        with fetch_files(snapshot, older) as paths, scan_connection(ids) as connection:
            steps = from_clause(snapshot, paths)
            rows += query_rows(connection, _RECENT.format(steps=steps, episodes="episodes"))
    rows.sort(key=lambda row: (row[0], row[3], row[7]))
    return list(map(RecentCall._make, rows))


def _make_fit(kind: pa.DataType) -> Fit:
    if pa.types.is_string(kind) or pa.types.is_dictionary(kind):
        return _fit_text
    if pa.types.is_boolean(kind):
        return lambda value: value if isinstance(value, bool) else None
    if pa.types.is_floating(kind):
        return _fit_number
    if pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
        limit = 2 ** (kind.bit_width - 1)
        return lambda value: value if type(value) is int and -limit <= value < limit else None
    return lambda value: value


def _fit_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    if value.isascii() and "\0" not in value:
        return value
    # Half of a surrogate pair is no character, and no engine shows text after a NUL.
    text = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _fit_number(value: Any) -> float | int | None:
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _check_takes_calls(name: str, spec: DatasetSpec) -> None:
    for what in ("observation_space", "action_space"):
        if not is_compatible(getattr(spec, what), Text()):
            raise SchemaMismatchError(
                f"dataset {name}: found the {what.replace('_', ' ')} "
                f"{describe(getattr(spec, what))}, expected texts. Record into another dataset."
            )
    if not spec.rewards_optional or spec.unique is not None:
        found = "a unique key" if spec.rewards_optional else "rewards that must be known"
        raise SchemaMismatchError(
            f"dataset {name}: found {found}, expected a dataset that a gateway made, or one of "
            "transcripts. Record into another dataset."
        )


def _to_table(records: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    columns = []
    for field in schema:
        cells = [record.get(field.name) for record in records]
        if not field.nullable and None in cells:
            raise EpisodeInvalidError(
                f"record {cells.index(None)}: found no {field.name}, expected {field.type}."
            )
        try:
            columns.append(pa.array(cells, field.type))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise EpisodeInvalidError(f"{field.name}: {error}, expected {field.type}.") from error
    return pa.Table.from_arrays(columns, schema=schema)
