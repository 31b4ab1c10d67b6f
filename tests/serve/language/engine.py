"""An engine for tests: answers with the name of the version that it was started for.

The message `hold` makes the file `held`, and is answered once the file HOLD exists; `die` ends the
process.

    python engine.py POLICY DESCRIPTOR    # writes a line when it is ready, or fails, as the CLI's
"""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

POLICY, DESCRIPTOR = sys.argv[1], int(sys.argv[2])
if "unstartable" in os.environ.get("REFUSED", "") and POLICY in os.environ["REFUSED"]:
    print(json.dumps({"error": "no memory"}), flush=True)
    sys.exit(1)


async def models(request):
    return JSONResponse({"data": [{"id": POLICY, "owned_by": "replaylake"}]})


async def chat(request):
    body = await request.json()
    text = body["messages"][-1]["content"]
    if text == "die":
        os._exit(7)
    if text == "hold":
        Path(os.environ["HOLD"]).with_name("held").touch()
        while not Path(os.environ["HOLD"]).exists():
            await asyncio.sleep(0.01)
    answer = f"{POLICY} pid {os.getpid()}"
    prompt = [len(one["content"]) for one in body["messages"]]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer},
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": 0}]},
    }
    identity = {"id": f"c-{os.urandom(8).hex()}", "model": "whatever", "object": "chat.completion"}
    return JSONResponse({**identity, "choices": [choice], "prompt_token_ids": prompt})


routes = [
    Route("/v1/models", models),
    Route("/v1/chat/completions", chat, methods=["POST"]),
]
server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning"))
print("a line of a library", flush=True)
print(json.dumps({"url": "http://localhost"}), flush=True)
server.run(sockets=[socket.socket(fileno=DESCRIPTOR)])
