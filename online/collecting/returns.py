"""Returns: what episodes returned as they were collected, of one agent or of several."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from replaylake.online.collecting.step_buffer import EpisodeEnd

_MAX_RECENT: Final = 100
# A sum of rewards that cancel but for rounding.
_ZERO: Final = 1e-9


class ReturnTotals:
    """Sums of returns: by game, which is all episodes of one number, and by agent."""

    def __init__(self) -> None:
        self._games: set[int] = set()
        self._totals: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, ends: Iterable[EpisodeEnd]) -> None:
        """Take in episodes that ended."""
        for end in ends:
            self._games.add(end.number)
            self._totals[end.agent_id] = self._totals.get(end.agent_id, 0.0) + end.episode_return
            self._counts[end.agent_id] = self._counts.get(end.agent_id, 0) + 1

    @property
    def num_games(self) -> int:
        """Games of which an episode ended; with one agent, its episodes."""
        return len(self._games)

    @property
    def mean(self) -> float:
        """Mean over the games of the sum of their agents' returns, as the view `games` has it."""
        return sum(self._totals.values()) / max(1, self.num_games)

    @property
    def by_agent(self) -> dict[str, float]:
        """Each agent's mean return over its episodes; empty where there is one without a name."""
        return {
            agent: total / self._counts[agent]
            for agent, total in sorted(self._totals.items())
            if agent
        }


class RecentReturns:
    """What the last games of a run returned: their agents' sums, and by agent.

    Agents' episodes of a game end together, and come in one shipment. Of an environment of one
    agent a game is an episode.
    """

    def __init__(self, num_kept: int = _MAX_RECENT) -> None:
        """num_kept: of the last games."""
        self._sums: deque[float] = deque(maxlen=num_kept)
        self._by_agent: dict[str, deque[float]] = {}
        self._has_sum = self._has_return = False

    def add(self, ends: Iterable[EpisodeEnd]) -> None:
        """Take in episodes that ended."""
        games: dict[int, float] = {}
        for end in ends:
            games[end.number] = games.get(end.number, 0.0) + end.episode_return
            if end.agent_id:
                recent = self._by_agent.setdefault(end.agent_id, deque(maxlen=_MAX_RECENT))
                recent.append(end.episode_return)
                self._has_return |= end.episode_return != 0
        self._sums.extend(games.values())
        self._has_sum |= any(abs(total) > _ZERO for total in games.values())

    @property
    def sums(self) -> Sequence[float]:
        """Sums of the last games, oldest first."""
        return self._sums

    @property
    def may_be_zero_sum(self) -> bool:
        """Whether there are several agents, and no game's sum has been another number than 0."""
        return bool(self._by_agent) and not self._has_sum

    @property
    def is_zero_sum(self) -> bool:
        """Whether, of all games so far, what some gained others lost."""
        return self.may_be_zero_sum and self._has_return

    def metrics(self) -> dict[str, float]:
        """Return each agent's mean return over its last hundred episodes, as `return/<agent>`."""
        means = {agent: float(np.mean(recent)) for agent, recent in sorted(self._by_agent.items())}
        return {f"return/{agent}": mean for agent, mean in means.items()}

    def state_dict(self) -> dict[str, Any]:
        by_agent = {agent: list(recent) for agent, recent in self._by_agent.items()}
        flags = {"has_sum": self._has_sum, "has_return": self._has_return}
        return {"sums": list(self._sums), "by_agent": by_agent, **flags}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums.extend(state["sums"])
        for agent, recent in state["by_agent"].items():
            self._by_agent[agent] = deque(recent, maxlen=_MAX_RECENT)
        self._has_sum, self._has_return = state["has_sum"], state["has_return"]
