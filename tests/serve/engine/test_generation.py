"""Generation: texts of tokens, stops, turns and ends, with a model that says what it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from replaylake.datastore.lake.policies.manifest import LanguageSpec
from replaylake.serve.engine.generation import GenerationQueue, GenerationRequest, Piece
from replaylake.serve.messages import RequestRefusedError

END = 0


class Script:
    """Samples the bytes of a text for each prompt, the first id of which is its number."""

    spec = LanguageSpec("Script", 256, None, False, {})
    stop_ids = frozenset((END,))

    def __init__(self, *texts: bytes, gate: threading.Semaphore | None = None) -> None:
        self._texts, self._gate = texts, gate
        self.begun: list[int] = []
        self.num_tokens = 0

    def decode(self, ids: Sequence[int], *, keeps_special: bool = False) -> str:
        return bytes(one for one in ids if one != END).decode("utf-8", "replace")

    def iter_tokens(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, **options: Any
    ) -> Iterator[list[tuple[int, float]]]:
        self.begun += [prompt[0] for prompt in prompts]
        rows = [self._texts[prompt[0]] for prompt in prompts]
        for place in range(max_new_tokens):
            if self._gate is not None:
                self._gate.acquire()
            self.num_tokens += 1
            yield [(row[place] if place < len(row) else END, -0.5) for row in rows]


def request(*prompts: int, max_new_tokens: int = 50, stops: tuple[str, ...] = ()) -> Any:
    return GenerationRequest([[one] for one in prompts], max_new_tokens, 1.0, 1.0, 0, 1, stops)


async def collect(queue: GenerationQueue, asked: Any) -> list[Piece]:
    generation = queue.submit(asked)
    try:
        return [piece async for pieces in generation for piece in pieces]
    finally:
        generation.close()


def sample(model: Any, asked: Any) -> list[list[Piece]]:
    """Return the pieces of each completion."""

    async def run() -> list[Piece]:
        queue = GenerationQueue(model, 4)
        try:
            return await collect(queue, asked)
        finally:
            queue.close()

    pieces = asyncio.run(run())
    return [[one for one in pieces if one.index == index] for index in range(len(asked.prompts))]


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_each_token_is_a_piece_and_half_a_character_waits_for_the_rest() -> None:
    (pieces,) = sample(Script("aä€".encode()), request(0))
    assert [piece.text for piece in pieces] == ["a", "", "ä", "", "", "€", ""]
    assert [piece.token_ids for piece in pieces] == [[one] for one in [*"aä€".encode(), END]]
    assert [piece.log_probs for piece in pieces] == [[-0.5]] * 7
    assert [piece.finish_reason for piece in pieces] == [*[None] * 6, "stop"]


def test_what_never_becomes_a_character_comes_at_the_end() -> None:
    (pieces,) = sample(Script("€".encode()[:2] + b"x"), request(0, max_new_tokens=2))
    assert text_of(pieces) == "\ufffd"
    assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "stops", "expected", "num_tokens"),
    [
        ("one. two. three", (". t",), "one", 6),
        ("one. x", (". t",), "one. x", 7),
        ("aab", ("ab",), "a", 3),
        ("abc", ("c", "bc"), "a", 3),
        ("ab", ("abc",), "ab", 3),
        ("stop", ("stop",), "", 4),
    ],
)
def test_a_stop_ends_the_text_and_no_part_of_it_is_sent(
    text: str, stops: tuple[str, ...], expected: str, num_tokens: int
) -> None:
    (pieces,) = sample(Script(text.encode()), request(0, stops=stops))
    assert text_of(pieces) == expected
    assert len(pieces) == num_tokens
    assert pieces[-1].finish_reason == "stop"
    for number in range(len(pieces)):
        assert expected.startswith(text_of(pieces[:number]))


def test_completions_of_one_request_end_each_on_its_own() -> None:
    model = Script(b"abc", b"d", b"efghij")
    first, second, third = sample(model, request(0, 1, 2, max_new_tokens=5))
    assert [text_of(one) for one in (first, second, third)] == ["abc", "d", "efghi"]
    reasons = [one[-1].finish_reason for one in (first, second, third)]
    assert reasons == ["stop", "stop", "length"]
    assert model.num_tokens == 5


def test_requests_take_turns_in_their_order_and_no_more_wait_than_may() -> None:
    gate = threading.Semaphore(0)
    model = Script(b"a", b"b", b"c", gate=gate)

    async def run() -> None:
        queue = GenerationQueue(model, 2)
        running = [asyncio.create_task(collect(queue, request(one))) for one in (1, 0)]
        await asyncio.sleep(0)
        with pytest.raises(RequestRefusedError, match="2 requests in progress") as refused:
            queue.submit(request(2))
        assert refused.value.status == 503
        assert refused.value.headers
        gate.release(4)
        texts = [text_of(pieces) for pieces in await asyncio.gather(*running)]
        assert texts == ["b", "a"]
        assert model.begun == [1, 0]
        gate.release(2)
        assert text_of(await collect(queue, request(2))) == "c"
        queue.close()

    asyncio.run(run())


def test_a_closed_request_samples_no_further_token_and_a_waiting_one_none() -> None:
    gate = threading.Semaphore(0)
    model = Script(b"a" * 40, b"b", b"c", gate=gate)

    async def run() -> None:
        queue = GenerationQueue(model, 4)
        first = queue.submit(request(0))
        gate.release()
        assert text_of(await anext(first)) == "a"
        waiting = queue.submit(request(1))
        waiting.close()
        first.close()
        gate.release(1 + 2)  # the token that is being sampled, and those of the next request
        assert text_of(await collect(queue, request(2))) == "c"
        assert model.begun == [0, 2]
        assert model.num_tokens <= 4
        queue.close()

    asyncio.run(run())


def test_an_error_of_the_model_reaches_whoever_waits() -> None:
    class Broken(Script):
        def iter_tokens(self, *arguments: Any, **options: Any) -> Any:
            yield [(ord("a"), -0.5)]
            raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        sample(Broken(), request(0))
