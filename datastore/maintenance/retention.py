"""Retention: what a dataset keeps and for how long, stored with it and applied by `maintain`.

It is one entry of the Delta table's configuration, so it is versioned and changed in one commit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import DEFAULT_TARGET_BYTES, check_target
from replaylake.datastore.maintenance.retained_files import DEFAULT_RETENTION_S
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.state import LogState
from replaylake.datastore.storage.table.table import TableSnapshot
from replaylake.datastore.storage.table.table_schema import read_configuration

# Younger than this, a file may be of a commit that is being made, and a version one that a query
# reads.
MIN_KEEP_S: Final = 3600.0
_KEY: Final = "replaylake.retention"


@dataclass(frozen=True)
class Retention:
    """The limits that `maintain` applies to a dataset; None means no limit."""

    max_steps: int | None = None  # the oldest whole episodes go beyond it
    max_age_s: float | None = None  # episodes whose newest row is older go
    keep_versions_s: float = DEFAULT_RETENTION_S  # how long a replaced version can still be read
    target_shard_bytes: int = DEFAULT_TARGET_BYTES  # what small shards are compacted to
    cache_max_bytes: int | None = None  # of this machine's copies of a remote lake's shards

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_kind(field.name, getattr(self, field.name))
        check_target(self.target_shard_bytes)
        if not self.keep_versions_s >= MIN_KEEP_S:
            raise ConfigInvalidError(
                f"keep_versions_s: found {self.keep_versions_s:g}, expected at least "
                f"{MIN_KEEP_S:g} (an hour): what writers and readers are in the middle of is "
                "younger.",
                parameter="keep_versions_s",
            )
        for name in ("max_steps", "max_age_s", "cache_max_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigInvalidError(
                    f"{name}: found {value}, expected more than 0, or none.", parameter=name
                )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_field(name: str, value: int | float | None) -> None:
    """Raise ConfigInvalidError for a value of a field that Retention would not take."""
    changes: dict[str, Any] = {} if value is None else {name: value}
    replace(Retention(), **changes)


def _check_kind(name: str, value: Any) -> None:
    kinds = (int, float) if name.endswith("_s") else (int,)
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
        raise ConfigInvalidError(
            f"{name}: found {value!r}, expected {' or '.join(kind.__name__ for kind in kinds)}.",
            parameter=name,
        )
    if value == math.inf:
        raise ConfigInvalidError(
            f"{name}: found {value}, expected a number, or none for no limit.", parameter=name
        )


def read_retention(snapshot: TableSnapshot) -> Retention:
    """Return what a version of a dataset says.

    Raises: ConfigInvalidError on keys that we do not know.

    What a newer ReplayLake would keep must not be deleted by this one.
    """
    return _parse_retention(snapshot.root, snapshot.configuration)


def set_retention(lake: Lake, dataset: str, changes: Mapping[str, int | float | None]) -> Retention:
    """Set fields of a dataset's retention in one commit; None restores the default.

    Returns the resulting retention. If nothing changes, nothing is committed. Raises:
    NotFoundError, ConfigInvalidError for an unknown field or a value out of its range.
    """
    handle = lake.dataset(dataset)
    if not handle.exists():
        raise NotFoundError(
            f"dataset {dataset!r}: not in this lake. `replaylake list` names those that are."
        )
    _check_names(dataset, changes)
    defaults = Retention()
    stated: dict[str, Any] = {
        name: getattr(defaults, name) if value is None else value for name, value in changes.items()
    }
    producer = f"retention/{new_ulid()}"
    before = read_retention(handle.table.snapshot())
    result = replace(before, **stated)
    if result == before:
        return before

    def build(state: LogState) -> Intent:
        nonlocal result
        configuration = read_configuration(state)
        # On the newest: another field may have been set meanwhile.
        result = replace(_parse_retention(dataset, configuration), **stated)
        if state.metadata is None:
            raise NotFoundError(f"dataset {dataset!r}: found no table, expected one.")
        updated = {**configuration, _KEY: json.dumps(_changed_fields(result))}
        metadata = replace(state.metadata, configuration=updated)
        return Intent(producer, 0, "SET RETENTION", metadata=metadata)

    handle.table.log.commit(build)
    return result


def _parse_retention(dataset: str, configuration: Mapping[str, str]) -> Retention:
    text = configuration.get(_KEY)
    values = {} if text is None else json.loads(text)
    _check_names(dataset, values)
    return Retention(**values)


def _check_names(dataset: str, values: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(Retention)]
    if unknown := sorted(set(values) - set(known)):
        raise ConfigInvalidError(
            f"retention of {dataset}: found {', '.join(unknown)}, expected only "
            f"{', '.join(known)}. A newer ReplayLake may have set it: use that one."
        )


def _changed_fields(retention: Retention) -> dict[str, Any]:
    """Return the fields that are not at their default, which a later version may then move."""
    defaults = asdict(Retention())
    return {name: value for name, value in asdict(retention).items() if value != defaults[name]}
