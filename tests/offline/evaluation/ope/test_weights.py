import numpy as np
import pytest

from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes, one_step_episodes
from replaylake.offline.evaluation.ope.weights import (
    NotEstimableError,
    importance_weights,
    largest_ratio,
    summary,
)


def three_episodes(**changes):
    """Lengths 2, 1 and 3; ratios 2, 0.5 | 3 | 1, 2, 2."""
    fields = {
        "offsets": np.array([0, 2, 3, 6]),
        "rewards": np.zeros(6),
        "behavior_probs": np.full(6, 0.25),
        "target_probs": np.array([0.5, 0.125, 0.75, 0.25, 0.5, 0.5]),
    }
    return LoggedEpisodes(**{**fields, **changes})


def test_products_along_each_episode():
    weights = importance_weights(three_episodes())
    assert weights.ratios.tolist() == [2, 0.5, 3, 1, 2, 2]
    assert weights.cumulative.tolist() == [2, 1, 3, 1, 2, 4]
    assert weights.previous.tolist() == [1, 2, 1, 1, 1, 2]
    assert weights.final.tolist() == [1, 3, 4]
    assert weights.whole_episodes.max_weight == 4
    assert weights.whole_episodes.effective_sample_size == pytest.approx(8**2 / (1 + 9 + 16))


def test_an_ended_episode_keeps_its_weight():
    weights = importance_weights(three_episodes())
    # By hand: weights at step 0 are 2, 3, 1; at 1 they are 1, 3, 2; at 2 they are 1, 3, 4.
    by_hand = [36 / 14, 36 / 14, 64 / 26]
    assert weights.per_step == pytest.approx(by_hand)
    assert weights.worst_step.effective_sample_size == pytest.approx(64 / 26)
    assert weights.worst_step.max_weight == 4


def test_products_of_many_episodes_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 200)
    offsets = np.append(0, lengths.cumsum())
    episodes = LoggedEpisodes(
        offsets,
        np.zeros(offsets[-1]),
        behavior_probs=rng.uniform(0.3, 1, offsets[-1]),
        target_probs=rng.uniform(0, 1, offsets[-1]),
    )
    weights = importance_weights(episodes)
    ratios = np.split(weights.ratios, offsets[1:-1])
    assert weights.cumulative == pytest.approx(np.concatenate([r.cumprod() for r in ratios]))
    padded = np.stack([np.append(r.cumprod(), [r.prod()] * (30 - len(r))) for r in ratios])
    sizes = padded.sum(0) ** 2 / (padded**2).sum(0)
    assert weights.per_step == pytest.approx(sizes[: lengths.max()])


def test_effective_sample_size_by_hand():
    assert summary(np.ones(7)).effective_sample_size == pytest.approx(7)
    assert summary(np.array([0.0, 3.0, 0.0])).effective_sample_size == pytest.approx(1)
    assert summary(np.zeros(3)).effective_sample_size == 0


def test_largest_ratio_is_over_all_actions():
    probs = {
        "behavior_distribution": np.array([[0.5, 0.5, 0.0], [0.8, 0.1, 0.1]]),
        "target_distribution": np.array([[0.9, 0.1, 0.0], [0.0, 0.3, 0.7]]),
    }
    assert largest_ratio(one_step_episodes(np.zeros(2), **probs)) == pytest.approx(7)
    assert largest_ratio(one_step_episodes(np.zeros(2))) is None
    assert largest_ratio(LoggedEpisodes(np.array([0, 2]), np.zeros(2), **probs)) is None


REFUSED = [
    ({"target_probs": None, "no_density": "the head 'sampled' has no density"}, "head 'sampled'"),
    ({"target_probs": None}, "policy's probabilities are unknown"),
    ({"behavior_probs": None}, "fit the behavior policy"),
    ({"behavior_probs": np.array([1, 1, np.nan, 0, 1, 1])}, "2 of 6 steps have no behavior"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_weights_that_cannot_be_formed(changes, message):
    with pytest.raises(NotEstimableError, match=message):
        importance_weights(three_episodes(**changes))


@pytest.mark.parametrize("last", [10.0, 0.0])
def test_a_product_that_overflows_is_refused(last):
    target = np.append(np.full(400, 10.0), last)
    episodes = LoggedEpisodes(
        np.array([0, 401]), np.zeros(401), behavior_probs=np.ones(401), target_probs=target
    )
    with pytest.raises(NotEstimableError, match=r"over up to 401 steps passes 1e\+120"):
        importance_weights(episodes)


def test_a_step_without_any_weight_is_said():
    target = np.array([0.5, 0, 0, 0.25, 0, 0.5])
    with pytest.raises(NotEstimableError, match="from step 1 on no episode has any weight"):
        importance_weights(three_episodes(target_probs=target)).check_any()
    target[2] = 0.5
    importance_weights(three_episodes(target_probs=target)).check_any()
