"""Chat: what an environment calls for a reply of the model, and what is recorded of it.

One chat is one rollout: each call is a generation, which becomes a step.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import math
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    GenerationError,
    ReplayLakeError,
)
from replaylake.datastore.interchange.rollout_rows import (
    COMPLETED,
    FAILED,
    FILTERED,
    Generation,
    RolloutFacts,
    Text,
    check_reward,
    to_messages,
)
from replaylake.online.recorders.language_recorder import LanguageRecorder

Reply = dict[str, Any]
_OUTCOME: Final = ("reward", "components", "filtered", "truncated", "metadata")
_MAX_REASON_CHARS: Final = 500
_LIBRARIES: Final = tuple({*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})


class LanguageModel(Protocol):
    """A model that replies to messages: `LocalModel`, `EngineModel`, or one of your own."""

    def describe(self) -> dict[str, Any]:
        """Return what determines its replies, as JSON: a rollout is resumed with an equal one."""
        ...

    async def generate(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        seed: int = 0,
        previous: Generation | None = None,
        num_previous: int = 0,
    ) -> Generation:
        """Generate the reply to messages.

        previous: the generation whose message is the last of the first num_previous messages. Its
        ids begin those of the reply's prompt, if the model can continue them. Raises:
        GenerationError, after which the rollout has failed; other errors, which end the run.
        """
        ...

    def close(self) -> None:
        """Release what the model holds; may be called twice."""
        ...


@dataclass
class _Turn:
    """A call: messages since the agent's last one, the reply, and the reward it brought."""

    agent: str
    prompt: list[dict[str, Any]]
    tools: Sequence[Any] | None
    sampling: dict[str, Any]
    generation: Generation
    reward: float | None = None


@dataclass
class _Dialogue:
    """An agent's messages up to its last reply, and whether a call of it is under way."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    last: _Turn | None = None
    is_open: bool = False


@dataclass(frozen=True)
class Outcome:
    """The end of a rollout. reward: None if it is not known; status_reason: None if completed."""

    reward: float | None = None
    components: Mapping[str, Any] | None = None
    status: str = COMPLETED
    status_reason: str | None = None
    truncated: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Chat:
    """The model as the environment of one rollout calls it: `await chat(messages)`."""

    def __init__(
        self, model: LanguageModel, sampling: Mapping[str, Any], seed: Sequence[int], max_turns: int
    ) -> None:
        """seed: numbers that identify the rollout; each call draws from a seed of its own."""
        self._model, self._sampling = model, dict(sampling)
        self._seed, self._max_turns = list(seed), max_turns
        self._num_calls = 0
        self._turns: dict[int, _Turn] = {}
        self._dialogues: dict[str, _Dialogue] = {}
        self.failure: ReplayLakeError | None = None

    async def __call__(
        self,
        messages: Text,
        *,
        tools: Sequence[Any] | None = None,
        agent: str = "",
        **sampling: Any,
    ) -> Reply:
        """Return the model's reply to messages, as a message of the role assistant.

        Args:
            messages: the whole dialogue: a text, a message or messages, as OpenAI's API has them.
                They go on from the agent's last reply where they begin with it and what was before.
            tools: functions that the model may call, as OpenAI's API has them; the reply has its
                calls as `tool_calls`.
            agent: name of the agent that replies, where the episode has several. Calls of one agent
                come one after the other.
            sampling: parameters such as temperature and max_tokens, for this call.

        Raises: GenerationError if the model refuses the messages, or after `max_turns` calls;
        EpisodeInvalidError for malformed arguments; other errors, which end the run.
        """
        # Copies: an environment may change its own messages later.
        whole = copy.deepcopy(to_messages(messages, "user"))
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if number >= self._max_turns:
            raise GenerationError(
                f"max_turns: found call {number + 1} of the rollout, expected at most "
                f"{self._max_turns}."
            )
        dialogue = self._dialogues.setdefault(agent, _Dialogue())
        if dialogue.is_open:
            raise EpisodeInvalidError(
                f"agent {agent!r}: found a call before its last one has returned, expected one at "
                "a time. Give each of several agents a name."
            )
        known, last = dialogue.messages, dialogue.last
        follows = last is not None and whole[: len(known)] == known
        options = {**self._sampling, **sampling}
        dialogue.is_open = True
        try:
            generation = await self._model.generate(
                whole,
                tools=tools,
                sampling=options,
                seed=make_seed([*self._seed, number]),
                previous=last.generation if last is not None and follows else None,
                num_previous=len(known) if follows else 0,
            )
        except GenerationError:
            raise
        except ReplayLakeError as error:
            self.failure = error
            raise
        finally:
            dialogue.is_open = False
        prompt = whole[len(known) :] if follows else whole
        turn = _Turn(agent, prompt, tools, options, generation)
        self._turns[number] = dialogue.last = turn
        reply = dict(generation.message)
        dialogue.messages = [*whole, copy.deepcopy(reply)]
        return reply

    def reward(self, reward: float, *, agent: str = "") -> None:
        """Add to the reward of an agent's last reply. Raises: EpisodeInvalidError."""
        dialogue = self._dialogues.get(agent, _Dialogue())
        if dialogue.last is None:
            raise EpisodeInvalidError(
                f"reward: found one for agent {agent!r}, which has not replied yet, expected a "
                "reply before."
            )
        dialogue.last.reward = (dialogue.last.reward or 0.0) + check_reward(reward, "reward")

    @property
    def total_reward(self) -> float | None:
        """The sum of the rewards of replies; None if there is none."""
        rewards = [one.reward for one in self._turns.values() if one.reward is not None]
        return math.fsum(rewards) if rewards else None

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def count_tokens(self) -> tuple[int, int]:
        """Return the numbers of tokens that the model read and generated, as far as known."""
        generations = [one.generation for one in self._turns.values()]
        return (
            sum(one.num_prompt_tokens or 0 for one in generations),
            sum(one.num_completion_tokens or 0 for one in generations),
        )

    @property
    def is_cut(self) -> bool:
        """Whether the last reply of an agent reached its limit of tokens."""
        last = [one.last for one in self._dialogues.values() if one.last is not None]
        return any(one.generation.finish_reason == "length" for one in last)

    def record(
        self,
        recorder: LanguageRecorder,
        sequence: str,
        outcome: Outcome,
        facts: RolloutFacts,
    ) -> str:
        """Record the rollout and return its episode id.

        The reward goes to the last step of each agent, beside those that its replies have already.
        Raises: EpisodeInvalidError, SchemaMismatchError; StorageError.
        """
        turns = [self._turns[number] for number in sorted(self._turns)]
        is_truncated = outcome.truncated or self.is_cut or outcome.status == FAILED
        ends = {"terminated": not is_truncated, "truncated": is_truncated}
        if not turns:  # the environment failed before it called the model
            steps: list[dict[str, Any]] = [{**ends, "is_trainable": False}]
        else:
            versions = {one.generation.policy_version for one in turns}
            steps = [_to_step(one, with_versions=len(versions) > 1) for one in turns]
            last = {one.agent: place for place, one in enumerate(turns)}
            has_rewards = outcome.reward is not None or self.total_reward is not None
            for step in steps if has_rewards else ():
                step["reward"] = step["reward"] or 0.0
            for place in last.values():
                steps[place] |= ends
                if outcome.reward is not None:
                    steps[place]["reward"] += outcome.reward
                steps[place]["reward_components"] = outcome.components
            facts = {**facts, "sampling": turns[0].sampling, "tools": turns[0].tools}
            facts["policy"] = turns[0].generation.policy
            if len(versions) == 1:
                facts["policy_version"] = turns[0].generation.policy_version
        facts = {**facts, "status": outcome.status, "status_reason": outcome.status_reason}
        attempt = recorder.next_attempt(sequence)
        return recorder.record_steps(steps, sequence=sequence, attempt=attempt, **facts)


class BlockingChat:
    """A chat for an environment that is no coroutine: `chat(messages)`, from another thread."""

    def __init__(self, chat: Chat, loop: asyncio.AbstractEventLoop) -> None:
        self._chat, self._loop = chat, loop

    def __call__(
        self,
        messages: Text,
        *,
        tools: Sequence[Any] | None = None,
        agent: str = "",
        **sampling: Any,
    ) -> Reply:
        """Return the model's reply to messages, as `Chat` does."""
        reply = self._chat(messages, tools=tools, agent=agent, **sampling)
        try:
            future = asyncio.run_coroutine_threadsafe(reply, self._loop)
        except RuntimeError:  # the run has ended
            reply.close()
            raise
        return future.result()

    def reward(self, reward: float, *, agent: str = "") -> None:
        """Add to the reward of an agent's last reply."""
        self._chat.reward(reward, agent=agent)


Play = Callable[[Mapping[str, Any], Chat], Awaitable[Any]]
"""Plays one episode of a task with a chat, and returns its outcome as `read_outcome` takes it."""


def read_outcome(value: Any) -> Outcome:
    """Return the outcome that an environment returned: a reward, None, or an object.

    The object may have `reward`, `components` (scores by name), `filtered` (the reason why it is
    not to be trained on), `truncated` and `metadata`. Raises: ConfigInvalidError.
    """
    if value is None:
        return Outcome()
    if not isinstance(value, Mapping):
        try:
            return Outcome(check_reward(value, "reward"))
        except EpisodeInvalidError as error:
            raise ConfigInvalidError(
                f"environment: returned {value!r:.100}, expected a reward, or an object with "
                f"{', '.join(_OUTCOME)}."
            ) from error
    if unknown := sorted(map(str, {*value} - {*_OUTCOME})):
        raise ConfigInvalidError(
            f"environment: returned an object with {unknown[0]!r}, expected {', '.join(_OUTCOME)}. "
            "Put scores into `components`, other values into `metadata`."
        )
    reward, reason = value.get("reward"), value.get("filtered")
    components, metadata = value.get("components"), value.get("metadata") or {}
    for name, one in (("components", components), ("metadata", metadata)):
        if one is not None and not isinstance(one, Mapping):
            raise ConfigInvalidError(
                f"environment: returned {one!r:.100} as {name}, expected values by name."
            )
    return Outcome(
        None if reward is None else check_reward(reward, "reward"),
        components,
        FILTERED if reason else COMPLETED,
        str(reason)[:_MAX_REASON_CHARS] if reason else None,
        bool(value.get("truncated", False)),
        metadata,
    )


def describe_failure(error: BaseException) -> str:
    """Return why an environment failed, with the place in its own code."""
    text = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
    places = [
        f" ({frame.f_code.co_filename.rpartition('/')[2]}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_LIBRARIES)
        and not frame.f_globals.get("__name__", "").startswith("replaylake.")
    ]
    return text + (places[-1] if places else "")


def make_seed(numbers: Sequence[int]) -> int:
    """Return a seed of 63 bits that numbers determine."""
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _to_step(turn: _Turn, *, with_versions: bool) -> dict[str, Any]:
    generation = turn.generation
    step: dict[str, Any] = {
        "prompt": turn.prompt,
        "completion": generation.message,
        "reward": turn.reward,
        "agent_id": turn.agent,
        "finish_reason": generation.finish_reason,
        "completion_id": generation.completion_id,
    }
    ids = generation.completion_ids
    if generation.prompt_ids is None or ids is None:
        return step
    step |= {"prompt_ids": generation.prompt_ids, "completion_ids": ids}
    step["log_probs"] = generation.log_probs
    if with_versions and generation.policy_version is not None:
        step["versions"] = [generation.policy_version] * len(ids)
    if not ids:
        step["is_trainable"] = False
    return step
