"""Random damage to the files of a log: each is reported, or reads as the same log."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from replaylake.datastore.errors import LogCorruptError
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog, CommitResult
from replaylake.datastore.storage.log.expiry import expire
from replaylake.datastore.storage.log.state import FileEntry, LogState
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table_schema import new_metadata

METADATA: Final = new_metadata(pa.schema([("x", pa.int64())]), {}, has_entries=True)
NEWEST: Final = 14


@dataclass(frozen=True)
class Sound:
    """A log before its damage, and all that it says."""

    root: Path
    states: dict[int, LogState]
    history: list[dict[str, Any]]
    oldest: int


def made(root: Path, *, is_expired: bool) -> Sound:
    """Versions 0..14, checkpoints at 5 and 10; with `is_expired` 0..6 dropped."""
    log = CommitLog(LocalStorage(root), "t")
    log.commit(lambda _: Intent("create", 0, "CREATE TABLE", metadata=METADATA))
    for sequence in range(1, NEWEST + 1):
        entry = FileEntry(f"shards/{sequence}.parquet", 10 * sequence, sequence, "ab" * 32, 5)
        removed = (f"shards/{sequence - 3}.parquet",) if sequence % 4 == 0 else ()
        entries = {"policy/p/1": str(sequence)}
        intent = Intent("p", sequence, "WRITE", (entry,), removed, entries=entries)
        log.commit(partial(_given, intent))
    log.checkpoint(5)
    log.checkpoint(10)
    if is_expired:
        expire(log, 7)
    oldest = log.oldest()
    states = {version: log.at(version) for version in range(oldest, NEWEST + 1)}
    return Sound(root, states, log.history(), oldest)


def _given(intent: Intent, state: LogState) -> Intent:
    return intent


def damage(path: Path, rng: random.Random) -> str:
    """Flip a bit, cut the file, or lose a block of it; say which."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    what = rng.choice(["flip", "flip", "flip", "cut", "zeros"])
    if what == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif what == "cut":
        del data[at:]
    else:
        end = min(len(data), at + rng.randrange(1, 512))
        data[at:end] = bytes(end - at)
    path.write_bytes(data)
    return f"{what} at {at} of {path.name}"


def reported_or(expected: object, read: Callable[[], object]) -> bool:
    """Whether it was reported; fails on any other answer than the expected one."""
    try:
        found = read()
    except LogCorruptError:
        return True
    assert found == expected
    return False


def check_damaged(sound: Sound, storage: LocalStorage, versions: list[int]) -> int:
    """Read and write a damaged log; return how many of the readings were reported."""
    log = CommitLog(storage, "t")
    found = [reported_or(sound.states[v], partial(CommitLog(storage, "t").at, v)) for v in versions]
    found.append(reported_or(sound.history, log.history))
    before = set(storage.names("t/_delta_log"))
    commit = partial(log.commit, lambda _: Intent("q", 0, "WRITE"))
    if not reported_or(CommitResult(NEWEST + 1, False), commit):
        after = set(storage.names("t/_delta_log"))
        assert after - before == {f"{NEWEST + 1:020d}.json"}, "and no name of an earlier version"
    return sum(found)


def check_damages(sound: Sound, folder: Path, num: int, seed: int) -> int:
    """Damage one file at a time; return how many damages were reported while reading."""
    rng = random.Random(seed)
    reported = 0
    for _ in range(num):
        root = folder / "damaged"
        shutil.copytree(sound.root, root)
        path = rng.choice(sorted((root / "t" / "_delta_log").iterdir()))
        what = damage(path, rng)
        versions = [NEWEST, *rng.sample(sorted(sound.states), 3)]
        try:
            found = check_damaged(sound, LocalStorage(root), versions)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {what}: {error!r}") from error
        reported += found > 0
        if path.name == "_last_checkpoint":
            assert found == 0, f"seed {seed}: {what}: it decides nothing"
        shutil.rmtree(root)
    return reported


@pytest.mark.slow
@pytest.mark.parametrize("is_expired", [False, True])
def test_damage_is_reported_or_harmless(tmp_path: Path, is_expired: bool) -> None:
    sound = made(tmp_path / "sound", is_expired=is_expired)
    assert check_damages(sound, tmp_path, 20, seed=1) > 5


@pytest.mark.chaos
@pytest.mark.parametrize("is_expired", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_much_damage_is_reported_or_harmless(tmp_path: Path, is_expired: bool, seed: int) -> None:
    sound = made(tmp_path / "sound", is_expired=is_expired)
    assert check_damages(sound, tmp_path, 500, seed=100 + seed) > 100


def check_bits(path: Path, read: Callable[[], object], bits: slice) -> None:
    """Flip one bit at a time. Every one has to be reported, with the file's name."""
    good = path.read_bytes()
    for position in range(8 * len(good))[bits]:
        flipped = bytearray(good)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(LogCorruptError, match=rf"{path.name}: .*expected"):
            read()
    path.write_bytes(good)
    read()


BITS: Final = [
    pytest.param(slice(None, None, 89), id="some"),
    pytest.param(slice(None), id="all", marks=pytest.mark.chaos),
]


@pytest.mark.parametrize("bits", BITS)
def test_every_bit_of_a_commit_counts(tmp_path: Path, bits: slice) -> None:
    folder = CommitLog(LocalStorage(made(tmp_path, is_expired=False).root), "t").folder
    check_bits(tmp_path / folder.commit_path(3), lambda: folder.read_change(3), bits)


@pytest.mark.parametrize("bits", BITS)
def test_every_bit_of_a_checkpoint_counts(tmp_path: Path, bits: slice) -> None:
    """Also those of the footer, for which Parquet has no checksum."""
    folder = CommitLog(LocalStorage(made(tmp_path, is_expired=False).root), "t").folder
    check_bits(tmp_path / folder.checkpoint_path(10), lambda: folder.read_checkpoint(10), bits)
