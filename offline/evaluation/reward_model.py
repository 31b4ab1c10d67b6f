"""Reward model: a sequence classifier of transformers that scores dialogues, from a local folder.

The folder has config.json, weights in safetensors and tokenizer.json. Nothing is downloaded, and no
code of the folder runs. Its version is the sha256 of its files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    ExtraMissingError,
    NotFoundError,
    SourceInvalidError,
)
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

_CONFIG: Final = "config.json"
_TOKENIZER: Final = "tokenizer.json"
# What decides the scores; a folder may hold more, such as a README.
_PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


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
        folder = Path(path)
        for needed in (_CONFIG, _TOKENIZER):
            if not (folder / needed).is_file():
                raise NotFoundError(
                    f"model: {folder} has no {needed}, expected a folder that transformers wrote, "
                    "with config.json, *.safetensors and tokenizer.json.",
                    parameter="model",
                )
        if not list(folder.glob("*.safetensors")):
            raise NotFoundError(
                f"model: {folder} has no *.safetensors, expected weights in this form: others "
                "may hold code. Save the model again with safe serialization.",
                parameter="model",
            )
        if batch_size < 1:
            raise ConfigInvalidError(
                f"batch_size: found {batch_size}, expected 1 or more.", parameter="batch_size"
            )
        _refuse_code(folder)
        self._sha256, self._files = _hash_files(folder)
        self._folder, self._device = folder.resolve(), device
        self._model, self._tokenizer = _load(self._folder, device)
        self._batch_size = batch_size if self._can_pad() else 1
        self._max_tokens = getattr(self._model.config, "max_position_embeddings", None)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "model",
            "model": self._folder.name,
            "architecture": type(self._model).__name__,
            "sha256": self._sha256,
            "files": self._files,
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


def _refuse_code(folder: Path) -> None:
    """Refuse a folder whose files name classes of its own. Raises: SourceInvalidError."""
    for path in sorted(folder.glob("*.json")):
        if not path.name.endswith("config.json"):
            continue
        try:
            body = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise SourceInvalidError(
                f"model: {path}: {error}, expected a JSON file. Copy the model again.",
                parameter="model",
            ) from error
        if isinstance(body, dict) and "auto_map" in body:
            raise SourceInvalidError(
                f"model: {path} names code of its own (auto_map), expected an architecture of "
                "transformers: code of a model's folder is not run.",
                parameter="model",
            )


def _hash_files(folder: Path) -> tuple[str, dict[str, str]]:
    files = {}
    for path in sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(), files


def _load(folder: Path, device: str) -> tuple[Any, Any]:
    try:
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise ExtraMissingError(
            "a reward model needs transformers, which is not installed. Install it with: "
            "pip install 'replaylake[language]'"
        ) from None
    options = {"local_files_only": True, "trust_remote_code": False}
    # What is wrong is raised below.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        num_outputs = AutoConfig.from_pretrained(folder, **options).num_labels
        if num_outputs != 1:
            raise SourceInvalidError(
                f"model: {folder} has {num_outputs} outputs, expected one, the reward.",
                parameter="model",
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        text = " ".join(str(error).split())[:300]
        raise SourceInvalidError(
            f"model: {folder}: {text}, expected a sequence classifier of transformers.",
            parameter="model",
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    if absent := sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"]))):
        # transformers would fill them with random numbers.
        raise SourceInvalidError(
            f"model: {folder} has no weights {', '.join(absent[:3])}, expected those of a "
            f"{type(model).__name__}: it was saved as another architecture.",
            parameter="model",
        )
    return model.to(device).eval(), tokenizer
