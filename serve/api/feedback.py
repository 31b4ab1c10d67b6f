"""POST /feedback: what decisions led to."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import orjson

from replaylake.datastore.episodes.episode import MAX_STEP
from replaylake.datastore.episodes.schema import (
    EPISODE_ID,
    FINAL_OBSERVATION,
    REWARD,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
)
from replaylake.datastore.feedback.decision_id import DecisionId
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    FEEDBACK_ID,
    LAST,
    MODE,
    REQUEST_ID,
    SUM,
)
from replaylake.datastore.feedback.reports import MAX_REWARD
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.api.bodies import check_fields, check_name, optional, read_fields
from replaylake.serve.api.latency_estimate import LatencyEstimate
from replaylake.serve.api.values import (
    encode_observations,
    invalid_value_error,
    read_values,
    shorten,
)
from replaylake.serve.messages import (
    Request,
    RequestRefusedError,
    Response,
    json_response,
    span_attributes,
)
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.recording.decision_log import Clock, DecisionLog
from replaylake.serve.serving_state import ServingState

# Reports under a feedback_id that a worker remembers, to tell a contradiction at once: about 12 MB.
_MAX_REMEMBERED: Final = 65_536
FEEDBACK_FIELDS: Final = (
    "decision_id",
    "request_id",
    "episode_id",
    "step",
    "reward",
    "mode",
    "feedback_id",
    "terminated",
    "truncated",
    "final_observation",
)
_NAMES: Final = ("decision_id", "request_id", "episode_id")
_ID_BYTES: Final = 16


class FeedbackEndpoint:
    """Writes reports, all of a request or none; the join drops repeats.

    A decision_id is checked at once. A client's own names are not: the decision may be another
    worker's, and not in the lake yet.
    """

    def __init__(self, serving: Callable[[], ServingState], metrics: Metrics, clock: Clock) -> None:
        self._serving, self._metrics = serving, metrics
        self._clock, self._pace, self._lock = clock, LatencyEstimate(), threading.Lock()
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()

    async def __call__(self, request: Request) -> Response:
        """Answer one request, or have a thread do it. Raises: RequestRefusedError, StorageError."""
        serving = self._serving()
        answer, lags = await self._pace.run(
            len(request.body), lambda: self._answer(serving, request)
        )
        for lag_s in lags:
            self._metrics.count_feedback(lag_s)
        if serving.log is not None:
            self._metrics.set_pending("rewards", serving.log.rewards.num_pending)
        return answer

    def _answer(
        self, serving: ServingState, request: Request
    ) -> tuple[Response, list[float | None]]:
        """Return the answer, and how long (s) after its decision each report came, if we know."""
        fields = read_fields(request)
        spec = serving.router.one.policy.spec
        reports = parse_feedback(fields, spec, serving.limits.batch)
        log = serving.log
        if log is None:
            message = "this server logs no decisions; start it with `log_to`, a dataset to log to"
            raise RequestRefusedError(404, "decision_id", message)
        with self._lock:
            # One at a time: what a repeat is compared with has been written.
            timestamp = self._clock.now()
            decisions = [_decision_of(serving, log, report, timestamp) for report in reports]
            fresh = self._find_new(reports)
            if fresh:
                log.write_rewards([reports[i].to_record(timestamp) for i in fresh])
            self._remember(reports)
        lags = [None if d is None else (timestamp - d.timestamp) / 1e6 for d in decisions]
        status = 202 if None in decisions else 200
        describe = partial(_describe, reports, decisions)
        if "feedback" in fields:
            return json_response({"accepted": len(reports)}, status, describe), lags
        if (decision := decisions[0]) is None:
            return json_response({"accepted": True}, status), lags
        counts = {
            "decision_id": reports[0].decision_id,
            "policy": decision.policy,
            "version": decision.policy_version,
        }
        return json_response(counts, 200, describe), lags

    def _find_new(self, reports: Sequence[FeedbackRequest]) -> list[int]:
        """Return the places of those that are no repeats. Raises: RequestRefusedError (409)."""
        here: dict[bytes, bytes] = {}
        fresh = []
        for place, report in enumerate(reports):
            if (identity := report.identity()) is None:
                fresh.append(place)
                continue
            name, outcome = identity
            before = here.get(name, self._recent.get(name))
            if before is None:
                here[name] = outcome
                fresh.append(place)
            elif before != outcome:
                message = "feedback_id was used for a different report; use another for this one"
                raise RequestRefusedError(409, report.field("feedback_id"), message)
        return fresh

    def _remember(self, reports: Sequence[FeedbackRequest]) -> None:
        for report in reports:
            if (identity := report.identity()) is not None:
                self._recent[identity[0]] = identity[1]
                self._recent.move_to_end(identity[0])
        while len(self._recent) > _MAX_REMEMBERED:
            self._recent.popitem(last=False)


def _describe(
    reports: Sequence[FeedbackRequest], decisions: Sequence[DecisionId | None]
) -> Mapping[str, Any]:
    """Return the attributes of a request's span: decisions that its reports refer to by id."""
    ids = [report.decision_id for report in reports if report.decision_id is not None]
    return span_attributes(ids, {(one.policy, one.policy_version) for one in decisions if one})


def _decision_of(
    serving: ServingState, log: DecisionLog, report: FeedbackRequest, timestamp: int
) -> DecisionId | None:
    """Return what a decision_id says, None where a report has none. Raises: RequestRefusedError."""
    if report.decision_id is None:
        return None
    decision = serving.signer.read(report.decision_id)
    field = report.field("decision_id")
    if decision is None:
        message = f"unknown decision_id; send one of a decision logged to {log.dataset.name}"
        raise RequestRefusedError(404, field, message)
    if log.is_too_old(decision, timestamp):
        age_s = (timestamp - decision.timestamp) / 1e6
        message = f"decision is {age_s:.0f} s old, past its reward window of {log.window_s:.0f} s"
        raise RequestRefusedError(410, field, message)
    return decision


@dataclass(frozen=True, slots=True)
class FeedbackRequest:
    """What one decision led to. It is named by one of decision_id, request_id, episode_id and step.

    place: the report's in the body, to be put before a field's name; empty for a single one.
    """

    place: str
    decision_id: str | None
    request_id: str | None
    episode_id: str | None
    step: int | None
    feedback_id: str | None
    mode: str
    reward: float
    terminated: bool
    truncated: bool
    final_observation: Any

    @property
    def name(self) -> tuple[str | int | None, ...]:
        """What it calls its decision."""
        return self.decision_id, self.request_id, self.episode_id, self.step

    def field(self, name: str) -> str:
        """Return the place of one of its fields."""
        return self.place + name

    def to_record(self, timestamp: int) -> dict[str, Any]:
        """Return it as the journal has it, received at `timestamp` (us).

        Each column of the table is there, but those of which the report says nothing.
        """
        names = {
            DECISION_ID: self.decision_id,
            REQUEST_ID: self.request_id,
            EPISODE_ID: self.episode_id,
            STEP: self.step,
            FEEDBACK_ID: self.feedback_id,
            FINAL_OBSERVATION: self.final_observation,
        }
        fields = {name: value for name, value in names.items() if value is not None}
        return fields | {
            MODE: self.mode,
            TIMESTAMP: timestamp,
            REWARD: self.reward,
            TERMINATED: self.terminated,
            TRUNCATED: self.truncated,
        }

    def identity(self) -> tuple[bytes, bytes] | None:
        """Return what is the same in a repeat, and its contents; None without a feedback_id.

        A feedback_id is one of its decision's, as the client names that.
        """
        if self.feedback_id is None:
            return None
        outcome = self.mode, self.reward, self.terminated, self.truncated, self.final_observation
        return _digest((*self.name, self.feedback_id)), _digest(outcome)


def _digest(value: Any) -> bytes:
    text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return hashlib.blake2b(text, digest_size=_ID_BYTES).digest()


def parse_feedback(
    fields: Mapping[str, Any], spec: PolicySpec, max_reports: int
) -> list[FeedbackRequest]:
    """Read the fields of POST /feedback. Raises: RequestRefusedError."""
    if "feedback" not in fields:
        return [_parse_report(fields, spec, "")]
    check_fields(fields, ("feedback",))
    items = fields["feedback"]
    if type(items) is not list or not items:
        raise invalid_value_error("feedback", items, f"a list of 1 to {max_reports} reports")
    if len(items) > max_reports:
        found, expected = f"{len(items)} reports", f"at most {max_reports}"
        raise RequestRefusedError(413, "feedback", found=found, expected=expected)
    reports = []
    for number, one in enumerate(items):
        place = f"feedback[{number}]"
        if type(one) is not dict:
            raise invalid_value_error(place, one, "an object")
        try:
            reports.append(_parse_report(one, spec, f"{place}."))
        except RequestRefusedError as error:
            error.field = shorten(f"{place}.{error.field}")
            raise
    return reports


def _parse_report(fields: Mapping[str, Any], spec: PolicySpec, place: str) -> FeedbackRequest:
    check_fields(fields, FEEDBACK_FIELDS)
    _check_reference(fields)
    if "reward" not in fields:
        raise RequestRefusedError(422, "reward", "required field is missing")
    reward = fields["reward"]
    # NaN is not, either, and an integer beyond float64 is compared as what it is.
    if type(reward) not in (int, float) or not -MAX_REWARD <= reward <= MAX_REWARD:
        expected = f"a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, so that sums stay finite"
        raise invalid_value_error("reward", reward, expected)
    mode = fields.get("mode", LAST)
    if mode not in (LAST, SUM):
        raise invalid_value_error("mode", mode, f"{LAST} (replace) or {SUM} (add)")
    feedback_id = fields.get("feedback_id")
    check_name(feedback_id, "feedback_id")
    if mode == SUM and feedback_id is None:
        message = "mode sum needs a feedback_id, by which a repeat is added once; send one"
        raise RequestRefusedError(422, "feedback_id", message)
    return FeedbackRequest(
        place=place,
        decision_id=fields.get("decision_id"),
        request_id=fields.get("request_id"),
        episode_id=fields.get("episode_id"),
        step=fields.get("step"),
        feedback_id=feedback_id,
        mode=mode,
        reward=float(reward),
        terminated=bool(optional(fields, "terminated", bool, "true or false")),
        truncated=bool(optional(fields, "truncated", bool, "true or false")),
        final_observation=_final_observation(fields, spec),
    )


def _check_reference(fields: Mapping[str, Any]) -> None:
    """Check that a report names one decision, in one way."""
    names = [name for name in _NAMES if fields.get(name) is not None]
    if len(names) != 1:
        cause = f"both {names[0]} and {names[1]} are given" if names else "decision_id is missing"
        message = f"{cause}; send one of decision_id, request_id, or episode_id and step"
        raise RequestRefusedError(422, names[1] if names else "decision_id", message)
    value = fields[names[0]]
    if names[0] == "decision_id":
        if type(value) is not str:
            raise invalid_value_error(
                "decision_id", value, "a string from the response of POST /act"
            )
    else:
        check_name(value, names[0])
    step = fields.get("step")
    if names[0] == "episode_id":
        if "step" not in fields:
            raise RequestRefusedError(422, "step", "episode_id without step; send both")
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise invalid_value_error("step", step, f"a whole number from 0 to {MAX_STEP}")
    elif step is not None:
        raise RequestRefusedError(422, "step", "step without episode_id; leave it out or send both")


def _final_observation(fields: Mapping[str, Any], spec: PolicySpec) -> Any:
    final = fields.get("final_observation")
    if final is None:
        return None
    (final,) = encode_observations(spec.encoding, [final], "final_observation", False)
    values = read_values(spec.observation_space, [final], "final_observation", False)
    return values[0] if type(final) is np.ndarray and type(values) is np.ndarray else final
