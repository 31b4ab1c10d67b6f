"""Dialogue: a stored episode of generations for people, turn by turn, with its tokens."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.episodes.images import HEADER_BYTES, ImageHeader, read_image_header
from replaylake.datastore.episodes.message_media import MESSAGE_MEDIA, is_media_column
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.interchange.formats.generations.messages import (
    clean_text,
    find_calls,
    parse_call,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    COMPLETION_MESSAGES,
    FINAL_MESSAGES,
    PROMPT_MESSAGES,
    REWARD_COMPONENTS,
)
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.storage.table.delta_schema import plain_type

_MAX_TOKENIZER_BYTES: Final = 1 << 30
_COLUMNS: Final = (
    schema.EPISODE_ID,
    "source_episode_id",
    schema.AGENT_ID,
    schema.STEP,
    "env_step",
    "observation",
    "action",
    "final_observation",
    "reward",
    "terminated",
    "truncated",
    "policy",
    "policy_version",
    "group_id",
    PROMPT_MESSAGES,
    COMPLETION_MESSAGES,
    FINAL_MESSAGES,
    REWARD_COMPONENTS,
    *tokens.TOKEN_TYPES,
)
_HASH_DIGITS: Final = 16
_REFERENCE: Final = "sha256:"


@dataclass(frozen=True)
class _StoredMedia:
    """A media file that the episode stores. header: None if it is no image."""

    num_bytes: int
    header: ImageHeader | None


@dataclass(frozen=True)
class StoredImage:
    """An image that the episode stores. text: its entry in the media of its message."""

    text: str
    sha256: str
    num_bytes: int
    media_type: str
    width: int
    height: int


@dataclass(frozen=True)
class Utterance:
    """A message as text: its content, calls of tools as `name(arguments)`, and its media.

    images: stored media that are PNG, JPEG, GIF or WebP.
    """

    role: str
    text: str
    calls: Sequence[str] = ()
    media: Sequence[str] = ()
    images: Sequence[StoredImage] = ()


@dataclass(frozen=True)
class SampledToken:
    """A token of a generation. text: None where it is not known. log_prob: of the behavior policy.

    is_trainable: whether a loss covers it.
    """

    id: int
    text: str | None
    log_prob: float | None
    is_trainable: bool


@dataclass(frozen=True)
class DialogueTurn:
    """A generation: the messages since its agent's last one, and its own.

    parent: agent and step that it branches from, if they are not the step before it.
    num_observation_tokens, num_tokens, num_trainable: None where the step has no tokens.
    """

    agent_id: str
    step: int
    parent: tuple[str, int] | None
    is_continuation: bool | None
    observation: Sequence[Utterance]
    action: Sequence[Utterance]
    final_observation: Sequence[Utterance]
    reward: float | None
    reward_components: Sequence[Mapping[str, Any]]
    terminated: bool
    truncated: bool
    policy: str | None
    policy_version: int | None
    num_observation_tokens: int | None
    num_tokens: int | None
    num_trainable: int | None
    mean_log_prob: float | None
    tokens: Sequence[SampledToken] = ()


@dataclass(frozen=True)
class Dialogue:
    """An episode, its turns in the order in which they happened.

    reward: the sum of all turns' rewards, None where one is unknown.
    """

    dataset: str
    version: int
    episode_id: str
    source_episode_id: str | None
    group_id: str | None
    reward: float | None
    turns: Sequence[DialogueTurn]

    def to_json(self) -> dict[str, Any]:
        # `asdict` copies each of a few hundred thousand tokens deeply.
        return {**vars(self), "turns": [_turn_to_json(turn) for turn in self.turns]}


def read_dialogue(
    snapshot: Snapshot,
    episode_id: str,
    *,
    with_tokens: bool = False,
    texts: Sequence[str | None] = (),
    max_turns: int | None = None,
    max_bytes: int | None = None,
) -> Dialogue:
    """Return an episode by its id, or by the id that its source gave it.

    with_tokens: whether turns have their tokens; else only their numbers. texts: the text of each
    id, from `read_token_texts`. max_turns, max_bytes: of a longer episode, the first turns alone,
    by their number and the size of their texts; the reward is then of these. The first turn is
    there whatever its size. Cost: the steps in memory.

    Raises: NotFoundError for an unknown id, and for one that several sources gave.
    """
    found = snapshot.sql(
        "SELECT DISTINCT episode_id FROM steps WHERE episode_id = $id OR source_episode_id = $id",
        {"id": episode_id},
    )["episode_id"].to_pylist()
    own = [name for name in found if name == episode_id] or sorted(found)
    if len(own) != 1:
        name = f"{snapshot.dataset}@{snapshot.version}"
        what = f"no episode {episode_id!r}"
        if own:
            what = f"{len(own)} episodes with the source id {episode_id!r}: {', '.join(own[:5])}"
        raise NotFoundError(
            f"episode: {name} has {what}, expected one. SELECT episode_id FROM "
            f"{snapshot.dataset}.episodes lists the ids.",
            parameter="episode",
        )
    types = {field.name: plain_type(field.type) for field in snapshot.table.schema}
    columns = ", ".join(name for name in _COLUMNS if name in types)
    has_media = any(is_media_column(*one) for one in types.items())
    stored = _read_media(snapshot, own[0]) if has_media else {}
    order = f"ORDER BY {'env_step, ' if 'env_step' in types else ''}agent_id, step"
    parameters: dict[str, object] = {"id": own[0]}
    limits = []
    if max_turns is not None:
        limits.append("row_number() OVER turns <= $max_turns")
        parameters["max_turns"] = max_turns
    if max_bytes is not None:
        texts_of_turn = [
            f"coalesce(strlen({name}), 0)"
            for name in _COLUMNS
            if name in types and pa.types.is_string(types[name])
        ]
        limits.append(
            f"(row_number() OVER turns = 1 OR sum({' + '.join(texts_of_turn)}) OVER turns "
            "<= $max_bytes)"
        )
        parameters["max_bytes"] = max_bytes
    cut = f"WINDOW turns AS ({order}) QUALIFY {' AND '.join(limits)}" if limits else ""
    rows = snapshot.sql(
        f"SELECT {columns} FROM steps WHERE episode_id = $id {cut} {order}", parameters
    ).to_pylist()
    turns = [_make_turn(row, with_tokens, texts, stored) for row in rows]
    rewards = [turn.reward for turn in turns]
    first = rows[0]
    return Dialogue(
        dataset=snapshot.dataset,
        version=snapshot.version,
        episode_id=first["episode_id"],
        source_episode_id=first.get("source_episode_id"),
        group_id=first.get("group_id"),
        reward=None if None in rewards else sum(r for r in rewards if r is not None),
        turns=turns,
    )


def _read_media(snapshot: Snapshot, episode_id: str) -> dict[str, _StoredMedia]:
    """Return the stored media of an episode by sha256; only their first bytes are read.

    They may be in any of its steps, including those of other agents.
    """
    rows = snapshot.sql(
        f"SELECT m.sha256 AS sha256, max(m.num_bytes) AS num_bytes, "
        f"max(m.bytes[1:{HEADER_BYTES}]) AS head FROM (SELECT unnest({MESSAGE_MEDIA}) AS m "
        "FROM steps WHERE episode_id = $id) GROUP BY m.sha256",
        {"id": episode_id},
    ).to_pylist()
    return {
        one["sha256"]: _StoredMedia(one["num_bytes"], read_image_header(one["head"] or b""))
        for one in rows
    }


def read_token_texts(path: Path, tokenizer: Tokenizer | None) -> list[str | None]:
    """Return the text of each token id in a `tokenizer.json`; None for ids that it lacks.

    A token that is a part of a character has the replacement character. tokenizer: what the dataset
    states of its tokenizer.

    Raises: ConfigInvalidError for another file, and one whose sha256 is not the dataset's.
    """
    try:
        if path.stat().st_size > _MAX_TOKENIZER_BYTES:
            raise ValueError("it has more than 1 GiB")
        data = path.read_bytes()
        model = json.loads(data)
        vocabulary = model["model"]["vocab"]
        added = {one["content"]: one["id"] for one in model.get("added_tokens") or []}
        if isinstance(vocabulary, list):  # of a unigram model: texts with their scores
            vocabulary = {one[0]: number for number, one in enumerate(vocabulary)}
        ids = {**vocabulary, **added}
        largest = max(ids.values(), default=-1)
        if not all(isinstance(n, int) and 0 <= n < 1 << 24 for n in ids.values()):
            raise ValueError("an id is not a whole number below 16,777,216")
    except (OSError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigInvalidError(
            f"tokenizer: {path}: found {type(error).__name__} ({error}), expected the "
            "tokenizer.json of a Hugging Face tokenizer. Correct the path.",
            parameter="tokenizer",
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    stated = None if tokenizer is None else tokenizer.sha256
    if stated is not None and stated != digest:
        raise ConfigInvalidError(
            f"tokenizer: {path}: found the sha256 {digest[:12]}..., expected {stated[:12]}..., "
            "which the dataset states of its tokenizer. Give that tokenizer's file.",
            parameter="tokenizer",
        )
    is_byte_level = "ByteLevel" in json.dumps([model.get("decoder"), model.get("pre_tokenizer")])
    texts: list[str | None] = [None] * (largest + 1)
    for text, number in ids.items():
        is_plain = text in added
        texts[number] = text if is_plain else _decode_token(text, is_byte_level)
    return texts


def describe_part(part: Any) -> str | None:
    """Return what a part of a message's content is, if it is media: kind, size and sha256.

    Of an image, also its width and height in pixels.
    """
    return _describe_media(part, {})[0]


def _describe_media(
    part: Any, stored: Mapping[str, _StoredMedia]
) -> tuple[str | None, StoredImage | None]:
    """Return the description of a part that is media, and its image if the episode stores one."""
    if not isinstance(part, dict):
        return None, None
    kind = str(part.get("type", "part"))
    inner = next(
        (part[n] for n in ("image_url", "input_audio", "source", "image") if n in part), part
    )
    body = inner if isinstance(inner, dict) else {"url": inner}
    media_type = next((body[n] for n in ("media_type", "mime_type", "format") if n in body), None)
    reference = next((body[n] for n in ("url", "uri", "path", "file_id") if n in body), None)
    data = next((body[n] for n in ("data", "content") if isinstance(body.get(n), str)), None)
    if isinstance(reference, str) and reference.startswith("data:"):
        header, _, data = reference[5:].partition(",")
        media_type, reference = header.split(";")[0] or media_type, None
    if reference is None and (data is None or kind in ("text", "input_text", "output_text")):
        return None, None
    what = kind if media_type is None else f"{kind} {media_type}"
    if data is None:
        stated = body.get("sha256", part.get("sha256"))
        known = f", sha256 {str(stated)[:_HASH_DIGITS]}" if stated else ""
        return clean_text(f"[{what}: {reference}{known}]"), None
    digest = data.removeprefix(_REFERENCE)
    found = stored.get(digest) if digest != data else None
    if found is not None:
        text = _describe_content(what, digest, found)
        one = found.header
        if one is None:
            return text, None
        size = (found.num_bytes, one.media_type, one.width, one.height)
        return text, StoredImage(text, digest, *size)
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        content = data.encode("utf-8", "surrogatepass")
    own = _StoredMedia(len(content), read_image_header(content))
    return _describe_content(what, hashlib.sha256(content).hexdigest(), own), None


def _describe_content(what: str, digest: str, media: _StoredMedia) -> str:
    one = media.header
    pixels = "" if one is None else f", {one.width} x {one.height} pixels"
    return clean_text(
        f"[{what}: {media.num_bytes:,} bytes{pixels}, sha256 {digest[:_HASH_DIGITS]}]"
    )


def _turn_to_json(turn: DialogueTurn) -> dict[str, Any]:
    said = {
        name: [{**vars(one), "images": [*map(vars, one.images)]} for one in getattr(turn, name)]
        for name in ("observation", "action", "final_observation")
    }
    return {**vars(turn), **said, "tokens": [*map(vars, turn.tokens)]}


def _make_turn(
    row: Mapping[str, Any],
    with_tokens: bool,
    texts: Sequence[str | None],
    stored: Mapping[str, _StoredMedia],
) -> DialogueTurn:
    ids = row.get(tokens.ACTION_TOKENS)
    num_trainable = None
    if ids is not None:
        mask = row.get(tokens.ACTION_LOSS_MASK) or [True] * len(ids)
        num_trainable = 0 if row.get(tokens.IS_TRAINABLE) is False else sum(map(bool, mask))
    read = row.get(tokens.OBSERVATION_TOKENS)
    known = row.get(tokens.ACTION_LOG_PROBS) if ids else None
    log_probs = [value for value in known or () if value is not None]
    agent_id, step = row["agent_id"], row["step"]
    parent = None
    if (parent_step := row.get(tokens.PARENT_STEP)) is not None:
        named = row.get(tokens.PARENT_AGENT_ID)
        parent = (agent_id if named is None else named, parent_step)
    reward = row["reward"]
    return DialogueTurn(
        agent_id=agent_id,
        step=step,
        parent=None if parent == (agent_id, step - 1) else parent,
        is_continuation=row.get(tokens.IS_CONTINUATION),
        observation=_read_messages(row, PROMPT_MESSAGES, "observation", stored),
        action=_read_messages(row, COMPLETION_MESSAGES, "action", stored),
        final_observation=_read_messages(row, FINAL_MESSAGES, "final_observation", stored),
        reward=None if reward is None or reward != reward else reward,
        reward_components=row.get(REWARD_COMPONENTS) or (),
        terminated=row["terminated"],
        truncated=row["truncated"],
        policy=row.get("policy"),
        policy_version=row.get("policy_version"),
        num_observation_tokens=None if read is None else len(read),
        num_tokens=None if ids is None else len(ids),
        num_trainable=num_trainable,
        mean_log_prob=sum(log_probs) / len(log_probs) if log_probs else None,
        tokens=_read_tokens(row, ids, texts) if with_tokens and ids else (),
    )


def _read_tokens(
    row: Mapping[str, Any], ids: Sequence[int], texts: Sequence[str | None]
) -> list[SampledToken]:
    unknown = [None] * len(ids)
    log_probs = row.get(tokens.ACTION_LOG_PROBS) or unknown
    mask = row.get(tokens.ACTION_LOSS_MASK) or [True] * len(ids)
    is_trainable = row.get(tokens.IS_TRAINABLE) is not False
    return [
        SampledToken(
            token,
            texts[token] if token < len(texts) else None,
            log_prob,
            bool(flag) and is_trainable,
        )
        for token, log_prob, flag in zip(ids, log_probs, mask, strict=True)
    ]


def _read_messages(
    row: Mapping[str, Any], name: str, other: str, stored: Mapping[str, _StoredMedia]
) -> list[Utterance]:
    """Return the messages of a column of JSON, else the value of the field that it describes."""
    if text := row.get(name):
        return [_read_message(one, stored) for one in json.loads(text)]
    value = row.get(other)
    if value is None or (name in row and row[name] is not None):
        return []
    return [Utterance("", value if isinstance(value, str) else str(value))]


def _read_message(message: Mapping[str, Any], stored: Mapping[str, _StoredMedia]) -> Utterance:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    media: list[str] = []
    images: list[StoredImage] = []
    for part in parts:
        described, image = _describe_media(part, stored)
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "tool_result":
            inner = _read_message({"role": "tool", "content": part.get("content")}, stored)
            texts.append(inner.text)
            media += inner.media
            images += inner.images
        elif described is not None:
            media.append(described)
            images += [] if image is None else [image]
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
    calls = ["{}({})".format(*parse_call(call)) for call in find_calls(message)]
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        texts.insert(0, f"(reasoning) {reasoning}")
    return Utterance(
        clean_text(str(message["role"])),
        clean_text("\n".join(texts)),
        [clean_text(call) for call in calls],
        media,
        images,
    )


def _decode_token(text: str, is_byte_level: bool) -> str:
    if not is_byte_level:
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)]).decode("utf-8", "replace")
            except ValueError:
                return text
        return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    table = _byte_table()
    if not all(letter in table for letter in text):
        return text
    return bytes(table[letter] for letter in text).decode("utf-8", "replace")


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """Return the byte that each letter of a byte-level token stands for, as GPT-2 defines them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
