"""Where the probabilities of logged actions are from, and what a report says of them."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.evaluation.ope.evaluate_policy import evaluate_policy
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest

CHEAP = ("ips", "snips")


class Constant(nn.Module):
    def forward(self, observations):
        return (observations * 0 + 0.5,)


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


@pytest.mark.parametrize(
    ("num_known", "source"),
    [(0, "unknown"), (3, "logged in 75.0% of the steps"), (4, "logged")],
)
def test_propensities_are_logged_only_where_they_are(lake, register_graph, num_known, source):
    """A deterministic policy has no weights, so what the log lacks is not fitted either."""
    space = Box((1,), low=-1.0, high=1.0)
    lake.dataset("line").create(Box((1,)), space)
    lake.dataset("line").append(
        Episode(
            f"e/{i}",
            observations=np.zeros((1, 1), np.float32),
            actions=np.full((1, 1), 0.1, np.float32),
            rewards=np.zeros(1),
            terminated=True,
            behavior_log_probs=np.zeros(1, np.float32) if i < num_known else None,
        )
        for i in range(4)
    )
    register_graph(lake, "mode", Constant(), PolicySpec(Box((1,)), space, "deterministic"))
    report = evaluate_policy(lake, EvaluationRequest("line", "mode", estimators=CHEAP))
    assert report.propensities["source"] == source
    assert ("why" in report.propensities) == (num_known < 4)


def test_masks_hold_for_the_policy_unless_they_are_ignored(lake):
    """Two of four actions are allowed, and each is logged half of the time."""
    lake.dataset("log").create(Discrete(1), Discrete(4), mask_size=4)
    lake.dataset("log").append(
        Episode(
            f"e/{i:03d}",
            observations=np.zeros(1, np.int64),
            actions=np.array([i % 2]),
            rewards=np.array([float(i % 2)]),
            terminated=True,
            action_masks=np.array([[True, True, False, False]]),
            behavior_log_probs=np.log([0.5]).astype(np.float32),
        )
        for i in range(200)
    )
    question = EvaluationRequest("log", "random", estimators=CHEAP)
    report = evaluate_policy(lake, question)
    assert report.verdict == "supported"
    assert report.weights == pytest.approx(np.ones(200))
    assert [note for note in report.notes if "`ignore_masks`" in note]
    report = evaluate_policy(lake, replace(question, ignore_masks=True))
    assert report.weights == pytest.approx(np.full(200, 0.5))
    assert report.verdict == "not supported"
    assert (
        "50.0% of the policy's probability is on actions that the log" in report.assessment.reason
    )
    assert [note for note in report.notes if note.startswith("the log's action masks are ignored")]


def test_masks_that_forbid_nothing_are_not_noted(lake):
    lake.dataset("log").create(Discrete(1), Discrete(2), mask_size=2)
    lake.dataset("log").append(
        Episode(
            f"e/{i}",
            observations=np.zeros(1, np.int64),
            actions=np.array([i % 2]),
            rewards=np.zeros(1),
            terminated=True,
            action_masks=np.array([[True, True]]),
            behavior_log_probs=np.log([0.5]).astype(np.float32),
        )
        for i in range(4)
    )
    report = evaluate_policy(lake, EvaluationRequest("log", "random", estimators=CHEAP))
    assert [note for note in report.notes if "mask" in note] == []
