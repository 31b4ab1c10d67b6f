"""Anthropic's messages, an API without fields for ids and log-probs: nothing is requested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from replaylake.serve.gateway.calls import (
    AnswerReader,
    CallAnswer,
    CallRequest,
    Sample,
    split_fields,
    take_messages,
)
from replaylake.serve.gateway.sse import parse_event


class MessagesApi:
    """POST /v1/messages."""

    name = "anthropic-messages"

    def read_request(self, body: Mapping[str, Any]) -> CallRequest:
        sampling, about = split_fields(body, "messages", "system")
        messages = take_messages(body["messages"])
        if system := body.get("system"):
            messages = [{"role": "system", "content": system}, *messages]
        return CallRequest(
            messages,
            body.get("tools"),
            sampling,
            body.get("model"),
            body.get("stream") is True,
            about,
        )

    def ask(self, body: Mapping[str, Any], engine: str) -> dict[str, Any]:
        return {}

    def reader(self, request: CallRequest, added: frozenset[str], engine: str) -> AnswerReader:
        return _MessagesReader()


class _MessagesReader:
    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._has_error = self._is_stopped = False

    def read_body(self, body: dict[str, Any]) -> bool:
        self._has_error = body.get("type") == "error"
        self._read_message(body)
        self._blocks = dict(enumerate(body.get("content") or ()))
        return False

    def read_event(self, event: bytes) -> tuple[bytes, bool]:
        body = parse_event(event)
        kind = None if body is None else body.get("type")
        if body is None or kind is None:
            return event, False
        number = body.get("index", 0)
        if kind == "message_start":
            self._read_message(body["message"])
        elif kind == "content_block_start":
            self._blocks[number] = dict(body["content_block"])
        elif kind == "content_block_delta":
            self._add(number, body["delta"])
        elif kind == "content_block_stop":
            self._finish_arguments(number)
        elif kind == "message_delta":
            self._finish_reason = body["delta"].get("stop_reason")
            self._usage |= body.get("usage") or {}
        elif kind == "error":
            self._has_error = True
        elif kind == "message_stop":
            self._is_stopped = True
        return event, kind == "message_stop"

    def answer(self) -> CallAnswer:
        for number in tuple(self._arguments):
            self._finish_arguments(number)
        content = [self._blocks[number] for number in sorted(self._blocks)]
        message = {"role": "assistant", "content": content} if self._head else None
        sample = Sample(message, self._finish_reason)
        return CallAnswer(
            [sample],
            self._head.get("id"),
            self._head.get("model"),
            usage=self._usage or None,
            is_complete=not self._has_error
            and (self._is_stopped or self._finish_reason is not None),
        )

    def _read_message(self, message: Mapping[str, Any]) -> None:
        self._head = {name: message.get(name) for name in ("id", "model")}
        self._finish_reason = message.get("stop_reason")
        self._usage |= message.get("usage") or {}

    def _add(self, number: int, delta: Mapping[str, Any]) -> None:
        block = self._blocks.setdefault(number, {"type": "text", "text": ""})
        for name in ("text", "thinking", "signature"):
            if isinstance(text := delta.get(name), str):
                block[name] = (block.get(name) or "") + text
        if isinstance(text := delta.get("partial_json"), str):
            self._arguments.setdefault(number, []).append(text)

    def _finish_arguments(self, number: int) -> None:
        """Read the arguments of a call, once they are whole; those that are not stay text."""
        text = "".join(self._arguments.pop(number, ()))
        if not text:
            return
        try:
            self._blocks[number]["input"] = orjson.loads(text)
        except orjson.JSONDecodeError:
            self._blocks[number]["input"] = text
