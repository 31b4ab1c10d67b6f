"""Rows of transcripts: one for each generated turn, and back to the messages they came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import SpaceUnsupported
from replaylake.datastore.interchange.formats.tabular.tables import is_encodable
from replaylake.datastore.interchange.formats.transcripts.dialogues import (
    Dialogue,
    Message,
    is_generated,
)
from replaylake.datastore.interchange.formats.transcripts.json_values import dumped

PROMPT_MESSAGES: Final = "prompt_messages"
COMPLETION_MESSAGES: Final = "completion_messages"
FINAL_MESSAGES: Final = "final_messages"

# The further columns of such datasets; messages, calls and metadata are JSON text.
EXTRAS: Final = {
    "role": pa.string(),
    PROMPT_MESSAGES: pa.string(),
    COMPLETION_MESSAGES: pa.string(),
    FINAL_MESSAGES: pa.string(),
    "tool_name": pa.string(),
    "tool_calls": pa.string(),
    "group_id": pa.string(),
    "group_id_source": pa.string(),
    "sample_id": pa.string(),
    "source_framework": pa.string(),
    "status": pa.string(),
    "metadata": pa.string(),
}
ROW_SCHEMA: Final = pa.schema(
    {
        "episode_id": pa.string(),
        "agent_id": pa.string(),
        "step": pa.int64(),
        "env_step": pa.int64(),
        "prompt_text": pa.string(),
        "final_text": pa.string(),
        "completion_text": pa.string(),
        "reward": pa.float64(),
        "terminated": pa.bool_(),
        "truncated": pa.bool_(),
        "policy": pa.string(),
        **EXTRAS,
    }
)
# The texts for people are what a step saw and did.
FIELDS: Final = {
    "observation": "prompt_text",
    "final_observation": "final_text",
    "action": "completion_text",
}
_CONSTANT: Final = ("group_id", "group_id_source", "sample_id", "source_framework", "status")


def rows_of(dialogue: Dialogue, episode_id: str) -> Iterator[dict[str, Any]]:
    """Yield a row of ROW_SCHEMA for each generated turn, in order.

    A row has the messages since the turn before it, whoever's that was. Where several agents speak,
    `step` counts an agent's own turns, `env_step` those of all. What is said after the last turn is
    the final observation.
    """
    turns = [i for i, message in enumerate(dialogue.messages) if is_generated(message)]
    agents = [_name(dialogue.messages[i]) for i in turns]
    lasts = {agent: number for number, agent in enumerate(agents)}
    counts: dict[str, int] = {}
    start = 0
    for number, (i, agent) in enumerate(zip(turns, agents, strict=True)):
        prompt, message = dialogue.messages[start:i], dialogue.messages[i]
        start = i + 1
        final = dialogue.messages[start:] if i == turns[-1] else []
        counts[agent] = counts.get(agent, -1) + 1
        calls = _calls(message)
        is_last = lasts[agent] == number
        yield {
            "episode_id": episode_id,
            "agent_id": agent,
            "step": counts[agent],
            "env_step": number,
            "prompt_text": _shown(prompt),
            "final_text": _shown(final) if final else None,
            "completion_text": _said(message),
            "reward": dialogue.rewards[number],
            "terminated": is_last and dialogue.terminated,
            "truncated": is_last and dialogue.truncated,
            "policy": dialogue.model,
            "role": _clean(message["role"]),
            PROMPT_MESSAGES: dumped(prompt),
            COMPLETION_MESSAGES: dumped([message]),
            FINAL_MESSAGES: dumped(final) if final else None,
            "tool_name": next((_clean(name) for name, _ in map(_call, calls) if name), None),
            "tool_calls": dumped(calls) if calls else None,
            "group_id": dialogue.group_id,
            "group_id_source": dialogue.group_id_source,
            "sample_id": dialogue.sample_id,
            "source_framework": dialogue.framework,
            "status": dialogue.status,
            "metadata": dumped(dialogue.metadata) if dialogue.metadata and not number else None,
        }


def empty_row(episode_id: str) -> dict[str, Any]:
    """Return a row that stands for a record of which nothing could be read."""
    given = {"episode_id": episode_id, "agent_id": "", "step": 0, "env_step": 0}
    texts = ("prompt_text", "completion_text", PROMPT_MESSAGES, COMPLETION_MESSAGES)
    ends = {"terminated": False, "truncated": False}
    return {**dict.fromkeys(ROW_SCHEMA.names), **given, **dict.fromkeys(texts, ""), **ends}


def record_of(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return one dialogue's record, with `messages` whole, from the episodes of its agents.

    It reads as what `rows_of` made these episodes of. Raises: SpaceUnsupported for episodes that
    are no transcripts.
    """
    first = episodes[0]
    turns = sorted(turn for episode in episodes for turn in _turns(episode))
    rows = [row for _, row in turns]
    messages: list[Message] = []
    for row in rows:
        for name in (PROMPT_MESSAGES, COMPLETION_MESSAGES, FINAL_MESSAGES):
            messages += json.loads(row[name]) if row[name] else []
    texts = [row["metadata"] for row in rows if row["metadata"]]
    metadata: dict[str, Any] = json.loads(texts[0]) if texts else {}
    record = {
        **metadata,
        "episode_id": first.source_episode_id or first.episode_id,
        "messages": messages,
        **_rewards([row["reward"] for row in rows]),
        **{name: rows[0][name] for name in _CONSTANT if rows[0][name] is not None},
        "terminated": all(episode.terminated for episode in episodes),
        "truncated": any(episode.truncated for episode in episodes),
    }
    policy = None if first.policies is None else first.policies[0]
    return record if policy is None else {**record, "model": policy}


def _turns(episode: Episode) -> Iterator[tuple[int, _Row]]:
    needed = (PROMPT_MESSAGES, COMPLETION_MESSAGES)
    if missing := [name for name in needed if name not in episode.extras]:
        raise SpaceUnsupported(
            f"episode {episode.episode_id}: found no column {', '.join(missing)}, expected them as "
            "in datasets that were ingested from transcripts. Export it to another format."
        )
    unknown = [None] * len(episode)
    columns = {
        name: _values(episode.extras[name]) if name in episode.extras else unknown
        for name in EXTRAS
    }
    ticks = range(len(episode)) if episode.env_steps is None else episode.env_steps.tolist()
    for row, tick in enumerate(ticks):
        values = {name: column[row] for name, column in columns.items()}
        yield tick, _Row(values | {"reward": float(episode.rewards[row])})


class _Row(dict[str, Any]):
    """A row that sorts by its tick alone."""

    def __lt__(self, other: object) -> bool:
        return False


def _values(column: Any) -> list[Any]:
    return list(column.to_pylist() if hasattr(column, "to_pylist") else column)


def _rewards(rewards: Sequence[float]) -> dict[str, Any]:
    """Return what the record says of rewards; NaN is unknown."""
    known = [None if reward != reward else reward for reward in rewards]
    if all(reward is None for reward in known):
        return {}
    if known[-1] is not None and not any(known[:-1]) and None not in known:
        return {"reward": known[-1]}
    return {"rewards": known}


def _name(message: Mapping[str, Any]) -> str:
    name = message.get("name")
    return _clean(name) if isinstance(name, str) else ""


def _calls(message: Mapping[str, Any]) -> list[Any]:
    """Return the calls of tools: OpenAI's, its older `function_call`, or Anthropic's parts."""
    if isinstance(calls := message.get("tool_calls"), list):
        return calls
    if isinstance(call := message.get("function_call"), dict):
        return [call]
    parts = message.get("content")
    if not isinstance(parts, list):
        return []
    return [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_use"]


def _call(call: Any) -> tuple[str, str]:
    """Return the name and the arguments of a call; empty where it does not say."""
    inner = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(inner, dict):
        return "", ""
    name, given = inner.get("name"), inner.get("arguments", inner.get("input", ""))
    return str(name or ""), given if isinstance(given, str) else dumped(given)


def _shown(messages: Sequence[Message]) -> str:
    """Return messages for people, as lines of `role: text`."""
    return "\n".join(f"{_clean(message['role'])}: {_said(message)}" for message in messages)


def _said(message: Mapping[str, Any]) -> str:
    """Return the text of a message, then its calls as `name(arguments)`."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        parts = [text for part in content if (text := _part(part))]
    elif content is not None and not isinstance(content, str):
        parts = [dumped(content)]
    parts += ["{}({})".format(*_call(call)) for call in _calls(message)]
    return _clean("\n".join(parts))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") == "tool_use":
        return ""
    text = part.get("text")
    if part.get("type") == "tool_result" and "content" in part:
        return _said({"content": part["content"]})
    return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"


def _clean(text: str) -> str:
    """Return a text that every engine can show; the JSON beside it has it as it was."""
    if not is_encodable(text):
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
