"""What a policy says of given actions is what `act` says of its own."""

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete, MultiDiscrete
from replaylake.datastore.errors import EpisodeInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.heads import act_from_head
from replaylake.datastore.lake.policies.log_probs import head_action_probs, head_log_probs
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy

OBSERVATIONS = Box((2,))
BOX = Box((2,), low=[-1.0, 0.0], high=[3.0, 1.0])
N = 500
SPECS = {
    "categorical": PolicySpec(OBSERVATIONS, Discrete(4, start=-1), "categorical"),
    "q_values": PolicySpec(OBSERVATIONS, Discrete(4), "q_values"),
    "gaussian": PolicySpec(OBSERVATIONS, Box((2,)), "gaussian"),
    "squashed_gaussian": PolicySpec(OBSERVATIONS, BOX, "squashed_gaussian"),
    "multi_categorical": PolicySpec(OBSERVATIONS, MultiDiscrete((2, 3)), "multi_categorical"),
}


def parameters(head):
    rng = np.random.default_rng(0)
    if head in ("categorical", "q_values"):
        return {"logits" if head == "categorical" else head: rng.normal(size=(N, 4))}
    if head == "multi_categorical":
        return {"logits": rng.normal(size=(N, 5))}
    return {"means": rng.normal(size=(N, 2)) / 2, "log_stds": rng.normal(size=(N, 2)) / 2 - 1}


@pytest.mark.parametrize("head", SPECS)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_drawn_actions_have_the_same_log_probability(head, temperature):
    spec, given = SPECS[head], parameters(head)
    how = {"deterministic": False, "temperature": temperature}
    act = act_from_head(spec, given, np.random.default_rng(1), **how)
    found = head_log_probs(spec, given, act.actions, **how)
    # Of a squashed action what it was before tanh is known only as float32 keeps it.
    tolerance = 2e-3 if head == "squashed_gaussian" else 1e-5
    np.testing.assert_allclose(found, act.log_probs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head", ["categorical", "q_values"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"epsilon": 0.3},
        {"deterministic": False},
        {"deterministic": False, "temperature": 0.3, "epsilon": 0.1},
    ],
)
def test_probabilities_are_how_often_each_action_is_drawn(head, how):
    spec = SPECS[head]
    one = {name: np.repeat(array[:1], 40_000, axis=0) for name, array in parameters(head).items()}
    mask = np.tile([True, False, True, True], (40_000, 1))
    act = act_from_head(spec, one, np.random.default_rng(2), mask=mask, **how)
    probs = head_action_probs(spec, one, mask=mask, **how)
    start = spec.action_space.start
    drawn = np.bincount(act.actions - start, minlength=4) / 40_000
    np.testing.assert_allclose(probs[0], drawn, atol=0.01)
    assert probs[0, 1] == 0
    found = head_log_probs(spec, one, act.actions, mask=mask, **how)
    np.testing.assert_allclose(found, act.log_probs, atol=1e-6)


def test_an_action_that_is_never_chosen():
    spec, given = SPECS["categorical"], {"logits": np.array([[0.0, 5.0, 0.0, 0.0]])}
    assert head_log_probs(spec, given, np.array([1]))[0] == -np.inf
    assert head_log_probs(spec, given, np.array([0]))[0] == 0
    found = head_log_probs(spec, given, np.array([1]), epsilon=0.4)
    assert found[0] == pytest.approx(np.log(0.1))


def test_density_of_a_gaussian_by_hand():
    given = {"means": np.array([[1.0, 2.0]]), "log_stds": np.log([[0.5, 2.0]])}
    found = head_log_probs(
        SPECS["gaussian"], given, np.array([[1.5, 0.0]], np.float32), deterministic=False
    )
    # Both are one standard deviation off.
    assert found[0] == pytest.approx(-1 - np.log(2 * np.pi) - np.log(0.5 * 2.0))


@pytest.mark.parametrize("head", ["gaussian", "squashed_gaussian"])
@pytest.mark.parametrize("mean", [0.3, 5.0])
def test_densities_integrate_to_one(head, mean):
    grid = np.linspace(-0.9999, 2.9999, 4001)
    space = Box((1,), low=-1.0, high=3.0)
    spec = PolicySpec(OBSERVATIONS, space, head)
    mean = mean if head == "gaussian" else 0.3
    given = {"means": np.full((len(grid), 1), mean), "log_stds": np.full((len(grid), 1), -0.7)}
    found = np.exp(
        head_log_probs(spec, given, grid[:, None].astype(np.float32), deterministic=False)
    )
    assert np.trapezoid(found, grid) == pytest.approx(1, abs=1e-3)


def test_an_action_on_a_bound_has_a_density_and_one_beyond_it_none():
    spec = PolicySpec(OBSERVATIONS, Box((2,), low=[-1.0, 0.0], high=[3.0, 0.1]), "gaussian")
    given = {"means": np.zeros((3, 2)), "log_stds": np.zeros((3, 2))}
    # float32 has no 0.1: the action next to it is the bound.
    actions = np.array([[3.0, 0.1], [2.9, 0.05], [3.1, 0.05]], np.float32)
    found = head_log_probs(spec, given, actions, deterministic=False)
    assert np.isfinite(found).tolist() == [True, True, False]
    assert found[2] == -np.inf
    # A squashed one is taken for what float32 can hold next to the bound.
    squashed = head_log_probs(
        SPECS["squashed_gaussian"], given, np.array([[3.0, 0.5]] * 3), deterministic=False
    )
    assert np.isfinite(squashed).all()


@pytest.mark.parametrize(
    ("spec", "how", "said"),
    [
        (PolicySpec(OBSERVATIONS, BOX, "deterministic"), {}, "head deterministic"),
        (PolicySpec(OBSERVATIONS, BOX, "sampled", noise_size=2), {}, "head sampled"),
        (SPECS["gaussian"], {}, "head gaussian: found log-probabilities of its mode"),
        (SPECS["gaussian"], {"deterministic": False, "epsilon": 0.1}, "epsilon"),
    ],
)
def test_heads_without_a_density_refuse_by_name(spec, how, said):
    given = {"means": np.zeros((1, 2)), "log_stds": np.zeros((1, 2)), "actions": np.zeros((1, 2))}
    with pytest.raises(SpaceUnsupportedError, match=said):
        head_log_probs(spec, given, np.array([[0.5, 0.5]], np.float32), **how)


def test_probabilities_of_every_action_are_of_discrete_ones():
    with pytest.raises(SpaceUnsupportedError, match="head gaussian"):
        head_action_probs(SPECS["gaussian"], parameters("gaussian"))


def test_what_is_not_finite_or_not_an_action_is_refused():
    with pytest.raises(EpisodeInvalidError, match="not finite"):
        head_action_probs(SPECS["categorical"], {"logits": np.array([[0, np.nan, 0, 0]])})
    with pytest.raises(EpisodeInvalidError):
        head_log_probs(SPECS["categorical"], {"logits": np.zeros((1, 4))}, np.array([0.5]))
    for outside in (-2, 3):
        with pytest.raises(EpisodeInvalidError):
            head_log_probs(SPECS["categorical"], {"logits": np.zeros((1, 4))}, np.array([outside]))


def test_uniform():
    observations = np.zeros((3, 2), np.float32)
    discrete = UniformPolicy(OBSERVATIONS, Discrete(4, start=2))
    mask = np.array([[True] * 4, [True, False, False, True], [False, True, False, False]])
    np.testing.assert_array_equal(
        discrete.action_probs(observations, action_mask=mask),
        [[0.25] * 4, [0.5, 0, 0, 0.5], [0, 1, 0, 0]],
    )
    found = discrete.log_probs(observations, np.array([2, 3, 3]), action_mask=mask)
    np.testing.assert_allclose(np.exp(found), [0.25, 0, 1])
    box = UniformPolicy(OBSERVATIONS, BOX)
    actions = box.act(observations, rng=np.random.default_rng(0))
    np.testing.assert_allclose(box.log_probs(observations, actions.actions), actions.log_probs)
    with pytest.raises(SpaceUnsupportedError, match="random policy"):
        box.action_probs(observations)
