"""TOML files, --set and --param: one parser, typed as TOML types them."""

import math
from datetime import date
from pathlib import Path

import pytest
import typer

from replaylake.cli.config import parse_literal, read_options
from replaylake.cli.options import parse_pairs
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("1_000", 1000),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("[64, 64]", [64, 64]),
        ("'a b'", "a b"),
        ('"gaussian"', "gaussian"),
        ("gaussian", "gaussian"),
        ("cuda:0", "cuda:0"),
        ("2026-01-31", date(2026, 1, 31)),
        ("{a = 1}", {"a": 1}),
    ],
)
def test_a_value_has_its_toml_type(text: str, value: object) -> None:
    parsed = parse_literal(text, "--set", "key")
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_value_may_be_infinite() -> None:
    assert parse_literal("inf", "--set", "key") == math.inf


@pytest.mark.parametrize("text", ["[1", "a b", "1\nother = 2", "3 # three apples\nx=1", "=", ""])
def test_what_is_no_value_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a TOML value"):
        parse_literal(text, "--set", "key")


def test_set_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bc.toml"
    file.write_text("updates = 100\nhidden_sizes = [32]\n")
    options = read_options(file, ["updates=200", "head=gaussian"])
    assert options == {"updates": 200, "hidden_sizes": [32], "head": "gaussian"}


def test_a_file_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.toml: could not be read"):
        read_options(tmp_path / "none.toml", [])
    file = tmp_path / "bad.toml"
    file.write_text("updates: 3\n")
    with pytest.raises(ConfigInvalidError, match=r"bad\.toml: not TOML .*line 1"):
        read_options(file, [])


def test_pairs_keep_what_follows_the_first_equals_sign() -> None:
    assert parse_pairs(["a=b=c", " d = e "], "--map") == {"a": "b=c", "d": "e"}


@pytest.mark.parametrize(("texts", "said"), [(["a"], "key=value"), (["a=1", "a=2"], "twice")])
def test_pairs_refused(texts: list[str], said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        parse_pairs(texts, "--map")
