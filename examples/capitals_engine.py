"""An engine with OpenAI's chat completions that needs no model: it answers in capital letters.

python examples/capitals_engine.py 8000            always the same answer to a question
python examples/capitals_engine.py 8000 --vary     every second answer ends with an exclamation mark
"""

import sys
from itertools import cycle

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

ends = cycle(("", "!") if "--vary" in sys.argv else ("",))


async def answer_chat(request: Request) -> JSONResponse:
    """Answer the last message."""
    asked = await request.json()
    text = asked["messages"][-1]["content"].upper() + next(ends)
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"id": "chat-1", "object": "chat.completion", "created": 1, "model": asked["model"]}
    return JSONResponse({**answer, "choices": [choice]})


routes = [Route("/v1/chat/completions", answer_chat, methods=["POST"])]
uvicorn.run(Starlette(routes=routes), port=int(sys.argv[1]), log_level="warning")
