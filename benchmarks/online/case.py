"""Cases: what is learned, with what, for every system alike.

Needs nothing but the standard library: it is imported in the peers' environments too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

STEPS_PER_S: Final = "steps/s"
SECONDS: Final = "s"
MS: Final = "ms"


@dataclass(frozen=True)
class Learning:
    """One environment, an update of one batch after each step from `learning_starts` on.

    Networks of two hidden layers, Adam, every step kept. explore_steps: over so many, epsilon falls
    from 1 to 0.05. target_period: updates between two copies to DQN's target network; SAC's
    averages with 0.005 each update.
    """

    algorithm: str
    env_id: str
    num_steps: int
    learning_starts: int
    hidden: int
    batch_size: int
    learning_rate: float
    discount: float = 0.99
    explore_steps: int = 10_000
    target_period: int = 500

    @property
    def workload(self) -> str:
        """The row of the table."""
        name, env = self.algorithm.upper(), self.env_id.split("-")[0]
        updates = self.num_steps - self.learning_starts
        return (
            f"{name} {env}, {self.num_steps:,} steps, {updates:,} updates of {self.batch_size}, "
            f"{self.hidden}x{self.hidden}"
        )

    @property
    def sizes(self) -> list[int]:
        """Units of each hidden layer."""
        return [self.hidden, self.hidden]


DQN: Final = Learning("dqn", "CartPole-v1", 20_000, 1_000, 64, 64, 1e-3)
SAC: Final = Learning("sac", "Pendulum-v1", 5_000, 100, 256, 256, 3e-4)
LEARNING: Final = (DQN, SAC)

# An update takes about as long as two workers' step: neither side has the other for nothing.
SLOW_STEP_S: Final = 0.005
SLOW: Final = Learning(
    "sac", "benchmarks.online.environment:slow_pendulum", 3_000, 100, 128, 256, 3e-4
)
SLOW_WORKLOAD: Final = "SAC, a step of 5 ms, 2 workers, an update a step"
LATENCY_WORKLOAD: Final = "a step taken to it samplable, DQN CartPole, p50"


class Figure(NamedTuple):
    """A line of the output; of the system itself, or of a variant of it."""

    workload: str
    figure: float
    unit: str
    variant: str = ""


# Measures and yields the figures of one kind of workloads.
Measure = Callable[[Path, Any], Iterator[Figure]]
