"""Dialogues: a transcript's record, however its writer laid it out, as messages of one shape.

A message is an object with `role` and `content`, as OpenAI's chat completions have it; whatever
else it has (`tool_calls`, `tool_call_id`, `name`, ...) stays in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.generations.messages import (
    DERIVED,
    GIVEN,
    NONE,
    Message,
    derive_group,
    shorten,
)
from replaylake.datastore.interchange.formats.tabular.tables import is_encodable

# Whoever speaks in these roles is what a policy stands for; the rest is said or done to it.
GENERATED: Final = frozenset(
    ("assistant", "agent", "ai", "bot", "function_call", "gpt", "model", "tool_call")
)
# ShareGPT's names for them.
_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_LISTS: Final = ("messages", "traj", "conversations", "conversation", "history", "trajectory")
# What a table of steps has, and a dialogue has not.
_STEP: Final = frozenset(("observation", "observations", "obs", "action", "actions"))
# LangChain tells roles by `type`, and other frameworks keep content under names of their own.
_TYPES: Final = frozenset(("ai", "function", "human", "system", "tool"))
_CONTENTS: Final = ("text", "parts")
_DISPLAY: Final = "messages_display"
# tau2-bench: the results of a run have simulations, or name the files that have them.
_SIMULATIONS: Final = "simulations"
_SIMULATION_INDEX: Final = "simulation_index"
_TERMINATION: Final = "termination_reason"
_STOPS: Final = frozenset(("agent_stop", "user_stop"))
_PAIR: Final = ("chosen", "rejected")
_COMPLETIONS: Final = ("completion", "response", "completions", "responses", *_PAIR)
_FRAMEWORKS: Final = {
    "traj": "tau-bench",
    "messages": "openai",
    "history": "swe-agent",
    "trajectory": "swe-agent",
}
_SPOKEN: Final = re.compile(r"^(system|user|assistant|tool): ?", re.MULTILINE)
IDS: Final = (
    "episode_id",
    "conversation_id",
    "dialogue_id",
    "session_id",
    "trajectory_id",
    "id",
    "uuid",
)
_GROUPS: Final = ("group_id", "prompt_id", "task_id")
SAMPLES: Final = ("sample_id", "completion_id", "trial")
_REWARDS: Final = ("reward", "score")
_ENDED: Final = frozenset(
    ("complete", "completed", "done", "end_turn", "eos", "finished", "stop", "success")
)
_CUT_OFF: Final = frozenset(
    (
        "aborted",
        "cancelled",
        "error",
        "length",
        "max_steps",
        "max_tokens",
        "max_turns",
        "timeout",
        "truncated",
    )
)
# What becomes a column where it is of this type, as in what we export.
_COLUMNS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "reward": (int, float, type(None)),
    "rewards": (list, type(None)),
    "episode_id": (str, int),
    "group_id": (str, int),
    "group_id_source": str,
    "sample_id": (str, int),
    "source_framework": str,
    "status": str,
    "model": str,
    "terminated": bool,
    "truncated": bool,
}


@dataclass(frozen=True)
class Dialogue:
    """Messages in order, and what is known of them.

    rewards: one for each generated message, None where unknown. group_id: of samples of one prompt.
    """

    messages: Sequence[Message]
    framework: str
    episode_id: str | None
    group_id: str | None
    group_id_source: str
    sample_id: str | None
    rewards: Sequence[float | None]
    status: str | None
    terminated: bool
    truncated: bool
    model: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def is_transcript(record: Any) -> bool:
    """Whether a value has the shape of one of the transcripts that are known here."""
    if isinstance(record, list):
        return bool(record) and all(_is_message(message) for message in record)
    if not isinstance(record, dict):
        return False
    if isinstance(record.get(_DISPLAY), str):
        return True
    if isinstance(record.get("traj"), list) and "task_id" in record:
        return True
    if is_run_of_simulations(record):
        return True
    # A table of steps may keep a history in each of its rows.
    is_step = bool(_STEP & record.keys())
    lists = _LISTS[:-2] if is_step else _LISTS
    if any(map(_is_dialogue, map(record.get, lists))):
        return True
    if record.get("messages") == [] and not is_step:
        return True
    answers = [record[name] for name in _COMPLETIONS if _is_side(record.get(name))]
    # Without a prompt, the messages of an answer have to hold it.
    return any(_is_side(record.get("prompt")) or _is_message(answer[0]) for answer in answers)


def is_run_of_simulations(record: Any) -> bool:
    """Whether a value is the results of a run of tau2-bench: simulations and their tasks."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("tasks"), list)
        and any(isinstance(record.get(n), list) for n in (_SIMULATIONS, _SIMULATION_INDEX))
    )


def list_simulations(run: Mapping[str, Any]) -> list[Any]:
    """Return the simulations of a run, each with its task and what is known of the run."""
    tasks = {str(task.get("id")): task for task in run["tasks"] if isinstance(task, dict)}
    shared = {k: v for k, v in run.items() if k not in ("tasks", _SIMULATIONS, _SIMULATION_INDEX)}
    simulations = run.get(_SIMULATIONS) or []
    return [
        {**one, "run": shared, "task": tasks.get(str(one.get("task_id")))}
        if isinstance(one, dict)
        else one
        for one in simulations
    ]


def is_generated(message: Mapping[str, Any]) -> bool:
    """Whether a message is the agent's own."""
    return message["role"] in GENERATED


def parse_dialogues(record: Any) -> list[Dialogue]:
    """Return the dialogues of a record: one, or one for each completion of its prompt.

    Raises: SourceInvalidError for what is none of the known shapes, without its place.
    """
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise _unknown_record_error(record)
    if is_run_of_simulations(record):
        return [one for own in list_simulations(record) for one in parse_dialogues(own)]
    if _TERMINATION in record and "task_id" in record:
        return [_parse_simulation(record)]
    if _DISPLAY in record:
        return [_dialogue(record, _parse_display(record[_DISPLAY]), "tau-bench", _DISPLAY)]
    if all(_is_side(record.get(name)) for name in _PAIR):
        # Some repeat the chosen answer as `messages`.
        return list(_completions(record))
    there = [name for name in _LISTS if record.get(name) is not None]
    # Of two such lists, as a trajectory beside its history, the one of messages is the dialogue.
    for name in sorted(there, key=lambda name: not _is_dialogue(record[name])):
        framework = _FRAMEWORKS.get(name, "sharegpt")
        return [_dialogue(record, _messages(record[name], name), framework, name)]
    return list(_completions(record))


def _dialogue(
    record: Mapping[str, Any], messages: list[Message], framework: str, *used: str
) -> Dialogue:
    rewards = parse_rewards(record, sum(map(is_generated, messages)))
    if "traj" in record:
        status, terminated, truncated = parse_task_end(record)
    else:
        has_outcome = bool(rewards) and rewards[-1] is not None
        status, terminated, truncated = parse_end(record, has_outcome=has_outcome)
    num_prompt = next((i for i, m in enumerate(messages) if is_generated(m)), len(messages))
    group_id, source = parse_group(record, messages[:num_prompt])
    episode_id = first_id(record, IDS)
    if episode_id is None and (task := first_id(record, ("task_id",))) is not None:
        trial = first_id(record, ("trial",))
        episode_id = task if trial is None else f"{task}-{trial}"
    return Dialogue(
        messages=messages,
        framework=parse_text(record, "source_framework") or framework,
        episode_id=episode_id,
        group_id=group_id,
        group_id_source=source,
        sample_id=first_id(record, SAMPLES),
        rewards=rewards,
        status=status,
        terminated=terminated,
        truncated=truncated,
        model=parse_text(record, "model"),
        metadata=collect_metadata(record, used),
    )


def _parse_simulation(record: Mapping[str, Any]) -> Dialogue:
    """Return the dialogue of a simulation of tau2-bench, whose tools the user may call, too."""
    messages: list[Message] = []
    for message in _messages(record.get("messages"), "messages"):
        several = message.get("tool_messages")
        for one in _messages(several, "tool_messages") if several is not None else [message]:
            answered = one.get("id") if one["role"] == "tool" else None
            messages.append(one if answered is None else {**one, "tool_call_id": answered})
    info = record.get("reward_info")
    reward = info.get("reward") if isinstance(info, dict) else None
    reason = record.get(_TERMINATION)
    own = {**record, "reward": reward, "status": reason}
    own |= {"terminated": reason in _STOPS, "truncated": reason not in _STOPS}
    dialogue = _dialogue(own, messages, "tau2-bench", "messages", _TERMINATION)
    return replace(dialogue, model=_find_model(record))


def _find_model(record: Mapping[str, Any]) -> str | None:
    found: Any = record
    for name in ("run", "info", "agent_info", "llm"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, str) and is_encodable(found) else None


def _completions(record: Mapping[str, Any]) -> list[Dialogue]:
    """Return a dialogue for each thing that was answered to one prompt."""
    answers = _answers(record)
    if not answers or (record.get("prompt") is None and isinstance(answers[0][2], str)):
        raise _unknown_record_error(record)
    prompt = [] if record.get("prompt") is None else _side(record["prompt"], "prompt", "user")
    base = {name: value for name, value in record.items() if name not in ("rewards", "reward")}
    dialogues = []
    for name, suffix, completion, reward in answers:
        messages = _side(completion, name, "assistant")
        # A preference pair may repeat the prompt in each of its sides.
        whole = messages if messages[: len(prompt)] == prompt else [*prompt, *messages]
        if messages and not is_generated(messages[0]):
            whole = messages
        own = {**base, "reward": reward}
        if suffix is not None:
            own_id = first_id(record, IDS)
            own |= {"sample_id": suffix} if "sample_id" not in record else {}
            own |= {"episode_id": f"{own_id}/{suffix}"} if own_id is not None else {}
        dialogues.append(_dialogue(own, whole, "prompt-completion", "prompt", *_COMPLETIONS))
    return dialogues


def _answers(record: Mapping[str, Any]) -> list[tuple[str, str | None, Any, Any]]:
    """Return name, what tells it from others of the prompt, content and reward of each."""
    for name in ("completion", "response"):
        if record.get(name) is not None:
            return [(name, None, record[name], record.get("reward", record.get("score")))]
    for name in ("completions", "responses"):
        if isinstance(several := record.get(name), list):
            rewards = record.get("rewards", record.get("scores"))
            rewards = [None] * len(several) if rewards is None else rewards
            if not isinstance(rewards, list) or len(rewards) != len(several):
                raise SourceInvalidError(
                    f"rewards: found {shorten(rewards)}, expected a list of {len(several)}, one "
                    f"for each of the {name}"
                )
            pairs = zip(several, rewards, strict=True)
            return [(name, str(i), *pair) for i, pair in enumerate(pairs)]
    return [
        (name, name, record[name], record.get(f"score_{name}", record.get(f"{name}_score")))
        for name in _PAIR
        if record.get(name) is not None
    ]


def _side(value: Any, name: str, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(value, name)


def _is_side(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, str) or _is_message(v) for v in value)
    return isinstance(value, str)


def _is_dialogue(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and (
        isinstance(value.get("role"), str)
        or (isinstance(value.get("from"), str) and "value" in value)
        or (isinstance(kind := value.get("type"), str) and kind in _TYPES and "content" in value)
    )


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list):
        raise SourceInvalidError(f"{name}: found {shorten(value)}, expected a list of messages")
    messages = []
    for number, message in enumerate(value):
        if not _is_message(message):
            raise SourceInvalidError(
                f"{name}: found {shorten(message)} as message {number}, expected an object with a "
                "role and content (or from and value)"
            )
        messages.append(_normalize_message(message))
    return messages


def _normalize_message(message: Message) -> Message:
    """Return a message with `role` and, if it says anything, `content`."""
    if "role" not in message:
        speaker, content = ("from", "value") if "from" in message else ("type", "content")
        rest = {k: v for k, v in message.items() if k not in (speaker, content)}
        role = _ROLES.get(message[speaker], message[speaker])
        return {"role": role, "content": message[content], **rest}
    other = next((name for name in _CONTENTS if message.get(name) is not None), None)
    if other is None or message.get("content") is not None:
        return message
    return {"content" if k == other else k: v for k, v in message.items() if k != "content"}


def _parse_display(text: Any) -> list[Message]:
    """Return the messages of `role: text` lines.

    An assistant's `None` is a call of a tool, which such lines do not tell. A line of a text that
    begins as a message does cannot be told from one.
    """
    if not isinstance(text, str):
        raise SourceInvalidError(
            f"{_DISPLAY}: found {shorten(text)}, expected lines of `role: text`"
        )
    starts = list(_SPOKEN.finditer(text))
    if not starts or starts[0].start():
        raise SourceInvalidError(
            f"{_DISPLAY}: found {shorten(text)}, expected it to begin with `user: ` or another role"
        )
    ends = [match.start() - 1 for match in starts[1:]] + [len(text)]
    messages: list[Message] = []
    for match, end in zip(starts, ends, strict=True):
        role, content = match.group(1), text[match.end() : end]
        unsaid = role == "assistant" and content == "None"
        messages.append({"role": role, "content": None if unsaid else content})
    return messages


def _unknown_record_error(record: Any) -> SourceInvalidError:
    found = sorted(record) if isinstance(record, dict) else type(record).__name__
    return SourceInvalidError(
        f"found {shorten(found)}, expected a transcript: an object with messages, traj, "
        "conversations, messages_display, or prompt and completion"
    )


def parse_task_end(record: Mapping[str, Any]) -> tuple[str | None, bool, bool]:
    """Return status, terminated and truncated of a tau-bench result.

    Its environment puts `reward_info` into `info` when the task is over. It stays null where the
    agent ran out of steps; a run that failed has `error`.
    """
    info = record.get("info")
    if isinstance(info, dict) and info.get("error") is not None:
        return "error", False, True
    if isinstance(info, dict) and "reward_info" in info and info["reward_info"] is None:
        return "truncated", False, True
    return "completed", True, False


def parse_end(
    record: Mapping[str, Any], *, has_outcome: bool = False
) -> tuple[str | None, bool, bool]:
    """Return status, terminated and truncated, as the record states them.

    If it states neither, and no status, a dialogue is terminated if it has its outcome: the reward
    of its last turn, which is known only of a dialogue that is over. Any other is open.
    """
    names = ("status", "finish_reason", "stop_reason")
    status = next((text for name in names if (text := parse_text(record, name))), None)
    terminated, truncated = record.get("terminated"), record.get("truncated")
    if isinstance(terminated, bool) or isinstance(truncated, bool):
        return status, terminated is True, truncated is True
    if status is None:
        return None, has_outcome, False
    word = status.lower()
    return status, word in _ENDED, word in _CUT_OFF


def parse_group(
    record: Mapping[str, Any], prompt: Sequence[Mapping[str, Any]]
) -> tuple[str | None, str]:
    """Return the id of a record's group and where it is from: given, derived of the prompt, none.

    `prompt` are the messages before the first turn.
    """
    if record.get("group_id_source") in (DERIVED, NONE):  # as we export it
        return first_id(record, ("group_id",)), record["group_id_source"]
    if (own_id := first_id(record, _GROUPS)) is not None:
        return own_id, GIVEN
    return derive_group(prompt)


def parse_rewards(record: Mapping[str, Any], num_turns: int) -> list[float | None]:
    """Return a reward for each generated turn.

    One of the whole dialogue is what its last turn got, after 0 for those before it: so the return
    is what the record says.
    """
    if (several := record.get("rewards")) is not None:
        if not isinstance(several, list) or len(several) != num_turns:
            raise SourceInvalidError(
                f"rewards: found {shorten(several)}, expected a list of {num_turns}, one for each "
                "generated turn"
            )
        return [_number(value, "rewards") for value in several]
    name = next((name for name in _REWARDS if record.get(name) is not None), None)
    if name is None or not num_turns:
        return [None] * num_turns
    return [*[0.0] * (num_turns - 1), _number(record[name], name)]


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, int | float):
            return float(value)
    except OverflowError:
        pass
    raise SourceInvalidError(f"{name}: found {shorten(value)}, expected a number or null")


def collect_metadata(record: Mapping[str, Any], used: Sequence[str]) -> dict[str, Any]:
    """Return all of a record that becomes no column of its own; `used` holds its messages."""
    return {
        name: value
        for name, value in record.items()
        if name not in used and not isinstance(value, _COLUMNS.get(name, ()))
    }


def first_id(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of these that the record has. Raises: SourceInvalidError if it is no id."""
    for name in names:
        if (value := record.get(name)) is not None:
            return _id(value, name)
    return None


def _id(value: Any, name: str) -> str:
    if isinstance(value, str | int) and not isinstance(value, bool) and is_encodable(str(value)):
        return str(value)
    raise SourceInvalidError(f"{name}: found {shorten(value)}, expected text or a whole number")


def parse_text(record: Mapping[str, Any], name: str) -> str | None:
    """Return a text, or None where there is none, or one that UTF-8 cannot hold."""
    value = record.get(name)
    return value if isinstance(value, str) and is_encodable(value) else None
