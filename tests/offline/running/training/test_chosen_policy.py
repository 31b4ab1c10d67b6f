"""Which policy of a run is registered."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import check_package, load_learner_weights
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.train import TrainConfig, train

SMALL = {"hidden_sizes": [16]}


def quick(**changes):
    return TrainConfig(**{"updates": 20, "batch_size": 16, "options": SMALL, **changes})


@pytest.fixture
def lake(tmp_path, line_world):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world())
    return lake


@pytest.mark.parametrize(
    ("config", "env_id", "measure"),
    [
        ({}, None, "last"),
        ({"holdout": 0.3}, None, "loss"),
        ({"holdout": 0.3, "algorithm": "dqn", "selection_fqe_updates": 2}, None, "fqe"),
        ({"holdout": 0.3, "selection_episodes": 2, "evaluation_episodes": 3}, "CartPole-v1", "env"),
    ],
)
def test_the_registered_policy_is_the_best_one(cartpole_lake, config, env_id, measure):
    points = []
    result = train(
        cartpole_lake,
        ["cartpole"],
        quick(**config, policy="selected", env=env_id),
        callbacks=Callbacks(on_metrics=lambda update, values: points.append((update, values))),
    )
    selection = check_package(result.policy.path).body["selection"]
    assert selection["measure"].startswith(measure)
    assert selection["update"] == result.update
    history = {point["update"]: point["value"] for point in selection["history"]}
    assert list(history) == list(range(2, 21, 2))
    if measure == "last":
        assert (result.update, set(history.values())) == (20, {None})
        return
    best = max if selection["higher_is_better"] else min
    assert history[result.update] == best(history.values()) == selection["value"]
    assert next(u for u, value in history.items() if value == selection["value"]) == result.update
    name = f"selection/{selection['measure']}"
    assert {update: values[name] for update, values in points if name in values} == history
    if env_id is not None:
        assert points[-1] == (
            result.update,
            {"evaluation/return": result.evaluation.mean_return},
        )


def test_the_weights_are_those_of_the_chosen_update(lake):
    """Of a run whose best is not its last: as if it had been stopped there."""
    config = quick(updates=40, holdout=0.4, options={**SMALL, "learning_rate": 0.3})
    chosen = train(lake, ["line"], replace(config, policy="p"))
    assert chosen.update < 40, "expected a run that gets worse again; take another seed"
    alone = dataclasses.replace(config, updates=chosen.update, select="last")
    alone = train(lake, ["line"], replace(alone, policy="p"))
    first, second = (load_learner_weights(result.policy.path) for result in (chosen, alone))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_it_stops_early(lake):
    config = quick(updates=400, holdout=0.4, patience=2, options={**SMALL, "learning_rate": 0.3})
    result = train(lake, ["line"], replace(config, policy="p"))
    history = result.selection["history"]
    assert result.selection["stopped_early"]
    assert history[-1]["update"] == result.update + 2 * 40 < 400


@pytest.mark.slow
def test_iql_on_pendulum_registers_one_near_its_best(tmp_path, shared_data):
    """RLlib's log, whose mean return is -143: IQL gets there and then worse again."""
    lake = open_lake(tmp_path / "lake", create=True)
    source = shared_data / "rllib_pendulum" / "pendulum-v1_enormous"
    ingest(lake, [source], "pendulum", options=ReadOptions(action_scale=2.0, open_ends="truncated"))
    config = TrainConfig(algorithm="iql", updates=3000, evaluate_updates=250)
    result = train(lake, ["pendulum"], replace(config, policy="p", env="Pendulum-v1"))
    values = [point["value"] for point in result.selection["history"]]
    assert result.evaluation.mean_return >= max(values) - 60
    assert result.evaluation.mean_return >= -250
