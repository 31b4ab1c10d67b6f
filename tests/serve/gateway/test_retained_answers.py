"""Answers to requests with an idempotency key: in memory, and in files for the next gateway."""

import itertools

import pytest

from replaylake.serve.gateway import retained_answers
from replaylake.serve.gateway.retained_answers import RetainedAnswers

KEY = b"k" * 32
WORKERS = (f"{number:016x}" for number in itertools.count(1))
HEADERS = [(b"content-type", b"application/json"), (b"x-id", "\xe9".encode("latin-1"))]


@pytest.fixture
def open_answers(tmp_path):
    opened = []

    def open_one(recorded=()):
        opened.append(RetainedAnswers(tmp_path / "_answers", next(WORKERS), KEY, recorded))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def answer(answers, name, body=b"{}", status=200):
    """Answer a request as the gateway does; return its digest."""
    one = answers.begin(answers.hash_request([name.encode()]))
    one.status, one.headers, one.body = status, HEADERS, body
    answers.write([((name, f"id-{name}"), one)])
    one.parts, one.is_whole = [body], True
    answers.settle(one)
    return one.digest


def files_of(tmp_path, pattern="*.jsonl"):
    return sorted((tmp_path / "_answers").glob(pattern))


def test_the_next_gateway_finds_the_answers_of_recorded_calls_alone(open_answers, tmp_path):
    before = open_answers()
    body = bytes(range(256))
    known = answer(before, "recorded", body)
    unknown = answer(before, "killed before it was recorded")
    before.close()
    for _ in range(2):  # also the one after the next, though the first's files are gone by then
        after = open_answers({("recorded", "id-recorded"), ("recorded", None)})
        assert after.find(unknown) is None
        found = after.find(known)
        assert (found.status, found.headers, found.body) == (200, HEADERS, body)
        assert len(files_of(tmp_path)) == 1
        after.close()


def test_files_of_a_running_gateway_are_left_to_it(open_answers, tmp_path):
    running = open_answers()
    digest = answer(running, "a")
    other = open_answers({("a", "id-a")})
    assert other.find(digest) is None
    assert len(files_of(tmp_path)) == 1


def test_no_file_is_written_without_recorded_calls(open_answers, tmp_path):
    answers = open_answers(None)
    digest = answer(answers, "a")
    assert answers.find(digest).body == b"{}"
    assert files_of(tmp_path, "*") == []


def test_refusals_and_incomplete_answers_are_not_retained(open_answers):
    answers = open_answers()
    assert answers.find(answer(answers, "a", status=503)) is None
    cut = answers.begin(b"cut")
    assert answers.find_in_progress(b"cut") is cut
    cut.status = 200
    answers.settle(cut)
    assert (answers.find(b"cut"), answers.find_in_progress(b"cut")) == (None, None)
    assert cut.done.is_set()


def test_memory_and_files_are_bounded(open_answers, tmp_path, monkeypatch):
    monkeypatch.setattr(retained_answers, "_MAX_BYTES", 8000)
    monkeypatch.setattr(retained_answers, "_FILE_BYTES", 1000)
    answers = open_answers()
    digests = [answer(answers, str(number), b"x" * 400) for number in range(100)]
    assert len(answers) == 20
    assert answers.find(digests[-1]) is not None
    assert answers.find(digests[0]) is None
    assert sum(path.stat().st_size for path in files_of(tmp_path)) < 8000 + 2 * 1000
    answers.close()
    after = open_answers({(str(number), f"id-{number}") for number in range(100)})
    assert after.find(digests[-1]).body == b"x" * 400
    assert len(after) <= 20


def test_old_answers_go(open_answers, tmp_path, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(retained_answers.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(retained_answers.time, "time", lambda: now_s[0])
    answers = open_answers()
    first = answer(answers, "first")
    now_s[0] += 1000
    second = answer(answers, "second")
    assert len(files_of(tmp_path)) == 2
    now_s[0] += 3000  # the first is older than an hour, the second is not
    answers.close()
    after = open_answers({("first", "id-first"), ("second", "id-second")})
    assert (after.find(first), after.find(second) is not None) == (None, True)
    for _ in range(2):
        now_s[0] += 3700
        answer(after, "third")
    assert len(files_of(tmp_path)) == 2


def test_a_damaged_line_costs_its_answer_alone(open_answers, tmp_path, caplog):
    before = open_answers()
    digests = [answer(before, name) for name in "abc"]
    before.close()
    (path,) = files_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data + b"torn")
    after = open_answers({(name, f"id-{name}") for name in "abc"})
    assert [after.find(digest) is not None for digest in digests] == [True, False, True]
    assert "1 answers not read" in caplog.text


def test_an_answer_that_cannot_be_written_is_still_given(open_answers, tmp_path, caplog):
    (tmp_path / "_answers").write_bytes(b"")  # in the place of the folder
    answers = open_answers()
    assert answers.find(answer(answers, "a")).body == b"{}"
    assert "answer not retained for a restart" in caplog.text
