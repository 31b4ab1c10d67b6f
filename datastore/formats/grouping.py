"""Grouping: steps into episodes, with the checks that only neighbouring rows can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from replaylake.datastore.episode import Episode
from replaylake.datastore.formats.arrays import Mask
from replaylake.datastore.formats.format import Finding, Rejected
from replaylake.datastore.formats.steps import Fault, Steps
from replaylake.datastore.formats.tables import Survey
from replaylake.datastore.spaces import Array, Values, num_values, take

_EXPECTED: Final[dict[str, str]] = {
    "missing": "found no value, expected one in each row",
    "shape": "found another number of values than in most rows, expected the same in each",
    "not_finite": "found NaN or infinity, expected finite numbers",
    "not_whole": "found a value that is not a whole number, expected one",
    "not_a_flag": "found a value other than true, false, 0 and 1",
    "propensity": "found a probability outside (0, 1] or a log-probability above 0",
    "step_twice": "found the same step twice, expected each once",
    "gap": "found a gap in the steps, expected each step to follow the one before",
    "end_inside": "found an end of episode before the last row, expected it on the last row only",
    "next_observation": "found a next observation that is not the following row's observation: "
    "the rows are out of order, shifted, or another log's",
    "negative_step": "found a negative step, expected 0 or more",
}


# The fields of Steps that are arrays, or mappings of arrays, with a row a step.
_PER_ROW: Final = (
    "origins",
    "observations",
    "actions",
    "rewards",
    "terminated",
    "truncated",
    "next_observations",
    "has_next",
    "final_observations",
    "has_final",
    "numbers",
    "env_steps",
    "log_probs",
    "masks",
    "timestamps",
    "policies",
    "policy_versions",
)


@dataclass(frozen=True)
class Groups:
    """Which episode and agent each row belongs to: `codes` int64 [n] index `ids` and `agents`."""

    codes: Array
    ids: list[str]
    agents: list[str] | None = None


@dataclass
class Census:
    """Counts that become notes."""

    num_open: int = 0
    num_longer: int = 0
    terminated_lengths: dict[int, int] | None = None

    def add(self, lengths: Array, terminated: Mask, num_open: int, num_longer: int) -> None:
        counted = dict(zip(*np.unique(lengths[terminated], return_counts=True), strict=True))
        known = self.terminated_lengths or {}
        for length, count in counted.items():
            known[int(length)] = known.get(int(length), 0) + int(count)
        self.terminated_lengths = known
        self.num_open += num_open
        self.num_longer += num_longer


def group(
    steps: Steps, groups: Groups, seen: Survey, time_limit: int | None, census: Census
) -> Iterator[Episode | Rejected]:
    """Yield the episodes of whole groups, in the order of their first rows."""
    order = _sorted_rows(groups.codes, steps.numbers)
    if order is not None:
        steps, groups = _reordered(steps, order), replace(groups, codes=groups.codes[order])
    starts = np.flatnonzero(np.diff(groups.codes, prepend=-1))
    ends = np.append(starts[1:], len(steps))
    faults = [*steps.faults, *_neighbour_faults(steps, groups.codes)]
    rejects = _findings(faults, steps, starts, seen)
    truncated, terminated = steps.truncated[ends - 1], steps.terminated[ends - 1]
    numbers = steps.numbers
    first = np.zeros(len(starts), np.int64) if numbers is None else numbers[starts]
    lengths = ends - starts + first
    if time_limit is not None:
        at_limit = terminated & ~truncated & (lengths == time_limit)
        terminated, truncated = terminated & ~at_limit, truncated | at_limit
    longer = 0 if time_limit is None else int((lengths > time_limit).sum())
    census.add(lengths, terminated, int((~terminated & ~truncated).sum()), longer)
    sequence = np.argsort(np.minimum.reduceat(steps.origins, starts), kind="stable")
    codes = groups.codes[starts].tolist()
    columns = _Columns(steps, ends)
    for g in sequence.tolist():
        code, start, end = codes[g], int(starts[g]), int(ends[g])
        name = groups.ids[code]
        agent = "" if groups.agents is None else groups.agents[code]
        if g in rejects:
            shown = name if groups.agents is None else f"{name} agent {agent}"
            yield Rejected(shown, end - start, tuple(rejects[g]))
            continue
        yield Episode(
            episode_id=name,
            agent_id=agent,
            first_step=int(first[g]),
            terminated=bool(terminated[g]),
            truncated=bool(truncated[g]),
            source_episode_id=name,
            **columns.of(start, end),
        )


class _Columns:
    """Slices of the steps' arrays."""

    def __init__(self, steps: Steps, ends: Array) -> None:
        self._steps = steps
        named = {
            "behavior_log_probs": steps.log_probs,
            "policies": steps.policies,
            "policy_versions": steps.policy_versions,
            "action_masks": steps.masks,
            "timestamps": steps.timestamps,
            "env_steps": steps.env_steps,
            "rewards": steps.rewards,
        }
        self._arrays = {name: array for name, array in named.items() if array is not None}

    def of(self, start: int, end: int) -> dict[str, Any]:
        steps, rows = self._steps, slice(start, end)
        return {
            "observations": take(steps.observations, rows),
            "actions": take(steps.actions, rows),
            "final_observation": self._final(end - 1),
            "extras": {name: a.slice(start, end - start) for name, a in steps.extras.items()},
            **{name: array[rows] for name, array in self._arrays.items()},
        }

    def _final(self, row: int) -> Any:
        steps = self._steps
        for values, having in (
            (steps.final_observations, steps.has_final),
            (steps.next_observations, steps.has_next),
        ):
            if values is not None and having is not None and having[row]:
                return take(values, row)
        return None


def _sorted_rows(codes: Array, numbers: Array | None) -> Array | None:
    """Return the rows in order of group, then step; None where they are so already."""
    jumps = np.diff(codes)
    if numbers is None:
        return None if (jumps >= 0).all() else np.argsort(codes, kind="stable")
    if ((jumps > 0) | ((jumps == 0) & (np.diff(numbers) >= 0))).all():
        return None
    return np.lexsort((numbers, codes))


def _reordered(steps: Steps, order: Array) -> Steps:
    def pick(values: Any) -> Any:
        return None if values is None else take(values, order)

    # damage is by row index: rows are few, so they are looked up in the new order.
    position = {int(row): i for i, row in enumerate(order)} if steps.damage else {}
    return replace(
        steps,
        **{name: pick(getattr(steps, name)) for name in _PER_ROW},
        extras={name: column.take(order) for name, column in steps.extras.items()},
        faults=[Fault(f.check, f.column, f.rows[order]) for f in steps.faults],
        damage={position[row]: text for row, text in steps.damage.items()},
    )


def _neighbour_faults(steps: Steps, codes: Array) -> list[Fault]:
    follows = np.zeros(len(codes), bool)
    follows[1:] = codes[1:] == codes[:-1]
    is_followed = np.append(follows[1:], False)
    faults = []
    if steps.numbers is not None:
        jump = np.diff(steps.numbers, prepend=0)
        faults.append(Fault("step_twice", "step", follows & (jump == 0)))
        faults.append(Fault("gap", "step", follows & (jump > 1)))
        faults.append(Fault("negative_step", "step", steps.numbers < 0))
    ended = (steps.terminated | steps.truncated) & is_followed
    faults.append(Fault("end_inside", "terminated or truncated", ended))
    if steps.next_observations is not None and steps.has_next is not None:
        differs = np.zeros(len(codes), bool)
        following = take(steps.observations, slice(1, None))
        differs[:-1] = _differ(take(steps.next_observations, slice(-1)), following)
        differs &= is_followed & steps.has_next
        faults.append(Fault("next_observation", "next_observation", differs))
    return [fault for fault in faults if fault.rows.any()]


def _differ(first: Values, second: Values) -> Mask:
    """Compare rows: exactly in one dtype, else after rounding to float32."""
    if isinstance(first, Mapping) or isinstance(second, Mapping):
        if isinstance(first, Mapping) != isinstance(second, Mapping) or set(first) != set(second):
            return np.ones(num_values(first), dtype=np.bool_)
        parts = [_differ(first[key], second[key]) for key in first]
        return np.asarray(np.any(parts, axis=0))
    if first.shape != second.shape:
        return np.ones(len(first), dtype=np.bool_)
    if first.dtype != second.dtype and "f" in (first.dtype.kind + second.dtype.kind):
        first, second = first.astype(np.float32), second.astype(np.float32)
    return np.asarray((first != second).reshape(len(first), -1).any(axis=1))


def _findings(
    faults: list[Fault], steps: Steps, starts: Array, seen: Survey
) -> dict[int, list[Finding]]:
    """Blame groups for their rows' faults; one finding a check, column and group."""
    rejects: dict[int, list[Finding]] = {}
    for fault in faults:
        rows = np.flatnonzero(fault.rows)
        owners = np.searchsorted(starts, rows, side="right") - 1
        blamed, at = np.unique(owners, return_index=True)
        for g, row in zip(blamed.tolist(), rows[at].tolist(), strict=True):
            place = seen.place(int(steps.origins[row]))
            message = f"{place}, column {fault.column!r}: {_EXPECTED[fault.check]}"
            rejects.setdefault(g, []).append(Finding(fault.check, message))
    for row, text in steps.damage.items():
        g = int(np.searchsorted(starts, row, side="right")) - 1
        finding = Finding("unequal_lengths", text)
        if finding not in rejects.setdefault(g, []):
            rejects[g].append(finding)
    return rejects
