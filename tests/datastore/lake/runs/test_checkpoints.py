import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from replaylake.datastore.errors import (
    FormatTooNewError,
    NotFoundError,
    PackageInvalidError,
    StorageError,
)
from replaylake.datastore.lake.runs.checkpoints import Checkpoints, find_damaged_checkpoints
from replaylake.datastore.storage.locations import open_storage
from replaylake.datastore.storage.storage import LocalStorage

FOLDER = "_lake/runs/r1/checkpoints"
# As numpy's PCG64 has them: beyond 64 bits.
STATE = {"rng": {"state": 2**127 + 1, "inc": 3}, "sums": [0.1, 1e300], "none": None, "on": True}


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "state.a": rng.standard_normal((3, 2)).astype(np.float32),
        "structure": np.frombuffer(b"{}", np.uint8),
        "empty": np.zeros((0, 4)),
        "scalar": np.array(7, np.int64),
        "strided": np.arange(10.0)[::2],
        "flags": np.array([True, False]),
    }


@pytest.fixture(params=["folder", "s3"])
def storage(request, tmp_path):
    if request.param == "folder":
        return LocalStorage(tmp_path)
    return open_storage(f"s3://{request.getfixturevalue('bucket')}/lake")


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(LocalStorage(tmp_path), "r1")


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / FOLDER).iterdir())


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_what_is_saved_comes_back_to_the_bit(storage):
    checkpoints = Checkpoints(storage, "r1")
    with pytest.raises(NotFoundError, match="run r1"):
        checkpoints.load()
    checkpoints.save(5, arrays(1), STATE)
    checkpoints.save(10, arrays(2), {**STATE, "sampler": {"leaves": np.arange(3), "alpha": 0.6}})
    assert checkpoints.updates() == [5, 10]
    newest = checkpoints.load()
    assert newest.update == 10
    equal(newest.arrays, arrays(2))
    np.testing.assert_array_equal(newest.state["sampler"].pop("leaves"), np.arange(3))
    assert newest.state == {**STATE, "sampler": {"alpha": 0.6}}
    equal(checkpoints.load(5).arrays, arrays(1))
    checkpoints.remove()
    assert (checkpoints.updates(), storage.names(FOLDER)) == ([], [])


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.one_of(
            st.floats(allow_nan=False),
            st.integers(-(2**200), 2**200),
            arrays_of.arrays(np.float64, st.integers(0, 5), elements=st.floats(-1, 1)),
        ),
        max_size=4,
    )
)
def test_any_state_comes_back(tmp_path_factory, state):
    checkpoints = Checkpoints(LocalStorage(tmp_path_factory.mktemp("lake")), "r1")
    checkpoints.save(1, {}, {"tree": [state]})
    (found,) = checkpoints.load().state["tree"]
    assert found.keys() == state.keys()
    for key, value in state.items():
        assert np.array_equal(found[key], value)


def test_saved_again_it_is_replaced(tmp_path, checkpoints):
    checkpoints.save(5, arrays(1), {"n": 1})
    checkpoints.save(5, arrays(2), {"n": 2})
    checkpoints.retain([5])
    assert checkpoints.load().state == {"n": 2}
    assert len(names(tmp_path)) == 2


def test_keeping_some_removes_the_others_and_what_a_crash_left(tmp_path, checkpoints):
    for update in (1, 2, 3):
        checkpoints.save(update, arrays(update), {})
    # Killed between the arrays and what describes them.
    (tmp_path / FOLDER / "01m7xx37q2a1tjwqb8trpt4zek.safetensors").write_bytes(b"half")
    checkpoints.retain([1, 3])
    assert checkpoints.updates() == [1, 3]
    assert len(names(tmp_path)) == 4
    equal(checkpoints.load(1).arrays, arrays(1))


@pytest.mark.parametrize("damage", ["arrays gone", "arrays cut", "arrays flipped", "json cut"])
def test_a_damaged_one_is_passed_over_and_refused_by_name(tmp_path, checkpoints, damage):
    checkpoints.save(1, arrays(1), {})
    checkpoints.save(2, arrays(2), {})
    about = tmp_path / FOLDER / f"{2:012d}.json"
    file = tmp_path / FOLDER / json.loads(about.read_text())["arrays"]
    data = file.read_bytes()
    if damage == "arrays gone":
        file.unlink()
    elif damage == "arrays cut":
        file.write_bytes(data[:-1])
    elif damage == "arrays flipped":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        about.write_text(about.read_text()[:20])
    assert checkpoints.load().update == 1
    with pytest.raises(PackageInvalidError, match="run r1"):
        checkpoints.load(2)
    # The damaged one goes as any other does.
    checkpoints.retain([1])
    assert checkpoints.updates() == [1]


def test_all_damaged_is_an_error(tmp_path, checkpoints):
    checkpoints.save(1, arrays(), {})
    (tmp_path / FOLDER / f"{1:012d}.json").write_text("{")
    with pytest.raises(PackageInvalidError, match="does not parse"):
        checkpoints.load()


def test_a_newer_format_is_refused(tmp_path, checkpoints):
    checkpoints.save(1, arrays(), {})
    about = tmp_path / FOLDER / f"{1:012d}.json"
    body = json.loads(about.read_text())
    del body["checksum"]
    about.write_text(json.dumps({**body, "format": 2}))
    with pytest.raises(FormatTooNewError, match="checkpoint format 2"):
        checkpoints.load()


class Full(LocalStorage):
    """A disk with room for so many blobs."""

    room = 3

    def put(self, path, data):
        if self.room == 0:
            raise StorageError(f"{path}: No space left on device")
        self.room -= 1
        super().put(path, data)


def test_a_disk_that_fills_up_leaves_the_one_before(tmp_path):
    checkpoints = Checkpoints(Full(tmp_path), "r1")
    checkpoints.save(1, arrays(1), {})
    with pytest.raises(StorageError):
        checkpoints.save(2, arrays(2), {})
    assert checkpoints.load().update == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda about: "[" * 100_000,
        lambda about: "[1]",
        lambda about: json.dumps({**about, "format": "x"}),
        lambda about: json.dumps({**about, "format": [1]}),
        lambda about: json.dumps({"format": 1}),
        lambda about: json.dumps({**about, "sha256": 5}),
        lambda about: json.dumps({**about, "arrays": "../../../other.safetensors"}),
        lambda about: json.dumps({**about, "state": [1]}),
        lambda about: json.dumps({**about, "state": {"a": {"__array__": []}}}),
    ],
)
def test_a_checkpoint_described_by_anything_is_refused_by_name(tmp_path, change):
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpoints(storage, "run")
    checkpoints.save(3, {"w": np.ones(2)}, {"a": 1})
    (path,) = tmp_path.rglob("*.json")
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(PackageInvalidError, match=r"run run: checkpoint .*expected what was saved"):
        checkpoints.load()


def test_each_bit_of_what_describes_a_checkpoint_counts(tmp_path, checkpoints):
    """A digit of the state that is another one would be another run, and parse as well."""
    checkpoints.save(3, {"w": np.ones(2)}, STATE)
    (path,) = tmp_path.rglob("*.json")
    whole = path.read_bytes()
    found = []
    for place in range(0, 8 * len(whole), 3):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            loaded = checkpoints.load()
        except PackageInvalidError:
            found.append(place)
        else:
            assert loaded.state == STATE
    assert len(found) > 0.9 * 8 * len(whole) / 3
    ((folder, reason),) = find_damaged_checkpoints(LocalStorage(tmp_path))
    assert folder == FOLDER
    assert "expected what was saved" in reason


def test_a_checkpoint_of_an_earlier_release_is_loaded(tmp_path, checkpoints):
    checkpoints.save(3, {"w": np.ones(2)}, STATE)
    (path,) = tmp_path.rglob("*.json")
    body = json.loads(path.read_text())
    del body["checksum"]
    path.write_text(json.dumps(body))
    assert checkpoints.load().state == STATE
    assert list(find_damaged_checkpoints(LocalStorage(tmp_path))) == []
