import sys

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    ExtraMissingError,
    NotFoundError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.policies.heads import act_from_head
from replaylake.datastore.lake.policies.policy import Act, PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.environments.ids import spaces_of
from replaylake.offline.evaluation.evaluate import EvaluationConfig, evaluate
from replaylake.offline.networks.graph import PolicyGraph, TorchPolicy


class Rule:
    """Pushes the cart towards where the pole leans: about 40 steps; counts its calls."""

    def __init__(self, env_id="CartPole-v1"):
        self.spec = PolicySpec(*spaces_of(env_id), "categorical")
        self.calls = []

    def initial_state(self, n):
        return None

    def act(self, observations, state=None, *, rng=None, deterministic=True, action_mask=None, **_):
        self.calls.append(len(observations))
        return Act((observations[:, 2] > 0).astype(np.int64), None)

    def observe(self, state, rewards):
        return state


class Masked(gymnasium.Env):
    """Five steps; the one allowed action alternates, any other ends the episode at once."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(1, np.float32), self._info()

    def step(self, action):
        allowed = action == self._step % 2
        self._step += 1
        ended = not allowed or self._step == 5
        return np.full(1, self._step, np.float32), float(allowed), ended, False, self._info()

    def _info(self):
        mask = np.zeros(2, np.int8)
        mask[self._step % 2] = 1
        return {"action_mask": mask}


class Remembering(Rule):
    """Keeps the number of its steps and the sum of its rewards as state."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def initial_state(self, n):
        return np.zeros((n, 2))

    def act(self, observations, state=None, **kwargs):
        return Act(super().act(observations, **kwargs).actions, None, state + np.array([1, 0]))

    def observe(self, state, rewards):
        state = state + np.stack([np.zeros_like(rewards), rewards], axis=1)
        self.seen.append(state.tolist())
        return state


@pytest.fixture
def masked_id():
    env_id = "replaylake-test/Masked-v0"
    gymnasium.register(env_id, entry_point=Masked)
    yield env_id
    del gymnasium.registry[env_id]


def test_the_result_does_not_depend_on_the_number_of_environments():
    alone = evaluate(Rule(), EvaluationConfig("CartPole-v1", episodes=7, seed=3, num_envs=1))
    together = evaluate(Rule(), EvaluationConfig("CartPole-v1", episodes=7, seed=3, num_envs=4))
    assert alone == together
    assert alone.seeds == (3, 4, 5, 6, 7, 8, 9)
    assert len(set(alone.returns)) > 1


def test_it_is_what_a_plain_loop_finds():
    env = gymnasium.make("CartPole-v1")
    returns = []
    for seed in (10, 11):
        observation, _ = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(int(observation[2] > 0))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    found = evaluate(Rule(), EvaluationConfig("CartPole-v1", episodes=2, seed=10))
    assert list(found.returns) == returns
    assert list(found.lengths) == returns
    assert found.mean_return == sum(returns) / 2
    assert found.ci_low < found.mean_return < found.ci_high


def test_it_acts_for_all_environments_in_one_call():
    policy = Rule()
    evaluate(policy, EvaluationConfig("CartPole-v1", episodes=4, num_envs=4))
    assert policy.calls[0] == 4


def test_one_episode_has_no_interval():
    found = evaluate(Rule(), EvaluationConfig("CartPole-v1", episodes=1))
    assert (found.ci_low, found.ci_high) == (None, None)
    assert found.to_json()["returns"] == list(found.returns)


def test_sampling_is_seeded_by_episode():
    policy = UniformPolicy(*spaces_of("CartPole-v1"))
    first = evaluate(
        policy, EvaluationConfig("CartPole-v1", episodes=5, deterministic=False, num_envs=5)
    )
    second = evaluate(
        policy, EvaluationConfig("CartPole-v1", episodes=5, deterministic=False, num_envs=2)
    )
    other = evaluate(
        policy, EvaluationConfig("CartPole-v1", episodes=5, deterministic=False, seed=50)
    )
    assert first == second
    assert first.returns != other.returns


def test_masks_of_the_environment_are_honored(masked_id):
    policy = UniformPolicy(*spaces_of(masked_id))
    found = evaluate(policy, EvaluationConfig(masked_id, episodes=3))
    assert found.returns == (5.0, 5.0, 5.0)


def test_a_policy_with_state_keeps_one_per_episode():
    policy = Remembering()
    found = evaluate(policy, EvaluationConfig("CartPole-v1", episodes=2, num_envs=2))
    assert policy.seen[0] == [[1, 1], [1, 1]]
    assert [found.lengths[0]] * 2 in [state[0] for state in policy.seen]
    assert max(state[0][0] for state in policy.seen) == max(found.lengths)


class Alternating(nn.Module):
    """Pushes left and right in turn, which its state counts; the graph is the same for any row."""

    def forward(self, observations, state):
        is_odd = state.remainder(2)
        return torch.cat([1 - is_odd, is_odd], dim=1), state + 1


def test_states_of_many_environments_do_not_mix():
    spec = PolicySpec(*spaces_of("CartPole-v1"), "categorical", state_size=1)
    policy = TorchPolicy(PolicyGraph(Alternating(), spec))
    together = evaluate(policy, EvaluationConfig("CartPole-v1", episodes=6, seed=3, num_envs=4))
    assert together == evaluate(
        policy, EvaluationConfig("CartPole-v1", episodes=6, seed=3, num_envs=1)
    )
    env = gymnasium.make("CartPole-v1")
    lengths = []
    for seed in range(3, 9):
        env.reset(seed=seed)
        length, ended = 0, False
        while not ended:
            _, _, terminated, truncated, _ = env.step(length % 2)
            length, ended = length + 1, terminated or truncated
        lengths.append(length)
    assert list(together.lengths) == lengths
    assert len(set(lengths)) > 1


def test_progress_counts_episodes():
    seen = []
    evaluate(
        Rule(),
        EvaluationConfig("CartPole-v1", episodes=3),
        callbacks=Callbacks(
            on_progress=lambda done: seen.append((done.num_episodes, done.episodes))
        ),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_an_environment_of_other_spaces_is_refused():
    with pytest.raises(SchemaMismatchError, match=r"Pendulum-v1: its observation .* float32\[3\]"):
        evaluate(Rule(), EvaluationConfig("Pendulum-v1", episodes=1))
    wrong = UniformPolicy(Box((4,)), Discrete(3))
    with pytest.raises(SchemaMismatchError, match=r"Discrete\(2\), expected Discrete\(3\)"):
        evaluate(wrong, EvaluationConfig("CartPole-v1", episodes=1))


def test_an_unknown_environment_is_not_found():
    with pytest.raises(NotFoundError, match="CartPole-v1"):
        evaluate(Rule(), EvaluationConfig("CartPole-v7", episodes=1))


def test_no_episodes_are_refused():
    with pytest.raises(ConfigInvalidError, match="0 episodes"):
        evaluate(Rule(), EvaluationConfig("CartPole-v1", episodes=0))


def test_a_policy_that_answers_with_nan_is_not_measured():
    observation_space, action_space = spaces_of("CartPole-v1")
    spec = PolicySpec(observation_space, action_space, "categorical")

    class Broken(UniformPolicy):
        def act(self, observations, state=None, *, rng=None, **how):
            logits = np.full((len(observations), 2), np.nan, np.float32)
            return act_from_head(spec, {"logits": logits}, rng)

    with pytest.raises(EpisodeInvalidError, match="logits that are not finite for observation 0"):
        evaluate(
            Broken(observation_space, action_space), EvaluationConfig("CartPole-v1", episodes=1)
        )


class HalfMasked(Masked):
    """Gives masks in its odd steps alone."""

    def _info(self):
        return super()._info() if self._step % 2 else {}


def test_masked_and_unmasked_environments_share_a_call(masked_id):
    env_id = "replaylake-test/HalfMasked-v0"
    gymnasium.register(env_id, entry_point=HalfMasked)
    try:
        policy = UniformPolicy(*spaces_of(env_id))
        together = evaluate(policy, EvaluationConfig(env_id, episodes=9, num_envs=9))
        alone = evaluate(policy, EvaluationConfig(env_id, episodes=9, num_envs=1))
    finally:
        del gymnasium.registry[env_id]
    assert together == alone
    assert len(set(together.lengths)) > 1


def test_sampling_takes_one_call_for_all():
    policy = Rule()
    evaluate(policy, EvaluationConfig("CartPole-v1", episodes=6, deterministic=False, num_envs=6))
    assert policy.calls[0] == 6


class Drawn(gymnasium.Env):
    """Three steps; its picture is as bright as its step number, and of its seed's color."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - Gymnasium's form
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self._seed, self._step = seed, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._step += 1
        return np.full(1, self._step, np.float32), 1.0, self._step == 3, False, {}

    def render(self):
        return np.full((4, 6, 3), 10 * self._seed + self._step, np.uint8)


class Blind(Drawn):
    metadata = {"render_modes": ["human"]}  # noqa: RUF012


class Odd(Drawn):
    def render(self):
        return "ascii art"


@pytest.fixture
def drawing():
    made = {"Drawn": Drawn, "Blind": Blind, "Odd": Odd}
    for name, env in made.items():
        gymnasium.register(f"replaylake-test/{name}-v0", entry_point=env)
    yield {name: f"replaylake-test/{name}-v0" for name in made}
    for name in made:
        del gymnasium.registry[f"replaylake-test/{name}-v0"]


def test_the_first_episodes_are_filmed(drawing):
    policy = UniformPolicy(*spaces_of(drawing["Drawn"]))
    frames = {}
    evaluate(
        policy,
        EvaluationConfig(drawing["Drawn"], episodes=5, num_envs=1, seed=4, filmed_episodes=2),
        callbacks=Callbacks(
            on_frame=lambda episode, frame: frames.setdefault(episode, []).append(
                int(frame[0, 0, 0])
            )
        ),
    )
    # The reset and three steps of each, with the seeds 4 and 5.
    assert frames == {0: [40, 41, 42, 43], 1: [50, 51, 52, 53]}


def test_what_is_filmed_is_what_is_measured(drawing):
    policy = UniformPolicy(*spaces_of(drawing["Drawn"]))
    filmed = evaluate(
        policy,
        EvaluationConfig(drawing["Drawn"], episodes=3),
        callbacks=Callbacks(on_frame=lambda *_: None),
    )
    assert filmed == evaluate(policy, EvaluationConfig(drawing["Drawn"], episodes=3))


def test_an_environment_that_cannot_draw_is_refused(drawing):
    policy = UniformPolicy(*spaces_of(drawing["Blind"]))
    with pytest.raises(
        ConfigInvalidError, match=r"found render modes \['human'\], expected rgb_array"
    ):
        evaluate(policy, drawing["Blind"], callbacks=Callbacks(on_frame=lambda *_: None))
    with pytest.raises(ConfigInvalidError, match=r"its image is <U9 \[\], expected uint8"):
        evaluate(policy, drawing["Odd"], callbacks=Callbacks(on_frame=lambda *_: None))


def test_the_library_that_draws_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ExtraMissingError, match="pygame"):
        evaluate(
            Rule(),
            EvaluationConfig("CartPole-v1", episodes=1),
            callbacks=Callbacks(on_frame=lambda *_: None),
        )


def test_cartpole_draws_itself():
    shapes = []
    evaluate(
        Rule(),
        EvaluationConfig("CartPole-v1", episodes=1),
        callbacks=Callbacks(on_frame=lambda _, frame: shapes.append(frame.shape)),
    )
    assert set(shapes) == {(400, 600, 3)}
