"""Decisions replayed: what a candidate would have done where a logged policy decided.

Asked before any traffic reaches it: how often the two agree, how likely the candidate thinks the
logged actions, how far its probabilities are from the logged ones, what it cannot act on, and how
long it takes. Whether it would earn more is another question (evaluate_policy.py).

With w = pi(a|s) / mu(a|s) of a logged action, and means over the decisions whose mu is known:

    total variation   mean of max(0, 1 - w), the probability that the two do otherwise
    KL(mu || pi)      minus the mean of ln w: infinite where pi never takes a logged action
    effective size    (sum w)^2 / sum w^2, of so many decisions (Kish 1965)

E_mu[max(0, 1 - w)] is the sum over actions of max(0, mu - pi), which is the total variation also
where pi does what mu never does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array, Box
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, EpisodeInvalidError
from replaylake.datastore.feedback.logged_decisions import DecisionReader, LoggedDecisions
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.offline.evaluation.ope.evaluated_policy import as_dtypes, load_evaluated_policy
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy

# Single decisions that are timed.
_NUM_TIMED: Final = 200
_MAX_GROUPS: Final = 10_000
_MAX_ERRORS: Final = 5
# Weights of densities know no bound; beyond e^300 the square of their sum would not be a number.
_MAX_LOG_WEIGHT: Final = 300.0
# Float32 actions that went through a log come back to the bit; a candidate's own differ by more.
_SAME_ACTION: Final = 1e-5

OnProgress = Callable[[int, int], None]


@dataclass
class Tally:
    """Sums over some decisions; `add` takes more of them.

    num_known: whose logged probability is known, and the candidate's too; num_impossible of those
    the candidate never takes. Agreement is of the candidate's mode with the logged action.
    """

    num: int = 0
    num_agreeing: int = 0
    num_densities: int = 0
    num_known: int = 0
    num_impossible: int = 0
    sum_probs: float = 0.0
    sum_log_ratios: float = 0.0
    sum_weights: float = 0.0
    sum_squares: float = 0.0
    max_weight: float = 0.0
    sum_short: float = 0.0
    sum_distances: float = 0.0

    def add(self, candidate: CandidateDecisions) -> None:
        self.num += len(candidate.agrees)
        self.num_agreeing += int(candidate.agrees.sum())
        self.sum_distances += float(candidate.distances.sum())
        if candidate.log_probs is None:
            return
        has_prob = ~np.isnan(candidate.log_probs)
        self.num_densities += int(has_prob.sum())
        self.sum_probs += float(np.exp(candidate.log_probs[has_prob]).sum())
        known = has_prob & ~np.isnan(candidate.logged)
        log_ratios = candidate.log_probs[known] - candidate.logged[known]
        weights = np.exp(np.minimum(log_ratios, _MAX_LOG_WEIGHT))
        possible = np.isfinite(log_ratios)
        self.num_known += len(weights)
        self.num_impossible += int((~possible).sum())
        self.sum_log_ratios += float(log_ratios[possible].sum())
        self.sum_weights += float(weights.sum())
        self.sum_squares += float((weights**2).sum())
        self.max_weight = max(self.max_weight, float(weights.max(initial=0.0)))
        self.sum_short += float(np.maximum(0.0, 1.0 - weights).sum())

    def to_json(self) -> dict[str, Any]:
        """Return means and counts; None for what is not known of any decision."""
        known, possible = self.num_known, self.num_known - self.num_impossible
        size = self.sum_weights**2 / self.sum_squares if self.sum_squares else 0.0
        return {
            "num_decisions": self.num,
            "agreement": _mean(self.num_agreeing, self.num),
            "mean_distance": _mean(self.sum_distances, self.num),
            "mean_prob": _mean(self.sum_probs, self.num_densities),
            "num_known": known,
            "num_impossible": self.num_impossible,
            "mean_log_ratio": _mean(self.sum_log_ratios, possible),
            "effective_sample_size": size if known else None,
            "mean_weight": _mean(self.sum_weights, known),
            "max_weight": self.max_weight if known else None,
            "total_variation": _mean(self.sum_short, known),
            "kl": None if self.num_impossible else _mean(-self.sum_log_ratios, known),
        }


@dataclass(frozen=True, eq=False)
class CandidateDecisions:
    """What the candidate says of N logged decisions.

    agrees bool [N]: its mode is the logged action; distances float64 [N], of Box actions between
    the two, root mean square over their elements, else 0 or 1; log_probs float64 [N] of the logged
    actions as it would act, None where it has none; logged float64 [N], ln of their logged
    probability, NaN where unknown.
    """

    agrees: Array
    distances: Array
    log_probs: Array | None
    logged: Array

    def select_rows(self, rows: Array) -> CandidateDecisions:
        """Return some of the rows, as numbers or flags."""
        log_probs = None if self.log_probs is None else self.log_probs[rows]
        return CandidateDecisions(
            self.agrees[rows], self.distances[rows], log_probs, self.logged[rows]
        )


@dataclass(frozen=True)
class DecisionReplay:
    """What became of replaying a log's decisions on a candidate.

    table: `decisions`, or `steps` where the dataset has none. total: over all; groups: by the text
    of a column's value. errors: observations that it cannot act on, with the reasons of the first.
    latency_ms: p50 and p99 of one decision at a time, in this process; None where none was made.
    """

    policy: Mapping[str, Any]
    dataset: str
    table: str
    version: int
    where: str | None
    by: str | None
    total: Tally
    groups: Mapping[str, Tally]
    num_errors: int
    errors: tuple[str, ...]
    latency_ms: tuple[float, float] | None
    no_density: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; groups by agreement, the least first."""
        latency = None
        if self.latency_ms is not None:
            latency = dict(zip(("p50", "p99"), self.latency_ms, strict=True))
        groups = [{"group": name, **tally.to_json()} for name, tally in self.groups.items()]
        groups.sort(key=lambda one: (one["agreement"], -one["num_decisions"]))
        return {
            **self.policy,
            "dataset": self.dataset,
            "table": self.table,
            "table_version": self.version,
            "where": self.where,
            **self.total.to_json(),
            "num_errors": self.num_errors,
            "errors": list(self.errors),
            "latency_ms": latency,
            "no_density": self.no_density or None,
            "by": self.by,
            "groups": groups,
        }


def replay_decisions(
    lake: Lake,
    policy: str,
    dataset: str,
    *,
    exploration: Exploration | None = None,
    where: str | None = None,
    limit: int | None = None,
    by: str | None = None,
    on_progress: OnProgress | None = None,
) -> DecisionReplay:
    """Compare a candidate with logged decisions; those that were served where there are any.

    Args:
        lake: where both are.
        policy: the candidate, such as `name:version`.
        dataset: its decisions, or else its steps, are replayed.
        exploration: how the candidate is to act; by default it takes its mode.
        where: SQL condition over the columns of that table, of one row.
        limit: how many decisions at most, the oldest shards first; None: all.
        by: a column of that table whose values are told apart; 10,000 of them at most.
        on_progress: called with (decisions replayed, decisions in the table).

    Raises: NotFoundError, SchemaMismatchError for other spaces, SpaceUnsupportedError for a policy
    that remembers; EmptyReplayError where no row is selected; QueryRefusedError, QueryError;
    ConfigInvalidError; ShardCorruptError.
    Memory: one shard.
    """
    if limit is not None and limit < 1:
        raise ConfigInvalidError(f"replay: limit: found {limit}, expected 1 or more.")
    reader = DecisionReader(lake.dataset(dataset), where=where, by=by)
    request = EvaluationRequest(dataset, policy, exploration=exploration or Exploration())
    evaluated_policy = load_evaluated_policy(lake, request, reader.spec)
    assert evaluated_policy.target is not None, "a policy was named"
    evaluated_policy.target.check_stateless()
    replay = _ReplayTotals(evaluated_policy.target)
    space = evaluated_policy.target.policy.spec.observation_space
    num_read = 0
    for batch in reader.batches(limit):
        replay.add_batch(replace(batch, observations=as_dtypes(space, batch.observations)))
        num_read += batch.num
        if on_progress is not None:
            on_progress(num_read, min(reader.num_rows, limit or reader.num_rows))
    if not num_read:
        raise EmptyReplayError(
            f"replay of {dataset}.{reader.name}: found no decision where {where or 'true'}, "
            "expected some. Widen the condition."
        )
    latency = None
    if replay.latencies:
        p50, p99 = np.quantile(replay.latencies, [0.5, 0.99]) * 1e3
        latency = (float(p50), float(p99))
    return DecisionReplay(
        evaluated_policy.reference,
        dataset,
        reader.name,
        reader.version,
        reader.where,
        by,
        replay.total,
        replay.groups,
        replay.num_errors,
        tuple(replay.errors),
        latency,
        evaluated_policy.target.no_density,
    )


@dataclass
class _ReplayTotals:
    """What was found so far."""

    target: TargetPolicy
    total: Tally = field(default_factory=Tally)
    groups: dict[str, Tally] = field(default_factory=dict)
    num_errors: int = 0
    errors: dict[str, None] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)

    def add_batch(self, batch: LoggedDecisions) -> None:
        """Ask of more decisions: of halves of halves where one row makes the policy refuse all."""
        try:
            candidate = _query_candidate(self.target, batch)
        except EpisodeInvalidError as error:
            if batch.num == 1:
                self.num_errors += 1
                if len(self.errors) < _MAX_ERRORS:
                    self.errors[str(error)] = None
                return
            half = batch.num // 2
            self.add_batch(batch.slice_rows(slice(0, half)))
            self.add_batch(batch.slice_rows(slice(half, batch.num)))
            return
        self.total.add(candidate)
        self._time(batch)
        if batch.groups is not None:
            self._add_to_groups(candidate, batch.groups)

    def _add_to_groups(self, candidate: CandidateDecisions, groups: Sequence[str]) -> None:
        rows: dict[str, list[int]] = {}
        for row, group in enumerate(groups):
            rows.setdefault(group, []).append(row)
        for group, selection in rows.items():
            self.groups.setdefault(group, Tally()).add(candidate.select_rows(np.asarray(selection)))
        if len(self.groups) > _MAX_GROUPS:
            raise ConfigInvalidError(
                f"replay: by: found more than {_MAX_GROUPS:,} values, expected a column with few, "
                "such as policy_version. Choose another, or narrow `where`."
            )

    def _time(self, batch: LoggedDecisions) -> None:
        """Time one decision after another, each once it was asked for already."""
        rng = np.random.default_rng(0)
        for row in range(min(batch.num, _NUM_TIMED - len(self.latencies))):
            one = batch.slice_rows(slice(row, row + 1))
            self.target.actions(one.observations, rng, one.masks)
            before = time.perf_counter()
            self.target.actions(one.observations, rng, one.masks)
            self.latencies.append(time.perf_counter() - before)


def _query_candidate(target: TargetPolicy, batch: LoggedDecisions) -> CandidateDecisions:
    policy = target.policy
    rng = np.random.default_rng(0)
    modes = policy.act(batch.observations, rng=rng, action_mask=batch.masks).actions
    logged = np.asarray(batch.actions)
    if isinstance(policy.spec.action_space, Box):
        flat = logged.reshape(len(logged), -1).astype(np.float64)
        gaps = np.asarray(modes, np.float64).reshape(flat.shape) - flat
        distances = np.sqrt((gaps**2).mean(axis=1))
        agrees = distances <= _SAME_ACTION * (1 + np.abs(flat).max(axis=1))
    else:
        agrees = (np.asarray(modes) == logged).reshape(len(logged), -1).all(axis=1)
        distances = 1.0 - agrees
    log_probs = None
    if not target.no_density:
        log_probs = target.log_probs(batch.observations, batch.actions, batch.masks)
    return CandidateDecisions(agrees, distances, log_probs, batch.log_probs)


def _mean(total: float, num: int) -> float | None:
    return total / num if num else None
