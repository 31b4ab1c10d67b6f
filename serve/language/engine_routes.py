"""Engine routes: which engine answers a conversation, while aliases move and canaries have shares.

A conversation stays with its arm. Engines that no arm has any more end once their calls have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from replaylake.datastore.lake.dataset import new_episode_id
from replaylake.serve.gateway.conversations import PRODUCER
from replaylake.serve.gateway.routes import CallVersion, Route
from replaylake.serve.gateway.upstream import Upstream
from replaylake.serve.language.engine_process import EngineProcess
from replaylake.serve.versions.router import Router

# Of ids until one lies in an arm, 5 us each. An arm with a smaller share than one in so many may
# lose a conversation to another after its first call.
_MAX_DRAWS: Final = 100_000


@dataclass(eq=False)
class ServedEngine:
    """An engine and the policy version that it runs.

    process: None for one that somebody else runs. num_calls: in progress.
    """

    name: str
    version: int
    reference: str
    upstream: Upstream
    url: str
    process: EngineProcess | None = None
    num_calls: int = 0

    def stop(self) -> None:
        """End the process, if it is ours."""
        if self.process is not None:
            self.process.stop()


class EngineRoutes:
    """The engines of the arms of a router, for the event loop in which it is made."""

    def __init__(self, router: Router[ServedEngine]) -> None:
        """Follow the router: when an arm changes, its engine before is stopped after its calls."""
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._engines = {arm.served for arm in router.arms}
        self._stops: set[asyncio.Future[None]] = set()
        router.on_change = lambda: self._call_soon(self._retire)

    @property
    def is_split(self) -> bool:
        return len(self._router.arms) > 1

    @property
    def failure(self) -> str | None:
        for arm in self._router.arms:
            process = arm.served.process
            if process is not None and not process.is_ready:
                served = arm.served
                return f"the engine of {served.name}:{served.version} is being started again"
        return None

    def begin(self, episode: str | None) -> Route:
        return self._begin(self._router.find_arm(episode) if self.is_split else 0)

    def begin_other(self) -> Route:
        return self._begin(0)

    def close(self) -> None:
        """Close every connection; engines are stopped by whoever started them."""
        for engine in self._engines:
            engine.upstream.close()

    def _begin(self, number: int) -> Route:
        arm = self._router.arms[number]
        engine = arm.served
        self._engines.add(engine)
        engine.num_calls += 1
        version = CallVersion(engine.name, engine.version, engine.reference, arm.weight)

        def make_episode_id() -> str:
            # Its hash decides the arm of all later calls: also after a restart.
            for _ in range(_MAX_DRAWS):
                episode_id = new_episode_id(PRODUCER)
                if not self.is_split or self._router.find_arm(episode_id) == number:
                    break
            return episode_id

        def end() -> None:
            engine.num_calls -= 1
            self._retire()

        return Route(engine.upstream, engine.url, version, make_episode_id, end)

    def _retire(self) -> None:
        """Stop the engines that no arm has and no call uses."""
        served = {arm.served for arm in self._router.arms}
        self._engines |= served
        for engine in self._engines - served:
            if engine.num_calls == 0:
                self._engines.discard(engine)
                engine.upstream.close()
                stop = self._loop.run_in_executor(None, engine.stop)
                self._stops.add(stop)
                stop.add_done_callback(self._stops.discard)

    def _call_soon(self, function: Callable[[], None]) -> None:
        """Call a function in the event loop; from the thread that follows aliases."""
        with suppress(RuntimeError):  # the loop has ended: all engines are stopped
            self._loop.call_soon_threadsafe(function)
