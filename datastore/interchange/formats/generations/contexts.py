"""Contexts: dialogues of one episode that share their beginnings, as the steps of a tree of agents.

A context that goes on from the end of an earlier one belongs to the same agent. One that forks from
it is a further agent, whose first step has its parent: shared generations are steps once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replaylake.datastore.episodes import tokens
from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.formats.generations.messages import Message, format_messages
from replaylake.datastore.interchange.formats.generations.rows import (
    FINAL_MESSAGES,
    Row,
    describe_generation,
)


@dataclass
class ContextAgent:
    """An agent: the messages of its context, and a row for each of its generations.

    turns: agent and step of each generation in the messages, by its place, whosever it is.
    num_read: the messages up to the last generation.
    """

    agent_id: str
    messages: Sequence[Message]
    turns: dict[int, tuple[str, int]]
    parent: tuple[str, int] | None
    num_read: int
    rows: list[Row] = field(default_factory=list)

    @property
    def pending(self) -> Sequence[Message]:
        """The messages after the last generation."""
        return self.messages[self.num_read :]

    def set_final(self, messages: Sequence[Message]) -> None:
        """Set what was observed after the last generation."""
        if messages:
            self.rows[-1]["final_text"] = format_messages(messages)
            self.rows[-1][FINAL_MESSAGES] = dump_json(messages)


class ContextTree:
    """The agents of an episode, in the order in which they began: ``, `~1`, `~2` and so on."""

    def __init__(self) -> None:
        self.agents: list[ContextAgent] = []
        self._num_ticks = 0

    def add(
        self, messages: Sequence[Message], generations: Mapping[int, Mapping[str, Any]]
    ) -> ContextAgent:
        """Add a context, and return its agent.

        generations: further columns of each generated message, by its place in the context.
        """
        agent = self._find_agent(messages)
        for place in sorted(generations):
            if place >= agent.num_read:
                self.append(agent, messages[agent.num_read : place], messages[place])
                agent.rows[-1].update(generations[place])
                agent.turns[place] = (agent.agent_id, len(agent.rows) - 1)
                agent.num_read = place + 1
        return agent

    def append(
        self, agent: ContextAgent, prompt: Sequence[Message], answer: Message | None
    ) -> None:
        """Add a generation to an agent; without an answer, one that is not known."""
        row: Row = {
            **describe_generation(prompt, answer),
            "agent_id": agent.agent_id,
            "step": len(agent.rows),
            "env_step": self._num_ticks,
        }
        if not agent.rows and agent.parent is not None:
            row[tokens.PARENT_AGENT_ID], row[tokens.PARENT_STEP] = agent.parent
            row[tokens.IS_CONTINUATION] = True
        agent.rows.append(row)
        self._num_ticks += 1

    def _find_agent(self, messages: Sequence[Message]) -> ContextAgent:
        """Return the agent whose context these messages continue, or a further one.

        A further one forks from that agent whose context has most messages in common.
        """
        best, num_common = None, 0
        for agent in self.agents:
            num = count_common(agent.messages, messages)
            if num == len(agent.messages):
                agent.messages = messages
                return agent
            if num > num_common:
                best, num_common = agent, num
        shared = {} if best is None else {i: s for i, s in best.turns.items() if i < num_common}
        begin = max(shared, default=-1) + 1
        number = len(self.agents)
        agent = ContextAgent(
            agent_id=f"~{number}" if number else "",
            messages=messages,
            turns=shared,
            parent=shared[begin - 1] if shared else None,
            num_read=begin,
        )
        self.agents.append(agent)
        return agent


def count_common(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Return the number of first messages that two dialogues share; empty fields do not count."""
    pairs = zip(first, second, strict=False)
    different = (i for i, (one, other) in enumerate(pairs) if not _is_same(one, other))
    return next(different, min(len(first), len(second)))


def _is_same(one: Message, other: Message) -> bool:
    return one == other or _drop_empty(one) == _drop_empty(other)


def _drop_empty(message: Message) -> Message:
    return {k: v for k, v in message.items() if v is not None and v not in ("", [])}
