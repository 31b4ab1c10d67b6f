"""Answers of chat completions and completions, whole and as streams, with ids as vLLM has them.

`metadata.weight_version` is the policy version, as SGLang states it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from replaylake.datastore.names import new_ulid
from replaylake.serve.engine.generation import Piece, TokenModel
from replaylake.serve.engine.requests import CompletionRequest

_DONE: Final = "[DONE]"


class AnswerWriter:
    """Writes the answer to one request."""

    def __init__(
        self, request: CompletionRequest, model: TokenModel, name: str, version: int | None
    ) -> None:
        self._request, self._model = request, model
        kind = "chat.completion" if request.is_chat else "text_completion"
        is_part = request.is_chat and request.is_stream
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{new_ulid()}",
            "object": f"{kind}.chunk" if is_part else kind,
            "created": int(time.time()),
            "model": name,
        }
        self._metadata: dict[str, Any] = (
            {} if version is None else {"metadata": {"weight_version": str(version)}}
        )
        num = len(request.generation.prompts)
        self._samples: list[list[Piece]] = [[] for _ in range(num)]
        # Of the text of each completion, where the next token's begins.
        self._offsets = [0] * num

    def add(self, pieces: Sequence[Piece]) -> None:
        """Take what was sampled."""
        for piece in pieces:
            self._samples[piece.index].append(piece)

    def make_body(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [
            self._make_choice(_join(index, pieces), is_first=True)
            for index, pieces in enumerate(self._samples)
        ]
        return {
            **self._head,
            **self._metadata,
            "choices": choices,
            "usage": self._count_usage(),
            **self._prompt_ids(),
        }

    def iter_first_events(self) -> Iterator[Mapping[str, Any] | str]:
        """Yield the events before the first token."""
        if not self._request.is_chat:
            return
        for index in range(len(self._samples)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            about = {**self._metadata, **self._prompt_ids()} if index == 0 else {}
            yield {**self._head, **about, "choices": [choice]}

    def iter_events(self, pieces: Sequence[Piece]) -> Iterator[Mapping[str, Any] | str]:
        """Yield an event for each piece; without text only where its ids or log-probs are asked."""
        request = self._request
        for piece in pieces:
            is_first = not self._samples[piece.index]
            self._samples[piece.index].append(piece)
            is_shown = request.has_ids or request.has_log_probs or piece.finish_reason is not None
            if piece.text or is_shown:
                about = {} if request.is_chat or not is_first else self._metadata
                choice = self._make_choice(piece, is_first=is_first)
                yield {**self._head, **about, "choices": [choice]}

    def iter_last_events(self) -> Iterator[Mapping[str, Any] | str]:
        """Yield the events after the last token."""
        if self._request.has_usage:
            yield {**self._head, "choices": [], "usage": self._count_usage()}
        yield _DONE

    def _make_choice(self, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        request, is_part = self._request, self._request.is_stream
        choice: dict[str, Any] = {"index": piece.index}
        if not request.is_chat:
            choice["text"] = piece.text
        elif is_part:
            choice["delta"] = {"content": piece.text} if piece.text else {}
        else:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        choice["logprobs"] = self._make_log_probs(piece) if request.has_log_probs else None
        choice["finish_reason"] = piece.finish_reason
        if request.has_ids:
            choice["token_ids"] = piece.token_ids
            if not request.is_chat and is_first:
                choice["prompt_token_ids"] = request.generation.prompts[piece.index]
        return choice

    def _make_log_probs(self, piece: Piece) -> dict[str, Any]:
        texts = [self._model.decode([one], keeps_special=True) for one in piece.token_ids]
        if self._request.is_chat:
            return {
                "content": [
                    {
                        "token": text,
                        "logprob": log_prob,
                        "bytes": list(text.encode("utf-8", "replace")),
                        "top_logprobs": [],
                    }
                    for text, log_prob in zip(texts, piece.log_probs, strict=True)
                ]
            }
        offsets = []
        for text in texts:
            offsets.append(self._offsets[piece.index])
            self._offsets[piece.index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": piece.log_probs,
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _prompt_ids(self) -> dict[str, Any]:
        request = self._request
        if not request.is_chat or not request.has_ids:
            return {}
        return {"prompt_token_ids": request.prompts[0]}

    def _count_usage(self) -> dict[str, int]:
        num_prompt = sum(map(len, self._request.prompts))
        num = sum(len(piece.token_ids) for pieces in self._samples for piece in pieces)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num,
            "total_tokens": num_prompt + num,
        }


def _join(index: int, pieces: Sequence[Piece]) -> Piece:
    return Piece(
        index,
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.token_ids],
        [log_prob for piece in pieces for log_prob in piece.log_probs],
        pieces[-1].finish_reason if pieces else None,
    )
