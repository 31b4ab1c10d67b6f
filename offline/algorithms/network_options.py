"""Network options: those that every algorithm of one learning rate has, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from replaylake.offline.learning.options import expect


class NetworkOptions(Protocol):
    """hidden_sizes: units of each hidden layer, of all networks. learning_rate: of Adam."""

    @property
    def hidden_sizes(self) -> Sequence[int]: ...
    @property
    def learning_rate(self) -> float: ...


def check_network(name: str, config: NetworkOptions) -> None:
    """Refuse a learning rate or sizes out of range. Raises: ConfigInvalidError."""
    rate = config.learning_rate
    expect(0 < rate < math.inf, f"{name}: learning_rate", rate, "a finite number above 0")
    check_sizes(name, config.hidden_sizes)


def check_sizes(name: str, sizes: Sequence[int]) -> None:
    """Refuse hidden layers without units; there may be no layer. Raises: ConfigInvalidError."""
    expect(all(size > 0 for size in sizes), f"{name}: hidden_sizes", sizes, "positive sizes")
