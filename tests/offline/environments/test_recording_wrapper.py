import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.environments.ids import make
from replaylake.offline.environments.recording_wrapper import record


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


class Counter(gymnasium.Env):
    """Observes the number of steps taken, in one buffer that it reuses; ends after `length`."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=3, masked=False, terminates=True):
        self._length, self._masked, self._terminates = length, masked, terminates
        self._buffer = np.zeros(1, np.float32)

    def _info(self):
        even = int(self._buffer[0]) % 2 == 0
        return {"action_mask": np.array([even, True])} if self._masked else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._buffer[0] = 0
        return self._buffer, self._info()

    def step(self, action):
        self._buffer[0] += 1
        ended = bool(self._buffer[0] >= self._length)
        reward = float(10 * action)
        truncated = ended and not self._terminates
        return self._buffer, reward, ended and self._terminates, truncated, self._info()


def rows(lake, columns, order="episode_id, step"):
    return lake.sql(f"select {columns} from log.steps order by {order}").to_pylist()


def play(env, episodes, action=1):
    for _ in range(episodes):
        env.reset()
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated


def test_every_step_is_recorded_with_what_was_seen_before_it(lake):
    env = record(Counter(), lake.dataset("log"), producer="me", policy="mine:3")
    play(env, 2)
    env.close()
    found = rows(lake, "observation, action, reward, terminated, truncated, final_observation")
    assert [row["observation"] for row in found] == [[0], [1], [2]] * 2
    assert {row["action"] for row in found} == {1}
    assert {row["reward"] for row in found} == {10.0}
    assert [row["terminated"] for row in found] == [False, False, True] * 2
    assert not any(row["truncated"] for row in found)
    assert [row["final_observation"] for row in found] == [None, None, [3]] * 2
    acted = rows(lake, "distinct policy, policy_version", "policy")
    assert acted == [{"policy": "mine", "policy_version": 3}]
    ids = rows(lake, "distinct episode_id", "episode_id")
    assert len(ids) == 2
    assert all(row["episode_id"].startswith("me/") for row in ids)


def test_the_dataset_gets_the_environments_spaces(lake):
    env = record(Counter(), lake.dataset("log"))
    play(env, 1)
    env.close()
    spec = lake.dataset("log").spec
    assert spec.observation_space == Box((1,), "float32", 0, 100)
    assert spec.action_space == Discrete(2)
    assert rows(lake, "distinct policy", "policy") == [{"policy": None}]


def test_the_loop_sees_the_environment_unchanged(lake):
    plain, recorded = make("CartPole-v1"), record(make("CartPole-v1"), lake.dataset("log"))
    first, second = plain.reset(seed=5)[0], recorded.reset(seed=5)[0]
    np.testing.assert_array_equal(first, second)
    for action in (0, 1, 1, 0):
        left, right = plain.step(action), recorded.step(action)
        np.testing.assert_array_equal(left[0], right[0])
        assert left[1:] == right[1:]
    assert recorded.observation_space == plain.observation_space
    plain.close()
    recorded.close()


def test_closing_writes_an_open_episode_as_an_open_piece(lake):
    env = record(Counter(), lake.dataset("log"))
    env.reset()
    env.step(0)
    env.step(0)
    env.close()
    found = rows(lake, "terminated, truncated, final_observation")
    assert [(row["terminated"], row["truncated"]) for row in found] == [(False, False)] * 2
    assert [row["final_observation"] for row in found] == [None, [2]]


def test_a_reset_in_the_middle_truncates(lake):
    env = record(Counter(), lake.dataset("log"))
    env.reset()
    env.step(0)
    env.reset()
    env.step(0)
    env.step(0)
    env.step(0)
    env.close()
    found = rows(lake, "step, terminated, truncated", "episode_id, step")
    assert sorted((row["step"], row["terminated"], row["truncated"]) for row in found) == [
        (0, False, False),
        (0, False, True),
        (1, False, False),
        (2, True, False),
    ]


def test_truncation_is_kept_apart_from_termination(lake):
    env = record(Counter(terminates=False), lake.dataset("log"))
    play(env, 1)
    env.close()
    last = rows(lake, "terminated, truncated", "step")[-1]
    assert last == {"terminated": False, "truncated": True}


def test_masks_are_those_seen_before_the_step(lake):
    env = record(Counter(masked=True), lake.dataset("log"))
    play(env, 1)
    env.close()
    found = rows(lake, "action_mask", "step")
    assert [row["action_mask"] for row in found] == [[True, True], [False, True], [True, True]]


def test_closing_twice_and_without_a_step_writes_nothing(lake):
    env = record(Counter(), lake.dataset("log"))
    env.close()
    env.close()
    assert lake.datasets() == []


def test_a_second_recorder_appends(lake):
    for _ in range(2):
        env = record(Counter(), lake.dataset("log"))
        play(env, 1)
        env.close()
    assert lake.sql("select count(*) as n from log.episodes").to_pylist() == [{"n": 2}]


def test_nested_observations_are_recorded(lake):
    class Nested(Counter):
        observation_space = gymnasium.spaces.Dict(
            {
                "at": gymnasium.spaces.Tuple(
                    (gymnasium.spaces.Discrete(9), gymnasium.spaces.Box(0, 9, (2,), np.float64))
                ),
                "said": gymnasium.spaces.Text(9),
            }
        )
        action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

        def _nested(self):
            at = int(self._buffer[0])
            return {"at": (at, np.full(2, at, np.float64)), "said": f"step {at}"}

        def reset(self, *, seed=None, options=None):
            _, info = super().reset(seed=seed)
            return self._nested(), info

        def step(self, action):
            after = super().step(0)[1:]
            return (self._nested(), *after)

    env = record(Nested(), lake.dataset("log"))
    play(env, 1, action=np.array([0.5, -0.5], np.float32))
    env.close()
    found = rows(lake, "observation.at._0 as room, observation.said as said, action", "step")
    assert found[1] == {"room": 1, "said": "step 1", "action": [0.5, -0.5]}


def test_a_vector_environment_is_refused(lake):
    vector = gymnasium.vector.SyncVectorEnv([Counter, Counter])
    with pytest.raises(ConfigInvalidError, match="vector environment of 2"):
        record(vector, lake.dataset("log"))
    vector.close()


def test_recorders_may_be_vectorized(lake):
    vector = gymnasium.vector.SyncVectorEnv(
        [lambda: record(Counter(), lake.dataset("log")) for _ in range(2)]
    )
    vector.reset()
    for _ in range(3):
        vector.step(np.array([0, 1]))
    vector.close()
    counted = lake.sql('select num_steps, "return" as r from log.episodes order by r').to_pylist()
    assert counted == [{"num_steps": 3, "r": 0.0}, {"num_steps": 3, "r": 30.0}]


@pytest.mark.parametrize("policy", ["mine:x", "mine:", "a:b:c"])
def test_a_malformed_policy_is_refused(lake, policy):
    with pytest.raises(ConfigInvalidError, match=policy):
        record(Counter(), lake.dataset("log"), policy=policy)


def test_a_dataset_of_other_spaces_is_refused(lake):
    lake.dataset("log").create(Box((4,)), Discrete(2))
    env = record(Counter(), lake.dataset("log"))
    env.reset()
    env.step(0)
    env.step(0)
    with pytest.raises((EpisodeInvalidError, SchemaMismatchError), match="observation"):
        env.step(0)


class Faulty(Counter):
    """Its first episode has a reward that is not finite; `mask_sizes` are those of each reset."""

    def __init__(self, mask_sizes=(), **options):
        super().__init__(**options)
        self._resets = 0
        self._mask_sizes = mask_sizes

    def reset(self, **kwargs):
        self._resets += 1
        return super().reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, np.inf if self._resets == 1 else reward, terminated, truncated, info

    def _info(self):
        if not self._mask_sizes:
            return {}
        return {"action_mask": np.ones(self._mask_sizes[self._resets - 1], bool)}


def test_a_refused_episode_is_dropped_whole_and_the_next_is_recorded(lake):
    env = record(Faulty(), lake.dataset("log"))
    with pytest.raises(EpisodeInvalidError, match=r"reward at step 0: found inf"):
        play(env, 1)
    assert not lake.dataset("log").exists()
    with pytest.raises(EpisodeInvalidError, match="expected reset first"):
        env.step(1)
    play(env, 1)
    env.close()
    assert rows(lake, "step, reward, terminated") == [
        {"step": t, "reward": 10.0, "terminated": t == 2} for t in range(3)
    ]


def test_an_episode_refused_at_reset_or_close_leaves_the_others(lake):
    env = record(Faulty(), lake.dataset("log"))
    env.reset()
    env.step(1)
    with pytest.raises(EpisodeInvalidError, match="found inf"):
        env.reset()
    with pytest.raises(EpisodeInvalidError, match="expected reset first"):
        env.step(1)
    play(env, 2)
    env.close()
    assert lake.sql("select num_steps from log.episodes").to_pylist() == [{"num_steps": 3}] * 2

    last = Faulty()
    last._resets = 1
    env = record(last, lake.dataset("log"))
    play(env, 1)
    env.reset()
    last._resets = 1
    env.step(1)
    with pytest.raises(EpisodeInvalidError, match="found inf"):
        env.close()
    assert lake.sql("select num_steps from log.episodes").to_pylist() == [{"num_steps": 3}] * 3


class Uneven(Counter):
    """Its reward or its observation changes shape in the first episode's second step."""

    def __init__(self, what):
        super().__init__()
        self._what, self._steps = what, 0

    def step(self, action):
        self._steps += 1
        observation, reward, *rest = super().step(action)
        if self._steps == 2 and self._what == "reward":
            reward = [1.0, 2.0]
        elif self._steps == 2:
            observation = np.zeros(5, np.float32)
        return observation, reward, *rest


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_a_change_of_shape_is_refused_by_name_and_leaves_nothing(lake, what):
    env = record(Uneven(what), lake.dataset("log"))
    with pytest.raises(EpisodeInvalidError, match=f"{what}: found the shapes .* in one episode"):
        play(env, 1)
    play(env, 1)
    env.close()
    assert lake.sql("select num_steps from log.episodes").to_pylist() == [{"num_steps": 3}]


def test_a_reward_of_two_numbers_at_every_step_is_refused(lake):
    class Pair(Counter):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, [1.0, 2.0], *rest

    env = record(Pair(), lake.dataset("log"))
    with pytest.raises(EpisodeInvalidError, match=r"reward: found shape \[2\]"):
        play(env, 1)
    env.close()
    assert not lake.dataset("log").exists()


def test_a_mask_of_another_size_does_not_keep_others_from_being_committed(lake):
    env = record(Faulty(mask_sizes=(9, 2, 3, 2)), lake.dataset("log"))
    env.unwrapped._resets = 1
    play(env, 1)
    with pytest.raises(SchemaMismatchError, match=r"masks of 3 actions, expected 2"):
        play(env, 1)
    play(env, 1)
    env.close()
    assert lake.sql("select num_steps from log.episodes").to_pylist() == [{"num_steps": 3}] * 2


def test_a_step_before_reset_is_refused(lake):
    env = record(Counter(), lake.dataset("log"))
    with pytest.raises(EpisodeInvalidError, match="reset"):
        env.step(0)


@pytest.mark.slow
def test_recording_needs_neither_torch_nor_ray():
    code = (
        "import sys, replaylake as rl; rl.record; "
        "print(sorted({'torch', 'ray', 'd3rlpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
