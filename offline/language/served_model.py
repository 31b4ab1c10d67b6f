"""Served model: what an engine needs of a causal language model, texts to tokens and back.

`serve/engine` runs it behind an HTTP API, and imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError
from replaylake.datastore.lake.policies.manifest import LanguageSpec, describe_model
from replaylake.offline.language.pretrained import check_model_folder, load_pretrained
from replaylake.offline.language.sampling import iter_tokens


class ServedModel:
    """A loaded model and its tokenizer. Texts may be converted while another thread samples."""

    def __init__(self, directory: Path, *, device: str = "cpu", threads: int | None = None) -> None:
        """Load a directory that transformers wrote; code in it is refused.

        threads: of torch in this process; None: as many as torch takes.
        Raises: NotFoundError, SourceInvalidError, PackageInvalidError, ExtraMissingError.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        folder = check_model_folder(directory)
        self.spec: LanguageSpec = describe_model(folder.path, folder.files, {}).language
        self._model, self._tokenizer = load_pretrained(
            folder, "causal language model", device=device
        )
        # A tokenizer of transformers has settings that each call changes.
        self._lock = threading.Lock()
        ids = self.spec.generation.get("eos_token_id", self._tokenizer.eos_token_id)
        self.stop_ids = frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokens that the tokenizer puts around it."""
        with self._lock:
            ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> list[int]:
        """Return the ids of a dialogue, up to where the model's answer begins.

        Raises: ConfigInvalidError if the model has no chat template, or the template refuses the
        messages.
        """
        if not self.spec.has_chat_template:
            raise ConfigInvalidError(
                "messages: the model has no chat template, expected a prompt: send it to "
                "/v1/completions.",
                parameter="messages",
            )
        try:
            # A template is a program of the model's author, and raises whatever it likes.
            text: str = self._tokenizer.apply_chat_template(
                [_prepare_message(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except ReplayLakeError:
            raise
        except Exception as error:
            raise ConfigInvalidError(
                f"messages: the model's chat template refuses them: {error}", parameter="messages"
            ) from error
        with self._lock:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Return the text of ids; special tokens such as the end's have none, unless kept."""
        with self._lock:
            text: str = self._tokenizer.decode(
                list(ids), skip_special_tokens=not keeps_special, clean_up_tokenization_spaces=False
            )
        return text

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
        """Yield the next token of every prompt with its log-prob, as sampling.iter_tokens does."""
        generator = torch.Generator(self._model.device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        for ids, log_probs in iter_tokens(
            self._model,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            generator=generator,
        ):
            yield list(zip(ids.tolist(), log_probs.tolist(), strict=True))


def _prepare_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: its text as one string, arguments as objects.

    Raises: ConfigInvalidError for parts that are no text.
    """
    prepared = dict(message)
    if isinstance(parts := message.get("content"), list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigInvalidError(
                "messages: found content with parts that are no text, expected text: this engine "
                "has no models of images or sounds.",
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
