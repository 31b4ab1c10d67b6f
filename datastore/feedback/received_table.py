"""Received: steps that were acted elsewhere and came by POST /episodes, at rest.

They are rows of `<dataset>/_received`, a table that is only appended to, with the columns of the
dataset's steps; `feedback join` moves them into the dataset (received_steps.py). An episode has the
same id in both, `received/<the client's>`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode, validate
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import (
    ACTION,
    ACTION_MASK,
    AGENT_ID,
    BEHAVIOR_LOG_PROB,
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
    DatasetSpec,
    arrow_schema,
)
from replaylake.datastore.errors import AlreadyExistsError, EpisodeInvalidError
from replaylake.datastore.feedback.segments import (
    NOTHING_RECOVERED,
    Recovered,
    journal_folder,
    recover,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.storage.table.table_schema import conform

# What the table has beside the columns of steps: when a step came, and what it says in short.
RECEIVED_AT: Final = "received_at"
CONTENT_HASH: Final = "content_hash"
PREFIX: Final = "received/"

_EXTRAS: Final = {RECEIVED_AT: TIMESTAMP_TYPE, CONTENT_HASH: pa.int64()}
# The name of its rows in a journal's record: Arrow's stream format, in base64.
_ROWS: Final = "rows"
_CONTENT: Final = (
    OBSERVATION,
    ACTION,
    REWARD,
    STEP,
    TERMINATED,
    TRUNCATED,
    BEHAVIOR_LOG_PROB,
    POLICY,
    POLICY_VERSION,
    ACTION_MASK,
    TIMESTAMP,
)


@dataclass(frozen=True)
class ReceivedPiece:
    """A checked piece of an episode as rows of the table, T of them."""

    rows: pa.Table

    @property
    def num_steps(self) -> int:
        return int(self.rows.num_rows)

    @property
    def key(self) -> tuple[str, str]:
        """The (episode, agent) that it is of."""
        return self.rows.column(EPISODE_ID)[0].as_py(), self.rows.column(AGENT_ID)[0].as_py()

    @property
    def contents(self) -> dict[int, int]:
        """By step, 64 bits of what it says."""
        steps, hashes = self.rows.column(STEP), self.rows.column(CONTENT_HASH)
        return dict(zip(steps.to_pylist(), hashes.to_pylist(), strict=True))

    @property
    def ends(self) -> bool:
        """Whether its last step ends the episode."""
        return any(self.rows.column(name)[-1].as_py() for name in (TERMINATED, TRUNCATED))

    @property
    def record(self) -> bytes:
        """It as a journal keeps it: one JSON object."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.rows.schema) as stream:
            stream.write_table(self.rows)
        # The id as text too, for whoever looks for it, as a purge does.
        fields = {EPISODE_ID: self.key[0], _ROWS: base64.b64encode(sink.getvalue()).decode()}
        return json.dumps(fields).encode()


def make_received_spec(spec: DatasetSpec, columns: Collection[str] = ()) -> DatasetSpec:
    """Return what rows of `<dataset>/_received` have, for a dataset's own spec.

    columns: those of the dataset's further columns that steps may come with.
    """
    own = {name: kind for name, kind in spec.extras.items() if name in columns}
    return replace(spec, extras={**own, **_EXTRAS})


def ensure_received_table(dataset: Dataset, columns: Collection[str] = ()) -> None:
    """Create the table where it is absent, else add what it lacks; the dataset has to exist.

    columns: as `make_received_spec`.
    """
    spec = make_received_spec(dataset.spec, columns)
    if not dataset.received.exists():
        with suppress(AlreadyExistsError):  # another worker did, this moment
            dataset.received.create(arrow_schema(spec), spec.configuration())
    if spec.extras.keys() - _EXTRAS.keys():
        dataset.received.extend(pa.schema(list(spec.extras.items())))


def make_received_piece(episode: Episode, spec: DatasetSpec, received_at: int) -> ReceivedPiece:
    """Check a piece of an episode and lay it out as rows, received at a time (us since 1970).

    The piece has the client's own episode id; its `extras` are lists of plain values, of columns
    that the dataset has. Raises: EpisodeInvalidError, SchemaMismatchError. Cost: about 10 us a
    step.
    """
    spec = make_received_spec(spec, episode.extras)
    extras = {
        name: _to_column(values, spec.extras[name], name) for name, values in episode.extras.items()
    }
    own = replace(
        episode,
        episode_id=f"{PREFIX}{episode.episode_id}",
        source_episode_id=episode.episode_id,
        extras={**extras, RECEIVED_AT: pa.array([received_at] * len(episode), TIMESTAMP_TYPE)},
    )
    ready = validate(
        own,
        spec.observation_space,
        spec.action_space,
        rewards_optional=spec.rewards_optional,
        tokenizer=spec.tokenizer,
    )
    rows = encode([ready], spec)
    hashes = pa.array(_content_hashes(rows, sorted(extras)), pa.int64())
    return ReceivedPiece(rows.append_column(pa.field(CONTENT_HASH, hashes.type), hashes))


def encode_received(records: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the rows of some records.

    Raises: EpisodeInvalidError, or ValueError if they hold none.
    """
    tables = []
    for record in records:
        try:
            with pa.ipc.open_stream(base64.b64decode(record[_ROWS], validate=True)) as stream:
                tables.append(stream.read_all())
        except OSError as error:  # Arrow's word for bytes that end early: no disk is asked
            raise EpisodeInvalidError(
                f"{_ROWS}: {error}, expected a complete Arrow stream."
            ) from error
    return pa.concat_tables(tables, promote_options="default").unify_dictionaries()


def recover_received(dataset: Dataset) -> Recovered:
    """Commit what killed servers had received and not yet committed; live ones are left alone."""
    if not dataset.received.exists() or not journal_folder(dataset.received).is_dir():
        return NOTHING_RECOVERED
    schema = dataset.received.snapshot().schema

    def encode(records: Sequence[Mapping[str, Any]]) -> pa.Table:
        return conform(encode_received(records), schema)

    return recover(dataset.received, encode)


def _to_column(values: Sequence[Any], kind: pa.DataType, name: str) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise EpisodeInvalidError(f"{name}: {error}, expected {kind} or null.") from error


def _content_hashes(rows: pa.Table, extras: Sequence[str]) -> list[int]:
    """Return 64 bits of each step's content: BLAKE2b (RFC 7693) of its values as they are stored.

    The observation after a step counts where the step ends the episode: elsewhere it depends on
    where the episode was cut. Of the further columns those count that have a value.
    """
    columns = [
        # As a date it would take longer, and not reach as far.
        (rows.column(name).cast(pa.int64()) if name == TIMESTAMP else rows.column(name)).to_pylist()
        for name in _CONTENT
        if name in rows.column_names
    ]
    finals = rows.column(FINAL_OBSERVATION).to_pylist()
    ends = [
        a or b
        for a, b in zip(
            rows.column(TERMINATED).to_pylist(), rows.column(TRUNCATED).to_pylist(), strict=True
        )
    ]
    further = [rows.column(name).to_pylist() for name in extras]
    hashes = []
    for number, (values, final, is_end) in enumerate(
        zip(zip(*columns, strict=True), finals, ends, strict=True)
    ):
        said = [(n, c[number]) for n, c in zip(extras, further, strict=True)]
        named = [(name, value) for name, value in said if value is not None]
        content: tuple[Any, ...] = (values, final if is_end else None)
        text = repr((*content, named) if named else content).encode()
        digest = blake2b(text, digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "big", signed=True))
    return hashes
