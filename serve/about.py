"""GET /policy, /livez, /readyz and /metrics: what a server says of itself."""

from __future__ import annotations

from collections.abc import Callable

from replaylake.datastore.spaces import to_json
from replaylake.serve.exchange import Answer, Request, RequestRefused, json_answer
from replaylake.serve.metrics import CONTENT_TYPE, Metrics
from replaylake.serve.serving import Serving


class About:
    """The endpoints that change nothing."""

    def __init__(
        self, serving: Callable[[], Serving], is_ready: Callable[[], bool], metrics: Metrics
    ) -> None:
        self._serving, self._is_ready, self._metrics = serving, is_ready, metrics

    async def policy(self, request: Request) -> Answer:
        """Say which policy answers."""
        serving = self._serving()
        served, exploration = serving.router.one, serving.exploration
        spec = served.policy.spec
        return json_answer(
            {
                "policy": served.name,
                "version": served.version,
                "reference": served.reference,
                "head": spec.head,
                "observation_space": to_json(spec.observation_space),
                "action_space": to_json(spec.action_space),
                "encoding": None if spec.encoding is None else spec.encoding.to_json(),
                "explore": {
                    "epsilon": exploration.epsilon,
                    "temperature": exploration.temperature,
                }
                if exploration.is_on
                else None,
                "log_to": serving.log.dataset.name if serving.log else None,
                "manifest": dict(served.about),
            }
        )

    async def livez(self, request: Request) -> Answer:
        """Answer while the event loop turns."""
        return json_answer({"alive": True})

    async def readyz(self, request: Request) -> Answer:
        """Answer 200 once requests can be answered and logged, else 503."""
        ready = self._is_ready()
        return json_answer({"ready": ready}, 200 if ready else 503)

    async def metrics_page(self, request: Request) -> Answer:
        """Return the Prometheus text."""
        try:
            log = self._serving().log
        except RequestRefused:
            log = None  # the counts of a worker that is starting are of use all the same
        if log is not None:
            self._metrics.set_pending("decisions", log.decisions.num_pending)
            self._metrics.set_pending("rewards", log.rewards.num_pending)
        return Answer(200, self._metrics.render(), CONTENT_TYPE)
