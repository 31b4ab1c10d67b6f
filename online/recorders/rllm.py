"""rLLM: a store for the traces of its model gateway, in a dataset.

Read from the protocol `TraceStore` in rllm_model_gateway/store/base.py, rllm-model-gateway 0.1.0,
and given to its `create_app(config, store=...)`. A session is a rollout, each trace a step.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.datastore.lake.lake import Lake
from replaylake.online.recorders.language_recorder import LanguageRecorder, OpenRollout


class LakeTraceStore:
    """Stores traces as steps: a kill of the gateway loses none that `store_trace` returned for.

    Reading commits first, so it sees every trace. A deleted session is no longer read through this
    store; the dataset keeps its steps.
    """

    def __init__(self, lake: Lake, recorder: LanguageRecorder) -> None:
        self._lake, self._recorder, self._deleted = lake, recorder, set[str]()
        self._sessions: dict[str, tuple[OpenRollout, list[Any]]] = {}
        self._beginning = asyncio.Lock()

    async def store_trace(self, trace_id: str, session_id: str, data: dict[str, Any]) -> None:
        async with self._beginning:  # on a thread, as it may have to read what was recorded before
            if session_id not in self._sessions:
                again = session_id in self._deleted and self._recorder.next_attempt(session_id)
                begin = partial(self._recorder.begin, session_id, resume=True, attempt=int(again))
                self._sessions[session_id] = await asyncio.to_thread(begin), []
        (rollout, known), messages = self._sessions[session_id], data.get("messages") or []
        is_longer = messages[: len(known)] == known and len(messages) > len(known)
        get = data.get
        said: dict[str, Any] = {"completion_id": trace_id, "finish_reason": get("finish_reason")}
        said["prompt"] = messages[len(known) + bool(known) :] if is_longer else messages
        said["completion"], said["metadata"] = get("response_message") or None, data
        ids: dict[str, Any] = {"completion_ids": get("completion_token_ids")}
        ids |= {"prompt_ids": get("prompt_token_ids"), "log_probs": get("logprobs")}
        try:
            rollout.step(**said, **(ids if ids["prompt_ids"] else {}))
        except EpisodeInvalidError:  # ids that do not fit together are in the metadata alone
            rollout.step(**said, is_trainable=False)
        self._sessions[session_id] = rollout, messages

    async def get_trace(self, trace_id: str) -> dict[str, Any] | None:
        return next(iter(await self._read("completion_id = $id", id=trace_id)), None)

    async def get_session_traces(
        self, session_id: str, since: float | None = None, limit: int | None = None
    ) -> list[dict[str, Any]]:
        rollout, _ = self._sessions.get(session_id, (None, []))
        name = rollout.episode_id if rollout else self._recorder.episode_id(session_id)
        where = "episode_id = $id and epoch(timestamp) >= $since"
        traces = await self._read(where, id=name, since=since or 0.0)
        return [] if rollout is None and session_id in self._deleted else traces[:limit]

    async def delete_session(self, session_id: str) -> int:
        traces = await self.get_session_traces(session_id)
        self._deleted.add(session_id)
        self._sessions.pop(session_id, None)
        return len(traces)

    async def list_sessions(
        self, since: float | None = None, limit: int | None = None
    ) -> list[dict[str, Any]]:
        times: dict[str, list[float]] = {}
        for trace in await self._read("metadata is not null"):
            times.setdefault(trace["session_id"], []).append(trace["timestamp"])
        names = ("session_id", "trace_count", "first_trace_at", "last_trace_at")
        seen = [(one, len(t), t[0], t[-1]) for one, t in times.items() if t[0] >= (since or 0)]
        seen = [one for one in seen if one[0] not in self._deleted - {*self._sessions}]
        return [dict(zip(names, s, strict=True)) for s in sorted(seen, key=lambda s: -s[2])][:limit]

    async def flush(self) -> None:
        await asyncio.to_thread(self._recorder.flush)

    async def close(self) -> None:
        await asyncio.to_thread(self._recorder.close)

    async def _read(self, where: str, **given: Any) -> list[dict[str, Any]]:
        await self.flush()
        given["producer"], name = f"{self._recorder.producer}/", self._recorder.dataset.name
        where += " and starts_with(episode_id, $producer) order by timestamp, step"
        text = f"select metadata from {name}.steps where {where}"
        rows = await asyncio.to_thread(self._lake.sql, text, given)
        return [json.loads(value) for value in rows.column("metadata").to_pylist()]
