import numpy as np
import pytest

from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes, one_step_episodes

OFFSETS = np.array([0, 2, 3])
REWARDS = np.array([1.0, 2.0, 4.0])


def test_what_follows_from_offsets_and_rewards():
    episodes = LoggedEpisodes(OFFSETS, REWARDS, discount=0.5)
    assert (episodes.num_episodes, episodes.num_steps, episodes.is_one_step) == (2, 3, False)
    assert episodes.lengths.tolist() == [2, 1]
    assert episodes.steps.tolist() == [0, 1, 0]
    assert episodes.discounts.tolist() == [1, 0.5, 1]
    assert episodes.returns.tolist() == [1 + 0.5 * 2, 4]


def test_a_one_step_log_has_an_episode_a_row():
    episodes = one_step_episodes(REWARDS, behavior_probs=np.full(3, 0.5))
    assert episodes.is_one_step
    assert episodes.returns.tolist() == REWARDS.tolist()
    assert episodes.behavior_probs.tolist() == [0.5] * 3


INF = np.inf


@pytest.mark.parametrize(
    ("rewards", "changes", "one_step", "longer"),
    [
        # One reward; or at least the first, and as many as there are steps.
        ([1.0, 2.0, 4.0], {}, (1, 4), (1, INF)),
        ([-1.0, -2.0, -4.0], {}, (-4, -1), (-INF, -1)),
        ([-1.0, 0.0, 1.0], {}, (-1, 1), (-INF, INF)),
        ([0.0, 0.0, 0.0], {}, (-INF, INF), (-INF, INF)),
        ([0.0, 0.0, 0.0], {"reward_range": (0.0, 1.0)}, (0, 1), (0, INF)),
    ],
)
def test_values_lie_between_what_the_rewards_allow(rewards, changes, one_step, longer):
    rewards = np.array(rewards)
    assert LoggedEpisodes(np.arange(4), rewards, **changes).value_range() == one_step
    assert LoggedEpisodes(OFFSETS, rewards, **changes).value_range() == longer


WRONG = [
    ({"offsets": np.array([0])}, "offsets: found shape"),
    ({"offsets": np.array([1, 3])}, "found 1 .. 3, expected 0 .. 3"),
    ({"offsets": np.array([0, 2, 2, 3])}, "episode 1 without a step"),
    ({"discount": 0.0}, "discount: found 0.0"),
    ({"discount": 1.1}, "discount: found 1.1"),
    ({"rewards": np.array([1, np.nan, 2])}, "rewards: found nan in row 1"),
    ({"q_logged": np.zeros(2)}, r"q_logged: found shape \(2,\)"),
    ({"v_target": np.array([0, 0, np.inf])}, "v_target: found inf in row 2"),
    ({"target_probs": np.array([0.1, np.nan, 0.2])}, "target_probs: found nan in row 1"),
    ({"target_probs": np.ones((3, 1))}, "target_probs: found shape"),
    ({"behavior_probs": np.array([0.1, -0.1, 0.2])}, "behavior_probs: found -0.1 in row 1"),
    ({"behavior_distribution": np.full(3, 0.5)}, r"expected \(3, A\)"),
    ({"target_distribution": np.full((3, 2), 0.4)}, "row 0 with sum 0.8"),
    ({"target_distribution": np.array([[0.5, 0.5], [1.5, -0.5], [1, 0]])}, "row 1 with sum 1"),
    ({"actions": np.zeros((3, 1), int)}, "actions: found shape"),
    (
        {"actions": np.array([0, 1, 2]), "target_distribution": np.full((3, 2), 0.5)},
        "found 0 .. 2, expected 0 .. 1",
    ),
    (
        {
            "actions": np.array([0, 1, 1]),
            "behavior_distribution": np.full((3, 2), 0.5),
            "behavior_probs": np.array([0.5, 0.5, 0.4]),
        },
        "behavior_probs: found 0.4 in row 2, expected 0.5",
    ),
    ({"reward_range": (0.0, 3.0)}, r"found 1.0 .. 4.0, expected rewards in the range 0.0 .. 3.0"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_the_door_says_what_is_wrong(changes, message):
    with pytest.raises(EpisodeInvalidError, match=message):
        LoggedEpisodes(**{"offsets": OFFSETS, "rewards": REWARDS, **changes})


def test_unknown_behavior_probabilities_may_enter():
    episodes = LoggedEpisodes(OFFSETS, REWARDS, behavior_probs=np.array([0.5, np.nan, 0.0]))
    assert np.isnan(episodes.behavior_probs[1])
