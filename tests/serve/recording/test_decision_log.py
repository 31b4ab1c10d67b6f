"""What is logged has every column of its table: one left out would be null there, unnoticed."""

import json

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decisions import decisions_schema, rewards_schema
from replaylake.serve.api.feedback import FeedbackRequest
from replaylake.serve.recording.decision_log import DecisionBatch, encode_records

SPACE = Box((2,))


def make_batch(**fields):
    given = {
        "ids": ["a", "b"],
        "request_ids": ["r", None],
        "episode_ids": ["e", None],
        "steps": [0, None],
        "observations": [[0.5, 1.0], [2.0, 3.0]],
        "actions": [1, 0],
        "log_probs": [-0.5, None],
        "masks": [[True, False], [True, True]],
        "timestamp": 7,
        "policy": "p",
        "policy_version": 3,
        "deterministic": False,
        "package_sha256": "ab" * 32,
    }
    return DecisionBatch(**given | fields)


def test_a_decision_is_logged_with_every_column():
    columns = decisions_schema(SPACE, Discrete(2)).names
    first, second = (json.loads(record) for record in encode_records(make_batch()))
    assert sorted(first) == sorted(second) == sorted(columns)
    assert None not in first.values()
    assert first["observation"] == [0.5, 1.0]
    assert (first["timestamp"], first["policy_version"]) == (7, 3)
    unmasked = [json.loads(record) for record in encode_records(make_batch(masks=None))]
    assert sorted(unmasked[0]) == sorted(columns)
    assert unmasked[1]["request_id"] is None
    # The table of a Box has no such column, and the encoder passes over it.
    assert set(columns) - set(decisions_schema(SPACE, SPACE).names) == {"action_mask"}


def test_a_report_is_logged_with_every_column_that_it_may_give():
    report = FeedbackRequest(
        place="",
        decision_id="d",
        request_id="r",
        episode_id="e",
        step=0,
        feedback_id="f",
        mode="sum",
        reward=0.0,
        terminated=False,
        truncated=False,
        final_observation=[0.5, 1.0],
    )
    record = report.to_record(7)
    assert sorted(record) == sorted(rewards_schema(SPACE).names)
    assert (record["timestamp"], record["step"], record["mode"]) == (7, 0, "sum")
