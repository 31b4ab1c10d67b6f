"""Which policy answers: shares, stickiness, and versions that are held a while."""

import hashlib
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.versions.router import Canary, Router, ServedPolicy, parse_canaries


def served(version, name="clone"):
    return ServedPolicy(name, version, None, f"{name}@{version}")


def test_alone_it_answers_every_row():
    one = served(1)
    assert Router(one).assign_rows([None, "a", "a"]) == [(one, range(3))]


def test_shares_are_as_asked_and_an_episode_stays_where_it_is():
    router = Router(served(1), [(served(2), 0.1), (served(3), 0.25)])
    ids = [f"visit-{i}" for i in range(20_000)]
    by_batch = {}
    for one, rows in router.assign_rows(ids):
        by_batch |= {ids[row]: one.version for row in rows}
    counts = Counter(by_batch.values())
    # Five standard deviations of a binomial of 20,000.
    for version, share in ((2, 0.1), (3, 0.25), (1, 0.65)):
        assert abs(counts[version] / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5
    again = Router(served(1), [(served(2), 0.1), (served(3), 0.25)])
    for episode in ids[:500]:
        ((one, rows),) = again.assign_rows([episode])
        assert (one.version, list(rows)) == (by_batch[episode], [0])


def test_an_episode_lies_where_the_keyed_hash_says():
    # Of the literature's BLAKE2b, not of this code: it may never change, or episodes would.
    key = hashlib.blake2b(b"clone", digest_size=32).digest()
    digest = hashlib.blake2b(b"visit-7", digest_size=8, key=key).digest()
    place = int.from_bytes(digest, "big") / 2**64
    for weight, version in ((place + 1e-9, 2), (place - 1e-9, 1)):
        ((one, _),) = Router(served(1), [(served(2), weight)]).assign_rows(["visit-7"])
        assert one.version == version


def test_more_weight_takes_no_episode_from_a_canary():
    ids = [f"e{i}" for i in range(2000)]

    def of_canary(weight):
        groups = Router(served(1), [(served(2), weight)]).assign_rows(ids)
        return {ids[row] for one, rows in groups if one.version == 2 for row in rows}

    assert of_canary(0.05) < of_canary(0.2) < of_canary(0.9)


def test_rows_without_an_episode_are_drawn_each_by_itself():
    router = Router(served(1), [(served(2), 0.5)])
    groups = dict((one.version, rows) for one, rows in router.assign_rows([None] * 4000))
    assert sorted([*groups[1], *groups[2]]) == list(range(4000))
    assert 1800 < len(groups[2]) < 2200
    singly = Counter(router.assign_rows([None])[0][0].version for _ in range(400))
    assert set(singly) == {1, 2}


def test_a_seed_draws_the_same_rows_again():
    router = Router(served(1), [(served(2), 0.5)])
    ids = [None, "a", None, *[None] * 50]

    def drawn(seed):
        return {one.version: list(rows) for one, rows in router.assign_rows(ids, seed)}

    assert all(drawn(seed) == drawn(seed) for seed in (0, 7, 2**63 - 1))
    assert drawn(7) != drawn(8)
    singly = [router.assign_rows([None], seed)[0][0].version for seed in range(400)]
    assert singly == [router.assign_rows([None], seed)[0][0].version for seed in range(400)]
    assert 140 < singly.count(2) < 260


@given(st.lists(st.none() | st.text(), max_size=30))
def test_every_row_is_answered_once_whatever_it_is_called(ids):
    router = Router(served(1), [(served(2), 0.3), (served(3), 0.3)])
    rows = sorted(row for _, chosen in router.assign_rows(ids) for row in chosen)
    assert rows == list(range(len(ids)))


def test_another_process_agrees():
    code = (
        "from replaylake.serve.versions.router import Router, ServedPolicy\n"
        "a, b = (ServedPolicy('clone', v, None, '') for v in (1, 2))\n"
        "router = Router(a, [(b, 0.5)])\n"
        "print(''.join(str(router.assign_rows([f'v{i}'])[0][0].version) for i in range(64)))"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    router = Router(served(1), [(served(2), 0.5)])
    here = "".join(str(router.assign_rows([f"v{i}"])[0][0].version) for i in range(64))
    assert there.stdout.strip() == here


def test_the_last_two_versions_of_an_arm_are_held():
    router = Router(served(1), [(served(7, "other"), 0.5)])
    changes = []
    router.on_change = lambda: changes.append(router.one.version)
    for version in (2, 3, 4):
        router.replace(0, served(version))
    assert changes == [2, 3, 4]
    assert [router.find_version("clone", v) is not None for v in (1, 2, 3, 4)] == [
        False,
        True,
        True,
        True,
    ]
    assert router.find_version("other", 7) is router.arms[1].served
    assert (router.one.version, [arm.weight for arm in router.arms]) == (4, [0.5, 0.5])
    router.replace(1, served(8, "other"))
    assert {(one.name, one.version) for one in router.held} == {
        ("clone", 2), ("clone", 3), ("clone", 4), ("other", 7), ("other", 8),
    }  # fmt: skip
    # What answers now is what is found, though the same version was held from before.
    back = served(3)
    router.replace(0, back)
    assert router.find_version("clone", 3) is back


def test_back_and_forth_keeps_what_was_there_before():
    """A version that is rolled back does not take the place of one whose states are out there."""
    router = Router(served(1))
    for version in (2, 3, 2, 3, 2):
        router.replace(0, served(version))
    assert {one.version for one in router.held} == {1, 2, 3}


def test_canaries_as_they_are_written():
    assert parse_canaries([]) == ()
    assert parse_canaries(["clone@challenger=0.1", "clone:3=.25"]) == (
        Canary("clone@challenger", 0.1),
        Canary("clone:3", 0.25),
    )
    wrong = ["clone", "clone=", "=0.1", "clone=0", "clone=1", "clone=-1", "clone=nan", "a,b=0.1"]
    for text in wrong:
        with pytest.raises(ConfigInvalidError, match="canary: found"):
            parse_canaries([text])
    for texts in (["a=0.5", "b=0.5"], ["a=0.1", "a=0.2"], ["a=0.9", "b=0.2"]):
        with pytest.raises(ConfigInvalidError, match="a total weight below 1"):
            parse_canaries(texts)


def test_weights_add_up_to_one():
    router = Router(served(1), [(served(i), 0.1) for i in range(2, 8)])
    assert np.isclose(sum(arm.weight for arm in router.arms), 1.0)
