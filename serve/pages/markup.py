"""Markup: HTML built from calls, in which every text is escaped.

A value becomes HTML only as `Markup`, which `tag` alone makes: so a name, an episode id or a
message from data is always text, whatever it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, TypeAlias

_VOID: Final = frozenset({"br", "hr", "img", "input", "link", "meta"})
# Attributes that a browser follows or runs. A link leads into these pages or to https.
_LINKS: Final = frozenset({"action", "href", "src", "xlink:href"})
_LINK_STARTS: Final = ("/", "./", "#", "?", "https://", "data:image/png;base64,")
# A browser reads U+0000 as the replacement character, and an isolated half of a surrogate pair has
# no bytes in UTF-8.
_UNENCODABLE: Final = {0: "\ufffd", **{half: "\ufffd" for half in range(0xD800, 0xE000)}}


class Markup(str):
    """HTML that is written as it is. Only `tag`, `join`, `join_list` and `data_block` make it."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Markup | Iterable[Child] | None"


def tag(name: str, /, *children: Child, **attributes: Any) -> Markup:
    """Return an element. Texts in it are escaped; None is left out, an iterable is flattened.

    attributes: `class_` is class and `for_` is for; an underscore within a name is a hyphen. True
    is an attribute without a value; None and False leave it out.

    Raises: ValueError for an attribute that runs code or holds style, which the pages'
    Content-Security-Policy refuses, and for a link to another scheme.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        if attribute.startswith("on") or attribute == "style":
            raise ValueError(f"attribute {attribute}: expected none that runs code or holds style.")
        if value is True:
            parts.append(f" {attribute}")
            continue
        text = str(value).translate(_UNENCODABLE)
        if attribute in _LINKS and not text.startswith(_LINK_STARTS):
            raise ValueError(f"{attribute}={text!r}: expected a link that starts with / or https.")
        parts.append(f' {attribute}="{escape(text)}"')
    parts.append(">")
    if name not in _VOID:
        parts += (join(*children), f"</{name}>")
    return Markup("".join(parts))


def join(*children: Child) -> Markup:
    """Return children one after the other, each text escaped."""
    return Markup("".join(_render(child) for child in children))


def join_list(children: Sequence[Child], separator: str = ", ") -> Markup:
    """Return children with a text between each two."""
    return join(*([separator if place else None, child] for place, child in enumerate(children)))


def data_block(identity: str, value: Any) -> Markup:
    """Return a block of JSON for the page's script, which a browser neither shows nor runs.

    Raises: ValueError for NaN and infinities, which JSON lacks.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{escape(identity)}">{text}</script>')


def _render(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child.translate(_UNENCODABLE), quote=False)
    if isinstance(child, int | float):
        return str(child)
    return "".join(map(_render, child))
