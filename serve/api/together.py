"""Together: requests of one observation each that have come at the same time, acted for as one.

A graph takes hardly longer for sixteen observations than for one, and so do drawing and the write
to the log. Nobody waits for others to come: only what is there already, because several sockets
had something to read when the event loop looked, is taken together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.episodes.spaces import Array
from replaylake.serve.api.act_request import ActRequest
from replaylake.serve.api.pace import Pace
from replaylake.serve.exchange import Answer
from replaylake.serve.serving import Serving

MAX_TOGETHER: Final = 32


@dataclass(slots=True)
class Single:
    """A request of one observation: raw as it came, values [1, *obs]; num_bytes of its body."""

    asked: ActRequest
    raw: Any
    values: Array
    pace: Pace
    num_bytes: int


Work = Callable[[Serving, Sequence[Single]], Sequence[Answer | Exception]]
"""Answers each of them, or says what is wrong with it. Raises what is wrong with all."""


class Together:
    """Those that wait for the last of them."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._serving: Serving | None = None
        self._singles: list[Single] = []
        self._futures: list[asyncio.Future[Answer]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._singles

    async def answer(self, serving: Serving, single: Single, num_behind: int) -> Answer:
        """Answer a request with those that wait, once all `num_behind` it have come.

        Raises: RequestRefused, StorageFailed.
        """
        if serving is not self._serving or len(self._singles) >= MAX_TOGETHER:
            self._work_all()
            self._serving = serving
        loop = asyncio.get_running_loop()
        if not self._singles:
            # Should those behind turn out to be none of ours. By then all of them have begun.
            loop.call_soon(self._work_all)
        future: asyncio.Future[Answer] = loop.create_future()
        self._singles.append(single)
        self._futures.append(future)
        if not num_behind:
            self._work_all()
        return await future

    def _work_all(self) -> None:
        serving, singles, futures = self._serving, self._singles, self._futures
        self._singles, self._futures = [], []
        if serving is None or not singles:
            return
        try:
            found: Sequence[Answer | Exception] = self._work(serving, singles)
        except Exception as error:
            found = [error] * len(singles)
        for future, one in zip(futures, found, strict=True):
            if future.done():
                continue  # cancelled: its time was up
            if isinstance(one, Exception):
                future.set_exception(one)
            else:
                future.set_result(one)
