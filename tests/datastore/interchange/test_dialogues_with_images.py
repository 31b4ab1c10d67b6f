"""Dialogues of an agent that sees screenshots: their images are stored once, and come back."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import ShardCorruptError
from replaylake.datastore.interchange.export.dialogue import read_dialogue
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.stream.lines import LineReader
from replaylake.datastore.interchange.ingest.stream.stream import follow
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.scoring.function_scorer import FunctionScorer
from replaylake.datastore.maintenance.scoring.score import score

_SCREENS = [np.random.default_rng(n).bytes(100_000) for n in range(3)]
_DIGESTS = [hashlib.sha256(screen).hexdigest() for screen in _SCREENS]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _encode(number: int) -> str:
    return base64.b64encode(_SCREENS[number]).decode()


def _call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"c{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _see(number: int, screen: int) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_encode(screen)}"}}
    return {"role": "tool", "tool_call_id": f"c{number}", "content": [image]}


def _record(name: str) -> dict[str, Any]:
    """Return a dialogue with clicks, keys and screenshots, of which the first is seen twice."""
    source = {"type": "base64", "media_type": "image/png", "data": _encode(2)}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "image", "source": source}],
    }
    messages = [
        {"role": "user", "content": "Buy milk."},
        _call(1, "click", x=12, y=40),
        _see(1, 0),
        _call(2, "press", keys=["ctrl", "a"]),
        _see(2, 1),
        _call(3, "click", x=1, y=1),
        _see(3, 0),
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "wait", "input": {}}],
        },
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "Done."},
    ]
    return {"id": name, "messages": messages, "reward": 1.0}


def _write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _read_messages(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line.get("id", line.get("episode_id")): line["messages"] for line in lines}


def test_images_are_a_column_in_sql_and_messages_stay_small(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_write(tmp_path / "a.jsonl", _record("a"))], "screens")
    rows = lake.sql(
        "select step, len(prompt_messages) as size, message_media as media from screens.steps "
        "order by step"
    ).to_pylist()
    assert max(row["size"] for row in rows) < 300
    found = [
        [(one["sha256"], one["media_type"], one["num_bytes"]) for one in row["media"] or ()]
        for row in rows
    ]
    shots = [[(_DIGESTS[n], "image/png", 100_000)] for n in (0, 1, 0, 2)]
    assert found == [[], *shots]
    assert [row["media"][0]["bytes"] for row in rows[1:]] == [*_SCREENS[:2], None, _SCREENS[2]]
    (size,) = lake.sql("select sum(num_bytes) as n from shards where dataset = 'screens'")["n"]
    assert size.as_py() < 320_000  # the screenshots, once each
    assert fsck(lake, ["screens"]).is_clean


def test_show_describes_images_and_actions(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_write(tmp_path / "a.jsonl", _record("a"))], "screens")
    turns = read_dialogue(lake.snapshot("screens"), "a").turns
    assert [list(turn.action[0].calls) for turn in turns[:2]] == [
        ['click({"x": 12, "y": 40})'],
        ['press({"keys": ["ctrl", "a"]})'],
    ]
    media = [list(turn.observation[0].media) for turn in turns]
    kinds = ("image_url", "image_url", "image_url", "image")
    assert media == [
        [],
        *(
            [f"[{kind} image/png: 100,000 bytes, sha256 {_DIGESTS[n][:16]}]"]
            for kind, n in zip(kinds, (0, 1, 0, 2), strict=True)
        ),
    ]


def test_an_image_has_its_width_and_height_in_every_step_that_shows_it(lake: Lake) -> None:
    # The bytes are stored in the first step alone.
    png = b"\x89PNG\r\n\x1a\n" + bytes(4) + b"IHDR" + bytes([0, 0, 5, 0, 0, 0, 3, 32]) + bytes(200)
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    extras = {"prompt_messages": [json.dumps(seen)] * 2}
    texts = np.array(["?", "?"], object)
    lake.dataset("screens").append(
        [Episode("a", observations=texts, actions=texts, rewards=np.zeros(2), extras=extras)]
    )
    body = read_dialogue(lake.snapshot("screens"), "a").to_json()
    digest = hashlib.sha256(png).hexdigest()
    for turn in body["turns"]:
        (said,) = turn["observation"]
        text = f"[image_url image/png: 224 bytes, 1280 x 800 pixels, sha256 {digest[:16]}]"
        assert said["media"] == [text]
        image = {"media_type": "image/png", "width": 1280, "height": 800}
        assert said["images"] == [{"text": text, "sha256": digest, "num_bytes": 224, **image}]


@pytest.mark.parametrize("format", ["parquet", "jsonl", "transcripts", "openai"])
def test_every_export_has_the_images_in_their_messages(
    lake: Lake, tmp_path: Path, format: str
) -> None:
    records = [_record("a"), _record("b")]
    ingest(lake, [_write(tmp_path / "a.jsonl", *records)], "screens")
    compact(lake, "screens", open_s=0.0)
    path = tmp_path / f"out.{'parquet' if format == 'parquet' else 'jsonl'}"
    export(lake, "screens", path, format=format)
    if format == "openai":
        texts = path.read_text()
        assert [texts.count(_encode(n)) for n in range(3)] == [4, 2, 2]
        return
    if format == "transcripts":
        expected = {record["id"]: record["messages"] for record in records}
        assert _read_messages(path) == expected
    ingest(lake, [path], "again")
    query = (
        "select source_episode_id, step, observation, action, prompt_messages, "
        "completion_messages, message_media from {} order by all"
    )
    again = lake.sql(query.format("again.steps")).to_pylist()
    assert again == lake.sql(query.format("screens.steps")).to_pylist()


def test_a_stream_that_is_delivered_again_adds_nothing(lake: Lake, tmp_path: Path) -> None:
    log = _write(tmp_path / "a.jsonl", _record("a"), _record("b"))
    for expected in (10, 0):
        with LineReader(os.open(log, os.O_RDONLY), "-") as lines:
            assert follow(lake, lines, "screens", flush_every_s=0.0).lines.committed == expected
    assert lake.sql("select count(message_media) as n from screens.steps")["n"].to_pylist() == [8]


def test_a_scorer_gets_the_messages_as_they_were_written(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_write(tmp_path / "a.jsonl", _record("a"))], "screens")

    def count(episode: Episode) -> float:
        texts = episode.extras["prompt_messages"].to_pylist()
        return float(sum(text.count(_encode(n)) for text in texts for n in range(3)))

    scorer = FunctionScorer(count, revision="1")
    assert score(lake, "screens", scorer).computed == 1
    assert lake.sql("select max(count) as n from screens.steps")["n"].to_pylist() == [4.0]


def test_deletion_takes_the_bytes_of_one_episode_alone(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_write(tmp_path / "a.jsonl", _record("a"), _record("b"))], "screens")
    delete(lake, "screens", where="source_episode_id = 'a'")
    path = tmp_path / "out.jsonl"
    export(lake, "screens", path, format="transcripts")
    assert _read_messages(path) == {"b": _record("b")["messages"]}
    assert fsck(lake, ["screens"]).is_clean


def test_lost_bytes_are_found_by_fsck_and_no_export_leaves_them_out(
    lake: Lake, tmp_path: Path
) -> None:
    ingest(lake, [_write(tmp_path / "a.jsonl", _record("a"))], "screens")
    dataset = lake.dataset("screens")
    snapshot = dataset.table.snapshot()
    rows = snapshot.read()
    written = dataset.table.write(rows.filter(rows["step"].to_numpy() != 1))
    removed = [entry.path for entry in snapshot.files]
    dataset.table.commit([written], producer="x", sequence=0, removed=removed)
    (fault,) = [one for one in fsck(lake, ["screens"]).findings if one.check == "media"]
    assert _DIGESTS[0] in fault.message
    with pytest.raises(ShardCorruptError, match=_DIGESTS[0]):
        export(lake, "screens", tmp_path / "out.jsonl", format="transcripts")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_dataset_gets_the_later_format_with_its_first_image(lake: Lake) -> None:
    dataset = lake.dataset("screens")
    dataset.create(Text(), Text(), extras={"prompt_messages": pa.string()})

    def append(name: str, text: str) -> str:
        extras = {"prompt_messages": [json.dumps([{"role": "user", "content": text}])]}
        observations, actions = np.array(["?"], object), np.array(["!"], object)
        episode = Episode(
            name, observations=observations, actions=actions, rewards=[0.0], extras=extras
        )
        dataset.append([episode])
        return dataset.table.snapshot().configuration["replaylake.format_version"]

    image = f"data:image/png;base64,{_encode(0)}"
    assert [append("a", "text"), append("b", image), append("c", "text")] == ["1", "2", "2"]


def test_a_dataset_with_a_unique_key_leaves_images_where_they_are(
    lake: Lake, tmp_path: Path
) -> None:
    path = _write(tmp_path / "a.jsonl", _record("a"))
    for _ in range(2):
        ingest(lake, [path], "screens", unique=["source_episode_id", "env_step"])
    names = lake.sql("select * from screens.steps limit 0").schema.names
    assert "message_media" not in names
    (size,) = lake.sql("select sum(len(prompt_messages)) as n from screens.steps")["n"]
    assert size.as_py() > 400_000
