"""Object store: the rate of bare messages through Ray's, which bounds what workers send."""

from __future__ import annotations

import numpy as np

from replaylake.datastore.lake.runs.bounds import measure_rate
from replaylake.offline.running.local_ray import open_ray


def measure_object_store(num_bytes: int) -> float:
    """Return the bytes a second of `ray.put` and `ray.get` of an array of `num_bytes`.

    Starts a Ray of this process's own where it is not connected to one. Raises: ExtraMissingError;
    TrainingError if Ray does not start.
    """
    message = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    with open_ray("bounds: the rate of Ray's object store needs it", num_cpus=1) as ray:
        return measure_rate(lambda: ray.get(ray.put(message)), num_bytes)
