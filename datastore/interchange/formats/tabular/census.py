"""Census: what is counted over all episodes of a source, and told of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from replaylake.datastore.interchange.formats.checks import NOTED, Check, CheckCounts


@dataclass
class Census:
    """Counts over the episodes of all blocks, which become notes and checks.

    counts_from_1: the log's least step is 1, so an episode of N steps ends at step N.
    """

    counts_from_1: bool = False
    counts: CheckCounts = field(default_factory=CheckCounts)
    num_longer: int = 0
    terminated_lengths: dict[int, int] = field(default_factory=dict)
    longest: tuple[str, str] = ("", "")
    """Of the greatest of these lengths: the first episode's id, and where its last row is."""

    def checks(self, time_limit: int | None, *, has_events: bool = False) -> tuple[Check, ...]:
        """Return what was corrected or is worth a look."""
        may_be_limited = time_limit is None and not has_events
        likely = self._likely_limit() if may_be_limited else None
        return (*self.counts.checks(), *([] if likely is None else [likely]))

    def _likely_limit(self) -> Check | None:
        lengths = self.terminated_lengths
        longest = max(lengths, default=0)
        count, total = lengths.get(longest, 0), sum(lengths.values())
        # Two of ten ends at the greatest length are rare by chance. One-step logs have no limit.
        if longest < 2 or count < 2 or count < 0.2 * total:
            return None
        name, place = self.longest
        example = (
            f"episode {name}: {place}: {count} of {total} terminated episodes have the greatest "
            f"length, {longest}"
        )
        advice = (
            "if that is a time limit, they were truncated: ingest into a new dataset with "
            f"`time_limit` {longest}"
        )
        return Check("time_limit", NOTED, count, count, example, advice, place)
