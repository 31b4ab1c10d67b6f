"""Evaluation on a task set: pass@k, mean reward and tokens, from stored samples of each task.

A sample is an episode. Its policy is the one that its steps name, or what an SQL condition selects;
its task is its group_id, or what an expression says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.logged_samples import LoggedSamples, read_logged_samples
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.group_views import GROUP_ID
from replaylake.offline.evaluation.task_sets.estimates import (
    TaskEstimate,
    estimate_difference,
    estimate_mean,
    pass_at_k,
)

# Intervals were measured from 20 tasks on (benchmarks/RESULTS.md).
FEWEST_TASKS: Final = 20
# Where fewer carry the value, intervals are nearly as wide as if nothing were known of the others.
_FEWEST_CARRYING: Final = 3.0
MEAN_REWARD: Final = "mean reward"
SUPPORTED: Final = "supported"
WEAK: Final = "weak"
# Names of conditions; a policy's is "policy" and its label.
_WHERE: Final = "where"
_SUCCESS: Final = "success"
_UNKNOWN_REWARD: Final = "with an unknown reward"


@dataclass(frozen=True)
class SampledPolicy:
    """Whose samples are evaluated: of a version that steps name, or those that `where` selects."""

    name: str | None = None
    version: int | None = None
    label: str | None = None
    where: str | None = None

    def __str__(self) -> str:
        return self.label if self.label is not None else f"{self.name}:{self.version}"


@dataclass(frozen=True)
class TaskSetRequest:
    """What is to be evaluated.

    dataset: name, at a version or tag. task: SQL expression over the columns of `steps`: its first
    value in an episode that is not NULL names the task. success: condition over episodes; None:
    their return is above 0. where: condition over episodes that selects samples. ks: of pass@k;
    None: powers of two up to the fewest samples of a task. level: of intervals.
    """

    dataset: str
    task: str = GROUP_ID
    success: str | None = None
    where: str | None = None
    ks: tuple[int, ...] | None = None
    level: float = 0.95

    def __post_init__(self) -> None:
        for k in self.ks or ():
            if k < 1:
                raise ConfigInvalidError(
                    f"evaluate: k: found {k}, expected 1 or more.", parameter="k"
                )
        if not 0 < self.level < 1:
            raise ConfigInvalidError(
                f"evaluate: level: found {self.level:g}, expected more than 0 and less than 1.",
                parameter="level",
            )


@dataclass(frozen=True, eq=False)
class TaskSamples:
    """The samples of one policy, by task.

    tasks: sorted names [N]; num_samples and num_passed: int64 [N]; rewards: mean reward of each
    task's samples, float64 [N], and reward_range the smallest and the largest of a sample, None
    where one is unknown. left_out: samples that do not count, by reason. unknown: how many of them
    have an unknown reward, as rollouts that failed do, by task; also of tasks that have no other.
    """

    policy: SampledPolicy
    tasks: tuple[str, ...]
    num_samples: NDArray[np.int64]
    num_passed: NDArray[np.int64]
    rewards: NDArray[np.float64] | None
    reward_range: tuple[float, float] | None
    tokens: TokenCost | None
    left_out: Mapping[str, int]
    unknown: Mapping[str, int]

    @property
    def num_unknown(self) -> int:
        return sum(self.unknown.values())

    def fill_unknown(self, *, passed: bool, reward: float) -> TaskSamples:
        """Return them with those of an unknown reward, as if each had this outcome."""
        tasks = tuple(sorted({*self.tasks, *self.unknown}))
        at = np.searchsorted(np.array(tasks, object), np.array(self.tasks, object))
        added = np.array([self.unknown.get(task, 0) for task in tasks], np.int64)
        num, num_passed, totals = added.copy(), added * passed, added * reward
        num[at] += self.num_samples
        num_passed[at] += self.num_passed
        rewards = None
        if self.rewards is not None:
            totals[at] += self.rewards * self.num_samples
            rewards = totals / num
        return replace(
            self, tasks=tasks, num_samples=num, num_passed=num_passed, rewards=rewards, unknown={}
        )

    def pass_at(self, k: int) -> NDArray[np.float64]:
        """Return pass@k of each task, NaN for those with fewer than k samples: float64 [N]."""
        return pass_at_k(self.num_samples, self.num_passed, k)


@dataclass(frozen=True)
class TokenCost:
    """Tokens of a policy's samples, on average.

    prompt: ids that the model was given, each counted once although later turns see it again.
    completion: ids that it sampled. completion_per_success: all sampled ids by the number of
    samples that passed; None if none did.
    """

    prompt: float
    completion: float
    completion_per_success: float | None


@dataclass(frozen=True)
class Measure:
    """An estimate of one policy by name (`pass@4`, `mean reward`), and its difference.

    difference: over the tasks that both have, from the first policy; None for that, or without a
    common task.
    """

    name: str
    estimate: TaskEstimate
    difference: TaskEstimate | None = None

    def to_json(self) -> dict[str, Any]:
        one, other = self.estimate, self.difference
        return {
            "estimator": self.name,
            "value": one.value,
            "ci_low": one.low,
            "ci_high": one.high,
            "num_tasks": one.num_tasks,
            "difference": None if other is None else other.value,
            "difference_low": None if other is None else other.low,
            "difference_high": None if other is None else other.high,
            "num_shared_tasks": None if other is None else other.num_tasks,
        }


@dataclass(frozen=True)
class PolicyOnTasks:
    """How one policy solves the tasks. against: the policy that differences are taken from."""

    samples: TaskSamples
    measures: tuple[Measure, ...]
    against: str | None
    verdict: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        samples, policy = self.samples, self.samples.policy
        return {
            "policy": policy.name,
            "policy_version": policy.version,
            "label": str(policy),
            "where": policy.where,
            "num_tasks": len(samples.tasks),
            "num_samples": int(samples.num_samples.sum()),
            "fewest_samples": int(samples.num_samples.min()),
            "most_samples": int(samples.num_samples.max()),
            "num_passed": int(samples.num_passed.sum()),
            "estimates": [one.to_json() for one in self.measures],
            "against": self.against,
            "tokens": None if samples.tokens is None else asdict(samples.tokens),
            "left_out": dict(samples.left_out),
            "verdict": self.verdict,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class TaskSetReport:
    """What the stored samples say of each policy, the first of which the others are compared to."""

    dataset: str
    version: int
    request: TaskSetRequest
    policies: tuple[PolicyOnTasks, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "version": self.version,
            "task": self.request.task,
            "success": self.request.success,
            "where": self.request.where,
            "level": self.request.level,
            "policies": [one.to_json() for one in self.policies],
        }


def select_sampled_policy(lake: Lake, text: str) -> SampledPolicy:
    """Return whose samples a text means.

    `NAME:VERSION` need not be registered, `NAME@ALIAS` and `NAME` are looked up in the registry;
    `LABEL=CONDITION` are the samples that a condition over episodes selects.
    Raises: InvalidNameError, NotFoundError.
    """
    label, equals, condition = text.partition("=")
    if equals and label.strip():
        return SampledPolicy(label=label.strip(), where=condition.strip())
    name, _, version = text.rpartition(":")
    if name and version.isascii() and version.isdigit():
        return SampledPolicy(name, int(version))
    ref = lake.registry.resolve(text)
    return SampledPolicy(ref.name, ref.version)


def evaluate_task_set(
    lake: Lake, policies: Sequence[SampledPolicy], request: TaskSetRequest
) -> TaskSetReport:
    """Estimate pass@k, mean reward and tokens of policies, and compare each with the first.

    Raises: ConfigInvalidError for no policy, or two of one name; NotFoundError for the dataset or a
    column; QueryError, QueryRefusedError; EmptyReplayError for a policy without samples, without a
    task of k samples, or without a task of the first. Cost: one query over the steps, another one
    for each condition.
    """
    labels = [str(one) for one in policies]
    if not labels or len(set(labels)) < len(labels):
        raise ConfigInvalidError(
            f"evaluate: found policies {', '.join(labels) or 'none'}, expected one or more, each "
            "once."
        )
    snapshot = lake.snapshot(request.dataset)
    samples = read_task_samples(snapshot, policies, request)
    limits = [one.reward_range for one in samples]
    known = [one for one in limits if one is not None]
    limit = None
    if len(known) == len(limits):
        limit = min(low for low, _ in known), max(high for _, high in known)
    found: list[PolicyOnTasks] = []
    for one in samples:
        against = samples[0] if found else None
        measures = tuple(_iter_measures(one, against, _choose_ks(samples, request), limit, request))
        verdict, reason = _judge(measures[0].estimate, one)
        label = None if against is None else str(against.policy)
        found.append(PolicyOnTasks(one, measures, label, verdict, reason))
    return TaskSetReport(snapshot.dataset, snapshot.version, request, tuple(found))


def _choose_ks(samples: Sequence[TaskSamples], request: TaskSetRequest) -> tuple[int, ...]:
    if request.ks is not None:
        return tuple(sorted(set(request.ks)))
    fewest = min(int(one.num_samples.min()) for one in samples)
    return (*(2**i for i in range(int(math.log2(fewest)) + 1) if 2**i < fewest), fewest)


def _iter_measures(
    ours: TaskSamples,
    theirs: TaskSamples | None,
    ks: Sequence[int],
    limit: tuple[float, float] | None,
    request: TaskSetRequest,
) -> Iterator[Measure]:
    for k in ks:
        values = ours.pass_at(k)
        enough = ~np.isnan(values)
        if not enough.any():
            raise EmptyReplayError(
                f"evaluate: pass@{k} of {ours.policy}: found at most {ours.num_samples.max()} "
                f"samples of a task, expected {k} or more. Request a smaller `k`, or sample more."
            )
        estimate = estimate_mean(values[enough], request.level)
        difference = None
        if theirs is not None:
            pair = pair_tasks(ours, values, theirs, theirs.pass_at(k), f"pass@{k}")
            difference = estimate_difference(*pair, request.level)
        yield Measure(f"pass@{k}", estimate, difference)
    if ours.rewards is None or limit is None or limit[0] == limit[1]:
        return
    low, high = limit
    estimate = estimate_mean(ours.rewards, request.level, low=low, high=high)
    difference = None
    if theirs is not None and theirs.rewards is not None:
        pair = pair_tasks(ours, ours.rewards, theirs, theirs.rewards, MEAN_REWARD)
        difference = estimate_difference(*pair, request.level, width=high - low)
    yield Measure(MEAN_REWARD, estimate, difference)


def pair_tasks(
    ours: TaskSamples, values: Array, theirs: TaskSamples, others: Array, what: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the values of both [M] for the M tasks that both have a value of.

    Raises: EmptyReplayError if there is none.
    """
    _, at, other_at = np.intersect1d(
        np.array(ours.tasks, object), np.array(theirs.tasks, object), True, return_indices=True
    )
    left, right = values[at], others[other_at]
    both = ~(np.isnan(left) | np.isnan(right))
    if not both.any():
        raise EmptyReplayError(
            f"evaluate: {what}: found no task of {len(ours.tasks):,} of {ours.policy} and "
            f"{len(theirs.tasks):,} of {theirs.policy} that both have enough samples of: their "
            "difference is taken task by task. Sample the same tasks, or select with `task` the "
            "column that is equal for both."
        )
    return left[both], right[both]


def _judge(estimate: TaskEstimate, samples: TaskSamples) -> tuple[str, str]:
    """Return the verdict on pass@k with the smallest k, and its reason."""
    if estimate.num_tasks < FEWEST_TASKS:
        return WEAK, (
            f"{estimate.num_tasks:,} tasks are few: how often intervals contain the truth was "
            f"measured from {FEWEST_TASKS} on."
        )
    num_unknown = samples.num_unknown
    num = num_unknown + int(samples.num_samples.sum())
    if num_unknown / num > (estimate.high - estimate.low) / 2:
        return WEAK, (
            f"{num_unknown:,} of {num:,} samples have an unknown reward, as rollouts that failed "
            "do: the estimate leaves them out, and they could move it by more than its interval."
        )
    if estimate.num_carrying < _FEWEST_CARRYING:
        kind = "successes" if estimate.value <= 0.5 else "failures"
        return WEAK, (
            f"An effective {estimate.num_carrying:.1f} of {estimate.num_tasks:,} tasks bring the "
            f"{kind} ({_FEWEST_CARRYING:.0f} needed): the interval is wide, as others may do so."
        )
    return SUPPORTED, f"{estimate.num_tasks:,} tasks, drawn independently."


def read_task_samples(
    snapshot: Snapshot, policies: Sequence[SampledPolicy], request: TaskSetRequest
) -> list[TaskSamples]:
    """Read the samples of each policy. Raises: as evaluate_task_set."""
    asked = {_WHERE: request.where, _SUCCESS: request.success}
    asked |= {f"policy {one}": one.where for one in policies}
    conditions = {name: text for name, text in asked.items() if text is not None}
    samples = read_logged_samples(snapshot, request.task, conditions)
    return [_select(snapshot, samples, policy, request) for policy in policies]


def _select(
    snapshot: Snapshot, samples: LoggedSamples, policy: SampledPolicy, request: TaskSetRequest
) -> TaskSamples:
    everything = np.ones(len(samples.rewards), np.bool_)
    chosen = samples.flags.get(_WHERE, everything)
    faults: dict[str, NDArray[np.bool_]] = {}
    if policy.where is not None:
        chosen = chosen & samples.flags[f"policy {policy}"]
    else:
        version = float(policy.version or 0)
        chosen = chosen & (samples.policies == policy.name)
        chosen &= (samples.first_versions <= version) & (samples.last_versions >= version)
        faults["by several versions"] = samples.versions != version
    if not chosen.any():
        raise EmptyReplayError(_explain_no_samples(snapshot, samples, policy, request))
    faults["without a task"] = samples.tasks == np.array(None)
    if request.success is None:
        faults[_UNKNOWN_REWARD] = np.isnan(samples.rewards)
    left_out, unknown = {}, {}
    for reason, flags in faults.items():
        if num := int((chosen & flags).sum()):
            left_out[reason] = num
        if reason == _UNKNOWN_REWARD:
            names, counts = np.unique(samples.tasks[chosen & flags], return_counts=True)
            unknown = dict(zip(names.tolist(), counts.tolist(), strict=True))
        chosen = chosen & ~flags
    if not chosen.any():
        drops = ", ".join(f"{num:,} {reason}" for reason, num in left_out.items())
        raise EmptyReplayError(
            f"evaluate: {snapshot.dataset}@{snapshot.version}: found no sample of {policy} that "
            f"counts ({drops}), expected some with a task, a known reward and one version. Name "
            "the task with `task`, or what counts as success with `success`."
        )
    return _group(samples, chosen, policy, left_out, unknown)


def _explain_no_samples(
    snapshot: Snapshot, samples: LoggedSamples, policy: SampledPolicy, request: TaskSetRequest
) -> str:
    where = f" where {request.where}" if request.where is not None else ""
    found = f"evaluate: {snapshot.dataset}@{snapshot.version}: found no sample of {policy}{where}"
    if policy.where is not None:
        return f"{found}, for which {policy.where}. Widen the condition."
    known = sorted(
        {
            f"{name}:{version:.0f}"
            for name, version in zip(samples.policies, samples.versions, strict=True)
            if name is not None and version == version
        }
    )
    more = f" and {len(known) - 8:,} more" if len(known) > 8 else ""
    return (
        f"{found}, expected one of {', '.join(known[:8]) or 'none'}{more}, which its steps name. "
        "LABEL=CONDITION selects samples by SQL."
    )


def _group(
    samples: LoggedSamples,
    chosen: NDArray[np.bool_],
    policy: SampledPolicy,
    left_out: Mapping[str, int],
    unknown: Mapping[str, int],
) -> TaskSamples:
    names, places = np.unique(samples.tasks[chosen], return_inverse=True)
    num, rewards = np.bincount(places, minlength=len(names)), samples.rewards[chosen]
    passed = samples.flags.get(_SUCCESS, samples.rewards > 0)[chosen]
    num_passed = np.bincount(places, weights=passed, minlength=len(names)).astype(np.int64)
    means = reward_range = None
    if not np.isnan(rewards).any():
        means = np.bincount(places, weights=rewards, minlength=len(names)) / num
        reward_range = float(rewards.min()), float(rewards.max())
    return TaskSamples(
        policy,
        tuple(names),
        num,
        num_passed,
        means,
        reward_range,
        _sum_tokens(samples, chosen, int(passed.sum())),
        left_out,
        unknown,
    )


def _sum_tokens(
    samples: LoggedSamples, chosen: NDArray[np.bool_], num_passed: int
) -> TokenCost | None:
    if samples.observation_tokens is None or samples.action_tokens is None:
        return None
    prompt, completion = samples.observation_tokens[chosen], samples.action_tokens[chosen]
    # Samples whose ids are unknown would count as free.
    if np.isnan(prompt).any() or np.isnan(completion).any():
        return None
    per_success = float(completion.sum()) / num_passed if num_passed else None
    return TokenCost(float(prompt.mean()), float(completion.mean()), per_success)
