"""Object store: the bare rate is measured in a Ray that ends with the measurement."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

_MEASURE: Final = """
from replaylake.online.pools.object_store import measure_object_store
rate = measure_object_store(1 << 20)
import ray
print(rate > 1e6, ray.is_initialized())
"""


@pytest.mark.slow
def test_the_rate_of_bare_messages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "True False\n"
