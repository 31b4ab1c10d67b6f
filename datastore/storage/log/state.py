"""LogState: what a table holds at one version, and Change: what one commit does to that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from replaylake.datastore.errors import FormatTooNewError
from replaylake.datastore.storage.log.persistent_map import PersistentMap

# Of tables that this code reads. A table has the lowest one that holds its columns, so that older
# releases read all but those that they would misread.
FORMAT_VERSION: Final = 2
_FIRST_FORMAT: Final = 1
_FORMAT_OF_COLUMNS: Final = {"message_media": 2}
_FORMAT_KEY: Final = "replaylake.format_version"
_WRITER_KEY: Final = "replaylake.written_by"
_READER_VERSION: Final = 1
_KNOWN_WRITER_FEATURES: Final = {"domainMetadata", "appendOnly", "invariants"}


@dataclass(frozen=True)
class FileEntry:
    """One shard as the log names it: a path below the table, its size, rows and sha256.

    `since` is the version that first had the oldest of its rows: a shard that takes the place of
    others keeps theirs, so age order survives compaction. -1 until the shard is committed.
    """

    path: str
    size_bytes: int
    num_rows: int
    sha256: str
    modified_ms: int = 0
    since: int = field(default=-1, compare=False)

    def to_action(self, *, data_change: bool) -> dict[str, Any]:
        """Return the body of a Delta `add`."""
        since = {} if self.since < 0 else {"since": str(self.since)}
        return {
            "path": self.path,
            "partitionValues": {},
            "size": self.size_bytes,
            "modificationTime": self.modified_ms,
            "dataChange": data_change,
            "stats": json.dumps({"numRecords": self.num_rows}),
            "tags": {"sha256": self.sha256, **since},
        }

    @classmethod
    def from_action(cls, add: Mapping[str, Any], version: int) -> FileEntry:
        """Read the body of a Delta `add` that stands in the commit of `version`."""
        stats = json.loads(add.get("stats") or "{}")
        tags = dict(add.get("tags") or {})
        return cls(
            path=add["path"],
            size_bytes=int(add["size"]),
            num_rows=int(stats.get("numRecords", 0)),
            sha256=tags.get("sha256", ""),
            modified_ms=int(add.get("modificationTime", 0)),
            since=int(tags.get("since", version)),
        )


@dataclass(frozen=True)
class TableMetadata:
    """Identity, Delta schema (a JSON text) and configuration of a table."""

    id: str
    schema_string: str
    configuration: Mapping[str, str]
    created_ms: int
    has_entries: bool = False

    def to_action(self) -> dict[str, Any]:
        """Return the body of a Delta `metaData`."""
        return {
            "id": self.id,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": self.schema_string,
            "partitionColumns": [],
            "configuration": dict(self.configuration),
            "createdTime": self.created_ms,
        }

    @classmethod
    def from_action(cls, action: Mapping[str, Any]) -> TableMetadata:
        """Read the body of a Delta `metaData`, of whatever format version."""
        return cls(
            id=action["id"],
            schema_string=action["schemaString"],
            configuration=dict(action["configuration"]),
            created_ms=int(action.get("createdTime") or 0),
        )

    def check_format(self) -> None:
        """Refuse a table of a later format than this code reads. Raises: FormatTooNewError."""
        version = int(self.configuration.get(_FORMAT_KEY, _FIRST_FORMAT))
        if version > FORMAT_VERSION:
            raise FormatTooNewError(
                f"found format version {version}, expected at most {FORMAT_VERSION}. Install "
                f"ReplayLake {self.configuration.get(_WRITER_KEY, 'newer')} or later to open it."
            )

    def protocol(self) -> dict[str, Any]:
        """Return the Delta protocol of the table; every Delta reader knows reader version 1."""
        if self.has_entries:
            return {
                "minReaderVersion": _READER_VERSION,
                "minWriterVersion": 7,
                "writerFeatures": ["domainMetadata"],
            }
        return {"minReaderVersion": _READER_VERSION, "minWriterVersion": 2}


def format_configuration(
    product_version: str, columns: Iterable[str], current: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the configuration entries that say which code can read a table with some columns.

    current: the configuration of the table so far. Empty if its format holds the columns already.
    """
    needed = max((_FORMAT_OF_COLUMNS.get(name, _FIRST_FORMAT) for name in columns), default=1)
    if current is not None and int(current.get(_FORMAT_KEY, _FIRST_FORMAT)) >= needed:
        return {}
    return {_FORMAT_KEY: str(needed), _WRITER_KEY: product_version}


@dataclass(frozen=True)
class Change:
    """What one commit does to a table.

    moved: those paths of `added` and `removed` whose rows were in the table before the commit and
    are in it afterwards (Delta's dataChange is false), as after a compaction. transactions: appId
    to version. entries: key to JSON text, None where the key goes. info: Delta's commitInfo, which
    holds what the writer reports of itself, with `version` added.
    """

    version: int
    added: tuple[FileEntry, ...] = ()
    removed: tuple[str, ...] = ()
    moved: frozenset[str] = frozenset()
    transactions: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, str | None] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    metadata: TableMetadata | None = None
    protocol: Mapping[str, Any] | None = None

    @classmethod
    def from_actions(cls, version: int, actions: Iterable[Mapping[str, Any]]) -> Change:
        """Read the actions of a Delta commit; no path or key is in two of them.

        Raises: KeyError, TypeError, ValueError or AttributeError for one without what Delta
        requires.
        """
        added: list[FileEntry] = []
        removed: list[str] = []
        moved: list[str] = []
        transactions: dict[str, int] = {}
        entries: dict[str, str | None] = {}
        info: dict[str, Any] = {"version": version}
        metadata = protocol = None
        for action in actions:
            if add := action.get("add"):
                added.append(FileEntry.from_action(add, version))
                if not add.get("dataChange", True):
                    moved.append(add["path"])
            elif remove := action.get("remove"):
                removed.append(remove["path"])
                if not remove.get("dataChange", True):
                    moved.append(remove["path"])
            elif txn := action.get("txn"):
                transactions[txn["appId"]] = int(txn["version"])
            elif domain := action.get("domainMetadata"):
                text = None if domain["removed"] else domain["configuration"]
                entries[domain["domain"]] = text
            elif raw := action.get("commitInfo"):
                info |= raw
            elif raw := action.get("metaData"):
                metadata = TableMetadata.from_action(raw)
            elif raw := action.get("protocol"):
                protocol = raw
        return cls(
            version,
            tuple(added),
            tuple(removed),
            frozenset(moved),
            transactions,
            entries,
            info,
            metadata,
            protocol,
        )

    @property
    def timestamp_ms(self) -> int:
        """When it was committed; 0 where another engine left that out."""
        return int(self.info.get("timestamp") or 0)

    @property
    def operation(self) -> str | None:
        return self.info.get("operation")

    @property
    def producer(self) -> str:
        """Who committed it; "" where another engine did."""
        return next(iter(self.transactions), "").rpartition("#")[0]

    @property
    def changes_rows(self) -> bool:
        """Whether it adds or removes rows, and does not only move them between files."""
        return bool(self.new_files or self.dropped_paths)

    @property
    def new_files(self) -> list[FileEntry]:
        """Files of `added` with rows that were not in the table."""
        return [entry for entry in self.added if entry.path not in self.moved]

    @property
    def dropped_paths(self) -> list[str]:
        """Paths of `removed` whose rows are no longer in the table as they were."""
        return [path for path in self.removed if path not in self.moved]


@dataclass(frozen=True)
class LogState:
    """Live files by path, transactions (appId to version), and entries (key to JSON text).

    Version -1 is the state before the table exists. Never changed in place: `apply` returns a new
    one, which shares with it what did not change. `timestamp_ms` is the latest of any commit.
    """

    version: int = -1
    metadata: TableMetadata | None = None
    protocol: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    transactions: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    timestamp_ms: int = field(default=0, compare=False)

    @property
    def num_actions(self) -> int:
        """Number of actions that a checkpoint of this state holds."""
        return 2 + len(self.files) + len(self.transactions) + len(self.entries)

    def apply(self, changes: Iterable[Change]) -> LogState:
        """Return the state after further commits, oldest first. Raises: FormatTooNewError."""
        version, metadata, protocol = self.version, self.metadata, self.protocol
        timestamp_ms = self.timestamp_ms
        files: dict[str, FileEntry | None] = {}
        transactions: dict[str, int | None] = {}
        entries: dict[str, str | None] = {}
        for change in changes:
            version += 1
            for path in change.removed:
                files[path] = None
            for entry in change.added:
                files[entry.path] = entry
            transactions |= change.transactions
            entries |= change.entries
            timestamp_ms = max(timestamp_ms, change.timestamp_ms)
            if change.metadata is not None:
                change.metadata.check_format()
                metadata = change.metadata
            if change.protocol is not None:
                protocol = _check_protocol(change.protocol)
        return LogState(
            version,
            metadata,
            protocol,
            PersistentMap.from_mapping(self.files).with_changes(files),
            PersistentMap.from_mapping(self.transactions).with_changes(transactions),
            PersistentMap.from_mapping(self.entries).with_changes(entries),
            timestamp_ms,
        )


def _check_protocol(protocol: Mapping[str, Any]) -> Mapping[str, Any]:
    reader = int(protocol.get("minReaderVersion") or 1)
    unknown = set(protocol.get("writerFeatures") or []) - _KNOWN_WRITER_FEATURES
    if reader > _READER_VERSION or unknown:
        raise FormatTooNewError(
            f"found Delta reader version {reader}, writer features {sorted(unknown)}, expected "
            f"reader version {_READER_VERSION} and none of them. Another engine upgraded the "
            "table; read it with that engine, or restore the log from before."
        )
    return protocol
