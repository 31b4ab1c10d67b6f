"""Grouping: steps into episodes, with the checks that only neighboring rows can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.episode_columns import TextColumn, as_text_array
from replaylake.datastore.episodes.spaces import Array, Values, concatenate, num_values, take
from replaylake.datastore.interchange.formats.checks import (
    CHECKS,
    CORRECTED,
    NOTED,
    Check,
    Finding,
    RowLocations,
)
from replaylake.datastore.interchange.formats.format import (
    LoggedColumns,
    ReadOptions,
    RejectedEpisode,
)
from replaylake.datastore.interchange.formats.tabular.arrays import Mask
from replaylake.datastore.interchange.formats.tabular.census import Census
from replaylake.datastore.interchange.formats.tabular.steps import (
    OPTIONAL_FIELDS,
    RowFault,
    TableSteps,
    join_episode_rows,
)
from replaylake.datastore.interchange.formats.tabular.tables import MISFITS, Survey


@dataclass(frozen=True)
class Groups:
    """Which episode and agent each row belongs to: `codes` int64 [n] index `ids` and `agents`."""

    codes: Array
    ids: Sequence[str]
    agents: Sequence[str] | None = None

    def name(self, code: int) -> str:
        """Return the id, and the agent where there are several."""
        return (
            self.ids[code]
            if self.agents is None or not self.agents[code]
            else (f"{self.ids[code]} agent {self.agents[code]}")
        )


def group(
    steps: TableSteps,
    groups: Groups,
    raw: pa.Table,
    mapping: Mapping[str, str],
    survey: Survey,
    options: ReadOptions,
    census: Census,
) -> Iterator[LoggedColumns | RejectedEpisode]:
    """Yield the episodes of whole groups, in the order of their first rows.

    `raw` has the rows of `steps` as the log has them, in the same order, and `mapping` says which
    of their columns are fields of ours. With options.gaps `split`
    each contiguous run of an episode is yielded, under the same id, one after the other. Those
    between two that are rejected come as columns.
    """
    order = _sort_order(groups.codes, steps.numbers)
    if order is not None:
        steps, groups = steps.take(order), replace(groups, codes=groups.codes[order])
    starts = np.flatnonzero(np.diff(groups.codes, prepend=-1))
    faults = [
        *steps.faults,
        *find_neighbor_faults(steps, groups.codes, survey),
        *_find_partial(steps, starts),
    ]
    cuts = None
    if options.gaps == "split":
        cuts = next((np.flatnonzero(fault.rows) for fault in faults if fault.check == "gap"), None)
        faults = [fault for fault in faults if fault.check != "gap"]
    rejects = findings(faults, steps, starts, survey)
    bounds = _GroupBounds(steps, groups, starts, survey, options)
    bounds.accepted[list(rejects)] = False
    bounds.settle_ends(census)
    bounds.count_changes(census, _find_moved(steps.origins, groups.codes), cuts)
    ranked = np.argsort(np.minimum.reduceat(steps.origins, starts), kind="stable")
    runs = _find_runs(starts, bounds.ends, ranked, cuts)
    is_accepted = bounds.accepted[runs.groups]
    accepted = replace(runs, **{n: values[is_accepted] for n, values in vars(runs).items()})
    found = bounds.columns(accepted) if len(accepted.groups) else []
    # How many runs are accepted before each rejected group, in the order of output.
    rank = np.empty(len(ranked), np.int64)
    rank[ranked] = np.arange(len(ranked))
    rejected = sorted(rejects, key=lambda g: rank[g])
    positions = np.searchsorted(rank[accepted.groups], rank[rejected] if rejected else [])
    start = 0
    for g, end in zip(rejected, positions.tolist(), strict=True):
        yield from _parts(found, start, end)
        start = end
        rows = slice(int(starts[g]), int(bounds.ends[g]))
        yield RejectedEpisode(
            source_episode_id=groups.ids[int(bounds.codes[g])],
            num_steps=rows.stop - rows.start,
            findings=tuple(rejects[g]),
            agent_id="" if groups.agents is None else groups.agents[int(bounds.codes[g])],
            rows=_as_logged(raw, rows, order),
            places=RowLocations(steps.origins[rows], bounds.locate),
            mapping=mapping,
        )
    yield from _parts(found, start, len(accepted.groups))


@dataclass(frozen=True)
class _Runs:
    """Contiguous runs of rows, in the order of output, int64 [R]: of which group, from, up to."""

    groups: Array
    starts: Array
    ends: Array


def _find_runs(starts: Array, ends: Array, ranked: Array, cuts: Array | None) -> _Runs:
    """Return the groups, or the runs that cuts make of them, the groups in this order."""
    if cuts is None:
        return _Runs(ranked, starts[ranked], ends[ranked])
    firsts = np.union1d(starts, cuts)
    owners = np.searchsorted(starts, firsts, side="right") - 1
    rank = np.empty(len(ranked), np.int64)
    rank[ranked] = np.arange(len(ranked))
    order = np.argsort(rank[owners], kind="stable")
    return _Runs(owners[order], firsts[order], np.append(firsts[1:], ends[-1])[order])


def _parts(found: Sequence[LoggedColumns], start: int, end: int) -> Iterator[LoggedColumns]:
    """Yield the runs from start up to end, whatever columns they are in."""
    for columns in found:
        first, last = max(start, 0), min(end, len(columns))
        if first < last:
            yield columns if last - first == len(columns) else columns.part(first, last)
        start, end = start - len(columns), end - len(columns)


class _GroupBounds:
    """The groups of one block: where each starts and ends, and how."""

    def __init__(
        self, steps: TableSteps, groups: Groups, starts: Array, survey: Survey, options: ReadOptions
    ) -> None:
        self._steps, self._groups, self._survey, self._options = steps, groups, survey, options
        self.starts, self.ends = starts, np.append(starts[1:], len(steps))
        self.codes = groups.codes[starts]
        self.accepted = np.ones(len(starts), dtype=np.bool_)
        self.locate = make_locator(survey)
        self._terminated = steps.terminated[self.ends - 1]
        self._truncated = steps.truncated[self.ends - 1]

    def settle_ends(self, census: Census) -> None:
        """Say how each episode ended, by the log and by the options."""
        lengths = self._lengths(census)
        if (limit := self._options.time_limit) is not None:
            at_limit = self._terminated & ~self._truncated & (lengths == limit)
            self._terminated, self._truncated = (
                self._terminated & ~at_limit,
                self._truncated | at_limit,
            )
            census.num_longer += int((lengths > limit)[self.accepted].sum())
            self._count(census, "time_limit", CORRECTED, at_limit, "truncated, and not terminated")
        is_open = ~self._terminated & ~self._truncated
        if self._options.open_ends == "time-limit" and limit is not None:
            ended, reached = is_open & (lengths < limit), is_open & (lengths == limit)
            self._terminated, self._truncated = self._terminated | ended, self._truncated | reached
            what = f"recorded by the time limit of {limit} steps"
            self._count(census, "no_end", CORRECTED, ended | reached, what)
            self._count(census, "no_end", NOTED, is_open & (lengths > limit), "recorded as open")
        elif self._options.open_ends == "truncated":
            self._truncated = self._truncated | is_open
            self._count(census, "no_end", CORRECTED, is_open, "recorded as truncated")
        else:
            advice = "recorded as open; `open_ends` truncated if the log is whole"
            self._count(census, "no_end", NOTED, is_open, "recorded as open", advice)
        self._count_lengths(census, lengths)

    def count_changes(self, census: Census, moved: Mask | None, cuts: Array | None) -> None:
        """Count the episodes that were put in order or split."""
        for name, rows, what in (
            ("unordered", moved, "put in order"),
            ("gap", None if cuts is None else _mask(cuts, len(self._steps)), "split there"),
        ):
            if rows is None:
                continue
            nums = np.add.reduceat(rows, self.starts, dtype=np.int64)
            hit = (nums > 0) & self.accepted
            if hit.any():
                g = int(np.argmax(hit))
                row = int(self.starts[g] + np.argmax(rows[self.starts[g] : self.ends[g]]))
                key, place = self._name_and_place(g, row)
                text = f"episode {key}: {place}: {CHECKS[name].partition(',')[0]}, {what}"
                num_hit, num_rows = int(hit.sum()), int(nums[hit].sum())
                census.counts.add(Check(name, CORRECTED, num_hit, num_rows, text, place=place))

    def columns(self, runs: _Runs) -> list[LoggedColumns]:
        """Return runs as columns: several only where their final observations do not go together.

        Each row of the steps is in one of them, or copied.
        """
        steps, lengths = self._steps, runs.ends - runs.starts
        try:
            finals, has_final = _find_finals(steps, runs.ends - 1)
        except (ValueError, KeyError, TypeError):
            half = len(runs.groups) // 2
            halves = [
                replace(runs, **{n: values[part] for n, values in vars(runs).items()})
                for part in (slice(half), slice(half, None))
            ]
            return [columns for part in halves for columns in self.columns(part)]
        firsts = np.cumsum(lengths) - lengths
        rows = np.arange(int(lengths.sum())) + np.repeat(runs.starts - firsts, lengths)
        if len(rows) < len(steps) or (np.diff(rows) != 1).any():
            steps = steps.take(rows)
        codes, agents = self.codes[runs.groups], self._groups.agents
        is_last = runs.ends == self.ends[runs.groups]
        continues = runs.starts != self.starts[runs.groups]
        ids = TextColumn(as_text_array(self._groups.ids).take(pa.array(codes)))
        numbers = self._steps.numbers
        columns, absent = join_episode_rows(steps, lengths)
        return [
            LoggedColumns(
                steps=columns,
                episode_ids=ids,
                source_ids=ids,
                agent_ids=None
                if agents is None
                else TextColumn(as_text_array(agents).take(pa.array(codes))),
                lengths=lengths,
                first_steps=np.zeros(len(codes), np.int64)
                if numbers is None
                else numbers[runs.starts],
                # The row before a gap ended nothing: what came of it is not in the log.
                terminated=is_last & self._terminated[runs.groups],
                truncated=is_last & self._truncated[runs.groups],
                final_observations=finals,
                has_final=has_final,
                absent=absent,
                origins=steps.origins,
                locate=self.locate,
                continues=continues if continues.any() else None,
            )
        ]

    def _lengths(self, census: Census) -> Array:
        """Return how many steps each episode had, those that the log lacks included."""
        numbers = self._steps.numbers
        if numbers is None:
            return np.asarray(self.ends - self.starts)
        return np.asarray(numbers[self.ends - 1] + (0 if census.counts_from_1 else 1))

    def _count_lengths(self, census: Census, lengths: Array) -> None:
        ended = np.flatnonzero(self._terminated & self.accepted)
        distinct, at, nums = np.unique(lengths[ended], return_index=True, return_counts=True)
        known = census.terminated_lengths
        longest = max(known, default=0)
        for length, g, num in zip(
            distinct.tolist(), ended[at].tolist(), nums.tolist(), strict=True
        ):
            known[length] = known.get(length, 0) + num
            # Only the greatest length is ever told.
            if length > longest and length == distinct[-1]:
                census.longest = self._name_and_place(g, int(self.ends[g]) - 1)

    def _count(
        self, census: Census, name: str, outcome: str, which: Mask, what: str, advice: str = ""
    ) -> None:
        which = which & self.accepted
        if which.any():
            g = int(np.argmax(which))
            num = int(which.sum())
            key, place = self._name_and_place(g, int(self.ends[g]) - 1)
            text = f"episode {key}: {place}: {what}"
            census.counts.add(Check(name, outcome, num, num, text, advice, place))

    def _name_and_place(self, g: int, row: int) -> tuple[str, str]:
        return self._groups.name(int(self.codes[g])), describe_place(self._steps, row, self._survey)


def _find_finals(steps: TableSteps, rows: Array) -> tuple[Values | None, Mask | None]:
    """Return what was observed after the steps in some rows, and which of them have that.

    Raises: ValueError, KeyError or TypeError where these values do not go together.
    """
    none = np.zeros(len(rows), np.bool_)
    first, second = (
        none if values is None or having is None else having[rows]
        for values, having in (
            (steps.final_observations, steps.has_final),
            (steps.next_observations, steps.has_next),
        )
    )
    second = second & ~first
    parts = [
        take(values, rows[which])
        for values, which in ((steps.final_observations, first), (steps.next_observations, second))
        if values is not None and which.any()
    ]
    if not parts:
        return None, None
    has_final = first | second
    finals = concatenate(parts)
    if len(parts) > 1:
        # Those of the first kind are in front: back into the order of their episodes.
        finals = take(finals, np.argsort(np.append(np.flatnonzero(first), np.flatnonzero(second))))
    return finals, None if has_final.all() else has_final


def _sort_order(codes: Array, numbers: Array | None) -> Array | None:
    """Return the rows in order of group, then step; None where they are so already."""
    jumps = np.diff(codes)
    if numbers is None:
        return None if (jumps >= 0).all() else np.argsort(codes, kind="stable")
    if ((jumps > 0) | ((jumps == 0) & (np.diff(numbers) >= 0))).all():
        return None
    return np.lexsort((numbers, codes))


def _find_partial(steps: TableSteps, starts: Array) -> Iterator[RowFault]:
    """Mark the rows without a value that other rows of their episode have."""
    lengths = np.diff(np.append(starts, len(steps)))
    for name, absent in steps.absent.items():
        num_absent = np.add.reduceat(absent, starts, dtype=np.int64)
        partly = np.repeat((num_absent > 0) & (num_absent < lengths), lengths)
        if partly.any():
            yield RowFault("missing", OPTIONAL_FIELDS[name][1], absent & partly)


def _find_moved(origins: Array, codes: Array) -> Mask | None:
    """Return which rows have another place in their episode than in the source; None if none."""
    if not ((np.diff(origins) < 0) & (np.diff(codes) == 0)).any():
        return None
    return np.asarray(origins != origins[np.lexsort((origins, codes))])


def _as_logged(raw: pa.Table, rows: slice, order: Array | None) -> pa.Table:
    raw = select_logged_columns(raw)
    if order is None:
        return raw.slice(rows.start, rows.stop - rows.start)
    return raw.take(pa.array(order[rows]))


def select_logged_columns(raw: pa.Table) -> pa.Table:
    """Return rows without the hidden columns that only readings have."""
    # Misfits are part of the row; with none, they are no column of it.
    names = [name for name in raw.column_names if not name.startswith("\0") or name == MISFITS]
    return raw.select(names)


def _mask(rows: Array, num: int) -> Mask:
    mask = np.zeros(num, dtype=np.bool_)
    mask[rows] = True
    return mask


def find_neighbor_faults(steps: TableSteps, codes: Array, survey: Survey) -> list[RowFault]:
    """Compare each row with the next one of its episode; rows are in order of `codes` and step."""
    follows = np.zeros(len(codes), bool)
    follows[1:] = codes[1:] == codes[:-1]
    if steps.unnumbered is not None:
        # Which row follows which is not known in their episodes.
        follows &= ~np.isin(codes, codes[steps.unnumbered])
    is_followed = np.append(follows[1:], False)
    ended = (steps.terminated | steps.truncated) & is_followed
    is_next = is_followed.copy()
    faults = []
    if steps.numbers is None:
        # Nothing but the flag says which rows are one episode's: what comes after it is another.
        after = np.append(False, ended[:-1]) if len(ended) else ended
        faults.append(RowFault("id_reused", "terminated or truncated", after))
    else:
        jump = np.diff(steps.numbers, prepend=0)
        is_next[:-1] &= jump[1:] == 1
        twice = follows & (jump == 0)
        reused = _find_reused_ids(steps, codes, twice, survey)
        faults.append(RowFault("id_reused", "step", reused))
        # One cause, one name.
        is_reported = np.isin(codes, codes[reused]) if reused.any() else np.zeros(len(codes), bool)
        faults.append(RowFault("step_twice", "step", twice & ~is_reported))
        faults.append(RowFault("gap", "step", follows & (jump > 1)))
        faults.append(RowFault("negative_step", "step", steps.numbers < 0))
        faults.append(RowFault("end_inside", "terminated or truncated", ended & ~is_reported))
    if steps.next_observations is not None and steps.has_next is not None:
        differs = np.zeros(len(codes), bool)
        following = take(steps.observations, slice(1, None))
        differs[:-1] = _compare_rows(take(steps.next_observations, slice(-1)), following)
        differs &= is_next & steps.has_next & ~ended
        faults.append(RowFault("next_observation", "next_observation", differs))
    return [fault for fault in faults if fault.rows.any()]


def findings(
    faults: list[RowFault], steps: TableSteps, starts: Array, survey: Survey
) -> dict[int, list[Finding]]:
    """Blame groups for their rows' faults; one finding a check, column and group."""
    rejects: dict[int, list[Finding]] = {}
    locate = make_locator(survey)
    for fault in faults:
        rows = np.flatnonzero(fault.rows)
        owners = np.searchsorted(starts, rows, side="right") - 1
        blamed, at, nums = np.unique(owners, return_index=True, return_counts=True)
        for g, row, num in zip(blamed.tolist(), rows[at].tolist(), nums.tolist(), strict=True):
            place = RowLocations(steps.origins[row : row + 1], locate).text()
            message = f"{place}, column {fault.column!r}: {CHECKS[fault.check]}"
            if (line := survey.line(int(steps.origins[row]))) is not None:
                message = f"{message} (line {line})"
            message = fault.messages.get(int(steps.origins[row]), message)
            rejects.setdefault(g, []).append(Finding(fault.check, message, num, place))
    return _with_damage(rejects, steps.damage, starts)


def make_locator(survey: Survey) -> partial[tuple[list[str], list[int]]]:
    """Return what finds files and row numbers, for `Places`."""
    return partial(_locate, survey, _starts(survey))


def describe_place(steps: TableSteps, row: int, survey: Survey) -> str:
    """Return `FILE row N` of a row of `steps`."""
    return RowLocations(steps.origins[row : row + 1], make_locator(survey)).text()


def _with_damage(
    rejects: dict[int, list[Finding]], damage: Mapping[int, str], starts: Array
) -> dict[int, list[Finding]]:
    for row, entry in damage.items():
        name, _, text = entry.rpartition("\0")
        check = name or "unequal_lengths"
        findings_of = rejects.setdefault(int(np.searchsorted(starts, row, side="right")) - 1, [])
        for i, finding in enumerate(findings_of):
            if (finding.check, finding.message) == (check, text):
                findings_of[i] = replace(finding, num_rows=finding.num_rows + 1)
                break
        else:
            findings_of.append(Finding(check, text))
    return rejects


def _locate(survey: Survey, starts: Array, rows: Array) -> tuple[list[str], list[int]]:
    extents = survey.extents
    at = _find_extents(starts, rows)
    numbers = [
        row - extents[i].start + extents[i].first_row
        for i, row in zip(at.tolist(), rows.tolist(), strict=True)
    ]
    return [extents[i].file.name for i in at.tolist()], numbers


def _starts(survey: Survey) -> Array:
    return np.asarray([extent.start for extent in survey.extents])


def _find_extents(starts: Array, rows: Array) -> Array:
    return np.asarray(np.searchsorted(starts, rows, side="right") - 1)


def _find_reused_ids(steps: TableSteps, codes: Array, twice: Mask, survey: Survey) -> Mask:
    """Return the rows at which, as the source has them, an episode's id begins from the start.

    That is a row with the episode's first step again, after an end or in another file.
    """
    reused = np.zeros(len(codes), bool)
    if steps.numbers is None or not twice.any():
        return reused
    rows = np.flatnonzero(np.isin(codes, codes[twice]))
    as_read = rows[np.lexsort((steps.origins[rows], codes[rows]))]
    starts = np.searchsorted(codes[as_read], codes[as_read])
    is_first = steps.numbers[as_read] == steps.numbers[np.searchsorted(codes, codes[as_read])]
    num_before = np.append(0, np.cumsum(is_first)[:-1])
    is_again = is_first & (num_before > num_before[starts])
    files = [extent.file.name for extent in survey.extents]
    kinds = {name: i for i, name in enumerate(dict.fromkeys(files))}
    file = np.asarray([kinds[name] for name in files])[
        _find_extents(_starts(survey), steps.origins[as_read])
    ]
    ended = (steps.terminated | steps.truncated)[as_read]
    again = (
        (codes[as_read][1:] == codes[as_read][:-1])
        & is_again[1:]
        & (ended[:-1] | (file[1:] != file[:-1]))
    )
    reused[as_read[1:][again]] = True
    return reused


def _compare_rows(first: Values, second: Values) -> Mask:
    """Compare rows: exactly in one dtype, else after rounding to float32."""
    if isinstance(first, Mapping) or isinstance(second, Mapping):
        if isinstance(first, Mapping) != isinstance(second, Mapping) or set(first) != set(second):
            return np.ones(num_values(first), dtype=np.bool_)
        parts = [_compare_rows(first[key], second[key]) for key in first]
        return np.asarray(np.any(parts, axis=0))
    if first.shape != second.shape:
        return np.ones(len(first), dtype=np.bool_)
    if first.dtype != second.dtype and "f" in (first.dtype.kind + second.dtype.kind):
        first, second = first.astype(np.float32), second.astype(np.float32)
    return np.asarray((first != second).any(axis=tuple(range(1, first.ndim))))
