"""RLlib's public bars, on the logs that RLlib tests itself with: each seed has to pass.

The slow set runs one seed, `make bars` the others; cloning by one seed is in test_train.py.

A policy is trained as `replaylake train offline ... --env ID` does it, and is worth what the
closing evaluation of 20 episodes says, whose seeds had no part in choosing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.main import main
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.offline.running.train import TrainConfig, train

_CARTPOLE = Path(__file__).parents[1] / "examples" / "data" / "rllib_cartpole"
_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Bar:
    algorithm: str
    bar: float
    updates: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.algorithm


def _cases(*bars: Bar) -> list[Any]:
    return [
        pytest.param(
            bar,
            seed,
            id=f"{bar}-{seed}",
            marks=pytest.mark.bars if seed or bar.algorithm == "bc" else pytest.mark.slow,
        )
        for bar in bars
        for seed in _SEEDS
    ]


def _ingested(folder: Path, log: Path, name: str, *more: str) -> Lake:
    lake = open_lake(folder / "lake", create=True)
    place = ["--dataset", name, "--lake", str(folder / "lake")]
    assert main(["ingest", str(log), *place, *more]) == 0
    return lake


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    log = _CARTPOLE / "cartpole-v1_large"
    return _ingested(tmp_path_factory.mktemp("bars"), log, "cartpole", "--env", "CartPole-v1")


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Lake:
    """Its actions are logged in half of the environment's torque."""
    log = shared_data / "rllib_pendulum" / "pendulum-v1_enormous"
    more = ("--env", "Pendulum-v1", "--action-scale", "2")
    return _ingested(tmp_path_factory.mktemp("bars"), log, "pendulum", *more)


def _final_return(lake: Lake, dataset: str, env_id: str, bar: Bar, seed: int) -> float:
    config = TrainConfig(
        algorithm=bar.algorithm,
        updates=bar.updates,
        seed=seed,
        evaluate_updates=bar.updates // 3,
        options=bar.options,
    )
    result = train(lake, [dataset], replace(config, policy=bar.algorithm, env=env_id))
    assert result.evaluation is not None
    assert len(result.evaluation.returns) == 20
    return result.evaluation.mean_return


@pytest.mark.parametrize(
    ("bar", "seed"), _cases(Bar("bc", 350, 900), Bar("marwil", 250, 900), Bar("cql", 450, 1000))
)
def test_cartpole(cartpole: Lake, bar: Bar, seed: int) -> None:
    assert _final_return(cartpole, "cartpole", "CartPole-v1", bar, seed) >= bar.bar


@pytest.mark.parametrize(
    ("bar", "seed"),
    _cases(
        Bar("bc", -200, 750),
        # With RLlib's expectile and temperature. At the default of 3 weights are at their least or
        # greatest, as rewards are -16 to 0: then the last of 750 updates returned -200, -575 and
        # -174, where d3rlpy 2.8.1 had -241, -187 and -414 (2026-11).
        Bar("iql", -200, 750, {"expectile": 0.8, "weight_temp": 0.1}),
    ),
)
def test_pendulum(pendulum: Lake, bar: Bar, seed: int) -> None:
    assert _final_return(pendulum, "pendulum", "Pendulum-v1", bar, seed) >= bar.bar
