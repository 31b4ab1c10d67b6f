"""BentoML's own way: a method with `@api`, as its first page shows it."""

from __future__ import annotations

import gc
import os
from typing import Final

import bentoml
import numpy as np

from benchmarks.serving.peers import session

# Set: what is loaded is left out of garbage collections.
FREEZE: Final = "BENCH_FREEZE"


@bentoml.service(workers=1, metrics={"enabled": False}, logging={"access": {"enabled": False}})
class Policy:
    """A policy behind BentoML's validation and routing."""

    def __init__(self) -> None:
        self._policy = session()
        if os.environ.get(FREEZE):
            gc.collect()
            gc.freeze()

    @bentoml.api(route="/act")
    def act(self, observation: list[float]) -> dict[str, int]:
        observations = np.asarray([observation], np.float32)
        (logits,) = self._policy.run(None, {"observations": observations})
        return {"action": int(logits[0].argmax())}
