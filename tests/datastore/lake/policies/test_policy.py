import math

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete, MultiDiscrete
from replaylake.datastore.errors import EpisodeInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.heads import act_from_head
from replaylake.datastore.lake.policies.log_probs import head_log_probs
from replaylake.datastore.lake.policies.policy import HEAD_OUTPUTS, HEADS, Act, PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy

OBSERVATION = Box((1,))
# The 0.999 quantiles of chi-square, by degrees of freedom: one run in a thousand fails by chance,
# and the seed is fixed.
CHI_SQUARE_999 = {1: 10.828, 2: 13.816, 3: 16.266}


def discrete(head="categorical", n=3, start=0):
    return PolicySpec(OBSERVATION, Discrete(n, start), head)


def continuous(head, low=-1.0, high=1.0, size=1):
    return PolicySpec(OBSERVATION, Box((size,), "float32", low, high), head)


def repeated(row, num):
    return np.tile(np.asarray(row, np.float32), (num, 1))


def chi_square(actions, probs):
    counts = np.bincount(actions, minlength=len(probs))
    expected = np.asarray(probs) * len(actions)
    return float(((counts - expected) ** 2 / expected).sum())


def test_every_head_has_outputs():
    assert set(HEADS) == set(HEAD_OUTPUTS)


def test_an_unknown_head_is_refused_with_the_known_ones():
    with pytest.raises(SpaceUnsupportedError, match=r"'softmax'.*categorical"):
        PolicySpec(OBSERVATION, Discrete(2), "softmax")


@pytest.mark.parametrize(
    ("head", "space"),
    [("categorical", Box((1,))), ("gaussian", Discrete(2)), ("q_values", Box(()))],
)
def test_a_head_refuses_the_other_kind_of_action(head, space):
    with pytest.raises(SpaceUnsupportedError, match=head):
        PolicySpec(OBSERVATION, space, head)


@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("categorical", {"state_size": -1}),
        ("uniform", {"state_size": 2}),
        ("categorical", {"frame_stack": 2}),  # of a Discrete
        ("categorical", {"frame_stack": 0}),
    ],
)
def test_a_state_that_cannot_be_is_refused(head, options):
    with pytest.raises(SpaceUnsupportedError, match="state"):
        PolicySpec(Discrete(3), Discrete(2), head, **options)


def test_a_stack_of_frames_needs_a_state_that_holds_them():
    PolicySpec(Box((5,)), Discrete(2), "categorical", state_size=11, frame_stack=3)
    with pytest.raises(SpaceUnsupportedError, match=r"found 3 over .* a state of 10 numbers"):
        PolicySpec(Box((5,)), Discrete(2), "categorical", state_size=10, frame_stack=3)


def test_the_mode_of_logits_is_certain():
    act = act_from_head(discrete(), {"logits": np.array([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])})
    np.testing.assert_array_equal(act.actions, [1, 0])
    np.testing.assert_array_equal(act.log_probs, [0.0, 0.0])
    assert act.actions.dtype == np.int64
    assert act.q_values is None


def test_actions_start_where_the_space_starts():
    act = act_from_head(discrete(start=10), {"logits": np.array([[0.0, 2.0, 1.0]])})
    np.testing.assert_array_equal(act.actions, [11])


def test_sampled_logits_follow_their_softmax_and_say_so():
    logits = np.log([0.2, 0.5, 0.3])
    act = act_from_head(
        discrete(),
        {"logits": repeated(logits, 10_000)},
        np.random.default_rng(0),
        deterministic=False,
    )
    assert chi_square(act.actions, [0.2, 0.5, 0.3]) < CHI_SQUARE_999[2]
    np.testing.assert_allclose(np.exp(act.log_probs), np.array([0.2, 0.5, 0.3])[act.actions], 1e-6)


def test_temperature_divides_the_logits():
    # At temperature 2 probabilities are proportional to square roots: 0.1, 0.2, 0.4 of (1, 4, 16).
    logits = np.log([1.0, 4.0, 16.0])
    act = act_from_head(
        discrete(),
        {"logits": repeated(logits, 10_000)},
        np.random.default_rng(1),
        deterministic=False,
        temperature=2.0,
    )
    probs = np.array([1, 2, 4]) / 7
    assert chi_square(act.actions, probs) < CHI_SQUARE_999[2]
    np.testing.assert_allclose(np.exp(act.log_probs), probs[act.actions], 1e-6)


def test_temperature_zero_is_the_mode():
    act = act_from_head(
        discrete(), {"logits": repeated([0, 1, 0], 5)}, deterministic=False, temperature=0.0
    )
    np.testing.assert_array_equal(act.actions, np.ones(5))


def test_epsilon_mixes_a_uniform_draw_over_the_allowed_actions():
    # Greedy 1 of {1, 2}, epsilon 0.2: 0.8 + 0.1 and 0.1; action 0 is masked.
    mask = np.tile([False, True, True], (10_000, 1))
    act = act_from_head(
        discrete(),
        {"logits": repeated([9, 2, 1], 10_000)},
        np.random.default_rng(2),
        epsilon=0.2,
        mask=mask,
    )
    assert not (act.actions == 0).any()
    assert chi_square(act.actions - 1, [0.9, 0.1]) < CHI_SQUARE_999[1]
    np.testing.assert_allclose(np.exp(act.log_probs), np.array([0, 0.9, 0.1])[act.actions], 1e-6)


def test_epsilon_and_temperature_together_give_the_whole_mixture():
    # softmax 0.25, 0.75; epsilon 0.4: 0.6 * p + 0.2 = 0.35, 0.65.
    act = act_from_head(
        discrete(n=2),
        {"logits": repeated(np.log([1.0, 3.0]), 10_000)},
        np.random.default_rng(3),
        deterministic=False,
        epsilon=0.4,
    )
    assert chi_square(act.actions, [0.35, 0.65]) < CHI_SQUARE_999[1]
    np.testing.assert_allclose(np.exp(act.log_probs), np.array([0.35, 0.65])[act.actions], 1e-6)


def test_a_mask_renormalizes():
    mask = np.tile([True, False, True], (1000, 1))
    act = act_from_head(
        discrete(),
        {"logits": repeated(np.log([0.2, 0.5, 0.3]), 1000)},
        np.random.default_rng(4),
        deterministic=False,
        mask=mask,
    )
    assert set(act.actions) == {0, 2}
    np.testing.assert_allclose(np.exp(act.log_probs), np.array([0.4, 0, 0.6])[act.actions], 1e-6)


def test_q_values_are_returned_and_the_greedy_action_takes_the_greatest_allowed():
    q_values = np.array([[1.0, 3.0, 2.0]], np.float32)
    act = act_from_head(
        discrete("q_values"), {"q_values": q_values}, mask=np.array([[True, False, True]])
    )
    np.testing.assert_array_equal(act.actions, [2])
    np.testing.assert_array_equal(act.q_values, q_values)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.array([[True, True]]), r"bool \[1, 2\].*\[1, 3\]"),
        (np.array([[1, 1, 1]]), "int64"),
        (np.zeros((1, 3), bool), "row 0.*no allowed action"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    with pytest.raises(EpisodeInvalidError, match=message):
        act_from_head(discrete(), {"logits": np.zeros((1, 3))}, mask=mask)


def test_actions_are_drawn_without_a_generator_too():
    logits = {"logits": np.zeros((64, 3))}
    first, second = (act_from_head(discrete(), logits, deterministic=False) for _ in range(2))
    assert first.actions.tolist() != second.actions.tolist()


def test_a_negative_temperature_is_refused():
    with pytest.raises(EpisodeInvalidError, match="temperature"):
        act_from_head(
            discrete(), {"logits": np.zeros((1, 3))}, deterministic=False, temperature=-1.0
        )


def test_box_actions_have_no_mask_and_no_epsilon():
    parameters = {"actions": np.zeros((1, 1))}
    with pytest.raises(SpaceUnsupportedError, match="mask"):
        act_from_head(continuous("deterministic"), parameters, mask=np.ones((1, 1), bool))
    with pytest.raises(SpaceUnsupportedError, match="epsilon"):
        act_from_head(continuous("deterministic"), parameters, epsilon=0.1)


def test_deterministic_actions_are_clipped_and_have_no_density():
    act = act_from_head(
        continuous("deterministic", low=[-1.0, 0.0], high=[1.0, 5.0], size=2),
        {"actions": np.array([[-3.0, 4.0], [0.5, 9.0]])},
    )
    np.testing.assert_array_equal(act.actions, np.array([[-1, 4], [0.5, 5]], np.float32))
    assert act.actions.dtype == np.float32
    assert act.log_probs is None


def test_a_gaussian_in_an_unbounded_box_has_its_own_density():
    spec = continuous("gaussian", -math.inf, math.inf)
    parameters = {"means": repeated([1.5], 20_000), "log_stds": repeated([math.log(2)], 20_000)}
    act = act_from_head(spec, parameters, np.random.default_rng(5), deterministic=False)
    z = (act.actions[:, 0] - 1.5) / 2
    np.testing.assert_allclose(
        act.log_probs, -0.5 * z**2 - math.log(2) - 0.5 * math.log(2 * math.pi), atol=1e-5
    )
    # Mean within 4 standard errors of 1.5, standard deviation within 4 of 2.
    assert abs(act.actions.mean() - 1.5) < 4 * 2 / math.sqrt(20_000)
    assert abs(act.actions.std() - 2) < 4 * 2 / math.sqrt(40_000)


@pytest.mark.parametrize("mean", [0.9, 1.0, -40.0])
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_every_draw_of_a_bounded_gaussian_has_a_density(mean, temperature):
    spec = continuous("gaussian")
    parameters = {"means": repeated([mean], 1000), "log_stds": repeated([0.0], 1000)}
    how = {"deterministic": False, "temperature": temperature}
    act = act_from_head(spec, parameters, np.random.default_rng(6), **how)
    assert np.isfinite(act.log_probs).all()
    # Nothing lies on a bound in a heap, as clipped draws would.
    assert len(np.unique(act.actions)) > 990
    found = head_log_probs(spec, parameters, act.actions, **how)
    np.testing.assert_allclose(found, act.log_probs, rtol=1e-4, atol=1e-4)


def test_the_mode_of_a_gaussian_is_its_mean_and_squashed_in_the_bounds():
    parameters = {"means": np.array([[0.5]]), "log_stds": np.array([[0.0]])}
    plain = act_from_head(continuous("gaussian", -2, 6), parameters)
    squashed = act_from_head(continuous("squashed_gaussian", -2, 6), parameters)
    np.testing.assert_allclose(plain.actions, [[0.5]])
    # Center 2, half range 4: 2 + 4 tanh(0.5).
    np.testing.assert_allclose(squashed.actions, [[2 + 4 * 0.46211716]], rtol=1e-6)
    assert squashed.log_probs is None


def squashed_density(actions, mean, std, low, high):
    """Density of center + scale * tanh(N(mean, std^2)), by the change of variables."""
    center, scale = (low + high) / 2, (high - low) / 2
    y = (actions - center) / scale
    normal = np.exp(-0.5 * ((np.arctanh(y) - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    return normal / ((1 - y**2) * scale)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_squashed_log_probs_are_a_density_that_integrates_to_one(temperature):
    mean, log_std, low, high = 0.4, -0.3, -2.0, 6.0
    parameters = {"means": repeated([mean], 20_000), "log_stds": repeated([log_std], 20_000)}
    act = act_from_head(
        continuous("squashed_gaussian", low, high),
        parameters,
        np.random.default_rng(7),
        deterministic=False,
        temperature=temperature,
    )
    std = math.exp(log_std) * temperature
    actions = act.actions[:, 0].astype(np.float64)
    inside = (actions > low + 0.01) & (actions < high - 0.01)
    expected = squashed_density(actions[inside], mean, std, low, high)
    np.testing.assert_allclose(np.exp(act.log_probs[inside]), expected, rtol=1e-3)
    # The same density, numerically integrated over the bounds, is 1, and over [2, 4] it is the
    # share of the draws that fell there.
    grid = np.linspace(low, high, 200_002)[1:-1]
    density = squashed_density(grid, mean, std, low, high)
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-4)
    part = (grid >= 2) & (grid <= 4)
    share = float(((actions >= 2) & (actions <= 4)).mean())
    assert np.trapezoid(density[part], grid[part]) == pytest.approx(share, abs=4 * 0.5 / 141)


def test_squashed_log_probs_stay_finite_far_out():
    parameters = {"means": np.array([[30.0]]), "log_stds": np.array([[-5.0]])}
    act = act_from_head(
        continuous("squashed_gaussian"), parameters, np.random.default_rng(8), deterministic=False
    )
    assert np.isfinite(act.log_probs).all()


def test_the_random_policy_is_uniform_over_discrete_actions():
    policy = UniformPolicy(OBSERVATION, Discrete(4))
    act = policy.act(np.zeros((8000, 1), np.float32), rng=np.random.default_rng(9))
    assert chi_square(act.actions, [0.25] * 4) < CHI_SQUARE_999[3]
    np.testing.assert_allclose(np.exp(act.log_probs), 0.25, rtol=1e-6)


def test_the_random_policy_keeps_to_masks():
    policy = UniformPolicy(OBSERVATION, Discrete(3))
    mask = np.tile([True, False, True], (100, 1))
    act = policy.act(
        np.zeros((100, 1), np.float32), rng=np.random.default_rng(10), action_mask=mask
    )
    assert set(act.actions) == {0, 2}
    np.testing.assert_allclose(np.exp(act.log_probs), 0.5, rtol=1e-6)


def test_the_random_policy_is_uniform_in_a_bounded_box():
    policy = UniformPolicy(OBSERVATION, Box((2,), "float32", [0.0, -1.0], [4.0, 1.0]))
    act: Act = policy.act(np.zeros((1000, 1), np.float32), rng=np.random.default_rng(11))
    # Density 1 / (4 * 2).
    np.testing.assert_allclose(act.log_probs, -math.log(8), rtol=1e-6)
    assert act.actions.min(axis=0)[0] >= 0
    assert act.actions.dtype == np.float32


def test_the_random_policy_draws_every_integer_of_a_box():
    policy = UniformPolicy(OBSERVATION, Box((1,), "int64", 0, 3))
    act = policy.act(np.zeros((8000, 1), np.float32), rng=np.random.default_rng(12))
    assert chi_square(act.actions[:, 0], [0.25] * 4) < CHI_SQUARE_999[3]
    np.testing.assert_allclose(np.exp(act.log_probs), 0.25, rtol=1e-6)
    assert act.actions.dtype == np.int64


@pytest.mark.parametrize(
    ("dtype", "low", "high", "num"),
    [("uint8", 0, 255, 256), ("int8", -128, 127, 256), ("bool", 0, 1, 2), ("int32", -0.5, 1.5, 2)],
)
def test_the_random_policy_keeps_to_the_integers_within(dtype, low, high, num):
    policy = UniformPolicy(OBSERVATION, Box((), dtype, low, high))
    act = policy.act(np.zeros((20 * num, 1), np.float32), rng=np.random.default_rng(13))
    first = math.ceil(low)
    assert set(act.actions.astype(int).tolist()) == set(range(first, first + num))
    np.testing.assert_allclose(act.log_probs, -math.log(num), rtol=1e-6)


def test_the_random_policy_draws_from_the_whole_of_int64():
    policy = UniformPolicy(OBSERVATION, Box((1,), "int64", -(2**63), 2**63 - 1))
    act = policy.act(np.zeros((100, 1), np.float32), rng=np.random.default_rng(14))
    assert (act.actions > 2**62).any()
    assert (act.actions < -(2**62)).any()


def test_an_element_without_width_is_certain():
    for dtype, log_prob in (("float32", -math.log(4)), ("int64", -math.log(5))):
        policy = UniformPolicy(OBSERVATION, Box((2,), dtype, [0, 1], [4, 1]))
        act = policy.act(np.zeros((10, 1), np.float32), rng=np.random.default_rng(15))
        np.testing.assert_allclose(act.log_probs, log_prob, rtol=1e-6)
        assert set(act.actions[:, 1]) == {1}


@pytest.mark.parametrize("space", [Discrete(3), Box((1,), "float32", 0, 1)])
def test_the_random_policy_says_that_it_is_uniform_and_has_no_graph(space):
    spec = UniformPolicy(OBSERVATION, space).spec
    assert spec.head == "uniform"
    with pytest.raises(SpaceUnsupportedError, match="no graph"):
        act_from_head(spec, {})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("head", HEADS[:-1])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_graph_that_does_not_answer_with_numbers_is_refused(head, number, deterministic):
    if head == "multi_categorical":
        spec = PolicySpec(OBSERVATION, MultiDiscrete((3,)), head)
    else:
        is_discrete = head in ("categorical", "q_values")
        spec = discrete(head) if is_discrete else continuous(head, size=3)
    for broken in HEAD_OUTPUTS[head]:
        parameters = {name: np.zeros((4, 3), np.float32) for name in HEAD_OUTPUTS[head]}
        parameters[broken][2, 0] = number
        with pytest.raises(EpisodeInvalidError, match=f"{broken}.*not finite for observation 2"):
            act_from_head(spec, parameters, np.random.default_rng(0), deterministic=deterministic)


def test_the_random_policy_refuses_an_unbounded_box():
    with pytest.raises(SpaceUnsupportedError, match="bounded"):
        UniformPolicy(OBSERVATION, Box((1,)))
