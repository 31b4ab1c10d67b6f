"""Local model: a causal language model in this process that answers messages, for rollouts.

For small models on one machine. An engine does the same behind `EngineModel` of serve/gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError, GenerationError
from replaylake.datastore.interchange.rollout_rows import Generation
from replaylake.offline.language.chat_tokenizer import ChatTokenizer, Message, read_text
from replaylake.offline.language.pretrained import check_model_folder, load_pretrained
from replaylake.offline.language.sampling import sample_completions
from replaylake.offline.learning.options import expect

_TEMPERATURE: Final = "temperature"
_MAX_TOKENS: Final = "max_tokens"
_DEFAULTS: Final[Mapping[str, Any]] = {_TEMPERATURE: 1.0, _MAX_TOKENS: 256}
# Stands for a generated message in a template: no text of a dialogue has it.
_MARK: Final = "{~generated~7f3a9c5e~}"


@dataclass(frozen=True, eq=False)
class _Request:
    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    generated: asyncio.Future[Any]


class LocalModel:
    """A model in a directory. Requests that wait at the same time are generated as one batch.

    A reply continues the ids of the one before it: what was sampled is never tokenized again, so
    that a dialogue is one sequence of tokens. For one event loop.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        policy: str | None = None,
        policy_version: int = 0,
        device: str = "cpu",
        max_batch_size: int = 64,
    ) -> None:
        """Load a model.

        Args:
            path: a directory that transformers wrote; nothing is downloaded.
            policy: its name on recorded steps; by default that of the directory.
            policy_version: its version there.
            device: of torch.
            max_batch_size: largest number of sequences generated together.

        Raises: NotFoundError, SourceInvalidError, ExtraMissingError, ConfigInvalidError.
        """
        expect(max_batch_size >= 1, "local model: max_batch_size", max_batch_size, "1 or more")
        folder = check_model_folder(path)
        self._model, tokenizer = load_pretrained(folder, "causal language model", device=device)
        self._tokenizer = ChatTokenizer(self._model, tokenizer)
        self._path, self._sha256 = folder.path, folder.sha256
        self._policy = policy or folder.path.name
        self._policy_version = policy_version
        limit = getattr(self._model.config, "max_position_embeddings", None)
        self._max_positions: float = float("inf") if limit is None else limit
        self._max_batch_size = max_batch_size
        self._waiting: list[_Request] = []
        self._is_busy = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="local model")

    def describe(self) -> dict[str, Any]:
        return {
            "path": str(self._path),
            "sha256": self._sha256,
            "policy": self._policy,
            "policy_version": self._policy_version,
        }

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        seed: int = 0,
        previous: Generation | None = None,
        num_previous: int = 0,
    ) -> Generation:
        """Generate the reply to messages, with the log-prob that each id was sampled with.

        Args:
            messages: as OpenAI's API has them. A model without a chat template continues their
                texts, one after the other.
            tools: functions, as OpenAI's API has them, for the template.
            sampling: `temperature` and `max_tokens`, by default 1 and 256.
            seed: of this reply alone.
            previous: the generation whose message is the last of the first num_previous messages.
            num_previous: number of messages up to it.

        Raises: ConfigInvalidError for other parameters of sampling; GenerationError for a prompt
        that leaves no room in the model's context, or that the template refuses.
        """
        options = _read_sampling(sampling or {})
        if tools and not self._tokenizer.has_template:
            raise ConfigInvalidError(
                f"tools: found some for {self._path}, whose tokenizer has no chat template, "
                "expected none. Use a model with a template for tools.",
                parameter="tools",
            )
        if previous is None:
            prompt_ids = self._encode(self._render(messages, tools), is_start=True)
        else:
            prompt_ids = self._continue(messages, tools, previous, num_previous)
        room = self._max_positions - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise GenerationError(
                f"messages: found a prompt of {len(prompt_ids):,} tokens, expected 1 to "
                f"{self._max_positions - 1:,} for a context of {self._max_positions:,}."
            )
        loop = asyncio.get_running_loop()
        request = _Request(
            prompt_ids,
            int(min(options[_MAX_TOKENS], room)),
            options[_TEMPERATURE],
            seed,
            loop.create_future(),
        )
        self._waiting.append(request)
        self._schedule(loop)
        completion = await request.generated
        return Generation(
            self._tokenizer.parse_reply(completion.token_ids, prompt_ids, tools),
            completion.finish_reason,
            prompt_ids,
            completion.token_ids,
            completion.log_probs,
            policy=self._policy,
            policy_version=self._policy_version,
            num_prompt_tokens=len(prompt_ids),
            num_completion_tokens=len(completion.token_ids),
        )

    def close(self) -> None:
        """End the thread that generates, once it has generated what it is at."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a batch once everything that can run now has run: it may have requests, too."""
        if not self._is_busy:
            self._is_busy = True
            loop.call_soon(loop.call_soon, self._start_batch, loop)

    def _start_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting = [one for one in self._waiting if not one.generated.done()]
        if not self._waiting:
            self._is_busy = False
            return
        first = self._waiting[0]
        alike = [
            one
            for one in self._waiting
            if (one.max_tokens, one.temperature) == (first.max_tokens, first.temperature)
        ]
        batch = alike[: self._max_batch_size]
        taken = set(batch)
        self._waiting = [one for one in self._waiting if one not in taken]
        done = loop.run_in_executor(self._executor, self._sample, batch)
        done.add_done_callback(lambda future: self._end_batch(loop, batch, future))

    def _end_batch(
        self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Request], done: asyncio.Future[Any]
    ) -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        for number, request in enumerate(batch):
            if request.generated.done():
                continue
            if error is None:
                request.generated.set_result(done.result()[number])
            else:
                request.generated.set_exception(error)
        self._is_busy = False
        self._schedule(loop)

    def _sample(self, batch: Sequence[_Request]) -> list[Any]:
        return sample_completions(
            self._model,
            [one.prompt_ids for one in batch],
            max_new_tokens=batch[0].max_tokens,
            stop_ids=self._tokenizer.stop_ids,
            temperature=batch[0].temperature,
            seeds=[one.seed for one in batch],
        )

    def _continue(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        previous: Generation,
        num_previous: int,
    ) -> list[int]:
        """Return the ids of the dialogue so far, as they were, and of the messages after it."""
        assert previous.prompt_ids is not None
        assert previous.completion_ids is not None
        before, generated = messages[: num_previous - 1], {"role": "assistant", "content": _MARK}
        text = self._render([*before, generated, *messages[num_previous:]], tools)
        _, mark, rest = text.partition(_MARK)
        if not mark or _MARK in rest:
            return self._encode(self._render(messages, tools), is_start=True)
        sampled = previous.completion_ids
        if sampled and sampled[-1] in self._tokenizer.stop_ids:
            rest = rest.removeprefix(self._tokenizer.decode([sampled[-1]], keeps_special=True))
        return [*previous.prompt_ids, *sampled, *self._encode(rest, is_start=False)]

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        try:
            if self._tokenizer.has_template:
                return self._tokenizer.render(messages, tools)
            texts = map(read_text, messages)
            return "".join(texts)
        except ConfigInvalidError as error:
            raise GenerationError(str(error)) from error

    def _encode(self, text: str, *, is_start: bool) -> list[int]:
        # A template writes the tokens of a beginning itself.
        has_start = is_start and not self._tokenizer.has_template
        return self._tokenizer.encode(text, adds_special=has_start)


def _read_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted({*sampling} - {*_DEFAULTS}):
        raise ConfigInvalidError(
            f"sampling: found {unknown[0]}, expected {' or '.join(_DEFAULTS)} for a model in this "
            "process. An engine takes others.",
            parameter="sampling",
        )
    options = {**_DEFAULTS, **sampling}
    temperature, max_tokens = options[_TEMPERATURE], options[_MAX_TOKENS]
    is_number = isinstance(temperature, int | float) and 0 <= temperature < float("inf")
    is_count = isinstance(max_tokens, int) and max_tokens >= 1
    for name, is_valid, expected in (
        (_TEMPERATURE, is_number, "a number of 0 or more"),
        (_MAX_TOKENS, is_count, "a whole number of 1 or more"),
    ):
        if not is_valid:
            raise ConfigInvalidError(
                f"sampling: {name}: found {options[name]!r}, expected {expected}.",
                parameter="sampling",
            )
    return options
