"""An engine for tests: answers in the shapes of vLLM, SGLang, llama.cpp and OpenAI, on loopback.

Its tokenizer has an id for each character, and one before and after each message. Its answer is the
last message in capital letters; some words of that message make it do otherwise:
    tool      a call of the tool `look`
    slow      an event each 20 ms
    hold      each event waits for one that POST /release allows; a body waits for one
    die       the connection is closed in the middle of the answer
    fault     the answer states an error after three letters, as vLLM and Anthropic do in a stream
    quit      a stream ends in good order after three letters
    abort     the answer ends with the reason `abort`
    refuse    status 429
It keeps the requests that it got; GET /requests returns and forgets them. POST /release allows
`num` events to the answers to the message `text`.

    python engine.py KIND PORT
    python engine.py KIND --fd N    # a bound socket
"""

import asyncio
import collections
import json
import socket
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END = 5
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
REQUESTS: list = []
RELEASED: dict = collections.defaultdict(lambda: asyncio.Semaphore(0))  # by the last message
OWNERS = {
    "vllm": "vllm",
    "vllm --max-logprobs 0": "vllm",
    "sglang": "sglang",
    "llama.cpp": "llamacpp",
    "openai": "system",
}


def text_of(message):
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = message.get("tool_calls") or ()
    text = content + "".join(call["function"]["arguments"] for call in calls)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode(text):
    return [ord(letter) + 10 for letter in text]


def prompt_ids(messages):
    """The ids of a prompt; an answer goes on where it ends."""
    ids = []
    for message in messages:
        ids += [ROLES[message["role"]], *encode(text_of(message)), END]
    return [*ids, ROLES["assistant"]]


def reply(messages):
    """Return the text, the calls and the ids of an answer."""
    last = text_of(messages[-1])
    if "tool" in last and messages[-1]["role"] == "user":
        arguments = json.dumps({"word": last})
        call = {
            "id": f"call_{len(messages)}",
            "type": "function",
            "function": {"name": "look", "arguments": arguments},
        }
        return None, [call], [*encode(arguments), END]
    text = last.upper() or "NOTHING"
    return text, [], [*encode(text), END]


def log_prob(place):
    return -0.125 * (place % 8 + 1)


def log_probs(ids, engine, begin=0):
    entries = []
    for place, one in enumerate(ids, begin):
        entry = {"token": chr(max(one - 10, 0)), "logprob": log_prob(place), "bytes": None}
        if engine == "llama.cpp":
            entry = {"id": one, **entry}
        entries.append({**entry, "top_logprobs": []})
    return {"content": entries}


async def chat(request):
    engine = request.app.state.engine
    body = await request.json()
    REQUESTS.append({"body": body, "headers": dict(request.headers)})
    if engine == "llama.cpp" and body.get("stream") and body.get("tools") and body.get("logprobs"):
        return JSONResponse({"error": {"message": "logprobs is not supported with tools"}}, 500)
    if engine == "vllm --max-logprobs 0" and body.get("logprobs"):
        return JSONResponse({"error": {"message": "more logprobs than max_logprobs"}}, 400)
    engine = engine.split()[0]
    known = {"messages", "model", "stream", "temperature", "tools", "n", "max_tokens", "user"}
    known |= {"stream_options", "metadata", "tool_choice", "logprobs", "top_logprobs"}
    if engine == "openai" and (unknown := sorted(set(body) - known)):
        error = {"message": f"Unrecognized request argument: {unknown[0]}", "type": "invalid"}
        return JSONResponse({"error": error}, 400)
    messages = body["messages"]
    last = text_of(messages[-1])
    if "refuse" in last:
        return JSONResponse({"error": {"message": "rate limit", "type": "rate"}}, 429)
    head = {"id": f"chatcmpl-{len(REQUESTS)}-{id(body)}", "created": 1, "model": body["model"]}
    if body.get("stream"):
        events = chat_events(engine, body, head)
        return StreamingResponse(events, media_type="text/event-stream")
    if "hold" in last:
        await RELEASED[last].acquire()
    text, calls, ids = reply(messages)
    choices = []
    for index in range(body.get("n") or 1):
        message = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        reason = "abort" if "abort" in last else "stop"
        choice = {"index": index, "message": message, "finish_reason": reason}
        choice["logprobs"] = log_probs(ids, engine) if body.get("logprobs") else None
        if engine == "llama.cpp" and not body.get("logprobs"):
            del choice["logprobs"]
        if engine == "vllm":
            choice["token_ids"] = ids if body.get("return_token_ids") else None
        if engine == "sglang" and body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = prompt_ids(messages)
        if engine == "sglang" and body.get("return_token_ids"):
            choice["response_token_ids"] = ids
        choices.append(choice)
    answer = {**head, "object": "chat.completion", "choices": choices}
    num = len(prompt_ids(messages)), len(ids)
    answer["usage"] = dict(zip(USAGE, (*num, sum(num)), strict=True))
    if engine == "vllm":
        asked = body.get("return_token_ids")
        answer["prompt_token_ids"] = prompt_ids(messages) if asked else None
    if engine == "sglang":
        answer["metadata"] = {"weight_version": "7"}
    if "die" in last:
        return broken(json.dumps(answer))
    return JSONResponse(answer)


def broken(text):
    """A response that ends before the length that it states."""

    async def parts():
        yield text[: len(text) // 2].encode()
        raise ConnectionAbortedError

    return StreamingResponse(parts(), media_type="application/json")


async def chat_events(engine, body, head):
    messages = body["messages"]
    text, calls, ids = reply(messages)
    last = text_of(messages[-1])
    asks_ids = body.get("return_token_ids") and engine == "vllm"
    head = {**head, "object": "chat.completion.chunk"}

    def event(delta, place=None, reason=None, **more):
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        if place is not None:
            if body.get("logprobs"):
                choice["logprobs"] = log_probs([ids[place]], engine, place)
            if asks_ids:
                choice["token_ids"] = [ids[place]]
        if engine == "llama.cpp" and choice["logprobs"] is None:
            del choice["logprobs"]
        return f"data: {json.dumps({**head, 'choices': [choice], **more})}\n\n"

    first = {"prompt_token_ids": prompt_ids(messages)} if asks_ids else {}
    yield event({"role": "assistant", "content": ""}, **first)
    if calls:
        function = {"name": "look", "arguments": ""}
        call = {"index": 0, "id": calls[0]["id"], "type": "function", "function": function}
        yield event({"tool_calls": [call]})
    for place in range(len(ids) - 1):
        if "slow" in last:
            await asyncio.sleep(0.02)
        if "hold" in last:
            await RELEASED[last].acquire()
        if "die" in last and place == 3:
            raise ConnectionAbortedError
        if "quit" in last and place == 3:
            return
        if "fault" in last and place == 3:
            error = {"message": "EngineCore died", "type": "InternalServerError", "code": 500}
            yield f"data: {json.dumps({'error': error})}\n\n"
            yield "data: [DONE]\n\n"
            return
        if calls:
            part = {"index": 0, "function": {"arguments": chr(ids[place] - 10)}}
            yield event({"tool_calls": [part]}, place)
        elif engine == "vllm" and "gather" in last:
            # A character of several tokens: its text comes with the last of them.
            if asks_ids:
                yield event({}, place)
            if place % 2:
                yield event({"content": text[place - 1 : place + 1]})
        else:
            yield event({"content": text[place]}, place)
    reason = "abort" if "abort" in last else "stop"
    yield event({}, len(ids) - 1, "tool_calls" if calls else reason)
    sglext = {}
    if engine == "sglang" and body.get("return_input_ids_in_sglext"):
        sglext["input_ids"] = prompt_ids(messages)
    if engine == "sglang" and body.get("return_output_ids_in_sglext"):
        sglext["output_ids"] = [ids]
    if sglext:
        yield f"data: {json.dumps({**head, 'choices': [], 'sglext': sglext})}\n\n"
    if (body.get("stream_options") or {}).get("include_usage"):
        num = len(prompt_ids(messages)), len(ids)
        usage = dict(zip(USAGE, (*num, sum(num)), strict=True))
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


async def completions(request):
    """vLLM's and SGLang's: ids of prompt and answer in each choice."""
    engine = request.app.state.engine
    body = await request.json()
    REQUESTS.append({"body": body, "headers": dict(request.headers)})
    prompt = "embedded" if "prompt_embeds" in body else body["prompt"]
    prompts = prompt if isinstance(prompt, list) else [prompt]
    head = {"id": f"cmpl-{len(REQUESTS)}-{id(body)}", "created": 1, "model": body["model"]}
    head["object"] = "text_completion"
    choices = []
    for prompt in prompts:
        for _ in range(body.get("n") or 1):
            text = prompt.upper()
            choice = {"index": len(choices), "text": text, "finish_reason": "length"}
            values = {"token_logprobs": [log_prob(place) for place in range(len(text))]}
            values["top_logprobs"] = [{}] * len(text) if body.get("logprobs") else None
            choice["logprobs"] = None if body.get("logprobs") is None else values
            if body.get("echo"):
                choice["text"] = text if body.get("return_token_ids") else prompt + text
            if body.get("return_token_ids"):
                choice |= {"token_ids": encode(text), "prompt_token_ids": encode(prompt)}
            elif engine == "vllm":
                choice |= {"token_ids": None, "prompt_token_ids": None}
            choices.append(choice)
    if not body.get("stream"):
        return JSONResponse({**head, "choices": choices})

    async def events():
        for choice in choices:
            for name in ("token_ids", "prompt_token_ids"):
                if choice.get(name) is None:
                    choice.pop(name, None)
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def blocks_of(messages):
    """Return the blocks of an answer in Anthropic's form."""
    last = messages[-1]["content"]
    if isinstance(last, list):
        last = "".join(part.get("text") or part.get("content") or "" for part in last)
    thinking = {"type": "thinking", "thinking": "hm", "signature": "sig"}
    if "tool" in last:
        call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"word": last}}
        return last, [thinking, call]
    return last, [{"type": "text", "text": last.upper()}]


async def messages(request):
    body = await request.json()
    REQUESTS.append({"body": body, "headers": dict(request.headers)})
    last, blocks = blocks_of(body["messages"])
    reason = "tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn"
    message = {"id": f"msg-{len(REQUESTS)}-{id(body)}", "type": "message", "role": "assistant"}
    message |= {"model": body["model"], "stop_sequence": None}
    usage = {"input_tokens": 3, "output_tokens": 5}
    if not body.get("stream"):
        answer = {**message, "content": blocks, "stop_reason": reason, "usage": usage}
        return JSONResponse(answer)

    def event(kind, **fields):
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    async def events():
        begun = {**message, "content": [], "stop_reason": None, "usage": usage}
        yield event("message_start", message=begun)
        yield event("ping")
        for index, block in enumerate(blocks):
            empty = {"text": "", "thinking": "", "signature": "", "input": {}}
            first = {**block, **{name: empty[name] for name in block if name in empty}}
            yield event("content_block_start", index=index, content_block=first)
            if block["type"] == "text":
                for place, letter in enumerate(block["text"]):
                    if "die" in last and place == 3:
                        raise ConnectionAbortedError
                    if "quit" in last and place == 3:
                        return
                    if "fault" in last and place == 3:
                        error = {"type": "overloaded_error", "message": "Overloaded"}
                        yield event("error", error=error)
                        return
                    delta = {"type": "text_delta", "text": letter}
                    yield event("content_block_delta", index=index, delta=delta)
            elif block["type"] == "thinking":
                delta = {"type": "thinking_delta", "thinking": block["thinking"]}
                yield event("content_block_delta", index=index, delta=delta)
                delta = {"type": "signature_delta", "signature": block["signature"]}
                yield event("content_block_delta", index=index, delta=delta)
            else:
                text = json.dumps(block["input"])
                for part in (text[:4], text[4:]):
                    delta = {"type": "input_json_delta", "partial_json": part}
                    yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        delta = {"stop_reason": reason, "stop_sequence": None}
        yield event("message_delta", delta=delta, usage={"output_tokens": 5})
        yield event("message_stop")

    return StreamingResponse(events(), media_type="text/event-stream")


async def responses(request):
    body = await request.json()
    REQUESTS.append({"body": body, "headers": dict(request.headers)})
    asked = body["input"]
    last = asked if isinstance(asked, str) else asked[-1].get("content") or asked[-1].get("output")
    response_id = f"resp-{len(REQUESTS)}-{id(body)}"
    if "tool" in last:
        arguments = json.dumps({"word": last})
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look"}
        item |= {"arguments": arguments, "status": "completed"}
    else:
        part = {"type": "output_text", "text": last.upper(), "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        item["content"] = [part]
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    answer = {"id": response_id, "object": "response", "created_at": 1, "model": body["model"]}
    answer |= {"status": "completed", "output": [reasoning, item], "parallel_tool_calls": True}
    answer |= {"tool_choice": "auto", "tools": [], "usage": None}
    if "fault" in last:
        answer |= {"status": "failed", "error": {"code": "server_error", "message": "died"}}
    elif "limit" in last:
        answer |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    if not body.get("stream"):
        return JSONResponse(answer)

    def event(kind, number, **fields):
        about = {"type": kind, "sequence_number": number, **fields}
        return f"event: {kind}\ndata: {json.dumps(about)}\n\n"

    async def events():
        begun = {**answer, "status": "in_progress", "output": []}
        yield event("response.created", 0, response=begun)
        for place, letter in enumerate(last.upper()):
            where = {"item_id": "msg_1", "output_index": 1, "content_index": 0, "logprobs": []}
            if "quit" in last and place == 3:
                return
            yield event("response.output_text.delta", place + 1, delta=letter, **where)
        yield event(f"response.{answer['status']}", 1000, response=answer)

    return StreamingResponse(events(), media_type="text/event-stream")


async def models(request):
    owner = OWNERS[request.app.state.engine]
    return JSONResponse({"object": "list", "data": [{"id": "tiny", "owned_by": owner}]})


async def requests(request):
    found, REQUESTS[:] = list(REQUESTS), []
    return Response(json.dumps(found), media_type="application/json")


async def release(request):
    body = await request.json()
    for _ in range(body["num"]):
        RELEASED[body["text"]].release()
    return Response()


async def echo(request):
    body = await request.body()
    path = request.scope["raw_path"].decode()
    return Response(body, headers={"x-path": path, "x-query": request.url.query})


def make_app(engine):
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/models", models),
        Route("/requests", requests),
        Route("/release", release, methods=["POST"]),
        Route("/echo/{rest:path}", echo, methods=["GET", "POST"]),
    ]
    app = Starlette(routes=routes)
    app.state.engine = engine
    return app


if __name__ == "__main__":
    kind, *address = sys.argv[1:]
    if address[0] == "--fd":
        config = uvicorn.Config(make_app(kind), log_level="critical")
        uvicorn.Server(config).run([socket.socket(fileno=int(address[1]))])
    else:
        uvicorn.run(make_app(kind), port=int(address[0]), log_level="critical")
