"""POST /feedback: what decisions led to."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from replaylake.datastore.feedback.decision_id import DecisionId
from replaylake.serve.api.bodies import read_fields
from replaylake.serve.api.feedback_request import FeedbackRequest, parse_feedback
from replaylake.serve.api.pace import Pace
from replaylake.serve.exchange import Answer, Request, RequestRefused, json_answer
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.recording.decision_log import Clock, DecisionLog
from replaylake.serve.serving import Serving

# Reports under a feedback_id that a worker remembers, to tell a contradiction at once: about 12 MB.
_HELD: Final = 65_536


class FeedbackEndpoint:
    """Writes reports, all of a request or none; the join drops repeats.

    A decision_id is checked at once. A client's own names are not: the decision may be another
    worker's, and not in the lake yet.
    """

    def __init__(self, serving: Callable[[], Serving], metrics: Metrics) -> None:
        self._serving, self._metrics = serving, metrics
        self._clock, self._pace, self._lock = Clock(), Pace(), threading.Lock()
        self._held: OrderedDict[bytes, bytes] = OrderedDict()

    async def __call__(self, request: Request) -> Answer:
        """Answer one request, or have a thread do it. Raises: RequestRefused, StorageFailed."""
        serving = self._serving()
        answer, lags = await self._pace.run(
            len(request.body), lambda: self._answer(serving, request)
        )
        for lag_s in lags:
            self._metrics.count_feedback(lag_s)
        if serving.log is not None:
            self._metrics.set_pending("rewards", serving.log.rewards.num_pending)
        return answer

    def _answer(self, serving: Serving, request: Request) -> tuple[Answer, list[float | None]]:
        """Return the answer, and how long (s) after its decision each report came, if we know."""
        fields = read_fields(request)
        spec = serving.router.one.policy.spec
        reports = parse_feedback(fields, spec, serving.limits.batch)
        log = serving.log
        if log is None:
            raise RequestRefused(
                404, "decision_id", "a server that logs nothing", "one started with --log-to"
            )
        with self._lock:
            # One at a time: what a repeat is compared with has been written.
            timestamp = self._clock.now()
            decisions = [_decision_of(serving, log, report, timestamp) for report in reports]
            fresh = self._fresh(reports)
            if fresh:
                log.write_rewards([reports[i].record(timestamp) for i in fresh])
            self._hold(reports)
        lags = [None if d is None else (timestamp - d.timestamp) / 1e6 for d in decisions]
        status = 202 if None in decisions else 200
        if "feedback" in fields:
            return json_answer({"accepted": len(reports)}, status), lags
        if (decision := decisions[0]) is None:
            return json_answer({"accepted": True}, status), lags
        said = {
            "decision_id": reports[0].decision_id,
            "policy": decision.policy,
            "version": decision.policy_version,
        }
        return json_answer(said), lags

    def _fresh(self, reports: Sequence[FeedbackRequest]) -> list[int]:
        """Return the places of those that are no repeats. Raises: RequestRefused (409)."""
        here: dict[bytes, bytes] = {}
        fresh = []
        for place, report in enumerate(reports):
            if (identity := report.identity()) is None:
                fresh.append(place)
                continue
            name, said = identity
            before = here.get(name, self._held.get(name))
            if before is None:
                here[name] = said
                fresh.append(place)
            elif before != said:
                found = "one that said something else before"
                expected = "a name for each report; a repeat says the same"
                raise RequestRefused(409, report.field("feedback_id"), found, expected)
        return fresh

    def _hold(self, reports: Sequence[FeedbackRequest]) -> None:
        for report in reports:
            if (identity := report.identity()) is not None:
                self._held[identity[0]] = identity[1]
                self._held.move_to_end(identity[0])
        while len(self._held) > _HELD:
            self._held.popitem(last=False)


def _decision_of(
    serving: Serving, log: DecisionLog, report: FeedbackRequest, timestamp: int
) -> DecisionId | None:
    """Return what a decision_id says, None where a report has none. Raises: RequestRefused."""
    if report.decision_id is None:
        return None
    decision = serving.signer.read(report.decision_id)
    field = report.field("decision_id")
    if decision is None:
        expected = f"one that /act answered for dataset {log.dataset.name}"
        raise RequestRefused(404, field, "an id that is not ours", expected)
    if log.is_too_old(decision, timestamp):
        age_s = (timestamp - decision.timestamp) / 1e6
        expected = f"one of the last {log.window_s:.0f} s, the reward window"
        raise RequestRefused(410, field, f"a decision {age_s:.0f} s old", expected)
    return decision
