"""Config: a TOML file and `--set key=value`, parsed once into one flat mapping of options.

What the keys mean, and which there are, is the business of the dataclass that they are read into
(offline/learning/options.py), so that the command line and Python refuse the same things.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import typer

from replaylake.cli.options import parse_pairs
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError

_BARE_WORD: Final = re.compile(r"[A-Za-z_][\w.:/-]*")


def read_options(file: Path | None, assignments: Sequence[str]) -> dict[str, Any]:
    """Return the file's keys with the assignments on top.

    Raises: NotFoundError, ConfigInvalidError for a file that is not TOML, typer.BadParameter for a
    text that assigns nothing.
    """
    options = {} if file is None else _read_toml(file)
    for key, text in parse_pairs(assignments, "--set").items():
        options[key] = parse_literal(text, "--set", key)
    return options


def parse_literal(text: str, option: str, key: str) -> Any:
    """Return the value of a TOML literal; a bare word stands for itself as a string.

    Raises: typer.BadParameter if it is neither.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
        if list(parsed) == ["value"]:
            return parsed["value"]
    except tomllib.TOMLDecodeError:
        if _BARE_WORD.fullmatch(text):
            return text
    raise typer.BadParameter(
        f"{key}: found {text!r}, expected a TOML value such as 3, 0.5, true, [64, 64] or 'text'.",
        param_hint=option,
    )


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFoundError(
            f"{file}: could not be read ({error.strerror}), expected a TOML file. Check --config."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalidError(
            f"{file}: not TOML ({error}), expected lines such as `batch_size = 256`."
        ) from error
