"""DataParallelLearner: learners that make each update together, each on its part of the batch.

All draw the same batches and hold the same weights. Gradients are averaged before they are stepped
down; losses and priorities are those of the whole batch again afterwards. The first learner alone
measures, saves and registers, and says when it is over: the others follow what it decides, and
nobody waits for one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.offline.learning.learner import Learner, Update
from replaylake.offline.learning.learner_wrapper import LearnerWrapper
from replaylake.offline.learning.process_group import ProcessGroup
from replaylake.offline.running.training.policy_selection import Measure, MeasureName
from replaylake.offline.running.training.trainer import GPU_CHECK_UPDATES


def make_gradient_average(group: ProcessGroup) -> Callable[[torch.Tensor], None] | None:
    """Return what averages gradients over the group, in place; None for a group of one."""
    if group.size == 1:
        return None

    def average(gradients: torch.Tensor) -> None:
        group.all_reduce(gradients)
        gradients.mul_(1 / group.size)

    return average


class DataParallelLearner(LearnerWrapper):
    """A learner that is given whole batches and learns from its part of them.

    The weights are those of one learner with the whole batch, to float32's rounding, where a loss
    is a mean over rows.
    """

    def __init__(
        self, learner: Learner, group: ProcessGroup, device: torch.device | str = "cpu"
    ) -> None:
        """learner: averages its gradients over the group. device: where it computes."""
        super().__init__(learner)
        self._group = group
        self._device = torch.device(device)
        # Reading the leader's decision waits for a GPU.
        self._read_updates = 1 if self._device.type == "cpu" else GPU_CHECK_UPDATES
        self._num_updates = 0
        self._is_requested: Callable[[], bool] = lambda: False
        self._is_ending = False

    def should_end(self, is_requested: Callable[[], bool]) -> Callable[[], bool]:
        """Return whether the leader was asked to end in the last update, by what it knows."""
        self._is_requested = is_requested
        return lambda: self._is_ending

    def update(self, batch: Batch) -> Update:
        """Learn from this learner's part; return metrics and priorities of the whole batch.

        Raises: ConfigInvalidError for a batch that cannot be divided; TrainingError where another
        learner is gone.
        """
        num, size = len(batch), self._group.size
        if num % size:
            raise ConfigInvalidError(
                f"training: found a batch of {num} rows for {size} learners, expected a multiple."
            )
        part = slice(num // size * self._group.rank, num // size * (self._group.rank + 1))
        result = self._learner.update(batch_part(batch, part))
        names, priorities = sorted(result.metrics), result.priorities
        # One exchange for all: it costs the same for one number and for some hundreds.
        is_asked = self._group.rank == 0 and self._is_requested()
        shared = torch.zeros(1 + len(names) + (0 if priorities is None else num))
        shared[0] = float(is_asked)
        if priorities is not None:
            shared[1 + len(names) :][part] = torch.from_numpy(np.asarray(priorities))
        shared = shared.to(self._device)
        for i, name in enumerate(names):
            shared[1 + i] = result.metrics[name] / size  # type: ignore[operator]
        self._group.all_reduce(shared)
        self._num_updates += 1
        if self._num_updates % self._read_updates == 0:
            self._is_ending = bool(shared[0])
        metrics = dict(zip(names, shared[1 : 1 + len(names)].unbind(), strict=True))
        if priorities is not None:
            priorities = shared[1 + len(names) :].cpu().numpy()
        return Update(metrics, priorities)


def sync_stop(learner: Learner, is_requested: Callable[[], bool]) -> Callable[[], bool]:
    """Return whether the run ends here: as asked, or in a group what its leader was asked."""
    if isinstance(learner, DataParallelLearner):
        return learner.should_end(is_requested)
    return is_requested


@dataclass(frozen=True)
class LeaderMeasure:
    """A measure that the leader takes, and tells the others."""

    measure: Measure
    group: ProcessGroup

    @property
    def name(self) -> MeasureName:
        return self.measure.name

    @property
    def higher_is_better(self) -> bool:
        """Whether it is a return and no loss."""
        return self.measure.higher_is_better

    def check(self, policy: Any) -> None:
        """Refuse as the measure does, on every learner."""
        self.measure.check(policy)

    def __call__(self, policy: Any) -> float:
        """Return the leader's number, on every learner."""
        return self.group.broadcast(self.measure(policy) if self.group.rank == 0 else 0.0)


def batch_part(batch: Batch, rows: slice) -> Batch:
    """Return some rows of a batch, as views."""
    return Batch(**{name: _part(value, rows) for name, value in vars(batch).items()})


def _part(value: Any, rows: slice) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _part(sub, rows) for key, sub in value.items()}
    return value[rows]
