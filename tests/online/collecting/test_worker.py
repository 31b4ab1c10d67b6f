import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    NotFoundError,
    RolloutError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.policies.policy import Act, PolicySpec
from replaylake.online.collecting import worker as worker_module
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.worker import RolloutConfig, RolloutWorker

_RANDOM = BehaviorPolicy()


def _collect(config, episodes, acting=_RANDOM, **kwargs):
    worker = RolloutWorker(config, iter(episodes), acting, producer="test", **kwargs)
    worker.advance(10**9, math.inf)
    collected = worker.take_episodes(with_open=False)
    assert worker.exhausted
    return sorted(collected, key=lambda episode: episode.extras["seed"][0])


def _content(episode):
    log_probs = np.array([]) if (known := episode.behavior_log_probs) is None else known
    arrays = (episode.observations, episode.actions, episode.rewards, log_probs)
    ends = (episode.terminated, episode.truncated, episode.final_observation.tolist())
    return [array.tolist() for array in arrays], ends, episode.extras["seed"].tolist()


def test_every_number_of_an_episode(toys):
    config = RolloutConfig(f"{toys}:Countdown-v0", envs_per_worker=2, seed=4)
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
    one = _collect(RolloutConfig(env_id, envs_per_worker=1, seed=3), range(6))
    five = _collect(RolloutConfig(env_id, envs_per_worker=5, seed=3), range(6))
    assert [_content(episode) for episode in one] == [_content(episode) for episode in five]
    assert one[0].actions[:8].tolist() != one[1].actions[:8].tolist()


def test_a_random_policy_knows_the_density_of_a_continuous_action():
    (episode,) = _collect(RolloutConfig("Pendulum-v1"), [0])
    assert (len(episode), episode.terminated, episode.truncated) == (200, False, True)
    assert episode.actions.dtype == np.float32
    assert episode.behavior_log_probs == pytest.approx([-math.log(4)] * 200)  # torque in [-2, 2]


def test_masks_are_honored_and_kept(toys):
    episodes = _collect(RolloutConfig(f"{toys}:Masked-v0"), range(30))
    for episode in episodes:
        forbidden = episode.extras["seed"][0] % 3
        assert forbidden not in episode.actions
        assert episode.action_masks.tolist() == [[i != forbidden for i in range(3)]] * len(episode)
        assert episode.behavior_log_probs == pytest.approx([-math.log(2)] * len(episode))


def test_a_packaged_policy_is_sampled_with_its_log_probs(toys, loaded_die):
    acting = BehaviorPolicy("die", 4, loaded_die)
    episodes = _collect(RolloutConfig(f"{toys}:Countdown-v0"), range(600), acting)
    actions = np.concatenate([episode.actions for episode in episodes])
    log_probs = np.concatenate([episode.behavior_log_probs for episode in episodes])
    assert log_probs == pytest.approx(np.log([0.5, 0.25, 0.25])[actions], abs=1e-6)
    # 1,200 draws: a standard error of 0.0144.
    assert np.mean(actions == 0) == pytest.approx(0.5, abs=4 * 0.0144)
    assert episodes[0].policies.tolist() == ["die"]
    assert episodes[0].policy_versions.tolist() == [4]


def test_epsilon_greedy_log_probs(toys, loaded_die):
    acting = BehaviorPolicy("die", 1, loaded_die, temperature=0, epsilon=0.3)
    episodes = _collect(RolloutConfig(f"{toys}:Countdown-v0"), range(60), acting)
    actions = np.concatenate([episode.actions for episode in episodes])
    log_probs = np.concatenate([episode.behavior_log_probs for episode in episodes])
    assert set(actions) == {0, 1, 2}
    assert log_probs == pytest.approx(np.log([0.8, 0.1, 0.1])[actions], abs=1e-6)


def test_every_step_is_stamped_with_the_policy_that_acted(toys, loaded_die):
    config = RolloutConfig(f"{toys}:Countdown-v0", envs_per_worker=1, seed=5)
    worker = RolloutWorker(config, iter([0]), BehaviorPolicy(), producer="test")
    assert worker.advance(1, math.inf) == 1
    worker.set_behavior_policy(BehaviorPolicy("die", 1, loaded_die))
    assert worker.advance(1, math.inf) == 1
    worker.set_behavior_policy(BehaviorPolicy("die", 2, loaded_die))
    assert worker.advance(1, math.inf) == 1
    (episode,) = worker.take_episodes(with_open=False)
    assert episode.policies.tolist() == ["random", "die", "die"]
    assert episode.policy_versions.tolist() == [0, 1, 2]
    assert episode.behavior_log_probs[0] == pytest.approx(-math.log(3))


def test_advance_stops_in_the_middle_and_goes_on(toys):
    config = RolloutConfig(f"{toys}:Countdown-v0", envs_per_worker=1, seed=2)
    worker = RolloutWorker(config, itertools.count(), BehaviorPolicy(), producer="test")
    lengths = []
    for _ in range(3):
        assert worker.advance(2, math.inf) == 2
        lengths.append([len(episode) for episode in worker.take_episodes(with_open=False)])
    assert lengths == [[], [3, 1], [2]]  # seeds 2, 3, 4 in calls of two steps
    assert worker.advance(10**9, 0.05)
    assert not worker.exhausted
    worker.close()
    assert worker.exhausted


def test_an_environment_that_raises_names_the_episode(toys):
    config = RolloutConfig(f"{toys}:Broken-v0", envs_per_worker=3)
    worker = RolloutWorker(config, iter(range(20)), BehaviorPolicy(), producer="test", worker=2)
    with pytest.raises(
        RolloutError, match=r"worker 2: step of .*Broken-v0 raised ValueError: "
    ) as e:
        worker.advance(10**9, math.inf)
    assert "at step 0 of the episode reset with seed 7" in str(e.value)


def test_an_unknown_environment_is_refused_with_its_near_match():
    with pytest.raises(NotFoundError, match="CartPole-v1"):
        _collect(RolloutConfig("CartPol-v1"), [0])


@pytest.mark.parametrize(
    "fields",
    [{"envs_per_worker": 0}, {"seed": -1}, {"flush_steps": 0}, {"flush_interval_s": 0}],
)
def test_a_config_out_of_range_is_refused(fields):
    with pytest.raises(ConfigInvalidError, match=next(iter(fields))):
        RolloutConfig("CartPole-v1", **fields)


class Remembering:
    """Remembers (steps seen, rewards paid) and takes the action steps % 3."""

    spec = PolicySpec(Box((2,)), Discrete(3), "categorical", state_size=2)

    def initial_state(self, n):
        return np.zeros((n, 2), np.float32)

    def act(self, observations, state, **_):
        assert state.shape == (len(observations), 2)
        actions = state[:, 0].astype(np.int64) % 3
        return Act(actions, np.zeros(len(actions), np.float32), state + np.float32([1, 0]))

    def observe(self, state, rewards):
        return state + np.stack([np.zeros(len(rewards)), rewards], axis=1).astype(np.float32)


def test_what_a_policy_remembers_begins_anew_and_is_kept_as_it_was_before_each_step(toys):
    config = RolloutConfig(f"{toys}:Countdown-v0", envs_per_worker=3, seed=4)
    episodes = _collect(config, range(5), BehaviorPolicy("rnn", 1, Remembering()))
    for episode in episodes:
        paid = np.concatenate([[0], episode.rewards.cumsum()[:-1]])
        expected = np.stack([np.arange(len(episode)), paid], axis=1)
        assert episode.extras["policy_state"] == pytest.approx(expected, abs=1e-5)
        assert episode.actions.tolist() == [t % 3 for t in range(len(episode))]
    assert [len(episode) for episode in episodes] == [2, 3, 1, 2, 3]


def test_a_policy_that_remembers_may_follow_one_that_does_not(toys):
    config = RolloutConfig(f"{toys}:Countdown-v0", envs_per_worker=1, seed=5)
    worker = RolloutWorker(config, iter([0]), BehaviorPolicy(), producer="test")
    worker.advance(1, math.inf)
    worker.set_behavior_policy(BehaviorPolicy("rnn", 1, Remembering()))
    worker.advance(1, math.inf)
    worker.set_behavior_policy(
        BehaviorPolicy("rnn", 2, Remembering())
    )  # which goes on with what was remembered
    worker.advance(1, math.inf)
    (episode,) = worker.take_episodes(with_open=False)
    assert episode.extras["policy_state"][:, 0].tolist() == [0, 0, 1]
    assert episode.policy_versions.tolist() == [0, 1, 2]


class Resting:
    """Does nothing, surely."""

    spec = PolicySpec(Box((1,)), Box((2,), low=(-1.0, 0.0), high=(1.0, 10.0)), "deterministic")

    def initial_state(self, n):
        return None

    def act(self, observations, state, **_):
        return Act(np.tile(np.float32([0, 1]), (len(observations), 1)), None)


def test_noise_is_in_halves_of_the_range_and_has_no_density(toys):
    acting = BehaviorPolicy("rest", 1, Resting(), noise=0.1)
    episodes = _collect(RolloutConfig(f"{toys}:Arm-v0", envs_per_worker=3), range(400), acting)
    actions = np.concatenate([episode.actions for episode in episodes])
    assert (actions.dtype, actions.shape) == (np.float32, (2000, 2))
    assert all(episode.behavior_log_probs is None for episode in episodes)
    # Standard deviations 0.1 and 0.5; of the second one in 44 is cut off at 0.
    assert actions[:, 0].std() == pytest.approx(0.1, rel=0.08)
    assert actions[:, 1].std() == pytest.approx(0.49, rel=0.08)
    assert actions[:, 1].min() == 0
    assert [e.rewards.tolist() for e in episodes] == [e.actions[:, 0].tolist() for e in episodes]
    alone = _collect(RolloutConfig(f"{toys}:Arm-v0", envs_per_worker=1), range(400), acting)
    assert [_content(e) for e in alone] == [_content(e) for e in episodes]
    assert episodes[0].actions[0].tolist() != episodes[1].actions[0].tolist()


def test_noise_on_other_actions_is_refused(toys):
    with pytest.raises(SpaceUnsupportedError, match=r"Discrete\(3\).*Explore with epsilon"):
        _collect(RolloutConfig(f"{toys}:Countdown-v0"), [0], BehaviorPolicy(noise=0.1))


@settings(max_examples=25, deadline=None)
@given(
    num_envs=st.integers(1, 4),
    calls=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12),
)
def test_pieces_make_up_the_episodes(toys_imported, num_envs, calls):
    config = RolloutConfig(f"{toys_imported}:Masked-v0", envs_per_worker=num_envs, seed=3)
    whole = _collect(config, range(9))
    worker = RolloutWorker(config, iter(range(9)), BehaviorPolicy(), producer="test")
    pieces, ends, open_before = [], [], set()
    for num_steps, with_open in [*calls, (10**9, False)]:
        made = worker.advance(num_steps, math.inf)
        assert made >= num_steps or worker.exhausted
        taken = worker.take_episodes(with_open)
        assert open_before <= {piece.episode_id for piece in taken} or not with_open
        pieces += taken
        ends += worker.take_ends()
        open_before = set(worker.open_episodes)
        opened = {piece.episode_id for piece in pieces} - {
            piece.episode_id for piece in pieces if piece.terminated or piece.truncated
        }
        assert open_before == opened
    by_id = {}
    for piece in pieces:
        by_id.setdefault(piece.episode_id, []).append(piece)
    found = {}
    for parts in by_id.values():
        seed = parts[0].extras["seed"][0]
        assert [part.first_step for part in parts] == [
            sum(map(len, parts[:i])) for i in range(len(parts))
        ]
        for part, following in itertools.pairwise(parts):
            assert part.final_observation.tolist() == following.observations[0].tolist()
            assert (part.terminated, part.truncated) == (False, False)
        found[seed] = parts
    assert sorted(found) == [episode.extras["seed"][0] for episode in whole]
    for episode in whole:
        parts = found[episode.extras["seed"][0]]
        for name in ("observations", "actions", "rewards", "behavior_log_probs", "action_masks"):
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert joined.tolist() == getattr(episode, name).tolist()
        assert parts[-1].final_observation.tolist() == episode.final_observation.tolist()
        assert (parts[-1].terminated, parts[-1].truncated) == (
            episode.terminated,
            episode.truncated,
        )
    assert sorted((end.number, end.seed, end.num_steps) for end in ends) == [
        (i, 3 + i, len(episode)) for i, episode in enumerate(whole)
    ]
    returns = {end.seed: end.episode_return for end in ends}
    assert [returns[3 + i] for i in range(9)] == pytest.approx([e.rewards.sum() for e in whole])


def test_every_kind_of_observation(toys):
    episodes = _collect(RolloutConfig(f"{toys}:Museum-v0", envs_per_worker=2, seed=298), range(4))
    assert [len(episode) for episode in episodes] == [2, 3, 1, 2]
    for seed, episode in enumerate(episodes, 298):
        num = len(episode)
        seen = episode.observations
        assert (seen["picture"].dtype, seen["picture"].shape) == (np.uint8, (num, 3, 2, 1))
        assert seen["picture"][:, 2, 1, 0].tolist() == [(seed + t) % 256 for t in range(num)]
        assert seen["place"].tolist() == [seed / 7 + t for t in range(num)]
        assert seen["room"].tolist() == [(seed + t) % 5 for t in range(num)]
        assert seen["lamps"].tolist() == [[t % 2, seed % 2] for t in range(num)]
        assert seen["said"].tolist() == [f"{seed}.{t}" for t in range(num)]
        assert seen["pair"]["_0"].tolist() == [t - 4 for t in range(num)]
        assert episode.final_observation["said"] == f"{seed}.{num}"
        assert episode.final_observation["pair"]["_1"].tolist() == [seed, num % 2]
        assert episode.rewards.tolist() == list(range(num))
        assert (episode.actions.min() >= 0, episode.actions.dtype) == (True, np.int64)
        assert (episode.actions < [3, 2]).all()


@pytest.mark.parametrize(
    ("strange", "message"),
    [
        ({"place": math.nan}, "observation.place at step 0: found nan"),
        ({"room": 1.5}, "observation.room at step 0: found 1.5"),
        (
            {"picture": np.zeros((2, 3, 1), np.uint8)},
            r"observation.picture: found shape \[2, 3, 1\]",
        ),
        ({"said": 3}, "observation.said: expected one string"),
    ],
)
def test_an_observation_that_its_space_does_not_hold_is_refused(toys, strange, message):
    config = RolloutConfig(f"{toys}:Museum-v0", env_args={"strange": strange})
    with pytest.raises(EpisodeInvalidError, match=f"rollout worker 0: .*Museum-v0: {message}"):
        _collect(config, range(2))


def test_a_mask_in_some_steps_alone_is_refused(toys, monkeypatch):
    import replaylake_toys

    given = replaylake_toys.Countdown._info
    missing = {3: {}}  # with seed 3 after the first step, which is not its last but one
    monkeypatch.setattr(
        replaylake_toys.Countdown,
        "_info",
        lambda env: missing.get(int(env._observation.sum()), given(env)),
    )
    with pytest.raises(RolloutError, match="in the info of some steps"):
        _collect(RolloutConfig(f"{toys}:Masked-v0", envs_per_worker=1), [2])


def test_more_steps_than_a_block_holds():
    config = RolloutConfig("CartPole-v1", envs_per_worker=1, seed=3)
    short = _collect(config, range(300))  # about 6,600 steps of one environment
    assert sum(map(len, short)) > 4096
    assert [_content(episode) for episode in short] == [
        _content(episode) for episode in _collect(RolloutConfig("CartPole-v1", seed=3), range(300))
    ]


def test_time_is_measured(toys, monkeypatch):
    # It ticks with each look: what a machine does between two looks would count, too.
    ticks = itertools.count(0.0, 0.001)
    clock = SimpleNamespace(perf_counter=lambda: next(ticks), time=time.time)
    monkeypatch.setattr(worker_module, "time", clock)
    worker = RolloutWorker(
        RolloutConfig("CartPole-v1"), itertools.count(), BehaviorPolicy(), producer="t"
    )
    assert worker.first_step_at is None
    started = time.time()
    made = worker.advance(10**9, 0.2)
    totals = worker.timings.totals
    assert started <= worker.first_step_at <= time.time()
    env_step, inference = totals["workers", "env_step"], totals["workers", "inference"]
    assert env_step.items == inference.items == made
    assert env_step.seconds == pytest.approx(0.1)
    assert inference.seconds == pytest.approx(0.1)
    worker.take_episodes(with_open=True)
    assert worker.first_step_at is None
