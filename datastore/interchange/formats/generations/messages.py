"""Messages: a dialogue's messages as text for people, and the group of samples of one prompt.

A message is an object with `role` and `content`, as OpenAI's chat completions have it; whatever
else it has (`tool_calls`, `tool_call_id`, `name`, ...) stays in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.formats.tabular.tables import is_encodable

Message = dict[str, Any]

# Where a group's id is from: the record, a hash of the prompt, or nowhere.
GIVEN, DERIVED, NONE = "given", "derived", "none"
_DIGITS: Final = 16


def derive_group(prompt: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Return the id of the group of samples that have these first messages, and its source.

    Without messages there is no id. Raises: RecursionError, ValueError for content that is no JSON.
    """
    if not prompt:
        return None, NONE
    key = [[message["role"], message.get("content")] for message in prompt]
    return hashlib.sha256(dump_json(key).encode()).hexdigest()[:_DIGITS], DERIVED


def find_calls(message: Mapping[str, Any]) -> list[Any]:
    """Return the calls of tools: OpenAI's, its older `function_call`, or Anthropic's parts."""
    if isinstance(calls := message.get("tool_calls"), list):
        return calls
    if isinstance(call := message.get("function_call"), dict):
        return [call]
    parts = message.get("content")
    if not isinstance(parts, list):
        return []
    return [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_use"]


def parse_call(call: Any) -> tuple[str, str]:
    """Return the name and the arguments of a call; empty where it has none."""
    inner = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(inner, dict):
        return "", ""
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("input", ""))
    return str(name or ""), arguments if isinstance(arguments, str) else dump_json(arguments)


def format_messages(messages: Sequence[Message]) -> str:
    """Return messages for people, as lines of `role: text`."""
    return "\n".join(
        f"{clean_text(message['role'])}: {format_message(message)}" for message in messages
    )


def format_message(message: Mapping[str, Any]) -> str:
    """Return the text of a message, then its calls as `name(arguments)`."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        parts = [text for part in content if (text := _format_part(part))]
    elif content is not None and not isinstance(content, str):
        parts = [dump_json(content)]
    parts += ["{}({})".format(*parse_call(call)) for call in find_calls(message)]
    return clean_text("\n".join(parts))


def _format_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") == "tool_use":
        return ""
    text = part.get("text")
    if part.get("type") == "tool_result" and "content" in part:
        return format_message({"content": part["content"]})
    return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"


def clean_text(text: str) -> str:
    """Return a text that every engine can show; the column of JSON has the original."""
    if text.isascii() and "\0" not in text:
        return text
    if not is_encodable(text):
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def shorten(value: Any) -> str:
    """Return a short text of a value, for error messages."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
