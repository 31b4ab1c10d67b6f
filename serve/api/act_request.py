"""What POST /act was asked: its fields checked, one observation told from many by dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import MAX_STEP
from replaylake.datastore.episodes.spaces import Array, describe, num_actions
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.api.act_options import NO_OPTIONS, OPTIONS, ActOptions, read_options
from replaylake.serve.api.bodies import check_fields, check_name, read_fields
from replaylake.serve.api.values import depth_of, invalid_value_error, num_dims
from replaylake.serve.messages import Request, RequestRefusedError

# What each field is called where there are many rows; one value for all rows has the first name.
_MANY: Final[Mapping[str, str]] = {
    "observation": "observations",
    "episode_id": "episode_ids",
    "request_id": "request_ids",
    "step": "steps",
    "state": "states",
    "action_mask": "action_masks",
}
_OF_ONE: Final = frozenset({*_MANY, *OPTIONS})
_OF_MANY: Final = _OF_ONE | {*_MANY.values()}
_IN_QUERY: Final[Mapping[str, type]] = {
    **OPTIONS,
    "episode_id": str,
    "request_id": str,
    "step": int,
    "state": str,
}
_NOTHING: Final = (None,)


@dataclass(slots=True)
class ActRequest:
    """B observations to act on, as they came; they are checked by the policy that is to act.

    field: the name that they came under. Absent ids, steps and states are None; states is None
    where there is none at all. action_mask is bool [B, A]. unknown_categories: of each observation,
    the fields whose text the policy's encoding does not know; None where none has one.
    """

    is_batch: bool
    field: str
    raw: Sequence[Any] | Array
    options: ActOptions
    episode_ids: Sequence[str | None]
    request_ids: Sequence[str | None]
    steps: Sequence[int | None]
    states: Sequence[str | None] | None
    action_mask: Array | None
    unknown_categories: Sequence[Sequence[str]] | None = None


class ActReader:
    """Reads requests to one policy; what does not change from one to the next is found out once."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self._num_dims = num_dims(spec.observation_space)
        has_fields = spec.encoding is not None and bool(spec.encoding.fields)
        self._object_dims = self._num_dims if has_fields else 0

    def read(self, request: Request, max_batch: int) -> ActRequest:
        """Read a request. Raises: RequestRefusedError."""
        fields = read_fields(request, _IN_QUERY)
        raw = fields.get("observation")
        if "observations" in fields:
            if "observation" in fields:
                message = "both observation and observations are given; send one of them"
                raise RequestRefusedError(422, "observation", message)
            raw = fields["observations"]
            return self._many(fields, raw, "observations", max_batch)
        if "observation" not in fields:
            check_fields(fields, _OF_MANY)  # it may be there under a name that is not quite it
            message = (
                "observation is missing; send observation (one, or a batch with one additional "
                "dimension) or observations (a list)"
            )
            raise RequestRefusedError(422, "observation", message)
        if depth_of(raw, self._object_dims) == self._num_dims + 1:
            return self._many(fields, raw, "observation", max_batch)
        return self._one(fields, raw)

    def read_batch(self, fields: Mapping[str, Any], max_batch: int) -> ActRequest:
        """Read a batch whose fields another protocol has; `observation` holds the rows.

        Raises: RequestRefusedError.
        """
        return self._many(fields, fields["observation"], "observation", max_batch)

    def _one(self, fields: Mapping[str, Any], raw: Any) -> ActRequest:
        check_fields(fields, _OF_ONE)
        options = read_options(fields)
        mask, state = fields.get("action_mask"), fields.get("state")
        _check_token(state, "state")
        return ActRequest(
            False,
            "observation",
            [raw],
            options,
            _one_name(fields, "episode_id"),
            _one_name(fields, "request_id"),
            _one_step(fields),
            None if state is None else (state,),
            None if mask is None else self._mask([mask], "action_mask", 1, False),
        )

    def _many(self, fields: Mapping[str, Any], raw: Any, field: str, max_batch: int) -> ActRequest:
        check_fields(fields, _OF_MANY)
        is_rows = type(raw) is list or (type(raw) is np.ndarray and raw.ndim > 0)
        if not is_rows or not len(raw):
            raise invalid_value_error(field, raw, f"a list of 1 to {max_batch} observations")
        num = len(raw)
        if num > max_batch:
            found, expected = f"{num} observations", f"at most {max_batch}"
            raise RequestRefusedError(413, field, found=found, expected=expected)
        request_id = fields.get("request_id")
        request_ids = _column(fields, "request_id", num, check_name)
        if request_id is not None and type(request_id) is not list:
            # Rows of one request_id would become one step.
            request_ids = [f"{request_id}/{row}" for row in range(num)]
        mask, name = _read_either(fields, "action_mask")
        states = _column(fields, "state", num, _check_token)
        return ActRequest(
            True,
            field,
            raw,
            read_options(fields),
            _column(fields, "episode_id", num, check_name),
            request_ids,
            _column(fields, "step", num, _check_step),
            None if set(states) == {None} else states,
            None if mask is None else self._mask(mask, name, num, True),
        )

    def _mask(self, rows: Any, field: str, num: int, is_batch: bool) -> Array:
        num_allowed = num_actions(self.spec.action_space)
        if num_allowed is None:
            space = describe(self.spec.action_space)
            message = f"masks apply to discrete actions, these are {space}; leave the mask out"
            raise RequestRefusedError(422, field, message)
        if type(rows) is np.ndarray:
            if rows.dtype != np.bool_ or rows.shape != (num, num_allowed):
                raise invalid_value_error(field, rows, f"bool [{num}, {num_allowed}]")
            rows = rows.tolist()
        if type(rows) is not list or len(rows) != num:
            raise invalid_value_error(
                field, rows, f"a list of {num} masks, one for each observation"
            )
        for i, row in enumerate(rows):
            place = f"{field}[{i}]" if is_batch else field
            if type(row) is np.ndarray and row.dtype == np.bool_:
                row = rows[i] = row.tolist()
            if type(row) is not list or len(row) != num_allowed or set(map(type, row)) != {bool}:
                raise invalid_value_error(place, row, f"{num_allowed} booleans")
            if not any(row):
                raise invalid_value_error(place, row, "at least one allowed action")
        return np.fromiter(chain.from_iterable(rows), bool, num * num_allowed).reshape(num, -1)


def join_requests(requests: Sequence[ActRequest]) -> ActRequest:
    """Return requests for one observation each, without options, as one for all of them."""
    return ActRequest(
        True,
        "observation",
        [],
        NO_OPTIONS,
        [one.episode_ids[0] for one in requests],
        [one.request_ids[0] for one in requests],
        [one.steps[0] for one in requests],
        None,
        None,
    )


def _one_name(fields: Mapping[str, Any], name: str) -> Sequence[str | None]:
    value = fields.get(name)
    if value is None:
        return _NOTHING
    check_name(value, name)
    return (value,)


def _one_step(fields: Mapping[str, Any]) -> Sequence[int | None]:
    value = fields.get("step")
    if value is None:
        return _NOTHING
    _check_step(value, "step")
    return (value,)


def _read_either(fields: Mapping[str, Any], one: str) -> tuple[Any, str]:
    """Return a field of a batch, which may have either name, and which it had."""
    many = _MANY[one]
    if fields.get(many) is None:
        return fields.get(one), one
    if one in fields:
        message = f"both {one} and {many} are given; send one of them"
        raise RequestRefusedError(422, many, message)
    return fields[many], many


def _column(fields: Mapping[str, Any], one: str, num: int, check: Any) -> Sequence[Any]:
    """Return a field's value for each row: a list is of each, anything else of all."""
    value, name = _read_either(fields, one)
    if value is None:
        return _NOTHING * num
    if type(value) is not list and name == one and one != "state":
        check(value, one)
        return [value] * num
    if type(value) is not list or len(value) != num:
        raise invalid_value_error(name, value, f"a list of {num}, one for each observation")
    for i, single in enumerate(value):
        check(single, f"{name}[{i}]")
    return value


def _check_step(value: Any, place: str) -> None:
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_STEP):
        raise invalid_value_error(place, value, f"a whole number from 0 to {MAX_STEP}")


def _check_token(value: Any, place: str) -> None:
    if value is not None and (type(value) is not str or not value):
        raise invalid_value_error(place, value, "the state of the previous answer, or null")
