"""Requests of chat completions and completions, read field by field.

A field that would change what is sampled, and that this engine cannot apply, is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.engine.generation import GenerationRequest, TokenModel
from replaylake.serve.messages import RequestRefusedError

_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's
_DEFAULT_CHAT_TOKENS: Final = 1024  # of models without a limit of their own
_MAX_SAMPLES: Final = 128
_MAX_STOPS: Final = 16
# Fields that say who asks and why, or how: nothing that is sampled depends on them.
_IGNORED: Final = frozenset(
    (
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    )
)
# Fields of OpenAI's that clients send with the value that changes nothing.
_WITHOUT_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
_OF_BOTH: Final = frozenset(
    (
        "logprobs",
        "max_tokens",
        "n",
        "return_token_ids",
        "seed",
        "stop",
        "stream",
        "temperature",
        "top_k",
        "top_p",
    )
)
_OF_CHAT: Final = frozenset(("max_completion_tokens", "messages", "tools"))
_OF_COMPLETIONS: Final = frozenset(("prompt",))


@dataclass(frozen=True)
class CompletionRequest:
    """A request of either API.

    prompts: ids of each prompt; each has `num_samples` completions. has_log_probs, has_ids: whether
    the answer has log-probs and ids. has_usage: whether a stream ends with the usage.
    """

    generation: GenerationRequest
    prompts: Sequence[Sequence[int]]
    num_samples: int
    is_chat: bool
    is_stream: bool
    has_log_probs: bool
    has_ids: bool
    has_usage: bool


def read_completion_request(
    body: Any, model: TokenModel, names: Sequence[str], *, is_chat: bool
) -> CompletionRequest:
    """Read a request. names: what clients may call the model.

    Raises: RequestRefusedError (400, or 404 for another model).
    """
    if not isinstance(body, dict):
        raise _refuse("body", type(body).__name__, "a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    known = _OF_BOTH | _IGNORED | (_OF_CHAT if is_chat else _OF_COMPLETIONS)
    for name, value in fields.items():
        if name in _WITHOUT_EFFECT and value not in _WITHOUT_EFFECT[name]:
            expected = f"{' or '.join(map(repr, _WITHOUT_EFFECT[name]))}, the only value here"
            raise _refuse(name, repr(value)[:100], expected)
        if name not in known and name not in _WITHOUT_EFFECT:
            raise _refuse(name, "an unknown field", f"one of {', '.join(sorted(known))}")
    asked = fields.get("model")
    if asked is not None and asked not in names:
        expected = " or ".join(names)
        raise RequestRefusedError(404, "model", found=repr(asked)[:100], expected=expected)
    prompts = _read_messages(fields, model) if is_chat else _read_prompts(fields, model)
    num_samples = _read_int(fields, "n", 1, 1, _MAX_SAMPLES)
    if len(prompts) * num_samples > _MAX_SAMPLES:
        found = f"{num_samples} samples of {len(prompts)} prompts"
        raise _refuse("n", found, f"at most {_MAX_SAMPLES} samples in all")
    defaults = model.spec.generation
    generation = GenerationRequest(
        [prompt for prompt in prompts for _ in range(num_samples)],
        _read_max_tokens(fields, model, max(map(len, prompts)), is_chat=is_chat),
        _read_number(fields, "temperature", defaults, 1.0, lambda value: value >= 0, "0 or more"),
        _read_number(
            fields, "top_p", defaults, 1.0, lambda value: 0 < value <= 1, "above 0, at most 1"
        ),
        max(0, _read_int(fields, "top_k", _read_default(defaults, "top_k", int, 0), -1, 2**31)),
        _read_int(fields, "seed", 0, -(2**63), 2**63 - 1) if "seed" in fields else None,
        _read_stops(fields),
    )
    options = fields.get("stream_options", {})
    log_probs = fields.get("logprobs", False)
    if log_probs not in ((True, False) if is_chat else (True, False, 0, 1)):
        raise _refuse("logprobs", repr(log_probs)[:100], "true or false, or 0 or 1 of completions")
    return CompletionRequest(
        generation,
        prompts,
        num_samples,
        is_chat,
        _read_bool(fields, "stream"),
        # 0 of completions requests log-probs of the sampled tokens alone.
        log_probs is not False,
        _read_bool(fields, "return_token_ids"),
        isinstance(options, dict) and options.get("include_usage") is True,
    )


def _read_messages(fields: Mapping[str, Any], model: TokenModel) -> list[list[int]]:
    messages, tools = fields.get("messages"), fields.get("tools")
    if not isinstance(messages, list) or not messages:
        raise _refuse("messages", repr(messages)[:100], "a list of one message or more")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refuse("messages", repr(message)[:100], "objects with a role and a content")
    if tools is not None and not isinstance(tools, list):
        raise _refuse("tools", repr(tools)[:100], "a list of tools")
    try:
        ids = model.encode_messages(messages, tools)
    except ConfigInvalidError as error:
        raise RequestRefusedError(400, "messages", str(error)) from error
    if not ids:
        raise _refuse("messages", "a prompt without tokens", "one token or more")
    return [ids]


def _read_prompts(fields: Mapping[str, Any], model: TokenModel) -> list[list[int]]:
    given = fields.get("prompt")
    is_one = isinstance(given, str) or (
        isinstance(given, list) and given and all(type(one) is int for one in given)
    )
    prompts = [given] if is_one else given
    if not isinstance(prompts, list) or not prompts:
        raise _refuse("prompt", repr(given)[:100], "a text, token ids, or a list of either")
    return [_read_prompt(one, model) for one in prompts]


def _read_prompt(prompt: Any, model: TokenModel) -> list[int]:
    size = model.spec.vocabulary_size
    if isinstance(prompt, str):
        ids = model.encode_text(prompt)
    elif isinstance(prompt, list) and all(type(one) is int and 0 <= one < size for one in prompt):
        ids = prompt
    else:
        raise _refuse("prompt", repr(prompt)[:100], f"a text, or token ids from 0 to {size - 1}")
    if not ids:
        raise _refuse("prompt", "a prompt without tokens", "one token or more")
    return ids


def _read_max_tokens(
    fields: Mapping[str, Any], model: TokenModel, num_prompt: int, *, is_chat: bool
) -> int:
    limit = model.spec.context_tokens
    room = 2**31 if limit is None else limit - num_prompt
    if room < 1:
        raise _refuse(
            "messages" if is_chat else "prompt",
            f"{num_prompt:,} tokens",
            f"fewer than the {limit:,} of the model's context",
        )
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    if name in fields:
        value = _read_int(fields, name, 1, 1, 2**31)
        if value > room:
            expected = (
                f"at most {room:,}: the context of {limit:,} has {num_prompt:,} of the prompt"
            )
            raise _refuse(name, f"{value:,}", expected)
        return value
    default = _DEFAULT_CHAT_TOKENS if limit is None else room
    if not is_chat:
        default = _DEFAULT_COMPLETION_TOKENS
    return min(room, int(_read_default(model.spec.generation, "max_new_tokens", int, default)))


def _read_default(defaults: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a default of the model's own, where it has one that can be used."""
    value: Any = defaults.get(name)
    if type(value) not in (int, kind) or not math.isfinite(value) or value < 0:
        return default
    return value


def _read_number(
    fields: Mapping[str, Any],
    name: str,
    defaults: Mapping[str, Any],
    default: float,
    is_valid: Callable[[float], bool],
    expected: str,
) -> float:
    value = fields.get(name, _read_default(defaults, name, float, default))
    if type(value) not in (int, float) or not math.isfinite(value) or not is_valid(value):
        raise _refuse(name, repr(value)[:100], f"a number {expected}")
    return float(value)


def _read_int(fields: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise _refuse(name, repr(value)[:100], f"a whole number from {low} to {high}")
    return value


def _read_bool(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if type(value) is not bool:
        raise _refuse(name, repr(value)[:100], "true or false")
    return value


def _read_stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    given = fields.get("stop", [])
    stops = [given] if isinstance(given, str) else given
    is_list = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not is_list or not all(isinstance(one, str) and one for one in stops):
        raise _refuse("stop", repr(given)[:100], f"a text, or a list of at most {_MAX_STOPS}")
    return tuple(stops)


def _refuse(field: str, found: str, expected: str) -> RequestRefusedError:
    return RequestRefusedError(400, field, found=found, expected=expected)
