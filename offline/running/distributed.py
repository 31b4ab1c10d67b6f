"""Distributed: learners of a team as processes of Ray Train, which exchange gradients by gloo.

On GPUs each has its own, and nccl carries them. The first learner leads: it has the run's lease,
and what it tells goes through a mailbox to the process that asked for the run.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from replaylake.datastore.errors import ConfigInvalidError, TrainingError
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.learning.process_group import ProcessGroup
from replaylake.offline.running.local_ray import START_TIMEOUT_S, check_room, open_ray
from replaylake.offline.running.mailbox import LearnerFailure, LearnerLostError, Mailbox
from replaylake.offline.running.training.interruption import Interruption, RunInterrupted

# Called in each learner's process as work(team, callbacks, *arguments).
ProcessFunction = Callable[..., None]
# Learners wait for the one that measures. One that died is noticed by its connections, at once.
_EXCHANGE_TIMEOUT_S: Final = 24 * 3600
_POLL_S: Final = 0.1
# What the leader gets to write down why it ended, before the death of another ends it.
_LEADER_S: Final = 10.0
_NEEDS: Final = "learners 2 or more: found no ray, expected it to start their processes"


class DistributedProcessGroup:
    """A Team over torch.distributed, in one of its processes."""

    def __init__(self, device: torch.device | str) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = torch.device(device)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Put the sum over all learners in place of each value. Raises: LearnerLostError."""
        try:
            dist.all_reduce(values)
        except RuntimeError as error:
            raise LearnerLostError(
                f"learner {self.rank} of {self.size}: found that another "
                f"learner ended ({str(error).splitlines()[0]}), expected its gradients. Correct "
                "the cause of that failure, and resume the run."
            ) from error

    def broadcast(self, value: float) -> float:
        """Return the leader's value. Raises: LearnerLostError."""
        values = torch.tensor([0.0 if self.rank else value], dtype=torch.float64)
        values = values.to(self._device)
        self.all_reduce(values)
        return float(values)


def run_distributed(
    work: ProcessFunction,
    arguments: tuple[Any, ...],
    num_learners: int,
    device: str,
    callbacks: Callbacks,
) -> None:
    """Do some work in processes that make a team, and call back here what its leader tells.

    work: importable in another process, as are its arguments; called there as work(team, callbacks,
    *arguments). Ctrl-C and SIGTERM ask the leader to end.
    Raises: ExtraMissingError without ray; ConfigInvalidError for fewer GPUs or CPUs than learners;
    what the leader raised, RunInterrupted too; TrainingError naming a learner that died, or where
    none starts in five minutes; KeyboardInterrupt where it is interrupted before.
    """
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda and torch.cuda.device_count() < num_learners:
        raise ConfigInvalidError(
            f"training: learners: found {num_learners} on {torch.cuda.device_count()} GPUs, "
            "expected one for each. Train with fewer, or with device cpu."
        )
    interruption = Interruption()
    with (
        open_ray(_NEEDS, num_learners, num_learners if is_cuda else 0) as ray,
        tempfile.TemporaryDirectory(prefix="replaylake-learners-") as folder,
        interruption.handle_signals(),
    ):
        check_room(ray, num_learners, 1, int(is_cuda), "learners")
        mailbox = ray.remote(num_cpus=0)(Mailbox).remote()
        options = {"work": work, "arguments": arguments, "device": device, "mailbox": mailbox}
        fitting = _FitThread(ray, options, num_learners, is_cuda, folder)
        try:
            _wait_for_start(ray, mailbox, fitting, interruption, callbacks)
            while fitting.is_alive():
                fitting.join(_POLL_S)
                _call_back(callbacks, ray.get(mailbox.take_events.remote()))
                if interruption.is_requested or callbacks.is_end_requested:
                    mailbox.request_stop.remote()
            _call_back(callbacks, ray.get(mailbox.take_events.remote()))
            failures = ray.get(mailbox.failures.remote())
        finally:
            # The leader notices, should it be alive: nobody waits for it any more.
            ray.kill(mailbox)
        fitting.check(failures)


def _wait_for_start(
    ray: Any, mailbox: Any, fitting: _FitThread, interruption: Interruption, callbacks: Callbacks
) -> None:
    """Wait until a learner runs, or all failed. Raises: KeyboardInterrupt, TrainingError."""
    until, answer = time.monotonic() + START_TIMEOUT_S, mailbox.has_started.remote()
    while fitting.is_alive():
        if ray.wait([answer], timeout=_POLL_S)[0]:
            if ray.get(answer):
                return
            answer = mailbox.has_started.remote()
            fitting.join(_POLL_S)
        # There is no run yet that could save anything.
        if interruption.is_requested or callbacks.is_end_requested:
            raise KeyboardInterrupt
        if time.monotonic() > until:
            raise TrainingError(
                f"learners: found that not all of them started in {START_TIMEOUT_S:g} s, expected "
                "one per learner. Check what else uses this machine's CPUs and memory, or train "
                "with one learner.",
                parameter="learners",
            )


class _FitThread(threading.Thread):
    """Ray Train at work, in a thread: it leaves signals alone there, which are ours."""

    def __init__(
        self, ray: Any, options: Mapping[str, Any], num: int, is_cuda: bool, folder: str
    ) -> None:
        super().__init__(name="learners", daemon=True)
        import ray.train.torch as ray_torch

        self._num = num
        self._error: BaseException | None = None
        self._trainer = ray_torch.TorchTrainer(
            _learner,
            train_loop_config=dict(options),
            scaling_config=ray.train.ScalingConfig(num_workers=num, use_gpu=is_cuda),
            torch_config=ray_torch.TorchConfig(
                backend="nccl" if is_cuda else "gloo", timeout_s=_EXCHANGE_TIMEOUT_S
            ),
            run_config=ray.train.RunConfig(name="learners", storage_path=folder),
        )
        self.start()

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self._error = error

    def check(self, failures: Mapping[int, LearnerFailure]) -> None:
        """Raise what ended the learners, if anything did: what one failed of before its echo."""
        losses = sorted((failure.is_lost, rank) for rank, failure in failures.items())
        if losses and not losses[0][0]:
            rank = losses[0][1]
            raise failures[rank].error(rank, self._num) from self._error
        if self._error is None and not losses:
            return
        of_ranks = getattr(self._error, "worker_failures", {})
        dead = sorted(rank for rank in of_ranks if rank not in failures)
        if not dead:
            raise TrainingError(
                f"learners: found {self._error or failures}, expected their updates. Train with "
                "one learner for the traceback.",
                parameter="learners",
            ) from self._error
        raise TrainingError(
            f"learner {dead[0]} of {self._num}: its process ended, expected its gradients. It "
            "was killed or crashed: check the memory, and resume the run."
        ) from self._error


def _learner(options: Mapping[str, Any]) -> None:
    """Run in each learner's process."""
    import ray

    mailbox = options["mailbox"]
    ray.get(mailbox.record_start.remote())
    group = DistributedProcessGroup(options["device"])
    callbacks = _relay_callbacks(ray, mailbox) if group.rank == 0 else Callbacks()
    try:
        options["work"](group, callbacks, *options["arguments"])
    except RunInterrupted as error:
        # No failure of this process, which Ray Train would take it for.
        ray.get(mailbox.record_end.remote(group.rank, LearnerFailure.of(error)))
    except BaseException as error:
        ray.get(mailbox.record_end.remote(group.rank, LearnerFailure.of(error)))
        _wait_for_leader(ray, mailbox, group)
        raise
    else:
        ray.get(mailbox.record_end.remote(group.rank, None))


def _wait_for_leader(ray: Any, mailbox: Any, group: ProcessGroup) -> None:
    """Let it write down what it failed of: of this failure Ray Train ends all learners."""
    deadline = time.monotonic() + _LEADER_S
    while group.rank and time.monotonic() < deadline:
        if ray.get(mailbox.has_leader_ended.remote()):
            return
        time.sleep(_POLL_S)


def _relay_callbacks(ray: Any, mailbox: Any) -> Callbacks:
    """Return callbacks that tell the mailbox, and ask it a few times a second."""
    is_asked = False

    def make_forwarder(name: str) -> Callable[..., None]:
        return lambda *arguments: mailbox.post_event.remote(name, arguments)

    def on_progress(*arguments: Any) -> None:
        nonlocal is_asked
        is_asked = ray.get(mailbox.post_event.remote("on_progress", arguments))

    return Callbacks(
        on_reading=make_forwarder("on_reading"),
        on_start=make_forwarder("on_start"),
        on_progress=on_progress,
        on_metrics=make_forwarder("on_metrics"),
        should_end=lambda: is_asked,
    )


def _call_back(callbacks: Callbacks, events: list[tuple[str, tuple[Any, ...]]]) -> None:
    for name, arguments in events:
        callback = getattr(callbacks, name)
        if callback is not None:
            callback(*arguments)
