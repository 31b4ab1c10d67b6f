"""The head of MultiDiscrete and MultiBinary actions: what it draws, and what it says of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from replaylake.datastore.errors import EpisodeInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.heads import act_from_head
from replaylake.datastore.lake.policies.log_probs import head_action_probs, head_log_probs
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy

OBSERVATION = Box((1,))
# Of the first element 0.25, 0.75, of the second 0.5, 0.25, 0.25.
LOGITS = np.log(np.array([[0.25, 0.75, 0.5, 0.25, 0.25]], np.float32))


def head(space: Space) -> PolicySpec:
    return PolicySpec(OBSERVATION, space, "multi_categorical")


def repeated(num: int) -> dict[str, Any]:
    return {"logits": np.tile(LOGITS, (num, 1))}


def shares(actions: np.ndarray) -> dict[tuple[int, ...], float]:
    values, counts = np.unique(actions, axis=0, return_counts=True)
    return {tuple(value): count / len(actions) for value, count in zip(values, counts, strict=True)}


def test_the_mode_is_each_element_s_likeliest_value() -> None:
    act = act_from_head(head(MultiDiscrete((2, 3))), repeated(2))
    assert act.actions.tolist() == [[1, 0], [1, 0]]
    assert act.actions.dtype == np.int64
    assert act.log_probs is not None
    assert act.log_probs.tolist() == [0, 0]


def test_draws_are_as_likely_as_they_say() -> None:
    spec, num = head(MultiDiscrete((2, 3))), 40_000
    rng = np.random.default_rng(0)
    act = act_from_head(spec, repeated(num), rng, deterministic=False)
    found = shares(act.actions)
    first, second = (0.25, 0.75), (0.5, 0.25, 0.25)
    assert found == pytest.approx(
        {(i, j): p * q for i, p in enumerate(first) for j, q in enumerate(second)}, abs=0.01
    )
    assert act.log_probs is not None
    at = np.flatnonzero((act.actions == [1, 2]).all(axis=1))[0]
    assert act.log_probs[at] == pytest.approx(math.log(0.75 * 0.25), abs=1e-6)


def test_temperature_sharpens_each_element() -> None:
    spec = head(MultiDiscrete((2, 3)))
    actions = [[0, 1], [1, 0]]
    # At 0.5 probabilities are squared: 1/10, 9/10 and 4/6, 1/6, 1/6.
    log_probs = head_log_probs(spec, repeated(2), actions, deterministic=False, temperature=0.5)
    np.testing.assert_allclose(log_probs, np.log([1 / 60, 36 / 60]), rtol=1e-6)


def test_epsilon_replaces_the_whole_action() -> None:
    spec, num = head(MultiDiscrete((2, 3))), 40_000
    act = act_from_head(spec, repeated(num), np.random.default_rng(1), epsilon=0.3)
    found = shares(act.actions)
    # The mode (1, 0), or one of six.
    expected = {(i, j): 0.05 + 0.7 * ((i, j) == (1, 0)) for i in range(2) for j in range(3)}
    assert found == pytest.approx(expected, abs=0.01)
    each = [list(action) for action in expected]
    log_probs = head_log_probs(spec, repeated(6), each, epsilon=0.3)
    np.testing.assert_allclose(np.exp(log_probs), list(expected.values()), rtol=1e-6)
    assert act.log_probs is not None
    np.testing.assert_allclose(
        act.log_probs, head_log_probs(spec, repeated(num), act.actions, epsilon=0.3), rtol=1e-6
    )


@pytest.mark.parametrize("options", [{}, {"deterministic": False}, {"epsilon": 0.2}], ids=str)
def test_binary_actions_are_pairs_of_logits(options: dict[str, Any]) -> None:
    spec = head(MultiBinary(2))
    logits = {"logits": np.array([[0.0, 1.0, 2.0, 0.0]], np.float32)}
    every = np.array([[i, j] for i in (0, 1) for j in (0, 1)])
    parameters = {"logits": np.tile(logits["logits"], (4, 1))}
    with np.errstate(divide="ignore"):
        total = np.exp(head_log_probs(spec, parameters, every, **options)).sum()
    assert total == pytest.approx(1)
    assert act_from_head(spec, logits).actions.tolist() == [[1, 0]]


def test_what_it_never_chooses_is_impossible() -> None:
    spec = head(MultiDiscrete((2, 3)))
    assert head_log_probs(spec, repeated(1), [[0, 0]]).tolist() == [-math.inf]


def test_refusals() -> None:
    spec = head(MultiDiscrete((2, 3)))
    with pytest.raises(SpaceUnsupportedError, match="found an action mask, which only Discrete"):
        act_from_head(spec, repeated(1), mask=np.ones((1, 5), bool))
    with pytest.raises(EpisodeInvalidError, match="temperature: found -1"):
        act_from_head(
            spec, repeated(1), np.random.default_rng(0), deterministic=False, temperature=-1
        )
    with pytest.raises(SpaceUnsupportedError, match="which only Discrete actions have"):
        head_action_probs(spec, repeated(1))
    with pytest.raises(SpaceUnsupportedError, match="expected a MultiDiscrete or MultiBinary"):
        head(Discrete(5))
    with pytest.raises(SpaceUnsupportedError, match="expected a Discrete"):
        PolicySpec(OBSERVATION, MultiDiscrete((2, 3)), "categorical")


@pytest.mark.parametrize("space", [MultiDiscrete((2, 3)), MultiBinary(3)], ids=str)
def test_the_random_policy_draws_every_action_alike(space: MultiDiscrete | MultiBinary) -> None:
    policy, observations = UniformPolicy(OBSERVATION, space), np.zeros((40_000, 1), np.float32)
    act = policy.act(observations, rng=np.random.default_rng(2))
    num = 6 if isinstance(space, MultiDiscrete) else 8
    found = shares(act.actions)
    assert len(found) == num
    assert list(found.values()) == pytest.approx([1 / num] * num, abs=0.01)
    assert act.log_probs is not None
    np.testing.assert_allclose(act.log_probs, -np.log(num), rtol=1e-6)
    log_probs = policy.log_probs(observations, act.actions)
    np.testing.assert_allclose(log_probs, -np.log(num))
