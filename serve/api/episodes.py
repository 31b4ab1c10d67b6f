"""POST /episodes: whole episodes, or pieces of them, that were acted elsewhere."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from starlette.concurrency import run_in_threadpool

from replaylake.datastore.episodes.episode import (
    LOG_PROB_TOLERANCE,
    MAX_STEP,
    Episode,
    is_countable,
)
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.feedback.received_table import ReceivedPiece, make_received_piece
from replaylake.datastore.feedback.reports import MAX_REWARD
from replaylake.serve.api.bodies import check_fields, check_name, read_fields
from replaylake.serve.api.values import (
    encode_observations,
    invalid_value_error,
    read_values,
    shorten,
)
from replaylake.serve.messages import (
    RETRY_AFTER_S,
    RETRY_LATER,
    Request,
    RequestRefusedError,
    Response,
    json_response,
)
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.recording.decision_log import Clock
from replaylake.serve.recording.received_log import ContradictionError, ReceivedLog
from replaylake.serve.serving_state import ServingState

EPISODE_FIELDS: Final = (
    "episode_id",
    "agent_id",
    "first_step",
    "observations",
    "actions",
    "rewards",
    "terminated",
    "truncated",
    "final_observation",
    "log_probs",
    "policy",
    "policy_version",
    "timestamps",
    "action_masks",
)
_REQUIRED: Final = ("episode_id", "observations", "actions", "rewards")
# The years 1 and 9999: what others than Arrow hold.
_TIMESTAMPS: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)


class EpisodesEndpoint:
    """Writes the steps down; `feedback join` moves them into the dataset, each once."""

    def __init__(self, serving: Callable[[], ServingState], metrics: Metrics, clock: Clock) -> None:
        self._serving, self._metrics = serving, metrics
        self._clock = clock
        self._opening = threading.Lock()

    async def __call__(self, request: Request) -> Response:
        """Answer one request. Raises: RequestRefusedError, StorageError."""
        # Thousands of steps take long, and one tells nothing of how many there are.
        return await run_in_threadpool(self._answer, self._serving(), request)

    def _answer(self, serving: ServingState, request: Request) -> Response:
        if serving.log is None:
            message = "this server logs no decisions; start it with `log_to`, a dataset to log to"
            raise RequestRefusedError(404, "path", message)
        fields = read_fields(request)
        check_fields(fields, ("episodes",))
        items = fields.get("episodes")
        if type(items) is not list or not items:
            raise invalid_value_error(
                "episodes", items, "a list of at least one episode or piece of one"
            )
        spec = serving.log.dataset.spec
        pieces = _Reader(spec, serving.limits.steps).pieces(items, self._clock.now())
        log = self._log(serving)
        try:
            log.write(pieces)
        except ContradictionError as error:
            place = f"episodes[{error.piece}]"
            raise RequestRefusedError(409, place, str(error)) from None
        self._metrics.set_pending("received", log.journal.num_pending)
        num_steps = sum(piece.num_steps for piece in pieces)
        return json_response({"episodes": len(pieces), "steps": num_steps}, 202)

    def _log(self, serving: ServingState) -> ReceivedLog:
        """Return the worker's journal of received steps, opened with the first of them."""
        with self._opening:
            if serving.received is None:
                if serving.log is None:
                    message = f"stopping; retry in {RETRY_AFTER_S} s"
                    raise RequestRefusedError(503, "server", message, headers=RETRY_LATER)
                worker, config = serving.signer.worker, serving.log.decisions.config
                serving.received = ReceivedLog(serving.log.dataset, worker, config)
            return serving.received


class _Reader:
    """Reads the episodes of one request into rows of a dataset."""

    def __init__(self, spec: DatasetSpec, max_steps: int) -> None:
        self._spec, self._num_left, self._max_steps = spec, max_steps, max_steps

    def pieces(self, items: list[Any], received_at: int) -> list[ReceivedPiece]:
        """Return what each is as rows.

        Raises: RequestRefusedError with the place of the first fault.
        """
        pieces_read = []
        for number, fields in enumerate(items):
            place = f"episodes[{number}]"
            if type(fields) is not dict:
                raise invalid_value_error(place, fields, "an object")
            try:
                episode = self._episode(fields, place)
            except RequestRefusedError as error:
                if not error.field.startswith(place):
                    error.field = shorten(f"{place}.{error.field}")
                raise
            try:
                pieces_read.append(make_received_piece(episode, self._spec, received_at))
            except (EpisodeInvalidError, SchemaMismatchError) as error:
                message = f"{shorten(str(error))} GET /policy has the spaces."
                raise RequestRefusedError(422, place, message) from None
        return pieces_read

    def _episode(self, fields: Mapping[str, Any], place: str) -> Episode:
        check_fields(fields, EPISODE_FIELDS)
        for name in _REQUIRED:
            if fields.get(name) is None:
                raise RequestRefusedError(422, name, "required field is missing")
        check_name(fields["episode_id"], "episode_id")
        num = self._num_steps(fields)
        spec = self._spec
        columns = {
            name: self._column(fields, name, num, place) for name in ("observations", "actions")
        }
        final = fields.get("final_observation")
        if final is not None:
            (final,) = encode_observations(
                spec.encoding, [final], f"{place}.final_observation", False
            )
            read = read_values(spec.observation_space, [final], f"{place}.final_observation", False)
            final = _first(read)
        return Episode(
            episode_id=fields["episode_id"],
            observations=columns["observations"],
            actions=columns["actions"],
            rewards=_read_rewards(fields["rewards"], num, spec.rewards_optional),
            terminated=_flag(fields, "terminated"),
            truncated=_flag(fields, "truncated"),
            final_observation=final,
            agent_id=_agent(fields),
            first_step=_whole(fields, "first_step", MAX_STEP) or 0,
            behavior_log_probs=self._log_probs(fields, num),
            policies=_policies(fields, num),
            policy_versions=_versions(fields, num),
            action_masks=self._masks(fields, num),
            timestamps=_timestamps(fields, num),
        )

    def _num_steps(self, fields: Mapping[str, Any]) -> int:
        rewards = fields["rewards"]
        if not _is_list(rewards) or not len(rewards):
            raise invalid_value_error("rewards", rewards, "a list of one reward or more")
        self._num_left -= len(rewards)
        if self._num_left < 0:
            message = f"request has more than {self._max_steps} steps; send several requests"
            raise RequestRefusedError(413, "rewards", message)
        return len(rewards)

    def _column(self, fields: Mapping[str, Any], name: str, num: int, place: str) -> Any:
        raw = fields[name]
        if not _is_list(raw) or len(raw) != num:
            raise invalid_value_error(name, raw, f"a list of {num}, one for each reward")
        spec, field = self._spec, f"{place}.{name}"
        if name == "actions":
            return read_values(spec.action_space, raw, field, True)
        if type(raw) is list:
            raw = encode_observations(spec.encoding, raw, field, True)
        return read_values(spec.observation_space, raw, field, True)

    def _log_probs(self, fields: Mapping[str, Any], num: int) -> Array | None:
        raw = fields.get("log_probs")
        if raw is None:
            return None
        log_probs = _read_numbers(raw, "log_probs", num, True)
        above = log_probs > LOG_PROB_TOLERANCE
        if above.any() and is_countable(self._spec.action_space):
            i = int(np.argmax(above))
            expected = "at most 0, the natural logarithm of a probability"
            raise RequestRefusedError(
                422, f"log_probs[{i}]", found=f"{log_probs[i]:g}", expected=expected
            )
        return log_probs

    def _masks(self, fields: Mapping[str, Any], num: int) -> Array | None:
        raw = fields.get("action_masks")
        if raw is None:
            return None
        width = self._spec.mask_size
        if width is None:
            message = "the dataset stores no action masks; leave action_masks out"
            raise RequestRefusedError(422, "action_masks", message)
        if not _is_list(raw) or len(raw) != num:
            raise invalid_value_error("action_masks", raw, f"a list of {num}, one for each reward")
        if isinstance(raw, np.ndarray):
            if raw.dtype != np.bool_ or raw.shape != (num, width):
                raise invalid_value_error("action_masks", raw, f"booleans [{num}, {width}]")
            return raw
        for i, row in enumerate(raw):
            if type(row) is not list or len(row) != width or set(map(type, row)) != {bool}:
                raise invalid_value_error(f"action_masks[{i}]", row, f"{width} booleans")
        return np.array(raw, dtype=bool)


def _is_list(raw: Any) -> bool:
    return type(raw) is list or (isinstance(raw, np.ndarray) and raw.ndim > 0)


def _first(values: Any) -> Any:
    """Return the only one of a batch of one."""
    if isinstance(values, Mapping):
        return {key: _first(sub) for key, sub in values.items()}
    return values[0]


def _read_numbers(raw: Any, name: str, num: int, is_optional: bool) -> Array:
    """Return float64 [num], NaN for null where that may stand for an unknown one."""
    expected = "a finite number, or null if unknown" if is_optional else "a finite number"
    if isinstance(raw, np.ndarray):
        if raw.shape != (num,) or raw.dtype.kind not in "fiu":
            raise invalid_value_error(name, raw, f"{num} numbers, one for each reward")
        array = raw.astype(np.float64)
        is_fine = np.isfinite(array) | (np.isnan(array) & is_optional)
        if not is_fine.all():
            i = int(np.argmin(is_fine))
            raise RequestRefusedError(422, f"{name}[{i}]", found=str(array[i]), expected=expected)
        return array
    if type(raw) is not list or len(raw) != num:
        raise invalid_value_error(name, raw, f"a list of {num} numbers, one for each reward")
    for i, value in enumerate(raw):
        if value is None and is_optional:
            continue
        if type(value) not in (int, float) or not _is_finite(value):
            raise invalid_value_error(f"{name}[{i}]", value, expected)
    return np.array([math.nan if value is None else float(value) for value in raw])


def _read_rewards(raw: Any, num: int, is_optional: bool) -> Array:
    """Return float64 [num] whose sums, returns among them, stay finite; NaN for null."""
    rewards = _read_numbers(raw, "rewards", num, is_optional)
    beyond = np.abs(rewards) > MAX_REWARD
    if beyond.any():
        i = int(np.argmax(beyond))
        expected = f"a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, so that returns stay finite"
        raise RequestRefusedError(422, f"rewards[{i}]", found=f"{rewards[i]:g}", expected=expected)
    return rewards


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise invalid_value_error(name, value, "true or false")
    return bool(value)


def _agent(fields: Mapping[str, Any]) -> str:
    agent = fields.get("agent_id")
    if agent is None or agent == "":
        return ""
    check_name(agent, "agent_id")
    return str(agent)


def _whole(fields: Mapping[str, Any], name: str, highest: int) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= highest):
        raise invalid_value_error(name, value, f"a whole number from 0 to {highest}")
    return value


def _policies(fields: Mapping[str, Any], num: int) -> Any:
    policy = fields.get("policy")
    check_name(policy, "policy")
    return None if policy is None else np.array([policy] * num, dtype=object)


def _versions(fields: Mapping[str, Any], num: int) -> Array | None:
    version = _whole(fields, "policy_version", 2**63 - 1)
    if version is not None and fields.get("policy") is None:
        message = "policy_version without policy; send both"
        raise RequestRefusedError(422, "policy_version", message)
    return None if version is None else np.full(num, version, np.int64)


def _timestamps(fields: Mapping[str, Any], num: int) -> Array | None:
    raw = fields.get("timestamps")
    if raw is None:
        return None
    expected = "microseconds since 1970, UTC, a whole number"
    if isinstance(raw, np.ndarray):
        if raw.shape != (num,) or raw.dtype.kind not in "iu":
            raise invalid_value_error("timestamps", raw, f"{num} times: {expected}")
        raw = raw.tolist()
    if type(raw) is not list or len(raw) != num:
        raise invalid_value_error("timestamps", raw, f"a list of {num}, one for each reward")
    for i, value in enumerate(raw):
        if type(value) is not int or not _TIMESTAMPS[0] <= value <= _TIMESTAMPS[1]:
            raise invalid_value_error(f"timestamps[{i}]", value, expected)
    return np.array(raw, dtype=np.int64)
