"""A proxy before the store resets connections, in the middle of requests and of answers."""

from __future__ import annotations

import json
import os
import random
import selectors
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import StorageError
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.storage.locations import open_storage
from replaylake.datastore.storage.storage import Storage

MakeEpisode = Callable[..., Episode]


class ResettingProxy:
    """Forwards connections to a server, and resets each after a random number of bytes.

    mean_bytes: of both directions together, the mean of an exponential distribution; 0 for never.
    num_to_cut: so many of the next answers are cut off before the last byte of their body.
    """

    def __init__(self, target: tuple[str, int], seed: int) -> None:
        self.mean_bytes = self.num_to_cut = 0
        self.num_resets: Counter[str] = Counter()
        self._target = target
        self._rng = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with socket.create_connection(self._listener.getsockname()):
            pass
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._is_closed:
                client.close()
                return
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        left = self._rng.expovariate(1 / self.mean_bytes) if self.mean_bytes else float("inf")
        with (
            client,
            socket.create_connection(self._target) as server,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select():
                    source: Any = key.fileobj
                    try:
                        data = source.recv(65_536)
                        if source is server and self._has_body_to_cut(data):
                            left = len(data) - 1
                        key.data.sendall(data[: int(min(left, len(data)))])
                    except OSError:
                        return
                    if not data:
                        return
                    left -= len(data)
                    if left <= 0:
                        self.num_resets["request" if source is client else "answer"] += 1
                        for end in (client, server):
                            linger = struct.pack("ii", 1, 0)
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        return

    def _has_body_to_cut(self, answer: bytes) -> bool:
        """Whether this is the next answer to cut off: headers may come alone, before the body."""
        if not self.num_to_cut or answer.endswith(b"\r\n\r\n") or not answer:
            return False
        self.num_to_cut -= 1
        return True


@pytest.fixture
def proxy(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ResettingProxy]:
    place = urlsplit(s3.url)
    proxy = ResettingProxy((place.hostname, place.port), seed=0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


class Attempts:
    """Repeats what a reset made fail; any other error is the test's."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def __call__(self, do: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        for _ in range(20):
            try:
                return do(*arguments, **options)
            except StorageError as error:
                self.failures.append(str(error))
        raise AssertionError(self.failures)


def rows(lake: Lake, dataset: str) -> Counter[tuple[str, int]]:
    found = lake.sql(f"select source_episode_id as s, episode_id as e, step from {dataset}.steps")
    return Counter((row["s"] or row["e"], row["step"]) for row in found.to_pylist())


def _write_log(path: Path, num_episodes: int) -> Path:
    lines = [
        {"episode_id": f"i{episode}", "step": step, "observation": [step, episode],
         "action": step % 2, "reward": 1.0, "terminated": step == 4}
        for episode in range(num_episodes)
        for step in range(5)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def use_lake(url: str, folder: Path, make_episode: MakeEpisode, num: int) -> list[str]:
    """Append, ingest, compact, query and replay, `num` times; return what failed meanwhile."""
    attempt = Attempts()
    lake = attempt(open_lake, url, create=True)
    expected = Counter[tuple[str, int]]()
    for number in range(num):
        if number % 3 == 0:
            # As a process that knows nothing yet.
            lake = attempt(open_lake, url)
        episode = make_episode(f"e{number}", 40, terminated=True)
        attempt(lake.dataset("d").append, [episode], producer="p", sequence=number)
        expected.update((f"e{number}", step) for step in range(40))
        if number % 4 == 3:
            attempt(compact, lake, "d", open_s=0.0)
            log, name = _write_log(folder / f"{number}.jsonl", 12), f"i{number}"
            attempt(ingest, lake, [log], name, commit_steps=20)
            assert attempt(rows, lake, name) == Counter(
                (f"i{episode}", step) for episode in range(12) for step in range(5)
            )
        assert attempt(rows, lake, "d") == expected
        assert attempt(_sum_replayed, lake) == sum(step + 1.0 for _, step in expected)
    return attempt.failures


def _sum_replayed(lake: Lake) -> float:
    """Return the sum of the rewards of all transitions that replay has."""
    view = lake.snapshot("d").replay()
    return float(view.in_order(view.num_steps).sample().rewards.sum())


@pytest.mark.parametrize(
    "read",
    [
        lambda storage: storage.get("a/none") is None,
        lambda storage: storage.get("a/b") == b"1" * 1000,
        lambda storage: storage.names("a") == ["b"],
        lambda storage: storage.names("a", after="a") == ["b"],
    ],
)
def test_an_answer_that_is_cut_off_is_requested_again(
    bucket: str, proxy: ResettingProxy, read: Callable[[Storage], bool]
) -> None:
    storage = open_storage(f"s3://{bucket}/lake")
    storage.put("a/b", b"1" * 1000)
    proxy.num_to_cut = 2
    assert read(storage)
    assert proxy.num_to_cut == 0
    assert proxy.num_resets == {"answer": 2}


@pytest.mark.slow
def test_resets_lose_and_double_nothing(
    bucket: str, proxy: ResettingProxy, tmp_path: Path, make_episode: MakeEpisode
) -> None:
    check_resets(f"s3://{bucket}/lake", proxy, tmp_path, make_episode, num=8)


@pytest.mark.chaos
def test_many_resets_lose_and_double_nothing(
    bucket: str, proxy: ResettingProxy, tmp_path: Path, make_episode: MakeEpisode
) -> None:
    num = int(os.environ.get("REPLAYLAKE_KILLS", "500")) // 5
    check_resets(f"s3://{bucket}/lake", proxy, tmp_path, make_episode, num=num)


def check_resets(
    url: str, proxy: ResettingProxy, folder: Path, make_episode: MakeEpisode, num: int
) -> None:
    proxy.mean_bytes = 20_000
    failures = use_lake(url, folder, make_episode, num)
    proxy.mean_bytes = 0
    print(
        f"{dict(proxy.num_resets)} resets, {len(failures)} operations failed", *failures, sep="\n"
    )
    assert proxy.num_resets["request"] > 0
    assert proxy.num_resets["answer"] > 0
    report = fsck(open_lake(url))
    assert report.is_clean, report.findings
