"""The peers' servers, as their first pages show them: `python -m benchmarks.serving.peers NAME`.

starlette      answers a constant, without a look at the request: the floor
starlette_act  reads the JSON, acts with onnxruntime, answers JSON; checks and logs nothing
fastapi        the same through pydantic models
bentoml_api    the same as a method with BentoML's `@api`

One process each, uvicorn with uvloop and httptools but for BentoML, which runs itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Final

import numpy as np

ENVIRONMENT: Final = "BENCH_SERVING_GRAPH"


def session() -> Any:
    """Return the policy, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(os.environ[ENVIRONMENT], options)


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    async def act(request: Any) -> Response:
        return Response(b'{"action":1}', media_type="application/json")

    return Starlette(routes=[Route("/act", act, methods=["POST"])])


def starlette_act() -> Any:
    import orjson
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    policy = session()

    async def act(request: Any) -> Response:
        body = orjson.loads(await request.body())
        observations = np.asarray([body["observation"]], np.float32)
        (logits,) = policy.run(None, {"observations": observations})
        answer = orjson.dumps({"action": int(logits[0].argmax())})
        return Response(answer, media_type="application/json")

    return Starlette(routes=[Route("/act", act, methods=["POST"])])


def fastapi() -> Any:
    from fastapi import FastAPI
    from pydantic import create_model

    policy = session()
    asked_model = create_model("Asked", observation=(list[float], ...))
    chosen_model = create_model("Chosen", action=(int, ...))
    app = FastAPI()

    async def act(asked: Any) -> Any:
        observations = np.asarray([asked.observation], np.float32)
        (logits,) = policy.run(None, {"observations": observations})
        return chosen_model(action=int(logits[0].argmax()))

    act.__annotations__ = {"asked": asked_model, "return": chosen_model}
    app.post("/act")(act)
    return app


APPS: Final = {"starlette": starlette, "starlette_act": starlette_act, "fastapi": fastapi}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=sorted(APPS))
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    import uvicorn

    uvicorn.run(
        APPS[options.system](),
        host="127.0.0.1",
        port=options.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    sys.exit(main())
