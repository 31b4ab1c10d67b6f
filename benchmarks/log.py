"""The commit log at many versions, ours beside delta-rs: commits, four writers, opening, following.

Both systems commit to copies of one table, in turns. Ours calls fsync, delta-rs never does. Run it
alone with `python benchmarks/log.py`; it prints one JSON line per figure and system.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Final

import deltalake
import pyarrow as pa

from replaylake.datastore.storage.log.commit_file import Intent, encode
from replaylake.datastore.storage.log.commit_log import CHECKPOINT_INTERVAL, CommitLog
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table

SCHEMA: Final = pa.schema([("episode_id", pa.string()), ("reward", pa.float64())])
ROWS: Final = pa.table({"episode_id": ["e"] * 100, "reward": [1.0] * 100}, schema=SCHEMA)
NUM_WRITERS: Final = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=10_000, help="length of the log")
    parser.add_argument("--commits", type=int, default=400, help="commits timed, ours")
    parser.add_argument("--peer-commits", type=int, default=20, help="commits timed, delta-rs")
    parser.add_argument("--folder", type=Path, help="where to write; must be a real disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for figures in measure(Path(folder), options):
            report(*figures)


def measure(folder: Path, options: argparse.Namespace) -> list[tuple[str, str, float, float]]:
    """Return (workload, unit, ours, delta-rs) of every figure."""
    whole = folder / "whole"
    build(whole, options.versions)
    copies = {name: folder / name for name in ("bare", "append", "peer", "follow")}
    for copy in copies.values():
        shutil.copytree(whole, copy)
    at = f"at version {options.versions}"
    ours, peers = [], []
    for turn in range(4):  # in turns, so that a disturbance meets both
        ours += commits(copies["bare"], options.commits // 4, turn)
        peers += peer_commits(copies["peer"], options.peer_commits // 4, turn)
    appended = appends(copies["append"], options.commits)
    peer_appended = peer_appends(copies["peer"], options.peer_commits)
    news, nothing, peer_news, peer_nothing = follow(copies["follow"], options.peer_commits)
    rate, peer_rate = writers(folder / "many", options.commits, options.peer_commits)
    opened = middle(lambda: CommitLog(LocalStorage(whole), "t").newest(), 9)
    peer_opened = middle(lambda: deltalake.DeltaTable(str(whole / "t")), 9)
    return [
        (f"commit p50 {at}", "ms", percentile(ours, 50), percentile(peers, 50)),
        (f"commit p99 {at}", "ms", percentile(ours, 99), percentile(peers, 99)),
        (
            f"append of 100 rows p50 {at}",
            "ms",
            percentile(appended, 50),
            percentile(peer_appended, 50),
        ),
        (
            f"append of 100 rows p99 {at}",
            "ms",
            percentile(appended, 99),
            percentile(peer_appended, 99),
        ),
        (f"commits from {NUM_WRITERS} writers", "1/s", rate, peer_rate),
        (f"open {at}", "ms", opened, peer_opened),
        (f"see 1 new commit {at}", "ms", percentile(news, 50), percentile(peer_news, 50)),
        (
            f"see that nothing is new {at}",
            "ms",
            percentile(nothing, 50),
            percentile(peer_nothing, 50),
        ),
    ]


def report(workload: str, unit: str, ours: float, peer: float) -> None:
    """Print a figure's two lines; a ratio above 1 is in favor of the line's system."""
    better = ours / peer if unit.endswith("/s") else peer / ours
    for system, figure, ratio in (("ours", ours, better), ("delta-rs", peer, 1 / better)):
        line = {"workload": workload, "system": system, "figure": round(figure, 3), "unit": unit}
        print(json.dumps({**line, "ratio": round(ratio, 2)}), flush=True)


def build(root: Path, versions: int) -> None:
    """Write the log of `versions` small appends, without their shards and without fsync."""
    table = Table(LocalStorage(root), "t")
    table.create(SCHEMA)
    for version in range(1, versions + 1):
        intent = Intent("worker", version, "WRITE", add=(entry(f"built-{version}"),))
        name = f"{version:020d}.json"
        (root / "t" / "_delta_log" / name).write_bytes(encode(intent, version, version))
        if version % (10 * CHECKPOINT_INTERVAL) == 0:
            table.log.checkpoint(version)


def entry(name: str) -> FileEntry:
    return FileEntry(f"shards/{name}.parquet", 4096, 100, "ab" * 32, 5)


def commits(root: Path, num: int, turn: int) -> list[float]:
    log = CommitLog(LocalStorage(root), "t")
    log.newest()

    def one(sequence: int) -> None:
        name = f"{turn}-{sequence}"
        log.commit(lambda _: Intent(f"bench{turn}", sequence, "WRITE", add=(entry(name),)))

    return [timed(lambda i=i: one(i)) for i in range(num)]


def appends(root: Path, num: int) -> list[float]:
    table = Table(LocalStorage(root), "t")
    table.log.newest()
    return [timed(lambda i=i: table.append(ROWS, producer="b", sequence=i)) for i in range(num)]


def peer_commits(root: Path, num: int, turn: int) -> list[float]:
    table = deltalake.DeltaTable(str(root / "t"))
    return [timed(lambda i=i: peer_commit(table, f"peer-{turn}-{i}")) for i in range(num)]


def peer_commit(table: deltalake.DeltaTable, name: str) -> None:
    stats = json.dumps({"numRecords": 100})
    action = deltalake.transaction.AddAction(f"shards/{name}", 4096, {}, 5, True, stats)
    table.create_write_transaction([action], "append", table.schema())
    table.update_incremental()


def peer_appends(root: Path, num: int) -> list[float]:
    table = deltalake.DeltaTable(str(root / "t"))
    return [
        timed(lambda: deltalake.write_deltalake(table, ROWS, mode="append")) for _ in range(num)
    ]


def follow(root: Path, num: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Time one poll after another process's commit, and one after none, of both systems."""
    writer, reader = (CommitLog(LocalStorage(root), "t") for _ in range(2))
    peer = deltalake.DeltaTable(str(root / "t"))
    reader.newest()
    news, nothing, peer_news, peer_nothing = [], [], [], []
    for sequence in range(num):
        intent = Intent("follow", sequence, "WRITE", add=(entry(f"follow-{sequence}"),))
        version = writer.commit(lambda _, intent=intent: intent).version
        news.append(timed(reader.newest))
        nothing.append(timed(reader.newest))
        peer_news.append(timed(peer.update_incremental))
        peer_nothing.append(timed(peer.update_incremental))
        if (reader.newest().version, peer.version()) != (version, version):
            raise SystemExit(f"follow: expected version {version} in both systems")
    return news, nothing, peer_news, peer_nothing


def writers(root: Path, num: int, peer_num: int) -> tuple[float, float]:
    """Return the commits/s of four processes, after checking that none is lost."""
    rates = []
    for target, folder, each in (
        (write_many, root / "ours", num),
        (peer_write_many, root / "peer", peer_num),
    ):
        table = Table(LocalStorage(folder), "t")
        table.create(SCHEMA)
        context = multiprocessing.get_context("spawn")
        gate, done = context.Barrier(NUM_WRITERS + 1), context.Barrier(NUM_WRITERS + 1)
        processes = [
            context.Process(target=target, args=(folder, i, each, gate, done))
            for i in range(NUM_WRITERS)
        ]
        for process in processes:
            process.start()
        gate.wait()
        started = time.perf_counter()
        done.wait()
        rates.append(NUM_WRITERS * each / (time.perf_counter() - started))
        for process in processes:
            process.join()
        found = len(table.log.newest().files)
        if found != NUM_WRITERS * each:
            raise SystemExit(f"{folder}: found {found} shards, expected {NUM_WRITERS * each}")
    return rates[0], rates[1]


def write_many(root: Path, writer: int, num: int, gate: Barrier, done: Barrier) -> None:
    log = CommitLog(LocalStorage(root), "t")
    log.newest()
    gate.wait()
    for sequence in range(num):
        intent = Intent(f"w{writer}", sequence, "WRITE", add=(entry(f"{writer}-{sequence}"),))
        log.commit(lambda _, intent=intent: intent)
    done.wait()


def peer_write_many(root: Path, writer: int, num: int, gate: Barrier, done: Barrier) -> None:
    table = deltalake.DeltaTable(str(root / "t"))
    gate.wait()
    for sequence in range(num):
        while True:  # delta-rs gives up after 15 attempts
            try:
                peer_commit(table, f"{writer}-{sequence}")
                break
            except deltalake.exceptions.CommitFailedError:
                table.update_incremental()
    done.wait()


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def middle(call: Callable[[], object], times: int) -> float:
    return statistics.median(timed(call) for _ in range(times))


def percentile(times_ms: list[float], percent: int) -> float:
    return sorted(times_ms)[min(len(times_ms) * percent // 100, len(times_ms) - 1)]


if __name__ == "__main__":
    main()
