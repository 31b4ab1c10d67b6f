"""What POST /act answers: the decisions of one or more versions, in the order of the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgpack
import numpy as np
import orjson

from replaylake.datastore.lake.policies.policy import Act
from replaylake.serve.api.act_request import ActRequest
from replaylake.serve.api.arrays import array_map
from replaylake.serve.api.bodies import MSGPACK
from replaylake.serve.messages import Response, span_attributes
from replaylake.serve.versions.router import ServedPolicy
from replaylake.serve.versions.state_tokens import StateSigner

_PLURALS: Final = {
    "action": "actions",
    "log_prob": "log_probs",
    "decision_id": "decision_ids",
    "state": "states",
    "q_values": "q_values",
    "action_name": "action_names",
}


@dataclass(slots=True)
class Group:
    """The rows of a request that one version acted for; rows None are all of them.

    Everything is in the order of those rows; actions and log_probs are as JSON has them.
    """

    served: ServedPolicy
    rows: Sequence[int] | None
    act: Act
    observations: Any
    actions: list[Any]
    log_probs: list[float | None]
    masks: list[list[bool]] | None
    deterministic: bool
    ids: list[str] = field(default_factory=list)


def answer_of(
    request: ActRequest, groups: Sequence[Group], states: StateSigner, accept: str
) -> Response:
    """Return the answer, as msgpack where `accept` names it, else as JSON."""
    as_msgpack = "msgpack" in accept
    unknown = request.unknown_categories
    is_plain = not (request.is_batch or as_msgpack or request.options.q_values)
    if is_plain and len(groups) == 1 and groups[0].act.state is None:
        return one_answer(groups[0], 0, () if unknown is None else unknown[0])
    content: dict[str, Any] = policy_fields(groups)
    columns = columns_of(request, groups, states, as_arrays=as_msgpack)
    if request.is_batch:
        content |= {_PLURALS[name]: column for name, column in columns.items()}
    else:
        content |= {name: column[0] for name, column in columns.items()}
    if unknown is not None:
        content["unknown_categories"] = unknown if request.is_batch else unknown[0]
    describe = partial(describe_decisions, groups)
    if as_msgpack:
        body = msgpack.packb(content, default=_to_msgpack)
        return Response(200, body, MSGPACK, describe=describe)
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(200, body, describe=describe)


def columns_of(
    request: ActRequest, groups: Sequence[Group], states: StateSigner, *, as_arrays: bool
) -> dict[str, Any]:
    """Return what each row got, by the names that the fields of a single answer have.

    as_arrays: actions are an array [B, *action], else lists as JSON has them.
    """
    columns: dict[str, Any] = {
        "action": _actions(groups) if as_arrays else _merge_rows(groups, lambda one: one.actions),
        "log_prob": _merge_rows(groups, lambda one: one.log_probs),
        "decision_id": _merge_rows(groups, lambda one: one.ids),
    }
    if any(group.act.state is not None for group in groups):
        columns["state"] = _merge_rows(groups, lambda one: _tokens(one, states))
    if request.options.q_values:
        columns["q_values"] = _merge_rows(groups, lambda one: _rows_of(one.act.q_values))
    encoding = groups[0].served.policy.spec.encoding
    if encoding is not None and encoding.action_names is not None:
        columns["action_name"] = _merge_rows(groups, _names)
    return columns


def one_answer(group: Group, row: int, unknown_categories: Sequence[str] = ()) -> Response:
    """Return the answer to the usual request, for one observation, as JSON."""
    served = group.served
    content: dict[str, Any] = {
        "policy": served.name,
        "version": served.version,
        "action": group.actions[row],
        "log_prob": group.log_probs[row],
        "decision_id": group.ids[row],
    }
    encoding = served.policy.spec.encoding
    if encoding is not None and encoding.action_names is not None:
        content["action_name"] = encoding.action_name(group.actions[row])
    if unknown_categories:
        content["unknown_categories"] = unknown_categories
    return Response(200, orjson.dumps(content), describe=partial(describe_decisions, (group,), row))


def describe_decisions(groups: Sequence[Group], row: int | None = None) -> dict[str, Any]:
    """Return the attributes of a request's span: its decisions and their policy versions.

    row: row of the only group, if the request was batched with others; None: all rows.
    """
    ids = _merge_rows(groups, lambda one: one.ids) if row is None else [groups[0].ids[row]]
    return span_attributes(ids, [(one.served.name, one.served.version) for one in groups])


def policy_fields(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the policy and version, or those of each row where they differ."""
    if len(groups) == 1:
        served = groups[0].served
        return {"policy": served.name, "version": served.version}
    versions = _merge_rows(groups, lambda one: [one.served.version] * len(one.ids))
    if len({group.served.name for group in groups}) == 1:
        return {"policy": groups[0].served.name, "versions": versions}
    return {"policies": _merge_rows(groups, lambda one: [one.served.name] * len(one.ids)),
            "versions": versions}  # fmt: skip


def _merge_rows(groups: Sequence[Group], of: Callable[[Group], Sequence[Any]]) -> Sequence[Any]:
    """Return what each group has, in the order of the request's rows."""
    if len(groups) == 1:
        return of(groups[0])
    joined: list[Any] = [None] * sum(len(group.ids) for group in groups)
    for group in groups:
        for row, value in zip(group.rows or (), of(group), strict=True):
            joined[row] = value
    return joined


def _actions(groups: Sequence[Group]) -> Any:
    if len(groups) == 1:
        return groups[0].act.actions
    return np.stack(_merge_rows(groups, lambda one: list(one.act.actions)))


def _tokens(group: Group, states: StateSigner) -> Sequence[str | None]:
    served, state = group.served, group.act.state
    if state is None:
        return [None] * len(group.ids)
    return states.issue(served.name, served.version, state)


def _rows_of(array: Any) -> Sequence[Any]:
    assert array is not None, "a head without q-values was refused"
    return array  # type: ignore[no-any-return]


def _names(group: Group) -> Sequence[str | None]:
    encoding = group.served.policy.spec.encoding
    if encoding is None:
        return [None] * len(group.ids)
    return [encoding.action_name(action) for action in group.actions]


def _to_msgpack(value: Any) -> Any:
    """Return what msgpack has for numpy's: a map for an array, a number for a scalar."""
    if isinstance(value, np.ndarray) and value.shape:
        return array_map(value)
    return value.item()
