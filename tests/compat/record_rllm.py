"""Run rLLM's model gateway with its traces in a lake, and compare them with its own store's.

    python tests/compat/record_rllm.py FOLDER

Runs in an environment with rllm-model-gateway and ReplayLake's extra `serve`. Agents call the
gateway, which passes the calls on to an engine on loopback; what its API returns of them, and what
its own store holds, has to be equal, also after a restart. Exits with 1 where it is not.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from rllm_model_gateway.models import GatewayConfig, WorkerConfig
from rllm_model_gateway.server import create_app
from rllm_model_gateway.store.memory_store import MemoryTraceStore
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

import replaylake as rl
from replaylake.online.recorders.rllm import LakeTraceStore


async def answer(request: Any) -> JSONResponse:
    """Answer in capital letters, with ids and log-probs as vLLM returns them."""
    asked = await request.json()
    text = asked["messages"][-1]["content"].upper()
    prompt = "".join(f"{one['content']}\n" for one in asked["messages"])
    message = {"role": "assistant", "content": text}
    choice = {
        "index": 0, "message": message, "finish_reason": "stop",
        "token_ids": [*text.encode()],
        "logprobs": {"content": [{"token": letter, "logprob": -0.5} for letter in text]},
    }  # fmt: skip
    return JSONResponse(
        {
            "id": "chat", "object": "chat.completion", "model": "capitals", "choices": [choice],
            "prompt_token_ids": [*prompt.encode()],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(text)},
        }
    )  # fmt: skip


def start_engine() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    routes = [
        Route("/v1/chat/completions", answer, methods=["POST"]),
        Route("/health", lambda _: JSONResponse({})),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=port, log_level="warning")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{port}"


class BothStores(LakeTraceStore):
    """The store that is tested; beside it, rLLM's own gets the same traces."""

    own = MemoryTraceStore()

    async def store_trace(self, trace_id: str, session_id: str, data: dict[str, Any]) -> None:
        await super().store_trace(trace_id, session_id, data)
        await self.own.store_trace(trace_id, session_id, data)


def run_agents(folder: Path, engine: str, names: list[str]) -> int:
    """Let an agent of each name ask twice; compare all sessions so far, and return their traces."""
    lake = rl.open(folder / "lake", create=True)
    recorder = rl.record_language(lake, "traces", producer="gateway", source_framework="rllm")
    worker = WorkerConfig(url=engine, worker_id="one")
    config = GatewayConfig(workers=[worker], sync_traces=True, health_check_interval=60)
    store, num = BothStores(lake, recorder), 0
    with TestClient(create_app(config, store=store)) as client:
        for name in names:
            messages = []
            for question in ("hello", "what is new?"):
                messages.append({"role": "user", "content": question})
                body = {"model": "capitals", "messages": messages}
                got = client.post(f"/sessions/{name}/v1/chat/completions", json=body)
                messages.append(got.raise_for_status().json()["choices"][0]["message"])
        known = asyncio.run(store.own.list_sessions())
        listed = client.get("/sessions").json()
        if {one["session_id"] for one in listed} != {one["session_id"] for one in known}:
            sys.exit(f"found the sessions {listed}, expected {known}")
        for session in known:
            name = session["session_id"]
            expected = asyncio.run(store.own.get_session_traces(name))
            found = client.get(f"/sessions/{name}/traces").json()
            if (
                found != expected
                or client.get(f"/traces/{found[0]['trace_id']}").json() != found[0]
            ):
                sys.exit(f"session {name}: found {found}, expected {expected}")
            num += len(found)
        if client.get("/traces/unknown").status_code != 404:
            sys.exit("found a trace of an unknown id, expected none")
    return num


def main(folder: Path) -> None:
    engine = start_engine()
    run_agents(folder, engine, ["a:0", "a:1"])
    num = run_agents(folder, engine, ["b:2"])  # a restart: the first sessions are still there
    rows = rl.open(folder / "lake").sql(
        "select episode_id, step, action, len(observation_tokens) as new, is_continuation, "
        "len(action_log_probs) as num from traces.steps where episode_id = 'gateway/a:0' order by 2"
    ).to_pylist()  # fmt: skip
    said = [(row["step"], row["action"], row["num"]) for row in rows]
    if said != [(0, "HELLO", 5), (1, "WHAT IS NEW?", 12)]:
        sys.exit(f"found the steps {rows}, expected two")
    store = LakeTraceStore(
        rl.open(folder / "lake"), rl.record_language(folder / "lake", "traces", producer="gateway")
    )
    deleted = asyncio.run(store.delete_session("a:0"))
    left = asyncio.run(store.get_session_traces("a:0"))
    sessions = [one["session_id"] for one in asyncio.run(store.list_sessions())]
    asyncio.run(store.close())
    if (deleted, left, "a:0" in sessions) != (2, [], False):
        sys.exit(f"found {deleted} deleted, {left} left of {sessions}, expected 2, none, others")
    print(f"{num} traces of rLLM's gateway in the lake equal those of its own store")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
