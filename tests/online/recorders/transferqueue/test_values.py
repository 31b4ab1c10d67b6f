from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from replaylake.datastore.errors import (
    CommitConflictError,
    EpisodeInvalidError,
    NotFoundError,
    ShardCorruptError,
    StorageError,
    TransientStorageError,
)
from replaylake.online.recorders.transferqueue.attempts import Attempt
from replaylake.online.recorders.transferqueue.plain_values import decode_plain, encode_plain
from replaylake.online.recorders.transferqueue.values import (
    ValueReader,
    ValueWriter,
    parse_location,
)

_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _put(folder: Path, values: list[object], **options: int) -> list[str]:
    writer = ValueWriter(Attempt.begin(folder), sync_every=False, **options)
    locations = writer.put([str(i) for i in range(len(values))], values)
    writer.close()
    return locations


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3, 5)])
def test_a_tensor_comes_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    size = torch.empty(shape, dtype=dtype).numel() * torch.empty(0, dtype=dtype).element_size()
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 2, size, np.uint8))
    value = (raw.view(dtype) if size else torch.empty(0, dtype=dtype)).reshape(shape)
    (location,) = _put(tmp_path, [value])
    (found,) = ValueReader(tmp_path).get(["0"], [location])
    assert (found.dtype, found.shape, _bits(found)) == (value.dtype, value.shape, _bits(value))
    found.zero_()  # its memory is its own


def test_values_of_several_puts_and_files_come_back_in_the_order_of_the_request(
    tmp_path: Path,
) -> None:
    writer = ValueWriter(Attempt.begin(tmp_path), sync_every=True, file_bytes=1_000)
    values = [torch.arange(i, i + 60) for i in range(9)]
    strided = torch.arange(100).reshape(10, 10)[:, 3]
    locations = [writer.put(["k"], [value])[0] for value in values] + writer.put(["k"], [strided])
    writer.close()
    assert len({parse_location(location).file for location in locations}) > 2
    order = [9, 3, 0, 8, 1, 2, 7, 6, 5, 4]
    found = ValueReader(tmp_path).get(["k"] * 10, [locations[i] for i in order])
    for i, tensor in zip(order, found, strict=True):
        assert torch.equal(tensor, [*values, strided][i])


_PLAIN = {
    "text": "a\nb\u2028\ud800",
    "none": None,
    3: [True, 1, 1.5, float("inf")],
    ("a", 1): (1, (2, [3])),
    "!odd": {"!tensor": 1},
    "bytes": b"\x00\xff",
    "sets": [{1, 2}, frozenset({"x"})],
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
}


def test_plain_values_keep_their_types() -> None:
    found = decode_plain(encode_plain(_PLAIN, "v"))
    assert found == _PLAIN
    assert [type(item) for item in found[3]] == [bool, int, float, float]
    arrays = {
        "tensor": torch.ones(2, dtype=torch.bfloat16),
        "array": np.arange(6, dtype=">i2").reshape(2, 3),
        "scalar": np.float32(0.1),
        "objects": np.array(["a", None, (1,)], object),
    }
    back = decode_plain(encode_plain(arrays, "v"))
    assert torch.equal(back["tensor"], arrays["tensor"])
    assert back["array"].dtype == arrays["array"].dtype
    assert np.array_equal(back["array"], arrays["array"])
    assert (type(back["scalar"]), back["scalar"]) == (np.float32, np.float32(0.1))
    assert back["objects"].tolist() == ["a", None, (1,)]


def test_a_type_that_cannot_be_stored_is_named_and_nothing_of_its_put_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        EpisodeInvalidError, match=r"^1\['a'\]\[0\]: pathlib.*Path cannot be stored"
    ):
        _put(tmp_path, [torch.ones(3), {"a": [tmp_path]}])
    with pytest.raises(EpisodeInvalidError, match="sparse"):
        _put(tmp_path, [torch.eye(3).to_sparse()])
    assert not list((tmp_path / "values").iterdir())


def test_every_flipped_bit_of_a_value_is_named(tmp_path: Path) -> None:
    locations = _put(tmp_path, [torch.arange(5), {"a": 1}])
    (path,) = (tmp_path / "values").iterdir()
    whole = path.read_bytes()
    for text, key in zip(locations, ["first", "second"], strict=True):
        place = parse_location(text)
        for byte in range(place.offset, place.offset + place.num_bytes):
            data = bytearray(whole)
            data[byte] ^= 1 << byte % 8
            path.write_bytes(data)
            with pytest.raises(ShardCorruptError, match=f"bytes of {key} at {place.offset}"):
                ValueReader(tmp_path).get([key], [text])
    path.write_bytes(whole[:70])
    with pytest.raises(ShardCorruptError, match="ends at byte 70, expected 2 more for second"):
        ValueReader(tmp_path).get(["second"], [locations[1]])
    path.unlink()
    with pytest.raises(NotFoundError, match="it had first"):
        ValueReader(tmp_path).get(["first"], [locations[0]])


def test_a_writer_of_an_earlier_attempt_is_refused(tmp_path: Path) -> None:
    first = ValueWriter(Attempt.begin(tmp_path), sync_every=False)
    (location,) = first.put(["a"], [torch.arange(3)])
    (path,) = (tmp_path / "values").iterdir()
    second = Attempt.begin(tmp_path)
    size = path.stat().st_size
    with pytest.raises(CommitConflictError, match=r"newest attempt is 2, and .* attempt 1"):
        first.put(["a"], [torch.arange(3)])
    assert path.stat().st_size == size
    assert ValueReader(tmp_path).get(["a"], [location])[0].tolist() == [0, 1, 2]
    writer = ValueWriter(second, sync_every=False)
    writer.put(["a"], [torch.arange(3)])
    first.close()
    writer.close()


def test_a_damaged_number_of_the_attempt_stops_writers_and_is_made_anew(tmp_path: Path) -> None:
    Attempt.begin(tmp_path)
    writer = ValueWriter(Attempt.begin(tmp_path), sync_every=False)
    writer.put(["a"], [torch.arange(3)])
    path = tmp_path / "attempt"
    data = bytearray(path.read_bytes())
    data[19] ^= 1
    path.write_bytes(data)
    with pytest.raises(CommitConflictError, match="cannot be read"):
        writer.put(["a"], [torch.arange(3)])
    writer.close()
    assert Attempt.begin(tmp_path).number == 3  # greater than in the names of files


_HELD = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(lock, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


def test_an_attempt_begins_once_a_write_has_ended_and_not_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Attempt.begin(tmp_path)
    path = tmp_path / "attempt"
    held = [sys.executable, "-c", _HELD, str(path)]
    with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr("replaylake.online.recorders.transferqueue.attempts._LOCK_WAIT_S", 0.05)
            with pytest.raises(StorageError, match="stopped amid a write"):
                Attempt.begin(tmp_path)
        process.kill()
    assert Attempt.begin(tmp_path).number == 2


def test_a_put_that_a_full_disk_refuses_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ValueWriter(Attempt.begin(tmp_path), sync_every=False)
    (kept,) = writer.put(["a"], [torch.arange(3)])
    (path,) = (tmp_path / "values").iterdir()
    size = path.stat().st_size
    write = os.writev

    def write_some(file: int, buffers: list[memoryview]) -> int:
        write(file, [buffers[0][:10]])  # half of it arrives
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", write_some)
        with pytest.raises(TransientStorageError, match=r"No space left .* none is kept"):
            writer.put(["b"], [torch.arange(30)])
    assert path.stat().st_size == size
    (after,) = writer.put(["c"], [torch.arange(4)])
    found = ValueReader(tmp_path).get(["a", "c"], [kept, after])
    assert [value.tolist() for value in found] == [[0, 1, 2], [0, 1, 2, 3]]
    writer.close()


def test_a_file_that_was_removed_while_in_use_takes_no_more_values(tmp_path: Path) -> None:
    writer = ValueWriter(Attempt.begin(tmp_path), sync_every=False)
    writer.put(["a"], [torch.arange(3)])
    next((tmp_path / "values").iterdir()).unlink()
    for _ in range(2):
        with pytest.raises(StorageError, match="was removed while in use"):
            writer.put(["b"], [torch.arange(3)])
    writer.close()


def test_after_a_failed_fsync_nothing_more_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ValueWriter(Attempt.begin(tmp_path), sync_every=True)
    writer.put(["a"], [torch.arange(3)])

    def refuse(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        with pytest.raises(StorageError, match="could not be synced"):
            writer.put(["b"], [torch.arange(3)])
    with pytest.raises(StorageError, match="could not be synced"):
        writer.put(["c"], [torch.arange(3)])
    writer.close()
