"""Tokenizer: which two are one, and what it refuses to state."""

from __future__ import annotations

from typing import Any

import pytest

from replaylake.datastore.episodes.tokenizer import Tokenizer, find_tokenizer_mismatch
from replaylake.datastore.errors import ConfigInvalidError

ONE, OTHER = "1" * 64, "2" * 64


@pytest.mark.parametrize(
    ("first", "second", "facts"),
    [
        ({"sha256": ONE}, {"sha256": ONE, "name": "a copy"}, None),
        ({"sha256": ONE}, {"sha256": OTHER}, "sha256"),
        ({}, {"name": "another"}, "name"),
        ({}, {"sha256": ONE, "vocabulary_size": 8}, None),
        ({"vocabulary_size": 8}, {"vocabulary_size": 9}, "vocabulary_size"),
        ({"eos_token_id": 2}, {"eos_token_id": 3}, "eos_token_id"),
        ({"chat_template": "a"}, {"chat_template": "b"}, "chat_template"),
    ],
)
def test_mismatch(first: dict[str, Any], second: dict[str, Any], facts: str | None) -> None:
    pair = [Tokenizer(**({"name": "small"} | one)) for one in (first, second)]
    found = find_tokenizer_mismatch(*pair)
    assert (found is None) if facts is None else (found or "").endswith(f"another {facts}")


@pytest.mark.parametrize(
    "facts",
    [
        {"name": " "},
        {"sha256": "12ab"},
        {"vocabulary_size": 0},
        {"eos_token_id": -1},
        {"vocabulary_size": 4, "eos_token_id": 4},
        {"chat_template": 3},
    ],
)
def test_refusals(facts: dict[str, Any]) -> None:
    name = [*facts][-1]
    with pytest.raises(ConfigInvalidError, match=f"tokenizer: {name}: found") as error:
        Tokenizer(**({"name": "small"} | facts))
    assert error.value.parameter == name


def test_json() -> None:
    whole = Tokenizer("small", ONE, 8, 2, "{{ messages }}")
    assert Tokenizer.from_json(whole.to_json()) == whole
    assert Tokenizer.from_json({"name": "small"}) == Tokenizer("small")
    assert Tokenizer("other", vocabulary_size=8).with_facts_of(whole) == Tokenizer(
        "other", ONE, 8, 2, "{{ messages }}"
    )
