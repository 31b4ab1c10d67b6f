"""Dialogues for people: turns, media, and the texts and probabilities of tokens."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.interchange.export.dialogue import (
    describe_part,
    read_dialogue,
    read_token_texts,
)
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake

_FIXTURES = Path(__file__).parents[3] / "fixtures"
_PNG = b"\x89PNG\r\n\x1a\n"
_DATA = base64.b64encode(_PNG).decode()
_DIGEST = hashlib.sha256(_PNG).hexdigest()[:16]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def test_turns_of_agents_and_branches(lake: Lake) -> None:
    ingest(lake, [_FIXTURES / "verifiers" / "run" / "traces.jsonl"], "graphs")
    snapshot = lake.snapshot("graphs")
    dialogue = read_dialogue(snapshot, "e-cut", with_tokens=True)
    found = [(t.agent_id, t.step, t.parent, t.num_tokens, t.num_trainable) for t in dialogue.turns]
    assert found == [
        ("solver", 0, None, 6, 6),
        ("solver", 1, None, 5, 0),
        ("solver~1", 0, ("solver", 0), 6, 6),
    ]
    assert dialogue.reward == 0.0
    assert dialogue.turns[2].reward_components[0]["name"] == "correct"
    assert dialogue.turns[2].truncated
    token = dialogue.turns[0].tokens[1]
    assert (token.id, token.text, token.log_prob, token.is_trainable) == (53, None, -0.125, True)
    assert not read_dialogue(snapshot, dialogue.episode_id).turns[0].tokens


def test_a_long_dialogue_is_cut_by_turns_and_by_bytes(lake: Lake) -> None:
    texts = ["a" * 10, "\N{EURO SIGN}" * 10, "c" * 10]
    talk = Episode("t", observations=texts, actions=["x"] * 3, rewards=[1.0, 2.0, 4.0])
    lake.dataset("talks").append([talk])
    snapshot = lake.snapshot("talks")

    def read_steps(**limits: int) -> list[int]:
        return [turn.step for turn in read_dialogue(snapshot, "t", **limits).turns]

    assert read_dialogue(snapshot, "t", max_turns=2).reward == 3.0
    assert read_steps(max_turns=9, max_bytes=1000) == [0, 1, 2]
    # A euro sign has three bytes; ids and the like count, too, so that not the limit itself is
    # tried but one below the second text alone.
    assert read_steps(max_bytes=29) == [0]
    assert read_steps(max_bytes=1) == [0]


def test_an_unknown_episode_and_an_id_of_several_sources(lake: Lake, tmp_path: Path) -> None:
    for number in range(2):
        message = {"role": "assistant", "content": f"{number}"}
        record = json.dumps({"id": "a", "messages": [{"role": "user", "content": "?"}, message]})
        (tmp_path / f"{number}.jsonl").write_text(record)
        ingest(lake, [tmp_path / f"{number}.jsonl"], "chats")
    snapshot = lake.snapshot("chats")
    with pytest.raises(NotFoundError, match="chats@2 has no episode 'b', expected one") as caught:
        read_dialogue(snapshot, "b")
    assert caught.value.parameter == "episode"
    with pytest.raises(NotFoundError, match="has 2 episodes with the source id 'a': "):
        read_dialogue(snapshot, "a")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_DATA}"}},
            f"[image_url image/png: 8 bytes, sha256 {_DIGEST}]",
        ),
        (
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": _DATA},
            },
            f"[image image/png: 8 bytes, sha256 {_DIGEST}]",
        ),
        (
            {"type": "blob", "mime_type": "image/png", "content": _DATA, "modality": "image"},
            f"[blob image/png: 8 bytes, sha256 {_DIGEST}]",
        ),
        ({"type": "image_url", "image_url": "https://x/y.png"}, "[image_url: https://x/y.png]"),
        (
            {"type": "image", "source": {"media_type": "image/png", "path": "1.png"}},
            "[image image/png: 1.png]",
        ),
        (
            {"type": "image", "image": "a.png", "sha256": "ab" * 32},
            "[image: a.png, sha256 abababababababab]",
        ),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, None),
        ({"type": "text", "text": "a"}, None),
        ("a", None),
    ],
)
def test_parts_that_are_media(part: Any, expected: str | None) -> None:
    if expected is None and isinstance(part, dict) and "input_audio" in part:
        digest = hashlib.sha256(b"!").hexdigest()[:16]
        expected = f"[input_audio wav: 1 bytes, sha256 {digest}]"
    assert describe_part(part) == expected


def _write(path: Path, **model: Any) -> Path:
    path.write_text(json.dumps({"model": model.pop("model"), **model}))
    return path


def test_texts_of_tokens(tmp_path: Path) -> None:
    byte_level = _write(
        tmp_path / "a.json",
        model={"vocab": {"a": 0, "\u0120b": 1, "\u00c3": 3}},
        added_tokens=[{"content": "<|end|>", "id": 4}],
        decoder={"type": "ByteLevel"},
    )
    assert read_token_texts(byte_level, None) == [
        "a",
        " b",
        None,
        "\N{REPLACEMENT CHARACTER}",
        "<|end|>",
    ]
    unigram = _write(tmp_path / "b.json", model={"vocab": [["\u2581a", -1.0], ["<0x0A>", 0.0]]})
    assert read_token_texts(unigram, None) == [" a", "\n"]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.json", model={"vocab": {"a": 0}})
    own = Tokenizer("a", hashlib.sha256(path.read_bytes()).hexdigest())
    assert read_token_texts(path, own) == ["a"]
    with pytest.raises(
        ConfigInvalidError, match=r"found the sha256 .*expected 0000000000"
    ) as caught:
        read_token_texts(path, Tokenizer("a", "0" * 64))
    assert caught.value.parameter == "tokenizer"
    for text in ("[]", "{", '{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": [3]}}'):
        path.write_text(text)
        with pytest.raises(ConfigInvalidError, match=r"expected the tokenizer\.json of"):
            read_token_texts(path, None)
    with pytest.raises(ConfigInvalidError, match="FileNotFoundError"):
        read_token_texts(tmp_path / "none.json", None)
