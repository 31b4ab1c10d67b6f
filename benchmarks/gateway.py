"""What the recording gateway adds to a call: 16 at a time, to an engine that answers from memory.

Time to the first byte and to the last of an answer, of the engine alone, through a relay and
through the gateway, taken in turns, for whole answers and for streams of 32 events. The relay is
the bound of a proxy in Python: it passes bytes on and reads none of them. A figure is the median of
the rounds. Each answer has token ids and log-probs as vLLM sends them, asked for or not. The rows
of the dataset are counted afterwards: as many as there were calls, or there is no figure.

    python -m benchmarks.gateway [--calls 3000] [--rounds 5] [--folder FOLDER] [--real-time]

The bars of issue 22: at most 2 ms more at p50 and 5 ms more at p99, to the first byte and the last.
The engine, the gateway and the client are processes of their own: with fewer than three idle cores
they take turns, which the figures then contain. The processor time of a call does not: that of the
thread that passes calls on, and that of all others, which commit them. With --real-time (as root)
no other process of the machine gets a core that they want while they are measured, as if it were
idle otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

NUM_CONCURRENT: Final = 16
NUM_TOKENS: Final = 32
WORDS: Final = [f" word{number}" for number in range(NUM_TOKENS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the lake is made; a real disk")
    parser.add_argument("--real-time", action="store_true", help="as on an idle machine; as root")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--relay", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        uvloop.run(_serve(options.serve))
        return
    if options.relay is not None:
        uvloop.run(_relay(*options.relay))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        _measure(Path(folder) / "lake", options.calls, options.rounds, options.real_time)


def _measure(lake: Path, num_calls: int, num_rounds: int, is_real_time: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as free,
        socket.create_server(("127.0.0.1", 0)) as also_free,
    ):
        port, relay_port = str(free.getsockname()[1]), str(also_free.getsockname()[1])
    this = [sys.executable, "-m", "benchmarks.gateway"]
    engine = subprocess.Popen([*this, "--serve", port])
    relay = subprocess.Popen([*this, "--relay", relay_port, port])
    engine_url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("replaylake")), "gateway", "--lake", str(lake)]
    command += ["--upstream", engine_url, "--dataset", "bench", "--engine", "vllm", "--port", "0"]
    gateway = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert gateway.stderr is not None
        ready = next(line for line in gateway.stderr if "ready after" in line)
        gateway_url = re.findall(r" on (http://\S+),", ready)[0]
        urls = {
            "engine": engine_url,
            "relay": f"http://127.0.0.1:{relay_port}",
            "gateway": gateway_url,
        }
        processes = {"engine": engine, "relay": relay, "gateway": gateway}
        for url in urls.values():  # connections, and what runs for the first time
            uvloop.run(_load(url, 200, is_stream=True))
        num_sent = 200
        for is_stream in (False, True):
            rounds: list[_Round] = []
            for _ in range(num_rounds):
                done: _Round = {}
                for name, url in urls.items():
                    taking_part = {engine.pid, processes[name].pid, os.getpid()}
                    before = _read_processor_times(processes[name].pid)
                    with _real_time(taking_part if is_real_time else ()):
                        times = uvloop.run(_load(url, num_calls, is_stream=is_stream))
                    after = _read_processor_times(processes[name].pid)
                    spent = [
                        (end - begin) / num_calls for begin, end in zip(before, after, strict=True)
                    ]
                    done[name] = (times, spent)
                rounds.append(done)
                num_sent += num_calls
            _report("stream" if is_stream else "whole", rounds)
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(60)
        from replaylake.datastore.lake.lake import open_lake

        text = "select count(*) as n, count(action_tokens) as ids from bench.steps"
        (counts,) = open_lake(lake).sql(text).to_pylist()
        if counts != {"n": num_sent, "ids": num_sent}:
            raise RuntimeError(f"found {counts} of {num_sent} calls")
    finally:
        engine.kill()
        relay.kill()
        gateway.kill()


# Of each system: times to the first byte and the last (s), processor time of a call (s).
_Round = dict[str, tuple[list[tuple[float, float]], list[float]]]


@contextmanager
def _real_time(pids: Collection[int]) -> Iterator[None]:
    """Run all threads of processes before those of any other process."""
    threads = [int(one.name) for pid in pids for one in Path(f"/proc/{pid}/task").iterdir()]
    try:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
        yield
    finally:
        for thread in threads:
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _read_processor_times(pid: int) -> tuple[float, float]:
    """Return the processor time of a process: of its first thread and of all others (s)."""
    times = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        times[thread.name] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    first = times.pop(str(pid))
    return first, sum(times.values())


def _report(what: str, rounds: list[_Round]) -> None:
    for place, byte in enumerate(("first", "last")):
        for share in (0.5, 0.99):
            values = {name: [] for name in rounds[0]}
            for one in rounds:
                for name, (times, _) in one.items():
                    ordered = sorted(pair[place] for pair in times)
                    values[name].append(ordered[int(share * len(ordered))] * 1e3)
            more = [
                gateway - engine
                for gateway, engine in zip(values["gateway"], values["engine"], strict=True)
            ]
            line = {
                "workload": f"{what}, to the {byte} byte, p{share * 100:g}",
                **{name: round(median(all_), 3) for name, all_ in values.items()},
                "system": "ours",
                "figure": round(median(more), 3),
                "unit": "ms more than the engine alone",
            }
            print(json.dumps(line), flush=True)
    for name in ("relay", "gateway"):
        first, others = (median(one[name][1][thread] * 1e6 for one in rounds) for thread in (0, 1))
        line = {
            "workload": f"{what}, processor time of a call",
            "system": "ours" if name == "gateway" else name,
            "figure": round(first),
            "other_threads": round(others),
            "unit": "us",
        }
        print(json.dumps(line), flush=True)


async def _load(url: str, num_calls: int, *, is_stream: bool) -> list[tuple[float, float]]:
    """Send calls, 16 at a time; return the times (s) to the first and last byte of each."""
    from replaylake.serve.gateway.upstream import Upstream

    upstream = Upstream(url)
    times = []
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer none")]
    left = iter(range(num_calls))

    async def worker(name: int) -> None:
        for number in left:
            messages = [
                {"role": "system", "content": "You are a helpful assistant. " * 8},
                {"role": "user", "content": f"Question {name} {number} {time.time_ns()}"},
            ]
            body = {"model": "bench", "messages": messages, "stream": is_stream}
            data = json.dumps(body).encode()
            begun = time.perf_counter()
            answer = await upstream.request("POST", "/v1/chat/completions", headers, data)
            assert answer.status == 200
            await answer.read()
            first = time.perf_counter() - begun
            await answer.read_all()
            times.append((first, time.perf_counter() - begun))
            answer.close()

    await asyncio.gather(*map(worker, range(NUM_CONCURRENT)))
    upstream.close()
    return times


class _Engine(asyncio.Protocol):
    """Answers each POST with the bytes that were made before."""

    whole = stream = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = int(re.findall(rb"content-length: (\d+)", self._data[:end].lower())[0])
            body = self._data[end + 4 : end + 4 + length]
            if len(body) < length:
                return
            self._data = self._data[end + 4 + length :]
            is_stream = b'"stream": true' in body or b'"stream":true' in body
            self._transport.write(self.stream if is_stream else self.whole)


class _Relay(asyncio.Protocol):
    """Passes a client's bytes on to the engine, over a connection of its own, and back."""

    def __init__(self, port: int) -> None:
        self._port, self._queued = port, b""
        self._engine: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client: asyncio.Transport = transport  # type: ignore[assignment]
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._engine, _ = await loop.create_connection(
            lambda: _RelayBack(self._client), "127.0.0.1", self._port
        )
        self._engine.write(self._queued)

    def data_received(self, data: bytes) -> None:
        if self._engine is None:
            self._queued += data
        else:
            self._engine.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._engine is not None:
            self._engine.close()


class _RelayBack(asyncio.Protocol):
    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)


def _make_answers() -> None:
    prompt = list(range(100, 164))
    ids = list(range(200, 200 + NUM_TOKENS))
    entries = [
        {"token": word, "logprob": -0.25, "bytes": list(word.encode()), "top_logprobs": []}
        for word in WORDS
    ]
    head = {"id": "chatcmpl-bench", "created": 1, "model": "bench"}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(WORDS)},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    whole = {**head, "object": "chat.completion", "choices": [choice], "prompt_token_ids": prompt}
    body = json.dumps(whole).encode()
    _Engine.whole = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    head["object"] = "chat.completion.chunk"
    events = []
    for place, word in enumerate(WORDS):
        delta = {"content": word, **({"role": "assistant"} if place == 0 else {})}
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": [entries[place]]},
            "finish_reason": "stop" if place == NUM_TOKENS - 1 else None,
            "token_ids": [ids[place]],
        }
        more = {"prompt_token_ids": prompt} if place == 0 else {}
        events.append(b"data: %b\n\n" % json.dumps({**head, "choices": [choice], **more}).encode())
    chunks = [b"%x\r\n%b\r\n" % (len(one), one) for one in [*events, b"data: [DONE]\n\n"]]
    _Engine.stream = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(chunks)
        + b"0\r\n\r\n"
    )


async def _serve(port: int) -> None:
    _make_answers()
    server = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", port)
    await server.serve_forever()


async def _relay(port: int, engine_port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Relay(engine_port), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    main()
