from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from replaylake.datastore.errors import (
    CommitConflictError,
    FormatTooNewError,
    LogCorruptError,
    StorageError,
)
from replaylake.online.recorders.transferqueue import event_log
from replaylake.online.recorders.transferqueue.attempts import Attempt
from replaylake.online.recorders.transferqueue.event_log import EventLog, read_log

_EVENTS = [{"event": "put", "n": 1, "rows": {3: ("a",)}}, {"event": "x"}, {"event": "put", "n": 2}]


def _write(folder: Path) -> Path:
    log = EventLog(Attempt.begin(folder), sync_every=False)
    log.start_part({"counter": 7})
    for event in _EVENTS:
        log.append(event)
    log.close()
    (path,) = (folder / "log").glob("*.events")
    return path


def _read(folder: Path) -> object:
    state, events = read_log(folder)
    return state, list(events)


def test_a_log_comes_back_as_its_newest_state_and_what_happened_after_it(tmp_path: Path) -> None:
    assert _read(tmp_path) == (None, [])
    _write(tmp_path)
    assert _read(tmp_path) == ({"counter": 7}, _EVENTS)
    log = EventLog(Attempt.begin(tmp_path), sync_every=True)
    assert _read(tmp_path) == ({"counter": 7}, _EVENTS)  # an attempt that ended before its state
    log.start_part({"counter": 8})
    assert _read(tmp_path) == ({"counter": 8}, [])
    log.append({"event": "a"}, {"event": "b"})
    log.start_part({"counter": 9})
    log.append({"event": "c"})
    log.close()
    assert _read(tmp_path) == ({"counter": 9}, [{"event": "c"}])
    assert len(list((tmp_path / "log").iterdir())) == 2  # older parts are gone


def test_a_log_cut_anywhere_loses_only_the_events_that_were_cut(tmp_path: Path) -> None:
    path = _write(tmp_path)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        # A record without its newline is whole: all that was acknowledged is there.
        num_whole = sum(end - 1 <= size for end in ends)
        assert _read(tmp_path) == ({"counter": 7}, _EVENTS[:num_whole]), size
    for rest in (bytes(100), bytes(100) + b"d}\n"):  # what a power cut may leave after it
        path.write_bytes(whole + rest)
        assert _read(tmp_path) == ({"counter": 7}, _EVENTS)


def test_a_flipped_bit_is_named_and_never_read(tmp_path: Path) -> None:
    path = _write(tmp_path)
    whole = path.read_bytes()
    for byte in range(len(whole) - 1):
        data = bytearray(whole)
        data[byte] ^= 1 << byte % 8
        path.write_bytes(data)
        with pytest.raises(LogCorruptError, match=r"\.events: line [123] is not what was written"):
            _read(tmp_path)
    path.write_bytes(whole)
    (state,) = (tmp_path / "log").glob("*.state.json")
    body = state.read_bytes()
    for byte in range(len(body)):
        data = bytearray(body)
        data[byte] ^= 1
        state.write_bytes(data)
        try:
            found = _read(tmp_path)
        except LogCorruptError as error:
            found = str(error).startswith(f"{state}: is not what was written")
        assert found in (True, ({"counter": 7}, _EVENTS))


def test_a_log_of_an_earlier_attempt_takes_no_more_events(tmp_path: Path) -> None:
    log = EventLog(Attempt.begin(tmp_path), sync_every=False)
    log.start_part({})
    log.append({"event": "a"})
    Attempt.begin(tmp_path)
    with pytest.raises(CommitConflictError, match="attempt 1"):
        log.append({"event": "b"})
    assert _read(tmp_path) == ({}, [{"event": "a"}])
    log.close()


@pytest.mark.parametrize("failing", [".state.json", ".events"])
def test_a_part_that_cannot_be_begun_leaves_the_log_in_the_part_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    log = EventLog(Attempt.begin(tmp_path), sync_every=False)
    log.start_part({"counter": 7})
    log.append({"event": "a"})
    _refuse_files(monkeypatch, failing)
    for _ in range(2):
        with pytest.raises(StorageError, match="No space left"):
            log.start_part({"counter": 8})
    log.append({"event": "b"})
    assert _read(tmp_path) == ({"counter": 7}, [{"event": "a"}, {"event": "b"}])
    monkeypatch.undo()
    log.start_part({"counter": 9})
    log.append({"event": "c"})
    assert _read(tmp_path) == ({"counter": 9}, [{"event": "c"}])
    assert len(list((tmp_path / "log").iterdir())) == 2
    log.close()


def test_a_log_takes_no_more_events_if_a_state_of_a_part_not_begun_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(Attempt.begin(tmp_path), sync_every=False)
    log.start_part({"counter": 7})
    _refuse_files(monkeypatch, ".events")
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith("-000001.state.json"):
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageError, match="No space left"):
        log.start_part({"counter": 7})
    with pytest.raises(StorageError, match=r"000001\.state\.json could not be removed: Input"):
        log.append({"event": "a"})
    log.close()


def _refuse_files(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Have the disk full for new files of a suffix."""
    replace, open_file = os.replace, os.open

    def refuse_name(source: Path, target: Path) -> None:
        if str(target).endswith(suffix):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    def refuse_new(path: Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(suffix) and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "replace", refuse_name)
    monkeypatch.setattr(os, "open", refuse_new)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "FORMAT", 2)
    _write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(FormatTooNewError, match="has format 2, expected 1"):
        _read(tmp_path)
