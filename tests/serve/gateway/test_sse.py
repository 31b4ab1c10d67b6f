"""Events of a stream: cut at their blank lines, whatever the packets and the line ends are."""

import time

import pytest

from replaylake.serve.gateway.sse import (
    EventSplitter,
    EventTooLongError,
    data_of,
    parse_data,
    parse_event,
    with_data,
)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_events_are_the_same_however_they_are_cut(end):
    events = [
        b"data: {}" + end,
        b"event: x" + end[: len(end) // 2] + b"data: 2" + end,
        b": c" + end,
    ]
    text = b"".join(events)
    for size in range(1, len(text) + 1):
        splitter = EventSplitter()
        found = []
        for begin in range(0, len(text), size):
            found += splitter.feed(text[begin : begin + size])
        assert b"".join(found) == text
        assert [one.strip() for one in found if one.strip()] == [one.strip() for one in events]
        assert splitter.rest == b""


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_the_time_to_cut_a_stream_is_proportional_to_its_length(end):
    def measure(events, size):
        text = b"".join(events)
        begin, found, splitter = time.thread_time(), [], EventSplitter()
        for place in range(0, len(text), size):
            found += splitter.feed(text[place : place + size])
        assert found == events
        return time.thread_time() - begin

    many = [b"data: " + b"x" * 240 + end] * 4096
    assert measure(many, 1 << 20) < 1.0  # quadratic: more than 10 s
    assert measure([b"data: " + b"x" * (8 << 20) + end], 1000) < 1.0


def test_an_event_without_end_is_refused():
    splitter = EventSplitter()
    for _ in range(64):
        assert splitter.feed(b"x" * (1 << 20)) == []
    with pytest.raises(EventTooLongError, match="more than 67108864 bytes"):
        splitter.feed(b"x")


def test_what_is_not_whole_is_kept():
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n\ndata: 2\n") == [b"data: 1\n\n"]
    assert splitter.rest == b"data: 2\n"


def test_the_data_of_an_event_is_replaced_and_its_other_lines_stay():
    event = b'event: x\ndata: {"a": 1}\nid: 7\n\n'
    assert parse_data(data_of(event)) == {"a": 1}
    assert with_data(event, {"b": 2}) == b'event: x\nid: 7\ndata: {"b":2}\n\n'
    assert with_data(b'data: {"a": 1}\n\n', {"b": 2}) == b'data: {"b":2}\n\n'
    assert data_of(b"data: one\ndata: two\n\n") == b"one\ntwo"
    assert data_of(b": a comment\n\n") == b""
    assert parse_data(b"[DONE]") is None
    assert parse_data(b'{"a"') is None


@pytest.mark.parametrize(
    ("event", "body"),
    [
        (b'data: {"a": 1}\n\n', {"a": 1}),
        (b'data:{"a": 1}\r\n\r\n', {"a": 1}),
        (b'data: {"a":\ndata: 1}\n\n', {"a": 1}),
        (b'data: {"a":\n1}\n\n', None),  # its second line has no name
        (b'event: x\ndata: {"a": 1}\n\n', {"a": 1}),
        (b'data: {"a"\n\n', None),
        (b"data: [1]\n\n", None),
        (b": {}\n\n", None),
    ],
)
def test_an_event_is_read_if_its_data_is_an_object(event, body):
    assert parse_event(event) == body
