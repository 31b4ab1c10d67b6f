"""A server's folder: there as long as anybody works in it, and not for ever after a kill."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from replaylake.serve.processes.server import make_runtime_dir

# Makes a home, starts a worker that inherits its lock, says both and waits to be killed.
_SERVER = """
import subprocess, sys, time
from replaylake.serve.processes.server import make_runtime_dir

with make_runtime_dir() as home:
    worker = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        pass_fds=[home.lock_fd],
        stdin=0,
        stdout=subprocess.DEVNULL,
    )
    (home.path / "work").mkdir()
    print(home.path, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_home_goes_with_its_server(folder):
    with make_runtime_dir() as home:
        (home.path / "work").mkdir()
        assert home.path.parent == folder
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_what_a_killed_server_left_goes_when_its_last_worker_has(folder, kit):
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    left = folder / os.path.basename(server.stdout.readline().strip())
    with make_runtime_dir():
        assert left.is_dir()  # its server lives
    server.send_signal(signal.SIGKILL)
    server.stdout.close()
    server.wait()
    with make_runtime_dir():
        assert left.is_dir()  # its worker does
    server.stdin.close()

    def is_gone():
        with make_runtime_dir():
            return not left.exists()

    kit.wait_until(is_gone)


def test_one_that_was_left_a_moment_ago_goes_too(folder):
    young = folder / "replaylake-server-young"
    young.mkdir()
    with make_runtime_dir():
        assert not young.exists()


def test_it_is_locked_before_others_find_it(folder, monkeypatch):
    found, flock = [], fcntl.flock

    def look(*arguments):
        found.append([path.name for path in folder.glob("replaylake-server-*")])
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", look)
    with make_runtime_dir() as home:
        assert [path.name for path in folder.glob("*")] == [home.path.name]
        assert home.path.name.startswith("replaylake-server-")
    assert found == [[]]


def test_a_link_is_not_followed(folder):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "replaylake-server-link").symlink_to(elsewhere)
    with make_runtime_dir():
        assert elsewhere.is_dir()
