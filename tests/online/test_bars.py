"""What online training has to reach: each seed has to pass, with two workers that go on meanwhile.

A run ends as `train online --until-return` does: once the episodes that its workers finish return
as much, and an evaluation says so. What it is worth is what the closing evaluation of 20 episodes
says, whose seeds had no part in choosing the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from frame_grid import BAR, BEST_RETURN

from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.offline.running.train import TrainConfig, train
from replaylake.online.train import OnlineResult, train_online
from replaylake.online.training.config import OnlineConfig

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Bar:
    """steps: at most. until: stops before, once a policy returns so much; None: it goes on."""

    algorithm: str
    env_id: str
    bar: float
    steps: int
    until: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.algorithm}-{self.env_id.split(':')[-1]}"

    def run(self, lake: Lake, seed: int) -> OnlineResult:
        config = OnlineConfig(
            algorithm=self.algorithm,
            steps=self.steps,
            until_return=self.until,
            seed=seed,
            workers=2,
            mode="async",
            options=self.options,
            **self.config,
        )
        return train_online(lake, "run", replace(config, env=self.env_id, policy="policy"))


DQN = Bar(
    "dqn",
    "CartPole-v1",
    475,
    60_000,
    until=475,
    config={"batch_size": 64, "samples_per_insert": 32},
    options={
        "learning_rate": 1e-3,
        "double": True,
        "dueling": True,
        "n_step": 3,
        "target_update_period": 1,
        "tau": 0.005,
    },
)
# One run a seed is enough for both of its tests.
SAC = Bar("sac", "Pendulum-v1", -200, 10_000)
BARS = (
    DQN,
    # A run that ends at the bar itself is as often below it on other seeds: once in six it was 465.
    Bar("impala", "CartPole-v1", 475, 300_000, until=495),
    Bar("ppo", "CartPole-v1", 475, 300_000, until=495),
    Bar(
        "dqn",
        "frame_grid:make_frame_grid",
        BAR,
        30_000,
        until=(BAR + BEST_RETURN) / 2,
        config={"batch_size": 32, "samples_per_insert": 8, "discount": 0.95},
        options={
            "hidden_sizes": [256],
            "learning_rate": 5e-4,
            "double": True,
            "target_update_period": 1,
            "tau": 0.02,
        },
    ),
)


@pytest.mark.bars
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bar", BARS, ids=str)
def test_a_bar_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bar: Bar, seed: int
) -> None:
    # Rollout workers are processes of their own.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "examples"))
    lake = open_lake(tmp_path / "lake", create=True)
    check(bar, bar.run(lake, seed), lake)


@pytest.mark.slow
def test_ppo_learns_cartpole_in_one_process(tmp_path: Path) -> None:
    """The same on every machine but for the last bits: nothing goes on beside it."""
    config = OnlineConfig("ppo", steps=40_000, until_return=475, env_runner="local")
    lake = open_lake(tmp_path / "lake", create=True)
    result = train_online(lake, "run", replace(config, env="CartPole-v1", policy="policy"))
    assert result.evaluation is not None
    assert result.evaluation.mean_return >= 400


def check(bar: Bar, result: OnlineResult, lake: Lake) -> None:
    assert result.evaluation is not None
    assert len(result.evaluation.returns) == 20
    assert result.evaluation.mean_return >= bar.bar
    assert result.num_steps <= bar.steps
    # All of it is in the lake, each step once.
    found = lake.sql("select count(*), count(distinct (episode_id, step)) from run.steps")
    assert [column[0].as_py() for column in found.columns] == [result.num_steps] * 2


@pytest.fixture(scope="module", params=SEEDS)
def sac_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Lake, OnlineResult]:
    lake = open_lake(tmp_path_factory.mktemp("sac") / "lake", create=True)
    return lake, SAC.run(lake, request.param)


@pytest.mark.bars
def test_sac_reaches_its_bar(sac_run: tuple[Lake, OnlineResult]) -> None:
    lake, result = sac_run
    check(SAC, result, lake)


@pytest.mark.bars
def test_what_a_run_leaves_is_learned_from_offline(sac_run: tuple[Lake, OnlineResult]) -> None:
    """Cloning its good episodes reaches what cloning all of them does not."""
    lake, ran = sac_run
    returns = {}
    for name, where in (("good", "return > -300"), ("every", None)):
        config = TrainConfig(algorithm="bc", seed=ran.request.config.seed)
        result = train(lake, ["run"], replace(config, policy=name, env=SAC.env_id, where=where))
        assert result.evaluation is not None
        assert len(result.evaluation.returns) == 20
        returns[name] = result.evaluation.mean_return
    assert returns["good"] >= -250
    assert returns["good"] > returns["every"]
