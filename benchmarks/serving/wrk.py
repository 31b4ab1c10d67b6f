"""wrk: the load, made by a compiled client, and what it saw."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SCRIPT: Final = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.body = [==[{body}]==]
"""
_UNITS_MS: Final = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True)
class Load:
    """What wrk saw: answers per second, and how long they took. num_answers are all of them."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    num_answers: int


def run_wrk(url: str, body: str, *, connections: int, seconds: int) -> Load:
    """POST the body over so many connections. Raises: RuntimeError unless all answers are 200."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise RuntimeError("found no wrk, expected it on the PATH: apt-get install wrk")
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_SCRIPT.format(body=body))
        script.flush()
        command = [wrk, "-t1", f"-c{connections}", f"-d{seconds}s", "--latency"]
        said = subprocess.run(
            [*command, "-s", str(Path(script.name)), url],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        raise RuntimeError(f"{url}: found other answers than 200:\n{said}")
    return Load(
        float(_found(r"Requests/sec:\s+([\d.]+)", said)[0]),
        _milliseconds(_found(r"50%\s+([\d.]+)(us|ms|s)", said)),
        _milliseconds(_found(r"99%\s+([\d.]+)(us|ms|s)", said)),
        int(_found(r"(\d+) requests in", said)[0]),
    )


def _found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"wrk: found no {pattern!r} in what it said:\n{text}")
    return match.groups()


def _milliseconds(found: tuple[str, ...]) -> float:
    return float(found[0]) * _UNITS_MS[found[1]]
