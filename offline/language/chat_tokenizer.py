"""Chat tokenizer: messages to token ids and sampled ids to messages, by a model's own tokenizer.

The chat template states how messages and tools are written. Calls in a reply are read as the
tokenizer states (`response_template`), else as Hermes and Qwen write them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError

Message = Mapping[str, Any]

_CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ChatTokenizer:
    """The tokenizer of a model that answers messages. Safe for threads."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Take a model and its tokenizer, from load_pretrained.

        stop_ids: tokens that end a completion, by the tokenizer and the generation config.
        """
        self._tokenizer = tokenizer
        # A tokenizer of transformers has settings that each call changes.
        self._lock = threading.Lock()
        configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        found = {*configured} if isinstance(configured, list) else {configured}
        self.stop_ids = frozenset(
            one for one in (*found, tokenizer.eos_token_id) if one is not None
        )

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Return the text of a dialogue, up to where the model's reply begins.

        messages, tools: as OpenAI's API has them; of content in parts, the texts.
        Raises: ConfigInvalidError if there is no chat template, it refuses the messages, or a part
        is no text.
        """
        if not self.has_template:
            raise ConfigInvalidError(
                "messages: the model has no chat template, expected one that writes messages as "
                "text. Give a prompt instead.",
                parameter="messages",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_prepare_message(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except ReplayLakeError:
            raise
        except Exception as error:  # whatever the template raises: it is a program
            raise ConfigInvalidError(
                f"messages: the model's chat template refuses them ({type(error).__name__}: "
                f"{error}), expected roles and fields that it has.",
                parameter="messages",
            ) from error
        return text

    def encode(self, text: str, *, adds_special: bool = False) -> list[int]:
        """Return the ids of a text; adds_special: with those that begin and end one."""
        with self._lock:
            ids: list[int] = self._tokenizer(text, add_special_tokens=adds_special)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Return the text of ids; special tokens such as the end's have none, unless kept."""
        with self._lock:
            text: str = self._tokenizer.decode(
                list(ids), skip_special_tokens=not keeps_special, clean_up_tokenization_spaces=False
            )
        return text

    def parse_reply(
        self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Any] | None
    ) -> dict[str, Any]:
        """Return the message that sampled ids mean, with calls of tools if there are any."""
        if getattr(self._tokenizer, "response_template", None):
            try:
                with self._lock:
                    parsed = self._tokenizer.parse_response(
                        list(ids), prefix=list(prompt_ids), tools=tools
                    )
            except Exception:  # not of the template's form, as models do write
                parsed = None
            if isinstance(parsed, dict):
                return _to_message(parsed)
        text = self.decode(ids)
        return _parse_calls(text) if tools else {"role": "assistant", "content": text}


def read_text(message: Message) -> str:
    """Return the text of a message. Raises: ConfigInvalidError for parts that are no text."""
    content = _prepare_message(message).get("content")
    return content if isinstance(content, str) else ""


def _prepare_message(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: its text as one string, arguments as objects."""
    prepared = dict(message)
    if isinstance(parts := message.get("content"), list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigInvalidError(
                "messages: found content with parts that are no text, expected text: images and "
                "sounds are not supported here.",
                parameter="messages",
            )
        prepared["content"] = "".join(map(str, texts))
    if isinstance(calls := message.get("tool_calls"), list):
        prepared["tool_calls"] = [_prepare_call(call) for call in calls]
    return prepared


def _prepare_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_calls(text: str) -> dict[str, Any]:
    """Return a message with the calls in a text; one with a malformed call has the text alone."""
    calls = []
    for found in _CALL.finditer(text):
        try:
            call = json.loads(found[1])
        except ValueError:
            return {"role": "assistant", "content": text}
        if not isinstance(call.get("name"), str):
            return {"role": "assistant", "content": text}
        calls.append(call)
    content = _CALL.sub("", text).strip() or None if calls else text
    return _to_message({"content": content, "tool_calls": calls})


def _to_message(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed message as OpenAI's API has it: calls with ids, arguments as JSON text."""
    message = {"role": "assistant", **parsed, "content": parsed.get("content")}
    message.pop("tool_calls", None)
    calls = []
    for number, call in enumerate(parsed.get("tool_calls") or ()):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(
            {
                "id": call.get("id") or f"call_{number}",
                "type": "function",
                "function": {"name": function.get("name"), "arguments": text},
            }
        )
    if calls:
        message["tool_calls"] = calls
    return message
