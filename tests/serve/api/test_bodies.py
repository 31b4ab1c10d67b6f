"""Bodies made to hurt: refused at once, and nothing they claim is believed."""

import contextlib
import gc
import io
import json
import struct
import time
import tracemalloc
import zipfile

import hypothesis
import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.api.act_request import ActReader
from replaylake.serve.api.bodies import parse_json, parse_msgpack, read_fields
from replaylake.serve.api.values import encode_observations, read_values
from replaylake.serve.messages import Request, RequestRefusedError

SPEC = PolicySpec(Box((4,)), Discrete(2), "categorical")
READER = ActReader(SPEC)


def read(body, kind, query=b""):
    """Do all that /act does before it acts."""
    asked = READER.read(Request("/act", "POST", "/act", query, body, kind), 4096)
    raw = encode_observations(SPEC.encoding, asked.raw, asked.field, asked.is_batch)
    return read_values(SPEC.observation_space, raw, asked.field, asked.is_batch)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npy_of(header, data=b"\0" * 16, version=(1, 0)):
    """Return a file whose header says what it likes."""
    text = header.encode("latin-1") if isinstance(header, str) else header
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + data


def described(descr="'<f4'", fortran="False", shape="(4,)"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


def bomb():
    """Return an archive of 64 MB of zeros in 64 kB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy(np.zeros(8 << 20)))
    return buffer.getvalue()


def pickled():
    """Return an array of objects, as numpy pickles them."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], object), allow_pickle=True)
    return buffer.getvalue()


HOSTILE_NPY = {
    "empty": b"",
    "magic alone": b"\x93NUMPY",
    "no header": b"\x93NUMPY\x01\x00",
    "header beyond the end": b"\x93NUMPY\x01\x00\xff\xff{}",
    "header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
    "version 3": npy_of(described(), version=(3, 0)),
    "version 9": npy_of(described(), version=(9, 9)),
    "shape too large": npy_of(described(shape="(1000000000000,)")),
    "product of 2**64": npy_of(described(shape="(4294967296, 4294967296)")),
    "product that wraps to 16": npy_of(described(shape=f"({2**62 + 1}, 4)")),
    "shape too small": npy_of(described(shape="(2,)")),
    "negative": npy_of(described(shape="(-4,)")),
    "two negatives": npy_of(described(shape="(-2, -2)")),
    "no rows": npy_of(described(shape="(0, 4)"), b""),
    "huge beside nothing": npy_of(described(shape="(0, 99999999999999999999)"), b""),
    "booleans for sizes": npy_of(described(shape="(True, 4)")),
    "200 dims": npy_of(described(shape="(" + "1," * 200 + "4)")),
    "objects": pickled(),
    "object dtype": npy_of(described("'|O'", shape="(2,)")),
    "structured": npy_of(described("[('a', '<f4')]")),
    "strings": npy_of(described("'<U4'", shape="(1,)")),
    "times": npy_of(described("'<M8[s]'", shape="(2,)")),
    "complex": npy_of(described("'<c8'", shape="(2,)")),
    "long double": npy_of(described("'<f16'", shape="(1,)")),
    "void of 2 GB": npy_of(described("'V2147483647'")),
    "code": npy_of("__import__('os').system('true')\n"),
    "deep": npy_of("(" * 900 + "\n"),
    "deep signs": npy_of("-" * 900 + "1\n"),
    "long header": npy_of("{" + " " * 60_000 + "}\n"),
    "not a dict": npy_of("[1, 2]\n"),
    "python 2": npy_of(described(shape="(4L,)").replace("4L", "5L")),
    "no text": npy_of(bytes(range(128, 256))),
    "nan": npy(np.array([np.nan, 0, 0, 0], np.float32)),
    "infinity": npy(np.array([np.inf, 0, 0, 0])),
    "beyond float32": npy(np.array([1e39, 0, 0, 0])),
    "bools": npy(np.zeros(4, bool)),
    "three dims": npy(np.zeros((1, 1, 4))),
    "five numbers": npy(np.zeros(5)),
    "a number": npy(np.float32(3)),
    "npz": bomb(),
    "gzip": b"\x1f\x8b\x08\x00" + b"\0" * 100,
}

LIST32, MAP32, BIN32, STR32 = b"\xdd", b"\xdf", b"\xc6", b"\xdb"
FOUR_GB = b"\xff\xff\xff\xff"
AN_ARRAY = {"dtype": "<f4", "shape": [4], "data": b"\0" * 16}


def observation(**changed):
    return msgpack.packb({"observation": {**AN_ARRAY, **changed}})


HOSTILE_MSGPACK = {
    "empty": b"",
    "a number": b"\x01",
    "never used byte": b"\xc1",
    "list of 4 G": LIST32 + FOUR_GB,
    "map of 4 G": MAP32 + FOUR_GB,
    "bytes of 4 G": BIN32 + FOUR_GB,
    "text of 4 G": STR32 + FOUR_GB,
    "lists of 64 k, 1,000 deep": (LIST32 + b"\x00\x01\x00\x00") * 1000 + b"\0" * 70_000,
    "lists of 8 M, 1,000 deep": (LIST32 + b"\x00\x7f\xff\xff") * 1000 + b"\0" * (8 << 20),
    "maps, 1,000 deep": (MAP32 + b"\x00\x00\x40\x00\xa1a") * 1000 + b"\0" * 40_000,
    "deep": b"\x91" * 100_000,
    "two values": msgpack.packb({}) * 2,
    "number for a key": msgpack.packb({1: 2}),
    "bytes for a key": msgpack.packb({b"observation": [0, 0, 0, 0]}),
    "extension": msgpack.packb({"observation": msgpack.ExtType(5, b"x")}),
    "time": msgpack.packb({"observation": msgpack.Timestamp(1, 2)}),
    "wrong unicode": b"\x81\xabobservation\xa1\xff",
    "bytes": msgpack.packb({"observation": b"0000"}),
    "nan": msgpack.packb({"observation": [float("nan"), 0, 0, 0]}),
    "infinity": msgpack.packb({"observation": [0, 0, 0, float("-inf")]}),
    "huge": msgpack.packb({"observation": [2**64 - 1, 1e300, 0, 0]}),
    "booleans": msgpack.packb({"observation": [True, 0, 0, 0]}),
    "nan temperature": msgpack.packb({"observation": [0] * 4, "temperature": float("nan")}),
    "bytes for a name": msgpack.packb({"observation": [0] * 4, "episode_id": b"e"}),
    "dtype object": observation(dtype="O"),
    "dtype pickle": observation(dtype="|O"),
    "dtype number": observation(dtype=5),
    "dtype list": observation(dtype=[["a", "<f4"]]),
    "shape lies": observation(shape=[5]),
    "shape too large": observation(shape=[2**40, 2**40]),
    "shape negative": observation(shape=[-1]),
    "shape text": observation(shape="4"),
    "shape of floats": observation(shape=[4.0]),
    "shape of arrays": observation(shape=[AN_ARRAY]),
    "data text": observation(data="0" * 16),
    "data cut": observation(data=b"\0" * 15),
    "bool of 2": observation(dtype="bool", data=b"\2" * 4),
    "arrays in rows of two shapes": msgpack.packb(
        {"observations": [AN_ARRAY, {**AN_ARRAY, "shape": [2, 2]}]}
    ),
    "mask as an array of numbers": msgpack.packb(
        {"observation": [0] * 4, "action_mask": {**AN_ARRAY, "shape": [4]}}
    ),
}

HOSTILE_JSON = {
    "deep": b'{"observation":' + b"[" * 100_000,
    "deep and closed": b'{"observation":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "huge integer": b'{"observation":[' + b"9" * 100_000 + b",0,0,0]}",
    "huge exponent": b'{"observation":[1e999999999,0,0,0]}',
    "nan": b'{"observation":[NaN,0,0,0]}',
    "a million rows": b'{"observations":[' + b"[]," * 1_000_000 + b"[]]}",
    "a million numbers": b'{"observation":[' + b"0," * 1_000_000 + b"0]}",
    "utf-16": '{"observation":[0,0,0,0]}'.encode("utf-16"),
    "utf-7": b'{"observation":"+AGE-"}',
    "null byte": b'{"observation":[0,0,0,0]}\x00',
    "a million fields": b"{" + b",".join(b'"%d":0' % i for i in range(300_000)) + b"}",
}
KINDS = {"x-npy": HOSTILE_NPY, "msgpack": HOSTILE_MSGPACK, "json": HOSTILE_JSON}
CASES = [(kind, name) for kind, bodies in KINDS.items() for name in bodies]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{k} {n}" for k, n in CASES])
def test_a_hostile_body_is_refused_at_once(kind, name):
    body = KINDS[kind][name]
    gc.freeze()  # a server has not the objects of all these tests to look through
    began = time.thread_time()  # other processes may have the machine
    with pytest.raises(RequestRefusedError):
        read(body, f"application/{kind}")
    seconds = time.thread_time() - began
    gc.unfreeze()
    tracemalloc.start()
    try:
        with pytest.raises(RequestRefusedError) as caught:
            read(body, f"application/{kind}")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.status in (413, 422)
    assert len(caught.value.message) < 600
    assert seconds < 1.0, seconds
    # Lists that claim to be long nest as deep as the parser lets them; nothing touches their room.
    assert peak < 64 * len(body) + (640 << 20 if "lists" in name else 8 << 20), peak


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(st.binary(max_size=300), st.sampled_from(["json", "msgpack", "x-npy"]))
def test_no_bytes_are_beyond_us(body, kind):
    with pytest.raises(RequestRefusedError):
        read(body, f"application/{kind}")


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(st.data())
def test_no_damage_is_beyond_us(data):
    kind, body = data.draw(
        st.sampled_from(
            [
                ("x-npy", npy(np.zeros(4, np.float32))),
                ("msgpack", observation()),
                ("msgpack", msgpack.packb({"observation": [0.5] * 4, "seed": 3})),
            ]
        )
    )
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        values = read(bytes(damaged), f"application/{kind}")
    except RequestRefusedError as refused:
        values, status = None, refused.status
    if values is None:
        assert status in (413, 422)
    else:
        assert values.dtype == np.float32
        assert np.isfinite(values).all()


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(
    max_size=8) | st.text(max_size=4)  # fmt: skip
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["dtype", "shape", "data", "x"]), inner),
    max_leaves=12,
)  # fmt: skip
FIELDS = st.sampled_from(
    ["observation", "observations", "deterministic", "temperature", "epsilon", "seed", "q_values",
     "episode_id", "episode_ids", "request_id", "step", "steps", "state", "states", "action_mask",
     "action_masks"]
)  # fmt: skip


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=500)
@hypothesis.given(st.dictionaries(FIELDS, ANYTHING, max_size=4), st.booleans())
def test_no_fields_are_beyond_us(fields, is_observed):
    if is_observed:
        fields = {**fields, "observation": [0.0, 1.0, 2.0, 3.0]}
        fields.pop("observations", None)
    with contextlib.suppress(RequestRefusedError):  # any other error is the test's failure
        read(msgpack.packb(fields), "application/msgpack")


def test_arrays_in_msgpack_are_made_anywhere():
    body = {"a": [AN_ARRAY], "b": {"c": AN_ARRAY}, "data": {"dtype": "x", "shape": 1, "data": 2}}
    found = parse_msgpack(msgpack.packb(body))
    assert found["a"][0].tolist() == [0.0] * 4
    assert found["b"]["c"].dtype == np.float32
    assert found["data"] == body["data"]


@pytest.mark.parametrize("body", [b"\x81\xc4\x01a\x01", b"\x81\xabobservation\x81\xc4\x01a\x01"])
def test_keys_of_msgpack_are_texts(body):
    with pytest.raises(RequestRefusedError) as caught:
        parse_msgpack(body)
    assert (caught.value.status, caught.value.field) == (422, "body")
    assert caught.value.message == "found 1 bytes, expected strings as the keys of a map"


def test_of_a_key_that_is_there_twice_the_last_counts():
    assert parse_msgpack(b"\x82\xa1a\x01\xa1a\x02") == {"a": 2}


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1, "a": 2}',
        b'{"b": [{"a": 1, "a": 2}]}',
        b'{"b": [[], [{"c": {"a": 1, "\\u0061": 2}}]]}',
        b'{"b": [1, {"a": {"a": 1}, "a": 2}]}',
        b'{"time": "12:00", "a": [1, {"b": 1}], "a": 1.5}',
    ],
)
def test_a_key_of_json_that_is_there_twice_is_refused(body):
    with pytest.raises(
        RequestRefusedError, match=r"^a: field is given twice; send it once"
    ) as found:
        parse_json(body)
    assert found.value.status == 422


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    st.recursive(
        st.none() | st.integers(-(2**53), 2**53) | st.text(":a{", max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(":ab", max_size=2), inner)
        ),
        max_leaves=8,
    )
)
def test_keys_of_json_that_are_there_once_are_taken(value):
    assert parse_json(json.dumps({"x": value}).encode()) == {"x": value}


def test_a_route_that_takes_no_array_says_so():
    request = Request("/feedback", "POST", "/feedback", b"", npy(np.zeros(4)), "application/x-npy")
    with pytest.raises(RequestRefusedError) as caught:
        read_fields(request)
    assert caught.value.status == 415
    assert "npy" not in caught.value.expected
