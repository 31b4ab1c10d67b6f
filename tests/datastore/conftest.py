"""What the store's tests share: a lake in a temporary folder, and episodes of known numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.manifest import GRAPH, LEARNER, MANIFEST, manifest_bytes
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.storage.storage import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _make_episode(name: str = "e", num_steps: int = 3, **fields: Any) -> Episode:
    """Step t of an episode has observation [t, -t], action t % 2 and reward t + 1."""
    first = fields.get("first_step", 0)
    steps = np.arange(first, first + num_steps)
    given = {
        "episode_id": name,
        "observations": np.stack([steps, -steps], axis=1).astype(np.float32),
        "actions": steps % 2,
        "rewards": steps + 1.0,
        "final_observation": np.array([first + num_steps, -first - num_steps], np.float32),
    }
    return Episode(**(given | fields))


@pytest.fixture
def make_episode() -> Callable[..., Episode]:
    return _make_episode


def _make_dialogue(name: str = "d", num_steps: int = 3, **fields: Any) -> Episode:
    """Generation t of a dialogue reads [10t, 10t + 1], and generates t + 1 ids from 100t on.

    Each token has the log-prob -0.5, and the last generation the reward 1.
    """
    extras: dict[str, Any] = {
        "observation_tokens": [[10 * t, 10 * t + 1] for t in range(num_steps)],
        "action_tokens": [[100 * t + i for i in range(t + 1)] for t in range(num_steps)],
        "action_log_probs": [[-0.5] * (t + 1) for t in range(num_steps)],
    }
    rewards = np.zeros(num_steps)
    rewards[-1] = 1
    given: dict[str, Any] = {
        "episode_id": name,
        "observations": np.array([f"question {t}" for t in range(num_steps)], object),
        "actions": np.array([f"answer {t}" for t in range(num_steps)], object),
        "rewards": rewards,
        "terminated": True,
    }
    return Episode(**(given | fields | {"extras": extras | fields.get("extras", {})}))


@pytest.fixture
def make_dialogue() -> Callable[..., Episode]:
    return _make_dialogue


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A policy package that passes every check but loading: its graph is no ONNX."""
    folder = tmp_path / "package"
    folder.mkdir()
    files = {GRAPH: b"graph", LEARNER: b"weights"}
    spec = PolicySpec(Box((2,)), Discrete(2), "categorical")
    for name, data in {**files, MANIFEST: manifest_bytes(spec, {"seed": 7}, files)}.items():
        (folder / name).write_bytes(data)
    return folder


class _Compact:
    """Thrift's compact protocol, as much of it as a Parquet page header has."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            fields[number] = self._value(head & 15)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 8:
            num = self._varint()
            self.at += num
            return self._data[self.at - num : self.at]
        assert kind == 12, f"a page header has no field of kind {kind}"
        return self.struct()

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value, shift = value | (byte & 0x7F) << shift, shift + 7
        return value | byte << shift

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


def _page_bytes(path: Path) -> bytes:
    """Decompress every page of a Parquet file: dictionaries and values, whether a row has them.

    Reading by rows shows neither the values of a dictionary that no row has nor statistics.
    """
    data, found = path.read_bytes(), []
    metadata = pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            start = column.data_page_offset
            if column.has_dictionary_page:
                start = min(start, column.dictionary_page_offset)
            found += _pages(data, start, start + column.total_compressed_size, column.compression)
    return b"".join(found)


def _pages(data: bytes, start: int, end: int, compression: str) -> list[bytes]:
    found, at = [], start
    while at < end:
        header = _Compact(data, at)
        fields = header.struct()
        size, body = fields[2], data[header.at : header.at + fields[3]]
        at = header.at + fields[3]
        v2 = fields.get(8, {})
        levels = v2.get(5, 0) + v2.get(6, 0)  # never compressed
        if size == levels:
            body = body[:levels]  # no values: what is there is an empty frame
        elif compression != "UNCOMPRESSED" and v2.get(7, True):
            codec = pa.Codec(compression.lower())
            body = body[:levels] + codec.decompress(body[levels:], size - levels, asbytes=True)
        assert len(body) == size
        found.append(body)
    assert at == end
    return found


@pytest.fixture
def page_bytes() -> Callable[[Path], bytes]:
    return _page_bytes
