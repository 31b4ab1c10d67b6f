import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaylake.datastore.replay.kernels import kernels, plain


@pytest.fixture(params=["numba", "numpy"], scope="class")
def _implementation(request):
    """Run the test with each implementation, as `chosen` would pick them."""
    module = plain
    if request.param == "numba":
        pytest.importorskip("numba")
        module = kernels.load()
        assert module is not plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "select_kernels", lambda: module)
        yield


def _numbered(num_records, width):
    """Records in which each word differs: record i holds i * width and what follows."""
    return np.arange(num_records * width, dtype=np.uint64).reshape(num_records, width)


def _gathered(words, positions, length):
    out = np.full((len(positions), length * words.shape[1]), 999_999, np.uint64)
    kernels.gather(words, np.array(positions, np.int64), length, out)
    return out


@pytest.mark.usefixtures("_implementation")
class TestCopyRanges:
    def test_copies_and_pads(self):
        source, out = np.arange(10, dtype=np.uint8), np.full(9, 99, np.uint8)
        ranges = [np.array(values) for values in ([7, 0, 4], [2, 0, 3], [4, 8, 1], [4, 1, 3])]
        starts, lengths, places, widths = ranges
        kernels.copy_ranges(source, starts, lengths, out, places, widths)
        assert out.tolist() == [99, 4, 5, 6, 7, 8, 0, 0, 0]

    @pytest.mark.parametrize(
        ("start", "length", "place", "width"),
        [
            (-1, 2, 0, 2),
            (3, 2, 0, 2),
            (0, 2, -1, 2),
            (0, 2, 2, 2),
            (0, 2, 0, 1),
            (2**63 - 1, 2, 0, 2),
        ],
    )
    def test_refuses_other_ranges_and_writes_nothing(self, start, length, place, width):
        source, out = np.ones(4, np.uint8), np.zeros(3, np.uint8)
        ranges = ([0, start], [1, length], [0, place], [1, width])
        starts, lengths, places, widths = map(np.array, ranges)
        with pytest.raises(IndexError, match=f"range 1 has {length} bytes from {start} to"):
            kernels.copy_ranges(source, starts, lengths, out, places, widths)
        assert not out.any()


@pytest.mark.usefixtures("_implementation")
class TestGather:
    def test_takes_consecutive_records(self):
        words = np.array([[0, 1], [10, 11], [20, 21], [30, 31]], np.uint64)
        expected = [[20, 21, 30, 31], [0, 1, 10, 11], [0, 1, 10, 11]]
        assert _gathered(words, [2, 0, 0], 2).tolist() == expected

    @given(
        width=st.sampled_from([1, 2, 7, 8, 16, 130, 200]),
        length=st.integers(1, 9),
        spare=st.integers(0, 40),
        data=st.data(),
    )
    def test_equals_indexing(self, width, length, spare, data):
        words = _numbered(length + spare, width)
        positions = data.draw(st.lists(st.integers(0, spare), max_size=40))
        rows = np.array(positions, np.int64).reshape(-1, 1) + np.arange(length)
        expected = words[rows].reshape(len(positions), length * width)
        np.testing.assert_array_equal(_gathered(words, positions, length), expected)

    @pytest.mark.parametrize(("length", "position"), [(1, -1), (1, 6), (2, 5), (6, 1), (7, 0)])
    def test_refuses_to_leave_the_records_and_writes_nothing(self, length, position):
        words, out = _numbered(6, 3), np.full((2, length * 3), 7, np.uint64)
        inside = np.array([0, position] if length < 7 else [position, 0], np.int64)
        at = inside.tolist().index(position)
        with pytest.raises(
            IndexError, match=rf"positions\[{at}\] is {position}, expected 0 to {6 - length}"
        ):
            kernels.gather(words, inside, length, out)
        assert (out == 7).all()

    @pytest.mark.parametrize("extreme", [np.iinfo(np.int64).min, np.iinfo(np.int64).max])
    def test_refuses_positions_that_would_overflow(self, extreme):
        with pytest.raises(IndexError, match=str(extreme)):
            _gathered(_numbered(6, 3), [extreme], 2)

    def test_no_positions_are_no_rows(self):
        assert _gathered(_numbered(2, 3), [], 2).shape == (0, 6)
        assert _gathered(_numbered(0, 3), [], 2).shape == (0, 6)

    @pytest.mark.parametrize("shape", [(1, 6), (3, 6), (2, 5), (2, 7), (12,)])
    def test_refuses_another_shape_of_out(self, shape):
        positions = np.zeros(2, np.int64)
        with pytest.raises(ValueError, match=r"expected \(2, 6\)"):
            kernels.gather(_numbered(4, 3), positions, 2, np.empty(shape, np.uint64))

    @pytest.mark.parametrize("width", [3, 200])
    def test_reads_what_may_only_be_read(self, width, tmp_path):
        words = _numbered(50, width)
        words.tofile(tmp_path / "records")
        mapped = np.memmap(tmp_path / "records", np.uint64, "r", shape=words.shape)
        frozen = words.copy()
        frozen.flags.writeable = False
        positions = np.array([0, 45, 13])
        positions.flags.writeable = False
        expected = words[positions[:, None] + np.arange(5)].reshape(3, -1)
        for readable in (mapped, mapped.view(np.ndarray), frozen):
            out = np.empty((3, 5 * width), np.uint64)
            kernels.gather(readable, positions, 5, out)
            np.testing.assert_array_equal(out, expected)

    def test_reads_records_at_an_odd_address(self):
        words = _numbered(9, 3)
        odd = np.frombuffer(b"\0" + words.tobytes(), np.uint8)[1:].view(np.uint64).reshape(9, 3)
        np.testing.assert_array_equal(_gathered(odd, [7, 2], 2), _gathered(words, [7, 2], 2))


# Records of three words: the key's first half; a reward and steps_left; terminated, bootstrappable
# and an action mask of two.
_FIELDS = np.array([2, 3, 16, 17, 18, 20])
_RECORD = np.dtype(
    [
        ("link", np.uint64),
        ("reward", np.float32),
        ("left", np.int32),
        ("terminated", np.bool_),
        ("bootstrappable", np.bool_),
        ("mask", np.bool_, (2,)),
        ("rest", np.uint32),
    ]
)


def _runs(lengths, seed, *, linked=False):
    """Runs of some steps and their tails, of random rewards and flags, and room after them."""
    rng = np.random.default_rng(seed)
    left = np.concatenate([np.arange(length, -1, -1) for length in [*lengths, 0]])
    records = np.zeros(len(left) + 50, _RECORD)
    records["left"][: len(left)] = left
    records["reward"] = rng.choice([0.1, -3.7, 1e30, -0.0, 5e-45, np.inf, np.nan], len(records))
    records["reward"][::2] = rng.normal(size=len(records))[::2]
    records["terminated"] = rng.random(len(records)) < 0.2
    records["bootstrappable"] = rng.random(len(records)) < 0.8
    records["rest"] = np.arange(len(records))
    records["link"] = np.arange(len(records))
    tails = np.flatnonzero(records["left"] == 0)
    records["link"][tails] = rng.random(len(tails)) < 0.5 if linked else 0
    return records


def _words(records):
    return records.view(np.uint64).reshape(len(records), -1)


def _summed(records, places, most, stack=1, gamma=0.9):
    discounted = np.array([gamma**m for m in range(most + 1)])
    out = np.full((len(places), 2 * stack * 3), 999_999, np.uint64)
    rewards, discounts = np.full((2, len(places)), 9.0, np.float32)
    places = np.array(places, np.int64)
    nums = kernels.n_steps(
        _words(records), places, most, stack, _FIELDS, discounted, out, rewards, discounts
    )
    return out.view(_RECORD)["rest"].tolist(), rewards, discounts, nums.tolist()


@pytest.mark.usefixtures("_implementation")
class TestNSteps:
    def test_sums_up_what_the_run_has(self):
        records = _runs([4, 3], 0)
        records["reward"][:9] = [1, 2, 4, 8, 99, 16, 32, 64, 99]
        records["terminated"][:] = False
        records["terminated"][3] = True
        records["bootstrappable"][:] = True
        records["bootstrappable"][7] = False
        ends, rewards, discounts, nums = _summed(records, [0, 2, 3, 5, 6, 7], 3, gamma=0.5)
        # Of the second run the successor of the last step is not known: it is used, if it must be.
        assert ends == [[0, 3], [2, 4], [3, 4], [5, 7], [6, 7], [7, 8]]
        assert rewards.tolist() == [1 + 1 + 1, 4 + 4, 8, 16 + 16, 32, 64]
        assert discounts.tolist() == [0.125, 0, 0, 0.25, 0.5, 0.5]
        assert nums == [3, 2, 1, 2, 1, 1]

    def test_copies_stacks(self):
        records = _runs([1, 6], 0)
        records["bootstrappable"][:] = True
        ends, _, _, nums = _summed(records, [3, 6], 4, stack=2)
        assert ends == [[2, 3, 6, 7], [5, 6, 7, 8]]
        assert nums == [4, 2]

    def test_says_where_a_link_is_reached(self):
        records = _runs([3, 3], 0)
        records["link"][3] = 5
        records["bootstrappable"][:] = True
        # The tail itself, where the third step leads, is what was observed there.
        assert _summed(records, [0, 1, 2, 4, 5], 3)[3] == [3, -1, -1, 3, 2]

    def test_goes_on_in_windows_along_links(self):
        records = _runs([6], 0)
        records["left"][:7] = [2, 1, 1, 1, 2, 1, 0]
        records["bootstrappable"][:] = True
        assert _summed(records, [0, 0, 1, 3], 5)[3] == [5, 5, 5, 3]
        assert _summed(records, [0, 1], 7)[3] == [6, 5]

    def test_rounds_once(self):
        records = _runs([3], 0)
        records["reward"][:3] = [1.0, 2.0**-24, 2.0**-48]
        records["bootstrappable"][:] = True
        # In float32 each of the small ones would be lost beside 1, and so would their sum.
        assert _summed(records, [0], 3, gamma=1.0)[1].tolist() == [1 + 2.0**-23]

    @pytest.mark.parametrize(("stack", "place"), [(1, -1), (1, 57), (3, 1), (3, -(2**63))])
    def test_refuses_to_leave_the_records_and_writes_nothing(self, stack, place):
        records = _runs([6], 0)[:60]
        with pytest.raises(
            IndexError, match=rf"places\[1\] is {place}, expected {stack - 1} to 55"
        ):
            _summed(records, [2, place], len(records) - 56, stack)

    def test_no_places_are_no_rows(self):
        assert _summed(_runs([2], 0), [], 2)[3] == []


@pytest.mark.usefixtures("_implementation")
class TestEndSequences:
    def test_leaves_the_tail_and_puts_nothing_after_it(self):
        records = _runs([3, 4], 0)
        records["terminated"][:] = [step == 2 for step in range(len(records))]
        records["rest"] += 1
        rows = np.array([1, 4])[:, None] + np.arange(4)
        windows = records[rows]
        mask, discounts = np.zeros((2, 3), np.bool_), np.full((2, 3), 9, np.float32)
        kernels.end_sequences(_words(windows), 0, _FIELDS, 0.5, mask, discounts)
        assert mask.tolist() == [[True, True, False], [True] * 3]
        assert discounts.tolist() == [[0.5, 0, 0], [0.5] * 3]
        assert windows["rest"].tolist() == [[2, 3, 4, 0], [5, 6, 7, 8]]
        assert windows["mask"][0, 3].tolist() == [True, True]
        assert windows[0, 3]["link"] == windows[0, 3]["left"] == windows[0, 3]["reward"] == 0
        assert windows[1].tobytes() == records[4:8].tobytes()

    def test_goes_on_along_links(self):
        windows = _runs([6], 0)[None, :8].copy()
        windows["left"][0, :7] = [2, 1, 1, 1, 2, 1, 0]
        mask, discounts = np.zeros((1, 7), np.bool_), np.zeros((1, 7), np.float32)
        kernels.end_sequences(windows.view(np.uint64), 0, _FIELDS, 0.5, mask, discounts)
        assert mask.tolist() == [[True] * 6 + [False]]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    most=st.integers(1, 12),
    stack=st.integers(1, 4),
    linked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_both_sum_up_to_the_same_bits(lengths, most, stack, linked, seed):
    numba = pytest.importorskip("replaylake.datastore.replay.kernels.compiled")
    records = _runs(lengths, seed, linked=linked)
    places = np.random.default_rng(seed).permutation(len(records) - 50)
    places = places[places >= stack - 1]
    discounted = np.array([0.99**m for m in range(most + 1)])
    found = []
    for module in (plain, numba):
        out = np.zeros((len(places), 2 * stack * 3), np.uint64)
        sums, discounts = np.zeros((2, len(places)), np.float32)
        nums = np.zeros(len(places), np.int64)
        refused = module.n_steps(
            _words(records), places, most, stack, _FIELDS, discounted, out, sums, discounts, nums
        )
        assert refused == -1
        sums[np.isnan(sums)] = np.nan
        found.append([array.tobytes() for array in (out, sums, discounts, nums)])
    assert found[0] == found[1]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    num_steps=st.integers(0, 12),
    before=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_both_end_sequences_alike(lengths, num_steps, before, seed):
    numba = pytest.importorskip("replaylake.datastore.replay.kernels.compiled")
    records = _runs(lengths, seed)
    places = np.arange(len(records) - 50)
    found = []
    for module in (plain, numba):
        windows = records[places[:, None] + np.arange(before + num_steps + 1)]
        mask = np.zeros((len(places), num_steps), np.bool_)
        discounts = np.zeros(mask.shape, np.float32)
        words = _words(windows)
        module.end_sequences(words, before, _FIELDS, 0.99, mask, discounts)
        found.append([array.tobytes() for array in (words, mask, discounts)])
    assert found[0] == found[1]


def test_numpy_comes_first_and_numba_after_some_calls(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(kernels, "_num_calls", kernels._CALLS_BEFORE_NUMBA - 2)
    names = [kernels.select_kernels().__name__.rpartition(".")[2] for _ in range(4)]
    assert names == ["plain", "plain", "compiled", "compiled"]


# Gathers once with what there is, prints its name and the times that numba compiled.
_GATHER = """
import sys
import numpy as np
from replaylake.datastore.replay.kernels import kernels
assert sys.modules.get("numba") is None
module = kernels.load()
out = np.empty((2, 2), np.uint64)
kernels.gather(np.arange(4, dtype=np.uint64).reshape(4, 1), np.array([2, 0]), 2, out)
assert out.tolist() == [[2, 3], [0, 1]]
print(module.__name__.rpartition(".")[2], end=" ")
names = ["gather", "n_steps", "end_sequences"]
names += ["find_leaves", "leaf_values", "set_leaves", "sum_all"]
if module.__name__.endswith("compiled"):
    assert all(len(getattr(module, name).signatures) == 1 for name in names)
    print(sum(sum(getattr(module, name).stats.cache_misses.values()) for name in names), end="")
"""


def _run(code, **environment):
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    return child.stdout.split()


def test_without_numba_numpy_is_used():
    missing = "import sys; sys.modules['numba'] = None\n"
    assert _run(missing + _GATHER) == ["plain"]


def test_where_numba_may_not_compile_numpy_is_used():
    pytest.importorskip("numba")
    assert _run(_GATHER, NUMBA_DISABLE_JIT="1") == ["plain"]


@pytest.mark.slow
def test_the_second_process_compiles_nothing(tmp_path):
    pytest.importorskip("numba")
    assert _run(_GATHER, NUMBA_CACHE_DIR=str(tmp_path)) == ["compiled", "7"]
    assert _run(_GATHER, NUMBA_CACHE_DIR=str(tmp_path)) == ["compiled", "0"]


@pytest.mark.slow
def test_without_a_folder_for_its_cache_numba_still_works(tmp_path):
    pytest.importorskip("numba")
    (tmp_path / "file").touch()
    environment = {
        "NUMBA_CACHE_DIR": str(tmp_path / "file" / "cache"),
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
    }
    assert _run(_GATHER, **environment)[0] == "compiled"


@pytest.mark.slow
def test_with_a_full_disk_for_its_cache_numba_still_works(tmp_path):
    pytest.importorskip("numba")
    limited = f"import resource; resource.setrlimit({resource.RLIMIT_FSIZE}, (0, 0))\n" + _GATHER
    assert _run(limited, NUMBA_CACHE_DIR=str(tmp_path))[0] == "compiled"
