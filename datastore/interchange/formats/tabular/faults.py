"""Faults: what only neighbouring rows can tell, and which episodes are to blame for their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from replaylake.datastore.episodes.spaces import Array, Values, num_values, take
from replaylake.datastore.interchange.formats.checks import CHECKS, Finding, Places
from replaylake.datastore.interchange.formats.tabular.arrays import Mask
from replaylake.datastore.interchange.formats.tabular.steps import Fault, Steps
from replaylake.datastore.interchange.formats.tabular.tables import Survey


def neighbour_faults(steps: Steps, codes: Array, seen: Survey) -> list[Fault]:
    """Compare each row with the next one of its episode; rows are in order of `codes` and step."""
    follows = np.zeros(len(codes), bool)
    follows[1:] = codes[1:] == codes[:-1]
    is_followed = np.append(follows[1:], False)
    ended = (steps.terminated | steps.truncated) & is_followed
    is_next = is_followed.copy()
    faults = []
    if steps.numbers is None:
        # Nothing but the flag says which rows are one episode's: what comes after it is another.
        after = np.append(False, ended[:-1]) if len(ended) else ended
        faults.append(Fault("id_reused", "terminated or truncated", after))
    else:
        jump = np.diff(steps.numbers, prepend=0)
        is_next[:-1] &= jump[1:] == 1
        twice = follows & (jump == 0)
        reused = _begun_again(steps, codes, twice, seen)
        faults.append(Fault("id_reused", "step", reused))
        # One cause, one name.
        told = np.isin(codes, codes[reused]) if reused.any() else np.zeros(len(codes), bool)
        faults.append(Fault("step_twice", "step", twice & ~told))
        faults.append(Fault("gap", "step", follows & (jump > 1)))
        faults.append(Fault("negative_step", "step", steps.numbers < 0))
        faults.append(Fault("end_inside", "terminated or truncated", ended & ~told))
    if steps.next_observations is not None and steps.has_next is not None:
        differs = np.zeros(len(codes), bool)
        following = take(steps.observations, slice(1, None))
        differs[:-1] = _differ(take(steps.next_observations, slice(-1)), following)
        differs &= is_next & steps.has_next & ~ended
        faults.append(Fault("next_observation", "next_observation", differs))
    return [fault for fault in faults if fault.rows.any()]


def findings(
    faults: list[Fault], steps: Steps, starts: Array, seen: Survey
) -> dict[int, list[Finding]]:
    """Blame groups for their rows' faults; one finding a check, column and group."""
    rejects: dict[int, list[Finding]] = {}
    locate = locator(seen)
    for fault in faults:
        rows = np.flatnonzero(fault.rows)
        owners = np.searchsorted(starts, rows, side="right") - 1
        blamed, at, nums = np.unique(owners, return_index=True, return_counts=True)
        for g, row, num in zip(blamed.tolist(), rows[at].tolist(), nums.tolist(), strict=True):
            place = Places(steps.origins[row : row + 1], locate).text()
            message = f"{place}, column {fault.column!r}: {CHECKS[fault.check]}"
            message = fault.messages.get(int(steps.origins[row]), message)
            rejects.setdefault(g, []).append(Finding(fault.check, message, num, place))
    return _with_damage(rejects, steps.damage, starts)


def locator(seen: Survey) -> partial[tuple[list[str], list[int]]]:
    """Return what finds files and row numbers, for `Places`."""
    return partial(_locate, seen, _starts(seen))


def place_of(steps: Steps, row: int, seen: Survey) -> str:
    """Return `FILE row N` of a row of `steps`."""
    return Places(steps.origins[row : row + 1], locator(seen)).text()


def _with_damage(
    rejects: dict[int, list[Finding]], damage: Mapping[int, str], starts: Array
) -> dict[int, list[Finding]]:
    for row, said in damage.items():
        named, _, text = said.rpartition("\0")
        check = named or "unequal_lengths"
        found = rejects.setdefault(int(np.searchsorted(starts, row, side="right")) - 1, [])
        for i, finding in enumerate(found):
            if (finding.check, finding.message) == (check, text):
                found[i] = replace(finding, num_rows=finding.num_rows + 1)
                break
        else:
            found.append(Finding(check, text))
    return rejects


def _locate(seen: Survey, starts: Array, rows: Array) -> tuple[list[str], list[int]]:
    extents = seen.extents
    at = _extents_of(starts, rows)
    numbers = [
        row - extents[i].start + extents[i].first_row
        for i, row in zip(at.tolist(), rows.tolist(), strict=True)
    ]
    return [extents[i].file.name for i in at.tolist()], numbers


def _starts(seen: Survey) -> Array:
    return np.asarray([extent.start for extent in seen.extents])


def _extents_of(starts: Array, rows: Array) -> Array:
    return np.asarray(np.searchsorted(starts, rows, side="right") - 1)


def _begun_again(steps: Steps, codes: Array, twice: Mask, seen: Survey) -> Mask:
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
    files = [extent.file.name for extent in seen.extents]
    kinds = {name: i for i, name in enumerate(dict.fromkeys(files))}
    file = np.asarray([kinds[name] for name in files])[
        _extents_of(_starts(seen), steps.origins[as_read])
    ]
    ended = (steps.terminated | steps.truncated)[as_read]
    again = (
        (codes[as_read][1:] == codes[as_read][:-1])
        & is_again[1:]
        & (ended[:-1] | (file[1:] != file[:-1]))
    )
    reused[as_read[1:][again]] = True
    return reused


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
    return np.asarray((first != second).any(axis=tuple(range(1, first.ndim))))
