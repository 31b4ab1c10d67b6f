import dataclasses

import numpy as np
import pytest

from replaylake.offline.evaluation.ope import doubly_robust
from replaylake.offline.evaluation.ope.importance import (
    per_decision_importance_sampling,
    weighted_per_decision_importance_sampling,
)
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes, one_step_episodes
from replaylake.offline.evaluation.ope.weights import EstimatorInputs, NotEstimableError


def one_step_log(**changes):
    """Ratios 2, 0.5, 4; rewards 1, 0, 1; q 0.5, 0.25, 0.5; v 0.5, 1, 0."""
    fields = {
        "rewards": np.array([1.0, 0.0, 1.0]),
        "behavior_probs": np.array([0.25, 0.5, 0.125]),
        "target_probs": np.array([0.5, 0.25, 0.5]),
        "q_logged": np.array([0.5, 0.25, 0.5]),
        "v_target": np.array([0.5, 1.0, 0.0]),
    }
    return one_step_episodes(**{**fields, **changes})


def two_episodes(**changes):
    """Ratios 2, 0.5 | 3; weights 2, 1 | 3; rewards 1, 4 | 2; q 2, 3 | 1; v 1, 2 | 4; gamma 0.5."""
    return LoggedEpisodes(
        np.array([0, 2, 3]),
        np.array([1.0, 4.0, 2.0]),
        discount=0.5,
        behavior_probs=np.array([0.25, 0.5, 0.25]),
        target_probs=np.array([0.5, 0.25, 0.75]),
        q_logged=np.array([2.0, 3.0, 1.0]),
        v_target=np.array([1.0, 2.0, 4.0]),
    )


# On the one-step log the corrections rho (r - q) are 1, -0.125, 2.
ONE_STEP = [
    (doubly_robust.direct_method, 1.5 / 3),
    (doubly_robust.doubly_robust, (1.5 + 1 - 0.125 + 2) / 3),
    (doubly_robust.weighted_doubly_robust, 1.5 / 3 + (1 - 0.125 + 2) / 6.5),
    (doubly_robust.switch_doubly_robust, (1.5 + 1 - 0.125) / 3),
    # rho clip^2 / (rho^2 + clip^2) with clip 2: 2 * 4 / 8, 0.5 * 4 / 4.25, 4 * 4 / 20.
    (doubly_robust.optimistic_shrinkage, (1.5 + 0.5 * 1 - 0.25 * 2 / 4.25 + 0.5 * 0.8) / 3),
]


@pytest.mark.parametrize(("estimator", "value"), ONE_STEP)
def test_one_step_values_worked_out_by_hand(estimator, value):
    assert estimator(EstimatorInputs(one_step_log(), clip=2.0)).value == pytest.approx(
        value, rel=1e-14
    )


def test_sequential_values_worked_out_by_hand():
    inputs = EstimatorInputs(two_episodes(), clip=9.0)
    assert doubly_robust.direct_method(inputs).value == (1 + 4) / 2
    # The recursion, from the last step: V_1 = 2 + 0.5 (4 - 3) = 2.5, V_0 = 1 + 2 (1 + 1.25 - 2).
    first, second = 1 + 2 * (1 + 0.5 * 2.5 - 2), 4 + 3 * (2 - 1)
    assert doubly_robust.doubly_robust(inputs).value == pytest.approx((first + second) / 2)
    # Step 0: weights 2, 3; r - q + gamma v' is 1 - 2 + 1, 2 - 1. Step 1: weights 1, 3 (ended).
    by_hand = 2.5 + (2 * 0 + 3 * 1) / 5 + 0.5 * (1 * (4 - 3)) / 4
    assert doubly_robust.weighted_doubly_robust(inputs).value == pytest.approx(by_hand)


def random_log(seed, **changes):
    rng = np.random.default_rng(seed)
    offsets = np.append(0, rng.integers(1, 6, 30).cumsum())
    size = offsets[-1]
    log = LoggedEpisodes(
        offsets,
        rng.normal(size=size),
        0.9,
        behavior_probs=rng.uniform(0.3, 0.7, size),
        target_probs=rng.uniform(0.3, 0.7, size),
        q_logged=rng.normal(size=size),
        v_target=rng.normal(size=size),
    )
    return dataclasses.replace(log, **changes)


def test_the_sum_is_the_recursion():
    log = random_log(0)
    ratios = log.target_probs / log.behavior_probs
    values = []
    for start, stop in zip(log.offsets[:-1], log.offsets[1:], strict=True):
        value = 0.0
        for row in reversed(range(start, stop)):
            error = log.rewards[row] + 0.9 * value - log.q_logged[row]
            value = log.v_target[row] + ratios[row] * error
        values.append(value)
    found = doubly_robust.doubly_robust(EstimatorInputs(log, clip=9.0))
    assert found.value == pytest.approx(np.mean(values), rel=1e-12)


def test_without_a_model_s_opinion_only_importance_sampling_is_left():
    nothing = np.zeros(random_log(1).num_steps)
    inputs = EstimatorInputs(random_log(1, q_logged=nothing, v_target=nothing), clip=9.0)
    for corrected, plain in [
        (doubly_robust.doubly_robust, per_decision_importance_sampling),
        (doubly_robust.weighted_doubly_robust, weighted_per_decision_importance_sampling),
    ]:
        assert corrected(inputs).value == pytest.approx(plain(inputs).value, rel=1e-12)
        assert corrected(inputs).influence == pytest.approx(plain(inputs).influence, abs=1e-9)


def test_the_clip_decides_how_far_weights_are_trusted():
    log = one_step_log()
    full = doubly_robust.doubly_robust(EstimatorInputs(log, clip=1.0)).value
    model = doubly_robust.direct_method(EstimatorInputs(log, clip=1.0)).value
    for estimator in (doubly_robust.switch_doubly_robust, doubly_robust.optimistic_shrinkage):
        assert estimator(EstimatorInputs(log, clip=1e6)).value == pytest.approx(full)
        assert estimator(EstimatorInputs(log, clip=1e-6)).value == pytest.approx(model)


def test_no_model_is_refused():
    for estimator, _ in ONE_STEP:
        with pytest.raises(NotEstimableError, match="no model of values was fitted"):
            estimator(EstimatorInputs(one_step_log(q_logged=None), clip=2.0))


# Two states and actions: an episode ends by itself with probability 0.05 after each step, and is
# cut off after 20.
LIMIT, STOP = 20, 0.05
MOVES = np.array([[[0.8, 0.2], [0.3, 0.7]], [[0.6, 0.4], [0.1, 0.9]]])
REWARDS = np.array([[0.0, 0.2], [0.5, 1.0]])
BEHAVIOR, TARGET = np.array([[0.6, 0.4], [0.5, 0.5]]), np.array([[0.55, 0.45], [0.4, 0.6]])


def cut_off_log(rng, q, v, num=50):
    states, actions = np.zeros((num, LIMIT), int), np.zeros((num, LIMIT), int)
    for t in range(LIMIT):
        s, a = states[:, t], (rng.random(num) < BEHAVIOR[states[:, t], 1]).astype(int)
        actions[:, t] = a
        if t + 1 < LIMIT:
            states[:, t + 1] = rng.random(num) < MOVES[s, a, 1]
    stops = rng.random((num, LIMIT)) < STOP
    stops[:, -1] = True
    lengths = stops.argmax(1) + 1
    logged = np.arange(LIMIT) < lengths[:, None]
    s, a = states[logged], actions[logged]
    return LoggedEpisodes(
        np.append(0, lengths.cumsum()),
        REWARDS[s, a] + 0.1 * rng.standard_normal(len(s)),
        behavior_probs=BEHAVIOR[s, a],
        target_probs=TARGET[s, a],
        q_logged=q[s, a],
        v_target=v[s],
    )


def test_a_model_that_ignores_a_time_limit_cancels_out_of_dr_and_not_of_fqe():
    """Their mean over 400 logs is the value of 20 steps; the exact model's that without a limit."""
    finite, endless = np.zeros(2), np.zeros(2)
    for t in range(2000):
        endless = (TARGET * (REWARDS + (1 - STOP) * MOVES @ endless)).sum(1)
        if t < LIMIT:
            finite = (TARGET * (REWARDS + (1 - STOP) * MOVES @ finite)).sum(1)
    q = REWARDS + (1 - STOP) * MOVES @ endless
    assert endless[0] > 1.4 * finite[0]
    rng = np.random.default_rng(1)
    logs = [cut_off_log(rng, q, endless) for _ in range(400)]
    for estimator in (doubly_robust.doubly_robust, doubly_robust.weighted_doubly_robust):
        values = np.array([estimator(EstimatorInputs(log, 7.0)).value for log in logs])
        error = values.std(ddof=1) / np.sqrt(len(values))
        assert abs(values.mean() - finite[0]) < 3 * error, estimator.__name__
        assert 3 * error < 0.1 * (endless[0] - finite[0])
    assert doubly_robust.direct_method(EstimatorInputs(logs[0], 7.0)).value == pytest.approx(
        endless[0]
    )
