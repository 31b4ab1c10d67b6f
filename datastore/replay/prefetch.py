"""Prefetch: a thread that draws batches while the learner learns from earlier ones."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.arguments import check_int
from replaylake.datastore.replay.batch_source import (
    BatchSource,
    PrioritizedSource,
    check_batch_source,
)
from replaylake.datastore.replay.saved_state import KIND, read_state
from replaylake.datastore.replay.tokens.token_batch import TokenBatch

_NAME: Final = "prefetch"


@dataclass(frozen=True, eq=False)
class _Task:
    """One thing for the thread to do, in its turn: draw a batch, or something else.

    Of tasks that are not answered only errors come back.
    """

    call: Callable[[], Any]
    is_draw: bool = False
    is_answered: bool = True


@dataclass(frozen=True)
class _TaskResult:
    """What came of a task: a value, or an error in its place."""

    task: _Task
    value: Any = None
    error: BaseException | None = None


# After a draw that failed, those asked for behind it are left out, up to this task.
_RESUME: Final = _Task(lambda: None, is_answered=False)


def prefetch(sampler: BatchSource, num: int = 2) -> PrefetchSampler:
    """Return a sampler whose thread draws up to `num` batches of another sampler in advance.

    Use it in a `with` statement, or close it. Do not use the other sampler in the meantime. Raises:
    ConfigInvalidError.
    """
    return PrefetchSampler(sampler, num)


class PrefetchSampler:
    """Draws ahead in a thread; the batches are those that the sampler would give, in its order.

    The thread does one thing after another in the order in which it was asked, so batches do not
    depend on which of both is faster: batch i is drawn when `sample` was called i - num times, with
    the priorities that were given until then. Priorities so lag `num` batches behind.

    Pays where a batch takes longer than handing it from thread to thread (30 us and more) and the
    learner leaves the interpreter to others meanwhile, as torch's operations do: for frames, long
    sequences, and copies to a GPU.
    """

    def __init__(self, sampler: BatchSource, num: int) -> None:
        """Start the thread. Raises: ConfigInvalidError."""
        check_batch_source("prefetch", sampler)
        num = check_int("prefetch: num", num, minimum=1, advice="So many batches are kept ready.")
        reuse = getattr(sampler, "reuse", 0)
        if 0 < reuse < num + 2:
            raise ConfigInvalidError(
                f"prefetch: found a sampler of reuse {reuse} and {num} batches drawn ahead, "
                f"expected reuse of at least {num + 2}, or 0: a batch would be overwritten while "
                "it is in use."
            )
        self._num = num
        self._sampler = sampler
        self._draw = _Task(sampler.sample, is_draw=True)
        # Draws asked for whose batches were not handed on.
        self._num_asked = 0
        # Answers that came while another one was waited for.
        self._ready: deque[_TaskResult] = deque()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_TaskResult] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._tasks, self._answers), name="prefetch", daemon=True
        )
        self._thread.start()
        # The thread knows the queues alone: where this is forgotten unclosed, the thread ends too.
        self._end = weakref.finalize(self, self._tasks.put, None)

    def sample(self) -> Batch[Any]:
        """Return the next batch. Raises: what the sampler raised when it drew it.

        After that nothing is drawn until this is called once more.
        """
        self._check_open()
        while self._num_asked <= self._num:
            self._tasks.put(self._draw)
            self._num_asked += 1
        answer = self._ready.popleft() if self._ready else self._answers.get()
        if answer.error is not None:
            if answer.task.is_draw:
                self._resume()
            raise answer.error
        self._num_asked -= 1
        batch: Batch[Any] = answer.value
        return batch

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Set the priorities of rows, behind the batches that are being drawn.

        What the sampler refuses is raised by the next `sample`. Raises: ConfigInvalidError if it
        does not draw by priorities.
        """
        self._check_open()
        sampler = self._sampler
        if not isinstance(sampler, PrioritizedSource):
            raise ConfigInvalidError(
                "prefetch: found a sampler that does not draw by priorities, expected one. Make it "
                "with view.prioritized, or leave update_priorities out."
            )
        # Copies, as by the time of the thread's turn both may be overwritten.
        own = _copy_value(indices), _copy_value(priorities)
        self._tasks.put(_Task(lambda: sampler.update_priorities(*own), is_answered=False))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch handed out last: with those drawn ahead, copied.

        So it is exact for any sampler. Cost: their memory, and waiting for them to be drawn.
        """
        state = self._call_in_thread(self._sampler.state_dict)
        batches = [answer.value for answer in self._ready if answer.error is None]
        return {
            KIND: _NAME,
            "sampler": state,
            "ahead": [_copy_value(vars(batch)) for batch in batches],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises: ConfigInvalidError, changing nothing."""
        with read_state(_NAME, state):
            ahead = [_TaskResult(self._draw, _restore_batch(fields)) for fields in state["ahead"]]
            self._call_in_thread(lambda: self._sampler.load_state_dict(state["sampler"]))
        self._ready.clear()
        self._resume()
        self._ready.extend(ahead)
        self._num_asked = len(self._ready)

    def close(self) -> None:
        """End the thread, after the batch that it is drawing. Again: nothing."""
        self._end()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch[Any]]:
        while True:
            yield self.sample()

    def _call_in_thread(self, call: Callable[[], Any]) -> Any:
        """Call something in the thread's turn and wait for it, keeping what comes before."""
        self._check_open()
        task = _Task(call)
        self._tasks.put(task)
        while (answer := self._answers.get()).task is not task:
            self._ready.append(answer)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _resume(self) -> None:
        self._tasks.put(_RESUME)
        self._num_asked = 0

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ConfigInvalidError("prefetch: is closed. Create another one from the sampler.")


def _work(tasks: queue.SimpleQueue[_Task | None], answers: queue.SimpleQueue[_TaskResult]) -> None:
    """Do one task after another until there is None."""
    has_failed = False
    while (task := tasks.get()) is not None:
        if task is _RESUME:
            has_failed = False
        if task.is_draw and has_failed:
            continue
        try:
            value = task.call()
        except BaseException as error:
            # Also an exit: whoever waits for the answer gets it.
            has_failed = has_failed or task.is_draw
            answers.put(_TaskResult(task, error=error))
        else:
            if task.is_answered:
                answers.put(_TaskResult(task, value))


def _restore_batch(fields: Mapping[str, Any]) -> Batch[Any] | TokenBatch[Any]:
    own = _copy_value(fields)
    return TokenBatch(**own) if "token_ids" in own else Batch(**own)


def _copy_value(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _copy_value(sub) for key, sub in value.items()}
    # A tensor, which only to_torch.py knows, stays one, where it is.
    return value.clone() if hasattr(value, "clone") else np.array(value)
