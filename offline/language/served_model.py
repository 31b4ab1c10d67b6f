"""Served model: what an engine needs of a causal language model, texts to tokens and back.

`serve/engine` runs it behind an HTTP API, and imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from replaylake.datastore.lake.policies.manifest import LanguageSpec, describe_model
from replaylake.offline.language.chat_tokenizer import ChatTokenizer
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
        self._model, tokenizer = load_pretrained(folder, "causal language model", device=device)
        self._tokenizer = ChatTokenizer(self._model, tokenizer)
        self.stop_ids = self._tokenizer.stop_ids

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokens that the tokenizer puts around it."""
        return self._tokenizer.encode(text, adds_special=True)

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> list[int]:
        """Return the ids of a dialogue, up to where the model's answer begins.

        Raises: ConfigInvalidError if the model has no chat template, or the template refuses the
        messages.
        """
        return self._tokenizer.encode(self._tokenizer.render(messages, tools))

    def decode(self, ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Return the text of ids; special tokens such as the end's have none, unless kept."""
        return self._tokenizer.decode(ids, keeps_special=keeps_special)

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
