"""Spans: they are measured while a recorder is active, and by one at a time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.runs.timings import ThreadTimings, Timings
from replaylake.datastore.storage.spans import record_spans, span
from replaylake.datastore.storage.storage import LocalStorage


def test_a_blob_is_fsynced_and_its_folders(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a/b", b"first")
    threads = ThreadTimings(Timings("process"))
    with record_spans(threads):
        storage.put("a/b", b"second")
    assert threads.merge().totals["process", "fsync"].num_calls == 2  # the file, its folder


def test_one_recorder_at_a_time() -> None:
    first, second = ThreadTimings(Timings("process")), ThreadTimings(Timings("process"))
    with record_spans(first):
        with (
            pytest.raises(ConfigInvalidError, match="expected one at a time"),
            record_spans(second),
        ):
            pass
        with span("hash"):
            time.sleep(0)
    with record_spans(second):
        pass  # the refusal and the end of the first left nothing behind
    assert list(first.merge().totals) == [("process", "hash")]
    assert not second.merge().totals
