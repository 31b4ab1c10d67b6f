"""Episode labels: what people say of single episodes, and who said it when.

A label is a column of the steps with one value in each episode and agent, as `annotate` adds one.
`<name>_labeled_by` and `<name>_labeled_at` beside it hold its origin, so they are queried, exported
and purged with it. A label that was removed is NULL, with the person and time of its removal.

Two people may label one episode at once. A label is therefore written only if the one that its
author saw is still there; otherwise the caller is told what is there instead.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

import pyarrow as pa

from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID
from replaylake.datastore.errors import CommitConflictError, ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.maintenance.labels.annotate import overwrite_columns
from replaylake.datastore.names import is_column_name
from replaylake.datastore.query.episode_views import EPISODE_COLUMNS
from replaylake.datastore.query.query import run_snapshot_query
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

LabelValue: TypeAlias = "str | float | bool"

_INFO: Final = "labeled"
_BY: Final = "_labeled_by"
_AT: Final = "_labeled_at"
_TIME: Final = pa.timestamp("us", "UTC")
_TYPES: Final = {str: pa.string(), float: pa.float64(), bool: pa.bool_()}
_WORDS: Final = {pa.string(): "a text", pa.float64(): "a number", pa.bool_(): "true or false"}
# Control characters, line and paragraph separators, halves of surrogate pairs.
_CONTROLS: Final = frozenset(("Cc", "Cs", "Zl", "Zp"))
# People label one episode after the other, and each label writes a shard again. The first label in
# a large shard divides it, so that the next ones write little; compaction joins what was divided.
_SHARD_BYTES: Final = 16 << 20
_MAX_NAME: Final = 40
_MAX_TEXT: Final = 500
_MAX_PERSON: Final = 100


@dataclass(frozen=True)
class EpisodeLabel:
    """A label of one episode. value: None if it was removed; by, at: who set or removed it when."""

    value: LabelValue | None
    by: str
    at: datetime


def list_label_names(schema: pa.Schema) -> list[str]:
    """Return the names of the labels in a dataset of this schema, in its order."""
    return [
        field.name
        for field in schema
        if field.type in _WORDS
        and _has_field(schema, f"{field.name}{_BY}", pa.string())
        and _has_field(schema, f"{field.name}{_AT}", _TIME)
    ]


def list_origin_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that say who set the labels of a dataset, and when."""
    return [f"{name}{suffix}" for name in list_label_names(schema) for suffix in (_BY, _AT)]


def read_episode_labels(
    snapshot: Snapshot, episode_id: str, agent_id: str = ""
) -> dict[str, EpisodeLabel]:
    """Return the labels of an episode by name, those that were removed among them.

    Steps that came after a label do not have it. Cost: a scan of three columns for each label.
    """
    names = list_label_names(snapshot.table.schema)
    return _read_labels(snapshot.table, names, episode_id, agent_id)


def label_episode(
    lake: Lake,
    dataset: str,
    name: str,
    value: LabelValue | None,
    *,
    episode_id: str,
    agent_id: str = "",
    by: str,
    seen: EpisodeLabel | None = None,
) -> int:
    """Set a label of an episode, or remove it, and return the version with the change.

    Args:
        lake: the lake.
        dataset: its name.
        name: the label, a column of the steps. A new one gets the type of its first value.
        value: a text, a number or a flag; None removes the label.
        episode_id: the episode.
        agent_id: its agent, in a dataset with several.
        by: who labels.
        seen: the label that its author saw, as `read_episode_labels` returned it; None for none.

    Raises: ConfigInvalidError for a name that is a column of the log, a value of another type than
    the label has, and texts that are empty, too long or have control characters;
    CommitConflictError if the episode has another label than the one that was seen; NotFoundError
    if there is no such episode; StorageError. Cost: a scan of the keys, and the episode's shards
    are written again.
    """
    value = _check_value(value)
    kind = _check_label(lake.dataset(dataset).snapshot().table.schema, name, value)
    label = EpisodeLabel(value, _check_text("by", by, _MAX_PERSON), datetime.now(UTC))
    info = {"label": name, "by": label.by, "action": "remove" if value is None else "set"}
    return _write(lake, dataset, name, kind, label, episode_id, agent_id, seen, info)


def undo_label(
    lake: Lake,
    dataset: str,
    version: int,
    *,
    episode_id: str,
    agent_id: str = "",
    by: str,
) -> int:
    """Give an episode back the label that it had before a version, and return the new version.

    Args:
        lake: the lake.
        dataset: its name.
        version: what `label_episode` or `undo_label` returned for this episode.
        episode_id: the episode.
        agent_id: its agent.
        by: who undoes it, for the record of the commit.

    Raises: NotFoundError if that version did not label this episode, or was dropped from the log;
    CommitConflictError if the label was changed since; StorageError. Cost: as label_episode.
    """
    handle = lake.dataset(dataset)
    by = _check_text("by", by, _MAX_PERSON)
    name = handle.commit_info(version).get(_INFO, {}).get("label")
    before = after = None
    if name is not None:
        key = (episode_id, agent_id)
        table = handle.snapshot(version).table
        after = _read_labels(table, [name], *key).get(name)
        earlier = handle.snapshot(version - 1).table
        if name in list_label_names(earlier.schema):
            before = _read_labels(earlier, [name], *key).get(name)
    if before == after:
        raise NotFoundError(
            f"{dataset}@{version}: found no label of episode {episode_id!r} in this version's "
            "commit, expected the version in which the label was set."
        )
    kind = table.schema.field(name).type
    info = {"label": name, "by": by, "action": "undo", "undone_version": version}
    return _write(lake, dataset, name, kind, before, episode_id, agent_id, after, info)


def _write(
    lake: Lake,
    dataset: str,
    name: str,
    kind: pa.DataType,
    label: EpisodeLabel | None,
    episode_id: str,
    agent_id: str,
    seen: EpisodeLabel | None,
    info: Mapping[str, Any],
) -> int:
    def check_seen(table: TableSnapshot) -> None:
        """Refuse a version in which the episode has another label than the author saw."""
        found = None
        if name in table.schema.names:
            if name not in list_label_names(table.schema):
                raise _name_conflict_error(name, name)
            found = _read_labels(table, [name], episode_id, agent_id).get(name)
        if found != seen:
            raise CommitConflictError(
                f"label {name} of episode {episode_id!r}: found {_describe(found)}, expected "
                f"{_describe(seen)}: somebody else labeled the episode meanwhile. Nothing was "
                "changed; look at the label, and label the episode again."
            )

    columns = (name, f"{name}{_BY}", f"{name}{_AT}")
    values = (None, None, None) if label is None else (label.value, label.by, label.at)
    rows = pa.table(
        {
            EPISODE_ID: [episode_id],
            AGENT_ID: [agent_id],
            **{
                column: pa.array([one], column_kind)
                for column, one, column_kind in zip(
                    columns, values, (kind, pa.string(), _TIME), strict=True
                )
            },
        }
    )
    receipt = overwrite_columns(
        lake,
        dataset,
        rows,
        on=[EPISODE_ID, AGENT_ID],
        add=columns,
        operation="LABEL",
        info={_INFO: dict(info)},
        check=check_seen,
        shard_bytes=_SHARD_BYTES,
    )
    if receipt.unmatched or receipt.version is None:
        of_agent = f" of agent {agent_id!r}" if agent_id else ""
        raise NotFoundError(
            f"episode {episode_id!r}{of_agent}: found none in {dataset}, expected the id of an "
            f"episode, as `{dataset}.episodes` has it."
        )
    return receipt.version


def _check_label(schema: pa.Schema, name: str, value: LabelValue | None) -> pa.DataType:
    """Return the type of a label's column. Raises: ConfigInvalidError."""
    if not is_column_name(name) or len(name) > _MAX_NAME:
        raise ConfigInvalidError(
            f"name: found {name[:80]!r}, expected the name of a column: letters, digits and "
            f"underscores, at most {_MAX_NAME}.",
            parameter="name",
        )
    known = name in list_label_names(schema)
    if not known:
        taken = {one.lower(): one for one in (*schema.names, *EPISODE_COLUMNS)}
        for column in (name, f"{name}{_BY}", f"{name}{_AT}"):
            if column.lower() in taken:
                raise _name_conflict_error(name, taken[column.lower()])
    if value is None:
        if known:
            return schema.field(name).type
        raise NotFoundError(f"label {name}: found no such label in the dataset; none was removed.")
    kind = _TYPES[type(value)]
    if known and schema.field(name).type != kind:
        raise ConfigInvalidError(
            f"value: found {value!r}, expected {_WORDS[schema.field(name).type]}, as other values "
            f"of the label {name} are. Use another label for this.",
            parameter="value",
        )
    return kind


def _check_value(value: LabelValue | None) -> LabelValue | None:
    """Return a value in the type of its column. Raises: ConfigInvalidError."""
    if isinstance(value, str):
        return _check_text("value", value, _MAX_TEXT)
    if value is None or isinstance(value, bool):
        return value
    number = float(value)
    if not math.isfinite(number):
        raise ConfigInvalidError(
            f"value: found {value}, expected a finite number.", parameter="value"
        )
    return number


def _name_conflict_error(name: str, column: str) -> ConfigInvalidError:
    return ConfigInvalidError(
        f"name: found {name}, but the dataset has a column {column} that is no label, expected "
        "another name: columns of the log are not overwritten.",
        parameter="name",
    )


def _check_text(parameter: str, text: str, length: int) -> str:
    """Return a text without surrounding spaces. Raises: ConfigInvalidError."""
    text = text.strip()
    if not text or len(text) > length:
        found = "nothing" if not text else f"{len(text):,} characters"
        raise ConfigInvalidError(
            f"{parameter}: found {found}, expected 1 to {length} characters.", parameter=parameter
        )
    if any(unicodedata.category(character) in _CONTROLS for character in text):
        raise ConfigInvalidError(
            f"{parameter}: found {text!r}, expected one line without control characters.",
            parameter=parameter,
        )
    return text


def _read_labels(
    table: TableSnapshot, names: list[str], episode_id: str, agent_id: str
) -> dict[str, EpisodeLabel]:
    if not names:
        return {}
    newest = ", ".join(
        f"""arg_max({{'value': "{name}", 'by': "{name}{_BY}", 'at': "{name}{_AT}"}}, """
        f""""{name}{_AT}") AS "{name}\""""
        for name in names
    )
    (row,) = run_snapshot_query(
        f"SELECT {newest} FROM steps WHERE {EPISODE_ID} = $episode AND {AGENT_ID} = $agent",
        table,
        {"episode": episode_id, "agent": agent_id},
    ).to_pylist()
    return {
        name: EpisodeLabel(found["value"], found["by"], found["at"])
        for name, found in row.items()
        if found is not None
    }


def _has_field(schema: pa.Schema, name: str, kind: pa.DataType) -> bool:
    return name in schema.names and schema.field(name).type == kind


def _describe(label: EpisodeLabel | None) -> str:
    if label is None:
        return "no label"
    what = "no label" if label.value is None else repr(label.value)
    return f"{what} by {label.by} at {label.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
