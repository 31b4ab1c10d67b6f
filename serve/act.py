"""POST /act: observations in, actions with their log-probabilities and decision ids out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from replaylake.datastore.errors import EpisodeInvalid
from replaylake.datastore.policies.exploration import Exploration
from replaylake.serve.bodies import ActRequest, parse_act
from replaylake.serve.decision_log import Clock, Decided, json_log_probs
from replaylake.serve.exchange import Answer, Request, RequestRefused, json_answer
from replaylake.serve.metrics import Metrics
from replaylake.serve.router import Served
from replaylake.serve.serving import Serving


class ActEndpoint:
    """Chooses actions, writes the decisions, then answers."""

    def __init__(self, serving: Callable[[], Serving], metrics: Metrics) -> None:
        self._serving, self._metrics = serving, metrics
        self._clock = Clock()
        self._rng = np.random.default_rng()

    async def __call__(self, request: Request) -> Answer:
        """Answer one request. Raises: RequestRefused, StorageFailed."""
        serving = self._serving()
        served = serving.router.one
        spec = served.policy.spec
        asked = parse_act(request.body, spec, serving.limits.batch)
        log = serving.log
        if asked.action_mask is not None and log is not None and not log.takes_masks:
            expected = f"none, because dataset {log.dataset.name} keeps no masks"
            raise RequestRefused(422, "action_mask", "a mask", expected)
        deterministic = asked.deterministic
        if deterministic is None:
            deterministic = not serving.exploration.is_on
        try:
            act = served.policy.act(
                asked.observations,
                rng=self._rng,
                action_mask=asked.action_mask,
                **_how(serving.exploration, deterministic),
            )
        except EpisodeInvalid as error:
            field = "observations" if asked.is_batch else "observation"
            expected = "what the policy can act on; /policy says its space"
            raise RequestRefused(422, field, str(error), expected) from error
        timestamp = self._clock.now()
        ids = serving.signer.issue(served.name, served.version, timestamp, len(asked.raw))
        if log is not None:
            log.write_decisions(
                Decided(asked, act, ids, timestamp, served.name, served.version, deterministic)
            )
            self._metrics.set_pending("decisions", log.decisions.num_pending)
        self._metrics.count_decisions(served.name, served.version, deterministic, len(ids))
        return _answer(served, asked, act.actions.tolist(), act.log_probs, ids)


def _how(exploration: Exploration, deterministic: bool) -> dict[str, Any]:
    """Return act()'s arguments: the mode, the mode with epsilon, or a draw at a temperature."""
    if deterministic:
        return {"deterministic": True}
    if exploration.epsilon > 0:
        return {"deterministic": True, "epsilon": exploration.epsilon}
    temperature = 1.0 if exploration.temperature is None else exploration.temperature
    return {"deterministic": False, "temperature": temperature}


def _answer(
    served: Served, asked: ActRequest, actions: list[Any], log_probs: Any, ids: list[str]
) -> Answer:
    answer: dict[str, Any] = {"policy": served.name, "version": served.version}
    values = json_log_probs(log_probs, len(ids))
    if asked.is_batch:
        answer |= {"actions": actions, "log_probs": values, "decision_ids": ids}
    else:
        answer |= {"action": actions[0], "log_prob": values[0], "decision_id": ids[0]}
    encoding = served.policy.spec.encoding
    if encoding is not None and encoding.action_names is not None:
        named = [encoding.action_name(action) for action in actions]
        answer |= {"action_names": named} if asked.is_batch else {"action_name": named[0]}
    return json_answer(answer)
