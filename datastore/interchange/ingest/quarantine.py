"""Quarantine: what the door refused, at rest, row by row, with its reasons, for SQL to read.

The rows are a table of their own, `<dataset>/_rejected`, which SQL sees as `<dataset>.quarantine`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    SOURCE_EPISODE_ID,
    STANDARD_COLUMNS,
)
from replaylake.datastore.episodes.spaces import Values
from replaylake.datastore.errors import AlreadyExistsError
from replaylake.datastore.interchange.formats.checks import Check
from replaylake.datastore.interchange.formats.format import RejectedEpisode
from replaylake.datastore.interchange.formats.tabular.tables import MISFITS
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.rejected import (
    REJECTED_SCHEMA,
    temporal_as_text,
    to_json_value,
)
from replaylake.datastore.storage.table.table import WrittenRows

# As JSON, a row of numbers is a few hundred bytes, one of frames a hundred thousand.
_ROWS_AT_ONCE: Final = 1024
_FLUSH_CHARACTERS: Final = 16 << 20
# Of ids, places and checks; more or less.
_ROW_CHARACTERS: Final = 256
_OPERATION: Final = "QUARANTINE"
# The entry of a commit's info with the types of the log's columns, as Arrow serializes a schema.
COLUMNS: Final = "columns"


def quarantine(
    dataset: Dataset,
    rejected: Iterable[RejectedEpisode],
    *,
    producer: str,
    sequence: int,
    prefix: str = "",
    checks: Sequence[Check] = (),
    readmit: bool = False,
) -> int:
    """Put rejected episodes into a dataset's quarantine, in one commit; return the rows added.

    The same (producer, sequence) again adds nothing. `prefix` is what the writer puts before
    foreign ids, so that `episode_id` is the one that the episode would have had. Rows of what was
    deleted from the dataset are left out, unless `readmit` is set. Memory: about
    20 MiB, however many there are. Raises: NotFoundError if the dataset does not exist,
    StorageError.
    """
    written = QuarantineWriter(
        dataset, producer=producer, sequence=sequence, prefix=prefix, readmit=readmit
    )
    for one in rejected:
        written.add(one)
    return written.commit(checks)


class QuarantineWriter:
    """Takes rejected episodes one by one, and commits them together.

    Nothing is made until there is something to keep.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        producer: str,
        sequence: int,
        prefix: str = "",
        readmit: bool = False,
    ) -> None:
        self._table = dataset.rejected
        self._tombstones, self._readmit = dataset.tombstones, readmit
        self._producer, self._sequence, self._prefix = producer, sequence, prefix
        self._is_done = self._table.find_commit(producer, sequence) is not None
        self._now = datetime.now(UTC)
        self._written: list[WrittenRows] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in REJECTED_SCHEMA.names}
        self._num_characters = 0
        self._schema = pa.schema([])

    def add(self, rejected: RejectedEpisode) -> None:
        """Keep one, unless an earlier run has committed it."""
        if self._is_done:
            return
        if rejected.rows is None:
            self._buffer(rejected, 0, [None])
            return
        self._widen_schema(rejected.rows.schema)
        for start in range(0, rejected.rows.num_rows, _ROWS_AT_ONCE):
            self._buffer(rejected, start, _texts(rejected.rows.slice(start, _ROWS_AT_ONCE)))

    def commit(self, checks: Sequence[Check] = (), reading: Mapping[str, Any] | None = None) -> int:
        """Make what was added readable; return the rows that are new.

        `reading` says in the commit's info how the rows were read, for a repair to read them in the
        same way. Raises: StorageError.
        """
        if self._is_done:
            return 0
        self._flush()
        if not self._written:
            return 0
        done = self._table.commit(
            self._written,
            producer=self._producer,
            sequence=self._sequence,
            operation=_OPERATION,
            info={
                "num_rows": sum(part.num_rows for part in self._written),
                **make_checks_info(checks),
                **(reading or {}),
                COLUMNS: base64.b64encode(self._schema.serialize()).decode(),
            },
        )
        self._is_done = True
        return done.num_rows

    def _widen_schema(self, schema: pa.Schema) -> None:
        """Remember the types of the log's columns, which JSON does not keep."""
        known = pa.schema([field for field in schema if field.name != MISFITS])
        if known.equals(self._schema):
            return
        # Of rows of several kinds only the columns that agree, or that only some rows have.
        names = dict.fromkeys([*self._schema.names, *known.names])
        kinds = {n: {s.field(n).type for s in (self._schema, known) if n in s.names} for n in names}
        self._schema = pa.schema(
            [(n, several.pop()) for n, several in kinds.items() if len(several) == 1]
        )

    def _flush(self) -> None:
        if not self._columns[EPISODE_ID]:
            return
        arrays = [pa.array(self._columns[field.name], field.type) for field in REJECTED_SCHEMA]
        self._columns, self._num_characters = {name: [] for name in self._columns}, 0
        rows = pa.Table.from_arrays(arrays, schema=REJECTED_SCHEMA)
        if not self._readmit:
            rows = rows.filter(pa.array(~self._find_deleted(rows)))
        if not rows.num_rows:
            return
        if not self._table.exists():
            with suppress(AlreadyExistsError):  # another ingest was first
                self._table.create(REJECTED_SCHEMA)
        self._written.append(self._table.write(rows))

    def _find_deleted(self, rows: pa.Table) -> NDArray[np.bool_]:
        """Return which rows are of what was deleted, by the log's own columns too."""
        hidden = sorted(self._tombstones.columns.difference(rows.column_names))
        if hidden:
            texts = rows.column("row").to_pylist(), rows.column("mapping").to_pylist()
            logged = [
                _extract_texts(row, mapping, hidden) for row, mapping in zip(*texts, strict=True)
            ]
            for name, values in zip(hidden, zip(*logged, strict=True), strict=True):
                rows = rows.append_column(name, pa.array(values, pa.string()))
        return self._tombstones.find(rows)

    def _buffer(self, rejected: RejectedEpisode, start: int, texts: Sequence[str | None]) -> None:
        num = len(texts)
        names: Sequence[str | None] = [None] * num
        numbers: Sequence[int | None] = [None] * num
        if rejected.places is not None:
            names, numbers = rejected.places.locate_rows(start, start + num)
        checks = list(dict.fromkeys(finding.check for finding in rejected.findings))
        reasons = [finding.message for finding in rejected.findings]
        source = rejected.source_episode_id
        columns = {
            EPISODE_ID: [f"{self._prefix}{source}"] * num,
            AGENT_ID: [rejected.agent_id] * num,
            SOURCE_EPISODE_ID: [source] * num,
            "row_number": range(start, start + num),
            "file": names,
            "file_row": numbers,
            "checks": [checks] * num,
            "reasons": [reasons] * num,
            "row": texts,
            "mapping": [_mapping(rejected)] * num,
            "producer": [self._producer] * num,
            "ingested_at": [self._now] * num,
        }
        # Lists, as a table of one row takes kilobytes, and there may be one an episode.
        for name, values in columns.items():
            self._columns[name] += values
        size = sum(map(len, reasons)) + _ROW_CHARACTERS
        self._num_characters += num * size + sum(len(text) for text in texts if text is not None)
        if self._num_characters >= _FLUSH_CHARACTERS:
            self._flush()


def make_checks_info(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the entry of a commit's info that keeps what the door found; none if nothing.

    Its examples are places, without ids and values: a purge cannot take those out of a log.
    """
    entries = [{**check.to_json(), "example": check.place} for check in checks]
    for entry in entries:
        del entry["place"]
    return {"checks": entries} if entries else {}


def _mapping(rejected: RejectedEpisode) -> str | None:
    if rejected.mapping is None:
        return None
    return json.dumps({o: t for o, t in rejected.mapping.items() if o in STANDARD_COLUMNS})


def _extract_texts(row: str | None, mapping: str | None, names: Sequence[str]) -> list[str | None]:
    """Return what a row of the log has for some columns of ours, as text."""
    cells = json.loads(row) if row else {}
    theirs = json.loads(mapping) if mapping else {}
    values = [cells.get(theirs.get(name, name)) for name in names]
    return [str(value) if isinstance(value, str | int) else None for value in values]


def make_rows(episode: Episode) -> pa.Table:
    """Return an episode's rows under the names of our columns, for one that has no others."""
    num = len(episode)
    columns: dict[str, Any] = {
        "step": np.arange(episode.first_step, episode.first_step + num),
        "observation": _cells(episode.observations),
        "action": _cells(episode.actions),
        "reward": episode.rewards,
        "terminated": _at_end(num, episode.terminated),
        "truncated": _at_end(num, episode.truncated),
        "behavior_log_prob": episode.behavior_log_probs,
        "policy": episode.policies,
        "policy_version": episode.policy_versions,
        "action_mask": None if episode.action_masks is None else _cells(episode.action_masks),
        "timestamp": episode.timestamps,
        "env_step": episode.env_steps,
    }
    if episode.final_observation is not None:
        final = _plain(episode.final_observation)
        columns["final_observation"] = [None] * (num - 1) + [final]
    known = {name: values for name, values in columns.items() if values is not None}
    return pa.table(
        {name: pa.array(values) for name, values in {**known, **episode.extras}.items()}
    )


def _at_end(num: int, flag: bool) -> Any:
    flags = np.zeros(num, dtype=np.bool_)
    flags[num - 1 :] = flag
    return flags


def _cells(values: Values) -> list[Any]:
    if not isinstance(values, Mapping):
        return list(values.tolist())
    parts = {key: _cells(sub) for key, sub in values.items()}
    num = len(next(iter(parts.values()), []))
    return [{key: part[i] for key, part in parts.items()} for i in range(num)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(sub) for key, sub in value.items()}
    return np.asarray(value).tolist()


def _texts(rows: pa.Table) -> list[str]:
    """Return each row as a JSON object, with the values that its columns have no type for."""
    misfits: list[str | None] = [None] * rows.num_rows
    if MISFITS in rows.column_names:
        misfits = rows.column(MISFITS).to_pylist()
        rows = rows.drop_columns([MISFITS])
    by_name = {
        name: temporal_as_text(column).to_pylist()
        for name, column in zip(rows.column_names, rows.columns, strict=True)
    }
    columns = list(by_name.values())
    return [
        json.dumps(
            to_json_value(dict(zip(by_name, cells, strict=True)) | _values(text)),
            ensure_ascii=False,
            default=str,
        )
        for *cells, text in zip(*columns, misfits, strict=True)
    ]


def _values(misfits: str | None) -> dict[str, Any]:
    return {} if misfits is None else {n: value for n, (value, _) in json.loads(misfits).items()}
