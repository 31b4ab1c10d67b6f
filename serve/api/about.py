"""GET /policy, /livez, /readyz and /metrics: what a server says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from replaylake.datastore.episodes.spaces import to_json
from replaylake.serve.messages import Request, Response, json_response
from replaylake.serve.monitoring.metrics import CONTENT_TYPE, Metrics
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.alias_follower import AliasFollower
from replaylake.serve.versions.router import Arm, ServedPolicy


class About:
    """The endpoints that change nothing."""

    def __init__(
        self, serving: Callable[[], ServingState], is_ready: Callable[[], bool], metrics: Metrics
    ) -> None:
        self._serving, self._is_ready, self._metrics = serving, is_ready, metrics

    async def policy(self, request: Request) -> Response:
        """Say which policies answer, what they take, and what they came from."""
        return json_response(describe_serving(self._serving()))

    async def livez(self, request: Request) -> Response:
        """Answer while the event loop turns."""
        return json_response({"alive": True})

    async def readyz(self, request: Request) -> Response:
        """Answer 200 once requests can be answered and logged, else 503.

        `degraded` names what does not work beside that, which is no reason to send requests to
        another server.
        """
        if not self._is_ready():
            return json_response({"ready": False, "degraded": []}, 503)
        return json_response({"ready": True, "degraded": self._serving().find_degraded()})

    async def metrics_page(self, request: Request) -> Response:
        """Return the Prometheus text."""
        return Response(200, self._metrics.render(), CONTENT_TYPE)


def describe_serving(serving: ServingState) -> dict[str, Any]:
    """Return what /policy answers: of the main policy, then of all that answer."""
    router, exploration = serving.router, serving.exploration
    arms = router.arms
    main = arms[0].served
    spec = main.policy.spec
    explore = {"epsilon": exploration.epsilon, "temperature": exploration.temperature}
    return {
        "policy": main.name,
        "version": main.version,
        "reference": main.reference,
        "head": spec.head,
        "state_size": spec.state_size,
        "observation_space": to_json(spec.observation_space),
        "action_space": to_json(spec.action_space),
        "encoding": None if spec.encoding is None else spec.encoding.to_json(),
        "explore": explore if exploration.is_on else None,
        "log_to": serving.log.dataset.name if serving.log else None,
        "lost_decisions": serving.log.num_lost if serving.log else 0,  # by this worker
        "versions": [_version(arm) for arm in arms],
        "held": [{"policy": one.name, "version": one.version} for one in router.held],
        "following": _describe_follower(serving.follower),
        "manifest": dict(main.about),
    }


def _version(arm: Arm[ServedPolicy]) -> dict[str, Any]:
    served = arm.served
    promotion = served.promotion
    return {
        "policy": served.name,
        "version": served.version,
        "reference": served.reference,
        "weight": arm.weight,
        "since_ms": served.since_ms,
        "package_sha256": served.sha256,
        "algorithm": served.about.get("algorithm"),
        "run_id": served.about.get("run_id"),
        "snapshot": _snapshot(served.about),
        "evaluation": served.about.get("evaluation"),
        "ope": served.about.get("ope") or (None if promotion is None else promotion.get("gate")),
        "promotion": promotion,
    }


def _snapshot(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what it learned from: versions of datasets, the SQL that selected, and its hash."""
    datasets = about.get("datasets")
    return [dict(one) for one in datasets] if isinstance(datasets, list) else []


def _describe_follower(follower: AliasFollower[ServedPolicy] | None) -> list[dict[str, Any]]:
    if follower is None:
        return []
    return [
        {
            "policy": one.name,
            "alias": one.alias,
            "interval_s": follower.interval_s,
            "last_reload": None if one.last_change is None else asdict(one.last_change),
            "refused": None if one.last_refusal is None else asdict(one.last_refusal),
            "unreachable": one.unreachable,
        }
        for one in follower.followed
    ]
