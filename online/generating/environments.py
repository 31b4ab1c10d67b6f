"""Environments of language agents: a function of a task and a chat, or what is adapted to one.

module:function     function(task, chat) -> reward, plain or a coroutine function
module:function     a function that makes a Gymnasium environment of texts
Name-v0             one of Gymnasium's registry, or `module:Name-v0`
verifiers:NAME      a taskset of verifiers
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    SourceInvalidError,
    SpaceUnsupportedError,
)
from replaylake.offline.environments.ids import make, spaces_of
from replaylake.offline.learning.user_code import load_object
from replaylake.online.generating.chat import BlockingChat, Chat, Play
from replaylake.online.generating.verifiers_environment import PREFIX, VerifiersEnvironment

Task = Mapping[str, Any]
EnvironmentFunction = Callable[..., Any]
"""`function(task, chat)` that returns the reward of an episode, or an object; may be async."""

_EXAMPLE: Final = "my_environments:play"
_ARGUMENTS: Final = 2


@dataclass(frozen=True)
class LanguageEnvironment:
    """An environment with its tasks.

    name: as it is recorded. digest: sha256 of the tasks; a resumed rollout needs the same. serve:
    holds what its rollouts share.
    """

    name: str
    tasks: Sequence[Task]
    digest: str
    play: Play
    serve: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


def load_environment(
    env: str | EnvironmentFunction,
    *,
    env_args: Mapping[str, Any],
    tasks: str | Sequence[Task] | None,
    num_tasks: int | None,
    seed: int,
    executor: Executor,
) -> LanguageEnvironment:
    """Load an environment and its tasks.

    Args:
        env: one of the forms above, or the function itself.
        env_args: arguments of the function, by name, or of what makes the environment.
        tasks: a file of JSON lines, `module:name` of a list or of a function that returns one, or
            the tasks. None: the attribute `tasks` of the function's module; for Gymnasium, a seed
            for each task.
        num_tasks: number of tasks, the first ones; required with Gymnasium.
        seed: of Gymnasium's tasks: task i resets with seed + i.
        executor: for functions that are no coroutine functions.

    Raises: NotFoundError, ConfigInvalidError, SourceInvalidError, SpaceUnsupportedError.
    """
    if isinstance(env, str) and env.startswith(PREFIX):
        _refuse_tasks(tasks, env, "a taskset of verifiers, which has its own")
        taskset = VerifiersEnvironment(env, env_args, num_tasks)
        return LanguageEnvironment(env, taskset.tasks, taskset.digest, taskset.play, taskset.serve)
    function, name = (None, env) if isinstance(env, str) else (env, _name_of(env))
    if isinstance(env, str) and ":" in env:
        function = _load_function(env)
    if function is None:
        _refuse_tasks(tasks, name, "a Gymnasium environment, whose tasks are seeds")
        return _load_gymnasium(name, env_args, num_tasks, seed, executor)
    found = _load_tasks(tasks, function, name)
    _check_arguments(function, name, env_args)
    return LanguageEnvironment(
        name,
        found if num_tasks is None else found[:num_tasks],
        _hash_tasks(found),
        _to_play(function, env_args, executor),
    )


def _refuse_tasks(tasks: object, name: str, kind: str) -> None:
    if tasks is not None:
        raise ConfigInvalidError(
            f"tasks: found {tasks!r:.100} beside {name}, {kind}, expected none.",
            parameter="tasks",
        )


def _load_function(env: str) -> EnvironmentFunction | None:
    """Return the function of a task and a chat; None for what makes a Gymnasium environment."""
    module, _, name = env.partition(":")
    if module == "pettingzoo" or not name.isidentifier():
        return None
    found = load_object(env, "environment", _EXAMPLE)
    if not callable(found):
        raise ConfigInvalidError(
            f"environment {env}: found {type(found).__name__}, expected a function of a task and a "
            "chat.",
            parameter="env",
        )
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one for one in parameters if one.kind in kinds and one.default is one.empty]
    return found if len(required) >= _ARGUMENTS and not inspect.isclass(found) else None


def _check_arguments(function: EnvironmentFunction, name: str, env_args: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind({}, None, **env_args)
    except TypeError as error:
        raise ConfigInvalidError(
            f"environment {name}: env_args: {error}, expected the arguments that it has after the "
            "task and the chat.",
            parameter="env_args",
        ) from error


def _to_play(
    function: EnvironmentFunction, env_args: Mapping[str, Any], executor: Executor
) -> Play:
    is_coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )

    async def play(task: Task, chat: Chat) -> Any:
        if is_coroutine:
            return await function(task, chat, **env_args)
        loop = asyncio.get_running_loop()
        blocking = BlockingChat(chat, loop)
        return await loop.run_in_executor(executor, lambda: function(task, blocking, **env_args))

    return play


def _load_tasks(
    tasks: str | Sequence[Task] | None, function: EnvironmentFunction, name: str
) -> list[Task]:
    if tasks is None:
        module = inspect.getmodule(function)
        found = getattr(module, "tasks", None)
        if found is None:
            raise ConfigInvalidError(
                f"tasks: found none for {name}, expected a file of JSON lines, module:name, or a "
                "list `tasks` in the module of the function.",
                parameter="tasks",
            )
        return _check_tasks(found() if callable(found) else found, f"{name}: tasks")
    if not isinstance(tasks, str):
        return _check_tasks(tasks, "tasks")
    path = Path(tasks)
    if path.is_file():
        return _check_tasks(_read_lines(path), str(path))
    if ":" not in tasks:
        raise NotFoundError(
            f"tasks: found no file {tasks}, expected one of JSON lines, or module:name.",
            parameter="tasks",
        )
    found = load_object(tasks, "tasks", "my_environments:tasks")
    return _check_tasks(found() if callable(found) else found, tasks)


def _read_lines(path: Path) -> Iterable[Any]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise SourceInvalidError(
                f"{path}: line {number}: {error}, expected a JSON object.", parameter="tasks"
            ) from error


def _check_tasks(tasks: Any, name: str) -> list[Task]:
    if not isinstance(tasks, Iterable) or isinstance(tasks, str | Mapping):
        raise SourceInvalidError(
            f"{name}: found {type(tasks).__name__}, expected a list of objects.", parameter="tasks"
        )
    found = list(tasks)
    ids = set()
    for number, task in enumerate(found):
        if not isinstance(task, Mapping):
            raise SourceInvalidError(
                f"{name}: task {number}: found {task!r:.100}, expected an object.",
                parameter="tasks",
            )
        if (task_id := find_task_id(task, number)) in ids:
            raise SourceInvalidError(
                f"{name}: task {number}: found the id {task_id!r} again, expected another one for "
                "each task.",
                parameter="tasks",
            )
        ids.add(task_id)
    if not found:
        raise SourceInvalidError(f"{name}: found no task, expected some.", parameter="tasks")
    return found


def find_task_id(task: Task, number: int) -> str:
    """Return a task's `id`, or its number."""
    value = task.get("id")
    return str(number if value is None else value)


def _hash_tasks(tasks: Sequence[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps(task, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _name_of(function: EnvironmentFunction) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


def _load_gymnasium(
    env_id: str, env_args: Mapping[str, Any], num_tasks: int | None, seed: int, executor: Executor
) -> LanguageEnvironment:
    """Adapt a Gymnasium environment whose observations and actions are texts."""
    spaces = spaces_of(env_id, env_args)
    if not all(isinstance(space, Text) for space in spaces):
        raise SpaceUnsupportedError(
            f"environment {env_id}: found observations of {spaces[0]} and actions of {spaces[1]}, "
            "expected Text for both, for a language model. Without a model, other policies act in "
            "it.",
            parameter="env",
        )
    if num_tasks is None:
        raise ConfigInvalidError(
            f"num_tasks: found none for {env_id}, a Gymnasium environment, expected the number of "
            "seeds to reset it with.",
            parameter="num_tasks",
        )

    def play(task: Task, chat: BlockingChat) -> Any:
        env = make(env_id, **env_args)
        try:
            observation, _ = env.reset(seed=task["seed"])
            messages = [{"role": "user", "content": observation}]
            terminated = truncated = False
            while not (terminated or truncated):
                reply = chat(messages)
                action = reply["content"] or ""
                observation, reward, terminated, truncated, _ = env.step(action)
                chat.reward(float(reward))
                messages += [reply, {"role": "user", "content": observation}]
        finally:
            env.close()  # type: ignore[no-untyped-call]
        return {"truncated": truncated and not terminated}

    tasks = [{"id": str(seed + number), "seed": seed + number} for number in range(num_tasks)]
    return LanguageEnvironment(env_id, tasks, "seeds", _to_play(play, {}, executor))
