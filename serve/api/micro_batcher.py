"""Together: requests of one observation each that have come at the same time, acted for as one.

A graph takes hardly longer for sixteen observations than for one, and so do drawing and the write
to the log. Nobody waits for others to come: only what is there already, because several sockets
had something to read when the event loop looked, is taken together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

from replaylake.datastore.episodes.spaces import Array
from replaylake.serve.api.act_request import ActRequest
from replaylake.serve.api.latency_estimate import LatencyEstimate
from replaylake.serve.messages import Response
from replaylake.serve.serving_state import ServingState

MAX_BATCH: Final = 32


@dataclass(slots=True)
class PendingRequest:
    """A request of one observation: raw as it came, values [1, *obs]; num_bytes of its body."""

    request: ActRequest
    raw: Any
    values: Array
    latency: LatencyEstimate
    num_bytes: int


BatchHandler = Callable[[ServingState, Sequence[PendingRequest]], Sequence[Response | Exception]]
"""Answers each of them, or says what is wrong with it. Raises what is wrong with all."""


class MicroBatcher:
    """Those that wait for the last of them."""

    def __init__(self, work: BatchHandler, on_wait: Callable[[float], None]) -> None:
        """on_wait: called with the seconds that a measured request waited for its batch."""
        self._work, self._on_wait = work, on_wait
        self._serving: ServingState | None = None
        self._singles: list[PendingRequest] = []
        self._futures: list[asyncio.Future[Response]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._singles

    def answer(
        self,
        serving: ServingState,
        single: PendingRequest,
        num_behind: int,
        is_measured: bool = False,
    ) -> asyncio.Future[Response]:
        """Return the response to a request, answered with those that wait.

        That is once all `num_behind` it have come. The future may raise RequestRefusedError or
        StorageError.
        """
        if serving is not self._serving or len(self._singles) >= MAX_BATCH:
            self._flush()
            self._serving = serving
        loop = asyncio.get_running_loop()
        if not self._singles:
            # Should those behind turn out to be none of ours. By then all of them have begun.
            loop.call_soon(self._flush)
        future: asyncio.Future[Response] = loop.create_future()
        if is_measured:
            start = perf_counter()
            future.add_done_callback(lambda _: self._on_wait(perf_counter() - start))
        self._singles.append(single)
        self._futures.append(future)
        if not num_behind:
            self._flush()
        return future

    def _flush(self) -> None:
        serving, singles, futures = self._serving, self._singles, self._futures
        self._singles, self._futures = [], []
        if serving is None or not singles:
            return
        try:
            results: Sequence[Response | Exception] = self._work(serving, singles)
        except Exception as error:
            results = [error] * len(singles)
        for future, one in zip(futures, results, strict=True):
            if future.done():
                continue  # cancelled: its time was up
            if isinstance(one, Exception):
                future.set_exception(one)
            else:
                future.set_result(one)
