"""Local Ray: the one of this process's own that trials, learners and rollout workers run in.

Ray is imported when it is needed, because it takes a second and most runs need none of it.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from replaylake.datastore.errors import ExtraMissing, TrainingFailed

# What a Ray of our own is started with, unless the user's environment says otherwise. It stays set:
# Ray reads it once a process, so a second run would start its processes with other settings.
_ENVIRONMENT: Final = {
    # Named for the systems where it is off by default; off, every Ray process binds to loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
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
# Ray would write a token of its own into the home folder; this one ends with the process.
_TOKEN: Final = "RAY_AUTH_TOKEN"
# The least that Ray takes; what goes through it here are metrics and weights.
_OBJECT_STORE_BYTES: Final = 100 << 20


def import_ray(what: str) -> Any:
    """Return the module, its environment set before it is first read.

    what: who needs it for which option, as errors say it. Raises: ExtraMissing.
    """
    for name, value in {**_ENVIRONMENT, _TOKEN: secrets.token_hex(32)}.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ExtraMissing(f"{what}. Install replaylake[online].") from error
    return ray


def quiet_at_exit() -> None:
    """Let what libraries print while this process ends go nowhere; for programs, not libraries.

    After Ray was used with torch some modules outlive the interpreter, of which DuckDB's binding
    then prints some 40 lines on stderr (Ray 2.60, DuckDB 2.0; nothing is lost).
    """
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


@contextmanager
def running_ray(what: str, num_cpus: int, num_gpus: int = 0) -> Iterator[Any]:
    """Yield the module, with a Ray that runs: of this process's own, ended with the block.

    Where the process is connected to one already that is used, and left as it is.
    Raises: ExtraMissing; TrainingFailed where none starts.
    """
    ray = import_ray(what)
    owns_ray = not ray.is_initialized()
    if owns_ray:
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        except (RuntimeError, OSError, ValueError) as error:
            raise TrainingFailed(
                f"Ray: found {error}, expected it to start on this machine. Look for what listens "
                "on its ports or fills its temporary folder."
            ) from error
        # Ray puts its own in its place, which ends the process without a checkpoint.
        if threading.current_thread() is threading.main_thread() and terminated is not None:
            signal.signal(signal.SIGTERM, terminated)
    try:
        # What goes wrong is said by our own errors.
        for name in ("ray.tune", "ray.train"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield ray
    finally:
        if owns_ray:
            ray.shutdown()
