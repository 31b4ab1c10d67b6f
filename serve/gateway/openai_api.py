"""OpenAI's chat completions and completions, as engines extend them.

Where engines put ids and log-probs, as their own protocol classes have it (2026-11):
    - vLLM: `return_token_ids` gives `prompt_token_ids` of the answer (a stream's first chunk)
      and `token_ids` of each choice; in completions both are of the choice. A stream then also has
      chunks without text, for tokens that it otherwise sends with a later one.
    - SGLang 0.5.23: in chat `return_prompt_token_ids` and `return_token_ids` give
      `prompt_token_ids` and `response_token_ids` of each choice, and are refused in a stream, whose
      last chunk has them in `sglext` instead; completions have `token_ids` and `prompt_token_ids`.
    - llama.cpp: each entry of the log-probs has the token's `id`; ids of the prompt are absent. It
      refuses log-probs in a stream with tools.
    - others: nothing is requested, since many refuse fields that they do not know.
Nothing is requested with `echo` either, which vLLM answers in another way if ids are requested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from replaylake.serve.gateway.calls import (
    AnswerReader,
    CallAnswer,
    CallRequest,
    Message,
    Sample,
    split_fields,
    take_messages,
)
from replaylake.serve.gateway.sse import DONE, data_of, parse_event, with_data

VLLM, SGLANG, LLAMA_CPP, OPENAI, AUTO = "vllm", "sglang", "llama.cpp", "openai", "auto"
ENGINES: Final = (AUTO, VLLM, SGLANG, LLAMA_CPP, OPENAI)
_SGLEXT_IN: Final = "return_input_ids_in_sglext"
_SGLEXT_OUT: Final = "return_output_ids_in_sglext"
_PROMPT_IDS: Final = "return_prompt_token_ids"
_IDS: Final = "return_token_ids"
_LOG_PROBS: Final = "logprobs"
# Fields of a chunk that are the same in the whole stream, and the choices.
_HEAD: Final = frozenset(("choices", "created", "id", "model", "object"))
# Owners in the engines' lists of models.
_OWNERS: Final = {"vllm": VLLM, "replaylake": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_CPP}
# Reasons of engines for an answer that is not what the model would have generated.
_UNFINISHED: Final = ("abort", "error")


def read_models(data: bytes) -> tuple[str, list[str]]:
    """Return the engine that an answer of /v1/models is from, and the names of its models.

    Raises: ValueError if it is no list of models.
    """
    try:
        models = orjson.loads(data)["data"]
        owner = models[0].get("owned_by")
        names = [model["id"] for model in models]
    except (orjson.JSONDecodeError, AttributeError, LookupError, TypeError):
        raise ValueError("not a list of models") from None
    engine = _OWNERS.get(owner, OPENAI) if isinstance(owner, str) else OPENAI
    return engine, names


class ChatApi:
    """POST /v1/chat/completions."""

    name = "openai-chat"

    def read_request(self, body: Mapping[str, Any]) -> CallRequest:
        sampling, about = split_fields(body, "messages")
        return CallRequest(
            take_messages(body["messages"]),
            body.get("tools") or body.get("functions"),
            sampling,
            body.get("model"),
            body.get("stream") is True,
            about,
        )

    def ask(self, body: Mapping[str, Any], engine: str) -> dict[str, Any]:
        if engine == VLLM:
            wanted: dict[str, Any] = {_IDS: True, _LOG_PROBS: True}
        elif engine == SGLANG and body.get("stream") is True:
            wanted = {_SGLEXT_IN: True, _SGLEXT_OUT: True, _LOG_PROBS: True}
        elif engine == SGLANG:
            wanted = {_PROMPT_IDS: True, _IDS: True, _LOG_PROBS: True}
        elif engine == LLAMA_CPP and body.get("stream") is True and body.get("tools"):
            wanted = {}
        elif engine == LLAMA_CPP and not body.get(_LOG_PROBS):
            wanted = {_LOG_PROBS: True, "top_logprobs": 1}  # without, it sends 20 for each token
        else:
            wanted = {}
        return _select_unset(body, wanted)

    def reader(self, request: CallRequest, added: frozenset[str], engine: str) -> AnswerReader:
        return _OpenAIReader(added, engine, is_chat=True)


class CompletionsApi:
    """POST /v1/completions."""

    name = "openai-completions"

    def read_request(self, body: Mapping[str, Any]) -> CallRequest:
        sampling, about = split_fields(body, "prompt")
        prompt = body["prompt"]
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts = [[_as_message(one)] for one in ([prompt] if is_one else prompt)]
        return CallRequest(
            prompts[0],
            None,
            sampling,
            body.get("model"),
            body.get("stream") is True,
            about,
            other_prompts=prompts[1:],
        )

    def ask(self, body: Mapping[str, Any], engine: str) -> dict[str, Any]:
        if body.get("echo"):
            return {}
        if engine in (VLLM, SGLANG):
            return _select_unset(body, {_IDS: True, _LOG_PROBS: 1})
        return _select_unset(body, {_LOG_PROBS: 1} if engine == LLAMA_CPP else {})

    def reader(self, request: CallRequest, added: frozenset[str], engine: str) -> AnswerReader:
        num_samples = request.sampling.get("n")
        per_prompt = num_samples if type(num_samples) is int and num_samples > 0 else 1
        return _OpenAIReader(
            added,
            engine,
            is_chat=False,
            per_prompt=per_prompt,
            is_echo=bool(request.sampling.get("echo")),
        )


def _as_message(prompt: Any) -> Message:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return {"role": "user", "content": text}


def _select_unset(body: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the client did not set; 0 alternatives of log-probs are set."""
    return {
        name: value
        for name, value in wanted.items()
        if body.get(name) is None or body[name] is False
    }


class _Choice:
    """One choice as it grows."""

    def __init__(self) -> None:
        self.message: Message = {"role": "assistant", "content": None}
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.reasoning_name = "reasoning_content"
        self.refusals: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.function: dict[str, str] = {}
        self.finish_reason: str | None = None
        self.prompt_token_ids: list[int] | None = None
        self.token_ids: list[int] | None = None
        self.log_probs: list[float] | None = None
        self.is_empty = True

    def add_delta(self, delta: Mapping[str, Any]) -> None:
        self.is_empty = False
        if isinstance(text := delta.get("content"), str):
            self.texts.append(text)
            if len(delta) == 1:  # by far most of them
                return
        for name in ("reasoning_content", "reasoning"):
            if isinstance(text := delta.get(name), str):
                self.reasoning.append(text)
                self.reasoning_name = name
        if isinstance(text := delta.get("refusal"), str):
            self.refusals.append(text)
        for part in delta.get("tool_calls") or ():
            self._add_call(part)
        if isinstance(function := delta.get("function_call"), dict):  # before there were tools
            for name in ("name", "arguments"):
                if isinstance(text := function.get(name), str):
                    self.function[name] = self.function.get(name, "") + text

    def _add_call(self, part: Mapping[str, Any]) -> None:
        number = part.get("index")
        if number is None:  # some engines send calls as a whole, or only tell them apart by id
            number = len(self.calls) if part.get("id") or not self.calls else max(self.calls)
        call = self.calls.setdefault(
            number, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        if part.get("id"):
            call["id"] = part["id"]
        function = part.get("function") or {}
        for name in ("name", "arguments"):
            if isinstance(text := function.get(name), str):
                call["function"][name] += text

    def add_log_probs(self, log_probs: Any, engine: str) -> None:
        """Add those of a chat (`content`) or of a completion (`token_logprobs`)."""
        if not isinstance(log_probs, dict):
            return
        entries = log_probs.get("content")
        if isinstance(entries, list):
            if len(entries) == 1:
                self._add_values((entries[0].get("logprob"),))
            else:
                self._add_values([entry.get("logprob") for entry in entries])
            if engine == LLAMA_CPP:
                self.add_ids([entry.get("id") for entry in entries])
        elif isinstance(values := log_probs.get("token_logprobs"), list):
            self._add_values(values)

    def _add_values(self, values: Sequence[Any]) -> None:
        if self.log_probs is None:
            self.log_probs = []
        self.log_probs += values

    def add_ids(self, ids: Any) -> None:
        if isinstance(ids, list):
            if self.token_ids is None:
                self.token_ids = []
            self.token_ids += ids

    def sample(self, prompt: int) -> Sample:
        message = dict(self.message)
        if (text := "".join(self.texts)) or (self.texts and not (self.calls or self.function)):
            message["content"] = text
        if self.reasoning:
            message[self.reasoning_name] = "".join(self.reasoning)
        if self.refusals:
            message["refusal"] = "".join(self.refusals)
        if self.function:
            message["function_call"] = self.function
        if self.calls:
            message["tool_calls"] = [self.calls[number] for number in sorted(self.calls)]
        return Sample(
            None if self.is_empty else message,
            self.finish_reason,
            self.prompt_token_ids,
            self.token_ids,
            self.log_probs,
            prompt,
        )


class _OpenAIReader:
    """Reads an answer of chat completions or completions."""

    def __init__(
        self,
        added: frozenset[str],
        engine: str,
        *,
        is_chat: bool,
        per_prompt: int = 1,
        is_echo: bool = False,
    ) -> None:
        """Read nothing yet. is_echo: whether ids and log-probs begin with those of the prompt."""
        self._added, self._engine = added, engine
        self._is_chat, self._per_prompt, self._is_echo = is_chat, per_prompt, is_echo
        self._added_ids = _added_id_fields(added, engine, is_chat)
        self._adds_log_probs = _LOG_PROBS in added
        self._has_chunks_of_ids = engine == VLLM and is_chat
        self._choices: dict[int, _Choice] = {}
        self._completion_id: str | None = None
        self._model: str | None = None
        self._usage: Any = None
        self._version: int | None = None
        self._prompt_ids: list[int] | None = None
        self._is_done = self._has_error = False

    def read_body(self, body: dict[str, Any]) -> bool:
        self._read_head(body)
        for choice in _choices_of(body):
            one = self._choice(choice)
            if self._is_chat:
                one.message = choice.get("message") or {"role": "assistant", "content": None}
            else:
                one.message = {"role": "assistant", "content": choice.get("text")}
            one.is_empty = False
            self._read_choice(one, choice, is_event=False)
        self._is_done = True
        if _IDS in self._added and body.get("prompt_token_ids") is not None:
            body["prompt_token_ids"] = None
        return bool(self._added)

    def read_event(self, event: bytes) -> tuple[bytes, bool]:
        body = parse_event(event)
        if body is None:
            is_last = data_of(event) == DONE
            self._is_done |= is_last
            return event, is_last
        # Most chunks have only a choice, and the same head as the first one.
        is_plain = body.keys() <= _HEAD and self._completion_id is not None
        if not is_plain:
            self._read_head(body)
        choices = _choices_of(body)
        for choice in choices:
            one = self._choice(choice)
            if self._is_chat:
                one.add_delta(choice.get("delta") or {})
            elif isinstance(text := choice.get("text"), str):
                one.texts.append(text)
                one.is_empty = False
            self._read_choice(one, choice, is_event=True)
        sglext = None if is_plain else body.get("sglext")
        if isinstance(sglext, dict):
            self._read_sglext(sglext)
        if not self._added:
            return event, False
        if _IDS in self._added:
            if not is_plain:
                body.pop("prompt_token_ids", None)
            is_chunk_of_ids = self._has_chunks_of_ids and choices and not body.get("usage")
            if is_chunk_of_ids and _are_without_text(choices):
                return b"", False
        if isinstance(sglext, dict):
            for field, name in ((_SGLEXT_IN, "input_ids"), (_SGLEXT_OUT, "output_ids")):
                if field in self._added:
                    sglext.pop(name, None)
            if not sglext and not choices and not body.get("usage"):
                return b"", False
        return with_data(event, body), False

    def answer(self) -> CallAnswer:
        samples = []
        for number in sorted(self._choices):
            one = self._choices[number]
            if one.prompt_token_ids is None:
                one.prompt_token_ids = self._prompt_ids
            samples.append(one.sample(number // self._per_prompt))
        return CallAnswer(
            samples,
            self._completion_id,
            self._model,
            self._version,
            self._usage,
            self._is_complete(),
        )

    def _is_complete(self) -> bool:
        reasons = [one.finish_reason for one in self._choices.values()]
        if not reasons or self._has_error or any(one in _UNFINISHED for one in reasons):
            return False
        return self._is_done or None not in reasons

    def _choice(self, choice: Mapping[str, Any]) -> _Choice:
        number = choice.get("index")
        if type(number) is not int:
            number = 0
        if (known := self._choices.get(number)) is None:
            known = self._choices[number] = _Choice()
        return known

    def _read_head(self, body: Mapping[str, Any]) -> None:
        get = body.get
        if isinstance(text := get("id"), str) and text:
            self._completion_id = text
        if isinstance(text := get("model"), str):
            self._model = text
        if usage := get("usage"):
            self._usage = usage
        if get("error"):
            self._has_error = True
        if isinstance(ids := get("prompt_token_ids"), list):
            self._prompt_ids = ids
        if isinstance(about := get("metadata"), dict):
            self._version = _to_version(about.get("weight_version"))

    def _read_choice(self, one: _Choice, choice: dict[str, Any], *, is_event: bool) -> None:
        get = choice.get
        if isinstance(reason := get("finish_reason"), str):
            one.finish_reason = reason
        if isinstance(ids := get("prompt_token_ids"), list):
            one.prompt_token_ids = ids
        log_probs = get("logprobs")
        if not self._is_echo:
            if (ids := get("token_ids")) is not None:
                one.add_ids(ids)
            if (ids := get("response_token_ids")) is not None:
                one.add_ids(ids)
            if log_probs is not None:
                one.add_log_probs(log_probs, self._engine)
        if self._adds_log_probs and (log_probs is not None or "logprobs" in choice):
            if self._engine == LLAMA_CPP and self._is_chat:
                del choice["logprobs"]
            else:
                choice["logprobs"] = None
        for name in self._added_ids:
            if name in choice:
                # If they are not requested, vLLM sends null, except in chunks of a stream.
                if self._engine == VLLM and not is_event:
                    choice[name] = None
                else:
                    del choice[name]

    def _read_sglext(self, sglext: Mapping[str, Any]) -> None:
        if isinstance(ids := sglext.get("input_ids"), list):
            self._prompt_ids = ids
        for number, ids in enumerate(sglext.get("output_ids") or ()):
            if number in self._choices:
                self._choices[number].token_ids = ids


def _added_id_fields(added: frozenset[str], engine: str, is_chat: bool) -> tuple[str, ...]:
    """Return the fields of a choice that only the gateway requested."""
    if engine == SGLANG and is_chat:
        names = {_PROMPT_IDS: "prompt_token_ids", _IDS: "response_token_ids"}
        return tuple(name for field, name in names.items() if field in added)
    return ("prompt_token_ids", "token_ids") if _IDS in added else ()


def _are_without_text(choices: Sequence[Mapping[str, Any]]) -> bool:
    for choice in choices:
        delta = choice.get("delta")
        if not isinstance(delta, dict) or delta.get("content"):
            return False
        if choice.get("finish_reason") is not None or any(
            one is not None for one in delta.values()
        ):
            return False
    return True


def _choices_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = body.get("choices")
    if not isinstance(choices, list):
        return []
    if len(choices) == 1 and isinstance(choices[0], dict):
        return choices
    return [one for one in choices if isinstance(one, dict)]


def _to_version(value: Any) -> int | None:
    try:
        version = int(value)
    except (TypeError, ValueError):
        return None
    return version if 0 <= version < 2**63 else None
