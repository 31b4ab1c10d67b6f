import itertools
import math

import numpy as np
import pytest

from replaylake.datastore.errors import ConfigInvalid, NotFound, RolloutFailed
from replaylake.online.worker import ActingPolicy, RolloutConfig, RolloutWorker

_RANDOM = ActingPolicy()


def _collect(config, episodes, acting=_RANDOM, **kwargs):
    worker = RolloutWorker(config, iter(episodes), acting, producer="test", **kwargs)
    collected = worker.advance(10**9, math.inf)
    assert worker.exhausted
    return sorted(collected, key=lambda episode: episode.extras["seed"][0])


def _content(episode):
    arrays = (episode.observations, episode.actions, episode.rewards, episode.behavior_log_probs)
    ends = (episode.terminated, episode.truncated, episode.final_observation.tolist())
    return [array.tolist() for array in arrays], ends, episode.extras["seed"].tolist()


def test_every_number_of_an_episode(toys):
    config = RolloutConfig(f"{toys}:Countdown-v0", num_envs=2, seed=4)
    even, odd, *_ = episodes = _collect(config, range(4), worker=5)
    assert [len(episode) for episode in episodes] == [2, 3, 1, 2]  # seeds 4, 5, 6, 7
    assert odd.observations.tolist() == [[0, 5], [1, 5], [2, 5]]
    assert odd.final_observation.tolist() == [3, 5]
    assert odd.rewards == pytest.approx(np.arange(3) + odd.actions / 10)
    assert (odd.terminated, odd.truncated) == (False, True)
    assert (even.terminated, even.truncated) == (True, False)
    assert odd.behavior_log_probs == pytest.approx([-math.log(3)] * 3)
    assert odd.policies.tolist() == ["random"] * 3
    assert odd.policy_versions.tolist() == [0] * 3
    assert odd.extras["seed"].tolist() == [5] * 3
    assert odd.extras["worker"].tolist() == [5] * 3
    assert odd.timestamps is None
    assert odd.action_masks is None
    assert odd.episode_id.startswith("test/")


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_episodes_do_not_depend_on_the_number_of_environments(env_id):
    one = _collect(RolloutConfig(env_id, num_envs=1, seed=3), range(6))
    five = _collect(RolloutConfig(env_id, num_envs=5, seed=3), range(6))
    assert [_content(episode) for episode in one] == [_content(episode) for episode in five]
    assert one[0].actions[:8].tolist() != one[1].actions[:8].tolist()


def test_a_random_policy_knows_the_density_of_a_continuous_action():
    (episode,) = _collect(RolloutConfig("Pendulum-v1"), [0])
    assert (len(episode), episode.terminated, episode.truncated) == (200, False, True)
    assert episode.actions.dtype == np.float32
    assert episode.behavior_log_probs == pytest.approx([-math.log(4)] * 200)  # torque in [-2, 2]


def test_masks_are_honoured_and_kept(toys):
    episodes = _collect(RolloutConfig(f"{toys}:Masked-v0"), range(30))
    for episode in episodes:
        forbidden = episode.extras["seed"][0] % 3
        assert forbidden not in episode.actions
        assert episode.action_masks.tolist() == [[i != forbidden for i in range(3)]] * len(episode)
        assert episode.behavior_log_probs == pytest.approx([-math.log(2)] * len(episode))


def test_a_packaged_policy_is_sampled_with_its_log_probs(toys, loaded_die):
    acting = ActingPolicy("die", 4, loaded_die)
    episodes = _collect(RolloutConfig(f"{toys}:Countdown-v0"), range(600), acting)
    actions = np.concatenate([episode.actions for episode in episodes])
    log_probs = np.concatenate([episode.behavior_log_probs for episode in episodes])
    assert log_probs == pytest.approx(np.log([0.5, 0.25, 0.25])[actions], abs=1e-6)
    # 1,200 draws: a standard error of 0.0144.
    assert np.mean(actions == 0) == pytest.approx(0.5, abs=4 * 0.0144)
    assert episodes[0].policies.tolist() == ["die"]
    assert episodes[0].policy_versions.tolist() == [4]


def test_epsilon_greedy_log_probs(toys, loaded_die):
    config = RolloutConfig(f"{toys}:Countdown-v0", temperature=0, epsilon=0.3)
    episodes = _collect(config, range(60), ActingPolicy("die", 1, loaded_die))
    actions = np.concatenate([episode.actions for episode in episodes])
    log_probs = np.concatenate([episode.behavior_log_probs for episode in episodes])
    assert set(actions) == {0, 1, 2}
    assert log_probs == pytest.approx(np.log([0.8, 0.1, 0.1])[actions], abs=1e-6)


def test_every_step_is_stamped_with_the_policy_that_acted(toys, loaded_die):
    config = RolloutConfig(f"{toys}:Countdown-v0", num_envs=1, seed=5)
    worker = RolloutWorker(config, iter([0]), ActingPolicy(), producer="test")
    assert worker.advance(1, math.inf) == []
    worker.set_policy(ActingPolicy("die", 1, loaded_die))
    assert worker.advance(1, math.inf) == []
    worker.set_policy(ActingPolicy("die", 2, loaded_die))
    (episode,) = worker.advance(1, math.inf)
    assert episode.policies.tolist() == ["random", "die", "die"]
    assert episode.policy_versions.tolist() == [0, 1, 2]
    assert episode.behavior_log_probs[0] == pytest.approx(-math.log(3))


def test_advance_stops_in_the_middle_and_goes_on(toys):
    config = RolloutConfig(f"{toys}:Countdown-v0", num_envs=1, seed=2)
    worker = RolloutWorker(config, itertools.count(), ActingPolicy(), producer="test")
    lengths = [[len(episode) for episode in worker.advance(2, math.inf)] for _ in range(3)]
    assert lengths == [[], [3, 1], [2]]  # seeds 2, 3, 4 in calls of two steps
    assert worker.advance(10**9, 0.05)
    assert not worker.exhausted
    worker.close()
    assert worker.exhausted


def test_an_environment_that_raises_names_the_episode(toys):
    config = RolloutConfig(f"{toys}:Broken-v0", num_envs=3)
    worker = RolloutWorker(config, iter(range(20)), ActingPolicy(), producer="test", worker=2)
    with pytest.raises(
        RolloutFailed, match=r"worker 2: step of .*Broken-v0 raised ValueError: "
    ) as e:
        worker.advance(10**9, math.inf)
    assert "at step 0 of the episode reset with seed 7" in str(e.value)


def test_an_unknown_environment_is_refused_with_its_near_match():
    with pytest.raises(NotFound, match="CartPole-v1"):
        _collect(RolloutConfig("CartPol-v1"), [0])


@pytest.mark.parametrize(
    "fields",
    [{"num_envs": 0}, {"seed": -1}, {"temperature": -1}, {"epsilon": 1.5}, {"flush_interval_s": 0}],
)
def test_a_config_out_of_range_is_refused(fields):
    with pytest.raises(ConfigInvalid, match=next(iter(fields))):
        RolloutConfig("CartPole-v1", **fields)
