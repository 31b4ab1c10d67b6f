"""Decisions of one client episode_id become episodes and steps."""

from __future__ import annotations

import pytest

from replaylake.datastore.sessions.timeline import Decision, numbers_of, stretches_of


def steps(rows, ends=(), named=(), written=None):
    """Return each episode as {decision: step}; rows are (key, request, step) in order of time."""
    written = written or {}
    decisions = [
        Decision(key, time, request, step) for time, (key, request, step) in enumerate(rows)
    ]

    def rank(key):
        return 2 if key in written else int(key in named)

    found = stretches_of(decisions, lambda key: key in ends, rank)
    return [numbers_of(stretch, written) for stretch in found]


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        # By position: an end begins another episode; of a request that was asked again the newest
        # counts, or the one that was named, or all that were.
        ([("a", None, None), ("b", None, None)], {}, [{"a": 0, "b": 1}]),
        ([("a", None, None), ("b", None, None)], {"ends": "a"}, [{"a": 0}, {"b": 0}]),
        ([("a", "q", None), ("b", "q", None), ("c", "r", None)], {}, [{"b": 0, "c": 1}]),
        ([("a", "q", None), ("b", "q", None)], {"named": "a"}, [{"a": 0}]),
        ([("a", "q", None), ("b", "q", None)], {"named": "ab"}, [{"a": 0, "b": 1}]),
        # One that is a step stays it; another of its request finds no room before it.
        ([("a", "q", None), ("b", "q", None)], {"written": {"b": 0}, "named": "a"}, [{"b": 0}]),
        ([("a", None, None), ("b", None, None), ("c", None, None)], {"written": {"a": 0, "c": 2}},
         [{"a": 0, "b": 1, "c": 2}]),
        # By the client's step: in that order whatever the clocks say, with its gaps.
        ([("a", None, 0), ("b", None, 2), ("c", None, 1)], {}, [{"a": 0, "b": 2, "c": 1}]),
        ([("a", None, 0), ("b", None, 3)], {}, [{"a": 0, "b": 3}]),
        ([("a", None, 0), ("b", None, 0), ("c", None, 1)], {}, [{"b": 0, "c": 1}]),
        ([("a", None, 0), ("b", None, 1), ("c", None, 0)], {}, [{"a": 0, "b": 1}, {"c": 0}]),
        # After the end: what was missing before it belongs to it, everything else is new.
        ([("a", None, 0), ("b", None, 2), ("c", None, 1), ("d", None, 0)], {"ends": "b"},
         [{"a": 0, "b": 2, "c": 1}, {"d": 0}]),
        ([("a", None, 0), ("b", None, 1), ("c", None, 2)], {"ends": "b"},
         [{"a": 0, "b": 1}, {"c": 2}]),
        ([("a", None, 0), ("b", None, 1), ("c", None, 1)], {"written": {"b": 1}, "named": "c"},
         [{"a": 0, "b": 1}]),
        # One without a step: then it is the position.
        ([("a", None, 5), ("b", None, None)], {}, [{"a": 0, "b": 1}]),
    ],
)  # fmt: skip
def test_episodes_and_numbers(rows, options, expected):
    assert steps(rows, **options) == expected
