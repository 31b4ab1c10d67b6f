"""What a process that runs SQL from others gives up."""

import socket
import subprocess
import sys

import pytest

_CONFINED = """
import resource, socket, sys
from replaylake.datastore.query.sandbox import limit_resources, restrict_access
allowed, other = sys.argv[1:3]
limit_resources(memory_bytes=256 << 20, cpu_s=5, wall_s=5, num_files=64)
if not restrict_access([allowed], []):
    print("no landlock"); sys.exit()
assert open(allowed).read() == "allowed"
for path, mode in ((other, "r"), (allowed, "r+"), (allowed, "w"), (other + ".new", "w")):
    try:
        open(path, mode)
    except PermissionError:
        print("refused", mode)
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[3])), timeout=2)
except PermissionError:
    print("refused tcp")
try:
    bytearray(1 << 30)
except MemoryError:
    print("refused memory")
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)) if resource.getrlimit(
        resource.RLIMIT_NOFILE) != (64, 64) else print("files 64")
except ValueError:
    pass
"""


def test_the_kernel_holds_the_process_to_its_files(tmp_path):
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    allowed.write_text("allowed")
    other.write_text("other")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", _CONFINED, str(allowed), str(other), str(port)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    if "no landlock" in ran.stdout:
        pytest.skip("this kernel has no Landlock")
    expected = ["r", "r+", "w", "w", "tcp", "memory"]
    assert ran.stdout.split("\n")[:6] == [f"refused {what}" for what in expected]
    assert "files 64" in ran.stdout
    assert allowed.read_text() == "allowed"
