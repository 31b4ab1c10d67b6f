"""Policies that remember, evaluated along whole episodes by importance sampling."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.graph_policy import GraphPolicy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.evaluation.ope import target_policy
from replaylake.offline.evaluation.ope.evaluate_policy import evaluate_policy
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest
from replaylake.offline.evaluation.ope.promotion_gate import evaluate_gate
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy

LENGTHS = [3, 1, 7, 7, 2, 5]
OFFSETS = np.append(0, np.cumsum(LENGTHS))


def core(head, num_outputs):
    """A policy over observations [2] whose state is a leaky sum of what it saw, made of numpy."""
    rng = np.random.default_rng(5)
    inward, outward = rng.normal(size=(2, 3)), rng.normal(size=(3, num_outputs))

    def run(inputs):
        state = np.tanh(inputs["observations"] @ inward + 0.7 * inputs["state"])
        made = (state @ outward).astype(np.float32)
        outputs = {"logits": made}
        if head == "gaussian":
            outputs = {"means": made, "log_stds": np.full_like(made, -0.5)}
        return {**outputs, "next_state": state.astype(np.float32)}

    space = Box((num_outputs,)) if head == "gaussian" else Discrete(num_outputs)
    return GraphPolicy(PolicySpec(Box((2,)), space, head, state_size=3), run)


def one_by_one(ask, policy, observations):
    """Return what `ask(policy, row, state)` gives along each episode, an episode after another."""
    found = []
    for begin, end in itertools.pairwise(OFFSETS):
        state = policy.initial_state(1)
        for row in range(begin, end):
            found.append(ask(row, state)[0])
            state = policy.act(observations[row : row + 1], state).state
    return np.array(found)


@pytest.mark.parametrize("num_at_once", [1, 2, 100])
def test_episodes_side_by_side_are_as_one_after_another(monkeypatch, num_at_once):
    monkeypatch.setattr(target_policy, "_STATE_BYTES", 12 * num_at_once)
    rng = np.random.default_rng(1)
    observations = rng.normal(size=(OFFSETS[-1], 2)).astype(np.float32)
    policy = core("categorical", 4)
    masks = rng.random((OFFSETS[-1], 4)) < 0.7
    masks[:, 0] = True
    for exploration in (Exploration(), Exploration(epsilon=0.2), Exploration(temperature=0.5)):
        how = {"deterministic": not exploration.temperature, "epsilon": exploration.epsilon}
        how["temperature"] = exploration.temperature or 1.0
        expected = one_by_one(
            lambda row, state, how=how: policy.action_probs(
                observations[row : row + 1], state, action_mask=masks[row : row + 1], **how
            ),
            policy,
            observations,
        )
        target = TargetPolicy(policy, exploration)
        found = target.action_probs_along(OFFSETS, observations, masks)
        assert found == pytest.approx(expected, abs=1e-6)
        assert found.sum(axis=1) == pytest.approx(1)
    gaussian = core("gaussian", 2)
    actions = rng.normal(size=(OFFSETS[-1], 2)).astype(np.float32)
    expected = one_by_one(
        lambda row, state: gaussian.log_probs(
            observations[row : row + 1], actions[row : row + 1], state, deterministic=False
        ),
        gaussian,
        observations,
    )
    target = TargetPolicy(gaussian, Exploration(temperature=1.0))
    found = target.log_probs_along(OFFSETS, observations, actions)
    assert found == pytest.approx(expected, abs=1e-5)


class Recalls(nn.Module):
    """Keeps the first observation, 1 or 2, and does what it names: 0 or 1."""

    def forward(self, observations, state):
        first = torch.where(state == 0, observations, state)
        return torch.cat([-((state - 1) ** 2), -((state - 2) ** 2)], dim=1), first


class Forgets(nn.Module):
    """Sees that the second observation is 0, and cannot know better than to do 0."""

    def forward(self, observations):
        return (torch.cat([observations * 0, observations * 0 - 1], dim=1),)


def log(lake, num=1200, *, name="log", first_step=0):
    """Two steps of a uniform policy: the second action earns 1 where it is what came first."""
    rng = np.random.default_rng(3)
    lake.dataset(name).create(Box((1,)), Discrete(2))
    for i in range(num):
        cue, actions = rng.integers(1, 3), rng.integers(0, 2, 2)
        hit = float(actions[1] == cue - 1)
        yield Episode(
            f"e/{i:05d}",
            observations=np.array([[cue], [0]], np.float32),
            actions=actions,
            rewards=[0.0, hit + 0.1 * rng.standard_normal()],
            terminated=True,
            behavior_log_probs=np.log([0.5, 0.5]).astype(np.float32),
            first_step=first_step,
        )


def late(lake):
    """Episodes whose first step is not there."""
    lake.dataset("log").append(
        Episode(
            f"late/{i}",
            observations=np.zeros((1, 1), np.float32),
            actions=[0],
            rewards=[0.0],
            terminated=True,
            behavior_log_probs=np.log([0.5]).astype(np.float32),
            first_step=1,
        )
        for i in range(200)
    )


@pytest.fixture
def lake(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("log").append(log(lake))
    return lake


@pytest.fixture
def recalling(lake, register_graph):
    spec = PolicySpec(Box((1,)), Discrete(2), "q_values", state_size=1)
    return register_graph(lake, "recalls", Recalls(), spec)


def test_what_it_recalls_earns_what_no_observation_tells(lake, recalling):
    report = evaluate_policy(lake, EvaluationRequest("log", "recalls", unseen=True))
    assert report.verdict == "supported"
    found = {one.estimator: one for one in report.estimates.estimates}
    # It earns 1, and the log's policy one half.
    assert found["wpdis"].value == pytest.approx(1, abs=0.03)
    assert found["wpdis"].difference_low > 0.4
    assert {"is", "wis", "pdis", "wpdis"} <= set(found)
    for name in ("fqe", "dr", "wdr"):
        assert name not in found
    assert "the policy remembers" in report.model


def test_the_gate_lets_it_pass_over_one_that_forgets(lake, recalling, register_graph):
    spec = PolicySpec(Box((1,)), Discrete(2), "q_values")
    forgetting = register_graph(lake, "forgets", Forgets(), spec)
    found = evaluate_gate(
        lake, recalling, forgetting, EvaluationRequest("log", "recalls", unseen=True)
    )
    assert found.passed, found.reasons
    (one,) = found.comparisons
    assert one.estimator == "wpdis"
    assert one.low < 0.5 < one.high
    back = evaluate_gate(
        lake, forgetting, recalling, EvaluationRequest("log", "forgets", unseen=True)
    )
    assert not back.passed


def test_episodes_without_their_beginning_are_left_out(lake, recalling, register_graph):
    late(lake)
    reason = "without the first step, for a stateful policy"
    report = evaluate_policy(lake, EvaluationRequest("log", "recalls", unseen=True))
    assert report.left_out == {reason: 200}
    assert report.num_episodes == 1200
    where = "episode_id LIKE 'late/%'"
    with pytest.raises(EmptyReplayError, match="200 episodes that begin at step 1 or later"):
        evaluate_policy(lake, EvaluationRequest("log", "recalls", where=where, unseen=True))
    spec = PolicySpec(Box((1,)), Discrete(2), "q_values")
    forgetting = register_graph(lake, "forgets", Forgets(), spec)
    # Both are compared on the same.
    found = evaluate_gate(
        lake, recalling, forgetting, EvaluationRequest("log", "recalls", unseen=True)
    )
    assert found.passed, found.reasons
    assert found.candidate.num_episodes == found.champion.num_episodes == 1200
    assert found.candidate.left_out == found.champion.left_out == {reason: 200}


def test_what_it_learned_from_is_not_what_lacks_its_beginning(lake, register_graph):
    """All whole episodes were learned from: they are evaluated, and none of it is supported."""
    late(lake)
    spec = PolicySpec(Box((1,)), Discrete(2), "q_values", state_size=1)
    where = "episode_id LIKE 'e/%'"
    trained = {"datasets": [{"dataset": "log", "version": 1, "where": where}]}
    register_graph(lake, "learned", Recalls(), spec, **trained)
    report = evaluate_policy(lake, EvaluationRequest("log", "learned"))
    assert report.verdict == "not supported"
    assert (report.num_episodes, report.trained_on) == (1200, 1200)


def test_a_log_may_count_its_steps_from_1(lake, recalling):
    lake.dataset("from_1").append(log(lake, 300, name="from_1", first_step=1))
    report = evaluate_policy(lake, EvaluationRequest("from_1", "recalls", unseen=True))
    assert (report.num_episodes, report.left_out) == (300, {})


@pytest.mark.slow
def test_propensities_that_are_fitted_to_single_observations_are_doubted(lake, recalling):
    unknown = "CASE WHEN step = 0 THEN 0.5 END"
    question = EvaluationRequest("log", "recalls", behavior_prob=unknown, unseen=True)
    report = evaluate_policy(lake, question)
    assert report.verdict == "weak"
    assert "who wrote it remembered too" in report.assessment.reason


class Leans(nn.Module):
    """A gaussian that leans by what it saw first, of observations with two parts and of agents."""

    def forward(self, far, near, state):
        first = torch.where(state == 0, near, state)
        return first * 0.5, far * 0 - 0.5, first


def test_gaussians_of_two_agents_with_observations_of_parts(tmp_path, register_graph):
    lake = open_lake(tmp_path / "lake", create=True)
    space = Dict({"far": Box((1,)), "near": Box((1,))})
    spec = PolicySpec(space, Box((1,), low=-9.0, high=9.0), "gaussian", state_size=1)
    register_graph(lake, "leans", Leans(), spec)
    rng = np.random.default_rng(2)
    episodes = []
    for i in range(400):
        num = int(rng.integers(1, 4))
        near = rng.normal(size=(num, 1)).astype(np.float32)
        actions = rng.normal(size=(num, 1)).astype(np.float32)
        # As the policy gives them, so that each weight is 1 and all estimates are the log's mean.
        std = np.exp(-0.5)
        noise = (actions - 0.5 * near[0]) / std
        log_probs = -0.5 * noise**2 - np.log(std) - 0.5 * np.log(2 * np.pi)
        agent = ("left", "right")[i % 2]
        episodes.append(
            Episode(
                f"e/{i // 2}",
                agent_id=agent,
                observations={"far": near * 0, "near": near},
                actions=actions,
                rewards=rng.normal(size=num),
                terminated=True,
                behavior_log_probs=log_probs[:, 0].astype(np.float32),
            )
        )
    lake.dataset("pairs").create(space, Box((1,), low=-9.0, high=9.0))
    lake.dataset("pairs").append(episodes)
    how = Exploration(temperature=1.0)
    report = evaluate_policy(
        lake, EvaluationRequest("pairs", "leans", exploration=how, unseen=True)
    )
    found = {one.estimator: one.value for one in report.estimates.estimates}
    assert set(found) >= {"is", "wis", "pdis", "wpdis"}
    for value in found.values():
        assert value == pytest.approx(report.estimates.log_mean, abs=1e-4)
    assert "the policy remembers" in report.model
