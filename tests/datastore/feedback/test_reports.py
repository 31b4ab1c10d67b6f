"""Several reports of one decision come to one outcome, whatever the order they arrive in."""

from __future__ import annotations

import itertools

import pytest

from replaylake.datastore.feedback.reports import FeedbackReport, fold_reports

A = FeedbackReport(10, 0, 1.0, False, False)
B = FeedbackReport(20, 1, 5.0, True, False)
PLUS = FeedbackReport(30, 2, 0.5, False, False, True, "click")
END = FeedbackReport(40, 3, 0.0, False, True, True, "end")


@pytest.mark.parametrize(
    ("reports", "outcome", "timestamp", "reported"),
    [
        ([A], (1.0, False, False), 10, None),
        ([A, B], (5.0, True, False), 20, None),
        ([A, PLUS], (1.5, False, False), 30, "1.5"),
        ([A, PLUS, END], (1.5, False, True), 40, "1.5 truncated"),
        ([PLUS], (0.5, False, False), 30, "0.5"),
        ([B, PLUS, END], (5.5, True, True), 40, "5.5 terminated truncated"),
        # What replaces, replaces sums too.
        ([PLUS, END, A._replace(timestamp=50, row=4)], (1.0, False, False), 50, None),
        # A repeat says nothing new, with a name of its own or without.
        ([A, A._replace(timestamp=15, row=9)], (1.0, False, False), 10, None),
        ([A, PLUS, PLUS._replace(timestamp=60, row=9)], (1.5, False, False), 30, "1.5"),
        # Of two contents under one name the first counts.
        ([PLUS, PLUS._replace(timestamp=31, row=9, reward=9.0)], (0.5, False, False), 30, "0.5"),
        # A named one that is sent again does not undo what came after it.
        (
            [A._replace(feedback_id="a"), B, A._replace(feedback_id="a", timestamp=90, row=9)],
            (5.0, True, False),
            20,
            None,
        ),
        # Of one microsecond, what was written down later counts.
        ([A, A._replace(row=1, reward=2.0)], (2.0, False, False), 10, None),
    ],
)
def test_what_they_come_to(reports, outcome, timestamp, reported):
    for order in itertools.permutations(reports):
        found = fold_reports(order)
        assert (found.outcome, found.timestamp, found.reported) == (outcome, timestamp, reported)
        assert found.first == min(report.timestamp for report in reports)


def test_the_last_final_observation_that_was_given_stays():
    given = A._replace(final_row=7)
    assert fold_reports([given, B]).final_row == 7
    assert fold_reports([given, B._replace(final_row=8), PLUS]).final_row == 8
