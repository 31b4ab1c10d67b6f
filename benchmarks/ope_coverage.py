"""How often the 95% intervals of `ope` contain the truth, and how often its gate errs.

Each trial writes a log of a small world, whose values are known exactly, into a lake and evaluates
a registered policy on it by `evaluate_policy`, as `replaylake ope` does. A cell is a world and a
number of episodes. An estimator passes a cell where the 99% binomial interval of its coverage meets
[0.93, 0.97], for the value and for the difference from the log's mean; below it fails, above it is
wide. The last columns are the shares of logs in which the verdict's check of skewed weights warns,
and with the verdict `supported`. The check has to warn in 90% of the logs of a cell where an
estimator fails, and in at most 10% of the others. The gate is given a candidate and a champion of
equal value.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Final

import numpy as np
import torch
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Array, Discrete
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.package import save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.offline.evaluation.ope.evaluate_policy import evaluate_policy
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest
from replaylake.offline.evaluation.ope.promotion_gate import DEFAULT_ALPHA, evaluate_gate
from replaylake.offline.evaluation.ope.verdict import has_skewed_weights
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.networks.graph import PolicyGraph

SIZES: Final = (100, 200, 400, 800)
PASSES: Final = (0.93, 0.97)
ESTIMATORS: Final = ("is", "wis", "clipped_is", "pdis", "wpdis", "dr", "wdr")
# These have to pass in `near` and `sparse` from 200 episodes on.
REQUIRED: Final = ("wis", "wpdis", "dr", "wdr")


@dataclass(frozen=True, eq=False)
class World:
    """States, actions and two policies. After each step an episode ends with probability `stop`.

    moves [S, A, S] and rewards [S, A] are probabilities: of the next state, and of a reward of 1.
    limit truncates an episode after so many steps. The first state is drawn uniformly.
    """

    moves: Array
    rewards: Array
    behavior: Array
    target: Array
    stop: float = 0.3
    gamma: float = 0.95
    limit: int | None = None

    def value(self, policy: Array) -> float:
        """Return the expected return of a policy [S, A], up to the limit."""
        # Without a limit, what comes after 400 steps has less than 1e-60 of the weight.
        v = np.zeros(len(self.rewards))
        for _ in range(self.limit or 400):
            q = self.rewards + self.gamma * (1 - self.stop) * self.moves @ v
            v = (policy * q).sum(axis=1)
        return float(v.mean())

    @cached_property
    def truths(self) -> dict[str, float]:
        """The target policy's value, and its difference from the behavior policy's."""
        value = self.value(self.target)
        return {"value": value, "difference": value - self.value(self.behavior)}

    def episodes(self, num: int, rng: np.random.Generator) -> Iterator[Episode]:
        """Yield episodes of the behavior policy."""
        for number in range(num):
            states, actions, rewards = [int(rng.integers(len(self.rewards)))], [], []
            has_ended = False
            while not has_ended and len(actions) != self.limit:
                state = states[-1]
                actions.append(_draw(rng, self.behavior[state]))
                rewards.append(float(rng.random() < self.rewards[state, actions[-1]]))
                states.append(_draw(rng, self.moves[state, actions[-1]]))
                has_ended = bool(rng.random() < self.stop)
            probs = self.behavior[states[:-1], actions]
            yield Episode(
                f"e/{number:05d}",
                observations=np.array(states[:-1]),
                actions=np.array(actions),
                rewards=np.array(rewards),
                terminated=has_ended,
                truncated=not has_ended,
                final_observation=np.array(states[-1]),
                behavior_log_probs=np.log(probs).astype(np.float32),
            )


NEAR: Final = World(
    moves=np.array(
        [
            [[0.7, 0.3, 0.0], [0.2, 0.5, 0.3]],
            [[0.5, 0.4, 0.1], [0.1, 0.4, 0.5]],
            [[0.3, 0.4, 0.3], [0.1, 0.2, 0.7]],
        ]
    ),
    rewards=np.array([[0.1, 0.2], [0.1, 0.4], [1.0, 0.6]]),
    behavior=np.array([[0.6, 0.4], [0.5, 0.5], [0.5, 0.5]]),
    target=np.array([[0.5, 0.5], [0.4, 0.6], [0.6, 0.4]]),
)
WORLDS: Final = {
    "near": NEAR,
    # The policy mostly takes what was logged in one step of four.
    "far": replace(
        NEAR,
        behavior=np.array([[0.75, 0.25], [0.7, 0.3], [0.3, 0.7]]),
        target=np.array([[0.2, 0.8], [0.2, 0.8], [0.75, 0.25]]),
    ),
    # About one episode in ten has a reward.
    "sparse": replace(NEAR, rewards=np.array([[0.0, 0.01], [0.02, 0.03], [0.06, 0.06]])),
    # Six of ten episodes are cut off after ten steps, and their returns are not discounted.
    "truncated": replace(
        NEAR,
        behavior=np.array([[0.55, 0.45], [0.5, 0.5], [0.5, 0.5]]),
        target=np.array([[0.5, 0.5], [0.45, 0.55], [0.55, 0.45]]),
        stop=0.05,
        gamma=1.0,
        limit=10,
    ),
}


class _Logits(nn.Module):
    def __init__(self, probs: Array) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(np.log(probs), dtype=torch.float32))

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.rows[observations.long()],)


def register(lake: Lake, name: str, probs: Array, folder: Path) -> PolicyRef:
    """Register a policy of probabilities [S, A], which learned from no episodes."""
    spec = PolicySpec(Discrete(len(probs)), Discrete(probs.shape[1]), "categorical")
    graph = PolicyGraph(_Logits(probs), spec)
    save_package(folder, onnx=export_onnx(graph), spec=spec, manifest={}, learner_weights=None)
    return lake.registry.register(name, folder, run_id="by-hand", lineage={"datasets": []})


def _draw(rng: np.random.Generator, probs: Array) -> int:
    return min(int((rng.random() > probs.cumsum()).sum()), len(probs) - 1)


@dataclass(frozen=True)
class Trial:
    """What one log gave: whether the interval of each (estimator, quantity) held the truth."""

    held: dict[tuple[str, str], bool]
    is_supported: bool
    has_skewed_weights: bool


def run_trial(world: World, num: int, rng: np.random.Generator, folder: Path) -> Trial:
    """Evaluate the target policy on one log of `num` episodes, in a new lake below `folder`."""
    lake = write_log(world, num, rng, folder)
    register(lake, "target", world.target, folder / "target")
    report = evaluate_policy(lake, make_request(world))
    held = {}
    for one in report.estimates.estimates:
        ends = {
            "value": (one.ci_low, one.ci_high),
            "difference": (one.difference_low, one.difference_high),
        }
        for quantity, (low, high) in ends.items():
            if low is not None and high is not None:
                held[one.estimator, quantity] = bool(low <= world.truths[quantity] <= high)
    return Trial(held, report.verdict == "supported", has_skewed_weights(report.diagnostics))


def passes_gate(world: World, num: int, rng: np.random.Generator, folder: Path) -> bool:
    """Whether the gate promotes the target policy over a champion of exactly its value."""
    lake = write_log(world, num, rng, folder)
    candidate = register(lake, "policy", world.target, folder / "candidate")
    champion = register(lake, "policy", find_equal(world), folder / "champion")
    return evaluate_gate(lake, candidate, champion, make_request(world)).passed


def find_equal(world: World) -> Array:
    """Return another policy [S, A] with the target policy's value, by bisection.

    It takes action 0 more often in the first state, and makes up for it in the second.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        policy = np.array([[0.6, 0.4], [1 - middle, middle], world.target[2]])
        if world.value(policy) < world.truths["value"]:
            low = middle
        else:
            high = middle
    return policy


def write_log(world: World, num: int, rng: np.random.Generator, folder: Path) -> Lake:
    """Write episodes of the behavior policy into a new lake below `folder`."""
    lake = open_lake(folder / "lake", create=True)
    num_states, num_actions = world.rewards.shape
    lake.dataset("log").create(Discrete(num_states), Discrete(num_actions))
    lake.dataset("log").append(world.episodes(num, rng))
    return lake


def make_request(world: World) -> EvaluationRequest:
    """Return what is asked: by the world's discount, of a policy that draws its actions."""
    exploration = Exploration(temperature=1.0)
    return EvaluationRequest("log", "target", discount=world.gamma, exploration=exploration)


def binomial_interval(hits: int, num: int, level: float = 0.99) -> tuple[float, float]:
    """Return the interval of a share by Wilson's score (Wilson 1927)."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, scale = hits / num, 1 + z * z / num
    middle = (share + z * z / (2 * num)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return middle - half, middle + half


def run_cell(name: str, num: int, num_trials: int) -> list[Trial]:
    """Run a cell's trials; a trial's log depends on the cell and its number alone."""
    trials = []
    for number in range(num_trials):
        rng = np.random.default_rng([*name.encode(), num, number])
        with tempfile.TemporaryDirectory() as folder:
            trials.append(run_trial(WORLDS[name], num, rng, Path(folder)))
    return trials


def summarize(name: str, num: int, trials: Sequence[Trial]) -> tuple[str, list[str]]:
    """Return a cell's lines of the table, and what it should not be."""
    lines, failing, errors = [], [], []
    for quantity in ("value", "difference"):
        cells = []
        for estimator in ESTIMATORS:
            hits = [one.held[estimator, quantity] for one in trials]
            low, high = binomial_interval(sum(hits), len(hits))
            judgment = " fails" if high < PASSES[0] else " wide" if low > PASSES[1] else ""
            cells.append(f"{np.mean(hits):.3f}{judgment}")
            if high < PASSES[0]:
                failing.append(f"{estimator} {quantity}")
            is_required = estimator in REQUIRED and name in ("near", "sparse") and num >= 200
            if judgment and is_required:
                errors.append(f"{name}, {num} episodes: {estimator}, {quantity} is{judgment}")
        lines.append(f"| {name} | {num} | {quantity} | {' | '.join(cells)} | ")
    warned = float(np.mean([one.has_skewed_weights for one in trials]))
    supported = float(np.mean([one.is_supported for one in trials]))
    if failing and warned < 0.9:
        errors.append(f"{name}, {num} episodes: warned in {warned:.1%}, fails: {failing}")
    if not failing and warned > 0.1:
        errors.append(f"{name}, {num} episodes: warned in {warned:.1%}, but passes")
    return "\n".join(f"{line}{warned:.3f} | {supported:.3f} |" for line in lines), errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default=",".join(WORLDS), help="names of worlds, by commas")
    parser.add_argument("--episodes", default=",".join(map(str, SIZES)), help="numbers, by commas")
    parser.add_argument("--trials", type=int, default=1000, help="logs a cell")
    parser.add_argument("--gate-trials", type=int, default=2000, help="logs of 800 episodes")
    options = parser.parse_args()
    errors: list[str] = []
    names = [name for name in options.cells.split(",") if name]
    if names:
        print(f"| cell | episodes | of | {' | '.join(ESTIMATORS)} | skewed weights | supported |")
        print(f"|{'---|' * (len(ESTIMATORS) + 5)}", flush=True)
    for name, num in itertools.product(names, map(int, options.episodes.split(","))):
        lines, wrong = summarize(name, num, run_cell(name, num, options.trials))
        errors += wrong
        print(lines, flush=True)
    if options.gate_trials:
        promoted = 0
        for number in range(options.gate_trials):
            with tempfile.TemporaryDirectory() as folder:
                rng = np.random.default_rng([*b"gate", number])
                promoted += passes_gate(WORLDS["near"], 800, rng, Path(folder))
        low, high = binomial_interval(promoted, options.gate_trials)
        print(
            f"gate: {promoted:,} of {options.gate_trials:,} candidates that are no better were "
            f"promoted ({promoted / options.gate_trials:.2%}, 99% interval {low:.2%} to {high:.2%})"
        )
        if low > DEFAULT_ALPHA:
            errors.append(f"gate: promotes more than {DEFAULT_ALPHA:.1%}")
    print("\n".join(errors) or "every cell is as it should be")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
