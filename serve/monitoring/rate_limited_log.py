"""Log lines that clients cause, at most one a second of a kind: a flood fills no disk."""

from __future__ import annotations

import logging
import time
from typing import Final

_INTERVAL_S: Final = 1.0


class RateLimitedLog:
    """Logs what happens to a route, and with the next line how often it did in between."""

    def __init__(self, logger: logging.Logger, route: str) -> None:
        self._logger, self._route = logger, route
        self._next, self._num_suppressed = 0.0, 0

    def error(self, text: str, error: Exception | None = None) -> None:
        """Log a line, with its traceback for an error, or count it for the next one."""
        self._log(logging.ERROR, text, error)

    def warning(self, text: str) -> None:
        """Log a line, or count it for the next one."""
        self._log(logging.WARNING, text, None)

    def _log(self, level: int, text: str, error: Exception | None) -> None:
        now = time.monotonic()
        if now < self._next:
            self._num_suppressed += 1
            return
        more = f" ({self._num_suppressed} more since the last line)" if self._num_suppressed else ""
        self._next, self._num_suppressed = now + _INTERVAL_S, 0
        self._logger.log(level, "%s: %s%s", self._route, text, more, exc_info=error)
