"""Sequence images: the images in the messages of token sequences, for models that see them.

A step has the messages since the step before it, so that the images of a sequence are those of the
steps on its path, one after the other. The bytes are read once, from whichever step of the episode
has them, into a temporary file that has each image once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.message_media import (
    FINAL_MESSAGES,
    MESSAGE_MEDIA,
    PROMPT_MESSAGES,
    is_media_column,
    read_reference,
)
from replaylake.datastore.episodes.tokens import PARENT_AGENT_ID, PARENT_STEP
from replaylake.datastore.errors import SchemaMismatchError, ShardCorruptError, StorageError
from replaylake.datastore.storage.arrow_values import combine_chunks
from replaylake.datastore.storage.table.shard import row_group_batches
from replaylake.datastore.storage.table.table_schema import conform
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

_BATCH_BYTES: Final = 16 << 20
_MAX_ROWS: Final = 65_536
_MESSAGES: Final = (PROMPT_MESSAGES, FINAL_MESSAGES)
_ENDS: Final = ("episode_id", "agent_id", "last_step", "root_agent_id", "first_step")
_PARENT: Final = (PARENT_AGENT_ID, PARENT_STEP)
_KEY: Final = (schema.EPISODE_ID, schema.AGENT_ID, schema.STEP)
# Types of a message's parts that are an image: OpenAI's two APIs; Anthropic and transformers.
_IMAGE_PARTS: Final = ("image_url", "input_image", "image")
_TYPE_MEMBERS: Final = ("media_type", "mime_type", "mimeType")
_DATA_MEMBERS: Final = ("data", "content")

_StepKey = tuple[str, str, int]


class SequenceImages:
    """The images of some sequences of a snapshot, each once in a temporary file.

    Close it, or use it as a context manager, to free the file.
    """

    def __init__(
        self, snapshot: TableSnapshot, table: pa.Table, sequences: NDArray[np.int64]
    ) -> None:
        """Read the images.

        Args:
            snapshot: the version that the sequences were read from.
            table: `TokenSequences.table`.
            sequences: int64 [N], the rows of `table` that are wanted.

        Memory: some 100 bytes for each step with images, and a batch of 16 MiB. Cost: one pass over
        the columns of messages and media. Raises: ShardCorruptError if no step has the bytes of an
        image; SchemaMismatchError for images that are only named by a URL or path; StorageError.
        """
        self._file = tempfile.TemporaryFile(prefix="replaylake-images-")  # noqa: SIM115  (close)
        self._size = 0
        self._places: dict[str, tuple[int, int]] = {}
        self._digests: dict[int, tuple[str, ...]] = {}
        try:
            self._read(snapshot, table, sequences)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SequenceImages:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of different images."""
        return len(self._places)

    def close(self) -> None:
        """Free the temporary file."""
        self._file.close()

    def find(self, sequence: int) -> tuple[str, ...]:
        """Return the sha256 of each image of a sequence, in the order of its messages."""
        return self._digests.get(sequence, ())

    def read_sequences(self, sequences: NDArray[np.int64]) -> list[list[bytes]]:
        """Return the files of the images of some sequences. sequences: int64 [B]."""
        return [[self._read_one(digest) for digest in self.find(n)] for n in sequences.tolist()]

    def _read_one(self, digest: str) -> bytes:
        start, size = self._places[digest]
        return os.pread(self._file.fileno(), size, start)

    def _read(self, snapshot: TableSnapshot, table: pa.Table, sequences: NDArray[np.int64]) -> None:
        rows = table.select([*_ENDS]).take(pa.array(sequences))
        episodes = combine_chunks(rows[schema.EPISODE_ID]).unique()
        steps: dict[_StepKey, tuple[str, ...]] = {}
        parents: dict[_StepKey, _StepKey] = {}
        for batch in _read_steps(snapshot, episodes):
            self._add(batch, steps, parents)
        columns = (rows[name].to_pylist() for name in _ENDS)
        for number, (episode_id, agent_id, last_step, root_agent_id, first_step) in zip(
            sequences.tolist(), zip(*columns, strict=True), strict=True
        ):
            key, root = (episode_id, agent_id, last_step), (episode_id, root_agent_id, first_step)
            path = [key]
            while key != root:
                key = parents.get(key) or (key[0], key[1], key[2] - 1)
                path.append(key)
            found = [digest for key in reversed(path) for digest in steps.get(key, ())]
            if found:
                self._digests[number] = tuple(found)
        for key, own in steps.items():
            for digest in own:
                if digest not in self._places:
                    raise ShardCorruptError(
                        f"{_name(key)}: messages refer to an image with the sha256 {digest}, whose "
                        "bytes no step of the episode has: a part of the episode is lost. Restore "
                        "it from a copy of the lake, or delete the episode."
                    )
        self._file.flush()

    def _add(
        self,
        batch: pa.Table,
        steps: dict[_StepKey, tuple[str, ...]],
        parents: dict[_StepKey, _StepKey],
    ) -> None:
        """Take the bytes in some rows, their images by step, and the parents that steps name."""
        if MESSAGE_MEDIA in batch.column_names:
            for one in combine_chunks(batch[MESSAGE_MEDIA]).flatten().to_pylist():
                if one["bytes"] is not None:
                    self._store(one["bytes"])
        texts = [batch[n].to_pylist() for n in _MESSAGES if n in batch.column_names]
        keys = list(zip(*(batch[n].to_pylist() for n in _KEY), strict=True))
        for row, key in enumerate(keys):
            found: list[str] = []
            for text in (column[row] for column in texts):
                if text is not None and "image" in text:
                    images = _find_images(json.loads(text), key)
                    found += [self._resolve(payload, key) for payload in images]
            if found:
                steps[key] = tuple(found)
        if PARENT_STEP in batch.column_names:
            agents = [None] * len(keys)
            if PARENT_AGENT_ID in batch.column_names:
                agents = batch[PARENT_AGENT_ID].to_pylist()
            for key, agent, step in zip(keys, agents, batch[PARENT_STEP].to_pylist(), strict=True):
                if step is not None:
                    parents[key] = (key[0], key[1] if agent is None else agent, step)

    def _resolve(self, payload: str, key: _StepKey) -> str:
        """Return the sha256 of an image, which is a reference or base64."""
        if (digest := read_reference(payload)) is not None:
            return digest
        try:
            return self._store(base64.b64decode(payload, validate=True))
        except binascii.Error as error:
            raise SchemaMismatchError(
                f"{_name(key)}: found an image that is no base64 ({error}), expected an image in "
                "a data URL. Leave the episode out by `where`."
            ) from error

    def _store(self, content: bytes) -> str:
        """Write an image at the end of the file, the first time; return its sha256."""
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._places:
            try:
                self._file.write(content)
            except OSError as error:
                raise StorageError(
                    f"{tempfile.gettempdir()}: {error.strerror} while images were copied there. "
                    "Free space, or set TMPDIR to a folder with more."
                ) from error
            self._places[digest] = (self._size, len(content))
            self._size += len(content)
        return digest


def _read_steps(snapshot: TableSnapshot, episodes: pa.Array) -> Iterator[pa.Table]:
    """Read the messages and media of some episodes, a part of a row group at a time."""
    fields = snapshot.select_fields(
        [
            one.name
            for one in snapshot.schema
            if one.name in (*_KEY, *_PARENT, *_MESSAGES) or is_media_column(one.name, one.type)
        ]
    )
    for path in snapshot.iter_verified():
        metadata = pq.read_metadata(path)
        for group in range(metadata.num_row_groups):
            info = metadata.row_group(group)
            width = max(1, info.total_byte_size // max(1, info.num_rows))
            num_rows = int(np.clip(_BATCH_BYTES // width, 1, _MAX_ROWS))
            for batch in row_group_batches(path, group, fields.names, num_rows):
                rows = conform(batch, fields)
                ids = rows[schema.EPISODE_ID].cast(pa.string())
                yield rows.filter(pc.is_in(ids, value_set=episodes))


def _find_images(value: Any, key: _StepKey) -> Iterator[str]:
    """Yield the base64 or the reference of each image in messages, in their order.

    Raises: SchemaMismatchError for an image that is only named.
    """
    if isinstance(value, str):
        header, comma, payload = value.partition(",")
        if comma and header.startswith("data:image/") and header.endswith(";base64"):
            yield payload
    elif isinstance(value, list):
        for one in value:
            yield from _find_images(one, key)
    elif isinstance(value, dict):
        media_type = next((value[n] for n in _TYPE_MEMBERS if n in value), None)
        if isinstance(media_type, str) and media_type.startswith("image/"):
            yield from (value[n] for n in _DATA_MEMBERS if isinstance(value.get(n), str))
            return
        num_found = 0
        for one in value.values():
            for payload in _find_images(one, key):
                num_found += 1
                yield payload
        if not num_found and value.get("type") in _IMAGE_PARTS:
            raise SchemaMismatchError(
                f"{_name(key)}: found an image whose bytes are not in its message "
                f"({str(value)[:120]}), expected a data URL with base64. Record the bytes, or "
                "leave the episode out by `where`."
            )


def _name(key: _StepKey) -> str:
    episode_id, agent_id, step = key
    agent = f" agent {agent_id!r}" if agent_id else ""
    return f"episode {episode_id!r}{agent} step {step}"
