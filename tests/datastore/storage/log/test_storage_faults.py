"""A disk that fails at any call of an append, or is full, or takes no file of that size.

Each time: a StorageError or success, the old version untouched, and a repeated append that works
and doubles nothing.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from replaylake.datastore.errors import StorageError
from replaylake.datastore.storage.log.commit_log import CHECKPOINT_INTERVAL
from replaylake.datastore.storage.log.expiry import expire
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table

SCHEMA: Final = pa.schema([("x", pa.int64())])
FAILING: Final = [
    (os, name)
    for name in (
        *("open", "write", "fsync", "fdatasync", "close", "link", "rename", "replace"),
        *("mkdir", "unlink", "listdir", "scandir"),
    )
] + [(io, "open")]


def rows(*values: int) -> pa.Table:
    return pa.table({"x": list(values)}, schema=SCHEMA)


def values(root: Path) -> Counter[int]:
    return Counter(Table(LocalStorage(root), "t").snapshot().read().column("x").to_pylist())


@contextmanager
def failing_at(call: int, code: int, how: str) -> Iterator[list[str]]:
    """Let the `call`-th file-system call fail, counted from 0, in whatever thread it is.

    `before` it has any effect, `after` all of it (a lost reply), or `short`: half of a write is
    done, and what follows fails. Yields the names of the calls made.
    """
    made: list[str] = []
    is_full = False

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_full
            made.append(name)
            is_failing = len(made) == call + 1 or (is_full and name == "write")
            if not is_failing:
                return real(*args, **kwargs)
            if how == "short" and name == "write" and not is_full:
                is_full = True
                return real(args[0], args[1][: max(1, len(args[1]) // 2)])
            # A close that fails has closed all the same.
            if how == "after" or name == "close":
                result = real(*args, **kwargs)
                if name == "open":
                    (os.close if isinstance(result, int) else type(result).close)(result)
            raise OSError(code, os.strerror(code))

        return run

    with pytest.MonkeyPatch.context() as patch:
        for module, name in FAILING:
            patch.setattr(module, name, wrapped(name, getattr(module, name)))
        yield made


def each_call(base: Path, folder: Path, how: str, act: Callable[[Table], Any]) -> Iterator[Path]:
    """Yield a copy of the store for each call that `act` makes, after it failed at that call."""
    failures = 0
    for call in range(400):
        code = (errno.EIO, errno.ENOSPC)[call % 2]
        root = folder / f"{how}-{call}"
        shutil.copytree(base, root)
        table = Table(LocalStorage(root), "t")
        table.log.newest()
        said = ""
        with failing_at(call, code, how) as made:
            try:
                act(table)
            except StorageError as error:
                said = str(error)
        if len(made) <= call:
            assert failures > 8, "expected most calls to matter"
            return
        failures += bool(said)
        assert not said or os.strerror(code) in said
        yield root
        # The same handle, which saw it fail, and one of another process.
        for handle in (table, Table(LocalStorage(root), "t")):
            act(handle)
        shutil.rmtree(root)
    pytest.fail("expected fewer than 400 calls")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    table = Table(LocalStorage(tmp_path / "base"), "t")
    table.create(SCHEMA)
    table.append(rows(1, 2), producer="p", sequence=0)
    return tmp_path / "base"


@pytest.mark.parametrize("how", ["before", "after", "short"])
def test_an_append_that_fails_at_any_call(base: Path, tmp_path: Path, how: str) -> None:
    old, new = Counter([1, 2]), Counter([1, 2, 3, 4])

    def append(table: Table) -> None:
        table.append(rows(3, 4), producer="p", sequence=1)

    for root in each_call(base, tmp_path, how, append):
        assert values(root) in (old, new), "never a part"
        table = Table(LocalStorage(root), "t")
        assert table.snapshot(1).num_rows == 2
        append(table)
        assert values(root) == new
        assert table.log.newest().version == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "after"])
def test_an_expiry_that_fails_at_any_call(base: Path, tmp_path: Path, how: str) -> None:
    table = Table(LocalStorage(base), "t")
    for sequence in range(1, 5):
        table.append(rows(sequence + 2), producer="p", sequence=sequence)
    table.log.checkpoint(2)
    whole = values(base)
    for root in each_call(base, tmp_path, how, lambda table: expire(table.log, 4)):
        assert values(root) == whole
        handle = Table(LocalStorage(root), "t")
        assert handle.log.at(4).files == table.log.at(4).files
        assert handle.log.history()[-1]["version"] == 5


def test_a_creation_that_fails_at_any_call(tmp_path: Path) -> None:
    root = tmp_path / "store"
    for call in range(400):
        shutil.rmtree(root, ignore_errors=True)
        with failing_at(call, errno.EIO, "before") as made, suppress(StorageError):
            Table(LocalStorage(root), "t").create(SCHEMA)
        if len(made) <= call:
            break
        table = Table(LocalStorage(root), "t")
        if not table.exists():
            table.create(SCHEMA)
        table.append(rows(1), producer="p", sequence=0)
        assert values(root) == Counter([1])
    assert call > 10


def test_a_checkpoint_that_cannot_be_written_fails_no_append(base: Path) -> None:
    table = Table(LocalStorage(base), "t")
    table.log.newest()
    put = LocalStorage.put

    def failing(self: LocalStorage, path: str, data: bytes | memoryview) -> None:
        if "_delta_log" in path:
            raise StorageError(path)
        put(self, path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "put", failing)
        for sequence in range(1, CHECKPOINT_INTERVAL + 1):
            piece = table.write(rows(sequence)) if sequence == CHECKPOINT_INTERVAL else None
            table.commit([piece] if piece else [], producer="p", sequence=sequence)
        for thread in threading.enumerate():
            if thread.name == "replaylake-checkpoint":
                thread.join()
    assert Table(LocalStorage(base), "t").log.newest().version == CHECKPOINT_INTERVAL + 1


LARGE: Final = """
import pathlib, sys
import numpy as np, pyarrow as pa
from replaylake.datastore.errors import StorageError
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table
root = pathlib.Path(sys.argv[1])
table = Table(LocalStorage(root), "t")
large = pa.table({"x": np.random.default_rng(0).integers(0, 2**62, 60_000)})
def append_large():
    return table.append(large, producer="large", sequence=0)
def refused():
    try:
        append_large()
    except StorageError as error:
        print(error)
    else:
        raise SystemExit("expected StorageError")
    assert table.snapshot().num_rows == Table(LocalStorage(root), "t").snapshot().num_rows == 2
    assert not list((root / "_lake" / "tmp").iterdir()), "half of a file left behind"
"""
LIMITED: Final = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
refused()
table.append(pa.table({"x": [7]}), producer="small", sequence=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
append_large(), append_large()
print(Table(LocalStorage(root), "t").snapshot().num_rows)
"""
FULL: Final = """
table.create(pa.schema([("x", pa.int64())]))
table.append(pa.table({"x": [1, 2]}), producer="p", sequence=0)
filler = root / "filler"
filler.write_bytes(bytes(900_000))
refused()
filler.unlink()
append_large(), append_large()
print(Table(LocalStorage(root), "t").snapshot().num_rows)
"""


def test_a_file_larger_than_the_system_allows(base: Path) -> None:
    child = [sys.executable, "-c", LARGE + LIMITED, str(base)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, found = done.stdout.splitlines()
    assert "File too large, expected to read or write it. Free disk space" in said
    assert int(found) == 60_000 + 3


def _own_disk(path: Path) -> list[str]:
    """Return how to run Python code with a disk of 1 MiB at `path`.

    In a mount namespace of the child's own: nothing is mounted that others could see.
    """
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("not run: unshare is not installed, so no small disk can be made")
    inside = [unshare, "--mount", "--map-root-user", "sh", "-c", mount, "sh", str(path)]
    probe = subprocess.run([*inside, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"not run: no small disk may be mounted here: {probe.stderr.strip()[-200:]}")
    return [*inside, sys.executable]


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    child = [*_own_disk(tmp_path), LARGE + FULL]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, found = done.stdout.splitlines()
    assert "No space left on device, expected to read or write it. Free disk space" in said
    assert int(found) == 60_000 + 2


def test_a_file_system_that_is_mounted_for_reading_alone(tmp_path: Path) -> None:
    code = """
import subprocess, sys
from pathlib import Path
import numpy as np
import replaylake as rl
from replaylake.datastore.lake.runs.lease import RunLease
lake = rl.open(Path(sys.argv[1]) / "lake", create=True)
steps = np.zeros((2, 3), np.float32), np.zeros(2, int), np.zeros(2)
lake.dataset("d").append([rl.Episode("a", *steps, terminated=True)])
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
for write in (
    lambda: lake.tag("d", "golden"),
    lambda: RunLease(lake.storage, "01run").__enter__(),
):
    try:
        write()
    except rl.ReplayLakeError as error:
        print(error)
print(lake.snapshot("d").num_steps)
"""
    done = subprocess.run([*_own_disk(tmp_path), code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *refused, found = done.stdout.splitlines()
    assert len(refused) == 2
    for said in refused:
        assert "Read-only file system" in said
        assert "Mount the file system for writing" in said
    assert found == "2"
