"""Generation: requests to a model wait for their turn, and end when nobody reads them any more.

A model samples in a thread, one request after the other: two at once would each take twice as long.
What it samples is handed to the event loop token by token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from replaylake.datastore.lake.policies.manifest import LanguageSpec
from replaylake.serve.messages import RETRY_LATER, RequestRefusedError

Reason = Literal["stop", "length"]
# What a decoder returns for bytes that are not yet a whole character.
_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"


class TokenModel(Protocol):
    """A causal language model with its tokenizer."""

    spec: LanguageSpec
    stop_ids: frozenset[int]

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> list[int]:
        """Return the ids of a dialogue. Raises: ConfigInvalidError if it cannot be a prompt."""

    def decode(self, ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Return the text of ids; special tokens have none, unless they are kept."""

    def iter_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int | None,
    ) -> Iterator[list[tuple[int, float]]]:
        """Yield the next token of every prompt and its log-prob."""


@dataclass(frozen=True)
class GenerationRequest:
    """What to sample: a completion for each of the prompts, all in one batch.

    stops: texts that end a completion, and are not part of its text.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]


@dataclass(slots=True)
class Piece:
    """A part of the completion of prompt number `index`; finish_reason: of its last part."""

    index: int
    text: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Reason | None = None


class Generation:
    """A request that waits or runs: iterate for its pieces, and close it in any case."""

    def __init__(self, on_close: Callable[[Generation], None]) -> None:
        self.is_stopped = False
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[list[Piece] | BaseException | None] = asyncio.Queue()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Piece]:
        """Return the pieces that were sampled next. Raises: what the model raised."""
        item = await self._items.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def put(self, item: list[Piece] | BaseException | None) -> None:
        """Hand out pieces, an error, or None at the end; from the thread of the model."""
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def close(self) -> None:
        """End it after the token that is being sampled."""
        self.is_stopped = True
        self._on_close(self)


class GenerationQueue:
    """Runs requests on a model in the order in which they came, for one event loop."""

    def __init__(self, model: TokenModel, max_requests: int) -> None:
        """max_requests: that wait or run at once; others are refused."""
        self._model, self._max = model, max_requests
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="generate")
        self._all: set[Generation] = set()

    def submit(self, request: GenerationRequest) -> Generation:
        """Let a request wait for its turn. Raises: RequestRefusedError (503) if too many do."""
        if len(self._all) >= self._max:
            message = f"{len(self._all)} requests in progress, the engine's limit"
            raise RequestRefusedError(503, "engine", message, headers=RETRY_LATER)
        generation = Generation(self._all.discard)
        self._all.add(generation)
        self._executor.submit(self._run, request, generation)
        return generation

    def close(self) -> None:
        """End all generations, and wait for the token that is being sampled."""
        for generation in tuple(self._all):
            generation.close()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, request: GenerationRequest, generation: Generation) -> None:
        try:
            if not generation.is_stopped:
                for pieces in self._sample(request):
                    generation.put(pieces)
                    if generation.is_stopped:
                        break
        except BaseException as error:
            generation.put(error)
        else:
            generation.put(None)

    def _sample(self, request: GenerationRequest) -> Iterator[list[Piece]]:
        texts = [_Completion(self._model, request.stops) for _ in request.prompts]
        steps = self._model.iter_tokens(
            request.prompts,
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
        )
        for number, step in enumerate(steps, 1):
            is_last = number == request.max_new_tokens
            found = [
                one.add(index, token, log_prob, is_last=is_last)
                for index, (one, (token, log_prob)) in enumerate(zip(texts, step, strict=True))
                if not one.is_finished
            ]
            yield found
            if all(one.is_finished for one in texts):
                return


@dataclass
class _Completion:
    """A completion as it grows: its text, without what may still be the beginning of a stop."""

    model: TokenModel
    stops: tuple[str, ...]
    is_finished: bool = False
    _ids: list[int] = field(default_factory=list)
    # Ids before `_begin` are decoded for good; those up to `_shown` have been returned as text.
    _begin: int = 0
    _shown: int = 0
    _held: str = ""

    def add(self, index: int, token: int, log_prob: float, *, is_last: bool) -> Piece:
        """Take a token, and return what it adds."""
        self._ids.append(token)
        is_end = token in self.model.stop_ids
        text = self._held + self._decode_new(is_last=is_end or is_last)
        cut = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        reason: Reason | None = None
        if cut is not None or is_end:
            reason = "stop"
        elif is_last:
            reason = "length"
        self.is_finished = reason is not None
        if cut is not None:
            text = text[:cut]
        num_held = 0 if self.is_finished else self._count_held(text)
        self._held = text[len(text) - num_held :]
        return Piece(index, text[: len(text) - num_held], [token], [log_prob], reason)

    def _decode_new(self, *, is_last: bool) -> str:
        """Return the text of the ids that have not been shown, nothing for half a character.

        Decoded together with the ids before: some tokenizers write a space between words only.
        """
        before = self.model.decode(self._ids[self._begin : self._shown])
        text = self.model.decode(self._ids[self._begin :])
        if text.endswith(_INCOMPLETE) and not is_last:
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def _count_held(self, text: str) -> int:
        """Return how many of the last characters may be the beginning of a stop."""
        lengths = range(max(map(len, self.stops), default=1) - 1, 0, -1)
        return next(
            (
                length
                for length in lengths
                if length <= len(text)
                and any(stop.startswith(text[-length:]) for stop in self.stops)
            ),
            0,
        )
