"""Fitted behavior policies against the ones that drew the actions."""

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.logged_steps import read_logged_steps
from replaylake.offline.evaluation.ope.behavior import BehaviorConfig, fit_behavior
from replaylake.offline.evaluation.ope.folds import each_fold, episode_folds

QUICK = BehaviorConfig(updates=300, hidden_sizes=(32,), learning_rate=5e-3, folds=2)


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


def logged(lake, xs, actions, action_space, **further):
    lake.dataset("log").create(Box((2,)), action_space, mask_size=further.pop("mask_size", None))
    lake.dataset("log").append(
        Episode(
            f"e/{i:05d}",
            observations=xs[i : i + 1],
            actions=actions[i : i + 1],
            rewards=np.zeros(1),
            terminated=True,
            **{name: values[i : i + 1] for name, values in further.items()},
        )
        for i in range(len(xs))
    )
    return read_logged_steps(lake.snapshot("log"))


@pytest.mark.slow
def test_probabilities_of_a_softmax(lake):
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((3000, 2)).astype(np.float32)
    logits = np.stack([xs[:, 0], xs[:, 1], 0.5 * xs[:, 0] - 1], axis=1)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    actions = (probs.cumsum(axis=1) > rng.random((3000, 1))).argmax(axis=1)
    steps = logged(lake, xs, actions + 2, Discrete(3, start=2))
    told = []
    found = fit_behavior(steps, QUICK, on_progress=lambda *done: told.append(done))
    assert told[-1] == (2, 2)
    assert np.abs(found.distribution - probs).mean() < 0.04
    np.testing.assert_allclose(found.probs, found.distribution[np.arange(3000), actions])
    true = np.log(probs[np.arange(3000), actions]).mean()
    assert found.log_likelihood == pytest.approx(true, abs=0.02)
    # Looking at the observation told something.
    assert found.log_likelihood > found.marginal_log_likelihood + 0.1
    assert found.calibration_error < 0.05
    again = fit_behavior(steps, QUICK)
    np.testing.assert_array_equal(again.probs, found.probs)


def test_noise_is_not_learned_by_heart(lake):
    rng = np.random.default_rng(1)
    xs = rng.standard_normal((400, 2)).astype(np.float32)
    actions = rng.integers(0, 4, 400)
    found = fit_behavior(logged(lake, xs, actions, Discrete(4)), QUICK)
    # Episodes were left out that the model would else be sure of.
    assert found.log_likelihood < np.log(0.25) + 0.01
    assert found.log_likelihood > np.log(0.25) - 0.1


@pytest.mark.slow
def test_masked_actions_have_no_probability(lake):
    rng = np.random.default_rng(2)
    xs = rng.standard_normal((300, 2)).astype(np.float32)
    masks = np.ones((300, 3), bool)
    masks[::2, 1] = False
    actions = np.where(masks[:, 1] & (rng.random(300) < 0.5), 1, rng.integers(0, 2, 300) * 2)
    steps = logged(lake, xs, actions, Discrete(3), action_masks=masks, mask_size=3)
    found = fit_behavior(steps, BehaviorConfig(updates=200))
    assert (found.distribution[::2, 1] == 0).all()
    assert found.probs.min() > 0


@pytest.mark.slow
def test_density_of_a_gaussian(lake):
    rng = np.random.default_rng(3)
    xs = rng.standard_normal((3000, 2)).astype(np.float32)
    means, std = xs[:, :1] * 0.8, 0.3
    actions = (means + std * rng.standard_normal((3000, 1))).astype(np.float32)
    found = fit_behavior(logged(lake, xs, actions, Box((1,))), QUICK)
    noise = (actions - means)[:, 0] / std
    true = -0.5 * (noise**2 + np.log(2 * np.pi)) - np.log(std)
    assert found.log_likelihood == pytest.approx(true.mean(), abs=0.1)
    assert np.corrcoef(np.log(found.probs), true)[0, 1] > 0.75
    assert (found.distribution, found.calibration_error) == (None, None)


def test_folds_are_equal_and_leave_nobody_out():
    folds = episode_folds(103, 5, seed=0)
    sizes = [int(inside.sum()) for _, inside in each_fold(folds)]
    assert sorted(sizes) == [20, 20, 21, 21, 21]
    assert (episode_folds(103, 5, seed=0) == folds).all()
    assert (episode_folds(103, 5, seed=1) != folds).any()
    assert sorted(episode_folds(3, 5, seed=0)) == [0, 1, 2]
