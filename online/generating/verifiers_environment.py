"""Environments of verifiers 0.4: `verifiers:NAME`, the id of an installed taskset.

verifiers runs an agent's program and its tools, and scores what it did; its programs call a model
over HTTP. So an endpoint on loopback passes their calls on to the chat of the rollout, whose number
stands for the name of the model. Read from `verifiers/v1/env.py` and `clients/eval.py`, 0.4.0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final

from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    ExtraMissingError,
    GenerationError,
    NotFoundError,
    ReplayLakeError,
)
from replaylake.online.generating.chat import Chat

PREFIX: Final = "verifiers:"
_SESSION: Final = b"x-session-id"
_NOT_SAMPLING: Final = frozenset(("messages", "model", "n", "stream", "stream_options", "tools"))
_MAX_BODY_BYTES: Final = 64 << 20


class TraceError(Exception):
    """An error that verifiers recorded in an episode: as any of an environment's, it fails it."""


class ChatEndpoint:
    """An endpoint of OpenAI's chat completions on loopback: calls of rollouts, by model name."""

    def __init__(self) -> None:
        self._chats: dict[str, Chat] = {}
        self._agents: dict[str, dict[str, str]] = {}
        self._numbers = count()
        self._server: asyncio.Server | None = None

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._handle, "127.0.0.1")
        try:
            yield
        finally:
            self._server.close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def add(self, chat: Chat) -> str:
        """Return the name of the model whose calls are those of a chat."""
        name = f"rollout-{next(self._numbers)}"
        self._chats[name], self._agents[name] = chat, {}
        return name

    def remove(self, name: str) -> dict[str, str]:
        """Forget a chat; return its agents by session. Each session is an agent."""
        del self._chats[name]
        return self._agents.pop(name)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            status, content_type, data = await self._respond(reader)
            head = (
                f"HTTP/1.1 {status} -\r\ncontent-type: {content_type}\r\n"
                f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # the program has gone
        finally:
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in lines[1:] if b": " in line)
        try:
            length = int(headers.get(b"content-length", b"0"))
            if length > _MAX_BODY_BYTES:
                raise ValueError(f"a body of {length} bytes")
            body = json.loads(await reader.readexactly(length))
            name = body["model"]
            chat, agents = self._chats[name], self._agents[name]
            session = headers.get(_SESSION, b"").decode()
            agent = agents.setdefault(session, f"~{len(agents)}" if agents else "")
            sampling = {key: value for key, value in body.items() if key not in _NOT_SAMPLING}
            reply = await chat(body["messages"], tools=body.get("tools"), agent=agent, **sampling)
        except (EpisodeInvalidError, GenerationError) as error:
            return _refuse(400, error)
        except ReplayLakeError as error:
            return _refuse(500, error)
        except (KeyError, TypeError, ValueError) as error:
            return _refuse(400, error)
        return _format_reply(name, reply, is_stream=body.get("stream") is True)


def _refuse(status: int, error: Exception) -> tuple[int, str, bytes]:
    body = {"error": {"type": type(error).__name__, "message": str(error)}}
    return status, "application/json", json.dumps(body).encode()


def _format_reply(
    name: str, reply: Mapping[str, Any], *, is_stream: bool
) -> tuple[int, str, bytes]:
    reason = "tool_calls" if reply.get("tool_calls") else "stop"
    head = {"id": "chatcmpl", "created": 0, "model": name}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    if not is_stream:
        choice = {"index": 0, "message": reply, "finish_reason": reason}
        body = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        return 200, "application/json", json.dumps(body).encode()
    calls = [{"index": i, **call} for i, call in enumerate(reply.get("tool_calls") or ())]
    delta = {**reply, **({"tool_calls": calls} if calls else {})}
    chunk = {**head, "object": "chat.completion.chunk"}
    events = [
        {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {**chunk, "choices": [], "usage": usage},
    ]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return 200, "text/event-stream", text.encode()


class VerifiersEnvironment:
    """A taskset of verifiers with what plays it.

    tasks: an object for each of its tasks, with `id` and `number`. digest: sha256 of their data.
    """

    def __init__(self, env: str, env_args: Mapping[str, Any], num_tasks: int | None) -> None:
        """Load the taskset.

        Programs run in subprocesses of this machine, and by default cannot execute code
        (the harness `null`, unless the taskset has its own).

        Args:
            env: `verifiers:NAME`.
            env_args: members of verifiers' configuration of an environment, such as
                `{"agent": {"harness": {"id": "bash"}}}`.
            num_tasks: number of tasks; required for endless tasksets.

        Raises: ExtraMissingError without verifiers; NotFoundError, ConfigInvalidError.
        """
        try:
            import verifiers.v1 as vf
            from verifiers.v1.utils import loaders
        except ImportError as error:
            raise ExtraMissingError(
                f"environment {env}: found no {error.name}, expected verifiers 0.4. Install it: "
                "pip install verifiers==0.4.0 uv"
            ) from error
        self._vf, name = vf, env.removeprefix(PREFIX)
        try:
            harness = loaders.default_harness_id(name)
            config = {
                **env_args,
                "taskset": {"id": name, **_to_table(env_args, "taskset")},
                "agent": {
                    "harness": {"id": "null" if harness == "bash" else harness},
                    "runtime": {"type": "subprocess"},
                    **_to_table(env_args, "agent"),
                },
            }
            self._env = loaders.load_environment(loaders.resolve_env_config(config))
            taskset = self._env.taskset
            if num_tasks is not None:
                taskset = taskset.take(num_tasks)
            if not taskset.bounded:
                raise ConfigInvalidError(
                    f"num_tasks: found none for {env}, which has no end, expected a number.",
                    parameter="num_tasks",
                )
            self._tasks = list(taskset)
        except ModuleNotFoundError as error:
            raise NotFoundError(f"environment {env}: {error}", parameter="env") from error
        except ReplayLakeError:
            raise
        except (Exception, SystemExit) as error:  # whatever the taskset raises
            raise ConfigInvalidError(
                f"environment {env}: {type(error).__name__}: {error}. Check its arguments "
                "(`env_args`).",
                parameter="env",
            ) from error
        data = [one.data.model_dump_json() for one in self._tasks]
        self.digest = hashlib.sha256("\n".join(data).encode()).hexdigest()
        self.tasks = [
            {"id": one.data.id or str(number), "number": number}
            for number, one in enumerate(self._tasks)
        ]
        self._endpoint = ChatEndpoint()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Hold the servers that rollouts share: the endpoint, and those of verifiers."""
        async with self._endpoint.serve(), self._env.serving():
            yield

    async def play(self, task: Mapping[str, Any], chat: Chat) -> Any:
        """Play one episode; each of its traces is an agent, with the reward of the trace.

        Raises: TraceError for the last error of the episode or of its traces.
        """
        vf, name = self._vf, self._endpoint.add(chat)
        client = vf.EvalClientConfig(base_url=self._endpoint.url, api_key_var="REPLAYLAKE_NO_KEY")
        (slot,) = self._env.slots(self._tasks[task["number"]])
        try:
            context = vf.ModelContext(model=name, client=client)
            episode = await self._env.run_slot(slot, context)
        finally:
            agents = self._endpoint.remove(name)
        errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
        if errors:
            raise TraceError(f"{errors[-1].type}: {errors[-1].message}")
        components: dict[str, Any] = {}
        for trace in episode.traces:
            if (agent := agents.get(trace.id)) is None:
                continue  # a program that did not call the model
            chat.reward(trace.reward, agent=agent)
            known = {key: one for key, one in trace.rewards.items() if one is not None}
            components |= {
                f"{agent}{key}": (float(one.score), float(one.weight)) for key, one in known.items()
            }
        return {"components": components or None}


def _to_table(env_args: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = env_args.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigInvalidError(
            f"env_args: {name}: found {value!r}, expected an object.", parameter="env_args"
        )
    return dict(value)
