"""POST /act: observations in, actions with their log-probabilities and decision ids out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.spaces import Array, Values, take
from replaylake.datastore.errors import EpisodeInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.exploration import ActingMode
from replaylake.datastore.lake.policies.policy import Act
from replaylake.serve.api.act_answer import Group, answer_of, one_answer
from replaylake.serve.api.act_options import NO_OPTIONS, resolve_acting_mode
from replaylake.serve.api.act_request import ActReader, ActRequest, join_requests
from replaylake.serve.api.latency_estimate import LatencyEstimate
from replaylake.serve.api.micro_batcher import MicroBatcher, PendingRequest
from replaylake.serve.api.values import (
    encode_observations,
    invalid_value_error,
    read_values,
    shorten,
)
from replaylake.serve.messages import Request, RequestRefusedError, Response
from replaylake.serve.monitoring.link_times import BATCH_WAIT, PARSE, is_measured
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.monitoring.rate_limited_log import RateLimitedLog
from replaylake.serve.recording.decision_log import Clock, DecisionBatch, json_log_probs
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.router import ServedPolicy

_logger = logging.getLogger(__name__)
_MAX_READERS: Final = 16
# For one request alone. Some of those that take longer run better in threads, in parallel.
_QUICK_S: Final = 0.0003


class ActEndpoint:
    """Chooses actions, writes the decisions, then answers."""

    def __init__(self, serving: Callable[[], ServingState], metrics: Metrics, clock: Clock) -> None:
        self._serving, self._metrics = serving, metrics
        self._clock = clock
        self._rng: np.random.Generator | None = None
        self._readers: dict[int, ActReader] = {}
        self._paces: dict[str, LatencyEstimate] = {}
        self._together = MicroBatcher(
            self._answer_batch, lambda seconds: metrics.links.add(BATCH_WAIT, seconds)
        )
        self._complaints = RateLimitedLog(_logger, "/act")

    async def __call__(self, request: Request) -> Response:
        """Answer one, in a thread if it takes long. Raises: RequestRefusedError, StorageError."""
        serving = self._serving()
        pace = self._paces.get(request.content_type)
        if pace is None:
            pace = LatencyEstimate()
            if len(self._paces) < _MAX_READERS:  # types are the client's to make up
                self._paces[request.content_type] = pace
        has_company = request.num_behind or not self._together.is_empty
        if has_company and pace.is_within(len(request.body), _QUICK_S):
            single = self._read_single(serving, request, pace)
            if single is not None:
                return await self._together.answer(
                    serving, single, request.num_behind, request.is_measured
                )
        return await pace.run(len(request.body), lambda: self._answer(serving, request))

    def act_on_batch(
        self, serving: ServingState, fields: Mapping[str, Any], served: ServedPolicy | None
    ) -> tuple[ActRequest, list[Group]]:
        """Act on a batch that came by another protocol, as on one of /act, and record it.

        fields: those of /act, `observation` holding the rows. served: the version that acts for
        episodes without a state; None for those that the router assigns.
        Raises: RequestRefusedError, StorageError.
        """
        body = self._reader(serving).read_batch(fields, serving.limits.batch)
        groups, _ = self._decide(serving, body, served, None)
        return body, groups

    def _read_single(
        self, serving: ServingState, request: Request, pace: LatencyEstimate
    ) -> PendingRequest | None:
        """Return a request for one plain observation; None if it asks for more, or is refused."""
        router = serving.router
        spec = router.one.policy.spec
        if len(router.arms) > 1 or spec.state_size or "msgpack" in request.accept:
            return None
        start = perf_counter() if request.is_measured else 0.0
        body = self._reader(serving).read(request, serving.limits.batch)
        is_plain = body.options is NO_OPTIONS and body.action_mask is None
        if body.is_batch or not is_plain or body.states is not None:
            return None
        raw = encode_observations(spec.encoding, body.raw, body.field, False)
        values = read_values(spec.observation_space, raw, body.field, False)
        if type(values) is not np.ndarray:
            return None
        if spec.encoding is not None:
            self._note_unknown(spec.encoding, body)
        if request.is_measured:
            self._metrics.links.add(PARSE, perf_counter() - start, len(request.body))
        return PendingRequest(
            body, _observations_to_log(raw, values)[0], values, pace, len(request.body)
        )

    def _answer_batch(
        self, serving: ServingState, singles: Sequence[PendingRequest]
    ) -> list[Response | Exception]:
        """Answer requests that came together as one batch, each as if it had come alone."""
        if len(singles) > 1:
            start = perf_counter()
            try:
                return [*self._answer_all(serving, singles)]
            except RequestRefusedError:
                pass  # by one of them, which only it is to hear of
            finally:
                share = (perf_counter() - start) / len(singles)
                for single in singles:
                    single.latency.learn(single.num_bytes, share)
        answers: list[Response | Exception] = []
        for single in singles:
            try:
                answers += self._answer_all(serving, [single])
            except Exception as error:
                answers.append(error)
        return answers

    def _answer_all(
        self, serving: ServingState, singles: Sequence[PendingRequest]
    ) -> list[Response]:
        served = serving.router.one
        # A batch is drawn by itself: its first request may be none that is measured.
        times = [perf_counter()] if is_measured() else None
        body = join_requests([single.request for single in singles])
        values = np.concatenate([single.values for single in singles])
        raw = [single.raw for single in singles]
        group = self._act(serving, body, _Part(served, None, None), raw, values, self._generator())
        if times is not None:
            times.append(perf_counter())
        records = self._record(serving, body, [group])
        if times is not None:
            times.append(perf_counter())
        answers = [
            one_answer(group, row, (single.request.unknown_categories or ((),))[0])
            for row, single in enumerate(singles)
        ]
        if times is not None:
            # The first: requests of a batch were parsed one by one.
            times = [times[0], *times, perf_counter()]
            num_bytes = sum(len(one.body) for one in answers)
            self._metrics.links.add_act(times, len(singles), (0, sum(map(len, records)), num_bytes))
        return answers

    def _note_unknown(self, encoding: Encoding | None, body: ActRequest) -> None:
        """Count, log and keep for the answer the categories that the encoding does not know."""
        if encoding is None or not encoding.has_categories:
            return
        unknown = [
            encoding.find_unknown_categories(value) if type(value) is dict else []
            for value in body.raw
        ]
        if not any(unknown):
            return
        body.unknown_categories = unknown
        for value, names in zip(body.raw, unknown, strict=True):
            for name in names:
                self._metrics.count_unknown_category(name)
                self._complaints.warning(
                    f"{name}: found {shorten(repr(value[name]))}, which is not in the vocabulary "
                    "of the policy; it is encoded as other"
                )

    def _generator(self) -> np.random.Generator:
        if self._rng is None:
            # Made at the first request: a process that forks before that gives no two workers one.
            self._rng = np.random.default_rng()
        return self._rng

    def _answer(self, serving: ServingState, request: Request) -> Response:
        times = [perf_counter()] if request.is_measured else None
        body = self._reader(serving).read(request, serving.limits.batch)
        groups, records = self._decide(serving, body, None, times)
        answer = answer_of(body, groups, serving.states, request.accept)
        if times is not None:
            self._metrics.links.add_act(
                [*times, perf_counter()],
                len(body.episode_ids),
                (len(request.body), sum(map(len, records)), len(answer.body)),
            )
        return answer

    def _decide(
        self,
        serving: ServingState,
        body: ActRequest,
        served: ServedPolicy | None,
        times: list[float] | None,
    ) -> tuple[list[Group], Sequence[bytes]]:
        """Choose the actions and record them; return the groups and the records of the log.

        times: gets the time after the values are read, the actions chosen, the decisions recorded.
        """
        _check_allowed(serving, body)
        seed = body.options.seed
        rng = self._generator() if seed is None else np.random.default_rng(seed)
        # All versions that are served at once have one observation space and encoding.
        spec = serving.router.one.policy.spec
        raw = encode_observations(spec.encoding, body.raw, body.field, body.is_batch)
        values = read_values(spec.observation_space, raw, body.field, body.is_batch)
        self._note_unknown(spec.encoding, body)
        raw = _observations_to_log(raw, values)
        if times is not None:
            times.append(perf_counter())
        groups = [
            self._act(serving, body, part, *_part_of(part, raw, values), rng)
            for part in _assign_parts(serving, body, served)
        ]
        if times is not None:
            times.append(perf_counter())
        records = self._record(serving, body, groups)
        if times is not None:
            times.append(perf_counter())
        return groups, records

    def _record(
        self, serving: ServingState, body: ActRequest, groups: Sequence[Group]
    ) -> Sequence[bytes]:
        """Give decisions their ids, and log and count them; return the records that were logged.

        Raises: StorageError.
        """
        records: Sequence[bytes] | None = ()
        timestamp = self._clock.now()
        for group in groups:
            served = group.served
            group.ids = serving.signer.issue(
                served.name, served.version, timestamp, len(group.actions)
            )
        log = serving.log
        if log is not None:
            decided = [_make_decision_batch(body, group, timestamp) for group in groups]
            records = log.write_decisions(decided)
            if records is None:
                self._metrics.count_log_lost(sum(len(group.ids) for group in groups))
        for group in groups:
            served = group.served
            self._metrics.count_decisions(
                served.name, served.version, group.deterministic, len(group.ids)
            )
        return records or ()

    def _act(
        self,
        serving: ServingState,
        body: ActRequest,
        part: _Part,
        raw: Sequence[Any] | Array,
        values: Values,
        rng: np.random.Generator,
    ) -> Group:
        """Have one version act for its rows. Raises: RequestRefusedError."""
        served = part.served
        mode = resolve_acting_mode(body.options, serving.exploration, served.policy.spec)
        mask = body.action_mask
        if mask is not None and part.rows is not None:
            mask = mask[part.rows]
        try:
            act = served.policy.act(
                values,
                part.state,
                rng=rng,
                deterministic=mode.deterministic,
                temperature=mode.temperature,
                epsilon=mode.epsilon,
                action_mask=mask,
            )
        except (EpisodeInvalidError, SpaceUnsupportedError) as error:
            message = f"{str(error).rstrip('.')}; GET /policy has the observation space"
            raise RequestRefusedError(422, body.field, message) from error
        group = _group(part, act, mode, raw, mask, body.field)
        self._metrics.observe_acts(
            served,
            values,
            act.log_probs,
            len(act.actions),
            is_drawn=not mode.is_mode,
            epsilon=mode.epsilon,
        )
        return group

    def _reader(self, serving: ServingState) -> ActReader:
        spec = serving.router.one.policy.spec
        reader = self._readers.get(id(spec))
        if reader is None:
            if len(self._readers) >= _MAX_READERS:
                self._readers.clear()
            # It holds the spec, so no other comes to have this id.
            reader = self._readers[id(spec)] = ActReader(spec)
        return reader


def _check_allowed(serving: ServingState, body: ActRequest) -> None:
    log = serving.log
    if body.action_mask is not None and log is not None and not log.takes_masks:
        message = f"dataset {log.dataset.name} stores no action masks; leave the mask out"
        raise RequestRefusedError(422, "action_mask", message)
    if not serving.takes_options and (field := body.options.exploring_field):
        message = f"this server takes no exploration options (request_options); leave {field} out"
        raise RequestRefusedError(422, field, message)


@dataclass(frozen=True, slots=True)
class _Row:
    served: ServedPolicy
    state: Array | None


@dataclass(slots=True)
class _Part:
    """The rows that one version acts for, None being all; state float32 [N, S] of those rows."""

    served: ServedPolicy
    rows: Sequence[int] | None
    state: Array | None


def _part_of(
    part: _Part, raw: Sequence[Any] | Array, values: Values
) -> tuple[Sequence[Any] | Array, Values]:
    if part.rows is None:
        return raw, values
    rows = list(part.rows)
    return [raw[row] for row in rows], take(values, rows)


def _assign_parts(
    serving: ServingState, body: ActRequest, served: ServedPolicy | None
) -> list[_Part]:
    """Return which version acts for which rows, and from which states.

    A row with a state goes on with the version that made it; other rows with `served`, or where
    that is None with what the router assigns. Raises: RequestRefusedError.
    """
    num = len(body.episode_ids)
    groups: list[tuple[ServedPolicy, Sequence[int]]]
    if served is None:
        groups = serving.router.assign_rows(body.episode_ids, body.options.seed)
    else:
        groups = [(served, range(num))]
    if body.states is None:
        if len(groups) == 1:
            served = groups[0][0]
            return [_Part(served, None, _initial_states(served, num))]
        return [_Part(served, rows, _initial_states(served, len(rows))) for served, rows in groups]
    by_row: dict[int, _Row] = {row: _Row(served, None) for served, rows in groups for row in rows}
    for row, token in enumerate(body.states):
        if token is not None:
            place = f"state[{row}]" if body.is_batch else "state"
            by_row[row] = _resume_row(serving, token, place)
    rows_of: dict[int, list[int]] = {}
    for row in range(num):
        rows_of.setdefault(id(by_row[row].served), []).append(row)
    return [
        _Part(
            by_row[rows[0]].served,
            rows if len(rows_of) > 1 else None,
            _stack_states(by_row[rows[0]].served, [by_row[row].state for row in rows]),
        )
        for rows in rows_of.values()
    ]


def _resume_row(serving: ServingState, token: str, place: str) -> _Row:
    state = serving.states.read(token)
    if state is None:
        raise invalid_value_error(
            place, token, "a state signed by this server, or by one with the same state key"
        )
    served = serving.router.find_version(state.policy, state.version)
    if served is None:
        version = f"{state.policy}:{state.version}"
        message = f"state expired, {version} is no longer served; start a new episode"
        raise RequestRefusedError(410, place, message)
    if len(state.numbers) != served.policy.spec.state_size:
        found, expected = f"{len(state.numbers)} numbers", f"{served.policy.spec.state_size}"
        raise RequestRefusedError(422, place, found=found, expected=expected)
    return _Row(served, state.numbers)


def _initial_states(served: ServedPolicy, num: int) -> Array | None:
    policy = served.policy
    return policy.initial_state(num) if policy.spec.state_size else None


def _stack_states(served: ServedPolicy, states: list[Array | None]) -> Array | None:
    whole = _initial_states(served, len(states))
    if whole is not None:
        for i, state in enumerate(states):
            if state is not None:
                whole[i] = state
    return whole


def _group(
    part: _Part,
    act: Act,
    manner: ActingMode,
    observations: Any,
    mask: Array | None,
    field: str,
) -> Group:
    if act.actions.dtype.kind == "f" and not np.isfinite(act.actions).all():
        message = (
            "the policy's action for it is not finite; "
            "send observations in the range of the training data"
        )
        raise RequestRefusedError(422, field, message)
    return Group(
        served=part.served,
        rows=part.rows,
        act=act,
        observations=observations,
        actions=act.actions.tolist(),
        log_probs=json_log_probs(act.log_probs, len(act.actions)),
        masks=None if mask is None else mask.tolist(),
        deterministic=manner.is_mode,
    )


def _observations_to_log(raw: Sequence[Any] | Array, values: Values) -> Sequence[Any] | Array:
    """Return observations for the log: as they came, but arrays as the space has them."""
    if type(values) is np.ndarray and (type(raw) is np.ndarray or type(raw[0]) is np.ndarray):
        return values
    return raw


def _make_decision_batch(body: ActRequest, group: Group, timestamp: int) -> DecisionBatch:
    def of(column: Sequence[Any]) -> Sequence[Any]:
        return column if group.rows is None else [column[row] for row in group.rows]

    return DecisionBatch(
        ids=group.ids,
        request_ids=of(body.request_ids),
        episode_ids=of(body.episode_ids),
        steps=of(body.steps),
        observations=group.observations,
        actions=group.actions,
        log_probs=group.log_probs,
        masks=group.masks,
        timestamp=timestamp,
        policy=group.served.name,
        policy_version=group.served.version,
        deterministic=group.deterministic,
        package_sha256=group.served.sha256,
    )
