"""Tokenizer: what the token ids of a dataset mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
# Facts that differ only between two tokenizers, or between two uses of one. Names are no such
# fact: one tokenizer is known by the name of its repository and by the directory of a copy.
_FACTS: Final = ("sha256", "vocabulary_size", "eos_token_id", "chat_template")


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer that made the token ids of a dataset; None stands for what is not known.

    name: as people know it, such as `Qwen/Qwen3-4B`. sha256: of its tokenizer.json, in lower-case
    hex. vocabulary_size: number of ids, added tokens included. eos_token_id: the id that ends a
    generation. chat_template: the text of the template that made tokens of messages.

    Raises: ConfigInvalidError for an empty name, and for values that none of these can have.
    """

    name: str
    sha256: str | None = None
    vocabulary_size: int | None = None
    eos_token_id: int | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        _check(isinstance(self.name, str) and self.name.strip(), "name", self.name, "a name")
        is_hash = self.sha256 is None or _SHA256.fullmatch(str(self.sha256)) is not None
        _check(is_hash, "sha256", self.sha256, "64 lower-case hex digits, or None")
        size, eos = self.vocabulary_size, self.eos_token_id
        is_size = size is None or (_is_count(size) and size > 0)
        _check(is_size, "vocabulary_size", size, "1 or more, or None")
        is_id = eos is None or (_is_count(eos) and (size is None or eos < size))
        _check(is_id, "eos_token_id", eos, "an id of the vocabulary, or None")
        is_text = self.chat_template is None or isinstance(self.chat_template, str)
        _check(is_text, "chat_template", self.chat_template, "a text, or None")

    def describe(self) -> str:
        """Return the name and, if known, the first digits of the hash."""
        return self.name if self.sha256 is None else f"{self.name} (sha256 {self.sha256[:12]}...)"

    def with_facts_of(self, other: Tokenizer) -> Tokenizer:
        """Return it with what only the other knows; the name stays."""
        mine, theirs = asdict(self), asdict(other)
        return Tokenizer(
            **{name: theirs[name] if value is None else value for name, value in mine.items()}
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Tokenizer:
        """Return what to_json described; fields that it lacks are unknown.

        Raises: ConfigInvalidError.
        """
        return Tokenizer(body["name"], **{name: body.get(name) for name in _FACTS})


def find_tokenizer_mismatch(first: Tokenizer, second: Tokenizer) -> str | None:
    """Say which known facts make two tokenizers different; None if they can be one.

    Without both hashes, they need to have the same name.
    """
    facts = [name for name in _FACTS if _differ(getattr(first, name), getattr(second, name))]
    if None in (first.sha256, second.sha256) and first.name != second.name:
        facts.insert(0, "name")
    if not facts:
        return None
    return (
        f"the tokenizer is {first.describe()} and {second.describe()}, with another "
        f"{' and '.join(facts)}"
    )


def _differ(one: Any, other: Any) -> bool:
    return None not in (one, other) and bool(one != other)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(is_right: Any, name: str, found: Any, expected: str) -> None:
    if not is_right:
        raise ConfigInvalidError(
            f"tokenizer: {name}: found {found!r}, expected {expected}.", parameter=name
        )
