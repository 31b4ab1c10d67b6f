"""Profile: what a snapshot holds, from statistics of its shards and a query of its episodes.

Minima, maxima, means and counts are of all rows; histograms are of an even sample of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.lake.profile.column_statistics import Dimension, Histogram, histogram
from replaylake.datastore.lake.profile.shard_statistics import (
    OnProgress,
    ShardStatistics,
    StepNumbers,
    read_statistics,
)
from replaylake.datastore.lake.profile.vectors import ValueCounts
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.storage.arrow_values import numbers, release_unused_memory
from replaylake.datastore.storage.table.column_ranges import ShardColumn, merge_ranges

# Bins of `policies over time`, and at most so many policies by name.
_NUM_PERIODS: Final = 40
_MAX_POLICIES: Final = 12
# Cells a side of the map of observations, and bins of the range of one continuous action.
_MAP_CELLS: Final = 48
_RANGE_BINS: Final = 20


@dataclass(frozen=True)
class PolicyShare:
    """Steps of one policy version in each period of the dataset; None: not recorded."""

    policy: str | None
    version: int | None
    num_steps: int
    by_period: tuple[int, ...]


@dataclass(frozen=True)
class IngestCheck:
    """What ingests said of the log: a check, how it ended, and how often it did."""

    check: str
    outcome: str
    num_episodes: int
    num_rows: int
    example: str


@dataclass(frozen=True)
class Profile:
    """Everything that `show --report` draws.

    summary: `Snapshot.describe`. returns, lengths: of episodes, exact. propensities: of the logged
    actions, exp(behavior_log_prob); densities where actions are continuous. by_timestamp: whether
    periods are of time, and not of the order of rows. missing: share of rows without a value, by
    column. num_sampled: rows in the histograms.
    """

    summary: Mapping[str, Any]
    returns: Histogram | None
    lengths: Histogram | None
    observations: tuple[Dimension, ...]
    observation_counts: tuple[ValueCounts, ...]
    actions: tuple[Dimension, ...]
    action_counts: tuple[ValueCounts, ...]
    reward: Dimension
    propensities: Dimension | None
    coverage: Coverage
    policies: tuple[PolicyShare, ...]
    by_timestamp: bool
    missing: Mapping[str, float]
    left_out: tuple[str, ...]
    checks: tuple[IngestCheck, ...]
    num_sampled: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; what is not finite is null."""
        body: dict[str, Any] = _finite(
            {f.name: getattr(self, f.name) for f in fields(self) if f.name != "summary"}
        )
        return body


def compute_profile(
    snapshot: Snapshot,
    history: Sequence[Mapping[str, Any]] = (),
    on_progress: OnProgress | None = None,
) -> Profile:
    """Count what a snapshot holds.

    history: the dataset's commits, whose ingests' door checks are listed. on_progress: called with
    (rows, rows in all). Cost: one pass over observations, actions and rewards of the shards that
    were not counted before; a query of the episodes. Raises: EmptyReplayError on a snapshot without
    rows; ShardCorruptError; NotFoundError for a version whose shards were removed.
    """
    if not snapshot.num_steps:
        raise EmptyReplayError(f"{snapshot.dataset}: found no steps, expected one to profile.")
    statistics = read_statistics(snapshot, on_progress)
    encoding = snapshot.spec.encoding
    layout = StepNumbers(snapshot.spec)
    observed, acted = layout.observations, layout.actions
    sample = statistics.sample(layout.max_sample_rows)
    merged = statistics.merge_numbers()

    def describe(names: Sequence[str], part: slice) -> tuple[Dimension, ...]:
        low, high = layout.low[part], layout.high[part]
        return merged.select(part).dimensions(names, low, high, sample[:, part])

    counts = statistics.merge_value_counts((observed, acted))
    observation_counts = observed.value_counts(counts[0])
    action_counts = acted.value_counts(counts[1], (encoding and encoding.action_names) or ())
    actions = describe(acted.names, layout.of_actions)
    (reward,) = describe([schema.REWARD], layout.of_reward)
    (propensity,) = describe(["propensity"], layout.of_propensity)
    columns = statistics.read_columns(snapshot.table.schema)
    policies, by_timestamp = _policies(statistics)
    returns, lengths = _episode_histograms(snapshot)
    # Only the statistics of the shards remain in memory.
    release_unused_memory()
    return Profile(
        summary=snapshot.describe(merge_ranges(columns, snapshot.table)),
        returns=returns,
        lengths=lengths,
        observations=describe(observed.names, layout.of_observations),
        observation_counts=observation_counts,
        actions=actions,
        action_counts=action_counts,
        reward=reward,
        propensities=propensity if propensity.num else None,
        coverage=compute_coverage(
            sample[:, layout.of_observations], actions, action_counts, observation_counts
        ),
        policies=policies,
        by_timestamp=by_timestamp,
        missing=_missing(columns, snapshot),
        left_out=(*observed.left_out, *acted.left_out),
        checks=_checks(history, snapshot.version),
        num_sampled=len(sample),
    )


def _episode_histograms(snapshot: Snapshot) -> tuple[Histogram | None, Histogram | None]:
    """Return those of returns and of lengths, over all episodes."""
    rows = snapshot.sql(
        'SELECT CAST("return" AS DOUBLE) AS total, CAST(num_steps AS DOUBLE) AS length '
        "FROM episodes"
    )
    returns, lengths = (
        histogram(np.asarray(numbers(rows.column(name)), np.float64)) for name in rows.column_names
    )
    return returns, lengths


def _missing(columns: Sequence[Mapping[str, ShardColumn]], snapshot: Snapshot) -> dict[str, float]:
    """Return the share of steps without a value, by column."""
    # A final observation is only where an episode or a piece of one ends.
    names = [name for name in snapshot.table.schema.names if name != schema.FINAL_OBSERVATION]
    shards = list(zip(columns, snapshot.files, strict=True))
    return {
        name: sum(
            known[name].num_missing if name in known else entry.num_rows for known, entry in shards
        )
        / snapshot.num_steps
        for name in names
    }


def _policies(statistics: ShardStatistics) -> tuple[tuple[PolicyShare, ...], bool]:
    """Return how many steps each policy version has in each period, the largest first."""
    counts, by_timestamp = statistics.count_policies(_NUM_PERIODS)
    ordered = sorted(counts.items(), key=lambda item: (-sum(item[1]), str(item[0])))
    shares = [PolicyShare(*key, sum(by), tuple(by)) for key, by in ordered[:_MAX_POLICIES]]
    if rest := ordered[_MAX_POLICIES:]:
        others = tuple(map(sum, zip(*(by for _, by in rest), strict=True)))
        shares.append(PolicyShare(f"{len(rest)} others", None, sum(others), others))
    return tuple(shares), by_timestamp


def _checks(history: Sequence[Mapping[str, Any]], version: int) -> tuple[IngestCheck, ...]:
    """Sum up what the ingests up to a version said; an ingest says it in each of its commits."""
    checks: dict[tuple[Any, str, str], IngestCheck] = {}
    for commit in history:
        if int(commit.get("version", 0)) > version:
            continue
        for one in commit.get("checks") or ():
            check = IngestCheck(
                str(one.get("name")),
                str(one.get("outcome", "")),
                int(one.get("num_episodes") or 0),
                int(one.get("num_rows") or 0),
                str(one.get("example") or ""),
            )
            checks[commit.get("producer"), check.check, check.outcome] = check
    joined: dict[tuple[str, str], IngestCheck] = {}
    for check in checks.values():
        key = (check.check, check.outcome)
        before = joined.get(key)
        joined[key] = check if before is None else _add_checks(before, check)
    return tuple(joined[key] for key in sorted(joined))


def _add_checks(first: IngestCheck, second: IngestCheck) -> IngestCheck:
    return IngestCheck(
        first.check,
        first.outcome,
        first.num_episodes + second.num_episodes,
        first.num_rows + second.num_rows,
        first.example,
    )


def _finite(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(sub) for key, sub in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(sub) for sub in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Coverage:
    """What a policy learned from the data can know about.

    action_share: of the actions of a Discrete space, the share that was ever taken; of continuous
    ones the mean share of 20 equal bins of each bounded number that were. action_entropy: of the
    actions taken, in nats, over its greatest possible value; None where actions are continuous.
    state_share: of a Discrete observation, the share of values that were ever seen.
    observation_map: counts on a grid [48, 48] over the first two principal components of the
    standardized observations, which hold `map_share` of their variance.
    """

    action_share: float | None
    action_entropy: float | None
    state_share: float | None
    observation_map: tuple[tuple[int, ...], ...] | None
    map_share: float | None


def compute_coverage(
    observed: Array,
    actions: Sequence[Dimension],
    action_counts: Sequence[ValueCounts],
    observation_counts: Sequence[ValueCounts],
) -> Coverage:
    """Return the coverage; `observed` float64 [m, D] is a sample of observations' numbers."""
    entropy = share = None
    if action_counts and len(action_counts) == len(actions):
        shares = [np.mean(np.asarray(one.counts) > 0) for one in action_counts]
        share = float(np.mean(shares))
        entropies = [_entropy(np.asarray(one.counts)) for one in action_counts]
        entropy = float(np.mean(entropies))
    elif bins := [_range_share(d.histogram, d.low, d.high) for d in actions]:
        known = [one for one in bins if one is not None]
        share = float(np.mean(known)) if known else None
    states = [np.mean(np.asarray(one.counts) > 0) for one in observation_counts]
    grid, map_share = _observation_map(observed)
    return Coverage(share, entropy, float(np.mean(states)) if states else None, grid, map_share)


def _entropy(counts: Array) -> float:
    if len(counts) < 2 or not counts.sum():
        return 1.0
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum() / np.log(len(counts)))


def _range_share(histogram: object, low: float | None, high: float | None) -> float | None:
    edges, counts = getattr(histogram, "edges", None), getattr(histogram, "counts", None)
    if edges is None or counts is None or low is None or high is None or low >= high:
        return None
    bounds = np.asarray(edges)
    middles = ((bounds[1:] + bounds[:-1]) / 2)[np.asarray(counts) > 0]
    bins = np.clip((middles - low) / (high - low) * _RANGE_BINS, 0, _RANGE_BINS - 1)
    return float(len(np.unique(bins.astype(int))) / _RANGE_BINS)


def _observation_map(rows: Array) -> tuple[tuple[tuple[int, ...], ...] | None, float | None]:
    finite = rows[np.isfinite(rows).all(axis=1)] if rows.size else rows
    if len(finite) < 2:
        return None, None
    spread = finite.std(axis=0)
    varying = finite[:, spread > 0]
    if varying.shape[1] < 2:
        return None, None
    scaled = (varying - varying.mean(axis=0)) / varying.std(axis=0)
    variances, axes = np.linalg.eigh(np.cov(scaled, rowvar=False))
    # eigh sorts upwards. An axis may point either way: the largest part of each is made positive.
    first = axes[:, [-1, -2]]
    first = first * np.sign(first[np.abs(first).argmax(axis=0), [0, 1]])
    flat = scaled @ first
    counts, _, _ = np.histogram2d(flat[:, 0], flat[:, 1], bins=_MAP_CELLS)
    grid = tuple(tuple(int(n) for n in row) for row in counts)
    return grid, float(variances[-2:].sum() / variances.sum())
