import json

import numpy as np
import pyarrow.csv
import pytest

from replaylake.offline.evaluation.ope import importance
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes, one_step_episodes
from replaylake.offline.evaluation.ope.weights import EstimatorInputs, NotEstimableError


def two_episodes():
    """Ratios 2, 0.5 | 3, 1; rewards 1, 4 | 2, 0; gamma 0.5. Weights 2, 1 | 3, 3; returns 3, 2."""
    return LoggedEpisodes(
        np.array([0, 2, 4]),
        np.array([1.0, 4.0, 2.0, 0.0]),
        discount=0.5,
        behavior_probs=np.array([0.25, 0.5, 0.25, 0.5]),
        target_probs=np.array([0.5, 0.25, 0.75, 0.5]),
    )


BY_HAND = [
    (importance.importance_sampling, (1 * 3 + 3 * 2) / 2),
    (importance.clipped_importance_sampling, (1 * 3 + 2.5 * 2) / 2),
    (importance.weighted_importance_sampling, (1 * 3 + 3 * 2) / 4),
    # Rewards times gamma^t rho_0:t: 2, 2 | 6, 0.
    (importance.per_decision_importance_sampling, (4 + 6) / 2),
    (importance.weighted_per_decision_importance_sampling, (2 + 6) / (2 + 3) + (2 + 0) / (1 + 3)),
]


@pytest.mark.parametrize(("estimator", "value"), BY_HAND)
def test_values_worked_out_by_hand(estimator, value):
    assert estimator(EstimatorInputs(two_episodes(), clip=2.5)).value == pytest.approx(
        value, rel=1e-15
    )


def test_on_policy_all_give_the_log_mean():
    rng = np.random.default_rng(0)
    offsets = np.append(0, rng.integers(1, 9, 50).cumsum())
    probs = rng.uniform(0.1, 1, offsets[-1])
    episodes = LoggedEpisodes(
        offsets, rng.normal(size=offsets[-1]), 0.9, behavior_probs=probs, target_probs=probs
    )
    for estimator, _ in BY_HAND:
        value = estimator(EstimatorInputs(episodes, clip=2.0)).value
        assert value == pytest.approx(episodes.returns.mean(), rel=1e-12)


def random_log(seed, num_episodes=40, longest=7):
    rng = np.random.default_rng(seed)
    offsets = np.append(0, rng.integers(1, longest + 1, num_episodes).cumsum())
    size = offsets[-1]
    return LoggedEpisodes(
        offsets,
        rng.normal(1, 1, size),
        0.9,
        behavior_probs=rng.uniform(0.4, 0.6, size),
        target_probs=rng.uniform(0.3, 0.7, size),
    )


def without(episodes, left_out):
    """The log without one episode."""
    keep = np.repeat(np.arange(episodes.num_episodes) != left_out, episodes.lengths)
    return LoggedEpisodes(
        np.append(0, np.delete(episodes.lengths, left_out).cumsum()),
        episodes.rewards[keep],
        episodes.discount,
        behavior_probs=episodes.behavior_probs[keep],
        target_probs=episodes.target_probs[keep],
    )


@pytest.mark.parametrize("estimator", [row[0] for row in BY_HAND])
def test_influences_are_what_leaving_an_episode_out_does(estimator):
    episodes = random_log(1)
    found = estimator(EstimatorInputs(episodes, clip=1.1))
    num = episodes.num_episodes
    left_out = [
        estimator(EstimatorInputs(without(episodes, e), clip=1.1)).value for e in range(num)
    ]
    jackknife = num * (found.value - np.array(left_out))
    assert found.influence.mean() == pytest.approx(0, abs=0.05)
    # Past an episode's end wpdis is linearized: exact to first order only.
    tolerance = 0.1 if estimator is importance.weighted_per_decision_importance_sampling else 1e-9
    assert found.influence == pytest.approx(jackknife, abs=tolerance * np.abs(jackknife).max())


def test_a_policy_that_never_acts_like_the_log_is_refused():
    log = one_step_episodes(np.ones(5), behavior_probs=np.full(5, 0.5), target_probs=np.zeros(5))
    for estimator, _ in BY_HAND[:4]:
        with pytest.raises(NotEstimableError, match="no episode has any weight"):
            estimator(EstimatorInputs(log, clip=2.0))


def test_a_ratio_that_rests_on_one_episode_is_refused():
    target = np.array([0.5, 0, 0, 0, 0])
    log = one_step_episodes(np.ones(5), behavior_probs=np.full(5, 0.5), target_probs=target)
    with pytest.raises(NotEstimableError, match="a single episode has all the weight"):
        importance.weighted_importance_sampling(EstimatorInputs(log, clip=2.0))


def test_bounds_hold_what_an_episode_can_contribute():
    for seed in range(5):
        episodes = random_log(seed)
        for estimator, _ in BY_HAND[:4]:
            found = estimator(EstimatorInputs(episodes, clip=1.5))
            # Influences are n / (n - 1) times as large as the contributions' distances.
            share = found.value + found.influence * (1 - 1 / episodes.num_episodes)
            slack = 0.1 if estimator is importance.weighted_importance_sampling else 1e-9
            assert share.min() >= found.bounds.low - slack
            assert share.max() <= found.bounds.high + slack
            assert not found.bounds.known


def test_bounds_are_known_where_weights_and_rewards_are():
    probs = np.array([[0.5, 0.5], [0.8, 0.2]])
    log = one_step_episodes(
        np.array([1.0, 0.0]),
        behavior_probs=np.array([0.5, 0.8]),
        target_probs=np.array([0.5, 0.5]),
        behavior_distribution=probs,
        target_distribution=np.full((2, 2), 0.5),
        reward_range=(-1.0, 2.0),
    )
    bounds = importance.importance_sampling(EstimatorInputs(log, clip=9.0)).bounds
    assert (bounds.low, bounds.high, bounds.known) == (-2.5, 5.0, True)
    bounds = importance.clipped_importance_sampling(EstimatorInputs(log, clip=2.0)).bounds
    assert (bounds.low, bounds.high, bounds.known) == (-2.0, 4.0, True)


def test_vowpal_wabbit_vectors(shared_data):
    vectors = json.loads((shared_data / "vectors.json").read_text())
    entry = next(vector for vector in vectors if vector["id"] == "ips_snips_constant")
    for k, given in enumerate(entry["inputs"]):
        num = given["n"]
        log = one_step_episodes(
            np.full(num, float(given["r"])),
            behavior_probs=np.full(num, float(given["p_log"])),
            target_probs=np.full(num, float(given["p_pred"])),
        )
        inputs = EstimatorInputs(log, clip=1.0)
        assert importance.importance_sampling(inputs).value == entry["expected"]["ips"][k]
        assert (
            importance.weighted_importance_sampling(inputs).value == entry["expected"]["snips"][k]
        )


@pytest.mark.parametrize(("logged", "target"), [("random", "bts"), ("bts", "random")])
def test_open_bandit_as_obp_has_it(shared_data, logged, target):
    folder = shared_data / "obd"
    expected = json.loads((folder / "obp_reference.json").read_text())
    expected = expected["results"][f"men:{logged}->{target}"]
    table = pyarrow.csv.read_csv(folder / logged / "men" / "men.csv")
    column = {name: table[name].to_numpy() for name in table.column_names}
    # obp numbers positions by their order: 1, 2, 3 become 0, 1, 2.
    positions = np.unique(column["position"], return_inverse=True)[1]
    probs = np.array(json.loads((folder / "action_dist.json").read_text())[f"men_{target}"])
    log = one_step_episodes(
        column["click"].astype(float),
        behavior_probs=column["propensity_score"],
        target_probs=probs[column["item_id"], positions],
    )
    inputs = EstimatorInputs(log, clip=100.0)
    ips, snips = (
        importance.importance_sampling(inputs),
        importance.weighted_importance_sampling(inputs),
    )
    assert ips.value == pytest.approx(expected["values"]["ipw"], abs=1e-9)
    assert snips.value == pytest.approx(expected["values"]["snipw"], abs=1e-9)
    assert snips.spread.effective_sample_size == pytest.approx(expected["ess"], rel=1e-9)
    assert snips.spread.max_weight == pytest.approx(expected["w_max"], rel=1e-9)
    assert log.returns.mean() == expected["behavior_on_policy_value"]
