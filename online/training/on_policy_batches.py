"""On-policy batches: consecutive sequences, each handed out once, in the order of their arrival.

For algorithms that correct for the policy that acted; steps that are too old are left out. Which
sequences were taken is known by their first and last steps' keys, and is in the checkpoint: what a
run that goes on finds in the lake lies in another order than it came in (pieces are recorded
together, and merged), so no position in it would say. Nor would the first key alone: of an episode
whose beginning is no longer in memory, sequences begin at other steps than they did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.schema import POLICY_VERSION
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.offline.learning.learner import Learner, Update
from replaylake.online.training.config import OnlineConfig
from replaylake.online.training.replay_batches import draw_batch, move_batch


class OnPolicyBatches:
    """Sequences taken once, in order."""

    samples_once = True

    def __init__(
        self, view: LiveView, learner: Learner, config: OnlineConfig, timings: Timings
    ) -> None:
        """Raises: ConfigInvalidError for an algorithm whose batches are replayed."""
        if learner.on_policy is None:
            raise ConfigInvalidError("online: found an algorithm that is not on-policy.")
        plan = learner.on_policy
        self.version = 0
        self.num_rows = 1
        self.num_taken = 0
        self._num_sequences = plan.num_sequences
        self._max_staleness = config.max_staleness
        self._device, self._timings = config.device, timings
        self._sampler = view.in_order(plan.num_sequences, learner.item)
        self._consumed = _ConsumedSequences(config.capacity)
        # Those that were taken before the run went on, and were not come across since.
        self._earlier: set[bytes] = set()
        self._num_left_out = 0
        self._staleness: list[float] = []

    @property
    def is_ready(self) -> bool:
        """Whether a whole batch has come that nobody has had."""
        return self._sampler.num_available >= self._num_sequences

    def sample(self) -> Batch | None:
        """Take the next batch; None where all of it was too old, taken before, or is gone."""
        self.num_taken = 0
        try:
            batch, mask = self._next()
            while not mask.any() and self.is_ready:
                batch, mask = self._next()
        except EmptyReplayError:
            # Steps that came meanwhile may have pushed out all that was ready.
            return None
        self.num_taken = int(mask.sum())
        if not self.num_taken:
            return None
        staleness = self.version - np.asarray((batch.columns or {})[POLICY_VERSION])
        self._staleness.append(float(staleness[mask].mean()))
        if self._max_staleness is not None:
            is_old = (staleness > self._max_staleness) & mask
            self._num_left_out += int(is_old.sum())
            mask = mask & ~is_old
            if not mask.any():
                return None
        return move_batch(replace(batch, mask=mask), self._device, self._timings)

    def update_priorities(self, batch: Batch, result: Update) -> None:
        """Raises: ConfigInvalidError: nothing is drawn by priorities."""
        raise ConfigInvalidError(
            "online: prioritized: found an algorithm that learns from each step once, expected one "
            "that learns from replayed steps. Leave prioritized out."
        )

    def take_metrics(self) -> dict[str, float]:
        """Return the mean staleness in versions, and how many steps were left out as too old."""
        staleness, self._staleness = self._staleness, []
        metrics = {"steps_too_old": float(self._num_left_out)}
        return metrics | ({"staleness": float(np.mean(staleness))} if staleness else {})

    def state_dict(self) -> dict[str, Any]:
        """Return what was taken, as far back as the view can have it: 36 bytes a sequence."""
        return {"taken": self._consumed.state_dict(), "num_left_out": self._num_left_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was not taken, of what there is now; before anything is sampled.

        A batch in which some were is smaller by those.
        """
        self._num_left_out = state["num_left_out"]
        self._consumed.load_state_dict(state["taken"])
        self._earlier = {key.tobytes() for key in self._consumed.keys.reshape(-1, 2)}

    def _next(self) -> tuple[Batch, NDArray[np.bool_]]:
        """Return what comes next, and bool [B, T] which of its steps nobody has had."""
        batch = draw_batch(self._sampler, self._timings)
        mask: Any = batch.mask
        if self._earlier:
            mask = mask & self._is_new(batch.keys, mask)[:, None]
        self._consumed.add(batch.keys, mask)
        return batch, mask

    def _is_new(self, keys: NDArray[np.uint64], mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return bool [B]: which sequences have no step that was taken before the run went on.

        keys: uint64 [B, T, 2]. None is longer than those taken then, so one that shares a step with
        one of these has its first or its last.
        """
        is_new = np.ones(len(keys), np.bool_)
        for number, (steps, there) in enumerate(zip(keys, mask, strict=True)):
            known = self._earlier.intersection(key.tobytes() for key in steps[there])
            is_new[number] = not known
            self._earlier -= known
        return is_new


class _ConsumedSequences:
    """Keys of the first and last steps of the sequences that were taken, the newest ones.

    At least those of twice as many steps as a view keeps: whatever a view that is made anew has.
    """

    def __init__(self, capacity: int) -> None:
        self._most = 2 * capacity
        self._parts: deque[tuple[NDArray[np.uint64], NDArray[np.int32]]] = deque()
        self._num_steps = 0

    @property
    def keys(self) -> NDArray[np.uint64]:
        """uint64 [N, 2, 2]: of each the first step's and the last's, in the order of taking."""
        return np.concatenate([np.zeros((0, 2, 2), np.uint64), *(keys for keys, _ in self._parts)])

    def add(self, keys: NDArray[np.uint64], mask: NDArray[np.bool_]) -> None:
        """Note a batch: keys uint64 [B, T, 2]; mask bool [B, T], all false of what was not."""
        is_taken = mask.any(axis=1)
        keys, mask = keys[is_taken], mask[is_taken]
        rows = np.arange(len(keys))
        first, last = mask.argmax(axis=1), mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
        ends = np.stack([keys[rows, first], keys[rows, last]], axis=1)
        self._note(ends, mask.sum(axis=1, dtype=np.int32))

    def state_dict(self) -> dict[str, Any]:
        """Return them, as a checkpoint keeps arrays."""
        lengths = [np.zeros(0, np.int32), *(lengths for _, lengths in self._parts)]
        return {"keys": self.keys, "lengths": np.concatenate(lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._parts.clear()
        self._num_steps = 0
        self._note(np.asarray(state["keys"]), np.asarray(state["lengths"]))

    def _note(self, keys: NDArray[np.uint64], lengths: NDArray[np.int32]) -> None:
        self._parts.append((keys, lengths))
        self._num_steps += int(lengths.sum())
        while self._num_steps - (oldest := int(self._parts[0][1].sum())) >= self._most:
            self._parts.popleft()
            self._num_steps -= oldest
