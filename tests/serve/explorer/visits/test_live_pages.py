"""Live pages: what a stream sends, when it ends, and how many there are."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import MetricsLog
from replaylake.serve.explorer.app import create_explorer
from replaylake.serve.explorer.runs import runs_page
from replaylake.serve.explorer.visits import live_pages
from replaylake.serve.safety.tokens import Tokens

STREAM = {"accept": "text/event-stream"}


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A lake with a run that trains, whose page is made again at each tick."""
    monkeypatch.setattr(runs_page, "_REFRESH_S", 0.001)
    monkeypatch.setattr(live_pages, "_TICK_S", 0.001)
    lake = open_lake(tmp_path / "lake", create=True)
    lake.registry.record_run("01run", {"run_id": "01run", "kind": "offline", "status": "running"})
    with RunLease(lake.storage, "01run"):
        yield lake


def log(lake, update, loss):
    with MetricsLog(lake.storage, "01run") as metrics:
        metrics.add(update, {"loss": loss}, time.time())


class Reader:
    """One request to the app whose body is read as it comes."""

    def __init__(self, app, path, headers):
        self.status, self.headers = None, {}
        self._events, self._left = asyncio.Queue(), asyncio.Event()
        parts = urlsplit(path)
        scope = {
            "type": "http",
            "method": "GET",
            "path": parts.path,
            "query_string": parts.query.encode(),
            "headers": [(b"host", b"localhost")]
            + [(name.encode(), value.encode()) for name, value in headers.items()],
            "server": ("127.0.0.1", 80),
        }
        self._is_asked = False
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message["body"]:
            self._events.put_nowait(message["body"].decode())

    async def event(self):
        """Return the next event's name and what it has."""
        text = await asyncio.wait_for(self._events.get(), 60)
        found = re.fullmatch(r"event: (\w+)\ndata:(.*)\n\n", text)
        assert found, text
        return found[1], json.loads(found[2]) if found[2] else None

    async def leave(self):
        self._left.set()
        await asyncio.wait_for(self.task, 60)


@asynccontextmanager
async def follow(app, path, **headers):
    reader = Reader(app, path, {**STREAM, **headers})
    try:
        yield reader
    finally:
        await reader.leave()


def test_a_stream_sends_the_page_and_then_what_changes(training):
    async def run():
        async with follow(create_explorer(training), "/runs/01run") as reader:
            name, html = await reader.event()
            assert name == "page"
            assert reader.status == 200
            assert reader.headers["content-type"].startswith("text/event-stream")
            assert reader.headers["cache-control"] == "no-store"
            assert "content-length" not in reader.headers
            assert "connect-src 'self'" in reader.headers["content-security-policy"]
            assert "<title>01run - ReplayLake</title>" in html
            assert 'data-refresh="' in html
            assert "<h2>Options</h2>" in html
            log(training, 1, 0.75)
            while "0.75" not in html:
                name, html = await reader.event()
                # What has not changed comes by its title alone.
                assert "<section data-same><h2>Options</h2></section>" in html
            record = {"run_id": "01run", "kind": "offline", "status": "done"}
            training.registry.record_run("01run", record)
            while name == "page":
                last = html
                name, html = await reader.event()
            assert name == "end"
            assert "data-refresh" not in last
            assert ">done<" in last

    asyncio.run(run())


def test_what_a_reader_has_is_not_sent_again(training):
    async def run():
        app = create_explorer(training)
        page = Reader(app, "/runs/01run", {})
        await asyncio.wait_for(page.task, 60)
        html = ""
        while not page._events.empty():
            html += page._events.get_nowait()
        seen = re.search(r'<meta name="seen" content="([^"]+)">', html)[1]
        assert len(seen.split(".")) == html.count("<section")
        async with follow(app, f"/runs/01run?seen={seen}") as reader:
            _, update = await reader.event()
            assert update.count("<section data-same>") == update.count("<section") > 2
            assert f'content="{seen}"' in update
        # Of a page whose other panels it has, the one that changed.
        first = ".".join(seen.split(".")[1:])
        async with follow(app, f"/runs/01run?seen={first}") as reader:
            _, update = await reader.event()
            assert update.count("<section data-same>") == update.count("<section") - 1
            assert [address for address, _ in app.live._shared] == ["/runs/01run?"]

    asyncio.run(run())


def test_a_large_page_is_made_less_often(training, monkeypatch):
    monkeypatch.setattr(live_pages, "_CHARS_PER_S", 1)

    async def run():
        app = create_explorer(training)
        async with follow(app, "/runs/01run") as reader:
            await reader.event()
            (shared,) = app.live._shared.values()
            assert shared.due > time.monotonic() + 100

    asyncio.run(run())


def test_readers_of_one_page_share_what_is_made_for_them(training, monkeypatch):
    made = []
    show = runs_page.show_run
    monkeypatch.setattr(runs_page, "_REFRESH_S", 3600)

    async def run():
        app = create_explorer(training)
        app._pages["/runs/{run}"] = lambda visit: made.append(visit) or show(visit)
        async with (
            follow(app, "/runs/01run") as one,
            follow(app, "/runs/01run") as two,
            follow(app, "/runs/01run?with=01run") as other,
        ):
            assert await one.event() == await two.event()
            await other.event()
        assert len(made) == 2
        # The last one to leave takes along what they shared.
        assert app.live._shared == {}
        assert app.live._num == 0

    asyncio.run(run())


def test_there_are_so_many_streams_and_no_more(training, monkeypatch):
    monkeypatch.setattr(live_pages, "_MAX_STREAMS", 2)

    async def run():
        app = create_explorer(training)
        async with follow(app, "/runs") as one, follow(app, "/runs/01run") as two:
            await one.event()
            await two.event()
            async with follow(app, "/runs") as refused:
                await asyncio.wait_for(asyncio.shield(refused.task), 60)
                assert refused.status == 503
            # A page itself is still there.
            reader = Reader(app, "/runs", {})
            await asyncio.wait_for(reader.task, 60)
            assert reader.status == 200
        async with follow(app, "/runs") as three:
            await three.event()
            assert three.status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "path",
    [
        "/runs.json",
        "/runs.csv",
        "/sql?q=SELECT+1",
        "/sql.csv?q=SELECT+1",
        "/policies/p?observation=1",
    ],
)
def test_what_is_no_page_or_runs_a_readers_sql_is_not_followed(explored, path):
    assert explored.client.get(path, headers=STREAM).status_code == 204


def test_the_head_of_a_page_is_no_stream(explored):
    answer = explored.client.head("/policies", headers=STREAM)
    assert answer.headers["content-type"].startswith("text/html")


def test_a_page_that_does_not_change_is_sent_once(explored):
    answer = explored.client.get("/policies", headers=STREAM)
    assert [line for line in answer.text.splitlines() if line.startswith("event")] == [
        "event: page",
        "event: end",
    ]


def test_a_page_that_fails_ends_its_stream(explored, caplog):
    answer = explored.client.get("/runs/nowhere", headers=STREAM)
    assert answer.status_code == 200
    assert answer.text == ""
    assert caplog.records == []
    app = create_explorer(explored.lake)

    def fail(visit):
        raise ZeroDivisionError

    app._pages["/runs"] = fail

    async def run():
        async with follow(app, "/runs") as reader:
            await asyncio.wait_for(asyncio.shield(reader.task), 60)

    asyncio.run(run())
    assert "error while /runs? was followed" in caplog.text
    assert app.live._num == 0


def test_a_stream_needs_the_token_and_this_site(explored_lake, reader_type):
    token = "secret-" * 4
    guarded = reader_type(explored_lake, tokens=Tokens(((token.encode(), "admin"),)))
    assert guarded.client.get("/runs", headers=STREAM).status_code == 401
    headers = {**STREAM, "authorization": f"Bearer {token}"}
    assert guarded.client.get("/policies", headers=headers).status_code == 200
    other = {**headers, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
    assert guarded.client.get("/policies", headers=other).status_code == 403


def test_a_silent_stream_is_kept_alive(training, monkeypatch):
    monkeypatch.setattr(live_pages, "_KEEP_ALIVE_S", 0.0)
    monkeypatch.setattr(runs_page, "_REFRESH_S", 3600)

    async def run():
        async with follow(create_explorer(training), "/runs") as reader:
            await reader.event()
            assert await asyncio.wait_for(reader._events.get(), 60) == ":\n\n"

    asyncio.run(run())


@pytest.mark.slow
def test_an_explorer_that_is_stopped_ends_its_streams(training):
    """SIGINT ends it at once, with a page that is followed and nothing but its line on stderr."""
    code = f"""if True:
        from replaylake.serve.explorer.config import ExplorerConfig
        from replaylake.serve.explorer.server import run_explorer
        config = ExplorerConfig({str(training.path)!r}, port=0)
        raise SystemExit(run_explorer(config, lambda config: print(config.url, flush=True)))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    url = process.stdout.readline().strip()
    seen = threading.Event()

    def read():
        with httpx.stream("GET", f"{url}runs/01run", headers=STREAM, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("event: page"):
                    seen.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert seen.wait(60)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    reader.join(60)
    assert process.returncode == 0
    assert len(stderr.splitlines()) == 1, stderr
