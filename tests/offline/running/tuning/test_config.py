import json

import numpy as np
import pytest

from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.running.tune import check_sweep
from replaylake.offline.running.tuning.config import Sweep, TuneConfig, resolve_measure, tune_config


def file(**changes):
    given = {
        "datasets": ["line"],
        "policy": "p",
        "algorithm": "bc",
        "updates": 20,
        "batch_size": 8,
        "holdout": 0.3,
        "hidden_sizes": [8],
        "tune": {"seeds": [0, 1], "vary": {"learning_rate": [0.001, 0.01]}},
    }
    given |= changes
    return {key: value for key, value in given.items() if value is not None}


def read_sweep(given):
    return Sweep.of(*tune_config(given))


def tuned(**table):
    return file(tune={"seeds": [0], "vary": {}, **table})


@pytest.fixture
def lake(tmp_path, line_world):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world(num_episodes=8))
    return lake


def test_lists_make_a_grid_in_the_files_order():
    vary = {"b": [1, 2], "a": [[64, 64], [8]]}
    assert TuneConfig(vary=vary).combinations() == [
        {"b": 1, "a": [64, 64]},
        {"b": 1, "a": [8]},
        {"b": 2, "a": [64, 64]},
        {"b": 2, "a": [8]},
    ]
    assert TuneConfig().combinations() == [{}]


def test_draws_stand_beside_each_value_of_a_list_and_come_again():
    vary = {
        "rate": {"loguniform": [1e-4, 1e-2]},
        "beta": {"uniform": [-1, 1]},
        "size": {"choice": [16, 32, 64]},
        "double": [True, False],
    }
    found = TuneConfig(vary=vary, num_samples=200).combinations()
    assert found == TuneConfig(vary=vary, num_samples=200).combinations()
    assert found != TuneConfig(vary=vary, num_samples=200, sample_seed=1).combinations()
    assert [list(options) for options in found[:2]] == [list(vary)] * 2
    assert [options["double"] for options in found[:4]] == [True, False, True, False]
    for draw in (found[0::2], found[1::2]):
        assert len({options["rate"] for options in draw}) == 200
    assert found[0]["rate"] == found[1]["rate"]
    logs = np.log10([options["rate"] for options in found])
    assert (logs.min() >= -4, logs.max() <= -2) == (True, True)
    # Of a loguniform draw the logarithm is uniform, whose mean is the middle.
    assert logs.mean() == pytest.approx(-3, abs=0.15)
    assert {options["size"] for options in found} == {16, 32, 64}
    assert all(-1 <= options["beta"] <= 1 for options in found)


def test_a_number_of_seeds_counts_from_0():
    assert list(read_sweep(tuned(seeds=3)).tune.seeds) == [0, 1, 2]


def test_a_trial_is_asked_for_what_the_file_and_its_options_say():
    sweep = read_sweep(
        file(
            where="num_steps > 3",
            where_steps="step < 9",
            reward="reward * 2",
            env="CartPole-v1",
            tune={"vary": {"learning_rate": [0.1], "batch_size": [16, 32], "algorithm": ["cql"]}},
        )
    )
    options = sweep.tune.combinations()[1]
    request = sweep.trial_request(options, 7)
    config = request.config
    assert (request.datasets, config.policy, config.env) == (("line",), "p", "CartPole-v1")
    assert (config.where, config.where_steps) == ("num_steps > 3", "step < 9")
    assert (config.reward, config.weight) == ("reward * 2", None)
    assert (config.algorithm, config.batch_size, config.seed) == ("cql", 32, 7)
    assert (config.updates, config.holdout) == (20, 0.3)
    assert config.options == {"hidden_sizes": [8], "learning_rate": 0.1}
    again = Sweep.from_json(json.loads(json.dumps(sweep.to_json())))
    assert again.trial_request(options, 7) == request
    assert again.tune.combinations() == sweep.tune.combinations()


def test_a_record_that_kept_what_was_given_is_read():
    given = file(where="num_steps > 3", tune={"vary": {"batch_size": [16], "beta": [0.1]}})
    sweep = read_sweep(given)
    body = json.loads(json.dumps(sweep.to_json()))
    body["options"] = {"algorithm": "bc", "updates": 20, "batch_size": 8, "holdout": 0.3}
    body["request"]["config"] |= {"batch_size": 16, "options": {"beta": 0.1}}
    options = sweep.tune.combinations()[0]
    found = Sweep.from_json(body).trial_request(options, 7).config
    assert (found.batch_size, found.where, found.policy) == (16, "num_steps > 3", "p")
    assert found.options == {"beta": 0.1}
    assert Sweep.from_json(body).tune.train.batch_size == 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (file(tune=None), r"found no tune, expected one, as in a table \[tune\]"),
        (file(tune=None, tunes={}), "found 'tunes' but no tune"),
        (file(datasets=None, dataset="line"), "found 'dataset' but no datasets"),
        (file(datasets=[]), r"datasets: found \[\], expected a list"),
        (file(policy=None), "found no policy"),
        (file(algorithm=None, algoritm="bc"), "found 'algoritm' but no algorithm"),
        (file(where=3), "where: found 3, expected a value of type str"),
        (file(seed=3), "found seed, expected none: seeds in"),
        (file(learners=2), "found learners, expected none"),
        (file(updates="x"), "training: updates: found 'x'"),
        (tuned(seed=1), "tune: found option 'seed', expected seeds"),
        (tuned(seeds=[1, 1]), r"seeds: found \[1, 1\]"),
        (tuned(seeds=0), "seeds: found 0"),
        (tuned(num_samples=2), "num_samples: found 2 and no option to draw"),
        (tuned(vary={"seed": [1]}), "found seed, expected none"),
        (tuned(vary={"reward": ["reward"]}), "vary: found 'reward', expected an option that need"),
        (tuned(train={}), "tune: found option 'train'"),
        (tuned(vary={"alpha": []}), r"vary: alpha: found \[\], expected one value"),
        (tuned(vary={"alpha": 3}), "alpha: found 3, expected a list of values, or a table"),
        (tuned(vary={"alpha": {"unifrom": [0, 1]}}), "found option 'unifrom', expected uniform"),
        (tuned(vary={"alpha": {"uniform": [1, 0]}}), "expected the least first"),
        (tuned(vary={"alpha": {"loguniform": [0, 1]}}), "expected more than 0"),
        (tuned(vary={"alpha": {"uniform": [0]}}), r"expected \[least, greatest\]"),
        (tuned(vary={"alpha": {"choice": []}}), "choice: found"),
        (tuned(mode="most"), "mode: found 'most', expected one of"),
        (tuned(reduction=1), "reduction: found 1, expected 2 or more"),
        (tuned(concurrency=0), "concurrency: found 0"),
    ],
)
def test_what_a_file_cannot_say_is_refused(given, said):
    with pytest.raises(ConfigInvalidError, match=said):
        read_sweep(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (file(learning_rat=1), "found option 'learning_rat', expected learning_rate"),
        (file(env_id="x"), "found option 'env_id', expected env"),
        (file(num_sample=3), "found option 'num_sample', expected num_samples"),
        (tuned(vary={"learning_rate": [0.1, -1.0]}), "learning_rate: found -1.0"),
        (
            tuned(vary={"algorithm": ["bc", "cql"]}) | {"beta": 0.1},
            "algorithm cql: found .* 'beta'",
        ),
        (file(holdout=None), "measure: found no measure to compare trials by"),
        (tuned(asha=True, grace_updates=21), "grace_updates: found 21"),
        (
            tuned(asha=True, measure="evaluation/return"),
            "expected a metric that is measured during a run",
        ),
    ],
)
def test_what_not_every_trial_could_train_is_refused_before_any(lake, given, said):
    with pytest.raises(ConfigInvalidError, match=said):
        check_sweep(lake, read_sweep(given).pin(lake))


def test_a_dataset_that_is_not_there(lake):
    with pytest.raises(NotFoundError, match="nowhere"):
        read_sweep(file(datasets=["nowhere"])).pin(lake)


def test_all_trials_train_on_the_versions_of_the_beginning(lake):
    sweep = read_sweep(file()).pin(lake)
    assert sweep.trial_request({}, 3).datasets == ("line@1",)
    assert check_sweep(lake, sweep).measure == "selection/loss"


@pytest.mark.parametrize(
    ("table", "selection", "expected"),
    [
        ({}, "loss", ("selection/loss", "min")),
        ({}, "fqe", ("selection/fqe", "max")),
        ({"mode": "min"}, "fqe", ("selection/fqe", "min")),
        ({"measure": "policy_loss"}, "last", ("policy_loss", "min")),
        ({"measure": "evaluation/return"}, "environment", ("evaluation/return", "max")),
    ],
)
def test_less_of_a_loss_is_better(table, selection, expected):
    assert resolve_measure(TuneConfig(**table), selection) == expected
