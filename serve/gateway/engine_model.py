"""Engine model: an engine with OpenAI's chat completions that answers messages, for rollouts.

Token ids and log-probs are requested and read as the gateway does it (openai_api.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from replaylake.datastore.errors import ConfigInvalidError, GenerationError, RolloutError
from replaylake.datastore.interchange.rollout_rows import Generation
from replaylake.serve.gateway.calls import CallAnswer, clean_log_probs, to_ids
from replaylake.serve.gateway.openai_api import (
    AUTO,
    ENGINES,
    LLAMA_CPP,
    OPENAI,
    SGLANG,
    VLLM,
    ChatApi,
    read_models,
)
from replaylake.serve.gateway.upstream import Headers, Upstream, UpstreamAnswer, UpstreamError

_PATH: Final = "/v1/chat/completions"
_JSON: Final = (b"content-type", b"application/json")
# Members of a request that are stated otherwise, or whose answers are of another form.
_OWN_MEMBERS: Final = ("messages", "model", "n", "seed", "stream", "tools")
# These are known to take a seed; others may refuse a field that they do not know.
_WITH_SEED: Final = (VLLM, SGLANG, LLAMA_CPP)
_TRANSIENT: Final = (408, 409, 429, 500, 502, 503, 504, 529)
# Refusals of one request, which another one may not get: too long a prompt, filtered contents.
_OF_REQUEST: Final = (400, 413, 422)
_MIN_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 30.0
_MAX_ERROR_CHARS: Final = 300
_MAX_SEED: Final = 2**31


class EngineModel:
    """A model of an engine (vLLM, SGLang, llama.cpp, others), by the engine's URL.

    Requests that get no answer, or a transient refusal (429, 5xx), are sent again for `retry_s`.
    For one event loop.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        engine: str = AUTO,
        api_key: str | None = None,
        policy_version: int | None = None,
        silence_s: float = 600.0,
        retry_s: float = 120.0,
    ) -> None:
        """Connect with the first request.

        Args:
            url: base URL, such as http://127.0.0.1:8000.
            name: of the model, which is also the policy's on recorded steps; by default the only
                one that the engine has.
            engine: whose fields request ids and log-probs: vllm, sglang, llama.cpp or openai
                (which requests none); `auto` detects it.
            api_key: sent as a bearer token; it is neither stored nor in any message.
            policy_version: version on recorded steps, where the engine states none.
            silence_s: how long an answer may take.
            retry_s: how long a request is sent again.

        Raises: ConfigInvalidError.
        """
        if engine not in ENGINES:
            raise ConfigInvalidError(
                f"engine: found {engine!r}, expected one of {', '.join(ENGINES)}.",
                parameter="engine",
            )
        key = (api_key or "").strip()
        if not key.isascii() or not (key.isprintable() or not key):
            raise ConfigInvalidError(
                "api_key: found characters that a header cannot have, expected the engine's key.",
                parameter="api_key",
            )
        self._url, self._name = url, name
        self._engine = None if engine == AUTO else engine
        self._policy_version = policy_version
        self._headers: Headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        self._retry_s = retry_s
        self._upstream = Upstream(url, silence_s=silence_s)
        self._api = ChatApi()
        self._starting: asyncio.Lock | None = None
        self._refused = False

    def describe(self) -> dict[str, Any]:
        return {"url": self._url, "policy": self._name, "policy_version": self._policy_version}

    async def generate(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        seed: int = 0,
        previous: Generation | None = None,
        num_previous: int = 0,
    ) -> Generation:
        """Generate the reply to messages; with ids and log-probs if the engine returns them.

        Args:
            messages: as OpenAI's API has them.
            tools: functions, as OpenAI's API has them.
            sampling: further members of the request, such as `temperature` and `top_p`.
            seed: sent to engines that are known to take one.
            previous: not used: the engine tokenizes the whole dialogue.
            num_previous: likewise.

        Raises: GenerationError if the engine refuses this request or does not end its answer;
        RolloutError if there is no engine, or it refuses all requests; ConfigInvalidError.
        """
        if taken := sorted({*(sampling or {})} & {*_OWN_MEMBERS}):
            raise ConfigInvalidError(
                f"sampling: found {taken[0]}, which the request states otherwise, expected further "
                "members of a chat completion.",
                parameter="sampling",
            )
        engine, name = await self._find_model()
        body: dict[str, Any] = {"model": name, "messages": list(messages), **(sampling or {})}
        if tools:
            body["tools"] = list(tools)
        if engine in _WITH_SEED:
            body["seed"] = seed % _MAX_SEED
        try:
            request = self._api.read_request(body)
        except (LookupError, TypeError, ValueError) as error:
            raise GenerationError(
                f"messages: found {messages!r:.200}, expected objects with role and content."
            ) from error
        added = {} if self._refused else self._api.ask(body, engine)
        status, data = await self._send(_PATH, {**body, **added})
        if status in _OF_REQUEST and added:
            # An engine may refuse what was added: it gets the request without.
            again, found = await self._send(_PATH, body)
            if again == 200:
                self._refused, added, status, data = True, {}, again, found
        if status != 200:
            raise GenerationError(f"{self._describe(status, data)}.")
        reader = self._api.reader(request, frozenset(added), engine)
        try:
            reader.read_body(orjson.loads(data))
            answer = reader.answer()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise GenerationError(
                f"{self._url}: found an answer that is no chat completion ({data[:100]!r})."
            ) from error
        return self._make_generation(answer, name)

    def close(self) -> None:
        """Close every connection."""
        self._upstream.close()

    def _make_generation(self, answer: CallAnswer, name: str) -> Generation:
        if not answer.is_complete or not answer.samples or answer.samples[0].message is None:
            reason = answer.samples[0].finish_reason if answer.samples else None
            raise GenerationError(
                f"{self._url}: found an answer that the engine did not finish ({reason})."
            )
        sample = answer.samples[0]
        prompt, ids = to_ids(sample.prompt_token_ids), to_ids(sample.token_ids)
        log_probs = clean_log_probs(sample.log_probs)
        if prompt is None or ids is None:
            prompt = ids = log_probs = None
        elif log_probs is not None and len(log_probs) != len(ids):
            log_probs = None
        usage = answer.usage if isinstance(answer.usage, dict) else {}
        version = answer.policy_version
        message = {one: value for one, value in (sample.message or {}).items() if value is not None}
        return Generation(
            {"role": "assistant", "content": None, **message},
            sample.finish_reason,
            prompt,
            ids,
            log_probs,
            answer.completion_id,
            answer.model or name,
            self._policy_version if version is None else version,
            _to_count(usage.get("prompt_tokens")),
            _to_count(usage.get("completion_tokens")),
        )

    async def _find_model(self) -> tuple[str, str]:
        """Return the engine and the name of its model. Raises: RolloutError, ConfigInvalidError."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._engine is None or self._name is None:
                status, data = await self._send("/v1/models", None)
                try:
                    engine, names = read_models(data) if status == 200 else (OPENAI, [])
                except ValueError:
                    engine, names = OPENAI, []
                if self._name is None and len(names) != 1:
                    found = ", ".join(names[:10]) or f"none (/v1/models: status {status})"
                    raise ConfigInvalidError(
                        f"model: {self._url} has the models {found}, expected one, or a name.",
                        parameter="model",
                    )
                self._name = names[0] if self._name is None else self._name
                self._engine = self._engine or engine
            return self._engine, self._name

    async def _send(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        """Return status and body of an answer that is no transient refusal.

        Raises: RolloutError once retry_s have passed, and for what every request gets.
        """
        try:
            data = b"" if body is None else orjson.dumps(body)
        except TypeError as error:
            raise GenerationError(f"messages: {error}, expected what JSON can hold.") from error
        until_s, backoff_s = time.monotonic() + self._retry_s, _MIN_BACKOFF_S
        while True:
            wait_s = backoff_s
            try:
                answer = await self._upstream.request(
                    "GET" if body is None else "POST", path, [*self._headers, _JSON], data
                )
                try:
                    content = await answer.read_all()
                finally:
                    answer.close()
            except UpstreamError as error:
                failure = f"{self._url}: {error}"
            else:
                if answer.status not in _TRANSIENT:
                    is_known = answer.status == 200 or answer.status in _OF_REQUEST
                    if body is not None and not is_known:
                        raise RolloutError(
                            f"{self._describe(answer.status, content)}. Check the URL, the key and "
                            "the name of the model."
                        )
                    return answer.status, content
                failure = self._describe(answer.status, content)
                wait_s = max(wait_s, _read_retry_after(answer))
            if time.monotonic() + wait_s > until_s:
                raise RolloutError(
                    f"{failure}, for {self._retry_s:g} s, expected an answer. Start the engine, or "
                    "check its URL; then start the rollout again."
                )
            await asyncio.sleep(wait_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _describe(self, status: int, data: bytes) -> str:
        text = " ".join(data.decode("utf-8", "replace").split())[:_MAX_ERROR_CHARS]
        return f"{self._url}: status {status} ({text})"


def _read_retry_after(answer: UpstreamAnswer) -> float:
    for name, value in answer.headers:
        if name == b"retry-after" and value.isdigit():
            return float(value)
    return 0.0


def _to_count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
