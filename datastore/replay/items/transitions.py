"""Transitions: one step, or n of them, to the observation that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import leaves
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.arguments import check_discount, check_int
from replaylake.datastore.replay.items.output import WindowOutput
from replaylake.datastore.replay.kernels.kernels import n_steps
from replaylake.datastore.replay.layout import KEY, STEPS_LEFT
from replaylake.datastore.replay.protocols import SelectedItems
from replaylake.datastore.replay.records import PADDING, Packed, Records

# A window of n + 1 records lies inside of the array wherever it starts.
_MAX_STEPS: Final = PADDING - 1
# Windows that are copied only to be read stay in the processor's cache: a megabyte of them.
_WINDOW_WORDS: Final = 1 << 17


@dataclass(frozen=True)
class Transitions:
    """An item: one row is a step and the observation after it, or after n steps.

    - discount: gamma, in 0..1.
    - n_step: the maximum number of steps, 1 to 1023. A row has m steps, where m is n_step, or fewer
      at the end of the episode. rewards are sum_{k < m} gamma^k r_{t+k}; discounts are gamma^m, or
      0 if the m-th step terminated; next_observations are those after the m-th step. Actions, keys,
      log-probabilities and further columns are those of the first step (Sutton 1988). Truncation
      bootstraps from the final observation. If the log lacks the observation after the m-th step, m
      is one less, because the m-th step's own observation is known.
    - only_bootstrappable: leave out steps without a successor. Cloning does not need one.
    - returns: include the discounted sum of the rewards from each step to the end of its episode,
      or to the next gap, as the field returns, whatever n_step is. Nothing is added after a time
      limit: these are Monte-Carlo returns of the recorded rewards. Not in a live view.
    - next_actions: include the action of the following step, or the step's own action if none
      follows. Only for n_step 1, and not in a live view.

    If frames are stacked, observations and next_observations [B, frame_stack, *obs] of single steps
    overlap in memory: a change to one also changes the other.
    """

    discount: float = 0.99
    n_step: int = 1
    only_bootstrappable: bool = True
    returns: bool = False
    next_actions: bool = False

    def __post_init__(self) -> None:
        check_discount("transitions", self.discount)
        advice = "For returns of whole episodes sample Episodes."
        check_int("transitions: n_step", self.n_step, minimum=1, maximum=_MAX_STEPS, advice=advice)
        if self.next_actions and self.n_step > 1:
            raise ConfigInvalidError(
                f"transitions: found next_actions with n_step {self.n_step}, expected n_step 1: "
                "what was done after the last of n steps is not looked up. Leave one of both out."
            )

    def starts(self, packed: Packed) -> NDArray[np.int64]:
        """Return the steps that can be sampled."""
        return packed.bootstrappable if self.only_bootstrappable else packed.steps

    def assembler(self, records: Records) -> TransitionAssembler:
        """Return the object that copies the rows.

        Raises: ConfigInvalidError for returns or next_actions in a live view.
        """
        return TransitionAssembler(records, self)


class TransitionOutput(WindowOutput):
    """Memory for some transitions.

    A row of one step is the window from the first frame of its stack to the last observation. Of n
    steps it is two, the step's stack and the last one, which may be any number of steps apart.
    """

    def __init__(self, records: Records, num: int, item: Transitions) -> None:
        stack = records.layout.frame_stack
        super().__init__(records, num, _num_records(stack, item.n_step))
        self.steps = self.rows[:, stack - 1]
        self.terminated: Any = self.steps[schema.TERMINATED]
        self.discounts: NDArray[np.float32] = np.empty(num, np.float32)
        self.rewards: NDArray[np.float32] | None = None
        if item.n_step > 1:
            self.rewards = np.empty(num, np.float32)
        self.returns: NDArray[np.float32] | None = None
        if item.returns:
            self.returns = np.empty(num, np.float32)
        single = stack == 1
        self.batch = self.to_batch(
            self.steps,
            self.rows[:, -1],
            self.layout.observations(self.steps if single else self.rows[:, :stack]),
            self.layout.observations(self.rows[:, -1] if single else self.rows[:, -stack:]),
            discounts=self.discounts,
            rewards=self.rewards,
            returns=self.returns,
            with_next_actions=item.next_actions,
        )

    def find_next_actions(self, records: Records) -> None:
        """Put into each row's last record, where that is a tail, the action that follows.

        That of the run that the tail leads to, or the row's own where it leads nowhere.
        """
        rows: Any = self.rows
        tails = np.flatnonzero(rows[STEPS_LEFT][:, -1] == 0)
        if not len(tails):
            return
        heads = rows[KEY][tails, -1, 0].astype(np.int64) - 1
        has_next = heads >= 0
        for name, _ in leaves(self.layout.spec.action_space, schema.ACTION):
            rows[name][tails, -1] = self.steps[name][tails]
            if has_next.any():
                rows[name][tails[has_next], -1] = records.take(name, heads[has_next])


class TransitionAssembler:
    """Copies steps and what follows them to records of which the batch's fields are views."""

    def __init__(self, records: Records, item: Transitions) -> None:
        self.records = records
        self._item = item
        if item.next_actions and records.runs is None:
            raise ConfigInvalidError(
                "transitions: found next_actions in a view that grows, expected one of a snapshot: "
                "there the step that follows may not have come yet. Use "
                "dataset.snapshot().replay(...)."
            )
        self._returns = records.returns(item.discount) if item.returns else None
        layout = records.layout
        self._stack = layout.frame_stack
        self._discounted: NDArray[np.float64] = np.array(
            [item.discount**m for m in range(item.n_step + 1)]
        )
        self.row_bytes = _num_records(self._stack, item.n_step) * layout.dtype.itemsize

    def assemble(
        self,
        positions: NDArray[np.int64],
        selected: SelectedItems,
        out: TransitionOutput | None = None,
    ) -> TransitionOutput:
        """Copy the steps at `positions` and what follows them.

        Cost: frame_stack + 1 records a row, of n steps 2 frame_stack and n rewards. Of n steps rows
        that reach over a link, and all of them in a view that grows, are copied twice.
        """
        if out is None:
            out = TransitionOutput(self.records, len(positions), self._item)
        if out.rewards is None:
            first = positions if self._stack == 1 else positions - (self._stack - 1)
            self.records.windows(first, self._stack + 1, out.words)
            out.discounts.fill(self._item.discount)
            out.discounts[out.terminated] = 0.0
        else:
            self._fill_n_steps(positions, out, out.rewards)
        if self._returns is not None and out.returns is not None:
            self._returns.take(positions, out=out.returns, mode="clip")
        if self._item.next_actions:
            out.find_next_actions(self.records)
        out.number(selected)
        return out

    def _fill_n_steps(
        self, positions: NDArray[np.int64], out: TransitionOutput, rewards: NDArray[np.float32]
    ) -> None:
        records = self.records
        if records.runs is None:
            # Only `windows` copies as of one moment.
            self._fill_along_links(positions, np.arange(len(positions)), out, rewards)
            return
        nums = self._sum_up(records.words, positions, out.words, rewards, out.discounts)
        if records.has_links and len(linked := np.flatnonzero(nums < 0)):
            self._fill_along_links(positions[linked], linked, out, rewards)

    def _fill_along_links(
        self,
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
        out: TransitionOutput,
        rewards: NDArray[np.float32],
    ) -> None:
        """Fill in some rows from windows, in which links are followed already."""
        before, width = self._stack - 1, self.records.layout.num_words
        length = before + self._item.n_step + 1
        num = max(1, _WINDOW_WORDS // (length * width))
        for first in range(0, len(rows), num):
            some = rows[first : first + num]
            at = positions[first : first + num] - before
            windows = self.records.windows(at, length).reshape(-1, width)
            places = np.arange(before, len(windows), length)
            ends = np.empty((len(some), out.words.shape[1]), np.uint64)
            sums, discounts = np.empty((2, len(some)), np.float32)
            self._sum_up(windows, places, ends, sums, discounts)
            out.words[some], rewards[some], out.discounts[some] = ends, sums, discounts

    def _sum_up(
        self,
        words: NDArray[np.uint64],
        places: NDArray[np.int64],
        out: NDArray[np.uint64],
        rewards: NDArray[np.float32],
        discounts: NDArray[np.float32],
    ) -> NDArray[np.int64]:
        return n_steps(
            words,
            places,
            self._item.n_step,
            self._stack,
            self.records.fields,
            self._discounted,
            out,
            rewards,
            discounts,
        )


def _num_records(stack: int, n_step: int) -> int:
    """Return the records that a row takes."""
    return stack + (1 if n_step == 1 else stack)
