"""AlgorithmInfo: what is known of an algorithm by its name, before there are data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgorithmInfo:
    """A line of the list: name, `discrete` or `continuous`, `replaylake` or `d3rlpy`, ...

    provider is `module` for one of the user's own, whose kind is `own`: what it learns from is its
    own affair, and nothing is refused to it that it might know how to use.
    """

    name: str
    actions: str
    provider: str
    head: str
    kind: str
    paper: str

    @property
    def uses_rewards(self) -> bool:
        """Whether it learns from rewards: cloning does not."""
        return self.kind != "imitation"

    @property
    def honors_masks(self) -> bool:
        """Whether it keeps to action masks; d3rlpy has none, and only discrete actions have any."""
        return self.provider != "d3rlpy" and self.actions == "discrete"

    @property
    def uses_values(self) -> bool:
        """Whether it bootstraps, or weighs actions, by what they are worth."""
        return self.kind in ("offline", "off-policy")

    @property
    def consumes_once(self) -> bool:
        """Whether it learns from each step once, and from its own policy's alone: not from a log.

        One of the user's own may: its Algorithm says so.
        """
        return self.kind == "on-policy"

    @property
    def gives_priorities(self) -> bool:
        """Whether it says how far off it was in each step, for prioritized sampling.

        Ours with values do; d3rlpy keeps the errors of single steps to itself. One of the user's
        own may: whether it does shows in its first update.
        """
        return self.provider != "d3rlpy" and (self.uses_values or self.kind == "own")

    @property
    def has_gradients(self) -> bool:
        """Whether its gradients can be averaged with other learners'; d3rlpy steps its own."""
        return self.provider != "d3rlpy"
