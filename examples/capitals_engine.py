"""An engine with OpenAI's chat completions that needs no model: it answers in capital letters.

python examples/capitals_engine.py 8000
"""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def answer_chat(request: Request) -> JSONResponse:
    """Answer the last message."""
    asked = await request.json()
    message = {"role": "assistant", "content": asked["messages"][-1]["content"].upper()}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"id": "chat-1", "object": "chat.completion", "created": 1, "model": asked["model"]}
    return JSONResponse({**answer, "choices": [choice]})


routes = [Route("/v1/chat/completions", answer_chat, methods=["POST"])]
uvicorn.run(Starlette(routes=routes), port=int(sys.argv[1]), log_level="warning")
