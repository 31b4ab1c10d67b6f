"""Link times of a worker: a measured request stands for 16, and the loop idles when not busy."""

from __future__ import annotations

import time

import pytest

from replaylake.serve.monitoring.link_times import (
    IDLE,
    PARSE,
    RECEIVE,
    SEND,
    SERVER_LINKS,
    WALL,
    WIDTH,
    LinkTimes,
    is_measured,
    to_timings,
)


def start() -> tuple[LinkTimes, memoryview]:
    values = memoryview(bytearray(8 * WIDTH)).cast("d")
    links = LinkTimes()
    links.start(values, 0)
    return links, values


def test_a_measured_request_stands_for_16() -> None:
    links, values = start()
    links.add(SEND, 0.5, 100)
    assert values[SEND : SEND + 3].tolist() == [8.0, 16.0, 1600.0]
    # parse, inference, journal and respond of a request with two observations.
    links.add_act([1.0, 2.0, 4.0, 8.0, 16.0], 2, (10, 20, 30))
    assert values[PARSE : PARSE + 12].tolist() == [
        *(16.0, 32.0, 160.0),
        *(32.0, 32.0, 0.0),
        *(64.0, 32.0, 320.0),
        *(128.0, 32.0, 480.0),
    ]
    # Requests of a batch were parsed one by one.
    links.add_act([1.0, 1.0, 2.0, 3.0, 4.0], 2)
    assert values[PARSE] == 16.0


def test_acting_is_added_to_four_links_in_a_row() -> None:
    names = [link for _, link in SERVER_LINKS]
    for first in (PARSE // 3, 8):
        assert names[first : first + 4] == ["parse", "inference", "journal", "respond"]
    assert {place for place, _ in SERVER_LINKS[8:]} == {"background"}


def test_what_is_not_busy_is_idle() -> None:
    links, values = start()
    time.sleep(0.05)
    links.refresh((0.25, 3, 64))
    assert values[RECEIVE : RECEIVE + 3].tolist() == [0.25, 3.0, 64.0]
    # It slept, and may have waited for a processor before and after.
    assert 0.0 < values[IDLE] <= values[WALL]
    assert values[WALL] >= 0.05


def test_before_the_start_nothing_is_kept() -> None:
    links = LinkTimes()
    links.add(SEND, 1.0)
    links.refresh((1.0, 1, 1))
    values = memoryview(bytearray(8 * WIDTH)).cast("d")
    links.start(values, 0)
    assert not any(values)
    links.add(SEND, 1.0)
    assert values[SEND] == 16.0


def test_idle_seconds_never_decrease(monkeypatch: pytest.MonkeyPatch) -> None:
    links, values = start()
    busy = iter([0.0, 1e9, 0.0])
    monkeypatch.setattr(links, "_read_busy_s", lambda: next(busy))
    found = []
    for _ in range(3):
        time.sleep(0.01)
        links.refresh((0.0, 0, 0))
        found.append(values[IDLE])
    assert 0 < found[0] == found[1] < found[2]


def test_one_request_in_16_is_measured() -> None:
    # The chance of fewer than 400 or more than 900 of 10,000 is below 1e-20.
    assert 400 < sum(is_measured() for _ in range(10_000)) < 900


def test_totals_become_timings() -> None:
    found = to_timings({("process", "send"): (2.0, 16.0, 64.0), ("process", "idle"): (0, 0, 0)})
    assert list(found.totals) == [("process", "send")]
    total = found.totals["process", "send"]
    assert (total.seconds, total.items, total.num_bytes) == (pytest.approx(2.0), 16, 64)
