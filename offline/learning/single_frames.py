"""SingleFrames: a learner of stacked observations whose policy acts on single ones."""

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


class SingleFrames:
    """A Learner made for `stack_space(space, num)`, fed by views with that frame_stack."""

    def __init__(self, learner: Learner, num: int) -> None:
        """Raises: SpaceUnsupportedError for a learner of other observations."""
        self._learner, self._num = learner, num
        self.policy()

    @property
    def discount(self) -> float:
        """Gamma."""
        return self._learner.discount

    @property
    def item(self) -> Transitions | Sequences:
        """What the rows of its batches are."""
        return self._learner.item

    @property
    def on_policy(self) -> OnPolicy | None:
        """How it learns from what its own policy just did."""
        return self._learner.on_policy

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved options."""
        return self._learner.config

    @property
    def normalization(self) -> Mapping[str, Any]:
        """What inputs and outputs are scaled by."""
        return self._learner.normalization

    def prepare(self, view: ReplayView) -> None:
        """See Learner.prepare."""
        self._learner.prepare(view)

    def update(self, batch: Batch) -> Update:
        """Take one gradient step on a batch of stacks."""
        return self._learner.update(batch)

    def policy(self) -> PolicyGraph:
        """Return the policy over single observations, which remembers the others."""
        return wrap_frame_stack(self._learner.policy(), self._num)

    def state_dict(self) -> dict[str, Array]:
        """See Learner.state_dict."""
        return self._learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """See Learner.load_state_dict."""
        self._learner.load_state_dict(state)
