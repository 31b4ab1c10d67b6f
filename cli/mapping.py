"""Mapping: how a source is read, from flags and from the TOML file that keeps them.

episode_by = ["user", "session"]
order_by = ["hour", "id"]
timezone = "Europe/Berlin"

[map]
observation = ["user_*", "position", "hour"]
action = "item"

[fill]
age = 0
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from replaylake.datastore.errors import ConfigInvalidError, NotFoundError

if TYPE_CHECKING:
    from replaylake.datastore.interchange.formats.format import ReadOptions


class Gaps(StrEnum):
    """What becomes of an episode whose steps have a gap."""

    REJECT = "reject"
    SPLIT = "split"  # in capitals, as `split` is a method of texts


class OpenEnds(StrEnum):
    """What an episode without an end in the log is recorded as."""

    open = "open"
    truncated = "truncated"
    time_limit = "time-limit"


# The keys of the file by their kind of value; those that are fields of ReadOptions set these.
_TABLES: Final = ("map", "fill")
_COLUMNS: Final = ("episode_by", "order_by")
_CHOICES: Final[Mapping[str, type[StrEnum]]] = {"gaps": Gaps, "open_ends": OpenEnds}
_NUMBERS: Final = ("action_scale", "action_low", "action_high", "reward_scale")
_COUNTS: Final = ("time_limit", "max_categories")
_TEXTS: Final = ("timezone", "delimiter", "decimal", "format")
# What a shell cannot easily write.
_TAB: Final = ("tab", "\\t")
_FLAGS: Final = ("no_reward",)
KEYS: Final = (*_TABLES, *_COLUMNS, *_CHOICES, *_NUMBERS, *_COUNTS, *_TEXTS, *_FLAGS)


def resolve(flags: Mapping[str, Any], file: Path | None) -> tuple[ReadOptions, str]:
    """Return how to read a source, and the format's name; `flags` win over the file.

    `flags` have the file's keys, tables as mappings and columns as texts; None is a flag that was
    not given. Raises: NotFoundError, ConfigInvalidError for the file; typer.BadParameter for the
    flags.
    """
    from replaylake.datastore.interchange.formats.format import ReadOptions

    mapping = {} if file is None else read_mapping(file)
    flag = {key: value for key, value in flags.items() if value is not None and value is not False}
    tables = {name: {**mapping.get(name, {}), **flag.get(name, {})} for name in _TABLES}
    merged: dict[str, Any] = {**mapping, **flag, **tables}
    for ours, theirs in merged["map"].items():
        if not theirs:
            raise typer.BadParameter(
                f"found '{ours}=' without a column, expected {ours}=COLUMN.", param_hint="--map"
            )
    merged |= {name: split_columns(merged.get(name)) for name in _COLUMNS}
    if merged.get("delimiter") in _TAB:
        merged["delimiter"] = "\t"
    same_names = {f.name for f in fields(ReadOptions)} & merged.keys()
    options = ReadOptions(
        **{name: merged[name] for name in same_names},
        mapping=merged["map"],
        action_range=_range(merged.get("action_low"), merged.get("action_high")),
        reward_unknown=merged.get("no_reward", False),
    )
    # With another delimiter than the usual ones, nothing else tells that a file is CSV.
    return options, merged.get("format", "auto" if options.delimiter is None else "csv")


def iter_misspellings(mapping: Mapping[str, str]) -> Iterator[str]:
    """Say which names that a mapping gives to further columns are nearly those of fields."""
    from replaylake.datastore.interchange.formats.tabular.fields import ALIASES

    for ours, theirs in mapping.items():
        near = [] if ours in ALIASES else get_close_matches(ours, ALIASES, n=1, cutoff=0.8)
        if near:
            yield (
                f"--map {ours}={theirs}: {ours} is no field of ours, so it is kept as a further "
                f"column; for the field write --map {near[0]}={theirs}"
            )


def read_mapping(file: Path) -> dict[str, Any]:
    """Return a mapping file's keys.

    Raises: NotFoundError, ConfigInvalidError naming file and key.
    """
    try:
        mapping = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFoundError(
            f"{file}: could not be read ({error.strerror}), expected a TOML file. Check --mapping."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalidError(
            f'{file}: not TOML ({error}), expected lines such as `order_by = ["hour"]` and a '
            "table [map]."
        ) from error
    for key in mapping:
        if key not in KEYS:
            raise ConfigInvalidError(
                f"{file}: found the key {key!r}, expected one of {', '.join(KEYS)}. Correct it; "
                "columns are named in the table [map]."
            )
    return {key: _check_value(key, value, file) for key, value in mapping.items()}


def split_columns(columns: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names in `user,session`; those of a file come apart already."""
    if not columns:
        return ()
    if isinstance(columns, tuple):
        return columns
    return tuple(name.strip() for name in columns.split(","))


def _check_value(key: str, value: Any, file: Path) -> Any:
    if key in _TABLES:
        if not isinstance(value, dict):
            raise _invalid_value_error(file, key, value, f"a table [{key}]")
        return {name: _cell(f"{key}.{name}", one, file) for name, one in value.items()}
    if key in _COLUMNS:
        if isinstance(value, str):
            return split_columns(value)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _invalid_value_error(file, key, value, "a list of columns")
        return tuple(value)
    kinds: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(_NUMBERS, (int, float)),
        **dict.fromkeys(_COUNTS, (int,)),
        **dict.fromkeys(_FLAGS, (bool,)),
    }
    if type(value) not in kinds.get(key, (str,)):
        what = {"no_reward": "true or false", **dict.fromkeys((*_NUMBERS, *_COUNTS), "a number")}
        raise _invalid_value_error(file, key, value, what.get(key, "text"))
    if key in _CHOICES and value not in (choices := [one.value for one in _CHOICES[key]]):
        raise _invalid_value_error(file, key, value, f"one of {', '.join(choices)}")
    if key in _COUNTS and value < 1:
        raise _invalid_value_error(file, key, value, "1 or more")
    return value


def _cell(key: str, value: Any, file: Path) -> str:
    """Return a table's value as a flag would spell it."""
    if isinstance(value, list) and key.startswith("map."):
        if not all(isinstance(name, str) for name in value):
            raise _invalid_value_error(file, key, value, "a list of columns")
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        raise _invalid_value_error(file, key, value, "one value")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _invalid_value_error(file: Path, key: str, value: Any, expected: str) -> ConfigInvalidError:
    return ConfigInvalidError(f"{file}: {key}: found {value!r}, expected {expected}. Correct it.")


def _range(low: float | None, high: float | None) -> tuple[float, float] | None:
    if low is None and high is None:
        return None
    if low is None or high is None or low >= high:
        raise typer.BadParameter(
            f"found --action-low {low} and --action-high {high}, expected both, the low one below.",
            param_hint="--action-low",
        )
    return (low, high)
