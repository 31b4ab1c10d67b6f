"""Door checks: their names, and the records of what they found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from replaylake.datastore.episodes.spaces import Array

# What a check did about what it found.
REJECTED: Final = "rejected"
CORRECTED: Final = "corrected"
NOTED: Final = "noted"

# Every check, and what a person reads of it. docs/FORMATS.md says what becomes of each.
CHECKS: Final[dict[str, str]] = {
    "missing": "found no value, expected one in each row",
    "shape": "found another number of values than in most rows, expected the same in each",
    "dtype": "found values of another type, expected that of the rest",
    "not_finite": "found NaN or infinity, expected finite numbers",
    "not_whole": "found a value that is not a whole number, expected one",
    "not_a_flag": "found a value other than true, false, 0 and 1",
    "beyond_float32": "found a number beyond float32, expected one that it holds",
    "unknown_action": "found an action that is none of the dataset's action names",
    "action_range": "found a logged action outside [-1, 1], expected it inside, as `action_range` "
    "takes it",
    "propensity": "found a probability outside (0, 1] or a log-probability above 0",
    "unequal_lengths": "found columns of unequal lengths, expected one value a step in each",
    "malformed": "found a record that is none of its format's",
    "step_twice": "found the same step twice, expected each once",
    "gap": "found a gap in the steps, expected each step to follow the one before",
    "negative_step": "found a negative step, expected 0 or more",
    "step": "found a step or env_step beyond 32 bits",
    "unordered": "found rows out of order, put in order",
    "end_inside": "found an end of episode before the last row, expected it on the last row only",
    "id_reused": "found the id begun again, expected one episode an id. Name the columns that tell "
    "them apart with `episode_by`",
    "next_observation": "found a next observation that is not the following row's observation: "
    "the rows are out of order, shifted, or another log's",
    "space": "found a value outside the space",
    "action_mask": "found an action that its own mask forbids",
    "tokens": "found token columns that do not go together, or an id outside the vocabulary",
    "parent": "found a parent that the episode does not have, or that does not precede the step",
    "name": "found an id that no table can hold",
    "no_end": "found no end of episode",
    "time_limit": "found a termination at the greatest length, which may be a time limit",
    "duplicate": "found the same observations, actions and rewards under another id",
}


@dataclass(frozen=True)
class Finding:
    """One thing wrong with an episode: the door check's name, and what was found where.

    num_rows: how many of its rows fail. place: the first of them, as `FILE row N`. column: the
    field of ours that fails, where a check is counted for each.
    """

    check: str
    message: str
    num_rows: int = 1
    place: str = ""
    column: str = ""


@dataclass(frozen=True)
class Check:
    """What one door check found in a source: in how many episodes and rows, and one example.

    outcome: the episodes were `rejected`; `corrected`, as by putting rows in order; or `noted` and
    kept as they are. example: in full, with the episode's id; place: its first row alone, as
    `FILE row N`. advice: what to do about it, where there is a choice. column: the field that it
    was found in, where a check is counted for each.
    """

    name: str
    outcome: str
    num_episodes: int
    num_rows: int
    example: str
    advice: str = ""
    place: str = ""
    column: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; `column` is in it only where there is one."""
        body = asdict(self)
        return body if self.column else {n: v for n, v in body.items() if n != "column"}


# The files' names, and the rows' numbers in them, of rows by their numbers in the whole source.
Locate = Callable[[Array], tuple[list[str], list[int]]]


@dataclass(frozen=True, eq=False)
class RowLocations:
    """Where an episode's rows lie: `rows` int64 [T] are numbers in the whole source.

    `locate` gives, for such numbers, the names of files and the rows' numbers in them.
    """

    rows: Array
    locate: Locate

    def locate_rows(self, start: int, end: int) -> tuple[list[str], list[int]]:
        """Return the files and row numbers of the episode's rows start..end."""
        return self.locate(self.rows[start:end])

    def text(self, row: int = 0) -> str:
        """Return `FILE row N` of one of its rows."""
        (name,), (number,) = self.locate_rows(row, row + 1)
        return f"{name} row {number}"


class CheckCounts:
    """Adds up what checks found, by name, column and outcome; the first example stays."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str, str], Check] = {}

    def add(self, check: Check) -> None:
        """Count what was found in some episodes; nothing if it is none."""
        if not check.num_episodes:
            return
        key = (check.name, check.column, check.outcome)
        known = self._all.get(key)
        if known is not None:
            check = replace(
                known,
                num_episodes=known.num_episodes + check.num_episodes,
                num_rows=known.num_rows + check.num_rows,
            )
        self._all[key] = check

    def checks(self) -> tuple[Check, ...]:
        """Return what was found: the rejections first, the most frequent first."""
        outcomes = (REJECTED, CORRECTED, NOTED)
        return tuple(
            sorted(self._all.values(), key=lambda c: (outcomes.index(c.outcome), -c.num_episodes))
        )
