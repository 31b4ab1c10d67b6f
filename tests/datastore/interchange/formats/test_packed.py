from __future__ import annotations

import base64
import pickle
import pickletools
from contextlib import suppress
from pathlib import Path
from typing import Any

import lz4.frame
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.packed import packed as packed_pickle
from replaylake.datastore.interchange.formats.packed.packed import (
    Unpacker,
    UnreadPart,
    decode_message,
    is_packed,
)


def _pack(value: Any, protocol: int = 5) -> str:
    return _frame(pickle.dumps(value, protocol))


def _frame(data: bytes) -> str:
    return base64.b64encode(lz4.frame.compress(data)).decode()


def _unpack(text: str) -> Any:
    return Unpacker()(text, "log.json row 3")


_FRAMES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "array",
    [
        _FRAMES,
        _FRAMES[:, ::2],
        np.asfortranarray(_FRAMES),
        _FRAMES[:0],
        np.array(3.5),
        np.arange(3, dtype=">i4"),
        _FRAMES > 2,
        np.arange(5, dtype=np.uint8),
    ],
)
def test_arrays_come_out_as_they_went_in(array: Any, protocol: int) -> None:
    assert is_packed(_pack(array, protocol))
    found = _unpack(_pack(array, protocol))
    np.testing.assert_array_equal(found, array)
    assert found.shape == array.shape
    assert found.dtype == array.dtype.newbyteorder("=")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        hypothesis_numpy.arrays(
            st.sampled_from([np.float32, np.float64, np.int64, np.bool_, np.uint8]),
            hypothesis_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        ),
        max_size=6,
    )
)
def test_one_unpacker_reads_arrays_of_any_kind_after_one_another(arrays: list[Any]) -> None:
    unpack = Unpacker()
    for array in [*arrays, *arrays]:
        found = unpack(_pack(array), "here")
        np.testing.assert_array_equal(found, array)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)


@pytest.mark.parametrize("protocol", [4, 5])
def test_only_equal_bytes_around_the_numbers_make_the_next_one_fast(
    protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack = Unpacker()
    whole = pickle.dumps(np.arange(4), protocol)
    assert unpack(_frame(whole), "here").tolist() == [0, 1, 2, 3]
    with monkeypatch.context() as patch:
        patch.setattr(packed_pickle, "PickleVM", None)
        assert unpack(_pack(np.arange(4) + 5, protocol), "here").tolist() == [5, 6, 7, 8]
    floats = _frame(whole.replace(b"i8", b"f8"))
    assert unpack(floats, "here").dtype == np.float64
    for before, after in ((b"numpy", b"bumpy"), (b"i8", b"O8")):
        unpack(_frame(whole), "here")
        with pytest.raises(SourceInvalidError):
            unpack(_frame(whole.replace(before, after)), "here")


def test_dicts_and_tuples_of_arrays_become_mappings() -> None:
    found = _unpack(_pack({"a": _FRAMES, "b": (np.arange(2), np.arange(3))}))
    np.testing.assert_array_equal(found["a"], _FRAMES)
    assert found["b"]["_0"].tolist() == [0, 1]
    assert found["b"]["_1"].tolist() == [0, 1, 2]


def test_lists_of_what_is_alike_are_arrays_of_one_an_entry() -> None:
    np.testing.assert_array_equal(_unpack(_pack([_FRAMES, _FRAMES + 1])), [_FRAMES, _FRAMES + 1])
    assert _unpack(_pack([1.5, 2.0])).tolist() == [1.5, 2]
    found = _unpack(_pack([{"a": np.arange(2)}, {"a": np.arange(2) + 5}]))
    assert found["a"].tolist() == [[0, 1], [5, 6]]
    assert [*_unpack(_pack([np.arange(2), np.arange(3)]))] == ["_0", "_1"]


class _Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _named_call(module: str, name: str, argument: str) -> bytes:
    """Return the pickle of a call of a function that need not be there."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


def _planted(witness: Path) -> dict[str, bytes]:
    import os

    command, code = f"touch {witness}", f"open({str(witness)!r}, 'w')"
    plain = pickle.dumps(np.arange(3))
    return {
        "os.system": pickle.dumps(_Calls(os.system, command)),
        "os.system, protocol 0": pickle.dumps(_Calls(os.system, command), 0),
        "builtins.eval": pickle.dumps(_Calls(eval, code)),
        "open": pickle.dumps(_Calls(open, str(witness), "w")),
        "inside a dict": pickle.dumps({"obs": np.arange(3), "x": _Calls(os.system, command)}),
        "inside an object array": pickle.dumps(np.array([_Calls(os.system, command)], object)),
        "subprocess": _named_call("subprocess", "getoutput", command),
        "numpy.testing": _named_call("numpy.testing._private.utils", "runstring", code),
        "numpy.load": _named_call("numpy", "load", str(witness)),
        "numpy.fromfile": _named_call("numpy", "fromfile", str(witness)),
        "numpy.core.multiarray.fromfile": _named_call("numpy.core.multiarray", "fromfile", "x"),
        "a name with dots": _named_call("numpy", "dtype.__class__", code),
        "before an array": pickle.dumps(_Calls(os.system, command))[:-1] + b"0" + plain,
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
        "instance": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "an object": b"(cos\nsystem\nV" + command.encode() + b"\no.",
        "newobj": pickle.dumps(Path(witness)),
    }


@pytest.mark.parametrize("name", list(_planted(Path("x"))))
def test_what_a_pickle_would_run_is_refused_and_nothing_runs(name: str, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    payload = _planted(witness)[name]
    with pytest.raises(
        SourceInvalidError, match=r"^log\.json row 3: found .*expected a packed numpy"
    ):
        _unpack(_frame(payload))
    assert not witness.exists()


def test_the_planted_pickles_do_run_where_pickle_reads_them(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    pickle.loads(_planted(witness)["os.system"])
    assert witness.exists()


def test_a_refusal_names_what_was_named() -> None:
    with pytest.raises(
        SourceInvalidError, match=r"names posix\.system \(none of it was executed\)"
    ):
        _unpack(_frame(_named_call("posix", "system", "true")))


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (pickle.dumps(np.array([None, {}], object)), "Python objects"),
        (pickle.dumps(np.zeros(2, [("a", "f4")])), "structures"),
        (pickle.dumps(np.array(["a"])), "other types"),
        (pickle.dumps(3), "a pickled int"),
        (pickle.dumps([]), "a pickled dict"),
        (b"", "LZ4|torn"),
        (b"\x80\x09N.", "protocol 9"),
    ],
)
def test_what_is_no_array_of_numbers_is_named(payload: bytes, named: str) -> None:
    with pytest.raises(SourceInvalidError, match=named):
        _unpack(_frame(payload))


@pytest.mark.parametrize(
    "payload",
    [
        # A memo index of 2**31 would be a list of 2**32 places, a length of 2**62 as many bytes.
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x40abc.",
        b"\x80\x05\x8e\x00\x00\x00\x00\x00\x00\x00\x40abc.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        # Lists of lists of lists, each twice what it holds.
        b"\x80\x04]\x94" + b"(h\x00h\x00e" * 40 + b".",
        b"\x80\x04N" + b"\x85" * 200_000 + b".",
        b"\x80\x04]" + b"]" * 100_000 + b"a" * 100_000 + b".",
        b"\x80\x04}N" + b"\x85" * 200_000 + b"Ns.",
    ],
)
def test_pickles_that_ask_for_much_get_nothing(payload: bytes) -> None:
    with pytest.raises(SourceInvalidError):
        _unpack(_frame(payload))


def test_one_array_many_times_is_refused() -> None:
    array = np.arange(1000)
    assert len(_unpack(_pack({"a": array, "b": array}))) == 2
    with pytest.raises(SourceInvalidError, match=r"4,000,000 bytes of arrays in"):
        _unpack(_pack({f"k{i}": array for i in range(500)}))


def _declaring(num_bytes: int) -> str:
    """Return a frame of 100 zeros that declares another content size, its checksum right."""
    frame = bytearray(lz4.frame.compress(b"\0" * 100))
    frame[6:14] = num_bytes.to_bytes(8, "little")
    for checksum in range(256):
        frame[14] = checksum
        try:
            lz4.frame.get_frame_info(bytes(frame))
        except RuntimeError:
            continue
        return base64.b64encode(bytes(frame)).decode()
    raise AssertionError("no checksum fits")


def test_a_frame_that_declares_more_than_lz4_can_pack_is_refused() -> None:
    with pytest.raises(SourceInvalidError, match=r"unpack to 1,099,511,627,776"):
        _unpack(_declaring(1 << 40))
    with pytest.raises(SourceInvalidError, match="declare 536,870,912"):
        _unpack(_declaring(1 << 29))


def test_flipped_and_torn_bytes_are_refused_or_read(tmp_path: Path) -> None:
    whole = pickle.dumps({"a": _FRAMES, "b": _FRAMES[:, ::2]})
    rng = np.random.default_rng(5)
    for _ in range(1500):
        data = bytearray(whole)
        data[rng.integers(len(data))] = rng.integers(256)
        for text in (_frame(bytes(data)), _frame(bytes(data[: rng.integers(len(data))]))):
            with suppress(SourceInvalidError):
                _unpack(text)
    for cut in range(0, 120, 7):
        with pytest.raises(SourceInvalidError):
            _unpack(_pack(_FRAMES)[:cut])


def test_every_opcode_alone_is_refused_or_read() -> None:
    """No opcode does anything but what arrays need, whatever stands before it."""
    before = [b"", b"(", b"N", b"]", b"}N", b"NN", b"(NN", b"\x8c\x01a\x8c\x01b", b"]N)"]
    for opcode in pickletools.opcodes:
        for stack in before:
            for argument in (b"", b"\0", b"\x01\0\0\0\0\0\0\0a", b"1\n", b"os\nsystem\n"):
                with pytest.raises(SourceInvalidError):
                    _unpack(_frame(b"\x80\x05" + stack + opcode.code.encode("latin-1") + argument))


def _array_message(**changes: Any) -> bytes:
    array = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2], b"data": b"\0" * 8}
    return bytes(msgpack.packb({**array, **{key.encode(): v for key, v in changes.items()}}))


def test_messages_hold_arrays_and_numbers() -> None:
    assert decode_message(_array_message(), "x").tolist() == [0.0, 0.0]
    one = decode_message(_array_message(nd=False, type="<i8", data=b"\7" + b"\0" * 7), "x")
    assert one == 7
    assert decode_message(
        _array_message(type=">i2", data=b"\0\1" * 4, shape=[2, 2]), "x"
    ).tolist() == [
        [1, 1],
        [1, 1],
    ]
    assert decode_message(msgpack.packb({"nd": 3}), "x") == {"nd": 3}


def test_pickled_arrays_in_messages_are_never_opened(tmp_path: Path) -> None:
    import os

    payload = pickle.dumps(_Calls(os.system, f"touch {tmp_path / 'ran'}"))
    for kind in (b"O", "O"):
        found = decode_message(_array_message(kind=kind, type="|O", data=payload), "x")
        assert found == UnreadPart("a pickled array of Python objects")
    assert isinstance(decode_message(_array_message(type="|O", data=payload), "x"), UnreadPart)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        _array_message()[:-1],
        _array_message() + b"\0",
        _array_message(shape=[3]),
        _array_message(shape=[-1]),
        _array_message(shape=2),
        _array_message(data=b"\0" * 7),
        _array_message(data=3),
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\0",
        b"\x81\x91\x01\x01",
        b"\xa1\xff",
    ],
)
def test_torn_messages_are_refused(data: bytes) -> None:
    with pytest.raises(SourceInvalidError, match=r"^log row 2: found .*expected one whole msgpack"):
        decode_message(data, "log row 2")


def test_flipped_messages_are_refused_or_read() -> None:
    whole = _array_message()
    for at in range(len(whole)):
        for value in range(0, 256, 3):
            data = bytearray(whole)
            data[at] = value
            with suppress(SourceInvalidError):
                decode_message(bytes(data), "x")
