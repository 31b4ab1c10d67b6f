"""The cache: whole copies only, a cap, and what somebody still reads stays."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replaylake.datastore.errors import ConfigInvalidError, StorageError
from replaylake.datastore.storage.remote.shard_cache import (
    CacheConfig,
    ShardCache,
    discard_copy,
    parse_bytes,
    trim_cache,
)
from replaylake.datastore.storage.storage import Blob

SIZE = 100


class Source:
    """Blobs of SIZE bytes; counts how often each was copied."""

    def __init__(self) -> None:
        self.copied: list[str] = []

    def copy(self, blob: Blob, target: Path) -> None:
        self.copied.append(blob.path)
        target.write_bytes(blob.path.encode().ljust(SIZE))


@pytest.fixture
def source() -> Source:
    return Source()


def make_cache(tmp_path: Path, max_bytes: int = 10**9) -> ShardCache:
    return ShardCache(CacheConfig(tmp_path / "cache", max_bytes), "lake")


def blobs(*names: str) -> list[Blob]:
    return [Blob(f"d/{name}", SIZE) for name in names]


def kept(cache: ShardCache) -> set[str]:
    return {path.name for path in cache.folder.rglob("*") if path.is_file()}


def use(cache: ShardCache, source: Source, *names: str) -> None:
    """Fetch and let go, a moment later than the one before."""
    time.sleep(0.01)
    cache.fetch(blobs(*names), source.copy)
    cache.release(blobs(*names))


def test_a_copy_is_made_once_and_paths_keep_their_order(tmp_path: Path, source: Source) -> None:
    cache = make_cache(tmp_path)
    names = [f"s{i}" for i in range(40)]
    for _ in range(2):
        paths = cache.fetch(blobs(*names, "s0"), source.copy)
        assert [path.name for path in paths] == [*names, "s0"]
        assert [path.read_bytes().strip().decode() for path in paths[:40]] == [
            f"d/{name}" for name in names
        ]
    assert sorted(source.copied) == sorted(f"d/{name}" for name in names)
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


def test_a_copy_of_another_length_is_made_again(tmp_path: Path, source: Source) -> None:
    cache = make_cache(tmp_path)
    (path,) = cache.fetch(blobs("a"), source.copy)
    path.write_bytes(b"cut")
    cache.fetch(blobs("a"), source.copy)
    assert len(path.read_bytes()) == SIZE
    assert source.copied == ["d/a", "d/a"]


def test_what_fails_leaves_nothing_under_its_name(tmp_path: Path, source: Source) -> None:
    cache = make_cache(tmp_path)

    def copy(blob: Blob, target: Path) -> None:
        source.copy(blob, target)
        if blob.path == "d/s3":
            raise StorageError("no")

    with pytest.raises(StorageError, match="no"):
        cache.fetch(blobs("s1", "s2", "s3"), copy)
    assert "s3" not in kept(cache)
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    cache.fetch(blobs("s3"), source.copy)
    assert "s3" in kept(cache)


def test_the_least_recently_used_go_when_the_cap_is_reached(tmp_path: Path, source: Source) -> None:
    cache = make_cache(tmp_path, max_bytes=3 * SIZE)
    for name in ("a", "b", "c"):
        use(cache, source, name)
    use(cache, source, "a")
    use(cache, source, "d")  # measured after it was copied
    assert kept(cache) == {"a", "c", "d"}
    use(cache, source, "b")
    assert kept(cache) == {"a", "b", "d"}


def test_what_is_in_use_stays_above_the_cap(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path, max_bytes=SIZE)
    monkeypatch.setenv("REPLAYLAKE_CACHE", str(tmp_path / "cache"))
    cache.fetch(blobs("a", "b", "c"), source.copy)
    cache.fetch(blobs("a"), source.copy)  # twice
    assert trim_cache(0).bytes_in_use == 3 * SIZE
    cache.release(blobs("a", "b"))
    trimmed = trim_cache(0)
    assert (trimmed.num_files, trimmed.num_bytes, trimmed.bytes_left) == (1, SIZE, 2 * SIZE)
    assert kept(cache) == {"a", "c"}
    # Asked for more than a day ago, by whoever still lives.
    os.utime(cache.folder / "d" / "c", (time.time() - 90_000,) * 2)
    assert trim_cache(0).num_files == 1
    assert kept(cache) == {"a"}
    cache.release(blobs("a"))
    assert trim_cache(0).bytes_left == 0


HOLDER = """
    import sys
    from pathlib import Path
    from replaylake.datastore.storage.remote.shard_cache import CacheConfig, ShardCache
    from replaylake.datastore.storage.storage import Blob
    cache = ShardCache(CacheConfig(Path(sys.argv[1])), "lake")
    cache.fetch([Blob("d/theirs", 100)], lambda blob, path: path.write_bytes(b"x" * 100))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_what_another_process_uses_stays_until_it_is_killed(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path)
    monkeypatch.setenv("REPLAYLAKE_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        use(cache, source, "ours")
        assert trim_cache(0).num_files == 1
        assert kept(cache) == {"theirs"}
        process.kill()
        process.wait()
        assert trim_cache(0).bytes_left == 0
    # The dead one's lease is gone; ours is there.
    assert len(list((tmp_path / "cache" / "leases").iterdir())) == 1


@pytest.mark.slow
def test_many_readers_beside_a_trimmer_never_miss_a_file(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path, max_bytes=2 * SIZE)
    monkeypatch.setenv("REPLAYLAKE_CACHE", str(tmp_path / "cache"))
    stop, missed = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            wanted = blobs("a", "b", "c", "d")
            for path in cache.fetch(wanted, source.copy):
                try:
                    path.read_bytes()
                except FileNotFoundError as error:
                    missed.append(error)
            cache.release(wanted)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    num_removed = 0
    deadline = time.monotonic() + 120
    while num_removed < 20 and time.monotonic() < deadline:
        num_removed += trim_cache(0).num_files
    stop.set()
    for reader in readers:
        reader.join()
    assert missed == []
    assert num_removed >= 20


def test_forget_removes_even_what_is_in_use(tmp_path: Path, source: Source) -> None:
    cache = make_cache(tmp_path)
    cache.forget(["d/a"])  # where no cache is yet
    cache.fetch(blobs("a", "b"), source.copy)
    cache.forget(["d/a", "d/absent"])
    assert kept(cache) == {"b"}


def test_only_copies_are_discarded(tmp_path: Path, source: Source) -> None:
    cache = make_cache(tmp_path)
    (path,) = cache.fetch(blobs("a"), source.copy)
    other = tmp_path / "of-the-lake"
    other.write_bytes(b"")
    assert discard_copy(path) is True
    assert discard_copy(other) is False
    assert other.exists()
    assert kept(cache) == set()


def test_abandoned_temporaries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYLAKE_CACHE", str(tmp_path))
    (tmp_path / "tmp").mkdir()
    for name, age_s in (("old", 90_000), ("new", 0)):
        (tmp_path / "tmp" / name).write_bytes(b"")
        os.utime(tmp_path / "tmp" / name, (time.time() - age_s,) * 2)
    trim_cache()
    assert os.listdir(tmp_path / "tmp") == ["new"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, source: Source) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = ShardCache(CacheConfig(tmp_path / "file"), "lake")
    with pytest.raises(StorageError, match=r"cache .*file: .*REPLAYLAKE_CACHE"):
        cache.fetch(blobs("a"), source.copy)


@pytest.mark.parametrize(
    ("text", "value"), [("1000", 1000), ("20GB", 20 * 10**9), (" 5 mb ", 5_000_000), ("0", 0)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1", "1.5GB", "10GiB", "ten"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigInvalidError, match="REPLAYLAKE_CACHE_BYTES"):
        parse_bytes(text)


def test_where_the_cache_is(tmp_path: Path) -> None:
    of: Callable[[dict[str, str]], CacheConfig] = CacheConfig.from_environment
    assert of({}).folder == Path.home() / ".cache" / "replaylake"
    assert of({"XDG_CACHE_HOME": "/x"}).folder == Path("/x/replaylake")
    both = of({"XDG_CACHE_HOME": "/x", "REPLAYLAKE_CACHE": "/y", "REPLAYLAKE_CACHE_BYTES": "1GB"})
    assert both == CacheConfig(Path("/y"), 10**9)


def test_a_lease_does_not_grow_with_what_was_let_go(tmp_path: Path, source: Source) -> None:
    cache = make_cache(tmp_path)
    for _ in range(3):
        use(cache, source, "a", "b")
    (lease,) = (tmp_path / "cache" / "leases").iterdir()
    assert lease.read_bytes() == b""
    cache.fetch(blobs("a"), source.copy)
    assert lease.read_text() == "+lake/d/a\n"
