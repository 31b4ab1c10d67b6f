"""Names and identifiers: what a dataset, policy or alias may be called, and sortable unique ids."""

from __future__ import annotations

import base64
import os
import re
import time
from typing import Final

from replaylake.datastore.errors import InvalidNameError

# The folder of what is the lake's own: policies, runs, the log of both.
LAKE_ROOT: Final = "_lake"
_DATASET: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
_POLICY: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_TAG: Final = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
_VERSION: Final = re.compile(r"[0-9]{1,18}")
_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CATALOGS: Final = {
    "information_schema",
    "lake",
    "main",
    "memory",
    "pg_catalog",
    "system",
    "temp",
}
# The words that DuckDB 2.0 lists as reserved, type_function or column_name in duckdb_keywords():
# a schema of such a name would need quotes in every query.
_SQL_KEYWORDS: Final = set(
    """
    all analyse analyze and anti any array as asc asof asymmetric at authorization between bigint
    binary bit boolean both by case cast char character check coalesce collate collation column
    columns concurrently constraint create cross date dec decimal default deferrable desc describe
    distinct do else end except exists extract false fetch float for foreign freeze from full
    generated glob grant group grouping grouping_id having ilike in initially inner inout int
    integer intersect interval into is isnull join lambda lateral leading left like limit map
    national natural nchar none not notnull null nullif numeric offset on only or order out outer
    overlaps overlay pivot pivot_longer pivot_wider placing position positional precision primary
    qualify real references returning right row select semi setof show similar smallint some struct
    substring summarize symmetric table tablesample then time timestamp to trailing treat trim true
    try_cast tuple union unique unpack unpivot using values varchar variadic verbose when where
    window with xmlattributes xmlconcat xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi
    xmlroot xmlserialize xmltable
    """.split()  # noqa: SIM905 - a literal of these would be a hundred lines
)
_CROCKFORD: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_ULID: Final = re.compile(rf"[{_CROCKFORD}]{{26}}")
# Two digits at a time take half of the time.
_PAIRS: Final = [first + second for first in _CROCKFORD for second in _CROCKFORD]
_TO_CROCKFORD: Final = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", _CROCKFORD.encode())


def check_dataset_name(name: str) -> str:
    """Return the name if SQL can say it unquoted. Raises: InvalidNameError."""
    if not _DATASET.fullmatch(name) or name in _CATALOGS or name in _SQL_KEYWORDS:
        raise InvalidNameError(
            f"dataset name: found {name!r}, expected [a-z][a-z0-9_]*, at most 63 characters, and "
            "no SQL keyword or catalog name. Choose another name."
        )
    return name


def parse_snapshot(text: str) -> tuple[str, int | str | None]:
    """Split `NAME` (None: newest), `NAME@VERSION` or `NAME@TAG`. Raises: InvalidNameError."""
    name, at, version = text.partition("@")
    check_dataset_name(name)
    if not at:
        return name, None
    number = parse_version(version)
    if number is not None:
        return name, number
    try:
        return name, check_tag_name(version)
    except InvalidNameError as error:
        raise InvalidNameError(
            f"dataset {text[:80]!r}: found {version[:40]!r} after @, expected a version such as "
            f"{name}@12 or a tag. `replaylake history {name}` lists both."
        ) from error


def parse_version(text: str) -> int | None:
    """Return the number of a version, up to 18 ASCII digits; None for any other text."""
    return int(text) if _VERSION.fullmatch(text) else None


def check_tag_name(tag: str) -> str:
    """Return the name of a tag. Raises: InvalidNameError."""
    if not _TAG.fullmatch(tag) or ".." in tag:
        raise InvalidNameError(
            f"tag: found {tag!r}, expected [a-z][a-z0-9_.-]*, at most 63 characters, without `..`. "
            "Choose another name."
        )
    return tag


def check_policy_name(name: str) -> str:
    """Return the name of a policy.

    Raises: InvalidNameError, also for the reserved run and random.
    """
    if not _POLICY.fullmatch(name) or name in ("run", "random"):
        raise InvalidNameError(
            f"policy name: found {name!r}, expected [a-z][a-z0-9_-]*, at most 63 characters, other "
            "than the reserved words run and random. Choose another name."
        )
    return name


def check_alias(alias: str) -> str:
    """Return the name of an alias. Raises: InvalidNameError."""
    if not _POLICY.fullmatch(alias):
        raise InvalidNameError(
            f"alias: found {alias!r}, expected [a-z][a-z0-9_-]*, at most 63 characters."
        )
    return alias


def is_sql_keyword(name: str) -> bool:
    """Whether SQL takes a name for a word of its own, unless it is in double quotes."""
    return name.lower() in _SQL_KEYWORDS


def is_column_name(name: str) -> bool:
    """Whether a further column may have this name."""
    return _COLUMN.fullmatch(name) is not None


def new_ulid(*, after: str = "") -> str:
    """Return 26 characters, 48 bits of milliseconds and 80 random ones: sorts by time of making.

    It also sorts after `after`, the name of a file that begins with a ULID, if the clock was set
    back since: for files whose names say which is the later. Other names have no effect.
    """
    moment_ms = time.time_ns() // 1_000_000
    if after and _ULID.match(after):
        moment_ms = max(moment_ms, _decode_crockford(after[:10]) + 1)
    return _encode_crockford(moment_ms << 80 | int.from_bytes(os.urandom(10), "big"))


def new_ulids(num: int) -> list[str]:
    """Return so many at once, of one millisecond: under 1 us each in place of 5 (2026-11)."""
    moment = _encode_crockford((time.time_ns() // 1_000_000) << 80)[:10]
    # Ten random bytes are sixteen digits of base 32, spelled otherwise.
    digits = base64.b32encode(os.urandom(10 * num)).translate(_TO_CROCKFORD).decode()
    return [moment + digits[start : start + 16] for start in range(0, 16 * num, 16)]


def content_ulid(sha256: str) -> str:
    """Return 26 characters of a ULID's form, the same for the same content."""
    return _encode_crockford(int(sha256[:32], 16))


def _decode_crockford(digits: str) -> int:
    number = 0
    for digit in digits:
        number = number << 5 | _CROCKFORD.index(digit)
    return number


def _encode_crockford(number: int) -> str:
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -1, -10)])
