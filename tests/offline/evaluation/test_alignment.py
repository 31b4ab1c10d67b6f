from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.interchange.ingest.alignment import Alignment, SampledWindows
from replaylake.offline.environments.ids import make
from replaylake.offline.evaluation.alignment import check_alignment

# Newer versions of Gymnasium have only v4.
_TAXI = max(env_id for env_id in gymnasium.registry if env_id.startswith("Taxi-v"))


def _play(env_id: str, num_steps: int = 400, seed: int = 0, **kwargs: Any) -> list[Episode]:
    """Record random play, with the final observation of every episode."""
    env = make(env_id, **kwargs)
    env.action_space.seed(seed)
    episodes: list[Episode] = []
    while sum(map(len, episodes)) < num_steps:
        observation, _ = env.reset(seed=seed + len(episodes))
        observations, actions, rewards, terminated, truncated = [observation], [], [], False, False
        while not (terminated or truncated):
            actions.append(env.action_space.sample())
            observation, reward, terminated, truncated, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(float(reward))
        episodes.append(
            Episode(
                str(len(episodes)),
                observations=np.asarray(observations[:-1]),
                actions=np.asarray(actions),
                rewards=np.asarray(rewards),
                terminated=bool(terminated),
                truncated=bool(truncated),
                final_observation=np.asarray(observations[-1]),
            )
        )
    env.close()
    return episodes


def _check(env_id: str, episodes: list[Episode]) -> Alignment:
    found = check_alignment(env_id, episodes)
    assert isinstance(found, Alignment)
    return found


@pytest.mark.parametrize(
    "env_id",
    [
        "CartPole-v1",
        "Pendulum-v1",
        "Acrobot-v1",
        "MountainCar-v0",
        "MountainCarContinuous-v0",
        "FrozenLake-v1",
        _TAXI,
    ],
)
def test_what_an_environment_did_is_confirmed(env_id: str) -> None:
    found = _check(env_id, _play(env_id))
    assert found.num_checked >= 400
    assert found.num_agree == found.num_rewards_agree == found.num_ends_agree == found.num_checked
    assert found.is_aligned
    assert found.cause is found.advice is None


def test_a_time_limit_that_was_logged_as_a_termination() -> None:
    episodes = [
        replace(episode, terminated=True, truncated=False) for episode in _play("Pendulum-v1")
    ]
    found = _check("Pendulum-v1", episodes)
    assert found.num_ends_agree == found.num_checked - len(episodes)
    assert found.cause is None
    assert found.advice is not None
    assert found.advice.startswith("2 of 2 terminated rows do not end in the environment")
    assert "`time_limit`" in found.advice


def test_ends_that_are_not_logged() -> None:
    episodes = [replace(e, terminated=False, truncated=True) for e in _play("CartPole-v1")]
    found = _check("CartPole-v1", episodes)
    assert found.advice is not None
    assert found.advice.startswith(f"{len(episodes)} rows end in the environment and are not")


Edit = Callable[[Episode], Episode]


def _rolled(shift: int) -> Edit:
    return lambda e: replace(e, actions=np.roll(e.actions, shift, axis=0))


@pytest.mark.parametrize(
    ("env_id", "edit", "cause", "advice"),
    [
        ("CartPole-v1", _rolled(1), "the action of the row before it", "up by one row"),
        ("CartPole-v1", _rolled(-1), "the action of the row after it", "down by one row"),
        ("CartPole-v1", lambda e: replace(e, actions=e.actions + 1), "one more", "subtract 1"),
        ("CartPole-v1", lambda e: replace(e, actions=1 - e.actions), "opposite order", "number"),
        ("Pendulum-v1", _rolled(1), "the action of the row before it", "up by one row"),
        (
            "Pendulum-v1",
            lambda e: replace(e, actions=e.actions / 2),
            "0.5 times the environment's",
            "`action_scale` 2",
        ),
        (
            "Pendulum-v1",
            lambda e: replace(e, actions=e.actions * 10),
            "10 times",
            "`action_scale` 0.1",
        ),
        (
            "MountainCar-v0",
            lambda e: replace(
                e,
                observations=_unit(e.observations),
                final_observation=_unit(e.final_observation),
            ),
            r"normalized to \[-1, 1\]",
            "undo",
        ),
        (
            "Pendulum-v1",
            lambda e: replace(e, rewards=np.roll(e.rewards, 1)),
            "the reward of the row before it",
            "reward column up",
        ),
        (
            "Pendulum-v1",
            lambda e: replace(e, rewards=np.roll(e.rewards, -1)),
            "the reward of the row after it",
            "reward column down",
        ),
        (
            "Pendulum-v1",
            lambda e: replace(e, rewards=-e.rewards),
            "rewards .* -1 times",
            "`reward_scale` -1",
        ),
        (
            _TAXI,
            lambda e: replace(e, rewards=e.rewards * 20),
            "rewards .* 20 times",
            "`reward_scale` 0.05",
        ),
    ],
)
def test_usual_mistakes_are_named(env_id: str, edit: Edit, cause: str, advice: str) -> None:
    found = _check(env_id, [edit(episode) for episode in _play(env_id)])
    assert not found.is_aligned
    assert found.cause is not None
    assert found.advice is not None
    assert re.search(cause, found.cause)
    assert advice in found.advice
    assert found.num_explained >= 0.9 * found.num_checked_explained > 0


def _unit(observations: Any) -> Any:
    low, high = np.array([-1.2, -0.07]), np.array([0.6, 0.07])
    return ((observations - low) / (high - low) * 2 - 1).astype(np.float32)


def test_standardized_observations_are_named_without_their_statistics() -> None:
    episodes = _play("CartPole-v1", 1_000)
    joined = np.concatenate([episode.observations for episode in episodes])
    mean, deviation = joined.mean(axis=0), joined.std(axis=0)
    found = _check(
        "CartPole-v1",
        [
            replace(
                e,
                observations=(e.observations - mean) / deviation,
                final_observation=(e.final_observation - mean) / deviation,
            )
            for e in episodes
        ],
    )
    assert found.cause is not None
    assert "look normalized" in found.cause


def test_another_environments_log_is_explained_by_nothing() -> None:
    rng = np.random.default_rng(0)
    episode = Episode(
        "a",
        observations=rng.uniform(1, 3, (300, 3)),
        actions=rng.uniform(-2, 2, (300, 1)),
        rewards=rng.normal(size=300),
    )
    found = _check("Pendulum-v1", [episode])
    assert found.num_checked == 299
    assert found.num_agree == 0
    assert found.cause is None
    assert "no usual cause" in str(found.advice)


def test_a_termination_that_the_environment_does_not_make_is_counted() -> None:
    (episode, *_) = _play("Pendulum-v1", 200)
    found = _check("Pendulum-v1", [replace(episode, terminated=True, truncated=False)])
    assert found.num_agree == found.num_checked == 200
    assert found.num_ends_agree == 199


def test_where_nothing_can_be_checked_there_is_no_answer() -> None:
    one = Episode("a", np.zeros((1, 4)), np.zeros(1, np.int64), np.zeros(1), terminated=True)
    assert "a next observation" in str(check_alignment("CartPole-v1", [one]))
    assert "cannot be set" in str(check_alignment("Blackjack-v1", _play("CartPole-v1", 10)))
    with pytest.raises(NotFoundError):
        check_alignment("Nowhere-v0", [one])


class _Counter(gymnasium.Env[Any, Any]):
    """Adds the action to what it shows; its state is set through the hook."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._total = np.zeros(1)
        return self._total, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._total = self._total + action
        return self._total, 1.0, False, False, {}

    def set_state_from_observation(self, observation: Any) -> None:
        self._total = np.asarray(observation, np.float64)


def test_an_environment_joins_by_the_hook() -> None:
    gymnasium.register("Counter-v0", lambda: _Counter(), max_episode_steps=50)
    try:
        assert _check("Counter-v0", _play("Counter-v0", 50)).is_aligned
    finally:
        del gymnasium.registry["Counter-v0"]


def test_windows_are_a_fixed_sample_of_the_whole_source() -> None:
    episodes = [
        Episode(
            str(i),
            observations=np.arange(i * 100, i * 100 + 100, dtype=np.float64)[:, None],
            actions=np.zeros(100, np.int64),
            rewards=np.zeros(100),
            terminated=True,
            final_observation=np.array([i * 100 + 100.0]),
        )
        for i in range(1_000)
    ]
    samples = []
    for size in (1_000, 7):
        windows = SampledWindows()
        for start in range(0, len(episodes), size):
            windows.add(episodes[start : start + size])
        samples.append(windows.episodes())
    assert len(samples[0]) == 128
    names = [[(w.episode_id, w.first_step) for w in sample] for sample in samples]
    assert names[0] == names[1]
    assert len({int(name) // 100 for name, _ in names[0]}) == 10
    for window in samples[0]:
        assert len(window) == 16
        # The next observation is known for each, also where the run ends inside its episode.
        assert window.final_observation == window.observations[-1] + 1
        assert window.terminated == (window.first_step == 84)
