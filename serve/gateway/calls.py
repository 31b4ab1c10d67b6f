"""Calls: what a request asks a model and what it answered, whatever API the client speaks."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from replaylake.datastore.episodes.tokens import TOKEN_LOG_PROB_TOLERANCE

Message = dict[str, Any]
COMPLETED = "completed"
ABORTED = "aborted"
FAILED = "failed"
_ABOUT = ("metadata", "prompt_cache_key", "safety_identifier", "store", "user")
_LEFT_OUT = frozenset((*_ABOUT, "model", "stream", "stream_options", "tools"))


@dataclass(slots=True)
class CallRequest:
    """A request: its dialogue as messages, and everything else by what it is.

    prompt_number: which of several prompts of one request it is. previous: the id of the answer
    that it goes on from without sending the dialogue again.
    """

    messages: list[Message]
    tools: Any = None
    sampling: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    is_stream: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    previous: str | None = None
    other_prompts: list[list[Message]] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """One answer of a model: its message, and the ids and log-probabilities that are known of it.

    prompt: which of the request's prompts it answers.
    """

    message: Message | None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    log_probs: list[float] | None = None
    prompt: int = 0


@dataclass(slots=True)
class CallAnswer:
    """All that was answered to a request, or as much of it as came.

    is_complete: whether the model finished it, by the API's own words: an engine may also state an
    error within an answer whose status is 200, and end a stream in good order without the rest.
    """

    samples: list[Sample]
    completion_id: str | None = None
    model: str | None = None
    policy_version: int | None = None
    usage: Any = None
    is_complete: bool = True


class AnswerReader(Protocol):
    """Reads one answer while it passes, and removes fields that only the gateway requested."""

    def read_body(self, body: dict[str, Any]) -> bool:
        """Read a complete answer, and remove fields from it; return whether it was changed."""

    def read_event(self, event: bytes) -> tuple[bytes, bool]:
        """Read an event of a stream; return what the client gets, and whether it is the last."""

    def answer(self) -> CallAnswer:
        """Return what was read so far."""


class Api(Protocol):
    """One way in which clients call models."""

    name: str

    def read_request(self, body: Mapping[str, Any]) -> CallRequest:
        """Return what a request asks. Raises: ValueError, KeyError, TypeError if it is none."""

    def ask(self, body: Mapping[str, Any], engine: str) -> dict[str, Any]:
        """Return the fields that make an engine return ids and log-probs, without the client's."""

    def reader(self, request: CallRequest, added: frozenset[str], engine: str) -> AnswerReader:
        """Return what reads the answer to a request."""


def take_messages(value: Any) -> list[Message]:
    """Return messages as they were sent. Raises: TypeError, ValueError if they are none."""
    if not isinstance(value, list) or not value:
        raise ValueError("messages")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError("messages")
        messages.append(message)
    return messages


def split_fields(body: Mapping[str, Any], *used: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sampling parameters of a request, and the fields that say who asks and why."""
    sampling = {
        name: value for name, value in body.items() if name not in _LEFT_OUT and name not in used
    }
    return sampling, {name: body[name] for name in _ABOUT if body.get(name) is not None}


def to_ids(values: list[Any] | None) -> array[int] | None:
    """Return ids as an array, None if a value is no id."""
    if values is None:
        return None
    try:
        ids = array("i", values)
    except (TypeError, OverflowError):
        return None
    return ids if not ids or min(ids) >= 0 else None


def clean_log_probs(values: list[Any] | None) -> list[float] | None:
    """Return log-probs, those just above 0 as 0; None if a value is no log-prob."""
    if not values:
        return None
    try:
        numbers = array("d", values)
    except (TypeError, OverflowError):
        return None
    highest = max(numbers)
    if not all(map(math.isfinite, numbers)) or highest > TOKEN_LOG_PROB_TOLERANCE:
        return None
    return [min(value, 0.0) for value in numbers] if highest > 0 else numbers.tolist()
