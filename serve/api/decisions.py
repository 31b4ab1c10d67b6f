"""POST /decisions: decisions that a client took itself while no server answered.

They are logged as those of /act are, so that the join makes steps of them and reports find them by
their request_id. Each is marked as decided by a client. Of the decisions of one request it is the
step, not one of /act whose answer was lost, whichever was logged later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import LOG_PROB_TOLERANCE, MAX_STEP
from replaylake.datastore.episodes.spaces import Discrete, Space, num_actions
from replaylake.datastore.errors import InvalidNameError, NotFoundError
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.registry import Registry
from replaylake.datastore.names import check_policy_name
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
from replaylake.serve.recording.decision_log import Clock, DecisionBatch
from replaylake.serve.serving_state import ServingState

DECISION_FIELDS: Final = (
    "request_id",
    "episode_id",
    "step",
    "observation",
    "action",
    "log_prob",
    "policy",
    "version",
    "deterministic",
    "age_s",
    "action_mask",
    "package_sha256",
)
_REQUIRED: Final = ("request_id", "observation", "action", "policy", "version", "age_s")
MAX_AGE_S: Final = 10 * 365 * 86_400.0
MAX_VERSION: Final = 2**31 - 1
SHA256_DIGITS: Final = 64


class DecisionsEndpoint:
    """Logs the decisions of a request, all or none."""

    def __init__(self, serving: Callable[[], ServingState], metrics: Metrics, clock: Clock) -> None:
        self._serving, self._metrics, self._clock = serving, metrics, clock
        self._pace = LatencyEstimate()

    async def __call__(self, request: Request) -> Response:
        """Log the decisions of a request, in a thread if that takes long.

        Raises: RequestRefusedError, StorageError.
        """
        serving = self._serving()
        return await self._pace.run(len(request.body), lambda: self._answer(serving, request))

    def _answer(self, serving: ServingState, request: Request) -> Response:
        fields = read_fields(request)
        check_fields(fields, ("decisions",))
        items = fields.get("decisions")
        max_items = serving.limits.batch
        if type(items) is not list or not items:
            raise invalid_value_error("decisions", items, f"a list of 1 to {max_items} decisions")
        if len(items) > max_items:
            found, expected = f"{len(items)} decisions", f"at most {max_items}"
            raise RequestRefusedError(413, "decisions", found=found, expected=expected)
        log = serving.log
        if log is None:
            message = "this server logs no decisions; start it with `log_to`, a dataset to log to"
            raise RequestRefusedError(404, "path", message)
        spec = serving.router.one.policy.spec
        now = self._clock.now()
        batches = []
        for number, item in enumerate(items):
            place = f"decisions[{number}]"
            if type(item) is not dict:
                raise invalid_value_error(place, item, "an object")
            try:
                batches.append(_read_decision(item, spec, now, takes_masks=log.takes_masks))
            except RequestRefusedError as error:
                error.field = shorten(f"{place}.{error.field}")
                raise
        if serving.registry is not None:
            _check_versions(serving.registry, batches)
        for batch in batches:
            batch.ids = serving.signer.issue(batch.policy, batch.policy_version, batch.timestamp)
        ids = [batch.ids[0] for batch in batches]
        # Regardless of `on_log_failure`: the client still has them, and sends them again.
        log.write_received(batches)
        self._metrics.set_pending("decisions", log.decisions.num_pending)
        versions = {(batch.policy, batch.policy_version) for batch in batches}
        return json_response({"decision_ids": ids}, 200, partial(span_attributes, ids, versions))


def _check_versions(registry: Registry, batches: Sequence[DecisionBatch]) -> None:
    """Check that versions of the lake's own policies are there. Raises: RequestRefusedError.

    A policy whose name the lake does not have is one of elsewhere: nothing is known of it.
    """
    known: dict[tuple[str, int], str | None] = {}
    for number, batch in enumerate(batches):
        name, version = batch.policy, batch.policy_version
        if (name, version) not in known:
            known[name, version] = _find_sha256(registry, name, version, f"decisions[{number}]")
        sha256 = known[name, version]
        if batch.package_sha256 is not None and sha256 not in (None, batch.package_sha256):
            message = (
                f"found {batch.package_sha256}, the lake's {name}:{version} has {sha256}. Give the "
                "policy of a package from elsewhere a name that the lake does not have"
            )
            raise RequestRefusedError(422, f"decisions[{number}].package_sha256", message)


def _find_sha256(registry: Registry, name: str, version: int, place: str) -> str | None:
    try:
        sha256: str | None = registry.entry(name, version)["manifest_sha256"]
    except NotFoundError:
        with suppress(NotFoundError):
            newest = registry.newest(name).version
            message = f"found {version}, the lake's versions of {name} end with {newest}"
            raise RequestRefusedError(422, f"{place}.version", message) from None
        return None
    return sha256


def _read_decision(
    item: Mapping[str, Any], spec: PolicySpec, now: int, *, takes_masks: bool
) -> DecisionBatch:
    """Read one decision. Raises: RequestRefusedError."""
    check_fields(item, DECISION_FIELDS)
    for name in _REQUIRED:
        if item.get(name) is None:
            raise RequestRefusedError(422, name, "required field is missing")
    for name in ("request_id", "episode_id"):
        check_name(item.get(name), name)
    step = optional(item, "step", int, f"a whole number from 0 to {MAX_STEP}")
    if step is not None and not 0 <= step <= MAX_STEP:
        raise invalid_value_error("step", step, f"a whole number from 0 to {MAX_STEP}")
    age_s = item["age_s"]
    if type(age_s) not in (int, float) or not 0 <= age_s <= MAX_AGE_S:
        raise invalid_value_error("age_s", age_s, "the seconds since the decision, 0 or more")
    (observation,) = encode_observations(spec.encoding, [item["observation"]], "observation", False)
    return DecisionBatch(
        ids=[],
        request_ids=[item["request_id"]],
        episode_ids=[item.get("episode_id")],
        steps=[step],
        observations=[_read_value(spec.observation_space, observation, "observation")],
        actions=[_read_value(spec.action_space, item["action"], "action")],
        log_probs=[_read_log_prob(item.get("log_prob"), spec)],
        masks=_read_mask(item, spec, takes_masks=takes_masks),
        timestamp=now - int(age_s * 1e6),
        policy=_read_policy(item["policy"]),
        policy_version=_read_version(item["version"]),
        deterministic=bool(optional(item, "deterministic", bool, "true or false")),
        package_sha256=_read_sha256(item.get("package_sha256")),
        decided_by_client=True,
    )


def _read_value(space: Space, raw: Any, field: str) -> Any:
    """Return a value in the form of the log: unchanged, but arrays with the dtype of the space."""
    values = read_values(space, [raw], field, False)
    return values[0] if type(raw) is np.ndarray and type(values) is np.ndarray else raw


def _read_log_prob(value: Any, spec: PolicySpec) -> float | None:
    if value is None:
        return None
    is_number = type(value) in (int, float) and math.isfinite(value)
    is_probability = num_actions(spec.action_space) is not None
    if not is_number or (is_probability and value > LOG_PROB_TOLERANCE):
        expected = "ln of the action's probability (density), a finite number"
        raise invalid_value_error("log_prob", value, expected)
    return float(value)


def _read_policy(value: Any) -> str:
    try:
        return check_policy_name(value) if type(value) is str else _refuse_policy(value)
    except InvalidNameError:
        return _refuse_policy(value)


def _refuse_policy(value: Any) -> str:
    raise invalid_value_error("policy", value, "the name of a policy")


def _read_version(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_VERSION:
        raise invalid_value_error("version", value, "a policy's version, a whole number")
    return value


def _read_sha256(value: Any) -> str | None:
    if value is None:
        return None
    is_hex = type(value) is str and len(value) == SHA256_DIGITS
    if not is_hex or not set(value) <= set("0123456789abcdef"):
        raise invalid_value_error("package_sha256", value, "64 hexadecimal digits")
    return value  # type: ignore[no-any-return]


def _read_mask(
    item: Mapping[str, Any], spec: PolicySpec, *, takes_masks: bool
) -> Sequence[Sequence[bool]] | None:
    mask = item.get("action_mask")
    if mask is None:
        return None
    if not takes_masks:
        message = "the dataset stores no action masks; leave the mask out"
        raise RequestRefusedError(422, "action_mask", message)
    num = num_actions(spec.action_space)
    if type(mask) is not list or len(mask) != num or not {*map(type, mask)} <= {bool}:
        raise invalid_value_error("action_mask", mask, f"a list of {num} booleans")
    space = spec.action_space
    if isinstance(space, Discrete) and not mask[int(item["action"]) - space.start]:
        message = f"the action {item['action']} is masked; send an action that the mask allows"
        raise RequestRefusedError(422, "action_mask", message)
    return [mask]
