"""The first thing a worker process does: watch its supervisor, then become what it is to be.

`python -m replaylake.serve.processes.launch MODULE ARGUMENT...` runs the module. A worker inherits
the listening socket, so one whose supervisor is killed holds the port; and what it is to import
takes a second, on a busy machine several. So the watch is there before.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import threading
import time
from typing import Final

# What a worker compares its parent with, so that one whose supervisor is gone knows at once.
SUPERVISOR: Final = "REPLAYLAKE_SERVE_SUPERVISOR"
STOP_TIMEOUT_S: Final = 5
_ORPHAN_CHECK_S: Final = 0.5
_GIVE_UP_S: Final = STOP_TIMEOUT_S + 3.0


def watch_parent() -> None:
    """Stop this process when the one that watches over it is gone: nobody else would."""
    threading.Thread(target=_stop_when_orphaned, name="orphan-watch", daemon=True).start()


def _stop_when_orphaned() -> None:
    parent = int(os.environ.get(SUPERVISOR) or os.getppid())
    if hasattr(os, "pidfd_open"):  # Linux: it says so at once
        try:
            watched = os.pidfd_open(parent)
        except OSError:
            pass  # gone already, or a kernel before 5.3
        else:
            if os.getppid() == parent:
                select.select([watched], [], [])
            os.close(watched)
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GIVE_UP_S)  # the journals are on disk: nothing answered is lost
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    watch_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
