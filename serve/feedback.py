"""POST /feedback: what a decision led to."""

from __future__ import annotations

from collections.abc import Callable

from replaylake.serve.bodies import parse_feedback
from replaylake.serve.decision_log import Clock
from replaylake.serve.exchange import Answer, Request, RequestRefused, json_answer
from replaylake.serve.metrics import Metrics
from replaylake.serve.serving import Serving


class FeedbackEndpoint:
    """Writes a reward for one of our decisions; the join drops repeats."""

    def __init__(self, serving: Callable[[], Serving], metrics: Metrics) -> None:
        self._serving, self._metrics = serving, metrics
        self._clock = Clock()

    async def __call__(self, request: Request) -> Answer:
        """Answer one request. Raises: RequestRefused, StorageFailed."""
        serving = self._serving()
        given = parse_feedback(request.body, serving.router.one.policy.spec)
        if serving.log is None:
            raise RequestRefused(
                404, "decision_id", "a server that logs nothing", "one started with --log-to"
            )
        decision = serving.signer.read(given.decision_id)
        if decision is None:
            expected = f"one that /act answered for dataset {serving.log.dataset.name}"
            raise RequestRefused(404, "decision_id", "an id that is not ours", expected)
        timestamp = self._clock.now()
        if serving.log.is_too_old(decision, timestamp):
            age_s = (timestamp - decision.timestamp) / 1e6
            raise RequestRefused(
                410,
                "decision_id",
                f"a decision {age_s:.0f} s old",
                f"one of the last {serving.log.window_s:.0f} s, the reward window",
            )
        serving.log.write_reward(given, timestamp)
        self._metrics.count_feedback()
        self._metrics.set_pending("rewards", serving.log.rewards.num_pending)
        return json_answer(
            {
                "decision_id": given.decision_id,
                "policy": decision.policy,
                "version": decision.policy_version,
            }
        )
