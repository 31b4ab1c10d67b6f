import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Discrete, Text
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import graph_policy, load_policy, save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.offline.environments.ids import make, spaces_of
from replaylake.offline.environments.recording_wrapper import record
from replaylake.offline.evaluation.evaluate import EvaluationConfig, evaluate
from replaylake.offline.learning.algorithm import PolicyModule
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.graph_writer import GraphWriter
from replaylake.offline.networks.actors import CategoricalNetwork
from replaylake.offline.networks.frame_stack import stack_space, wrap_frame_stack
from replaylake.offline.networks.graph import PolicyGraph, TorchPolicy

ENV = "frame_grid:make_frame_grid"


class Seen(nn.Module):
    """Gives the whole stack as logits."""

    def forward(self, observations):
        return (observations.flatten(start_dim=1).float(),)


class Counting(nn.Module):
    """Gives the whole stack, and how many it has been given, of which it counts itself."""

    def forward(self, observations, state):
        return torch.cat([observations.flatten(start_dim=1), state], dim=1), state + 1


def seen(module, num_logits, state_size=0, dtype="float32"):
    spec = PolicySpec(
        stack_space(Box((2,), dtype, 0, 9), 3),
        Discrete(num_logits),
        "q_values",
        state_size=state_size,
    )
    return wrap_frame_stack(PolicyGraph(module, spec), 3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int16"])
def test_the_first_observation_stands_in_for_those_before_it(dtype):
    policy = TorchPolicy(seen(Seen(), 6, dtype=dtype))
    state = policy.initial_state(2)
    given = np.array([[[1, 2], [7, 8]], [[3, 4], [7, 8]], [[5, 6], [7, 8]], [[0, 9], [7, 8]]])
    expected = [[1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 0, 9]]
    for observations, stack in zip(given.astype(dtype), expected, strict=True):
        act = policy.act(observations, state)
        np.testing.assert_array_equal(act.q_values, [stack, [7, 8] * 3])
        state = act.state
    # One of them begins an episode, the other goes on.
    state[1] = 0
    values = policy.act(np.array([[1, 1], [2, 2]], dtype), state).q_values
    np.testing.assert_array_equal(values, [[5, 6, 0, 9, 1, 1], [2] * 6])


def test_a_state_of_its_own_comes_first_and_alone_is_recorded():
    graph = seen(Counting(), 7, state_size=1)
    assert graph.spec.state_size == 1 + 2 * 2 + 1
    assert graph.spec.recorded_state_size == 1
    assert seen(Seen(), 6).spec.recorded_state_size == 0
    policy = graph_policy(export_onnx(graph), graph.spec)
    state = policy.initial_state(1)
    for step in range(4):
        act = policy.act(np.full((1, 2), step, np.float32), state)
        state = act.state
        assert act.q_values[0, -1] == step
        assert state[0, 0] == step + 1


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """A dataset of random walks on FrameGrid."""
    dataset = open_lake(tmp_path_factory.mktemp("lake"), create=True).dataset("walks")
    env = record(make(ENV), dataset)
    env.action_space.seed(0)
    for seed in range(6):
        env.reset(seed=seed)
        ended = False
        while not ended:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = terminated or truncated
    env.close()
    return dataset


def test_on_single_frames_it_acts_as_it_learned_on_stacked_ones(frames, tmp_path):
    torch.manual_seed(0)
    observation_space, action_space = spaces_of(ENV)
    space = stack_space(observation_space, 3)
    assert space == Box((3, 84, 84), "uint8", 0, 255)
    spec = PolicySpec(space, action_space, "categorical")
    learned = PolicyGraph(PolicyModule(CategoricalNetwork(space, 4, (8,)), spec), spec)
    graph = wrap_frame_stack(learned, 3)
    assert graph.spec.observation_space == observation_space
    writer = GraphWriter(graph)
    assert writer.is_fast
    save_package(
        tmp_path / "p", onnx=writer.onnx(), spec=graph.spec, manifest={}, learner_weights=None
    )
    policy = load_policy(tmp_path / "p")
    assert policy.spec == graph.spec
    view = frames.snapshot().replay(frame_stack=3)
    batch = view.uniform(6, Sequences(10), seed=0).sample()
    state = policy.initial_state(6)
    on_stacks = TorchPolicy(learned)
    for t in range(10):
        live = batch.mask[:, t]
        stacks = np.ascontiguousarray(batch.observations[:, t])
        expected = on_stacks.action_probs(stacks, deterministic=False)
        newest = np.ascontiguousarray(stacks[:, -1])
        found = policy.action_probs(newest, state, deterministic=False)
        np.testing.assert_allclose(found[live], expected[live], atol=1e-5)
        state = policy.act(newest, state).state
    assert evaluate(policy, EvaluationConfig(ENV, episodes=3, num_envs=2)) == evaluate(
        TorchPolicy(graph), EvaluationConfig(ENV, episodes=3, num_envs=1)
    )


def test_what_float32_does_not_hold_is_refused():
    for space in (Box((2,), "int32", 0, 9), Text()):
        with pytest.raises(SpaceUnsupportedError, match="frame stack: found observations"):
            stack_space(space, 2)


def test_a_policy_of_other_stacks_is_refused():
    spec = PolicySpec(Box((4, 2)), Discrete(2), "categorical")
    with pytest.raises(SpaceUnsupportedError, match="expected a Box of 3 observations"):
        wrap_frame_stack(PolicyGraph(Seen(), spec), 3)


def test_bounds_of_each_element_are_kept():
    space = Box((2,), "float32", [0, 1], [2, 3])
    stacked = stack_space(space, 2)
    assert stacked == Box((2, 2), "float32", [[0, 1], [0, 1]], [[2, 3], [2, 3]])
    graph = PolicyGraph(Seen(), PolicySpec(stacked, Discrete(4), "q_values"))
    assert wrap_frame_stack(graph, 2).spec.observation_space == space
