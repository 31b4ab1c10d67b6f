"""Waits: for what decisions and received steps wait before they are joined, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

# An earlier decision may still be in the journal of a server.
JOURNAL: Final = "journal"
# A decision of the episode has no reward, or has them all and no report says that it ended.
REWARD: Final = "reward"
END: Final = "end"
# A received step before it is missing.
GAP: Final = "gap"
_LAST_S: Final = 253_402_300_799  # the end of the year 9999


@dataclass(frozen=True)
class Wait:
    """What waits for one thing: `num` decisions, or received steps.

    first_until and last_until: when the first and the last of them are settled though nothing more
    comes, in RFC 3339; None at the next join.
    """

    reason: str
    num: int
    first_until: str | None
    last_until: str | None


class Waits:
    """Counts what waits, by reason."""

    def __init__(self) -> None:
        self._waits: dict[str, tuple[int, int, int]] = {}

    @property
    def num(self) -> int:
        """All that wait."""
        return sum(num for num, _, _ in self._waits.values())

    def add(self, reason: str, num: int, first: int | None, last: int | None) -> None:
        """Add some whose time (us) from which they wait is from first to last; None with none."""
        if not num or first is None or last is None:
            return
        before = self._waits.get(reason, (0, first, last))
        self._waits[reason] = (before[0] + num, min(before[1], first), max(before[2], last))

    def to_list(self, window: int, journal_lag: int | None) -> list[Wait]:
        """Return them, by reason.

        window (us): how long each waits. journal_lag (us): how long for journals, None if only
        until the next join.
        """
        found = []
        for reason, (num, first, last) in sorted(self._waits.items()):
            lag = journal_lag if reason == JOURNAL else window
            times = (None, None) if lag is None else (_to_text(first + lag), _to_text(last + lag))
            found.append(Wait(reason, num, *times))
        return found


def _to_text(us: int) -> str:
    # The next whole second; a window may be longer than dates go.
    seconds = min(-(-us // 1_000_000), _LAST_S)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
