"""Traces: where ids are still found: in the columns of Parquet files, and as text in all others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.feedback.decisions import DECISION_ID
from replaylake.datastore.storage.storage import Storage, StoredFile

# A shorter id, such as `7`, would be found in any text. It is looked for in columns alone.
_MIN_CHARACTERS: Final = 8
_BLOCK_BYTES: Final = 4 << 20
_ID_BYTES: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


@dataclass(frozen=True)
class Trace:
    """A file in which an id was found, or that cannot be looked into: rows, text or unreadable."""

    path: str
    kind: str


class IdSearch:
    """The ids of episodes and of decisions that are looked for."""

    def __init__(self, episodes: Iterable[str], decisions: Iterable[str]) -> None:
        self.columns = {
            EPISODE_ID: pa.array(episodes, pa.string()),
            DECISION_ID: pa.array(decisions, pa.string()),
        }
        self._needles: dict[int, list[bytes]] = {}
        for column in self.columns.values():
            for text in column.to_pylist():
                # As it is, and as JSON spells it.
                for needle in {text.encode(), json.dumps(text)[1:-1].encode()}:
                    if len(needle) >= _MIN_CHARACTERS:
                        end = int(np.frombuffer(needle[-8:], "<u8")[0])
                        self._needles.setdefault(end, []).append(needle)
        self._ends = np.array(sorted(self._needles), np.uint64)
        self._longest = max((len(n) for group in self._needles.values() for n in group), default=0)

    def is_in_text(self, data: bytes) -> bool:
        """Whether an id stands in the bytes, not as a part of a longer one."""
        if not len(self._ends):
            return False
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[max(0, start - self._longest - 1) : start + _BLOCK_BYTES + 1]
            if self._is_in_block(block):
                return True
        return False

    def is_in_rows(self, file: pq.ParquetFile, names: Iterable[str]) -> bool:
        """Whether a row has an id in one of its columns of ids."""
        columns = [name for name in names if len(self.columns[name])]
        for group in range(file.num_row_groups if columns else 0):
            rows = file.read_row_group(group, columns=columns)
            for name in columns:
                texts = rows.column(name).cast(pa.string())
                if pc.any(pc.is_in(texts, value_set=self.columns[name])).as_py():
                    return True
        return False

    def _is_in_block(self, block: bytes) -> bool:
        if len(block) < 8:
            return False
        windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(block, np.uint8), 8)
        ends = np.ascontiguousarray(windows).view("<u8").ravel()
        for at in np.flatnonzero(np.isin(ends, self._ends)):
            end = int(at) + 8
            for needle in self._needles[int(ends[at])]:
                begin = end - len(needle)
                if begin >= 0 and block[begin:end] == needle and _is_whole_id(block, begin, end):
                    return True
        return False


def find_traces(
    storage: Storage, files: Iterable[StoredFile], search: IdSearch
) -> Iterator[tuple[StoredFile, Trace]]:
    """Look into files; yields those with a trace. Cost: reads their columns of ids, or all."""
    for file in files:
        if (kind := _kind(storage, file, search)) is not None:
            yield file, Trace(file.path, kind)


def _kind(storage: Storage, file: StoredFile, search: IdSearch) -> str | None:
    if not file.path.endswith(".parquet"):
        data = storage.get(file.path)
        return "text" if data is not None and search.is_in_text(data) else None
    try:
        # Never through the local cache: from there it would have to be purged again.
        with storage.open_original(file.path) as source, pq.ParquetFile(source) as parquet:
            names = [name for name in search.columns if name in parquet.schema_arrow.names]
            if names:
                return "rows" if search.is_in_rows(parquet, names) else None
            text = json.dumps(parquet.read().to_pylist(), default=str, ensure_ascii=False)
            return "text" if search.is_in_text(text.encode()) else None
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError):
        return "unreadable"


def _is_whole_id(block: bytes, begin: int, end: int) -> bool:
    before = block[begin - 1] if begin else 0
    after = block[end] if end < len(block) else 0
    return before not in _ID_BYTES and after not in _ID_BYTES
