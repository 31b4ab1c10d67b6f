"""Media of messages: images and other files, stored once beside the messages that contain them.

The columns of messages are JSON text, in which a file is base64: in a data URL, or as `data` or
`content` beside its media type. In the rows of a dataset, `sha256:<64 digits>` takes the place of
the base64, and the column `message_media` has the bytes. Nothing else of the text changes, so that
replacing the reference by the base64 gives the same text again, byte by byte.

A row lists all files that its messages refer to. The bytes are in the first row of the episode
that refers to a file, so that a screenshot which each call of an agent sends again is stored once:
once for the rows that are written together, and once for those that a gateway commits one after
the other (`CommittedMedia`). No row refers to the bytes of another episode, which may be deleted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.errors import ShardCorruptError
from replaylake.datastore.storage.arrow_values import combine_chunks

PROMPT_MESSAGES: Final = "prompt_messages"
COMPLETION_MESSAGES: Final = "completion_messages"
FINAL_MESSAGES: Final = "final_messages"
MESSAGE_COLUMNS: Final = (PROMPT_MESSAGES, COMPLETION_MESSAGES, FINAL_MESSAGES)
MESSAGE_MEDIA: Final = "message_media"
MEDIA_TYPE: Final = pa.list_(
    pa.field(
        "element",
        pa.struct(
            [
                ("sha256", pa.string()),
                ("media_type", pa.string()),
                ("num_bytes", pa.int64()),
                ("bytes", pa.binary()),
            ]
        ),
    )
)
# Shorter ones stay where they are: a reference has 71 characters.
_MIN_CHARACTERS: Final = 128
_PAYLOAD: Final = re.compile(
    r'(?:data:(?P<type>[^\s;,"\\]*)[^\s,"\\]*;base64,|(?P<member>"(?:data|content)"\s*:\s*"))'
    rf"(?P<base64>[A-Za-z0-9+/]{{{_MIN_CHARACTERS},}}={{0,2}})"
)
# One of them is in each message that contains a file.
_MARKS: Final = (";base64,", '"data"', '"mime_type"')
_TYPE: Final = re.compile(r'"(?:media_type|mime_type|mimeType|format)"\s*:\s*"([^"\\]+)"')
# How far from the base64 its media type may stand in the text of their object.
_MAX_DISTANCE: Final = 512
_PREFIX: Final = "sha256:"
_REFERENCE: Final = re.compile(rf"{_PREFIX}[0-9a-f]{{64}}")


@dataclass(frozen=True)
class _Media:
    sha256: str
    media_type: str | None
    content: bytes


def move_media(rows: pa.Table, known: Mapping[str, pa.DataType]) -> pa.Table:
    """Return rows of steps whose messages refer to files that they contained.

    known: the further columns of the dataset. Rows are returned as they are if they or the dataset
    have a column of a log's own that is called `message_media`.
    Cost: one pass over the texts of messages that contain files, and their sha256.
    """
    names = [n for n in MESSAGE_COLUMNS if n in rows.column_names and _is_text(rows[n].type)]
    is_taken = MESSAGE_MEDIA in known and not is_media_column(MESSAGE_MEDIA, known[MESSAGE_MEDIA])
    if not names or is_taken or MESSAGE_MEDIA in rows.column_names:
        return rows
    candidates = np.zeros(rows.num_rows, np.bool_)
    for name in names:
        for mark in _MARKS:
            found = pc.fill_null(pc.match_substring(rows[name], mark), False)
            candidates |= found.to_numpy()
    places = np.flatnonzero(candidates)
    if not len(places):
        return rows
    there = rows.select([EPISODE_ID, *names]).take(pa.array(places))
    texts = {name: there[name].to_pylist() for name in names}
    cells: list[list[dict[str, Any]] | None] = [None] * rows.num_rows
    written: set[tuple[str, str]] = set()
    for number, episode_id in enumerate(there[EPISODE_ID].to_pylist()):
        own = {name: texts[name][number] for name in names}
        replaced, media = _replace_payloads(own)
        if not media:
            continue
        for name in names:
            texts[name][number] = replaced[name]
        cells[int(places[number])] = [_make_entry(one, episode_id, written) for one in media]
    if not written:
        return rows
    for name in names:
        column = combine_chunks(rows[name])
        changed = pa.array(texts[name], column.type)
        column = pc.replace_with_mask(column, pa.array(candidates), changed)
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), column)
    return rows.append_column(pa.field(MESSAGE_MEDIA, MEDIA_TYPE), pa.array(cells, MEDIA_TYPE))


def is_media_column(name: str, kind: pa.DataType) -> bool:
    """Whether a column has the media of messages, and not a log's own values."""
    return name == MESSAGE_MEDIA and bool(kind.equals(MEDIA_TYPE))


def read_reference(payload: str) -> str | None:
    """Return the sha256 that a message has in the place of a file's base64; None for base64."""
    return payload.removeprefix(_PREFIX) if _REFERENCE.fullmatch(payload) else None


class CommittedMedia:
    """Remembers which files a writer has committed, and for which episodes.

    A gateway commits the calls of an episode one after the other. An agent that leaves old messages
    out of its context sends the same screenshots in several of them.
    """

    def __init__(self, num_remembered: int = 65_536) -> None:
        self._num_remembered = num_remembered
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def leave_out(self, rows: pa.Table) -> pa.Table:
        """Return rows without the bytes that are committed."""
        place = rows.schema.get_field_index(MESSAGE_MEDIA)
        if place < 0 or not self._known:
            return rows
        cells = rows[MESSAGE_MEDIA].to_pylist()
        for key, one in _iter_entries(rows, cells):
            if key in self._known:
                one["bytes"] = None
        return rows.set_column(place, rows.schema.field(place), pa.array(cells, MEDIA_TYPE))

    def add(self, rows: pa.Table) -> None:
        """Take rows that were committed."""
        if MESSAGE_MEDIA not in rows.column_names:
            return
        digests = rows[MESSAGE_MEDIA].combine_chunks()
        cells = [[{"sha256": one} for one in cell or ()] for cell in _list_digests(digests)]
        with self._lock:
            for key, _ in _iter_entries(rows, cells):
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > self._num_remembered:
                self._known.popitem(last=False)


def restore_media(
    columns: Mapping[str, pa.Array], load: Callable[[], Mapping[str, bytes]], where: str
) -> dict[str, pa.Array]:
    """Return the further columns of steps of one episode with their media in the messages again.

    columns: among them `message_media`, which the result lacks.
    load: returns the media of the whole episode by sha256; called if these steps lack bytes.
    where: the episode, for the error.
    Raises: ShardCorruptError if no step of the episode has the bytes of a file.
    """
    restored = dict(columns)
    cells = combine_chunks(restored.pop(MESSAGE_MEDIA))
    digests = _list_digests(cells)
    contents = _Contents(cells, load, where)
    for name in restored.keys() & {*MESSAGE_COLUMNS}:
        texts = [
            text if text is None or not own else contents.restore(text, own)
            for text, own in zip(restored[name].to_pylist(), digests, strict=True)
        ]
        restored[name] = pa.array(texts, restored[name].type)
    return restored


class _Contents:
    """The media of an episode, as base64."""

    def __init__(
        self, cells: pa.Array, load: Callable[[], Mapping[str, bytes]], where: str
    ) -> None:
        media = cells.flatten()
        known = media.filter(pc.is_valid(pc.struct_field(media, "bytes"))).to_pylist()
        self._contents = {one["sha256"]: one["bytes"] for one in known}
        self._load: Callable[[], Mapping[str, bytes]] | None = load
        self._where = where

    def restore(self, text: str, digests: Collection[str]) -> str:
        """Return a message as it was written. digests: of all media of its step."""

        def replace(match: re.Match[str]) -> str:
            digest = match[0].removeprefix(_PREFIX)
            return self._encode(digest) if digest in digests else match[0]

        return _REFERENCE.sub(replace, text)

    def _encode(self, digest: str) -> str:
        if digest not in self._contents and self._load is not None:
            self._contents |= self._load()
            self._load = None
        if digest not in self._contents:
            raise ShardCorruptError(
                f"{self._where}: messages refer to media with the sha256 {digest}, whose bytes no "
                "step of the episode has: a part of the episode is lost. Restore it from a copy of "
                "the lake, or delete the episode."
            )
        return base64.b64encode(self._contents[digest]).decode("ascii")


def _iter_entries(
    rows: pa.Table, cells: Sequence[Sequence[dict[str, Any]] | None]
) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Yield each file of some rows with its episode and sha256."""
    for episode_id, cell in zip(rows[EPISODE_ID].to_pylist(), cells, strict=True):
        for one in cell or ():
            yield (episode_id, one["sha256"]), one


def _list_digests(cells: pa.Array) -> list[Sequence[str] | None]:
    media = pc.struct_field(cells.flatten(), "sha256").to_pylist()
    ends = np.cumsum(pc.fill_null(pc.list_value_length(cells), 0).to_numpy())
    return [media[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends, strict=True)]


def _replace_payloads(
    texts: Mapping[str, str | None],
) -> tuple[dict[str, str | None], list[_Media]]:
    """Return the texts of a row with references in the place of files, and the files, each once."""
    media: dict[str, _Media] = {}

    def replace(match: re.Match[str]) -> str:
        media_type = match["type"]
        if match["member"] is not None:
            found = _TYPE.search(_cut_object(match))
            if found is None:
                return match[0]  # some other member of this name
            media_type = found[1]
        payload = match["base64"]
        try:
            content = binascii.a2b_base64(payload, strict_mode=True)
        except binascii.Error:
            return match[0]
        if base64.b64encode(content).decode("ascii") != payload:
            return match[0]  # it would come back as another text
        digest = hashlib.sha256(content).hexdigest()
        media.setdefault(digest, _Media(digest, media_type or None, content))
        return f"{match[0][: match.start('base64') - match.start()]}{_PREFIX}{digest}"

    replaced = {
        n: None if text is None else _PAYLOAD.sub(replace, text) for n, text in texts.items()
    }
    quoted = (f"{_PREFIX}{digest}" in text for digest in media for text in texts.values() if text)
    # A message that quotes the digest of its own image would come back with the image twice.
    return ({}, []) if any(quoted) else (replaced, list(media.values()))


def _cut_object(match: re.Match[str]) -> str:
    """Return the text around a member, up to the ends of its object."""
    text, start, end = match.string, match.start(), match.end()
    first, last = max(0, start - _MAX_DISTANCE), end + _MAX_DISTANCE
    before = re.split(r"[{}]", text[first:start])[-1]
    return f"{before} {re.split(r'[{}]', text[end:last])[0]}"


def _make_entry(media: _Media, episode_id: str, written: set[tuple[str, str]]) -> dict[str, Any]:
    key = (episode_id, media.sha256)
    is_first = key not in written
    written.add(key)
    return {
        "sha256": media.sha256,
        "media_type": media.media_type,
        "num_bytes": len(media.content),
        "bytes": media.content if is_first else None,
    }


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
