"""Media of messages: files leave the JSON for a column, and come back as they were."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pyarrow as pa
import pytest

from replaylake.datastore.episodes.message_media import (
    MEDIA_TYPE,
    CommittedMedia,
    move_media,
    restore_media,
)
from replaylake.datastore.errors import ShardCorruptError

_PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
_GIF = b"GIF89a" + bytes(range(256))
_BASE64 = base64.b64encode(_PNG).decode()
_DIGEST = hashlib.sha256(_PNG).hexdigest()
_URL = f"data:image/png;base64,{_BASE64}"


def _make_rows(*texts: str, episodes: str = "") -> pa.Table:
    num = len(texts)
    return pa.table(
        {
            "episode_id": list(episodes or "e" * num),
            "prompt_messages": list(texts),
            "completion_messages": ["[]"] * num,
        }
    )


def _restore(rows: pa.Table, **loaded: bytes) -> list[str]:
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    contents = {name.removeprefix("d"): content for name, content in loaded.items()}
    restored = restore_media(columns, lambda: contents, "episode e")
    assert "message_media" not in restored
    texts: list[str] = restored["prompt_messages"].to_pylist()
    return texts


@pytest.mark.parametrize(
    ("text", "media_type"),
    [
        (json.dumps([{"type": "image_url", "image_url": {"url": _URL}}]), "image/png"),
        (f'["{_URL}"]', "image/png"),
        (f'["![shot](data:image/png;name=a.png;base64,{_BASE64}) and text"]', "image/png"),
        # In the text of a tool's arguments, which are JSON themselves.
        (json.dumps([json.dumps({"url": _URL, "n": 1})]), "image/png"),
        (f'[{{"type":"base64","media_type":"image/png","data":"{_BASE64}"}}]', "image/png"),
        (f'[{{"data" : "{_BASE64}", "format": "wav"}}, {{"a": {{}}}}]', "wav"),
        (f'[{{"type":"blob","mime_type":"image/png","content":"{_BASE64}"}}]', "image/png"),
    ],
)
def test_a_file_leaves_the_text_and_comes_back_in_it(text: str, media_type: str) -> None:
    rows = move_media(_make_rows(text, "[]"), {})
    assert rows["message_media"].to_pylist() == [
        [{"sha256": _DIGEST, "media_type": media_type, "num_bytes": 264, "bytes": _PNG}],
        None,
    ]
    assert rows["prompt_messages"][0].as_py() == text.replace(_BASE64, f"sha256:{_DIGEST}")
    assert _restore(rows) == [text, "[]"]


@pytest.mark.parametrize(
    "text",
    [
        f'[{{"data":"{_BASE64}","name":"a"}}]',  # nothing says that it is a file
        f'[{{"data":"{_BASE64}","a":{{"format":"png"}}}}]',
        f'["data:image/png;base64,{_BASE64[:40]}"]',
        f'["data:image/png;base64,{_BASE64[:-2]}x"]',  # ends within a byte
        f'["data:image/png;base64,{_BASE64[:-1]}"]',
        json.dumps(["https://x/y.png", {"media_type": "image/png", "path": "a.png"}]),
        # It would come back with the file in the place of its digest, too.
        f'["sha256:{_DIGEST}", "{_URL}"]',
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    rows = _make_rows(text)
    assert move_media(rows, {}).equals(rows)


def test_bytes_are_there_once_for_each_episode() -> None:
    gif = f"data:image/gif;base64,{base64.b64encode(_GIF).decode()}"
    texts = (f'["{_URL}", "{_URL}"]', f'["{gif}", "{_URL}"]', f'["{_URL}"]', f'["{_URL}"]')
    rows = move_media(_make_rows(*texts, episodes="eeef"), {})
    found = [[one["bytes"] for one in cell] for cell in rows["message_media"].to_pylist()]
    assert found == [[_PNG], [_GIF, None], [None], [_PNG]]
    assert _restore(rows) == list(texts)


def test_a_writer_leaves_out_bytes_that_it_has_committed_for_the_episode() -> None:
    committed = CommittedMedia(num_remembered=2)
    first = move_media(_make_rows(f'["{_URL}"]'), {})
    assert committed.leave_out(first).equals(first)
    committed.add(first)
    rows = move_media(_make_rows(*[f'["{_URL}"]'] * 2, episodes="gh"), {})
    second = move_media(_make_rows(f'["{_URL}"]', f'["{_URL}"]', episodes="ef"), {})
    left = committed.leave_out(second)["message_media"].to_pylist()
    assert [cell[0]["bytes"] for cell in left] == [None, _PNG]
    committed.add(rows)  # of two further episodes: the first is forgotten
    assert committed.leave_out(second).equals(second)


def test_a_digest_that_a_step_without_the_file_mentions_stays_text() -> None:
    texts = (f'["{_URL}"]', f'["sha256:{_DIGEST}"]')
    assert _restore(move_media(_make_rows(*texts), {})) == list(texts)


def test_bytes_that_no_step_has_are_an_error_with_their_digest() -> None:
    rows = move_media(_make_rows(f'["{_URL}"]', f'["{_URL}"]'), {})
    with pytest.raises(ShardCorruptError, match=f"episode e: .* sha256 {_DIGEST}"):
        _restore(rows.slice(1))
    assert _restore(rows.slice(1), **{f"d{_DIGEST}": _PNG}) == [f'["{_URL}"]']


@pytest.mark.parametrize("kind", [pa.int64(), MEDIA_TYPE])
def test_a_column_of_the_log_of_this_name_is_left_alone(kind: pa.DataType) -> None:
    rows = _make_rows(f'["{_URL}"]')
    own: Any = pa.nulls(1, kind)
    given = rows.append_column("message_media", own)
    assert move_media(given, {}).equals(given)
    moved = move_media(rows, {"message_media": kind})
    assert moved.equals(rows) is (kind == pa.int64())
