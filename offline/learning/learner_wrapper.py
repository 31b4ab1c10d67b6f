"""LearnerWrapper: a learner that is another one in all but what its subclass changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.learning.algorithm import OnPolicy
from replaylake.offline.learning.learner import Learner, Update
from replaylake.offline.networks.frame_stack import wrap_frame_stack
from replaylake.offline.networks.graph import PolicyGraph


class LearnerWrapper:
    """Delegates the whole of Learner."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @property
    def discount(self) -> float:
        return self._learner.discount

    @property
    def item(self) -> Transitions | Sequences:
        return self._learner.item

    @property
    def on_policy(self) -> OnPolicy | None:
        return self._learner.on_policy

    @property
    def config(self) -> Mapping[str, Any]:
        return self._learner.config

    @property
    def normalization(self) -> Mapping[str, Any]:
        return self._learner.normalization

    def prepare(self, view: ReplayView) -> None:
        self._learner.prepare(view)

    def update(self, batch: Batch) -> Update:
        return self._learner.update(batch)

    def policy(self) -> PolicyGraph:
        return self._learner.policy()

    def state_dict(self) -> dict[str, Array]:
        return self._learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._learner.load_state_dict(state)


class FrameStackLearner(LearnerWrapper):
    """A learner made for `stack_space(space, num)`, whose policy acts on single observations.

    Its batches come from views with that frame_stack.
    """

    def __init__(self, learner: Learner, num: int) -> None:
        """Raises: SpaceUnsupportedError for a learner of other observations."""
        super().__init__(learner)
        self._num = num
        self.policy()

    def policy(self) -> PolicyGraph:
        """Return the policy over single observations, which remembers the others."""
        return wrap_frame_stack(self._learner.policy(), self._num)
