"""Frame of a server's pages: the document around panels, the files it loads, and its headers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from replaylake.datastore.version import VERSION
from replaylake.serve.pages.markup import Child, Markup, tag

HTML: Final = "text/html; charset=utf-8"
# A browser loads and runs what the server itself has: no script, style or frame of another origin,
# and none that is written into a page.
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
# Styles that every page has, in the order in which they apply.
FRAME_FILES: Final = ("page.css", "frame.css", "icon.svg")
_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True)
class StaticFile:
    """A file that pages load. digest: of its content, for an address that changes with it."""

    name: str
    content: bytes
    media_type: str
    digest: str


def read_static(package: str, names: Sequence[str]) -> Iterator[StaticFile]:
    """Yield files of a package, such as `replaylake.serve.pages`, by their names."""
    folder = files(package)
    for name in names:
        content = folder.joinpath(name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:12]
        short = name.rpartition("/")[2]
        yield StaticFile(short, content, _TYPES[short.rpartition(".")[2]], digest)


@dataclass(frozen=True)
class Entry:
    """A page that the header of every page leads to."""

    name: str
    address: str
    is_current: bool = False


def write_document(
    title: str,
    content: Child,
    *,
    assets: Mapping[str, str],
    home: str,
    entries: Sequence[Entry],
    where: str,
    head: Child = None,
    footer: Child = None,
) -> str:
    """Return a whole page.

    assets: the addresses of files by their names: styles and scripts are loaded in this order.
    home: the address of the first page; where: what the pages are of, in the header's corner.
    """
    loaded = []
    for name, address in assets.items():
        if name.endswith(".css"):
            loaded.append(tag("link", rel="stylesheet", href=address))
        elif name.endswith(".js"):
            loaded.append(tag("script", src=address, defer=True))
        else:
            loaded.append(tag("link", rel="icon", href=address, type="image/svg+xml"))
    links = [
        tag("a", one.name, href=one.address, aria_current="page" if one.is_current else None)
        for one in entries
    ]
    document = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{title} - ReplayLake"),
            loaded,
            head,
        ),
        tag(
            "body",
            tag("a", "Skip to content", href="#content", class_="skip"),
            tag(
                "header",
                tag("a", "ReplayLake", href=home, class_="brand"),
                tag("nav", links, aria_label="Sections"),
                tag("span", where, class_="where", title=where),
                class_="top",
            ),
            tag("main", content, id="content"),
            tag("footer", tag("span", f"ReplayLake {VERSION}"), footer),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"


def write_heading(
    title: str,
    *,
    tools: Child = None,
    lead: Child = None,
    facts: Sequence[tuple[str, Child]] = (),
) -> list[Child]:
    """Return the head of a page: its title with controls beside it, a lead, and named facts."""
    return [
        tag("div", tag("h1", title), tools, class_="title"),
        None if lead is None else tag("p", lead, class_="lead"),
        write_facts(facts) if facts else None,
    ]


def write_facts(facts: Sequence[tuple[str, Child]], *, is_small: bool = False) -> Markup:
    """Return named values beside each other."""
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts]
    return tag("dl", items, class_="facts small" if is_small else "facts")


def write_panel(
    title: str,
    *content: Child,
    note: Child = None,
    is_wide: bool = True,
    shows_title: bool = True,
    identity: str | None = None,
) -> Markup:
    """Return a part of a page with a heading.

    is_wide: whether it takes the whole width. shows_title: whether the heading is seen, or only
    heard.
    """
    return tag(
        "section",
        tag("h2", title, class_=None if shows_title else "unseen"),
        None if note is None else tag("p", note, class_="note"),
        content,
        class_="panel wide" if is_wide else "panel",
        id=identity,
    )
