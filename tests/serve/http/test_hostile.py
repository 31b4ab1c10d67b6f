"""Hostile requests on a socket by the thousand: no 500, no long wait for others, bounded memory."""

import asyncio
import io
import json
import os
import random
import re
import socket
import statistics
import struct
import threading
import time
import zipfile
from pathlib import Path

import httpx
import numpy as np
import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.safety.limits import Safety

_GOOD = {"observation": [0.1, 0.2, 0.3, 0.4]}
_MAX_WAIT_S = 1.0
_MAX_GROWTH_BYTES = 100e6
_BODY_TIMEOUT_S = 2.0


def post(body, content_type="application/json", path="/act", method="POST"):
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def npz_bomb():
    """256 MB of zeros in 260 kB."""
    buffer = io.BytesIO()
    archive = zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open("observation.npy", "w") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 26,)}
        )
        for _ in range(16):
            file.write(bytes(1 << 24))
    return buffer.getvalue()


def npy(header):
    text = (header + " " * (63 - (len(header) + 10) % 64) + "\n").encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def bodies():
    return [
        b"[" * 100_000,
        b'{"observation":' * 50_000,
        b'{"observation": [NaN, 1, 2, 3]}',
        b'{"observation": [Infinity, 1, 2, 3]}',
        b'{"observation": [1e999, 1, 2, 3]}',
        b'{"observation": [' + b"9" * 5000 + b", 1, 2, 3]}",
        b'{"observation": [3.5e38, 1, 2, 3]}',
        b'{"observation": ["\\ud800", 1, 2, 3]}',
        b'{"observation": [1, 2, 3, 4], "episode_id": "\xff\xfe"}',
        b'{"observation": [1, 2, 3, 4], "episode_id": "\\u0000"}',
        b'{"observation": [1, 2, 3, 4], "request_id": "' + b"x" * 5000 + b'"}',
        b'{"observation": [[[[1]]], 2, 3, 4]}',
        b'{"observation": {"a": 1}}',
        b'{"observations": []}',
        b'{"observations": [[1, 2, 3, 4], [1, 2]]}',
        b'{"observations": ' + b"[[1,2,3,4]" + b",[1,2,3,4]" * 5000 + b"]}",
        b'{"observation": [1, 2, 3, 4], "action_mask": [true]}',
        b'{"observation": [1, 2, 3, 4], "temperature": -1}',
        b'{"observation": [1, 2, 3, 4], "seed": 1e300}',
        b'{"observation": [1, 2, 3, 4], "state": "AAAA"}',
        b'{"observation": [1, 2, 3, 4], "deterministic": "yes"}',
        b'{"decision_id": "d-x", "reward": 1}',
        b"",
        b"\x00" * 100,
        b"null",
        b'"text"',
        b"[]",
        bytes(range(256)) * 40,
    ]


def arrays():
    return [
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }") + bytes(16),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }") + b"cos\nsystem\n.",
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }") + bytes(3),
        npy("{'descr': '<f4', 'shape': " + "(" * 200),
        npy("__import__('os')"),
        b"\x93NUMPY\x01\x00\xff\xff",
        b"\x80\x04\x95" + b"x" * 40,
    ]


def packed():
    return [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa1" * 50_000,
        b"\xc1",
        b"\x81\xabobservation\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
        b"\xc7\x08\xff" + b"\xff" * 8,
    ]


def requests():
    """Return what is sent whole, at random; one in ten of it as a piece, after which we hang up."""
    bomb = npz_bomb()
    npy_types = ("application/x-npy", "application/octet-stream")
    whole = [post(body, path=path) for body in bodies() for path in ("/act", "/feedback")]
    whole += [post(body, path="/episodes") for body in bodies()[:8]]
    whole += [post(body, kind) for body in arrays() for kind in npy_types]
    whole += [post(body, kind) for body in packed() for kind in ("application/msgpack",)]
    whole += [post(bomb, kind) for kind in ("application/x-npz", "application/zip", npy_types[0])]
    whole += [post(b"cos\nsystem\n(S'id'\ntR.", "application/x-pickle")]
    whole += [post(b"{}", method=method) for method in ("PUT", "TRACE", "BREW", "OPTIONS", "GET")]
    paths = ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/act%00", "/%ff", "//", "/x" * 2000)
    whole += [f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths]
    act = b"POST /act HTTP/1.1\r\nHost: localhost\r\n"
    whole += [
        act + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nnonsense",
        act + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        act + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        act + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n{}{}",
        act + b"Content-Length: -1\r\n\r\n",
        act + b"Content-Length: 99999999999999999999999\r\n\r\n",
        act + b"Content-Length: 104857600\r\n\r\n",
        act + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        act + b"X: y\r\n" * 20_000 + b"\r\n",
        act + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        act + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"\r\n" * 1000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    return whole


def _is_whole(answer):
    head, end, body = answer.removeprefix(_GO_ON).partition(b"\r\n\r\n")
    declared = re.search(rb"content-length: (\d+)", head)
    return bool(end and declared) and len(body) >= int(declared[1])


_GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


class Attack:
    """Many clients at once, each request on a connection of its own; notes every status."""

    def __init__(self, port, seed=0):
        self.port, self.rng = port, random.Random(seed)
        self.statuses = {}

    def note(self, answer):
        answer = answer.removeprefix(_GO_ON)
        status = answer[9:12].decode("latin-1") if answer[:5] == b"HTTP/" else "none"
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status not in ("none", "200", "101"):
            body = answer.partition(b"\r\n\r\n")[2]
            assert status[0] == "4" or status in ("503", "504"), answer[:400]
            if b"application/json" in answer and body:
                assert json.loads(body)["error"].keys() >= {"field", "message"}, answer

    async def send(self, content, hang_up=False):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(content)
            if hang_up:
                if self.rng.random() < 0.5:  # a reset, where the other half says goodbye
                    linger = struct.pack("ii", 1, 0)
                    plain = writer.get_extra_info("socket")
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return
            answer = b""
            # What is no request at all may idle; whatever has begun gets an answer.
            is_request = bool(content.strip())
            try:
                async with asyncio.timeout(60 if is_request else 0.2):
                    while not _is_whole(answer) and (piece := await reader.read(65536)):
                        answer += piece
            except ConnectionError:
                pass
            except TimeoutError:
                assert not is_request, content[:200]
            self.note(answer)
        finally:
            writer.close()

    async def many(self, num, at_once=32):
        whole = requests()
        room = asyncio.Semaphore(at_once)

        async def one():
            async with room:
                content = self.rng.choice(whole)
                hang_up = self.rng.random() < 0.1
                if hang_up:
                    content = content[: self.rng.randrange(1, len(content))]
                await self.send(content, hang_up)

        async with asyncio.TaskGroup() as group:
            for _ in range(num):
                group.create_task(one())

    async def stream(self, num_bytes):
        """Send a body of 100 MB in chunks, and never say how much there is."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"POST /act HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n" % (1 << 16) + b" " * (1 << 16) + b"\r\n"
        try:
            for _ in range(num_bytes >> 16):
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        else:
            self.note(await reader.read(65536))
        writer.close()

    async def drip(self, content, seconds):
        """Send a byte every 0.1 s; return for how many seconds of them the server bore it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = asyncio.create_task(reader.read(65536))
        num_sent = 0
        while num_sent < seconds * 10 and not answer.done():
            writer.write(content[num_sent : num_sent + 1])
            num_sent += 1
            await asyncio.sleep(0.1)
        self.note(await answer)
        writer.close()
        return num_sent / 10


class GoodClient(threading.Thread):
    """Acts once every 10 ms on one connection, and notes how long it waited."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.is_over = url, threading.Event()
        self.waits_s, self.bad = [], []

    def run(self):
        with httpx.Client(base_url=self.url) as client:
            while not self.is_over.wait(0.01):
                began = time.perf_counter()
                answer = client.post("/act", json=_GOOD)
                self.waits_s.append(time.perf_counter() - began)
                if answer.status_code != 200:
                    self.bad.append(answer.text)


class Pause(threading.Thread):
    """Sleeps for 10 ms and writes a line, again and again, as a server does that logs.

    How much longer each takes is the machine's own delay.
    """

    def __init__(self, path):
        super().__init__(daemon=True)
        self.is_over, self.delays_s, self._path = threading.Event(), [], path

    def run(self):
        with self._path.open("ab", buffering=0) as file:
            while not self.is_over.is_set():
                began = time.perf_counter()
                time.sleep(0.01)
                file.write(b"line\n")
                os.fdatasync(file.fileno())
                self.delays_s.append(time.perf_counter() - began - 0.01)


def rss(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(pid)


@pytest.fixture(params=["uvicorn", "bentoml"])
def hostile(request, package, tmp_path, kit):
    lake = open_lake(tmp_path / "lake", create=True)
    safety = Safety(body_timeout_s=_BODY_TIMEOUT_S, deadline_s=5, connections=200)
    server = kit.start_server(
        package=package,
        policy="p",
        version=1,
        lake=lake.path,
        log_to="d",
        server=request.param,
        safety=safety,
    )
    yield server
    server.stop()


@pytest.mark.parametrize(
    "num_short",
    [pytest.param(800, marks=pytest.mark.slow), pytest.param(5000, marks=pytest.mark.chaos)],
)
def test_hostile_requests_hold_up_no_other(hostile, tmp_path, num_short):
    port = int(hostile.url.rpartition(":")[2])
    worker = hostile.processes()[1]
    good, pause = GoodClient(hostile.url), Pause(tmp_path / "lines")
    good.start()
    pause.start()
    attack = Attack(port)

    async def play():
        await attack.many(200)  # the libraries' own first-time memory is not an attack's
        before = rss(worker)
        drips = [attack.drip(post(b" " * 1000)[:-900], 8) for _ in range(40)]
        drips += [attack.drip(b"POST /act HTTP/1.1\r\nX: " + b"y" * 500, 8) for _ in range(40)]
        slow = asyncio.gather(*drips)
        await asyncio.gather(*(attack.stream(100 << 20) for _ in range(4)))
        await attack.many(num_short)
        return before, await slow

    before, borne = asyncio.run(play())
    good.is_over.set()
    pause.is_over.set()
    good.join()
    pause.join()
    growth = rss(worker) - before
    waits_s, delays_s = sorted(good.waits_s), sorted(pause.delays_s)
    print(
        f"statuses {attack.statuses}; longest wait {waits_s[-1]:.3f} s of {len(waits_s)}, "
        f"longest delay of the machine {delays_s[-1]:.3f} s; "
        f"growth {growth / 1e6:.0f} MB; slow clients borne {max(borne):.1f} s"
    )
    assert hostile.processes()[1] == worker, "it was started again"
    assert not good.bad, good.bad[:3]
    assert len(waits_s) > 100
    # A busy machine delays who only sleeps, too; what the server adds to that is bounded.
    assert waits_s[-len(waits_s) // 100] - delays_s[-len(delays_s) // 100] < _MAX_WAIT_S
    assert waits_s[-1] - delays_s[-1] < _MAX_WAIT_S
    assert growth < _MAX_GROWTH_BYTES
    # By what was sent until the answer came: on a busy machine all of it takes longer.
    assert max(borne) < _BODY_TIMEOUT_S + 4
    assert attack.statuses["408"] >= len(borne)
    assert sum("Traceback" in line for line in hostile.lines) == 0, "".join(hostile.lines)[-2000:]


@pytest.mark.slow
def test_more_connections_than_there_may_be(hostile):
    port = int(hostile.url.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(400)]
    try:
        waits_s = []
        for _ in range(20):
            began = time.perf_counter()
            assert httpx.post(f"{hostile.url}/act", json=_GOOD).status_code == 200
            waits_s.append(time.perf_counter() - began)
        # A machine that others use may be slow now and then.
        assert statistics.median(waits_s) < _MAX_WAIT_S
        worker = hostile.processes()[1]
        num_open = sum(
            1
            for link in Path(f"/proc/{worker}/fd").iterdir()
            if link.is_symlink() and "socket" in str(link.readlink())
        )
        assert num_open < 240
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_cut(hostile):
    """It asks for a page of numbers again and again and takes none."""
    port = int(hostile.url.rpartition(":")[2])
    asked = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50
    with socket.create_connection(("127.0.0.1", port)) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(0.2)
        deadline = time.monotonic() + 120
        is_cut = False
        while not is_cut and time.monotonic() < deadline:
            try:
                deaf.send(asked)
            except TimeoutError:
                continue
            except ConnectionError:
                is_cut = True
    assert is_cut
    assert httpx.get(f"{hostile.url}/livez").status_code == 200
