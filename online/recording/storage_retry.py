"""Refusals: a run waits while the store refuses, as a full disk does, and says so once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from replaylake.datastore.errors import TransientStorageError

# From one try to the next.
RETRY_S: Final = 0.5
_T = TypeVar("_T")


class StorageRetry:
    """What is refused now, and by whom it was asked for."""

    def __init__(
        self, on_remark: Callable[[str], None], should_end: Callable[[], bool] = lambda: False
    ) -> None:
        """on_remark: told when the run begins to wait, and when it goes on.

        should_end: whether the run was asked to end, which it then does without what is refused.
        """
        self._on_remark, self._should_end = on_remark, should_end
        self._reasons: dict[str, str] = {}

    @property
    def blocked_reason(self) -> str | None:
        """Why the run waits, if it does."""
        return next(iter(self._reasons.values()), None)

    def set_blocked(self, who: str, trouble: str | None) -> None:
        """Take what somebody was refused now; None: nothing any more."""
        was_refused = bool(self._reasons)
        if trouble is None:
            self._reasons.pop(who, None)
        else:
            self._reasons[who] = trouble
        if trouble is not None and not was_refused:
            self._on_remark(f"the run waits, and goes on by itself. {trouble}")
        elif was_refused and not self._reasons:
            self._on_remark("the store takes what is written again: the run goes on")

    def retry(self, who: str, call: Callable[[], _T]) -> _T:
        """Call until the store takes it, and return what that returns.

        Raises: TransientStorageError where the run is asked to end before; what else the call
        raises.
        """
        while True:
            try:
                result = call()
            except TransientStorageError as error:
                self.set_blocked(who, str(error))
                if self._should_end():
                    raise
                time.sleep(RETRY_S)
                continue
            self.set_blocked(who, None)
            return result
