"""Tombstones: whose rows were deleted from a dataset, so that no later source brings them back.

A tombstone is an HMAC of a column's name and a value in it, under a key of the lake: who has the
files and not the key can neither read an id out of them nor try a list of ids on them. The files
lie in `<dataset>/_tombstones`, one for each deletion, and travel with copies and backups. A file of
its own says that a column was renamed: a deletion by a column holds under all names it ever had.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.schema import EPISODE_ID, SOURCE_EPISODE_ID
from replaylake.datastore.errors import StorageError
from replaylake.datastore.names import LAKE_ROOT, new_ulid
from replaylake.datastore.storage.arrow_values import combine_chunks
from replaylake.datastore.storage.seals import read_json, seal_json
from replaylake.datastore.storage.storage import Storage

FOLDER: Final = "_tombstones"
_KEYS: Final = f"{LAKE_ROOT}/keys"
_KEY_PREFIX: Final = "tombstones-"
_KEY_BYTES: Final = 32
_DIGEST_BYTES: Final = 16  # of the HMAC's 32: a false match among a billion has chance 1e-20
_DIGEST: Final = np.dtype(f"S{_DIGEST_BYTES}")
_FORMAT: Final = 1
_DELETION_SUFFIX: Final = ".tombstones"
_RENAMING_SUFFIX: Final = ".renaming"
# A listing of a bucket is a round trip, which not every commit should pay.
_METERED_REFRESH_S: Final = 10.0

# By column, values in it as text.
Subjects = Mapping[str, Collection[str]]
Digests = NDArray[np.bytes_]


@dataclass(frozen=True)
class _Deletion:
    """One file: what was deleted, or with `is_readmission` may come again."""

    key_id: str
    columns: tuple[str, ...]
    is_readmission: bool
    digests: Digests


@dataclass(frozen=True)
class _Renaming:
    """Another kind of file: that a column has had two names."""

    column: str
    to: str


@dataclass(frozen=True)
class _Known:
    """What all files say together: the digests in force, of which keys and columns they are.

    aliases: all names, sorted, of a column that has had several, by each of them.
    """

    names: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()
    columns: frozenset[str] = frozenset()
    digests: Digests = field(default_factory=lambda: np.empty(0, _DIGEST))
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def names_of(self, column: str) -> Sequence[str]:
        """Return all names that a column has had, among them this one."""
        return self.aliases.get(column, (column,))


class Tombstones:
    """The tombstones of one dataset; a handle, of which there need not be any yet.

    Safe beside other writers: files are only added, and each counts by its name, which is a time.
    """

    def __init__(self, storage: Storage, dataset: str) -> None:
        self._storage = storage
        self._folder = f"{dataset}/{FOLDER}"
        self._files: dict[str, _Deletion | _Renaming] = {}
        self._known = _Known()
        self._read_s = float("-inf")

    @property
    def columns(self) -> frozenset[str]:
        """The columns in which something was deleted by its value, under all their names."""
        known = self._load()
        return frozenset(name for column in known.columns for name in known.names_of(column))

    def __len__(self) -> int:
        return len(self._load().digests)

    @property
    def mark(self) -> str:
        """What changes with every deletion and readmission; empty where there was none yet.

        Whoever looks for deleted rows takes it before, and compares it as he commits.
        """
        names = self._load().names
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:32] if names else ""

    def add(self, subjects: Subjects) -> int:
        """Remember values that were deleted, durably; return how many were not known yet.

        Raises: StorageError.
        """
        known = self._load(refresh=True)
        new = {column: _split(known, column, texts)[1] for column, texts in subjects.items()}
        return self._write(new, is_readmission=False)

    def lift(self, subjects: Subjects) -> int:
        """Let values come again; return how many were deleted before. Raises: StorageError."""
        known = self._load(refresh=True)
        deleted = {column: _split(known, column, texts)[0] for column, texts in subjects.items()}
        if not any(deleted.values()):
            return 0
        return self._write(deleted, is_readmission=True)

    def add_renaming(self, column: str, to: str) -> None:
        """Let deletions by a column hold under its new name too, and the other way round.

        Logs may go on to use the old name. Raises: StorageError.
        """
        known = self._load(refresh=True)
        if to not in known.names_of(column):
            data = _format_renaming(_Renaming(column, to))
            ulid = new_ulid(after=max(known.names, default=""))
            name = f"{ulid}{_RENAMING_SUFFIX}"
            self._storage.put_if_absent(f"{self._folder}/{name}", data)
            self._read_s = float("-inf")

    def find(self, rows: pa.Table, names: Mapping[str, str] | None = None) -> NDArray[np.bool_]:
        """Return which rows are of episodes that were deleted: bool [num_rows].

        An episode is deleted as a whole: where one of its rows matches, all do. `names` are the
        columns that have another name in this table, such as that of a client's id. Cost: an HMAC
        for each distinct value of the columns that deletions are of; nothing where there are none.
        """
        mask = np.zeros(rows.num_rows, np.bool_)
        known = self._load()
        if not len(known.digests) or not rows.num_rows:
            return mask
        for column, index, texts in self._texts(rows, known, names or {}):
            hits = _match(known, column, texts)
            mask |= np.append(hits, False)[index]
        if mask.any() and EPISODE_ID in rows.column_names:
            episodes = combine_chunks(rows.column(EPISODE_ID))
            chosen = episodes.filter(pa.array(mask)).drop_null()
            mask |= np.asarray(pc.is_in(episodes, value_set=chosen))
        return mask

    def find_subjects(
        self, rows: pa.Table, names: Mapping[str, str] | None = None
    ) -> dict[str, list[str]]:
        """Return the values of rows that were deleted, by column, for `lift`."""
        known = self._load()
        if not len(known.digests) or not rows.num_rows:
            return {}
        found: dict[str, list[str]] = {}
        for column, _, texts in self._texts(rows, known, names or {}):
            hits = _match(known, column, texts)
            deleted = [text for text, hit in zip(texts, hits, strict=True) if hit]
            found = merge_subjects(found, {column: deleted})
        return found

    def copy_from(self, source: Tombstones) -> int:
        """Take over another dataset's deletions, and the keys to tell them; return how many files.

        Raises: StorageError.
        """
        mine, theirs = set(self._list()), source._list()
        new = [name for name in theirs if name not in mine]
        for name, data in zip(new, source._read(new), strict=True):
            file = _parse(f"{source._folder}/{name}", data)
            if isinstance(file, _Deletion):
                key = _read_key(source._storage, file.key_id)
                # The key first: without it, nobody could tell what the file is about.
                self._storage.put_if_absent(_key_path(file.key_id), key, private=True)
            self._storage.put_if_absent(f"{self._folder}/{name}", data)
        if new:
            self._read_s = float("-inf")
        return len(new)

    def _write(self, subjects: Subjects, *, is_readmission: bool) -> int:
        """Write a file of its own for these values."""
        chosen = {column: texts for column, texts in subjects.items() if texts}
        key_ids = [_current_key_id(self._storage)]
        if is_readmission:
            # A value may have been deleted in another lake, under its key.
            files = self._files.values()
            key_ids = sorted({file.key_id for file in files if isinstance(file, _Deletion)})
        num = sum(map(len, chosen.values()))
        if not num:
            return 0
        for key_id in key_ids:
            key = _read_key(self._storage, key_id)
            digests = [
                digest
                for column, texts in chosen.items()
                for digest in _digest_all(key, column, texts)
            ]
            deletion = _Deletion(key_id, tuple(chosen), is_readmission, np.array(digests, _DIGEST))
            # In a bucket too, the name alone tells which of two files is the later: after what is
            # known, even if the clock was set back since.
            ulid = new_ulid(after=max(self._known.names, default=""))
            name = f"{ulid}{_DELETION_SUFFIX}"
            self._storage.put_if_absent(f"{self._folder}/{name}", _format(deletion))
        self._read_s = float("-inf")
        return num

    def _texts(
        self, rows: pa.Table, known: _Known, names: Mapping[str, str]
    ) -> Iterator[tuple[str, NDArray[np.int64], list[str]]]:
        """Yield for columns which of the distinct values each row has (-1: none), and these.

        A column is named as it was when its values were deleted.
        """
        for column in sorted(known.columns):
            for alias in known.names_of(column):
                name = names.get(alias, alias)
                if name in rows.column_names and (encoded := _encode(rows.column(name))):
                    yield column, *encoded

    def _load(self, *, refresh: bool = False) -> _Known:
        """Return what the files say now; of a bucket, what they said a few seconds ago."""
        now = time.monotonic()
        is_recent = now - self._read_s < _METERED_REFRESH_S
        if self._storage.is_metered and is_recent and not refresh:
            return self._known
        names = tuple(self._list())
        if names != self._known.names:
            new = [name for name in names if name not in self._files]
            for name, data in zip(new, self._read(new), strict=True):
                self._files[name] = _parse(f"{self._folder}/{name}", data)
            self._known = self._merge(names)
        self._read_s = now
        return self._known

    def _merge(self, names: tuple[str, ...]) -> _Known:
        every = [self._files[name] for name in names]
        files = [file for file in every if isinstance(file, _Deletion)]
        digests = np.empty(0, _DIGEST)
        for file in files:
            if file.is_readmission:
                digests = np.setdiff1d(digests, file.digests)
            else:
                digests = np.union1d(digests, file.digests)
        keys = [_read_key(self._storage, key_id) for key_id in sorted({f.key_id for f in files})]
        columns = frozenset(column for file in files for column in file.columns)
        renamings = [file for file in every if isinstance(file, _Renaming)]
        return _Known(names, tuple(keys), columns, digests, _join_names(renamings))

    def _list(self) -> list[str]:
        names = self._storage.names(self._folder)
        return sorted(n for n in names if n.endswith((_DELETION_SUFFIX, _RENAMING_SUFFIX)))

    def _read(self, names: Sequence[str]) -> list[bytes]:
        paths = [f"{self._folder}/{name}" for name in names]
        blobs = self._storage.get_many(paths) if paths else []
        for path, data in zip(paths, blobs, strict=True):
            if data is None:
                raise StorageError(
                    f"{path}: found no file, expected the tombstones of a deletion. Restore it "
                    "from a copy of the lake."
                )
        return [data for data in blobs if data is not None]


# Lakes come and go in a process: of as many handles the oldest is forgotten.
_MAX_HANDLES: Final = 64
_handles: dict[tuple[Storage, str], Tombstones] = {}


def open_tombstones(storage: Storage, dataset: str) -> Tombstones:
    """Return the handle on a dataset's tombstones, mostly the one that others have."""
    key = (storage, dataset)
    if key not in _handles and len(_handles) >= _MAX_HANDLES:
        _handles.pop(next(iter(_handles)), None)
    return _handles.setdefault(key, Tombstones(storage, dataset))


def identify(rows: pa.Table) -> dict[str, list[str]]:
    """Return the ids by which rows that are deleted can be told when they are sent again.

    A short number, such as `7`, is no such id: logs count their episodes, and another log's seventh
    is another's.
    """
    found = {}
    for column in (EPISODE_ID, SOURCE_EPISODE_ID):
        if column in rows.column_names and (encoded := _encode(rows.column(column))) is not None:
            found[column] = [text for text in encoded[1] if not _is_short_number(text)]
    return found


def _is_short_number(text: str) -> bool:
    return len(text) < 8 and text.isdecimal()


def merge_subjects(*several: Subjects) -> dict[str, list[str]]:
    """Join values by column, each once."""
    columns = dict.fromkeys(column for one in several for column in one)
    return {
        column: list(dict.fromkeys(text for one in several for text in one.get(column, ())))
        for column in columns
    }


def _encode(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]] | None:
    """Return which distinct value each row has (-1: none), and these as text; None if no id.

    A number has the same text in columns of integers and of floats: one log may have `4711` where
    another, or the type that both were widened to, has `4711.0`.
    """
    array = combine_chunks(column)
    kind = array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.cast(kind.value_type), kind.value_type
    if pa.types.is_integer(kind):
        array = array.cast(pa.string())
    elif not (
        pa.types.is_floating(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ):
        return None
    encoded = array.dictionary_encode()
    index = encoded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    texts = encoded.dictionary.to_pylist()
    if pa.types.is_floating(kind):
        texts = _write_floats(encoded.dictionary)
    if "" in texts:  # no agent in particular
        index = np.where(index == texts.index(""), -1, index)
    return index, texts


def _write_floats(values: pa.Array) -> list[str]:
    """Return floats as text, whole ones as integers and NaN as nothing, which no id is."""
    kinds = zip(values.to_pylist(), values.cast(pa.string()).to_pylist(), strict=True)
    return [
        str(int(value)) if value.is_integer() else "" if math.isnan(value) else text
        for value, text in kinds
    ]


def list_texts(column: pa.ChunkedArray) -> list[str] | None:
    """Return the distinct values of a column as text; None if deletions by it are not remembered.

    They are by text, integers and floats.
    """
    encoded = _encode(column)
    return None if encoded is None else [text for text in encoded[1] if text]


def _match(known: _Known, column: str, texts: Sequence[str]) -> NDArray[np.bool_]:
    hits = np.zeros(len(texts), np.bool_)
    for digests in _compute_digests(known.keys, column, texts):
        hits |= np.isin(np.array(digests, _DIGEST), known.digests)
    return hits


def _split(known: _Known, column: str, texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Part values into those that are known as deleted, and the others; each once."""
    unique = [text for text in dict.fromkeys(texts) if text]  # no agent in particular is no subject
    hits = _match(known, column, unique)
    parts: tuple[list[str], list[str]] = ([], [])
    for text, hit in zip(unique, hits, strict=True):
        parts[0 if hit else 1].append(text)
    return parts


def _compute_digests(keys: Iterable[bytes], column: str, texts: Sequence[str]) -> list[list[bytes]]:
    """Return under each key the digest of each value: HMAC-SHA256 (RFC 2104), its first half.

    The two hashes of the padded key are made once: 5 us a value instead of 14 (2 cores, shared
    with other work, 2026-11).
    """
    return [_digest_all(key, column, texts) for key in keys]


def _digest_all(key: bytes, column: str, texts: Iterable[str]) -> list[bytes]:
    block = key.ljust(hashlib.sha256().block_size, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
    inner.update(column.encode() + b"\0")
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))
    digests = []
    for text in texts:
        first, second = inner.copy(), outer.copy()
        first.update(text.encode("utf-8", "surrogatepass"))
        second.update(first.digest())
        digests.append(second.digest()[:_DIGEST_BYTES])
    return digests


def _format(deletion: _Deletion) -> bytes:
    """Return the bytes of a file: a line of JSON with its checksum, and the digests in order."""
    body = np.sort(deletion.digests).tobytes()
    head = {
        "format": _FORMAT,
        "key": deletion.key_id,
        "columns": sorted(deletion.columns),
        "is_readmission": deletion.is_readmission,
        "num": len(deletion.digests),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return seal_json(head) + b"\n" + body


def _format_renaming(renaming: _Renaming) -> bytes:
    """Return the bytes of a file: a line of JSON, and the hash of that line."""
    head = {"format": _FORMAT, "column": renaming.column, "to": renaming.to}
    line = json.dumps(head).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode()


def _join_names(renamings: Iterable[_Renaming]) -> dict[str, Sequence[str]]:
    """Return all names that columns have had, by each of these names."""
    names: dict[str, set[str]] = {}
    for renaming in renamings:
        joined = names.get(renaming.column, {renaming.column})
        joined |= names.get(renaming.to, {renaming.to})
        names |= dict.fromkeys(joined, joined)
    return {name: sorted(joined) for name, joined in names.items()}


def _parse(path: str, data: bytes) -> _Deletion | _Renaming:
    """Read a file. Raises: StorageError if it is damaged: its people must not come back unseen."""
    head, _, body = data.partition(b"\n")
    if path.endswith(_RENAMING_SUFFIX):
        return _parse_renaming(path, head, body)
    try:
        fields: dict[str, Any] = read_json(head)
        is_whole = hashlib.sha256(body).hexdigest() == fields["sha256"]
        if not is_whole or len(body) != _DIGEST_BYTES * fields["num"]:
            raise ValueError(f"found {len(body)} bytes of digests, expected others")
        if fields["format"] != _FORMAT:
            raise ValueError(f"found format {fields['format']}, expected {_FORMAT}")
        digests = np.frombuffer(body, _DIGEST)
        columns = tuple(map(str, fields["columns"]))
        return _Deletion(str(fields["key"]), columns, bool(fields["is_readmission"]), digests)
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path}: {error}, expected the tombstones of a deletion. Restore the file from a copy "
            "of the lake."
        ) from error


def _parse_renaming(path: str, head: bytes, body: bytes) -> _Renaming:
    try:
        if hashlib.sha256(head).hexdigest().encode() != body:
            raise ValueError(f"found {len(head) + len(body) + 1} bytes of another hash")
        fields: dict[str, Any] = json.loads(head)
        if fields["format"] != _FORMAT:
            raise ValueError(f"found format {fields['format']}, expected {_FORMAT}")
        return _Renaming(str(fields["column"]), str(fields["to"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path}: {error}, expected the names of a renamed column. Restore the file from a "
            "copy of the lake."
        ) from error


def _key_path(key_id: str) -> str:
    return f"{_KEYS}/{_KEY_PREFIX}{key_id}"


def _current_key_id(storage: Storage) -> str:
    """Return the lake's key for new tombstones, made where there is none yet."""
    names = storage.names(_KEYS)
    known = sorted(name for name in names if name.startswith(_KEY_PREFIX))
    if known:
        return known[0].removeprefix(_KEY_PREFIX)
    # Two processes may make one each: files say under which key they are.
    key = os.urandom(_KEY_BYTES)
    key_id = hashlib.sha256(key).hexdigest()[:16]
    storage.put_if_absent(_key_path(key_id), key, private=True)
    return key_id


def _read_key(storage: Storage, key_id: str) -> bytes:
    key = storage.get(_key_path(key_id))
    found = b"" if key is None else key
    if not hmac.compare_digest(hashlib.sha256(found).hexdigest()[:16], key_id):
        raise StorageError(
            f"{storage.url}/{_key_path(key_id)}: found {len(found)} bytes, expected the key of "
            "the dataset's tombstones: without it nobody can tell whose rows were deleted. Restore "
            "the file from a copy of the lake."
        )
    return found
