"""Live pages: what changes on a page of running work, sent as server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html. Streams of one address and reader
share what is made for them, so that a page costs the same in one window and in thirty. Readers
share nothing: forms have the token of a session and the name of a reader.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from replaylake.datastore.errors import ReplayLakeError
from replaylake.serve.messages import RETRY_AFTER_S, RequestRefusedError
from replaylake.serve.pages.markup import Markup, join, tag

_logger = logging.getLogger(__name__)
EVENT_STREAM: Final = "text/event-stream"
# The parameter of an address, and the name in a page, of what its reader has.
SEEN: Final = "seen"
_MAX_STREAMS: Final = 32
# What changes is sent to a reader at this rate at most, on average.
_CHARS_PER_S: Final = 128 << 10
# How soon a stream notices that the explorer stops.
_TICK_S: Final = 0.25
# Proxies close what is silent for longer, many after a minute.
_KEEP_ALIVE_S: Final = 15.0


@dataclass(frozen=True)
class Rendering:
    """A page in parts: its heading, and its panels, each with its title.

    refresh_s: after how many seconds it is made again; None: it changes no more.
    """

    title: str
    heading: Markup
    panels: tuple[tuple[str, Markup], ...]
    refresh_s: float | None

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """A short digest of each panel, by which a reader says which ones it has."""
        return tuple(
            hashlib.blake2b(panel.encode("utf-8", "replace"), digest_size=8).hexdigest()
            for _, panel in self.panels
        )

    @property
    def marks(self) -> Markup:
        """What a page has in it of its digests, for the script."""
        return tag("meta", name=SEEN, content=".".join(self.digests))

    def write(self, seen: frozenset[str]) -> str:
        """Return the page for the script; of a panel that its reader has seen, the title alone."""
        panels = [
            tag("section", tag("h2", title), data_same=True) if digest in seen else panel
            for (title, panel), digest in zip(self.panels, self.digests, strict=True)
        ]
        return join(
            tag("title", f"{self.title} - ReplayLake"),
            self.marks,
            tag("main", self.heading, tag("div", panels, class_="panels")),
        )


Render = Callable[[], Awaitable[Rendering]]


@dataclass
class _Shared:
    """What the streams of one address and reader share. number: of the newest rendering, from 1."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_streams: int = 0
    number: int = 0
    rendering: Rendering | None = None
    events: dict[frozenset[str], str] = field(default_factory=dict)
    due: float = 0.0

    @property
    def is_last(self) -> bool:
        """Whether the page changes no more."""
        return self.rendering is not None and self.rendering.refresh_s is None

    async def refresh(self, render: Render) -> None:
        """Make the page again where it is due, and count it where it differs."""
        async with self.lock:
            start = time.monotonic()
            if self.is_last or start < self.due:
                return
            made, before = await render(), self.rendering
            now = time.monotonic()
            old = frozenset(() if before is None else before.panels)
            size = sum(len(panel) for title, panel in made.panels if (title, panel) not in old)
            # What takes long is made less often, half of the time at most, and what is large, too.
            self.due = now + max(made.refresh_s or 0.0, now - start, size / _CHARS_PER_S)
            if made != before:
                self.rendering = made
                self.number += 1
                self.events.clear()

    def write(self, seen: frozenset[str]) -> str:
        """Return the event of the newest rendering for a reader that has seen panels before."""
        assert self.rendering is not None, "written after it was made"
        event = self.events.get(seen)
        if event is None:
            event = f"event: page\ndata: {json.dumps(self.rendering.write(seen))}\n\n"
            self.events[seen] = event
        return event


class LivePages:
    """The streams of one explorer, all in one event loop.

    stopping: set from any thread, it ends all streams.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._num = 0
        self._shared: dict[tuple[str, Hashable], _Shared] = {}

    def follow(self, address: str, reader: Hashable, render: Render, seen: str) -> Response:
        """Return a stream of a page: event `page` with HTML as JSON, and `end` after the last.

        reader: whom the page is made for. Streams of one address and reader share its parts. seen:
        digests of the panels that the reader has, with dots between them.
        An error of `render` ends the stream. Raises: RequestRefusedError with too many streams.
        """
        if self._num >= _MAX_STREAMS:
            message = (
                f"{self._num} pages are followed, as many as this explorer follows; retry in "
                f"{RETRY_AFTER_S} s"
            )
            raise RequestRefusedError(503, "server", message)
        return _Stream(self, address, reader, render, frozenset(seen.split(".")))

    async def run(
        self,
        address: str,
        reader: Hashable,
        render: Render,
        seen: frozenset[str],
        left: asyncio.Event,
        send: Callable[[str], Awaitable[None]],
    ) -> None:
        """Send events until the page ends, its reader has left, or the explorer stops."""
        shared = self._shared.setdefault((address, reader), _Shared())
        self._num += 1
        shared.num_streams += 1
        sent, sent_at = 0, time.monotonic()
        try:
            while not (left.is_set() or self.stopping.is_set()):
                await shared.refresh(render)
                if shared.number != sent:
                    sent, sent_at = shared.number, time.monotonic()
                    rendering, event = shared.rendering, shared.write(seen)
                    await send(event)
                    seen = frozenset(() if rendering is None else rendering.digests)
                    if rendering is not None and rendering.refresh_s is None:
                        await send("event: end\ndata:\n\n")
                        return
                elif time.monotonic() - sent_at >= _KEEP_ALIVE_S:
                    sent_at = time.monotonic()
                    await send(":\n\n")
                await _wait(left, _TICK_S)
        except ReplayLakeError:
            # The script reads the page instead, and shows what it says.
            return
        except Exception:
            _logger.exception("error while %s was followed", address)
        finally:
            self._num -= 1
            shared.num_streams -= 1
            if not shared.num_streams:
                del self._shared[address, reader]


class _Stream(Response):
    """The response of one stream, which ends when its reader leaves."""

    def __init__(
        self,
        pages: LivePages,
        address: str,
        reader: Hashable,
        render: Render,
        seen: frozenset[str],
    ) -> None:
        super().__init__(media_type=EVENT_STREAM)
        del self.headers["content-length"]
        # nginx holds back what it passes on otherwise.
        self.headers["x-accel-buffering"] = "no"
        self._pages, self._address, self._reader = pages, address, reader
        self._render, self._seen = render, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.Event()

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        async def write(text: str) -> None:
            body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            await send(body)

        listener = asyncio.create_task(listen())
        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            await self._pages.run(
                self._address, self._reader, self._render, self._seen, left, write
            )
            if not left.is_set():
                await send({"type": "http.response.body", "body": b""})
        finally:
            listener.cancel()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
