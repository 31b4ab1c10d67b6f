"""The gate of a promotion, on one-step logs whose answers are known by hand."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, PackageInvalidError
from replaylake.datastore.lake.holdout import Holdout
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.evaluation.ope import evaluate_policy as evaluate_policy_module
from replaylake.offline.evaluation.ope.estimate import estimate_differences
from replaylake.offline.evaluation.ope.evaluate_policy import evaluate_policy
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
from replaylake.offline.evaluation.ope.logged_episodes import one_step_episodes
from replaylake.offline.evaluation.ope.promotion_gate import evaluate_gate

CHEAP = ("ips", "snips")
# q-values [S, A]: always action 1, which earns about 1; always action 0, which earns nothing.
GOOD, BAD = np.tile([0.0, 1.0], (3, 1)), np.tile([1.0, 0.0], (3, 1))


def log(lake, num, *, first=0, name="log", noise=0.1):
    """One-step episodes of a uniform policy; action 1 earns 1, and some noise."""
    rng = np.random.default_rng([7, first])
    actions = rng.integers(0, 2, num)
    contexts = rng.integers(0, 3, num)
    rewards = actions + noise * rng.standard_normal(num)
    if not lake.dataset(name).exists():
        lake.dataset(name).create(Discrete(3), Discrete(2))
    lake.dataset(name).append(
        Episode(
            f"e/{first + i:05d}",
            observations=contexts[i : i + 1],
            actions=actions[i : i + 1],
            rewards=rewards[i : i + 1],
            terminated=True,
            behavior_log_probs=np.log([0.5]).astype(np.float32),
        )
        for i in range(num)
    )


@pytest.fixture
def lake(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    log(lake, 600)
    return lake


def ask(lake, candidate, champion, **options):
    question = options.pop("question", EvaluationRequest("log", str(candidate), estimators=CHEAP))
    return evaluate_gate(lake, candidate, champion, question, **options)


def trained_on(version, where=None, **further):
    return {"datasets": [{"dataset": "log", "version": version, "where": where}], **further}


def test_a_better_one_passes(lake, register_table):
    champion, candidate = register_table(lake, "p", BAD), register_table(lake, "p", GOOD)
    found = ask(lake, candidate, champion)
    assert found.passed
    for one in found.comparisons:
        # About 300 episodes each take one of the two actions: 1 - 0, and a noise of 0.1.
        assert one.low < one.difference < one.high
        assert one.difference == pytest.approx(one.candidate - one.against)
        assert one.difference == pytest.approx(1.0, abs=0.15)
    (snips,) = [one for one in found.comparisons if one.estimator == "snips"]
    rows = lake.sql("SELECT action, avg(reward) AS r FROM log.steps GROUP BY 1 ORDER BY 1")
    assert [snips.against, snips.candidate] == pytest.approx(rows["r"].to_pylist())
    assert "Better than the champion: of 2 estimators the least" in found.reasons[0]
    assert found.against == "the champion"
    record = json.loads(json.dumps(found.to_record()))
    assert (record["passed"], record["num_episodes"], record["version"]) == (True, 600, 1)
    assert (record["candidate"]["version"], record["champion"]["version"]) == (2, 1)
    assert record["acts"] == "greedy"
    assert len(json.dumps(record)) < 2500
    assert len(found.to_json()["reports"]) == 2


def test_a_worse_one_and_the_same_one_do_not(lake, register_table):
    champion, candidate = register_table(lake, "p", GOOD), register_table(lake, "p", BAD)
    worse = ask(lake, candidate, champion)
    assert not worse.passed
    (reason,) = worse.reasons
    assert "puts the difference from the champion at -" in reason
    assert "its lower end is not above 0" in reason
    same = ask(lake, register_table(lake, "p", GOOD), champion)
    assert not same.passed
    for one in same.comparisons:
        # Nothing but what float32 log-probs carry.
        assert one.difference == 0
        assert -1e-6 < one.low < 0 < one.high < 1e-6
    # One that may be a little worse may be the same.
    assert ask(lake, champion, champion, margin=-0.01).passed


def test_a_margin_has_to_be_passed(lake, register_table):
    champion, candidate = register_table(lake, "p", BAD), register_table(lake, "p", GOOD)
    assert ask(lake, candidate, champion, margin=0.5).passed
    found = ask(lake, candidate, champion, margin=1.5)
    assert not found.passed
    assert "not above 1.5" in found.reasons[0]


def test_what_they_have_in_common_falls_out(lake, register_table):
    """Two policies that differ in one context of three: the rest of the noise is no news."""
    mixed = GOOD.copy()
    mixed[2] = [1.0, 0.0]
    champion, candidate = register_table(lake, "p", mixed), register_table(lake, "p", GOOD)
    found = ask(lake, candidate, champion)
    assert found.passed
    (ips,) = [one for one in found.comparisons if one.estimator == "ips"]
    alone = [
        next(e for e in report.estimates.estimates if e.estimator == "ips")
        for report in (found.candidate, found.champion)
    ]
    width = np.hypot(*(one.ci_high - one.ci_low for one in alone))
    assert ips.high - ips.low < 0.8 * width
    assert ips.difference == pytest.approx(1 / 3, abs=0.1)


def test_without_a_champion_it_is_compared_with_the_log(lake, register_table):
    found = ask(lake, register_table(lake, "p", GOOD), None)
    assert found.passed
    assert found.against == "the log's mean"
    assert found.champion is None
    for one in found.comparisons:
        assert one.against == found.candidate.estimates.log_mean
        assert one.difference == pytest.approx(0.5, abs=0.15)
    assert found.to_record()["champion"] is None


def test_episodes_that_the_champion_learned_from_do_not_count(lake, register_table):
    champion = register_table(lake, "p", BAD, **trained_on(1))
    candidate = register_table(lake, "p", GOOD)
    found = ask(lake, candidate, champion)
    assert not found.passed
    assert found.reasons[0].startswith("not supported of the champion, p:1: 600 of the 600 ")
    log(lake, 300, first=600)
    found = ask(lake, candidate, champion)
    assert found.passed
    assert found.candidate.num_episodes == found.champion.num_episodes == 300
    assert found.candidate.left_out == {"in the champion's training set": 600}


def test_both_are_asked_of_what_neither_has_seen(lake, register_table):
    log(lake, 600, first=600)
    holdout = Holdout(0.5)
    lineage = trained_on(2, holdout.condition(False), holdout=holdout.to_json())
    champion = register_table(lake, "p", BAD, **trained_on(1))
    candidate = register_table(lake, "p", GOOD, **lineage)
    found = ask(lake, candidate, champion)
    expected = lake.sql(
        f"SELECT count(*) AS n FROM log.episodes WHERE episode_id >= 'e/00600' AND "
        f"{holdout.condition(True)}"
    )["n"][0].as_py()
    assert found.candidate.num_episodes == found.champion.num_episodes == expected
    assert found.passed
    # The other way round the champion is evaluated twice: on its own, then on what is left.
    again = ask(lake, champion, candidate)
    assert again.candidate.num_episodes == again.champion.num_episodes
    assert not again.passed


def test_a_doubt_of_the_champion_outlives_the_episodes_taken_away(lake, register_table):
    champion = register_table(lake, "p", BAD, **trained_on(1, "episode_id < 'e/00100'"))
    candidate = register_table(lake, "p", GOOD, **trained_on(1, "episode_id >= 'e/00500'"))
    found = ask(lake, candidate, champion)
    assert found.candidate.num_episodes == found.champion.num_episodes == 400
    assert not found.passed
    assert [reason.partition(":")[0] for reason in found.reasons] == [
        "weak of the candidate, p",
        "weak of the champion, p",
    ]
    for reason in found.reasons:
        assert "were selected by it too" in reason


def test_what_the_log_does_not_support_does_not_pass(tmp_path, register_table):
    lake = open_lake(tmp_path / "small", create=True)
    log(lake, 40)
    champion, candidate = register_table(lake, "p", BAD), register_table(lake, "p", GOOD)
    found = ask(lake, candidate, champion)
    assert not found.passed
    assert all(one.low > 0 for one in found.comparisons)
    assert [reason.partition(",")[0] for reason in found.reasons] == [
        "not supported of the candidate",
        "not supported of the champion",
    ]
    assert "effective" in found.reasons[0]


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("against", ["near", "far", None])
def test_no_model_is_fitted_where_the_weights_refuse_already(
    tmp_path, register_table, monkeypatch, num_steps, against
):
    """Of 120 episodes about 60, or 30 of two steps, take the actions of a greedy policy."""

    def refuse(*given, **named):
        raise AssertionError("a model was fitted")

    for name in ("predict_rewards", "predict_values"):
        monkeypatch.setattr(evaluate_policy_module, name, refuse)
    lake = open_lake(tmp_path / "small", create=True)
    rng = np.random.default_rng(0)
    lake.dataset("log").create(Discrete(3), Discrete(2))
    lake.dataset("log").append(
        Episode(
            f"e/{i:03d}",
            observations=rng.integers(0, 3, num_steps),
            actions=rng.integers(0, 2, num_steps),
            rewards=rng.standard_normal(num_steps),
            terminated=True,
            behavior_log_probs=np.log(np.full(num_steps, 0.5)).astype(np.float32),
        )
        for i in range(120)
    )
    # One has no preference, as who wrote the log; the other nearly always takes action 1.
    near, far = register_table(lake, "p", 0 * GOOD), register_table(lake, "p", 8 * GOOD)
    question = EvaluationRequest("log", "p", exploration=AS_DRAWN)
    champion = {"near": near, "far": far, None: None}[against]
    found = ask(lake, near if against == "far" else far, champion, question=question)
    assert not found.passed
    reports = [found.candidate, *([] if found.champion is None else [found.champion])]
    assert all("none: not fitted, as the gate refuses without it" in one.model for one in reports)
    reason = found.reasons[0]
    effective = float(reason.partition("an effective ")[2].partition(" ")[0])
    bar = 100 if "(100 needed)" in reason else 30
    needed = float(reason.partition(" About ")[2].partition(" such")[0].replace(",", ""))
    assert needed == pytest.approx(bar / effective * 120, rel=0.1)
    assert any("dr cannot compare it" in one and "not fitted" in one for one in found.reasons)


def test_what_nobody_knows_to_be_unseen_does_not_pass(lake, register_table):
    champion = register_table(lake, "p", BAD)
    candidate = register_table(lake, "p", GOOD, datasets=None)
    found = ask(lake, candidate, champion)
    assert not found.passed
    assert found.reasons[0].startswith("weak of the candidate, p:2: It is not known whether")
    question = EvaluationRequest("log", str(candidate), estimators=CHEAP, unseen=True)
    assert ask(lake, candidate, champion, question=question).passed


def test_by_default_two_kinds_of_estimators_have_to_agree(lake, register_table):
    champion, candidate = register_table(lake, "p", BAD), register_table(lake, "p", GOOD)
    quick = FQEConfig(updates=150, hidden_sizes=(16,), learning_rate=1e-2)
    question = EvaluationRequest(
        "log", str(candidate), exploration=Exploration(epsilon=0.1), reward_model=quick
    )
    found = ask(lake, candidate, champion, question=question)
    assert [one.estimator for one in found.comparisons] == ["snips", "dr"]
    assert found.passed
    # 0.95 takes the better action against 0.05.
    assert found.comparisons[1].difference == pytest.approx(0.9, abs=0.1)


@pytest.mark.parametrize("against", [True, False])
def test_an_estimator_without_an_interval_lets_nothing_pass(lake, register_table, against):
    champion, candidate = register_table(lake, "p", BAD), register_table(lake, "p", GOOD)
    quick = FQEConfig(updates=150, hidden_sizes=(16,), learning_rate=1e-2)
    question = EvaluationRequest(
        "log", str(candidate), estimators=("snips", "dm"), reward_model=quick
    )
    found = ask(lake, candidate, champion if against else None, question=question)
    snips, dm = found.comparisons
    assert snips.low > 0
    assert dm.difference > 0
    assert (dm.low, dm.high, dm.interval) == (None, None, None)
    assert not found.passed
    (reason,) = found.reasons
    assert reason.startswith("dm puts the difference from the ")
    assert "with no interval: " in reason
    assert json.loads(json.dumps(found.to_record()))["comparisons"][1]["low"] is None


@pytest.mark.parametrize("alpha", [0.0, 0.3, -1.0])
def test_an_alpha_out_of_range(lake, register_table, alpha):
    ref = register_table(lake, "p", GOOD)
    with pytest.raises(ConfigInvalidError, match="alpha: found"):
        ask(lake, ref, None, alpha=alpha)


def test_only_the_same_episodes_are_compared():
    first, second = (
        one_step_episodes(np.array(r), behavior_probs=np.full(3, 0.5), target_probs=np.full(3, 0.5))
        for r in ([0.0, 1.0, 2.0], [0.0, 1.0, 3.0])
    )
    with pytest.raises(ConfigInvalidError, match="episodes that differ"):
        estimate_differences(first, second, ["ips"])


def test_a_difference_by_hand():
    """Weights 2, 0, 2, 0 and 0, 2, 0, 2 of rewards 1, 2, 3, 4: ips 2 and 3, snips 2 and 3."""
    rewards, half = np.array([1.0, 2.0, 3.0, 4.0]), np.full(4, 0.5)
    first = one_step_episodes(
        rewards, behavior_probs=half, target_probs=np.array([1.0, 0.0, 1.0, 0.0])
    )
    second = one_step_episodes(
        rewards, behavior_probs=half, target_probs=np.array([0.0, 1.0, 0.0, 1.0])
    )
    found, refused = estimate_differences(first, second, ["ips", "snips", "dr"])
    assert [(one.estimator, one.first, one.second, one.difference) for one in found] == [
        ("ips", 2.0, 3.0, -1.0),
        ("snips", 2.0, 3.0, -1.0),
    ]
    assert list(refused) == ["dr"]


@pytest.mark.slow
def test_one_that_is_no_better_seldom_passes():
    """Two policies of equal value, 400 logs: at 95% two-sided a lower end above 0 in 2.5%."""
    rng = np.random.default_rng(3)
    num, passes = 300, 0
    for repeat in range(400):
        contexts, actions = rng.integers(0, 2, num), rng.integers(0, 2, num)
        rewards = (rng.random(num) < 0.5).astype(float)
        episodes = [
            one_step_episodes(
                rewards,
                behavior_probs=np.full(num, 0.5),
                target_probs=np.where(actions == (contexts if flip else 1 - contexts), 0.9, 0.1),
            )
            for flip in (False, True)
        ]
        found, _ = estimate_differences(*episodes, ["snips"], seed=repeat)
        passes += found[0].low > 0
    assert passes <= 0.05 * 400


def test_every_estimator_that_was_asked_has_to_find_it(lake, register_table):
    """`wpdis` has nothing to say of episodes of one step; one that is silent does not agree."""
    champion, candidate = register_table(lake, "p", BAD), register_table(lake, "p", GOOD)
    question = EvaluationRequest("log", str(candidate), estimators=("snips", "wpdis"))
    found = ask(lake, candidate, champion, question=question)
    assert [one.estimator for one in found.comparisons] == ["snips"]
    assert found.comparisons[0].low > 0
    assert not found.passed
    (reason,) = found.reasons
    assert reason.startswith("wpdis cannot compare it with the champion: for episodes of several")


# Logits [S, A]: what is done first, in state 0, earns 10 for action 1; the rest is alike.
LONG_CHAMPION = np.array([[0.1, -0.2], [0.3, -0.4]])
TOWARDS_IT = np.array([[-0.8, 0.8], [0.0, 0.0]])
BOLDER, SHYER = LONG_CHAMPION + TOWARDS_IT, LONG_CHAMPION - TOWARDS_IT
AS_DRAWN = Exploration(temperature=1.0)


@pytest.fixture
def own_log(tmp_path, register_table):
    """Episodes of about 200 steps by p:1 as it is served, with float32 log-probs."""
    lake = open_lake(tmp_path / "own", create=True)
    champion = register_table(lake, "p", LONG_CHAMPION, head="categorical")
    logits = LONG_CHAMPION.astype(np.float32).astype(np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rng = np.random.default_rng(5)
    lake.dataset("long").create(Discrete(2), Discrete(2))
    episodes = []
    for i in range(300):
        states = np.append(0, np.ones(rng.integers(150, 250), np.int64))
        actions = (rng.random(len(states)) < probs[states, 1]).astype(np.int64)
        episodes.append(
            Episode(
                f"e/{i:05d}",
                observations=states,
                actions=actions,
                rewards=np.where(
                    states == 0, 10.0 * actions, 0.1 * rng.standard_normal(len(states))
                ),
                terminated=True,
                behavior_log_probs=np.log(probs[states, actions]).astype(np.float32),
            )
        )
    lake.dataset("long").append(episodes)
    return lake, champion


@pytest.mark.parametrize("estimators", [None, ("is", "wpdis")])
def test_on_the_champions_own_log_the_better_one_passes(own_log, register_table, estimators):
    lake, champion = own_log
    asked = EvaluationRequest("long", "p", exploration=AS_DRAWN, estimators=estimators)
    better = register_table(lake, "p", BOLDER, head="categorical")
    found = evaluate_gate(lake, better, champion, asked)
    assert found.champion.verdict == "supported", found.champion.assessment.reason
    assert found.passed, found.reasons
    # 10 times softmax: sigmoid(-0.3 + 1.6) - sigmoid(-0.3).
    for one in found.comparisons:
        assert one.low < 10 * (0.7858 - 0.4256) < one.high, one
    worse = register_table(lake, "p", SHYER, head="categorical")
    found = evaluate_gate(lake, worse, champion, asked)
    assert found.champion.verdict == "supported"
    assert not found.passed
    assert "its lower end is not above 0" in found.reasons[-1]


def test_on_its_own_log_a_champion_does_not_beat_its_log_or_itself(own_log, register_table):
    """Rounded log-probs move each weight alike: the resampled differences would not hold 0."""
    lake, champion = own_log
    asked = EvaluationRequest("long", "p", exploration=AS_DRAWN, estimators=("is", "pdis", "wpdis"))
    again = register_table(lake, "p", LONG_CHAMPION, head="categorical")
    for against in (None, champion):
        found = evaluate_gate(lake, again, against, asked)
        for one in found.comparisons:
            assert one.low < 0 < one.high, one
            assert one.high - one.low < 0.01
        assert (found.candidate.verdict, found.passed) == ("supported", False)


def learned(reward=None):
    """Lineage of a policy that learned a reward, from episodes that are not evaluated."""
    return {"datasets": [{"dataset": "gone", "version": 1, "where": None, "reward": reward}]}


def word(reward=None):
    """What is asked where it is known that nobody has seen the episodes."""
    return EvaluationRequest("log", "p", estimators=CHEAP, unseen=True, reward=reward)


def test_a_cost_is_not_judged_as_a_return(lake, register_table):
    """Trained with reward=-reward, taking action 0 is better: it costs nothing, 1 costs 1."""
    champion = register_table(lake, "p", GOOD, **learned("(-(reward))"))
    candidate = register_table(lake, "p", BAD, **learned("-reward"))
    found = ask(lake, candidate, champion, question=word())
    assert found.passed
    for one in found.comparisons:
        assert one.difference == pytest.approx(1.0, abs=0.15)
    record = json.loads(json.dumps(found.to_record()))
    assert (record["reward"], record["reward_source"]) == ("(-(reward))", "training")
    assert record["candidate"]["training_reward"] == "(-(reward))"
    # The other way round it is refused, and under the stored reward it passes, as it was asked for.
    assert not ask(lake, champion, candidate, question=word()).passed
    stored = ask(lake, champion, candidate, question=word("reward"))
    assert stored.passed
    assert stored.to_record()["reward_source"] == "asked"
    assert stored.to_record()["champion"]["training_reward"] == "(-(reward))"


def test_two_that_were_trained_with_different_rewards_are_not_compared(lake, register_table):
    champion = register_table(lake, "p", BAD, **learned())
    candidate = register_table(lake, "p", GOOD, **learned("-reward"))
    for first, second in ((candidate, champion), (champion, candidate)):
        found = ask(lake, first, second, question=word())
        assert not found.passed
        (reason,) = found.to_record()["reasons"]
        assert "was trained with the reward (-(reward))" in reason
        assert "was trained with the reward reward" in reason
        assert "`reward`" in reason
    assert ask(lake, candidate, champion, question=word("reward")).passed
    assert not ask(lake, candidate, champion, question=word("-reward")).passed
    # Without a champion there is the log's mean, of the same reward: action 1 costs more than it.
    assert not ask(lake, candidate, None, question=word()).passed


def test_one_without_lineage_counts_as_trained_with_the_stored_reward(lake, register_table):
    imported = register_table(lake, "p", BAD, datasets=None)
    stored = register_table(lake, "p", GOOD, **learned())
    assert ask(lake, stored, imported, question=word()).passed
    found = ask(
        lake, register_table(lake, "p", GOOD, **learned("-reward")), imported, question=word()
    )
    assert not found.passed
    assert "would be evaluated by the stored reward, as its lineage names none" in found.reason


class _Sign(nn.Module):
    """Logits of 0 and of `slope` times the observation."""

    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def forward(self, observations):
        return (torch.cat([0 * observations, self.slope * observations], dim=1),)


def test_with_gamma_1_and_a_time_limit_it_says_why_no_model_compares(tmp_path, register_graph):
    """Values of continuous observations have no bound then, so `dr` has nothing to say."""
    lake = open_lake(tmp_path / "cut", create=True)
    rng = np.random.default_rng(0)
    lake.dataset("log").create(Box((1,)), Discrete(2))
    lake.dataset("log").append(
        Episode(
            f"e/{i:03d}",
            observations=rng.standard_normal((2, 1)).astype(np.float32),
            actions=rng.integers(0, 2, 2),
            rewards=np.ones(2),
            truncated=True,
            final_observation=np.zeros(1, np.float32),
            behavior_log_probs=np.log([0.5, 0.5]).astype(np.float32),
        )
        for i in range(150)
    )
    spec = PolicySpec(Box((1,)), Discrete(2), "categorical")
    champion, candidate = (register_graph(lake, "p", _Sign(slope), spec) for slope in (0.1, 0.2))
    question = EvaluationRequest("log", "p", exploration=AS_DRAWN)
    found = ask(lake, candidate, champion, question=question)
    assert [one.estimator for one in found.comparisons] == ["wpdis"]
    for against in (champion, None):
        found = ask(lake, candidate, against, question=question)
        (reason,) = [one for one in found.reasons if one.startswith("dr cannot compare it with ")]
        assert "no model of values: with gamma 1, values of truncated episodes are unb" in reason
        assert "set `discount` below 1" in reason
        assert "such as wpdis, by `estimators`" in reason


def test_a_damaged_manifest_is_neither_evaluated_nor_promoted(lake, register_table):
    champion, candidate = register_table(lake, "p", BAD), register_table(lake, "p", GOOD)
    for damaged in (candidate, champion):
        path = damaged.path / "manifest.json"
        data = path.read_bytes()
        for position in range(0, len(data), 40):
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            path.write_bytes(flipped)
            with pytest.raises(PackageInvalidError, match="manifest was altered"):
                ask(lake, candidate, champion)
            with pytest.raises(PackageInvalidError, match="manifest was altered"):
                evaluate_policy(lake, EvaluationRequest("log", str(damaged), estimators=CHEAP))
        path.write_bytes(data)
    assert ask(lake, candidate, champion).passed
