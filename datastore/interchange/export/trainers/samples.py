"""Samples: stored dialogues, from which the rows for trainers of language models are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.token_sequences import join_steps
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.formats.generations.messages import Message
from replaylake.datastore.interchange.formats.generations.rows import (
    COMPLETION_MESSAGES,
    FINAL_MESSAGES,
    PROMPT_MESSAGES,
)
from replaylake.datastore.interchange.formats.transcripts.dialogues import is_generated
from replaylake.datastore.query.group_views import GROUP_ID
from replaylake.datastore.query.query import run_table_query
from replaylake.datastore.query.sequence_views import sequences_sql
from replaylake.datastore.storage.arrow_values import numbers

# Default names of the value that is the right answer of a prompt, in order of preference.
LABELS: Final = ("ground_truth", "label", "answer", "solution", "gts")
_METADATA: Final = "metadata"
_FRAMEWORK: Final = "source_framework"
# Their agents have contexts of their own, also where no token is known.
_TREE_FRAMEWORKS: Final = ("art", "atif", "opentelemetry", "roll", "verifiers")
_PARENTS: Final = (tokens.PARENT_AGENT_ID, tokens.PARENT_STEP, tokens.IS_CONTINUATION)


@dataclass(frozen=True)
class Turn:
    """A generation: the messages since its parent, its own messages, and those after the last one.

    parent: agent and step from which it continues; None at a root. caller: agent and step that the
    source names as its parent, also if it does not continue the parent's context. tokens: the
    values of the step's token columns, by name, if the target needs them. time: its timestamp in
    seconds since 1970.
    """

    agent_id: str
    step: int
    parent: tuple[str, int] | None
    caller: tuple[str, int] | None
    prompt: Sequence[Message]
    completion: Sequence[Message]
    final: Sequence[Message]
    tokens: Mapping[str, Any]
    reward: float | None
    policy_version: int | None
    time: float | None

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, *self.completion, *self.final]


@dataclass(frozen=True)
class Sample:
    """A dialogue: all messages, of which the first `num_prompt` came before any generation.

    turns: its generations in order. is_tree: whether a generation does not continue from the one
    before it or rewrites its history, or agents have contexts of their own; then there is no order
    of all messages, and `messages` is empty. values: its other values by name: the first known
    value of each further column of its steps, and the metadata of its source. branches: rows of
    `sequences`, if the target needs tokens.
    """

    episode_id: str
    messages: Sequence[Message]
    num_prompt: int
    turns: Sequence[Turn]
    is_tree: bool
    reward: float | None
    terminated: bool
    truncated: bool
    values: Mapping[str, Any]
    episodes: Sequence[Episode] = field(repr=False)
    branches: Sequence[Mapping[str, Any]] = ()

    @property
    def prompt(self) -> Sequence[Message]:
        return self.messages[: self.num_prompt]

    @property
    def completion(self) -> Sequence[Message]:
        return self.messages[self.num_prompt :]

    @property
    def group_id(self) -> str | None:
        group: str | None = self.values.get(GROUP_ID)
        return group

    @cached_property
    def _turns_by_step(self) -> dict[tuple[str, int], Turn]:
        return {(turn.agent_id, turn.step): turn for turn in self.turns}

    def find_path(self, agent_id: str, step: int) -> list[Turn]:
        """Return the turns from a root to the one of this agent and step."""
        path: list[Turn] = []
        place: tuple[str, int] | None = (agent_id, step)
        while place is not None and (turn := self._turns_by_step.get(place)) is not None:
            path.append(turn)
            place = turn.parent
        return path[::-1]

    def sum_tree_rewards(self, agent_id: str) -> float | None:
        """Return the return of the tree that an agent belongs to; None if a reward is unknown.

        A tree is all agents that one continues or calls another: a branch without the step that was
        rewarded has the reward, too. Agents that share no context have returns of their own.
        """
        trees = {turn.agent_id: {turn.agent_id} for turn in self.turns}
        for turn in self.turns:
            if turn.caller is not None and turn.caller[0] in trees:
                joined = trees[turn.agent_id] | trees[turn.caller[0]]
                trees |= dict.fromkeys(joined, joined)
        rewards = [turn.reward for turn in self.turns if turn.agent_id in trees[agent_id]]
        known = [reward for reward in rewards if reward is not None]
        return math.fsum(known) if len(known) == len(rewards) else None

    @cached_property
    def tools(self) -> list[Any]:
        """The definitions of its tools: of the source's metadata, or of the column `tools`."""
        tools = self.values.get("tools")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError):
                return []
        return tools if isinstance(tools, list) else []

    def find_label(self, name: str | None) -> str | None:
        """Return the right answer as text: the value of this name, or of the first of LABELS."""
        names = LABELS if name is None else (name,)
        value = next((self.values[n] for n in names if self.values.get(n) is not None), None)
        return value if value is None or isinstance(value, str) else dump_json(value)


@dataclass(frozen=True)
class SamplePair:
    """Two samples of one prompt; the return of `chosen` is higher by `margin`."""

    chosen: Sample
    rejected: Sample
    margin: float


def make_sample(episodes: Sequence[Episode], *, with_tokens: bool) -> Sample:
    """Return the sample of one dialogue's episodes, one for each agent.

    with_tokens: whether its turns have their tokens; else they have only their parents.

    Raises: SpaceUnsupportedError for steps without texts.
    """
    first = episodes[0]
    turns = _read_turns(episodes, tuple(tokens.TOKEN_TYPES) if with_tokens else _PARENTS)
    values = _read_metadata(episodes) | _read_columns(episodes)
    is_tree = any(map(_is_tree, episodes)) or _are_contexts(episodes, values)
    messages = [] if is_tree else [message for turn in turns for message in turn.messages]
    num_prompt = next((i for i, m in enumerate(messages) if is_generated(m)), len(messages))
    rewards = np.concatenate([episode.rewards for episode in episodes])
    return Sample(
        episode_id=first.source_episode_id or first.episode_id,
        messages=messages,
        num_prompt=num_prompt,
        turns=turns,
        is_tree=is_tree,
        reward=math.fsum(rewards) if np.isfinite(rewards).all() else None,
        terminated=all(episode.terminated for episode in episodes),
        truncated=any(episode.truncated for episode in episodes),
        values=values,
        episodes=episodes,
    )


def _are_contexts(episodes: Sequence[Episode], values: Mapping[str, Any]) -> bool:
    """Whether the agents are contexts of their own; those of transcripts share one dialogue."""
    has_tokens = any(tokens.has_tokens(episode.extras) for episode in episodes)
    return len(episodes) > 1 and (has_tokens or values.get(_FRAMEWORK) in _TREE_FRAMEWORKS)


def _is_tree(episode: Episode) -> bool:
    def known(name: str) -> list[Any]:
        return _to_list(episode.extras.get(name, ()))

    steps = range(episode.first_step, episode.first_step + len(episode))
    for step, parent in zip(steps, known(tokens.PARENT_STEP), strict=False):
        if parent is not None and parent != step - 1:
            return True
    others = [agent for agent in known(tokens.PARENT_AGENT_ID) if agent is not None]
    return any(agent != episode.agent_id for agent in others) or False in known(
        tokens.IS_CONTINUATION
    )


def _read_turns(episodes: Sequence[Episode], names: Sequence[str]) -> list[Turn]:
    """Return the turns of all agents, with these columns, in the order of environment steps."""
    turns: list[tuple[int, int, Turn]] = []
    for number, episode in enumerate(episodes):
        own = _read_messages(episode)
        columns = {name: _to_list(episode.extras[name]) for name in names if name in episode.extras}
        order = np.arange(len(episode)) if episode.env_steps is None else episode.env_steps
        for row, (prompt, completion, final) in enumerate(own):
            values = {name: column[row] for name, column in columns.items()}
            step, reward = episode.first_step + row, float(episode.rewards[row])
            versions, times = episode.policy_versions, episode.timestamps
            turn = Turn(
                agent_id=episode.agent_id,
                step=step,
                parent=_find_parent(values, episode.agent_id, step),
                caller=_find_caller(values, episode.agent_id),
                prompt=prompt,
                completion=completion,
                final=final,
                tokens=values,
                reward=reward if math.isfinite(reward) else None,
                policy_version=None if versions is None else int(versions[row]),
                time=None if times is None else int(times[row]) / 1e6,
            )
            turns.append((int(order[row]), number, turn))
    turns.sort(key=lambda turn: turn[:2])
    return [turn for *_, turn in turns]


def _find_parent(values: Mapping[str, Any], agent_id: str, step: int) -> tuple[str, int] | None:
    if values.get(tokens.IS_CONTINUATION) is False:
        return None
    return _find_caller(values, agent_id) or ((agent_id, step - 1) if step else None)


def _find_caller(values: Mapping[str, Any], agent_id: str) -> tuple[str, int] | None:
    step = values.get(tokens.PARENT_STEP)
    if step is None:
        return None
    named = values.get(tokens.PARENT_AGENT_ID)
    return agent_id if named is None else named, step


def _read_messages(episode: Episode) -> list[tuple[list[Message], list[Message], list[Message]]]:
    """Return for each step the messages before it, its own, and those after the last step."""
    if {PROMPT_MESSAGES, COMPLETION_MESSAGES} <= episode.extras.keys():
        texts = [
            _to_list(episode.extras[name]) if name in episode.extras else [None] * len(episode)
            for name in (PROMPT_MESSAGES, COMPLETION_MESSAGES, FINAL_MESSAGES)
        ]
        parts = [[json.loads(text) if text else [] for text in column] for column in texts]
        return list(zip(*parts, strict=True))
    observations, actions = map(np.asarray, (episode.observations, episode.actions))
    if observations.dtype != object or actions.dtype != object:
        raise SpaceUnsupportedError(
            f"episode {episode.episode_id}: found observations and actions that are not text, "
            "expected dialogues: datasets of transcripts, or steps of texts. Export it to another "
            "format."
        )
    messages: list[tuple[list[Message], list[Message], list[Message]]] = [
        ([_text_message("user", asked)] if asked else [], [_text_message("assistant", said)], [])
        for asked, said in zip(observations.tolist(), actions.tolist(), strict=True)
    ]
    if episode.final_observation:
        final = _text_message("user", str(episode.final_observation))
        messages[-1] = (*messages[-1][:2], [final])
    return messages


def _text_message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _read_metadata(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the metadata of a transcript's record, and those that a recorded request had."""
    for episode in episodes:
        for text in _to_list(episode.extras.get(_METADATA, ())):
            if text:
                value = json.loads(text)
                if not isinstance(value, dict):
                    return {}
                of_request = value.get(_METADATA)
                return {**of_request, **value} if isinstance(of_request, dict) else value
    return {}


def _read_columns(episodes: Sequence[Episode]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for episode in episodes:
        for name, column in episode.extras.items():
            if name in values or name in tokens.TOKEN_TYPES or name == _METADATA:
                continue
            first = next((v for v in _to_list(column) if v is not None), None)
            if first is not None:
                values[name] = first
    return values


def _to_list(column: Any) -> list[Any]:
    return list(column.to_pylist() if hasattr(column, "to_pylist") else column)


def read_branches(samples: Sequence[Sample]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the view `sequences` over some samples' episodes, by episode_id.

    Empty where they have no token columns. An agent's steps that follow one another are joined
    here, without the query that finds the paths of a tree: an export then takes three quarters of
    the time (4,000 sequences of 300 tokens, 2 busy cores, 2026-11-27).
    """
    branches: dict[str, list[dict[str, Any]]] = {}
    others: list[Episode] = []
    for sample in samples:
        with_tokens = [e for e in sample.episodes if tokens.has_tokens(e.extras)]
        if not sample.is_tree and all(map(_is_whole, with_tokens)):
            for episode in with_tokens:
                branches.setdefault(episode.episode_id, []).append(_join_episode(episode))
        else:
            others += with_tokens
    if not others:
        return branches
    table = pa.concat_tables(map(_to_table, others), promote_options="default")
    query = sequences_sql("steps", table.schema, table.column_names)
    # Its return is that of the sample: agents without tokens are not in this table.
    ordered = (
        f"SELECT * EXCLUDE (episode_return) FROM ({query}) ORDER BY episode_id, agent_id, last_step"
    )
    for row in run_table_query(ordered, {"steps": table}).to_pylist():
        branches.setdefault(row["episode_id"], []).append(row)
    return branches


def _is_whole(episode: Episode) -> bool:
    """Whether an episode has its first step, and the ids of all its steps."""
    columns = (tokens.ACTION_TOKENS, tokens.OBSERVATION_TOKENS)
    return episode.first_step == 0 and not any(episode.extras[n].null_count for n in columns)


def _join_episode(episode: Episode) -> dict[str, Any]:
    """Return the row of `sequences` for an agent's steps, each of which follows the one before."""
    columns = {n: episode.extras[n] for n in tokens.TOKEN_TYPES if n in episode.extras}
    sequence = join_steps(columns)
    observed, acted = (
        numbers(pc.list_value_length(columns[name])).astype(np.int64)
        for name in (tokens.OBSERVATION_TOKENS, tokens.ACTION_TOKENS)
    )
    turn_starts = np.cumsum(observed + acted) - observed - acted
    action_starts = turn_starts + observed
    known = np.zeros(len(sequence), np.bool_)
    if (log_probs := columns.get(tokens.ACTION_LOG_PROBS)) is not None:
        for row in np.flatnonzero(numbers(log_probs.is_valid())).tolist():
            known[action_starts[row] : action_starts[row] + acted[row]] = True
    values = np.full(len(sequence), None, object)
    if sequence.log_probs is not None:
        values[known] = sequence.log_probs[known].tolist()
    runs = _to_list(columns.get(tokens.ACTION_VERSIONS, pa.nulls(len(episode))))
    versions = []
    for row, start in enumerate(action_starts.tolist()):
        own = runs[row]
        if own is None and episode.policy_versions is not None and acted[row]:
            own = [{"start": 0, "version": int(episode.policy_versions[row])}]
        versions += [{"start": start + r["start"], "version": r["version"]} for r in own or ()]
    return {
        "episode_id": episode.episode_id,
        "agent_id": episode.agent_id,
        "last_step": len(episode) - 1,
        "token_ids": sequence.token_ids.tolist(),
        "loss_mask": sequence.loss_mask.astype(np.int8).tolist(),
        "log_probs": values.tolist(),
        "turn_starts": turn_starts.tolist(),
        "action_starts": action_starts.tolist(),
        "versions": versions,
    }


def _to_table(episode: Episode) -> pa.Table:
    num = len(episode)
    versions = episode.policy_versions
    columns = {
        schema.EPISODE_ID: pa.array([episode.episode_id] * num),
        schema.AGENT_ID: pa.array([episode.agent_id] * num),
        schema.STEP: pa.array(np.arange(num, dtype=np.int32) + episode.first_step),
        schema.REWARD: pa.array(episode.rewards, from_pandas=True),
        schema.POLICY_VERSION: pa.nulls(num, pa.int64()) if versions is None else versions,
    }
    for name, kind in tokens.TOKEN_TYPES.items():
        column = episode.extras.get(name)
        columns[name] = pa.nulls(num, kind) if column is None else column
    return pa.table(columns)
