import numpy as np
import pytest

from replaylake.offline.evaluation.ope.calibration import (
    calibration,
    calibration_error,
    reliability,
)
from replaylake.offline.evaluation.ope.logged_episodes import one_step_episodes

PROBS = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])


def drawn_log(rng, said=PROBS, drawn=PROBS, num_rows=2000, whole=True):
    """Actions drawn from one table and said to be from another."""
    contexts = rng.integers(0, 2, num_rows)
    actions = (rng.random(num_rows)[:, None] > drawn[contexts].cumsum(1)).sum(1).clip(0, 2)
    every = said[contexts]
    return one_step_episodes(
        np.zeros(num_rows),
        behavior_probs=every[np.arange(num_rows), actions],
        actions=actions,
        behavior_distribution=every if whole else None,
    )


@pytest.mark.parametrize("whole", [True, False])
def test_right_propensities_are_rarely_doubted(whole):
    rng = np.random.default_rng(0)
    found = [calibration(drawn_log(rng, whole=whole)) for _ in range(200)]
    p_values = np.array([one.p_value for one in found])
    assert (p_values < 0.05).mean() < 0.1
    assert (p_values < 0.001).sum() <= 1
    assert np.mean([abs(one.inverse_z) < 2 for one in found]) > 0.9


def test_p_values_are_uniform_where_propensities_are_right():
    rng = np.random.default_rng(1)
    p_values = [calibration(drawn_log(rng)).p_value for _ in range(400)]
    assert np.quantile(p_values, [0.1, 0.5, 0.9]) == pytest.approx([0.1, 0.5, 0.9], abs=0.07)


@pytest.mark.parametrize("whole", [True, False])
def test_wrong_propensities_are_seen(whole):
    drawn = np.array([[0.4, 0.4, 0.2], [0.1, 0.1, 0.8]])
    found = calibration(
        drawn_log(np.random.default_rng(2), drawn=drawn, num_rows=4000, whole=whole)
    )
    assert found.p_value < 1e-4
    assert found.worst_action in (0, 1)
    assert abs(found.observed - found.expected) > 50


def test_rare_actions_are_taken_together():
    said = np.array([[0.998, 0.001, 0.001], [0.998, 0.001, 0.001]])
    log = drawn_log(np.random.default_rng(3), said=said, drawn=said)
    assert calibration(log).p_value > 0.001


def test_bins_by_hand():
    distribution = np.array([[0.25, 0.75], [0.25, 0.75], [0.25, 0.75], [1.0, 0.0]])
    bins = reliability(distribution, np.array([1, 0, 1, 0]))
    low, middle, high, top = bins
    assert (low.predicted, low.observed, low.count) == (0, 0, 1)
    assert (middle.low, middle.high, middle.count) == (0.1, 0.3, 3)
    assert (middle.predicted, middle.observed) == (0.25, pytest.approx(1 / 3))
    assert (high.predicted, high.observed, high.count) == (0.75, pytest.approx(2 / 3), 3)
    assert (top.predicted, top.observed, top.count) == (1, 1, 1)
    by_hand = (3 * (1 / 3 - 0.25) + 3 * (0.75 - 2 / 3)) / 8
    assert calibration_error(bins) == pytest.approx(by_hand)


def test_the_mean_of_one_over_p_counts_the_possible_actions():
    log = one_step_episodes(
        np.zeros(4),
        behavior_probs=np.array([0.25, 0.75, 0.75, 0.75]),
        actions=np.array([0, 1, 1, 1]),
        behavior_distribution=np.tile([0.25, 0.75, 0.0], (4, 1)),
    )
    found = calibration(log)
    assert (found.inverse_mean, found.inverse_expected) == (pytest.approx(2), 2)
    assert found.p_value == pytest.approx(1)


def test_nothing_to_check_without_actions_or_propensities():
    assert calibration(one_step_episodes(np.zeros(2), behavior_probs=np.ones(2))) is None
    assert calibration(one_step_episodes(np.zeros(2), actions=np.zeros(2, int))) is None
    unknown = one_step_episodes(
        np.zeros(2), actions=np.zeros(2, int), behavior_probs=np.array([1, np.nan])
    )
    assert calibration(unknown) is None


def test_what_a_mask_or_a_sure_policy_rules_out_is_not_missing():
    """Action 2 is possible in one row of ten: its 1 / p sum to a tenth of the rows."""
    rng = np.random.default_rng(4)
    num = 5000
    allowed = rng.random(num) < 0.1
    every = np.where(allowed[:, None], [0.25, 0.25, 0.5], [0.5, 0.5, 0.0])
    actions = (rng.random(num)[:, None] > every.cumsum(1)).sum(1).clip(0, 2)
    probs = every[np.arange(num), actions]
    found = calibration(one_step_episodes(np.zeros(num), behavior_probs=probs, actions=actions))
    assert found.p_value > 0.001
    assert found.inverse_z == 0
    # Nearly sure of one action in each half of the rows: of the other 1 / p is never seen.
    sure = np.full(num, 1 - 1e-9)
    halves = (np.arange(num) % 2).astype(int)
    assert (
        calibration(one_step_episodes(np.zeros(num), behavior_probs=sure, actions=halves)).p_value
        == 1
    )


def test_an_action_that_explores_less_than_it_could_is_no_misfit():
    """0.5 of 500 rows are expected to explore, and none does: by chance in 6 of 10 logs."""
    log = one_step_episodes(
        np.zeros(500), behavior_probs=np.full(500, 0.999), actions=np.zeros(500, int)
    )
    found = calibration(log)
    # An excess of 500 (1 / 0.999 - 1) where the variance is about as much: 0.71 deviations.
    assert found.p_value == pytest.approx(0.24, abs=0.01)
