"""Heads: the quick way through a discrete head is bit for bit the way through its probabilities."""

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.policies.heads import act_from_head, discrete_probs
from replaylake.datastore.lake.policies.policy import PolicySpec

HOWS = [
    {"deterministic": True},
    {"deterministic": False, "temperature": 0.0},
    {"deterministic": False},
    {"deterministic": False, "temperature": 0.3, "epsilon": 0.2},
    {"deterministic": True, "epsilon": 0.3},
]


def by_definition(probs, rng, is_certain):
    """Return choices and log-probabilities of the probabilities float64 [N, A]."""
    rows = np.arange(len(probs))
    if is_certain:
        choices = probs.argmax(axis=1)
    else:
        total = probs.cumsum(axis=1)
        choices = (total > rng.random((len(probs), 1)) * total[:, -1:]).argmax(axis=1)
    return choices, np.log(probs[rows, choices]).astype(np.float32)


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("num_actions", [1, 2, 7, 8, 9, 17, 300])
def test_actions_and_log_probs_are_those_of_the_probabilities(how, num_actions):
    rng = np.random.default_rng(num_actions)
    for trial in range(40):
        num = 1 + trial % 3
        head, output = [("categorical", "logits"), ("q_values", "q_values")][trial % 2]
        spec = PolicySpec(Box((4,)), Discrete(num_actions, start=5), head)
        scores = rng.standard_normal((num, num_actions)) * 10 ** rng.uniform(-3, 3)
        outputs = {output: scores.astype(np.float32)}
        mask = None
        if trial % 4 == 0:
            mask = rng.random((num, num_actions)) < 0.5
            mask[:, rng.integers(num_actions)] = True
        act = act_from_head(spec, outputs, np.random.default_rng(trial), mask=mask, **how)
        probs = discrete_probs(spec, outputs, mask=mask, **how)
        is_certain = not how.get("epsilon") and (
            how["deterministic"] or how.get("temperature") == 0
        )
        choices, log_probs = by_definition(probs, np.random.default_rng(trial), is_certain)
        assert act.actions.tolist() == (choices + 5).tolist()
        assert act.log_probs.tobytes() == log_probs.tobytes()
        assert (act.actions.dtype, act.log_probs.shape) == (np.int64, (num,))
