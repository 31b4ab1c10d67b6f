"""Reports: what clients said of decisions, and what several reports of one decision come to.

The rule, in the order of time and, within a microsecond, of writing down: a report of mode `last`
replaces the reward and the end of all before it; one of mode `sum` adds its reward to what there
is, and its end counts beside those. Of reports of one decision under one feedback_id the first
counts. So repeats change nothing, and the order in which reports arrive neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

# The largest magnitude of a reward that a server takes. float64 ends at 1.8e308: sums of any number
# of such rewards stay finite, and so do sums of their squares, of which variances are made.
MAX_REWARD: Final = 1e100

Outcome = tuple[float, bool, bool]
"""A step's reward, and whether it terminated or truncated the episode."""


class FeedbackReport(NamedTuple):
    """A row of the rewards table; `timestamp` (us) is when it came.

    final_row is where its final observation is among those that there are, None if it has none.
    """

    timestamp: int
    row: int
    reward: float
    terminated: bool
    truncated: bool
    is_sum: bool = False
    feedback_id: str | None = None
    final_row: int | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """What the reports of one decision come to.

    timestamp (us) is when this outcome was first reached since another one was: a client that
    repeats itself says nothing new. first is when the first report came. reported is the outcome as
    a text where a sum is in it: a part of one may be found later though it is older.
    """

    reward: float
    terminated: bool
    truncated: bool
    timestamp: int
    final_row: int | None = None
    first: int = 0
    has_sums: bool = False

    @property
    def outcome(self) -> Outcome:
        """What a step keeps of it."""
        return self.reward, self.terminated, self.truncated

    @property
    def is_finite(self) -> bool:
        """Whether a step can have it: a sum may be beyond float64 though each report is not."""
        return math.isfinite(self.reward)

    @property
    def ends(self) -> bool:
        """Whether the episode ends with it."""
        return self.terminated or self.truncated

    @property
    def reported(self) -> str | None:
        """The outcome as the column of that name has it; None without sums."""
        if not self.has_sums:
            return None
        ends = ["terminated"] * self.terminated + ["truncated"] * self.truncated
        return " ".join([repr(self.reward), *ends])


def fold_reports(reports: Sequence[FeedbackReport]) -> Reward:
    """Return what some reports of one decision, at least one, come to; in any order."""
    ordered = sorted(reports)
    reward = _apply_report(None, ordered[0])
    seen = {ordered[0].feedback_id}
    for report in ordered[1:]:
        if report.feedback_id is not None:
            if report.feedback_id in seen:
                continue
            seen.add(report.feedback_id)
        reward = _apply_report(reward, report)
    return reward


def _apply_report(before: Reward | None, report: FeedbackReport) -> Reward:
    """Return the outcome once one more report has come."""
    reward, terminated, truncated = report.reward, report.terminated, report.truncated
    if before is not None and report.is_sum:
        reward += before.reward
        terminated, truncated = terminated or before.terminated, truncated or before.truncated
    result = Reward(
        reward,
        terminated,
        truncated,
        report.timestamp,
        report.final_row,
        report.timestamp,
        report.is_sum,
    )
    if before is None:
        return result
    is_same = result.outcome == before.outcome
    return replace(
        result,
        timestamp=before.timestamp if is_same else result.timestamp,
        final_row=before.final_row if result.final_row is None else result.final_row,
        first=before.first,
    )
