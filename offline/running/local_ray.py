"""Ray: one of this process's own for trials, learners and rollout workers, or a cluster's.

One of our own binds to loopback alone and asks for a token, which ends with the process. Ray is
imported when it is needed, because it takes a second and most runs need none of it.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import (
    ConfigInvalidError,
    ExtraMissingError,
    ReplayLakeError,
    TrainingError,
)

# What Ray is used with, unless the user's environment says otherwise. It stays set: Ray reads it
# once a process, so a second run would start its processes with other settings.
_ENVIRONMENT: Final = {
    # A cluster is connected to with its token, too: RAY_AUTH_TOKEN, or the file that Ray keeps.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's choice from its next version on; said here, it does not warn.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Lakes and environments may be named by paths relative to where the user is.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Results are in the lake: no files of Ray's own beside them, and no tables on stdout.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    # The last thing that a trial tells is that it ended, without a number.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # An interrupt is ours to handle: checkpoints are saved first.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Seconds from the death of a learner to the end of the others, and what they get to end in.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
}
# Of a Ray of our own. Named for the systems where it is off by default; off, every Ray process
# binds to loopback.
_CLUSTERS: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Ray would write a token of its own into the home folder; this one ends with the process.
_TOKEN: Final = "RAY_AUTH_TOKEN"
# Ray's proxy for drivers outside of the cluster.
_CLIENT: Final = "ray://"
_CONNECT_TIMEOUT_S: Final = 10.0
# A machine that is busy starts Ray, or connects to it, within a minute.
START_TIMEOUT_S: Final = 300.0
# How long a signal may find Ray's handler in place of the program's.
_POLL_S: Final = 0.005
# A start that was interrupted is waited for, to be undone.
_UNDO_TIMEOUT_S: Final = 60.0
# The least that Ray takes; what goes through it here are metrics and weights.
_OBJECT_STORE_BYTES: Final = 100 << 20


def import_ray(what: str, address: str | None = None) -> Any:
    """Return the module, its environment set before it is first read.

    what: who needs it for which option, as errors say it. address: of the cluster that is to be
    connected to; None for a Ray of this process's own. Raises: ExtraMissingError.
    """
    of_our_own = {_CLUSTERS: "0", _TOKEN: secrets.token_hex(32)} if address is None else {}
    for name, value in {**_ENVIRONMENT, **of_our_own}.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ExtraMissingError(f"{what}. Run: pip install 'replaylake[online]'.") from error
    return ray


@contextmanager
def open_ray(
    what: str,
    num_cpus: int,
    num_gpus: int = 0,
    *,
    address: str | None = None,
    working_folder: Path | None = None,
    failure: type[ReplayLakeError] = TrainingError,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Any]:
    """Yield the module, with a Ray that runs: of this process's own, ended with the block.

    Where the process is connected to one already that is used, and left as it is.

    Args:
        what: who needs it for which option, as errors say it.
        num_cpus: CPUs that a Ray of our own has to give away, whatever the machine has.
        num_gpus: GPUs that it has.
        address: of a cluster to connect to instead, `HOST:PORT`, or `auto` for one that runs on
            this machine; this machine is one of its nodes.
        working_folder: a zip file, unpacked on every node as its processes' working folder.
        failure: raised where none starts.
        start_timeout_s: how long to wait for a cluster to answer; Ray of our own has limits of its
            own.

    Raises: ExtraMissingError; `failure`; ConfigInvalidError for an address of Ray's client.
    """
    ray = import_ray(what, address)
    # What goes wrong is said by our own errors.
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if ray.is_initialized():
        yield ray
        return
    if address is None:
        thread = _start(ray, num_cpus, num_gpus, failure)
    else:
        thread = _connect(ray, address, working_folder, failure, start_timeout_s)
    try:
        # It prints whose process died where data goes, stdout, and all of its known causes with it.
        ray._private.worker._worker_logs_enabled = False
        yield ray
    finally:
        thread.shut_down()


def check_room(ray: Any, num: int, cpus: float, gpus: float, what: str) -> None:
    """Check that the cluster's nodes have room for `num` processes at once.

    Ray would wait for room without an end. cpus, gpus: what each needs of one node. what: the name
    of the processes in the error. Raises: ConfigInvalidError.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    rooms = [
        min(
            (
                node.get(name, 0.0) // required
                for name, required in (("CPU", cpus), ("GPU", gpus))
                if required
            ),
            default=num,
        )
        for node in nodes
    ]
    if sum(rooms) < num:
        total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
        each = f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        raise ConfigInvalidError(
            f"{what}: found {total['CPU']:g} CPUs and {total['GPU']:g} GPUs on {len(nodes)} nodes "
            f"of the Ray cluster, expected {each} on one node for each of {num} {what}. Run fewer "
            "at once, or request less for each."
        )


def _start(ray: Any, num_cpus: int, num_gpus: int, failure: type[ReplayLakeError]) -> _RayThread:
    """Start a Ray of this process's own; again if the machine was too busy. Raises: `failure`."""
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        thread = _RayThread(
            ray,
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            thread.wait_until_connected(None)
        except Exception as error:
            # Ray gives its node 30 s, and raises an Exception of no class of its own after them.
            is_late = type(error) is Exception
            if is_late and time.monotonic() < until:
                continue
            if not is_late and not isinstance(error, (RuntimeError, OSError, ValueError)):
                raise
            raise failure(
                f"Ray: found {error}, expected it to start on this machine. Check which process "
                "uses its ports, and whether its temporary folder is full."
            ) from error
        return thread


def _connect(
    ray: Any,
    address: str,
    working_folder: Path | None,
    failure: type[ReplayLakeError],
    timeout_s: float,
) -> _RayThread:
    """Connect to a cluster. Raises: ConfigInvalidError for an address of a client; `failure`."""
    if address.startswith(_CLIENT):
        raise ConfigInvalidError(
            f"address: found {address}, expected HOST:PORT or auto: the writer for nodes that "
            "cannot access the lake runs with this process. Run it on a node of the cluster.",
            parameter="address",
        )
    try:
        # Ray itself would go on trying for many minutes.
        host, colon, port = address.rpartition(":")
        if colon:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        thread = _RayThread(
            ray,
            address=address,
            log_to_driver=False,
            configure_logging=False,
            runtime_env=None if working_folder is None else {"working_dir": str(working_folder)},
        )
        is_connected = thread.wait_until_connected(timeout_s)
    except (ray.exceptions.RayError, RuntimeError, OSError, ValueError) as error:
        raise failure(
            f"Ray at {address}: found {error}, expected a cluster of which this machine is a node. "
            "Check `ray status`, and that RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH is the "
            "cluster's; for one without a token set RAY_AUTH_MODE=disabled."
        ) from error
    if not is_connected:
        thread.shut_down()
        raise failure(
            f"Ray at {address}: found no answer in {timeout_s:g} s, expected a cluster of which "
            "this machine is a node. Check `ray status`, and which process listens on that port; "
            "if the start only takes longer, raise start_timeout_s."
        )
    return thread


class _RayThread:
    """A thread that starts Ray or connects to it, and lives as long: Ray's processes end with it.

    Ray waits in C++, for seconds where it starts and for many minutes where the other side is
    silent, and no signal is heard there. Meanwhile it handles SIGTERM itself, by printing where it
    was and ending the process without a checkpoint; from another thread the program's own handler
    is put back every few milliseconds.
    """

    def __init__(self, ray: Any, **options: Any) -> None:
        self._ray = ray
        self._options = options
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        self._may_end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replaylake-ray", daemon=True)

    def wait_until_connected(self, timeout_s: float | None) -> bool:
        """Return whether Ray was there in time. Raises: as ray.init; what a signal raises.

        timeout_s: None for a start, which has limits of its own. If a signal interrupts that, its
        end is waited for, as it can only then be undone.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        handler = signal.getsignal(signal.SIGTERM)
        is_main = threading.current_thread() is threading.main_thread()
        # Of a thread that is not the main one Ray says that it handles no SIGTERM: as is wanted.
        logger = logging.getLogger("ray._private.worker")
        level = logger.level
        logger.setLevel(logging.ERROR)
        self._thread.start()
        try:
            while not self._is_over.wait(_POLL_S) and time.monotonic() < until:
                if is_main and handler is not None:
                    signal.signal(signal.SIGTERM, handler)
        except BaseException:
            if timeout_s is None:
                self._is_over.wait(_UNDO_TIMEOUT_S)
            self.shut_down()
            raise
        finally:
            logger.setLevel(level)
            if is_main and handler is not None:
                signal.signal(signal.SIGTERM, handler)
        if self._error is not None:
            self.shut_down()
            raise self._error
        return self._is_over.is_set()

    def shut_down(self) -> None:
        """Disconnect from Ray, and end it if this process started it."""
        try:
            self._ray.shutdown()
        finally:
            self._may_end.set()

    def _run(self) -> None:
        try:
            self._ray.init(**self._options)
        except BaseException as error:
            self._error = error
        self._is_over.set()
        self._may_end.wait()
