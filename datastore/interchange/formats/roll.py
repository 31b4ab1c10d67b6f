"""ROLL: the rollouts that it dumps, `rollout_dump_data.step_{N}.jsonl`, of both pipelines.

A file is one line: an object of columns, each with one value per sample. Samples of the RLVR
pipeline are a prompt and an answer; those of the agentic pipeline are dialogues as JSON text.
Neither has token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.episodes import tokens
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.contexts import (
    ContextAgent,
    ContextTree,
    count_common,
)
from replaylake.datastore.interchange.formats.generations.json_columns import (
    ColumnFile,
    ColumnLine,
    begins_with_columns,
    read_first_columns,
)
from replaylake.datastore.interchange.formats.generations.json_values import dump_metadata
from replaylake.datastore.interchange.formats.generations.messages import (
    GIVEN,
    Message,
    clean_text,
    derive_group,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    MappedPaths,
    Record,
    RecordTables,
    Row,
    describe_generation,
    empty_row,
    measure_row,
    read_generations,
    read_step,
)
from replaylake.datastore.interchange.sources.source import SourceFile

_NEEDED: Final = ("responses", "scores", "global_step")
_PROMPTS: Final = ("messages", "prompt")
# Fields that become columns; all others are metadata.
_USED: Final = frozenset((*_NEEDED, "id", "sampling_params"))
# The columns of its RLVR pipeline, of which any may be the first.
_RLVR: Final = (
    *_USED,
    *_PROMPTS,
    "source",
    "difficulty",
    "ground_truth",
    "case_type",
    "test_case_function",
    "test_cases",
    "tag",
    "domain",
)
_TRAJECTORY: Final = "trajectory_data"
_AGENTIC: Final = (_TRAJECTORY, "messages", "global_step")
_ASSISTANT: Final = "assistant"
_BRANCH: Final = "branch_or_step_idx"
_NUM_BRANCHES: Final = "num_branches_or_steps"
# What ends an episode of its own accord; all other reasons cut it off.
_ENDED: Final = frozenset(("FINISH", "EVAL_GT"))
_CUT_OFF: Final = frozenset(("abort", "error", "length", "max_length", "max_steps", "timeout"))
_FRAMEWORK: Final = "roll"
_FAULTS: Final = (OverflowError, RecursionError, SourceInvalidError, ValueError)


class RollFormat:
    """A line of columns with global_step, and responses and scores, or trajectory_data."""

    name = "roll"
    about = "ROLL's rollout_dump_data.step_{N}.jsonl of its RLVR and agentic pipelines: texts"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        # No other log has this column: the rest of a line, which may be long, need not be read.
        if begins_with_columns(files[0], (_TRAJECTORY,)):
            return True
        columns = read_first_columns(files[0]) if begins_with_columns(files[0], _RLVR) else ()
        has_prompt = any(name in columns for name in _PROMPTS)
        return has_prompt and all(name in columns for name in _NEEDED)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _SampleTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _SampleTables(RecordTables):
    """Rows of the samples in some files."""

    unit = "sample"

    def __init__(self, files: Sequence[SourceFile], options: ReadOptions) -> None:
        super().__init__(files, options)
        self._num_unanswered = self._num_empty = 0

    def begin(self) -> None:
        super().begin()
        self._num_unanswered = self._num_empty = 0

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        place = 0
        with ColumnFile(file) as columns:
            for line in columns.lines():
                if (fault := _find_fault(columns, line)) is not None:
                    yield self._reject(place, f"line {line.line}: {fault}")
                    place += 1
                elif _TRAJECTORY in line.bounds:
                    yield from self._read_rollouts(columns, line, place)
                    place += line.count(_TRAJECTORY)
                else:
                    yield from self._read_samples(columns, line, place)
                    place += line.count("responses")

    def finish(self) -> Sequence[str]:
        notes = self._ids.notes()
        if self._num_unanswered:
            notes.append(
                f"{self._num_unanswered} agents end with a prompt whose answer ROLL does not dump "
                "(trajectory_mode step): their last action is empty, and is_trainable is false"
            )
        if self._num_empty:
            notes.append(f"{self._num_empty} rollouts have no generation: left out")
        return notes

    def _reject(self, place: int, fault: str) -> Record:
        return Record([empty_row(self._ids.next(None))], place, 0, fault)

    def _read_samples(self, columns: ColumnFile, line: ColumnLine, first: int) -> Iterator[Record]:
        for i in range(line.count("responses")):
            try:
                row = self._read_sample(columns.read_row(line, i), first + i)
            except _FAULTS as error:
                yield self._reject(first + i, str(error))
            else:
                yield Record([row], first + i, measure_row(row))

    def _read_sample(self, sample: Mapping[str, Any], place: int) -> Row:
        answer, score = sample["responses"], sample["scores"]
        if not isinstance(answer, str):
            raise SourceInvalidError(f"responses: found {shorten(answer)}, expected text")
        step = read_step(sample["global_step"], "global_step")
        if score is not None and (not _is_number(score) or score != score):
            raise SourceInvalidError(f"scores: found {shorten(score)}, expected numbers or null")
        prompt, used = _read_prompt(sample)
        group, source = derive_group([{"role": "step", "content": step}, *prompt])
        own = sample.get("id")
        if isinstance(own, str | int) and not isinstance(own, bool):
            group, source = clean_text(f"step{step}/{own}"), GIVEN
        sampling = sample.get("sampling_params")
        rest = {k: v for k, v in sample.items() if k not in _USED and k != used}
        return {
            **describe_generation(prompt, {"role": _ASSISTANT, "content": answer}),
            **self.paths.find({"": sample}),
            "episode_id": self._ids.next(f"step{step}/{place}"),
            "agent_id": "",
            "step": 0,
            "env_step": 0,
            "reward": None if score is None else float(score),
            "terminated": score is not None,
            "truncated": False,
            "group_id": group,
            "group_id_source": source,
            "train_step": step,
            "sampling": clean_text(sampling) if isinstance(sampling, str) else None,
            "source_framework": _FRAMEWORK,
            "metadata": dump_metadata(rest) if rest else None,
        }

    def _read_rollouts(self, columns: ColumnFile, line: ColumnLine, first: int) -> Iterator[Record]:
        """Read samples; those of one rollout, which lie side by side, are one episode."""
        rollout: _Rollout | None = None
        for i in range(line.count(_TRAJECTORY)):
            try:
                sample = _read_sample_of_rollout(columns.read_row(line, i))
                if rollout is not None and not rollout.has(sample):
                    yield self._finish_rollout(rollout)
                    rollout = None
                if rollout is None:
                    rollout = _Rollout(sample, first + i)
                rollout.add(sample)
            except _FAULTS as error:
                # Without one of its samples, the rest of a rollout would be another one.
                yield self._reject(first + i if rollout is None else rollout.place, str(error))
                rollout = None
        if rollout is not None:
            yield self._finish_rollout(rollout)

    def _finish_rollout(self, rollout: _Rollout) -> Record:
        try:
            rows = rollout.make_rows(self.paths)
        except _FAULTS as error:
            return self._reject(rollout.place, str(error))
        if not rows:
            self._num_empty += 1
            return Record([], rollout.place, 0)
        self._num_unanswered += rollout.num_unanswered
        episode_id = self._ids.next(rollout.name)
        for row in rows:
            row["episode_id"] = episode_id
        return Record(rows, rollout.place, sum(map(measure_row, rows)))


def _find_fault(columns: ColumnFile, line: ColumnLine) -> str | None:
    """Return what is wrong with the columns of a line, which have to have one length."""
    if line.fault is not None:
        return line.fault
    needed = _AGENTIC if _TRAJECTORY in line.bounds else _NEEDED
    missing = [name for name in needed if name not in line.bounds]
    if missing:
        return f"found no list {missing[0]}, expected one value for each sample"
    num = line.count(needed[0])
    for name in (*line.bounds, *line.others):
        if name in line.others:
            found = shorten(columns.show(line, name))
        elif line.count(name) != num:
            found = f"{line.count(name)} values"
        else:
            continue
        return f"{name}: found {found}, expected {num}, one for each sample"
    return None


def _read_prompt(sample: Mapping[str, Any]) -> tuple[list[Message], str]:
    """Return the messages before the answer, and the column that they are from.

    `messages` are JSON text. Raises: SourceInvalidError.
    """
    if (text := sample.get("messages")) is not None:
        messages = _read_json(text)
        if not _is_dialogue(messages):
            raise SourceInvalidError(f"messages: found {shorten(text)}, expected a JSON list")
        return messages, "messages"
    prompt = sample.get("prompt")
    if not isinstance(prompt, str):
        raise SourceInvalidError(f"prompt: found {shorten(prompt)}, expected text")
    return [{"role": "user", "content": prompt}], "prompt"


@dataclass(frozen=True)
class _RolloutSample:
    """A sample of the agentic pipeline: its trajectory_data, and the dialogues of `messages`.

    name: the id of the rollout, of which this may be one of several branches or steps.
    """

    name: str
    data: dict[str, Any]
    dialogues: Sequence[list[Message]]
    rest: Mapping[str, Any]
    train_step: int

    @property
    def is_part(self) -> bool:
        """Whether other samples may belong to the rollout: an env manager with branches."""
        return _BRANCH in self.data


def _read_sample_of_rollout(sample: Mapping[str, Any]) -> _RolloutSample:
    data = _read_json(sample[_TRAJECTORY])
    name = data.get("trajectory_id") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(name, str):
        found = shorten(sample[_TRAJECTORY])
        raise SourceInvalidError(
            f"{_TRAJECTORY}: found {found}, expected a JSON object with trajectory_id"
        )
    messages = _read_json(sample["messages"])
    dialogues = [messages] if _is_dialogue(messages) else messages
    if not isinstance(dialogues, list) or not all(map(_is_dialogue, dialogues)):
        found = shorten(sample["messages"])
        raise SourceInvalidError(
            f"messages: found {found}, expected a JSON list of messages, or of such lists"
        )
    if (tools := _read_json(sample.get("tools"))) is None:
        tools = sample.get("tools")
    rest = {k: v for k, v in sample.items() if k not in (*_AGENTIC, "tools")}
    return _RolloutSample(
        name.removesuffix(f"_b{data.get(_BRANCH)}"),
        data,
        dialogues,
        {**rest, "tools": tools} if tools else rest,
        read_step(sample["global_step"], "global_step"),
    )


class _Rollout:
    """The samples of one rollout, as the steps of one episode: each branch is an agent."""

    def __init__(self, first: _RolloutSample, place: int) -> None:
        self.name = clean_text(first.name)
        self.place = place
        self.num_unanswered = 0
        self._first = first
        self._tree = ContextTree()
        self._rewards: dict[str, float] = {}

    def has(self, sample: _RolloutSample) -> bool:
        """Whether a sample is a further part of this rollout."""
        return self._first.is_part and sample.is_part and sample.name == self._first.name

    def add(self, sample: _RolloutSample) -> None:
        """Add the generations of a sample that the ones before it do not have."""
        info = sample.data.get("reward_info")
        info = info if isinstance(info, dict) else {}
        reward = info.get("step_reward" if sample.is_part else "episode_reward")
        if reward is None or not _is_number(reward):
            raise SourceInvalidError(
                f"{_TRAJECTORY}.reward_info: found {shorten(reward)}, expected a number"
            )
        agent: ContextAgent | None = None
        for messages in sample.dialogues:
            own: Mapping[int, Row] = {
                i: {} for i, one in enumerate(messages) if one["role"] == _ASSISTANT
            }
            agent = self._tree.add(messages, own)
        if agent is not None:
            before = self._rewards.get(agent.agent_id, 0.0)
            self._rewards[agent.agent_id] = before + float(reward)

    def make_rows(self, paths: MappedPaths) -> list[Row]:
        """Return the rows of all agents, without their episode_id."""
        data = self._first.data
        rest = {k: v for k, v in data.items() if k != "messages"}
        for agent in self._tree.agents:
            if self._first.is_part and agent.pending:
                # A sample of one step is a prompt; its answer is known from the step after it.
                self._tree.append(agent, agent.pending, None)
                agent.rows[-1][tokens.IS_TRAINABLE] = False
                self.num_unanswered += 1
            elif agent.rows:
                agent.set_final(agent.pending or _find_final(rest, agent.messages))
        agents = [agent for agent in self._tree.agents if agent.rows]
        if not agents:
            return []
        status, terminated, truncated = _read_end(data)
        for agent in agents:
            for row, reward in zip(agent.rows, self._split_reward(agent), strict=True):
                row["reward"], row["terminated"], row["truncated"] = reward, False, False
            agent.rows[-1] |= {"terminated": terminated, "truncated": truncated}
        rows = [row for agent in agents for row in agent.rows]
        mode = _get(data, "env_info", "mode")
        shared = {
            "group_id": self._find_group(),
            "group_id_source": GIVEN,
            "train_step": self._first.train_step,
            "status": status,
            "split": clean_text(mode) if isinstance(mode, str) else None,
            "source_framework": _FRAMEWORK,
        }
        if shared["group_id"] is None:
            first = agents[0]
            prompt = first.messages[: next(iter(first.turns), len(first.messages))]
            shared["group_id"], shared["group_id_source"] = derive_group(prompt)
        for row in rows:
            row.update(shared)
        paths.apply(rows, paths.find({"": {**self._first.rest, **data}}))
        rows[0]["metadata"] = dump_metadata({**self._first.rest, **rest})
        return rows

    def _split_reward(self, agent: ContextAgent) -> list[float]:
        """Return a reward for each step of an agent: what each brought, or all at its last one."""
        own = _get(self._first.data, "reward_info", "step_rewards")
        is_split = isinstance(own, list) and all(map(_is_number, own))
        if is_split and len(self._tree.agents) == 1 and len(own) == len(agent.rows):
            return [float(value) for value in own]
        return [*[0.0] * (len(agent.rows) - 1), self._rewards.get(agent.agent_id, 0.0)]

    def _find_group(self) -> str | None:
        """Return the id that ROLL gives to the rollouts of one task: tag, group, episode, seed."""
        info = self._first.data.get("env_info")
        names = ("tag", "group_id", "episode_id", "seed")
        if isinstance(info, dict) and all(name in info for name in names):
            return clean_text("_".join(str(info[name]) for name in names))
        stamp = self._first.data.get("timestamp")
        if self._first.is_part and isinstance(stamp, str) and self.name.endswith(f"_{stamp}"):
            group, _, env = self.name.removesuffix(f"_{stamp}").rpartition("_")
            return group if env.isdecimal() and group else None
        return None


def _find_final(rest: dict[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Return what was observed after the last generation, and take it out of the metadata."""
    seen = rest.get("last_observation")
    if not isinstance(seen, list) or not _is_dialogue(seen):
        return []
    if count_common(messages, seen) < len(messages):
        return []
    del rest["last_observation"]
    return seen[len(messages) :]


def _read_end(data: Mapping[str, Any]) -> tuple[str | None, bool, bool]:
    """Return status, terminated and truncated of a rollout, which is over when it is dumped."""
    reason = _get(data, "failure_info", "stop_reason")
    if isinstance(reason, str):
        was_cut = reason not in _ENDED or _get(data, "length_info", "truncated") is True
        return clean_text(reason), not was_cut, was_cut
    reason = data.get("finish_reason")
    if not isinstance(reason, str):
        return None, True, False
    was_cut = reason.lower() in _CUT_OFF
    return clean_text(reason), not was_cut, was_cut


def _get(data: Mapping[str, Any], *path: str) -> Any:
    value: Any = data
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _read_json(text: Any) -> Any:
    """Return the value of JSON text, or one that is no text; None for text that is no JSON."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return None


def _is_dialogue(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
