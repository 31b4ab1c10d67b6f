"""Decisions of one client episode_id become episodes and steps."""

from __future__ import annotations

import random
import time

import pytest

from replaylake.datastore.feedback.timeline import Decision, Timeline, cut_episodes, number_steps


def steps(rows, ends=(), named=(), written=None):
    """Return each episode as {decision: step}; rows are (key, request, step) in order of time."""
    written = written or {}
    decisions = [
        Decision(key, time, request, step) for time, (key, request, step) in enumerate(rows)
    ]

    def rank(key):
        return 2 if key in written else int(key in named)

    found = cut_episodes(decisions, lambda key: key in ends, rank)
    return [number_steps(stretch, written) for stretch in found]


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


def slots_of(stretches):
    """Return what each episode is, to compare."""
    return [
        (
            stretch.end,
            [(slot.chosen.key, [d.key for d in slot.decisions]) for slot in stretch.slots],
        )
        for stretch in stretches
    ]


def asked_of(stretches, request_id):
    """Return the decision that the newest step of a request is, by looking at all."""
    for stretch in reversed(stretches):
        for slot in reversed(stretch.slots):
            if any(decision.request_id == request_id for decision in slot.decisions):
                return slot.chosen
    return None


@pytest.mark.parametrize("by_step", [False, True])
def test_ends_that_become_known_late_change_what_they_have_to(by_step):
    """As cut from the beginning, whatever ends where, and ceases to, while decisions come."""
    for seed in range(1500):
        draw = random.Random(seed)
        ends, ranks, taken = set(), {}, []
        timeline = Timeline(by_step, ends.__contains__, ranks.__getitem__)

        def anew(by_step=by_step, ends=ends, ranks=ranks, taken=taken):
            fresh = Timeline(by_step, ends.__contains__, ranks.__getitem__)
            for decision in taken:
                fresh.take(decision)
            return fresh.episodes

        for time_us in range(draw.randint(2, 12)):
            request = draw.choice([None, "a", "b", f"q{time_us}", f"q{time_us}"])
            step = draw.randint(0, 4) if by_step else None
            taken.append(Decision(f"k{time_us}", time_us, request, step))
            ranks[taken[-1].key] = draw.choice([0, 0, 1, 2])
            ends |= {taken[-1].key} if draw.random() < 0.2 else set()
            timeline.take(taken[-1])
            if draw.random() < 0.4:
                changed = draw.choice(taken).key
                ends ^= {changed}
                timeline.recut(changed)
            if draw.random() < 0.5:
                name = draw.choice(["a", "b", f"q{draw.randint(0, time_us)}"])
                assert timeline.find_request(name) == asked_of(anew(), name), seed
            if draw.random() < 0.2:
                assert slots_of(timeline.episodes) == slots_of(anew()), seed
        assert slots_of(timeline.episodes) == slots_of(anew()), seed


@pytest.mark.parametrize("by_step", [False, True])
def test_many_decisions_under_one_id_cost_what_they_are(by_step):
    """Reports by request, all after the last decision, of a client that never changes its id."""
    num = 20_000
    ends = set()
    looks = 0

    def has_ended(key):
        nonlocal looks
        looks += 1
        return key in ends

    timeline = Timeline(by_step, has_ended, lambda key: 0)
    for i in range(num):
        timeline.take(Decision(f"k{i}", i, f"q{i}", i % 20 if by_step else None))
    began = time.thread_time()
    for i in range(num):
        found = timeline.find_request(f"q{i}")
        assert found is not None
        if i % 20 == 19:
            ends.add(found.key)
            timeline.recut(found.key)
    assert len(timeline.episodes) == num // 20
    assert looks < 5 * num
    # It was a minute where each look went through all of them.
    assert time.thread_time() - began < 5.0
