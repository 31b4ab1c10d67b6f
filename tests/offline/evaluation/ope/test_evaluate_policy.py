"""Off-policy evaluation from the lake, on problems whose answers are known."""

import json
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.score_reference import ScoreReference
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    QueryError,
    QueryRefusedError,
    SchemaMismatchError,
)
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.holdout import Holdout
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.evaluation.ope.behavior import BehaviorConfig
from replaylake.offline.evaluation.ope.evaluate_policy import evaluate_policy
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
from replaylake.offline.evaluation.ope.training_set import find_score_reference, training_set


class Gaussian(nn.Module):
    """The same mean, and standard deviation, whatever is seen."""

    def __init__(self, mean, std=None):
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, observations):
        means = observations * 0 + self.mean
        return (means,) if self.std is None else (means, means * 0 + float(np.log(self.std)))


NEAR = Exploration(epsilon=0.95)


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory, frozen_lake):
    """5,000 uniform episodes of FrozenLake."""
    lake = open_lake(tmp_path_factory.mktemp("frozen") / "lake", create=True)
    lake.dataset("frozen").create(Discrete(16), Discrete(4))
    lake.dataset("frozen").append(frozen_lake.uniform_episodes(5000))
    return lake


def near_the_logger(frozen_lake):
    best = frozen_lake.optimal().argmax(1)
    return 0.05 * np.eye(4)[best] + 0.95 / 4


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1.0, 0.99])
def test_a_policy_near_the_logger(frozen, frozen_lake, register_table, gamma):
    register_table(frozen, "optimal", frozen_lake.optimal())
    question = EvaluationRequest("frozen", "optimal", exploration=NEAR, discount=gamma)
    report = evaluate_policy(frozen, question)
    exact = frozen_lake.value(near_the_logger(frozen_lake), gamma)
    assert report.verdict == "supported"
    found = {one.estimator: one for one in report.estimates.estimates}
    assert set(found) == {"is", "wis", "clipped_is", "pdis", "wpdis", "wdr", "dr", "fqe"}
    for name in set(found) - {"fqe"}:
        assert found[name].ci_low <= exact <= found[name].ci_high, name
        assert found[name].effective_sample_size > 4000
    assert found["fqe"].value == pytest.approx(exact, rel=0.3)


@pytest.mark.slow
def test_the_greedy_policy_is_not_supported(frozen, frozen_lake, register_table):
    register_table(frozen, "optimal", frozen_lake.optimal())
    report = evaluate_policy(frozen, EvaluationRequest("frozen", "optimal"))
    assert report.verdict == "not supported"
    assert report.policy["acts"] == "greedy"
    for epsilon in (0.3, 0.5, 0.7):
        question = EvaluationRequest("frozen", "optimal", exploration=Exploration(epsilon=epsilon))
        assert evaluate_policy(frozen, question).verdict in ("weak", "not supported")


def test_the_logging_policy_itself(frozen, shared_data):
    text = (shared_data / "gym_exact_values.json").read_text()
    exact = json.loads(text)["FrozenLake-v1"]["uniform_random"]
    for gamma, key in ((1.0, "gamma1.0_H100"), (0.99, "gamma0.99_H100")):
        report = evaluate_policy(frozen, EvaluationRequest("frozen", "random", discount=gamma))
        log = report.estimates.log_interval
        assert log.low <= exact[key] <= log.high
        for one in report.estimates.estimates:
            if one.estimator in ("is", "wis", "clipped_is", "pdis", "wpdis"):
                assert one.value == pytest.approx(report.estimates.log_mean, rel=1e-6)
        assert report.verdict == "supported"


def test_the_table_agrees_with_the_shared_numbers(frozen_lake, shared_data):
    exact = json.loads((shared_data / "gym_exact_values.json").read_text())["FrozenLake-v1"]
    uniform, best = np.full((16, 4), 0.25), np.eye(4)[frozen_lake.optimal().argmax(1)]
    for gamma, key in ((1.0, "gamma1.0_H100"), (0.99, "gamma0.99_H100")):
        for probs, name in (
            (uniform, "uniform_random"),
            (best, "optimal(0.99)"),
            ((uniform + best) / 2, "half_half"),
        ):
            assert frozen_lake.value(probs, gamma) == pytest.approx(exact[name][key], rel=1e-9)


# One-step episodes, all of which a policy has seen, or some.


def bandit(lake, num, *, first=0, propensities=True, seed=0, name="log", num_actions=2):
    rng = np.random.default_rng([seed, first])
    xs = rng.integers(0, 3, num)
    actions = rng.integers(0, num_actions, num)
    if not lake.dataset(name).exists():
        lake.dataset(name).create(Discrete(3), Discrete(num_actions))
    log_probs = np.full(num, np.log(1 / num_actions), np.float32) if propensities else None
    lake.dataset(name).append(
        Episode(
            f"e/{first + i:05d}",
            observations=xs[i : i + 1],
            actions=actions[i : i + 1],
            rewards=(actions[i : i + 1] == 1) * 1.0 + 0.1 * rng.standard_normal(1),
            terminated=True,
            behavior_log_probs=None if log_probs is None else log_probs[i : i + 1],
            extras={"chance": np.full(1, 0.9 if actions[i] else 0.1)},
        )
        for i in range(num)
    )


ROWS = np.tile([0.0, 1.0], (3, 1))
# Answers what depends on neither model nor resampling at no cost.
CHEAP = ("ips", "snips")
QUICK = {
    "reward_model": FQEConfig(updates=150, hidden_sizes=(16,), learning_rate=1e-2),
    "behavior": BehaviorConfig(updates=100, hidden_sizes=(16,), learning_rate=1e-2, folds=2),
}


def trained_on(dataset, version, where=None, **further):
    return {"datasets": [{"dataset": dataset, "version": version, "where": where}], **further}


def test_what_it_was_trained_on_does_not_count(lake, register_table):
    bandit(lake, 300)
    register_table(lake, "all", ROWS, **trained_on("log", 1))
    report = evaluate_policy(lake, EvaluationRequest("log", "all", estimators=CHEAP))
    assert (report.verdict, report.trained_on, report.num_episodes) == ("not supported", 300, 300)
    assert "training set" in report.assessment.reason
    assert "Train with `holdout`" in report.assessment.reason
    bandit(lake, 1, first=300)
    # A single one is left, which is no log to estimate from.
    with pytest.raises(
        EmptyReplayError,
        match=r"found 1 episode \(left out: 300 in the policy's training set\).*with `holdout`",
    ):
        evaluate_policy(lake, EvaluationRequest("log", "all", estimators=CHEAP))
    # The newest 100 it has not seen.
    bandit(lake, 99, first=301)
    report = evaluate_policy(lake, EvaluationRequest("log", "all", estimators=CHEAP))
    assert (report.trained_on, report.num_episodes) == (0, 100)
    assert report.left_out == {"in the policy's training set": 300}
    # None of them among those held out by hand.
    question = EvaluationRequest("log@1", "all", estimators=CHEAP, holdout=Holdout(0.5))
    report = evaluate_policy(lake, question)
    assert report.verdict == "not supported"
    assert report.trained_on == report.num_episodes < 300


@pytest.mark.slow
def test_what_training_held_out_is_evaluated(lake, register_table):
    bandit(lake, 1200)
    holdout = Holdout(0.3)
    lineage = trained_on("log", 1, holdout.condition(False), holdout=holdout.to_json())
    register_table(lake, "held", ROWS, **lineage)
    report = evaluate_policy(lake, EvaluationRequest("log", "held", estimators=CHEAP))
    expected = lake.sql(f"SELECT count(*) AS num FROM log.episodes WHERE {holdout.condition(True)}")
    assert report.num_episodes == expected.to_pylist()[0]["num"]
    assert report.holdout == {"fraction": 0.3, "salt": ""}
    assert (report.trained_on, report.left_out) == (0, {})
    assert report.verdict == "supported"
    # New episodes count where they are on that side.
    bandit(lake, 600, first=1200)
    later = evaluate_policy(lake, EvaluationRequest("log", "held", estimators=CHEAP))
    assert later.num_episodes > report.num_episodes
    # Asked for the other side of another split, it leaves out what was seen.
    other = EvaluationRequest("log", "held", estimators=CHEAP, holdout=Holdout(0.9))
    report = evaluate_policy(lake, other)
    assert report.trained_on == 0
    assert report.left_out["in the policy's training set"] > 100


def test_the_same_episodes_in_another_dataset_count_as_seen(lake, register_table):
    bandit(lake, 200)
    bandit(lake, 200, name="copied")
    register_table(lake, "copy", ROWS, **trained_on("copied", 1))
    report = evaluate_policy(lake, EvaluationRequest("log", "copy", estimators=CHEAP))
    assert (report.verdict, report.trained_on) == ("not supported", 200)


@pytest.mark.slow
def test_a_training_version_that_is_gone(lake, register_table):
    bandit(lake, 100)
    register_table(lake, "old", ROWS, **trained_on("log", 1, '"return" > 0.5'))
    register_table(lake, "lost", ROWS, **trained_on("absent", 3))
    bandit(lake, 100, first=100)
    report = evaluate_policy(lake, EvaluationRequest("log", "old", estimators=CHEAP))
    # A condition on outcomes left the rest one-sided.
    assert report.verdict != "supported"
    assert report.left_out["in the policy's training set"] > 20
    report = evaluate_policy(lake, EvaluationRequest("log", "lost", estimators=CHEAP))
    assert any("absent@3" in note for note in report.notes)
    assert (report.verdict, "absent@3" in report.assessment.reason) == ("weak", True)
    # The asker's word stands in for what is not known, and for nothing that is.
    vouched = EvaluationRequest("log", "lost", estimators=CHEAP, unseen=True)
    assert evaluate_policy(lake, vouched).verdict == "supported"
    bandit(lake, 100, name="again")
    register_table(lake, "seen", ROWS, **trained_on("again", 1))
    known = EvaluationRequest("again", "seen", estimators=CHEAP, unseen=True)
    assert evaluate_policy(lake, known).verdict == "not supported"


def test_without_a_lineage_nothing_is_supported(lake, register_table):
    bandit(lake, 600)
    register_table(lake, "made", ROWS)
    register_table(lake, "brought", ROWS, datasets=None)
    assert (
        evaluate_policy(lake, EvaluationRequest("log", "made", estimators=CHEAP)).verdict
        == "supported"
    )
    report = evaluate_policy(lake, EvaluationRequest("log", "brought", estimators=CHEAP))
    assert report.verdict == "weak"
    assert "brought:1: its lineage names no training episodes" in report.assessment.reason
    report = evaluate_policy(lake, EvaluationRequest("log", target_prob="chance", estimators=CHEAP))
    assert report.verdict == "weak"
    assert "`unseen`" in report.assessment.reason


@pytest.mark.slow
def test_a_holdout_by_hand_does_not_undo_what_training_chose(lake, register_table):
    bandit(lake, 4000)
    chosen = "episode_id < 'e/02000'"
    register_table(lake, "some", ROWS, **trained_on("log", 1, chosen))
    other = Holdout(0.5, salt="other")
    question = EvaluationRequest("log", "some", estimators=CHEAP, holdout=other)
    report = evaluate_policy(lake, question)
    assert (report.verdict, "`holdout`" in report.assessment.reason) == ("weak", True)
    # In a copy of the log it chose as well.
    bandit(lake, 4000, name="copied")
    report = evaluate_policy(lake, EvaluationRequest("copied", "some", estimators=CHEAP))
    assert (report.num_episodes, report.verdict) == (2000, "weak")
    # Where a hash alone chose, what is left is like the rest.
    held = Holdout(0.5)
    lineage = trained_on("log", 1, held.condition(False), holdout=held.to_json())
    register_table(lake, "hashed", ROWS, **lineage)
    question = EvaluationRequest("log", "hashed", estimators=CHEAP, holdout=other)
    report = evaluate_policy(lake, question)
    assert report.left_out["in the policy's training set"] > 500
    assert report.verdict == "supported"


def test_left_by_a_condition_is_weak_at_best(lake, register_table):
    bandit(lake, 2000)
    register_table(lake, "some", ROWS, **trained_on("log", 1, "episode_id < 'e/01000'"))
    report = evaluate_policy(lake, EvaluationRequest("log", "some", estimators=CHEAP))
    assert report.num_episodes == 1000
    assert report.verdict == "weak"
    assert "`holdout`" in report.assessment.reason


def test_the_value_of_a_bandit_policy(lake, register_table):
    bandit(lake, 2000)
    register_table(lake, "one", ROWS)
    report = evaluate_policy(lake, EvaluationRequest("log", "one", **QUICK))
    # It takes action 1, of reward 1; the log takes it half of the time.
    assert report.estimates.log_mean == pytest.approx(0.5, abs=0.05)
    assert report.verdict == "supported"
    for one in report.estimates.estimates:
        assert one.value == pytest.approx(1, abs=0.06), one.estimator
        if one.estimator not in ("clipped_ips", "dm"):
            assert one.ci_low <= 1 <= one.ci_high
            assert one.difference_low <= 0.5 <= one.difference_high
    again = evaluate_policy(lake, EvaluationRequest("log", "one", **QUICK))
    assert again.to_json() == report.to_json()
    doubled = evaluate_policy(
        lake, EvaluationRequest("log", "one", reward="reward * 2", estimators=CHEAP)
    )
    assert doubled.estimates.log_mean == pytest.approx(2 * report.estimates.log_mean)


@pytest.mark.slow
def test_probabilities_given_in_sql(lake):
    bandit(lake, 1000)
    by_column = evaluate_policy(
        lake, EvaluationRequest("log", target_prob="chance", estimators=CHEAP)
    )
    by_list = evaluate_policy(
        lake, EvaluationRequest("log", target_prob="[0.1, 0.9]", estimators=CHEAP)
    )
    for one, other in zip(by_column.estimates.estimates, by_list.estimates.estimates, strict=True):
        assert one.value == pytest.approx(other.value)
        assert one.value == pytest.approx(0.9, abs=0.1)
    assert by_column.policy == {"policy": None, "target_prob": "chance"}
    # From the list alone it is known what the policy would do.
    assert (
        "logged action"
        in evaluate_policy(lake, EvaluationRequest("log", target_prob="chance")).model
    )
    every = evaluate_policy(lake, EvaluationRequest("log", target_prob="[0.1, 0.9]", **QUICK))
    assert {"dr", "dm"} <= {one.estimator for one in every.estimates.estimates}
    unknown = "CASE WHEN action = 1 THEN 0.9 END"
    report = evaluate_policy(lake, EvaluationRequest("log", target_prob=unknown, estimators=CHEAP))
    assert 400 < report.left_out["with an action of unknown target probability"] < 600
    with pytest.raises(EmptyReplayError, match="`target_prob` is NULL for at least one action"):
        evaluate_policy(lake, EvaluationRequest("log", target_prob="CAST(NULL AS DOUBLE)"))
    with pytest.raises(QueryRefusedError, match="2 actions"):
        evaluate_policy(lake, EvaluationRequest("log", target_prob="[0.1, 0.4, 0.5]"))
    with pytest.raises(QueryError, match="absent"):
        evaluate_policy(lake, EvaluationRequest("log", target_prob="absent"))


def test_a_log_without_propensities(lake, register_table):
    bandit(lake, 1500, propensities=False)
    register_table(lake, "one", ROWS)
    report = evaluate_policy(lake, EvaluationRequest("log", "one", estimators=CHEAP, **QUICK))
    about = report.propensities
    assert (about["source"], about["fitted_steps"]) == ("fitted", 1500)
    assert about["log_likelihood"] == pytest.approx(np.log(0.5), abs=0.02)
    assert about["calibration_error"] < 0.1
    for one in report.estimates.estimates:
        assert one.value == pytest.approx(1, abs=0.1)
        assert "fitted" in one.assumptions
    given = EvaluationRequest("log", "one", behavior_prob="0.5", estimators=CHEAP, **QUICK)
    assert evaluate_policy(lake, given).propensities["source"] == "given in SQL"
    bandit(lake, 500, first=1500)
    some = evaluate_policy(
        lake, EvaluationRequest("log", "one", estimators=CHEAP, **QUICK)
    ).propensities
    assert (some["source"], some["fitted_steps"]) == ("logged, and fitted where missing", 1500)


def test_episodes_that_are_not_whole_are_counted(lake):
    lake.dataset("log").create(Discrete(3), Discrete(2), rewards_optional=True)

    def one(name, *, rewards=(0.0, 1.0), terminated=True, **further):
        return Episode(
            f"e/{name}",
            observations=np.array([0, 1]),
            actions=np.array([0, 1]),
            rewards=np.array(rewards),
            terminated=terminated,
            behavior_log_probs=np.full(2, np.log(0.5), np.float32),
            **further,
        )

    lake.dataset("log").append(
        [
            *(one(f"whole-{i}") for i in range(40)),
            one("truncated", terminated=False, truncated=True),
            one("open", terminated=False),
            one("unknown", rewards=(np.nan, 1.0)),
            one("gap", terminated=False),
        ]
    )
    lake.dataset("log").append([one("gap", first_step=5)])
    question = EvaluationRequest("log", "random", estimators=("is",))
    report = evaluate_policy(lake, question)
    assert report.num_episodes == 41
    expected = {"not seen to end": 1, "with a step missing": 1, "with an unknown reward": 1}
    assert report.left_out == expected
    every = EvaluationRequest("log", "random", estimators=("is",), with_incomplete=True)
    assert evaluate_policy(lake, every).num_episodes == 42
    with pytest.raises(EmptyReplayError, match="1 not seen to end"):
        evaluate_policy(lake, EvaluationRequest("log", "random", where="NOT complete"))
    with pytest.raises(EmptyReplayError, match="no episode"):
        evaluate_policy(lake, EvaluationRequest("log", "random", where="num_steps > 9"))
    with pytest.raises(EmptyReplayError, match="1 episode"):
        evaluate_policy(lake, EvaluationRequest("log", "random", where="truncated"))


def test_policies_of_other_spaces(lake, register_table):
    bandit(lake, 10)
    register_table(lake, "wide", np.zeros((4, 2)))
    register_table(lake, "many", np.zeros((3, 5)))
    with pytest.raises(SchemaMismatchError, match="observation space"):
        evaluate_policy(lake, EvaluationRequest("log", "wide"))
    with pytest.raises(SchemaMismatchError, match="action space"):
        evaluate_policy(lake, EvaluationRequest("log", "many"))


def test_a_mode_of_continuous_actions_has_no_weights(lake, register_graph):
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (800, 1)).astype(np.float32)
    space = Box((1,), low=-1.0, high=1.0)
    lake.dataset("line").create(Box((1,)), space)
    lake.dataset("line").append(
        Episode(
            f"e/{i:03d}",
            observations=rng.standard_normal((1, 1)).astype(np.float32),
            actions=actions[i : i + 1],
            rewards=actions[i].astype(np.float64),
            terminated=True,
            behavior_log_probs=np.full(1, np.log(0.5), np.float32),
        )
        for i in range(800)
    )
    register_graph(lake, "half", Gaussian(0.5, 0.2), PolicySpec(Box((1,)), space, "gaussian"))
    greedy = evaluate_policy(lake, EvaluationRequest("line", "half", **QUICK))
    (model,) = greedy.estimates.estimates
    assert (model.estimator, greedy.verdict) == ("dm", "weak")
    assert model.value == pytest.approx(0.5, abs=0.15)
    assert "head gaussian" in greedy.estimates.refused["ips"]
    drawn = EvaluationRequest(
        "line", "half", exploration=Exploration(temperature=1.0), estimators=CHEAP
    )
    report = evaluate_policy(lake, drawn)
    assert report.verdict == "supported"
    for one in report.estimates.estimates:
        assert one.ci_low <= 0.5 <= one.ci_high
    register_graph(lake, "mode", Gaussian(0.5), PolicySpec(Box((1,)), space, "deterministic"))
    report = evaluate_policy(lake, EvaluationRequest("line", "mode", estimators=CHEAP))
    assert (report.verdict, report.estimates.estimates) == ("not supported", ())
    assert "head deterministic" in report.assessment.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither"),
        ({"policy": "a", "target_prob": "b"}, "exactly one of the two"),
        ({"target_prob": "b", "exploration": NEAR}, "exploration"),
        ({"policy": "a", "discount": 0.0}, "discount"),
        ({"policy": "a", "discount": 1.5}, "discount"),
        ({"policy": "a", "seed": -1}, "seed"),
        ({"policy": "a", "estimators": ("snip",)}, "snips"),
    ],
)
def test_questions_that_make_no_sense(given, said):
    with pytest.raises(ConfigInvalidError, match=said):
        EvaluationRequest("log", **given)


def test_one_step_logs_have_no_fitted_q_evaluation(lake):
    bandit(lake, 40)
    question = EvaluationRequest("log", "random", estimators=("ips", "fqe"), **QUICK)
    refused = evaluate_policy(lake, question).estimates.refused
    assert set(refused) == {"fqe"}
    assert "use 'dm'" in refused["fqe"]


def test_rewards_that_are_all_alike(lake):
    bandit(lake, 300)
    question = EvaluationRequest(
        "log", "random", reward="1.0", estimators=CHEAP, behavior_prob="0.50000003"
    )
    report = evaluate_policy(lake, question)
    # Propensities are rounded; that is no disagreement.
    assert "disagree" not in report.assessment.reason


def test_agents_of_an_episode_count_together(lake):
    rng = np.random.default_rng(0)
    lake.dataset("pair").append(
        Episode(
            f"e/{i:03d}",
            observations=np.zeros(1, np.int64),
            actions=np.array([i % 2]),
            rewards=np.array([outcome]),
            terminated=True,
            agent_id=agent,
            behavior_log_probs=np.log([0.5]).astype(np.float32),
        )
        for i, outcome in enumerate(rng.random(200))
        for agent in ("a", "b")
    )
    both = EvaluationRequest("pair", "random", estimators=("ips",))
    (found,) = evaluate_policy(lake, both).estimates.estimates
    (alone,) = evaluate_policy(lake, replace(both, where="agent_id = 'a'")).estimates.estimates
    assert found.ci_high - found.ci_low == pytest.approx(alone.ci_high - alone.ci_low, rel=0.1)


def with_time_limit(lake, num=300, limit=10):
    """Each step earns 1 for action 1; an episode goes on for ever, but for a limit of 10 steps."""
    rng = np.random.default_rng(6)
    lake.dataset("cut").create(Discrete(2), Discrete(2))
    lake.dataset("cut").append(
        Episode(
            f"e/{i:04d}",
            observations=np.arange(limit) % 2,
            actions=(actions := rng.integers(0, 2, limit)),
            rewards=actions.astype(float),
            # One in ten ends by itself, so that a value without the limit is finite.
            terminated=i % 10 == 0,
            truncated=i % 10 != 0,
            final_observation=np.array(limit % 2),
            behavior_log_probs=np.full(limit, np.log(0.5), np.float32),
        )
        for i in range(num)
    )


def test_with_gamma_1_a_time_limit_leaves_fqe_out(lake):
    """Ten steps of 1/2 are worth 5; without the limit about ten times as many are taken."""
    with_time_limit(lake)
    report = evaluate_policy(lake, EvaluationRequest("cut", "random"))
    found = {one.estimator: one for one in report.estimates.estimates}
    assert set(found) == {"is", "wis", "clipped_is", "pdis", "wpdis", "dr", "wdr"}
    assert report.estimates.refused["fqe"].startswith(
        "270 of 300 episodes were truncated; with gamma 1 fitted Q evaluation "
    )
    assert "solved exactly" in report.model
    for one in found.values():
        assert one.ci_low < 5 < one.ci_high, one
    for name in ("dr", "wdr"):
        assert found[name].assumptions.endswith("the model is wrong, however well it is fitted")
    assert any(note.startswith("dr, wdr: their model also values") for note in report.notes)
    alone = evaluate_policy(lake, EvaluationRequest("cut", "random", estimators=("fqe",)))
    assert (alone.verdict, alone.estimates.estimates) == ("not supported", ())
    assert "270 of 300 episodes were truncated" in alone.assessment.reason


def test_with_a_discount_a_time_limit_is_noted_where_it_matters(lake):
    with_time_limit(lake)
    notes = {}
    for gamma in (0.9, 0.5):
        report = evaluate_policy(lake, EvaluationRequest("cut", "random", discount=gamma))
        assert "fqe" in {one.estimator for one in report.estimates.estimates}
        notes[gamma] = [note for note in report.notes if "270 of 300" in note]
    # 0.9 of the episodes, at 0.9^10; at 0.5^10 it is 0.0009.
    (note,) = notes[0.9]
    assert note.startswith("fqe: 270 of 300 episodes were truncated; averaged over all episodes, ")
    assert "a reward after the truncation has 0.31 of the weight of a first reward" in note
    assert notes[0.5] == []


# Which reward: the one that the policy was trained with, unless another is asked for.


def selected(*rewards):
    """Lineage of a policy that learned from datasets that are not there any more."""
    return {
        "datasets": [
            {"dataset": f"gone{i}", "version": 1, "where": None, "reward": reward}
            for i, reward in enumerate(rewards)
        ]
    }


@pytest.mark.parametrize(
    ("lineage", "asked", "reward", "source", "training", "sign"),
    [
        (selected("(-(reward))"), None, "(-(reward))", "training", "(-(reward))", -1),
        (selected("-reward", "(-(reward))"), None, "(-(reward))", "training", "(-(reward))", -1),
        (selected("-reward"), "reward", "reward", "asked", "(-(reward))", 1),
        (selected("-reward"), "- Reward", "(-(Reward))", "asked", "(-(reward))", -1),
        (selected(None), None, "reward", "training", "reward", 1),
        (selected(None), "-reward", "(-(reward))", "asked", "reward", -1),
        ({"datasets": []}, None, "reward", "stored", None, 1),
        ({"datasets": None}, None, "reward", "stored", None, 1),
        (
            selected("-reward", None),
            "-reward",
            "(-(reward))",
            "asked",
            "(-(reward)) and reward",
            -1,
        ),
        # As lineage was before rewards were expressions.
        (
            {"datasets": [{"dataset": "gone", "version": 1}]},
            None,
            "reward",
            "training",
            "reward",
            1,
        ),
    ],
)
def test_the_reward_of_its_training(
    lake, register_table, lineage, asked, reward, source, training, sign
):
    bandit(lake, 300)
    register_table(lake, "p", ROWS, **lineage)
    question = EvaluationRequest("log", "p", estimators=CHEAP, unseen=True, reward=asked)
    body = json.loads(json.dumps(evaluate_policy(lake, question).to_json()))
    assert (body["reward"], body["reward_source"]) == (reward, source)
    assert body["training_reward"] == training
    assert body["log_mean"] == pytest.approx(sign * 0.5, abs=0.1)
    for one in body["estimates"]:
        assert one["value"] == pytest.approx(sign * 1.0, abs=0.2)


def test_a_reward_of_training_that_the_log_cannot_say_is_refused(lake, register_table):
    bandit(lake, 50)
    register_table(lake, "p", ROWS, **selected("paid - refund"))
    with pytest.raises(QueryError, match=r"p:1: was trained with the reward .*paid.*`reward`"):
        evaluate_policy(lake, EvaluationRequest("log", "p", estimators=CHEAP))
    asked = EvaluationRequest("log", "p", estimators=CHEAP, reward="reward")
    assert evaluate_policy(lake, asked).reward.source == "asked"


def test_one_of_several_rewards_has_to_be_named(lake, register_table):
    bandit(lake, 50)
    register_table(lake, "p", ROWS, **selected("-reward", None))
    with pytest.raises(ConfigInvalidError, match=r"p:1: was trained with different rewards, "):
        evaluate_policy(lake, EvaluationRequest("log", "p", estimators=CHEAP))


def test_transcripts_with_an_outcome_are_evaluated(lake, tmp_path):
    ask, say = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    given = [{"reward": n % 2} for n in range(6)] + [{"reward": 1, "status": "in review"}, {}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": [ask, say], **g}) + "\n" for g in given))
    ingest(lake, [path], "chats")
    report = evaluate_policy(
        lake,
        EvaluationRequest(
            "chats", target_prob="0.4", behavior_prob="0.5", estimators=("snips",), unseen=True
        ),
    )
    assert report.num_episodes == 6
    assert report.left_out == {"not seen to end": 2}


def test_values_are_normalized_by_the_datasets_reference(lake, register_table):
    bandit(lake, 600)
    lake.dataset("log").set_score_reference(ScoreReference(0.25, 0.75, "by hand"))
    register_table(lake, "made", ROWS, **trained_on("log", 1, "false"))
    report = evaluate_policy(lake, EvaluationRequest("log", "made", estimators=("snips",)))
    (snips,) = report.estimates.estimates
    assert report.normalized() == pytest.approx(
        {"log": 200 * (report.estimates.log_mean - 0.25), "snips": 200 * (snips.value - 0.25)}
    )
    assert report.to_json()["score_reference"]["source"] == "by hand"
    training = training_set(lake, lake.registry.resolve("made"))
    assert find_score_reference(lake, training) == ScoreReference(0.25, 0.75, "by hand")
    question = EvaluationRequest("log", "made", reward="2 * reward", estimators=("snips",))
    assert evaluate_policy(lake, question).normalized() is None


def log_with_an_outage(lake):
    """100 decisions of a server at observation 0, then 100 that clients took at observation 1.

    The server took action 1 half of the time, the clients in one of five. It is worth 1 and then 3.
    """
    lake.dataset("log").create(Discrete(3), Discrete(2))
    for x, num_ones, worth in ((0, 50, 1.0), (1, 20, 3.0)):
        actions = (np.arange(100) < num_ones).astype(np.int64)
        chance = np.where(actions == 1, num_ones, 100 - num_ones) / 100
        lake.dataset("log").append(
            Episode(
                f"e/{x}-{i:03d}",
                observations=np.array([x]),
                actions=actions[i : i + 1],
                rewards=worth * actions[i : i + 1],
                terminated=True,
                behavior_log_probs=np.log(chance[i : i + 1]).astype(np.float32),
                extras={"decided_by_client": np.array([True])} if x else {},
            )
            for i in range(100)
        )


def test_steps_that_clients_decided_count_with_their_own_propensities(lake, register_table):
    log_with_an_outage(lake)
    register_table(lake, "one", ROWS)
    request = EvaluationRequest("log", "one", estimators=("ips",), unseen=True)
    report = evaluate_policy(lake, request)
    (ips,) = report.estimates.estimates
    assert ips.value == pytest.approx(2.0)  # half of the time 1, half of the time 3
    assert report.num_episodes == 200
    expected = (
        "clients decided 100 of 200 steps themselves, in 100 of 200 episodes (decided_by_client): "
        "they count, with the propensities that the clients logged"
    )
    assert expected in report.notes
    served = "not any(decided_by_client)"
    without = evaluate_policy(lake, replace(request, where=served))
    assert without.estimates.estimates[0].value == pytest.approx(1.0)
    assert not any("clients decided" in note for note in without.notes)
