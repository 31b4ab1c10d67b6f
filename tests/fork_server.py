"""Runs `replaylake` commands in forks of one process that has imported all of ReplayLake.

A command that is started anew imports for up to 3 s, torch for the most part. A fork has all of
it, and is otherwise a process like any other: with its own arguments, environment, directory,
streams, signals and exit code.

    python fork_server.py serve SOCKET          # prints one line when it can be used
    python fork_server.py run SOCKET ARG...     # as `replaylake ARG...`
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

_NOT_IMPORTED = "replaylake.online.recorders.transferqueue."
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(path: str) -> None:
    """Fork a process for each connection, until this one is killed."""
    import importlib
    import pkgutil

    import replaylake
    from replaylake.cli.main import run as run_command

    for module in pkgutil.walk_packages(replaylake.__path__, "replaylake."):
        # The backend of TransferQueue is imported in TransferQueue's processes alone.
        if not module.name.startswith(_NOT_IMPORTED):
            importlib.import_module(module.name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    # From here on this is the process that waits for one command, or the command itself.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    with connection:
        size, files, _, _ = socket.recv_fds(connection, 8, 3, socket.MSG_WAITALL)
        text = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        if (pid := os.fork()) != 0:
            for file in files:
                os.close(file)
            os._exit(_wait(connection, pid))
    request = json.loads(text)
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # The streams of this process knew another file.
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering=1 if number == 2 else -1, closefd=False)
        for number, mode in enumerate("rww")
    )
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["replaylake", *request["arguments"]]
    run_command()


def _wait(connection: socket.socket, pid: int) -> int:
    """Send a command's pid to whoever started it, forward signals to it, and send its exit code.

    Whoever started it may be killed, and the command then is too, with what it started.
    """
    connection.sendall(pid.to_bytes(4, "big"))
    end = os.pidfd_open(pid)
    while end not in select.select([connection, end], [], [])[0]:
        number = connection.recv(1)
        if number:
            os.kill(pid, number[0])
        else:
            os.killpg(pid, signal.SIGKILL)
            return 1
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(bytes([code if code >= 0 else 128 - code]))
    return 0


def connect(
    path: str, arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
) -> tuple[socket.socket, int]:
    """Start a command by the server; return the connection, on which its exit code comes, and its
    pid. It is killed, with its process group, if the connection is closed before.

    streams: descriptors of its stdin, stdout and stderr.
    """
    request = {
        "arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd(),
    }  # fmt: skip
    text = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        socket.send_fds(connection, [len(text).to_bytes(8, "big")], streams)
        connection.sendall(text)
        return connection, int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    except BaseException:
        connection.close()
        raise


def run(path: str, arguments: list[str]) -> int:
    """Run a command by the server, with the streams of this process."""
    connection, _ = connect(path, arguments, os.environ, (0, 1, 2))
    with connection:
        for number in _FORWARDED:
            # Background jobs of a shell ignore Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
        code = connection.recv(1)
    return code[0] if code else 1


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(run(sys.argv[2], sys.argv[3:]))
