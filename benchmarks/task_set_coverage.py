"""How often the 95% intervals of `evaluate --dataset` contain the truth, in simulated task sets.

A population of tasks has difficulties of a known distribution. A trial draws tasks from it and
samples of each, and estimates pass@k as `evaluate --dataset` does; the truth is the mean over the
population. Beside it stand the intervals that are usual: Student's t over the tasks, the percentile
bootstrap and the studentized one (over tasks, 1,000 resamples).

Paired differences are of two policies on the same tasks, of which the second has higher logits.
`false` is the share of trials in which the interval lies above the truth: what a gate would take
for an improvement that is not there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.offline.evaluation.intervals import student_t_quantile
from replaylake.offline.evaluation.task_sets.estimates import (
    estimate_difference,
    estimate_mean,
    pass_at_k,
)

SIZES: Final = (20, 100, 500)
PASSES: Final = (0.93, 0.97)
# Samples of each task, and k.
SAMPLINGS: Final = ((1, 1), (4, 1), (4, 4), (32, 1), (32, 8))
_LEVEL: Final = 0.95
_RESAMPLES: Final = 1000


@dataclass(frozen=True)
class Population:
    """Success rates of tasks: Beta with this mean and a + b = concentration, or two kinds.

    Two kinds (concentration 0): rate 0.9 in a share `mean` of the tasks, 0.02 in the others.
    """

    mean: float
    concentration: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        if not self.concentration:
            return np.where(rng.random(shape) < self.mean, 0.9, 0.02)
        a, b = self.mean * self.concentration, (1 - self.mean) * self.concentration
        return rng.beta(a, b, shape)

    def truth(self, k: int) -> float:
        """Return the mean pass@k: 1 - E[(1 - p)^k]."""
        if not self.concentration:
            return 1 - self.mean * 0.1**k - (1 - self.mean) * 0.98**k
        a, b = self.mean * self.concentration, (1 - self.mean) * self.concentration
        log = math.lgamma(b + k) - math.lgamma(b) + math.lgamma(a + b) - math.lgamma(a + b + k)
        return 1 - math.exp(log)


# From tasks that are all solved or never solved (0.5) to tasks that are nearly alike (10).
POPULATIONS: Final = (
    *(Population(m, c) for c in (0.5, 2.0, 10.0) for m in (0.02, 0.1, 0.3, 0.5, 0.8, 0.97)),
    Population(0.1, 0.0),
    Population(0.5, 0.0),
)


@dataclass(frozen=True)
class Coverage:
    """Shares of trials: in the interval, and with the interval above the truth; mean width."""

    inside: float
    above: float
    width: float


def measure(intervals: Sequence[tuple[float, float]], truth: float) -> Coverage:
    lows, highs = np.array(intervals).T
    # Ends that are the truth but for rounding contain it.
    above, below = lows > truth + 1e-9, highs < truth - 1e-9
    return Coverage(
        float(1 - (above | below).mean()), float(above.mean()), float((highs - lows).mean())
    )


def simulate(
    population: Population, num_tasks: int, num: int, k: int, trials: int, seed: int
) -> Iterator[Array]:
    """Yield pass@k of each task, float64 [num_tasks], for each trial."""
    rng = np.random.default_rng([seed, num_tasks, num, k])
    table = _tabulate(num, k)
    for _ in range(trials):
        yield table[rng.binomial(num, population.draw(rng, (num_tasks,)))]


def simulate_pairs(
    population: Population,
    shift: float,
    num_tasks: int,
    samples: tuple[int, int],
    k: int,
    trials: int,
    seed: int,
) -> Iterator[tuple[Array, Array]]:
    """Yield pass@k of each task under the second policy and the first, for each trial."""
    rng = np.random.default_rng([seed, num_tasks, *samples, k])
    first, second = (_tabulate(num, k) for num in samples)
    for _ in range(trials):
        rates = population.draw(rng, (num_tasks,))
        yield (
            second[rng.binomial(samples[1], _shift(rates, shift))],
            first[rng.binomial(samples[0], rates)],
        )


def _tabulate(num: int, k: int) -> Array:
    """Return pass@k by the number of samples that passed: float64 [num + 1]."""
    return pass_at_k(np.full(num + 1, num), np.arange(num + 1), k)


def true_difference(population: Population, shift: float, k: int) -> float:
    """Return the difference of pass@k over a million tasks; exactly 0 without a shift."""
    if not shift:
        return 0.0
    rates = population.draw(np.random.default_rng(7), (1_000_000,))
    return float(((1 - rates) ** k - (1 - _shift(rates, shift)) ** k).mean())


def _shift(rates: Array, shift: float) -> Array:
    rates = np.clip(rates, 1e-12, 1 - 1e-12)
    return rates / (rates + (1 - rates) * math.exp(-shift))


def ours(values: Array) -> tuple[float, float]:
    estimate = estimate_mean(values, _LEVEL)
    return estimate.low, estimate.high


def student_t(values: Array) -> tuple[float, float]:
    half = student_t_quantile((1 + _LEVEL) / 2, len(values) - 1)
    half *= float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


def percentile_bootstrap(values: Array) -> tuple[float, float]:
    means = _resample(values).mean(axis=1)
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def studentized_bootstrap(values: Array) -> tuple[float, float]:
    drawn, num = _resample(values), len(values)
    errors = drawn.std(axis=1) / math.sqrt(num)
    gaps = drawn.mean(axis=1) - values.mean()
    scores = np.where(gaps == 0, 0.0, np.copysign(np.inf, gaps))
    np.divide(gaps, errors, out=scores, where=errors > 0)
    low, high = np.quantile(scores, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], method="nearest")
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(num)
    if error == 0:
        return mean, mean
    return max(mean - float(high) * error, 0.0), min(mean - float(low) * error, 1.0)


def _resample(values: Array) -> Array:
    rows = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    return values[rows]


METHODS: Final[dict[str, Callable[[Array], tuple[float, float]]]] = {
    "ours": ours,
    "Student t": student_t,
    "percentile": percentile_bootstrap,
    "studentized": studentized_bootstrap,
}
_RESAMPLING: Final = (percentile_bootstrap, studentized_bootstrap)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--bootstrap-trials", type=int, default=250, help="0: no bootstrap")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of tasks")
    arguments = parser.parse_args()
    methods = {
        name: method
        for name, method in METHODS.items()
        if arguments.bootstrap_trials or method not in _RESAMPLING
    }
    print(
        f"| tasks | mean | alike | samples | k | pass@k | {' | '.join(methods)} | width |\n"
        f"|{'---|' * (7 + len(methods))}"
    )
    cells: dict[tuple[int, str], list[tuple[float, float]]] = {
        (num_tasks, name): [] for num_tasks in arguments.sizes for name in methods
    }
    for num_tasks in arguments.sizes:
        for population in POPULATIONS:
            for num, k in SAMPLINGS:
                found = _print_mean(population, num_tasks, num, k, methods, arguments)
                for name, one in found.items():
                    cells[num_tasks, name].append((population.truth(k), one.inside))
    print()
    for (num_tasks, name), shares in cells.items():
        print(f"{num_tasks} tasks, {name}: {_summarize(shares)}")
    print("\n| tasks | mean | alike | shift | samples | k | difference | inside | false | width |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for num_tasks in arguments.sizes:
        for population in POPULATIONS[1::2]:
            for shift in (0.0, 0.5, 1.5):
                for samples, k in (((1, 1), 1), ((4, 4), 1), ((32, 32), 1), ((4, 16), 4)):
                    _print_difference(population, shift, num_tasks, samples, k, arguments.trials)


def _summarize(shares: Sequence[tuple[float, float]]) -> str:
    """Count the cells by (truth, share inside); near 0 and 1 more may be inside, not fewer."""
    lowest, highest = PASSES[0] - 0.01, PASSES[1] + 0.01
    below = sum(inside < lowest for _, inside in shares)
    above = sum(inside > highest and 0.025 < truth < 0.975 for truth, inside in shares)
    return (
        f"{len(shares)} cells, {below} below {lowest:.2f} (least {min(b for _, b in shares):.3f}), "
        f"{above} of 0.025 to 0.975 above {highest:.2f}"
    )


def _print_mean(
    population: Population,
    num_tasks: int,
    num: int,
    k: int,
    methods: Mapping[str, Callable[[Array], tuple[float, float]]],
    arguments: argparse.Namespace,
) -> dict[str, Coverage]:
    """Print the row of a cell and return what was measured, by method."""
    truth = population.truth(k)
    sets = list(simulate(population, num_tasks, num, k, arguments.trials, 0))
    cells = {}
    for name, method in methods.items():
        some = sets[: arguments.bootstrap_trials] if method in _RESAMPLING else sets
        cells[name] = measure([method(values) for values in some], truth)
    shares = " | ".join(f"{one.inside:.3f}" for one in cells.values())
    print(
        f"| {num_tasks} | {population.mean:g} | {population.concentration:g} | {num} | {k} | "
        f"{truth:.3f} | {shares} | {cells['ours'].width:.3f} |",
        flush=True,
    )
    return cells


def _print_difference(
    population: Population,
    shift: float,
    num_tasks: int,
    samples: tuple[int, int],
    k: int,
    trials: int,
) -> None:
    truth = true_difference(population, shift, k)
    intervals = []
    for second, first in simulate_pairs(population, shift, num_tasks, samples, k, trials, 0):
        estimate = estimate_difference(second, first, _LEVEL)
        intervals.append((estimate.low, estimate.high))
    found = measure(intervals, truth)
    print(
        f"| {num_tasks} | {population.mean:g} | {population.concentration:g} | {shift:g} | "
        f"{samples[0]}, {samples[1]} | {k} | {truth:.3f} | {found.inside:.3f} | "
        f"{found.above:.3f} | {found.width:.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
