import math
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.kernels import kernels, plain
from replaylake.datastore.replay.kernels.sum_tree import SumTree


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


def _filled(values):
    tree = SumTree(len(values))
    tree.fill(np.array(values, np.float64))
    return tree


def _find(tree, *targets):
    return tree.find(np.array(targets, np.float64)).tolist()


def _set(tree, leaves, values):
    tree.set(np.array(leaves, np.int64), np.array(values, np.float64))


# Small integers add up exactly, so a plain cumulative sum says which leaf is right.
_whole = st.lists(st.integers(0, 9), min_size=1, max_size=200)
_awkward = st.floats(0.0, 1e300) | st.sampled_from([0.0, 5e-324, 1e-310, 1e-16, 1.0, 1e16, 1e300])


@pytest.mark.usefixtures("_implementation")
class TestSumTree:
    def test_finds_as_dqn_zoo_does(self):
        """dqn_zoo/replay_test.py, SumTreeTest.test_query_typical (Apache-2.0), commit 45061f4."""
        tree = _filled([3.0, 1.0, 2.0, 5.0])
        assert tree.total == 11.0
        found = _find(tree, 0.0, 2.9, 3.0, 3.9, 4.0, 5.9, 6.0, 10.9)
        assert found == [0, 0, 1, 1, 2, 2, 3, 3]
        for target in (-1.0, 11.0, 12.0):
            with pytest.raises(
                ConfigInvalidError, match=f"is {target}, expected 0 <= target < 11.0"
            ):
                _find(tree, 1.0, target)

    @pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
    def test_refuses_bad_priorities_and_changes_nothing(self, value):
        """dqn_zoo/replay_test.py and reverb/cc/selectors/prioritized_test.cc (both Apache-2.0)."""
        tree = _filled([3.0, 1.0, 2.0, 5.0])
        with pytest.raises(ConfigInvalidError, match=f"priority {value} for leaf 2"):
            _set(tree, [0, 2], [7.0, value])
        with pytest.raises(ConfigInvalidError, match=f"priority {value} for leaf 1"):
            tree.fill(np.array([7.0, value]))
        assert tree.leaves.tolist() == [3.0, 1.0, 2.0, 5.0]
        assert tree.total == 11.0

    @pytest.mark.parametrize("leaf", [-1, 4, 7, 8, np.iinfo(np.int64).min])
    def test_refuses_leaves_it_has_not_and_changes_nothing(self, leaf):
        tree = _filled([3.0, 1.0, 2.0, 5.0])
        with pytest.raises(IndexError, match=rf"leaves\[1\] is {leaf}, expected 0 to 3"):
            _set(tree, [0, leaf], [7.0, 1.0])
        with pytest.raises(IndexError, match=rf"leaves\[1\] is {leaf}, expected 0 to 3"):
            tree.get(np.array([0, leaf]))
        assert tree.leaves.tolist() == [3.0, 1.0, 2.0, 5.0]

    def test_refuses_targets_that_are_no_numbers(self):
        with pytest.raises(ConfigInvalidError, match="is nan"):
            _find(_filled([1.0]), math.nan)

    def test_without_any_priority_nothing_is_found(self):
        tree = SumTree(100)
        assert tree.total == 0.0
        assert _find(tree) == []
        with pytest.raises(ConfigInvalidError, match=r"target < 0\.0"):
            _find(tree, 0.0)

    def test_the_sum_of_the_largest_priorities_is_finite(self):
        tree = SumTree(3)
        largest = sys.float_info.max / 6
        _set(tree, [0, 1, 2], [largest] * 3)
        assert math.isfinite(tree.total)
        assert _find(tree, tree.total * 0.99) == [2]
        with pytest.raises(ConfigInvalidError, match="for leaf 1"):
            _set(tree, [1], [largest * 1.01])

    def test_of_equal_leaves_the_last_one_counts(self):
        tree = SumTree(20)
        _set(tree, [3, 17, 3, 3], [1.0, 2.0, 5.0, 4.0])
        assert tree.get(np.array([3, 17, 3])).tolist() == [4.0, 2.0, 4.0]
        assert tree.total == 6.0

    def test_fill_empties_the_other_leaves(self):
        tree = _filled([1.0] * 20)
        tree.fill(np.array([2.0, 3.0]))
        assert tree.leaves.tolist() == [2.0, 3.0, *[0.0] * 18]
        assert tree.total == 5.0

    def test_leaves_are_a_copy(self):
        tree = _filled([1.0, 2.0])
        tree.leaves[0] = 9.0
        assert tree.leaves.tolist() == [1.0, 2.0]

    def test_takes_other_layouts_and_narrower_numbers(self):
        tree = SumTree(10)
        tree.set(np.arange(10, dtype=np.int32)[::2], np.arange(10, dtype=np.float32)[::2])
        assert tree.leaves.tolist() == [0, 0, 2, 0, 4, 0, 6, 0, 8, 0]
        frozen = np.array([0.0, 19.0])
        frozen.flags.writeable = False
        assert tree.find(frozen).tolist() == [2, 8]

    @pytest.mark.parametrize(
        ("leaves", "values"),
        [([0.0], [1.0]), ([[0]], [1.0]), ([0], [[1.0]]), ([0, 1], [1.0]), ([0], [1j])],
    )
    def test_refuses_other_types_and_shapes(self, leaves, values):
        with pytest.raises(ConfigInvalidError):
            SumTree(3).set(np.array(leaves), np.array(values))

    def test_refuses_more_values_than_leaves_and_trees_without(self):
        with pytest.raises(ConfigInvalidError, match="found 4 values, expected at most 3"):
            SumTree(3).fill(np.ones(4))
        with pytest.raises(ConfigInvalidError, match="found 0 leaves"):
            SumTree(0)

    @given(values=_whole, data=st.data())
    def test_equals_a_cumulative_sum(self, values, data):
        tree = SumTree(len(values))
        chunks = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=30))
        _set(tree, chunks, [5.0] * len(chunks))
        _set(tree, np.arange(len(values)), values)
        cumulated = np.cumsum(values)
        total = int(cumulated[-1])
        assert tree.total == total
        if total:
            targets = np.arange(0.0, total, 0.5)
            expected = np.searchsorted(cumulated, targets, side="right")
            np.testing.assert_array_equal(tree.find(targets), expected)

    @given(
        num_leaves=st.integers(1, 700),
        changes=st.lists(st.tuples(st.integers(0, 699), _awkward), min_size=1, max_size=60),
        shares=st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=20),
        cut=st.integers(0, 60),
    )
    @example(10, [(0, 1e16), (1, 1.0), (2, 1.0), (9, 1e-16)], [0.999999], 2)
    def test_never_finds_a_leaf_of_no_priority(self, num_leaves, changes, shares, cut):
        tree = SumTree(num_leaves)
        leaves = [leaf % num_leaves for leaf, _ in changes]
        priorities = [priority for _, priority in changes]
        _set(tree, leaves[:cut], priorities[:cut])
        _set(tree, leaves[cut:], priorities[cut:])
        expected = np.zeros(num_leaves)
        for leaf, priority in zip(leaves, priorities, strict=True):
            expected[leaf] = priority
        np.testing.assert_array_equal(tree.leaves, expected)
        # However the leaves came to be, the sums are the same to the last bit.
        assert tree.total == _filled(expected).total
        assert tree.total == pytest.approx(math.fsum(expected), rel=1e-12, abs=0.0)
        if tree.total > 0.0:
            last = np.nextafter(tree.total, 0.0)
            targets = np.minimum(np.array([0.0, 1.0, *shares]) * tree.total, last)
            found = tree.find(targets)
            assert (tree.get(found) > 0.0).all()
            positive = np.flatnonzero(expected)
            assert found[0] == positive[0]

    def test_a_target_that_rounding_puts_behind_its_leaf_finds_it(self):
        """The total is rounded up to 2**53, and 2**53 - 1 less the first 1.5 to the second."""
        tree = SumTree(16)
        _set(tree, [0, 8], [1.5, 2.0**53 - 2])
        assert tree.total == 2.0**53
        assert 2.0**53 - 1 - 1.5 == 2.0**53 - 2
        assert _find(tree, 2.0**53 - 1) == [8]

    @pytest.mark.parametrize("num_leaves", [1, 7, 8, 9, 64, 65, 5000])
    def test_draws_in_proportion(self, num_leaves):
        """Of evenly spaced targets each leaf gets its share, to one target more or less."""
        rng = np.random.default_rng(num_leaves)
        tree = _filled(rng.random(num_leaves) * (rng.random(num_leaves) < 0.7) + 1e-9)
        num = 40 * num_leaves
        found = tree.find((np.arange(num) + 0.5) / num * tree.total)
        counts = np.bincount(found, minlength=num_leaves)
        assert np.abs(counts - tree.leaves / tree.total * num).max() <= 1.0 + 1e-6


def test_numba_and_numpy_agree_to_the_last_bit(monkeypatch):
    pytest.importorskip("numba")
    results = []
    for module in (kernels.load(), plain):
        monkeypatch.setattr(kernels, "select_kernels", lambda module=module: module)
        rng = np.random.default_rng(5)
        tree = SumTree(20_011)
        tree.fill(rng.lognormal(0.0, 9.0, 20_000))
        seen = [np.array([tree.total])]
        for batch in (1, 256, 700, 3000, 25_000):
            found = tree.find(rng.random(batch) * tree.total)
            tree.set(found, rng.lognormal(0.0, 9.0, batch))
            seen += [found, tree.leaves, np.array([tree.total])]
        results.append(b"".join(array.tobytes() for array in seen))
    assert results[0] == results[1]
