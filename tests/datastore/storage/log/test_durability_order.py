"""The order of an append, from a trace of its system calls.

write < fsync < rename of each shard < fsync of its folder < link of the commit, which was written
and fsynced before < fsync of the log's folder < acknowledge.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest

from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table

CALLS: Final = "write,pwrite64,writev,fsync,fdatasync,link,linkat,rename,renameat,renameat2"
ACKNOWLEDGED: Final = "acknowledged"
CHILD: Final = f"""
import os, sys, pathlib
import pyarrow as pa
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table
if sys.argv[2:]:
    fsync, left_out = os.fsync, sys.argv[2]
    os.fsync = lambda fd: left_out in os.readlink(f"/proc/self/fd/{{fd}}") or fsync(fd)
table = Table(LocalStorage(pathlib.Path(sys.argv[1])), "t")
table.append(pa.table({{"x": [1, 2, 3]}}), producer="p", sequence=0)
os.write(1, b"{ACKNOWLEDGED}")
"""
# strace pads a short process id with blanks.
_LINE: Final = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(?: resumed>|\()(.*)")
_PATHS: Final = re.compile(r'"(/[^"]*)"|<(/[^>]*)>')


@dataclass(frozen=True)
class Call:
    """A system call: its name, the paths among its arguments, the lines it began and ended on."""

    name: str
    paths: tuple[str, ...]
    text: str
    began: int
    ended: int


class OutOfOrder(Exception):
    """An append that acknowledged what was not durable."""


def traced(root: Path, *without_fsync_of: str) -> list[Call]:
    """Append in a child and return its successful calls. Skips where nothing may be traced."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("not run: strace is not installed, so the order of system calls is not shown")
    probe = subprocess.run([strace, "-f", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"not run: strace may not trace here: {probe.stderr.strip()[-200:]}")
    trace = root.parent / "trace"
    command = [strace, "-f", "-y", "-s", "64", "-e", f"trace={CALLS}", "-o", str(trace)]
    child = [sys.executable, "-c", CHILD, str(root), *without_fsync_of]
    subprocess.run([*command, *child], check=True, capture_output=True)
    return parsed(trace.read_text().splitlines())


def parsed(lines: list[str]) -> list[Call]:
    calls = []
    begun: dict[tuple[str, str], tuple[int, str]] = {}
    for number, line in enumerate(lines):
        match = _LINE.match(line)
        if match is None:
            continue
        thread, name, text = match.groups()
        if text.endswith("<unfinished ...>"):
            begun[thread, name] = (number, text)
            continue
        began, head = begun.pop((thread, name), (number, ""))
        text = head + text
        if not re.search(r"= -1 E", text):
            paths = tuple(one or other for one, other in _PATHS.findall(text))
            calls.append(Call(name, paths, text, began, number))
    return calls


def check_order(calls: list[Call], root: Path) -> list[str]:
    """Return the files that became visible, in order. Raises: OutOfOrder."""
    acknowledged = next(call for call in calls if ACKNOWLEDGED in call.text)
    visible: list[tuple[Call, int, str]] = []
    for call in calls:
        if call.name.startswith(("rename", "link")):
            temporary, target = [path for path in call.paths if Path(path) != root][-2:]
            writes = [c for c in calls if "write" in c.name and temporary in c.paths]
            synced = [c for c in calls if "sync" in c.name and temporary in c.paths]
            folder = str(Path(target).parent)
            folders = [c for c in calls if "sync" in c.name and folder in c.paths]
            if not writes:
                raise OutOfOrder(f"{target}: found no write of {temporary}")
            last_write = max(c.ended for c in writes)
            if not any(last_write < c.began and c.ended < call.began for c in synced):
                raise OutOfOrder(f"{target}: visible before its bytes were fsynced")
            durable = min((c.ended for c in folders if c.began > call.ended), default=None)
            if durable is None or durable > acknowledged.began:
                raise OutOfOrder(f"{target}: acknowledged before {folder} was fsynced")
            visible.append((call, durable, str(Path(target).relative_to(root))))
    commit = visible[-1][0]
    for _, durable, name in visible[:-1]:
        if durable > commit.began:
            raise OutOfOrder(f"{name}: committed before its folder was fsynced")
    return [name for _, _, name in visible]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    table = Table(LocalStorage(tmp_path / "store"), "t")
    table.create(pa.schema([("x", pa.int64())]))
    return tmp_path / "store"


def test_everything_is_durable_before_it_is_acknowledged(root: Path) -> None:
    shard, commit = check_order(traced(root), root)
    assert re.fullmatch(r"t/shards/\w+\.parquet", shard)
    assert commit == "t/_delta_log/00000000000000000001.json"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["_lake/tmp", "t/shards", "t/_delta_log"])
def test_an_append_that_leaves_out_an_fsync_is_found_out(root: Path, path: str) -> None:
    with pytest.raises(OutOfOrder, match="before"):
        check_order(traced(root, path), root)
