"""Commit infos: what an ingest's commits keep of a source that may name people, and hiding it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from replaylake.datastore.storage.log.commit_log import EARLIER
from replaylake.datastore.storage.table.table import Table

HIDDEN: Final = "<deleted>"
# The names of a source's files, how it was read (`fill` has values of columns), where in its
# files a check found something, a scorer's condition and prompt, and who labeled.
_NAMING: Final = ("source_names", "read_as", "checks", "scored", "labeled")


def hide_values(table: Table, values: Collection[str]) -> int:
    """Replace names of files and values of options that hold one of these; return how many commits.

    A text holds a value where that stands in it between other characters than letters and digits.
    """
    known = {value.casefold() for value in values if value}

    def change(info: dict[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = {
            name: _hide(info[name], known) for name in _NAMING if name in info
        }
        if EARLIER in info:
            hidden[EARLIER] = [change(one) for one in info[EARLIER]]
        return {**info, **hidden}

    return len(table.log.rewrite_infos(change)) if known else 0


def _hide(value: Any, known: Collection[str]) -> Any:
    if isinstance(value, str):
        return HIDDEN if _holds(value.casefold(), known) else value
    if isinstance(value, Mapping):
        return {_hide(key, known): _hide(sub, known) for key, sub in value.items()}
    return [_hide(sub, known) for sub in value] if isinstance(value, list | tuple) else value


def _holds(text: str, known: Collection[str]) -> bool:
    """Whether a part of the text between two bounds of words is a value. Names are short."""
    bounds = [
        at
        for at in range(len(text) + 1)
        if at in (0, len(text)) or not (text[at - 1].isalnum() and text[at].isalnum())
    ]
    return any(text[a:b] in known for i, a in enumerate(bounds) for b in bounds[i + 1 :])
