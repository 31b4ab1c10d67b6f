"""OpenAI's responses, as messages of a dialogue.

A request has the dialogue as items of several kinds, or names the answer that it goes on from
(`previous_response_id`). The API has no field for ids, so nothing is requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from replaylake.serve.gateway.calls import (
    AnswerReader,
    CallAnswer,
    CallRequest,
    Message,
    Sample,
    split_fields,
)
from replaylake.serve.gateway.sse import DONE, data_of, parse_event

# What ends an answer early as `length` and `content_filter` end one of chat completions.
_LIMITS: Final = ("content_filter", "max_output_tokens")
_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")


class ResponsesApi:
    """POST /v1/responses."""

    name = "openai-responses"

    def read_request(self, body: Mapping[str, Any]) -> CallRequest:
        previous = body.get("previous_response_id")
        sampling, about = split_fields(body, "input", "instructions", "previous_response_id")
        asked = body["input"]
        items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        messages = to_messages(items)
        # The instructions do not stay with the dialogue: each request has its own.
        if (text := body.get("instructions")) and not previous:
            messages = [{"role": "system", "content": text}, *messages]
        if not messages:
            raise ValueError("input")
        return CallRequest(
            messages,
            body.get("tools"),
            sampling,
            body.get("model"),
            body.get("stream") is True,
            about,
            previous if isinstance(previous, str) else None,
        )

    def ask(self, body: Mapping[str, Any], engine: str) -> dict[str, Any]:
        return {}

    def reader(self, request: CallRequest, added: frozenset[str], engine: str) -> AnswerReader:
        return _ResponsesReader()


class _ResponsesReader:
    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._texts: list[str] = []
        self._has_error = False

    def read_body(self, body: dict[str, Any]) -> bool:
        self._response = body
        return False

    def read_event(self, event: bytes) -> tuple[bytes, bool]:
        body = parse_event(event)
        if body is None:
            return event, data_of(event) == DONE
        kind = body.get("type")
        if isinstance(response := body.get("response"), dict):
            self._response = response
        if kind == "error":
            self._has_error = True
        if kind == "response.output_text.delta" and isinstance(text := body.get("delta"), str):
            self._texts.append(text)
        return event, kind in _ENDS

    def answer(self) -> CallAnswer:
        response = self._response
        written = [one for one in to_messages(response.get("output") or ()) if _is_answer(one)]
        message = written[0] if written else None
        if message is None and self._texts:  # the stream did not come to its end
            message = {"role": "assistant", "content": "".join(self._texts)}
        about = response.get("incomplete_details") or {}
        status = response.get("status")
        reason = about.get("reason") or status
        is_complete = status == "completed" or (status == "incomplete" and reason in _LIMITS)
        return CallAnswer(
            [Sample(message, reason)],
            response.get("id"),
            response.get("model"),
            usage=response.get("usage"),
            is_complete=is_complete and not self._has_error,
        )


def to_messages(items: Iterable[Any]) -> list[Message]:
    """Return items as messages; what one model wrote at once is one message.

    Raises: TypeError for what is no item.
    """
    messages: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise TypeError("input")
        message = _to_message(item)
        before = messages[-1] if messages else None
        if before is not None and _is_answer(before) and _is_answer(message):
            _join(before, message)
        else:
            messages.append(message)
    return messages


def _to_message(item: Mapping[str, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "message" and isinstance(role := item.get("role"), str):
        return {"role": role, "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = item.get("output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind.endswith("_output"):
        return {"role": "tool", "content": [dict(item)]}
    # Reasoning, and calls of tools that the API runs itself.
    return {"role": "assistant", "content": [dict(item)]}


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _join(before: Message, message: Message) -> None:
    parts = [*_parts(before.get("content")), *_parts(message.get("content"))]
    before["content"] = parts or None
    if calls := [*before.get("tool_calls", ()), *message.get("tool_calls", ())]:
        before["tool_calls"] = calls


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    return content if isinstance(content, list) else [{"type": "output_text", "text": content}]
