"""RateLimiter: how far collecting and learning may run apart, with Reverb's semantics.

Inserts are steps that can be sampled, samples are steps handed to the learner (Cassirer et al.
2021, "Reverb: A Framework for Experience Replay", section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from replaylake.datastore.errors import ConfigInvalidError


@dataclass(frozen=True)
class Ratio:
    """What a limiter holds to.

    With inserts*samples_per_insert - samples as the difference, an insert is allowed while there
    are no more than min_size items, or where the difference stays at max_diff or below; a sample is
    allowed where there are min_size items or more and the difference stays at min_diff or above.
    """

    samples_per_insert: float
    min_size: int = 1
    min_diff: float = -math.inf
    max_diff: float = math.inf

    def __post_init__(self) -> None:
        if not self.samples_per_insert > 0 or self.min_size < 1 or self.min_diff > self.max_diff:
            raise ConfigInvalidError(
                f"rate limiter: found samples_per_insert {self.samples_per_insert}, min_size "
                f"{self.min_size}, min_diff {self.min_diff} and max_diff {self.max_diff}, expected "
                "samples_per_insert above 0, min_size of 1 or more and min_diff at most max_diff."
            )


def min_size(items: int) -> Ratio:
    """Let samples wait for so many items, and nothing else wait for anything."""
    return Ratio(samples_per_insert=1.0, min_size=items)


def sample_to_insert_ratio(
    samples_per_insert: float, items: int, error_buffer: float | tuple[float, float]
) -> Ratio:
    """Hold samples to a ratio of inserts, counted from the first `items` on.

    error_buffer: how many samples the difference may be off below and above.
    Raises: ConfigInvalidError if no insert and no sample might fit into it.
    """
    below, above = error_buffer if isinstance(error_buffer, tuple) else (error_buffer, error_buffer)
    if not below + above >= 2 * max(1.0, samples_per_insert):
        raise ConfigInvalidError(
            f"rate limiter: found an error buffer of {below:g} below and {above:g} above, expected "
            f"at least {2 * max(1.0, samples_per_insert):g} together, twice the change of an "
            "insert or a sample, because less may block both. Increase it."
        )
    offset = samples_per_insert * items
    return Ratio(samples_per_insert, items, offset - below, offset + above)


class RateLimiter:
    """Counts inserts, samples and deletes, and says what is allowed; it waits for nothing."""

    def __init__(self, ratio: Ratio) -> None:
        self.ratio = ratio
        self.num_inserts = 0
        self.num_samples = 0
        self.num_deletes = 0

    def can_insert(self, num: int = 1, *, pending: int = 0) -> bool:
        """Return whether `num` more items may come, beside those promised and not yet inserted."""
        ratio, inserts = self.ratio, self.num_inserts + pending
        if inserts - self.num_deletes + num <= ratio.min_size:
            return True
        return (inserts + num) * ratio.samples_per_insert - self.num_samples <= ratio.max_diff

    def num_insertable(self, limit: int, *, pending: int = 0) -> int:
        """Return how many items may come now, at most `limit`, beside those that are pending."""
        ratio, inserts = self.ratio, self.num_inserts + pending
        by_size = ratio.min_size - (inserts - self.num_deletes)
        room = (ratio.max_diff + self.num_samples) / ratio.samples_per_insert - inserts
        by_ratio = limit if room >= limit else math.floor(room)
        return max(0, min(limit, max(by_size, by_ratio)))

    def can_sample(self, num: int = 1) -> bool:
        """Return whether `num` items may be sampled."""
        ratio = self.ratio
        if self.num_inserts - self.num_deletes < ratio.min_size:
            return False
        return (
            self.num_inserts * ratio.samples_per_insert - self.num_samples - num >= ratio.min_diff
        )

    def insert(self, num: int = 1) -> None:
        """Count items that came."""
        self.num_inserts += num

    def sample(self, num: int = 1) -> None:
        """Count items that were sampled."""
        self.num_samples += num

    def delete(self, num: int = 1) -> None:
        """Count items that fell out."""
        self.num_deletes += num

    def state_dict(self) -> dict[str, int]:
        return {
            "num_inserts": self.num_inserts,
            "num_samples": self.num_samples,
            "num_deletes": self.num_deletes,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.num_inserts = state["num_inserts"]
        self.num_samples = state["num_samples"]
        self.num_deletes = state["num_deletes"]
