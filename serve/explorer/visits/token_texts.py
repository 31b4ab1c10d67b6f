"""Texts of token ids: the tokenizers that an explorer was given, and which dataset each is of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.interchange.export.dialogue import read_token_texts


@dataclass(frozen=True)
class _Vocabulary:
    sha256: str
    texts: Sequence[str | None]


class TokenTexts:
    """The texts of ids in some `tokenizer.json`. A lake stores what a tokenizer is, not its texts.

    Raises: ConfigInvalidError for a file that is none. Cost: the vocabularies in memory.
    """

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self._vocabularies = [
            _Vocabulary(texts=read_token_texts(path, None), sha256=_hash_file(path))
            for path in paths
        ]

    def find(self, tokenizer: Tokenizer | None) -> Sequence[str | None]:
        """Return the text of each id of a dataset whose tokenizer this is; nothing if unknown.

        A dataset that states the sha256 of its tokenizer has the texts of that one alone. One that
        states none has those of the only tokenizer that was given.
        """
        stated = None if tokenizer is None else tokenizer.sha256
        fitting = [one for one in self._vocabularies if stated in (None, one.sha256)]
        return fitting[0].texts if len({one.sha256 for one in fitting}) == 1 else ()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
