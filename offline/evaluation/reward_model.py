"""Reward model: a sequence classifier of transformers that scores dialogues, from a local folder.

The folder has config.json, weights in safetensors and tokenizer.json. Nothing is downloaded, and no
code of the folder runs. Its version is the sha256 of its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.interchange.formats.generations.messages import format_message
from replaylake.datastore.maintenance.scoring.scorer import (
    NotScorableError,
    Outcome,
    Task,
    Unit,
    check_values,
    format_completion,
    format_failure,
    format_prompt,
    open_dialogue,
)
from replaylake.offline.language.pretrained import check_model_folder, load_pretrained


class RewardModel:
    """A sequence classifier with one output, which is the score of a dialogue."""

    unit: Unit = "dialogue"

    def __init__(
        self,
        path: str | Path,
        *,
        name: str = "reward_model",
        batch_size: int = 8,
        device: str = "cpu",
    ) -> None:
        """Load a model, in float32.

        Args:
            path: the folder.
            name: of the scores.
            batch_size: dialogues in one pass; 1 is used where the model has no padding token.
            device: of torch.

        A dialogue is formatted by the tokenizer's chat template; without one, prompt and completion
        are a pair of texts. One with more tokens than the model takes is a failure.

        Raises: NotFoundError for a missing file; SourceInvalidError for code in the folder, or
        another number of outputs; ConfigInvalidError; ExtraMissingError without transformers.
        """
        self.name = name
        folder = check_model_folder(path)
        if batch_size < 1:
            raise ConfigInvalidError(
                f"batch_size: found {batch_size}, expected 1 or more.", parameter="batch_size"
            )
        self._folder, self._device = folder, device
        self._model, self._tokenizer = load_pretrained(
            folder, "sequence classifier", num_outputs=1, device=device
        )
        self._batch_size = batch_size if self._can_pad() else 1
        self._max_tokens = getattr(self._model.config, "max_position_embeddings", None)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "model",
            "model": self._folder.path.name,
            "architecture": type(self._model).__name__,
            "sha256": self._folder.sha256,
            "files": self._folder.files,
        }

    def make_content(self, dataset: str, episodes: Sequence[Episode]) -> Any:
        sample = open_dialogue(episodes)
        if not self._tokenizer.chat_template:
            return [format_prompt(sample), format_completion(sample)]
        messages = [
            {"role": message["role"], "content": format_message(message)}
            for message in sample.messages
        ]
        return self._tokenizer.apply_chat_template(messages, tokenize=False)

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[str, Outcome]]:
        while batch := list(islice(tasks, self._batch_size)):
            ready = []
            for task in batch:
                try:
                    ready.append((task, self._tokenize(task.content)))
                except NotScorableError as error:
                    yield task.key, Outcome(error=format_failure(error))
            if not ready:
                continue
            for (task, _), score in zip(ready, self._score([ids for _, ids in ready]), strict=True):
                try:
                    yield task.key, Outcome(check_values(score, task.num_steps))
                except NotScorableError as error:
                    yield task.key, Outcome(error=format_failure(error))

    def _tokenize(self, content: str | Sequence[str]) -> dict[str, list[int]]:
        if isinstance(content, str):
            encoded = self._tokenizer(content, add_special_tokens=False)
        else:
            encoded = self._tokenizer(*content)
        num_tokens = len(encoded["input_ids"])
        if not num_tokens:
            raise NotScorableError("found no token, expected a dialogue with text")
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            raise NotScorableError(
                f"found {num_tokens:,} tokens, expected at most {self._max_tokens:,}, which the "
                "model takes"
            )
        return dict(encoded)

    def _score(self, encoded: Sequence[dict[str, list[int]]]) -> list[float]:
        """Return the output for sequences of ids, padded at their right to one length."""
        length = max(len(one["input_ids"]) for one in encoded)
        fill = {"input_ids": self._tokenizer.pad_token_id or 0}
        inputs = {
            name: torch.tensor(
                [one[name] + [fill.get(name, 0)] * (length - len(one[name])) for one in encoded],
                device=self._device,
            )
            for name in encoded[0]
        }
        with torch.inference_mode():
            logits = self._model(**inputs).logits
        scores: list[float] = logits[:, 0].double().cpu().tolist()
        return scores

    def _can_pad(self) -> bool:
        has_token = self._tokenizer.pad_token_id is not None
        return has_token and self._model.config.pad_token_id is not None
