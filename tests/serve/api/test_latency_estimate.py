"""Pace: short work stays on the event loop, long work leaves it."""

import asyncio
import threading
import time

import pytest

from replaylake.serve.api.latency_estimate import LatencyEstimate


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return threading.get_ident()


def ran_on_loop(pace, num_bytes, seconds):
    async def run():
        return await pace.run(num_bytes, lambda: spin(seconds))

    return asyncio.run(run()) == threading.get_ident()


def test_short_work_stays():
    assert ran_on_loop(LatencyEstimate(), 100, 0.0001)
    pace = LatencyEstimate()
    # Told, not measured: what else runs on the machine would make some of them late.
    for _ in range(5):
        pace.learn(100, 0.0001)
    assert ran_on_loop(pace, 100, 0.0001)


def test_long_work_leaves_once_it_is_known():
    pace = LatencyEstimate()
    assert ran_on_loop(pace, 100, 0.03)
    assert not ran_on_loop(pace, 100, 0.03)
    # What is larger takes no less.
    assert not ran_on_loop(pace, 1000, 0.03)


def test_a_large_body_leaves_before_any_was_seen():
    assert not ran_on_loop(LatencyEstimate(), 1 << 20, 0.0)


def test_work_that_became_short_comes_back():
    pace = LatencyEstimate()
    ran_on_loop(pace, 100, 0.03)
    assert any(ran_on_loop(pace, 100, 0.0001) for _ in range(20))


def test_one_late_request_changes_nothing():
    pace = LatencyEstimate()
    # Told, not measured: what else runs on the machine would make several of them late.
    for seconds in (0.0005, 0.0005, 0.0005, 0.2):
        pace.learn(100, seconds)
    assert ran_on_loop(pace, 100, 0.0005)


@pytest.mark.parametrize("num_bytes", [100, 1 << 20])
def test_errors_come_through(num_bytes):
    def fail():
        raise ValueError("so")

    with pytest.raises(ValueError, match="so"):
        asyncio.run(LatencyEstimate().run(num_bytes, fail))


def test_the_loop_turns_while_long_work_is_done():
    pace, is_enough = LatencyEstimate(), threading.Event()

    async def run():
        task = asyncio.create_task(pace.run(1 << 22, lambda: is_enough.wait(60)))
        for _ in range(6):
            await asyncio.sleep(0.005)
        assert not task.done()
        is_enough.set()
        return await task

    assert asyncio.run(run())
