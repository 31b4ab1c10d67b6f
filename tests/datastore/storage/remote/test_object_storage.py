"""The operations of a storage, against S3's protocol and in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from replaylake.datastore.errors import (
    ConfigInvalidError,
    InvalidNameError,
    ShardCorruptError,
    StorageError,
)
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.locations import Location, open_storage, parse_location
from replaylake.datastore.storage.remote.object_storage import BACKENDS, Backend
from replaylake.datastore.storage.storage import Blob, LocalStorage, Storage


@pytest.fixture(params=["folder", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "folder":
        yield LocalStorage(tmp_path / "lake")
    elif request.param == "memory":
        yield open_storage(f"memory://{new_ulid()}")
    else:
        yield open_storage(f"s3://{request.getfixturevalue('bucket')}/some/lake")


@pytest.fixture
def on_s3(bucket: str) -> Storage:
    return open_storage(f"s3://{bucket}/lake")


def test_put_replaces_and_put_if_absent_does_not(storage: Storage) -> None:
    storage.put("a/b", b"one")
    storage.put("a/b", b"two")
    assert storage.get("a/b") == b"two"
    assert storage.put_if_absent("a/b", b"three") is False
    assert storage.put_if_absent("a/c", b"three", private=True) is True
    assert storage.get_many(["a/c", "a/none", "a/b"]) == [b"three", None, b"two"]
    blobs = [Blob("a/c", 5), Blob("a/none", 5), Blob("a/b", 3)]
    assert storage.read_ends(blobs, 4) == [b"hree", None, b"two"]


def test_what_is_not_there_is_none_or_empty(storage: Storage) -> None:
    assert storage.get("nothing") is None
    assert storage.names("nothing") == []
    assert list(storage.files("nothing")) == []
    storage.delete(["nothing", "nothing/below"])


def test_listing_by_folder_and_after_a_name(storage: Storage) -> None:
    for path in ("d/log/1", "d/log/2", "d/log/3", "d/shards/x", "dd/y", "top"):
        storage.put(path, path.encode())
    assert storage.names("d") == ["log", "shards"]
    assert [n for n in storage.names("") if n != "_lake"] == ["d", "dd", "top"]
    assert storage.names("d/log") == ["1", "2", "3"]
    assert storage.names("d/log", after="1") == ["2", "3"]
    assert storage.names("d/log", after="2x") == ["3"]
    assert storage.names("d/log", after="3") == []
    assert storage.names("d", after="log") == ["shards"]
    found = {file.path: file.size_bytes for file in storage.files("d")}
    assert found == {"d/log/1": 7, "d/log/2": 7, "d/log/3": 7, "d/shards/x": 10}
    storage.delete(["d/log/1", "d/log/absent", "d/shards/x"])
    assert sorted(file.path for file in storage.files("d")) == ["d/log/2", "d/log/3"]


def test_times_of_change_are_the_clocks(storage: Storage) -> None:
    import time

    storage.put("x", b"")
    (file,) = [file for file in storage.files("") if file.path == "x"]
    assert abs(file.modified_ms / 1000 - time.time()) < 60


def test_a_large_blob_of_another_buffer_type_comes_back_whole(storage: Storage) -> None:
    data = pa.py_buffer(bytes(range(256)) * 50_000)
    storage.put("large", memoryview(data))
    blob = Blob("large", data.size, hashlib.sha256(data).hexdigest())
    (path,) = storage.fetch([blob])
    assert path.read_bytes() == data.to_pybytes()
    storage.release([blob])


def test_an_original_is_read_past_the_copies_of_this_machine(storage: Storage) -> None:
    storage.put("d/x", b"first")
    storage.fetch([Blob("d/x")])
    storage.put("d/x", b"second")
    with storage.open_original("d/x") as file:
        assert file.read() == b"second"
    with pytest.raises(FileNotFoundError, match="none"):
        storage.open_original("d/none")


def test_a_storage_says_what_it_can_do(storage: Storage, tmp_path: Path) -> None:
    storage.put("d/x", b"1")
    is_folder = isinstance(storage, LocalStorage)
    assert storage.local_folder("d") == (tmp_path / "lake" / "d" if is_folder else None)
    assert storage.local_folder("") == (tmp_path / "lake" if is_folder else None)
    assert (storage.is_metered, storage.shares_state) == (not is_folder, is_folder)
    assert not storage.is_link("d")
    storage.trim_copies(0)
    assert storage.get("d/x") == b"1"


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/x", "a//x", "./x", "a\0b"])
def test_a_path_that_leads_out_is_refused_by_a_store(on_s3: Storage, path: str) -> None:
    for attempt in (
        lambda: on_s3.get(path),
        lambda: on_s3.put(path, b""),
        lambda: on_s3.put_if_absent(path, b""),
        lambda: on_s3.delete([path]),
        lambda: on_s3.fetch([Blob(path)]),
        lambda: on_s3.forget([path]),
        lambda: on_s3.state_folder(path),
        lambda: on_s3.names(path),
    ):
        with pytest.raises(InvalidNameError, match="inside of the lake"):
            attempt()


def test_a_create_whose_reply_was_lost_is_ours(on_s3: Storage, s3) -> None:
    s3.fail("PUT", "lost", done=True, times=2)
    assert on_s3.put_if_absent("lost", b"mine") is True
    assert on_s3.get("lost") == b"mine"
    # Without a lost reply even the same bytes are another's.
    assert on_s3.put_if_absent("lost", b"mine") is False


def test_a_create_that_another_won_while_ours_failed_is_not_ours(on_s3: Storage, s3) -> None:
    on_s3.put("taken", b"theirs")
    s3.fail("PUT", "taken", done=False)
    assert on_s3.put_if_absent("taken", b"mine") is False
    assert on_s3.get("taken") == b"theirs"


@pytest.mark.slow
def test_what_fails_in_passing_is_repeated(on_s3: Storage, s3) -> None:
    for method in ("PUT", "GET"):
        s3.fail(method, "/x", done=False, times=2)
    on_s3.put("x", b"1")
    assert on_s3.get("x") == b"1"
    s3.fail("GET", "", done=False, times=2)
    assert on_s3.names("") == ["x"]
    s3.fail("PUT", "/new", done=False, times=2)
    assert on_s3.put_if_absent("new", b"2") is True


@pytest.mark.slow
def test_a_store_that_stays_broken_is_reported_in_one_line(on_s3: Storage, s3) -> None:
    s3.fail("PUT", "/x", done=False, times=99)
    for attempt in (lambda: on_s3.put("x", b""), lambda: on_s3.put_if_absent("x", b"")):
        with pytest.raises(StorageError, match=r"lake/x: .*503.*Run it again") as failure:
            attempt()
        assert "\n" not in str(failure.value)
    s3.heal()
    assert on_s3.get("x") is None


def test_fetched_files_are_checked_as_they_are_copied(on_s3: Storage) -> None:
    on_s3.put("shard", b"right")
    right = Blob("shard", 5, hashlib.sha256(b"right").hexdigest())
    for wrong in (Blob("shard", 4, right.sha256), Blob("shard", 5, "0" * 64)):
        with pytest.raises(
            ShardCorruptError, match=r"lake/shard: found 5 bytes of sha256 .* expected"
        ):
            on_s3.fetch([wrong])
    with pytest.raises(ShardCorruptError, match="lake/absent: found no such file"):
        on_s3.fetch([right, Blob("absent")])
    (path,) = on_s3.fetch([right])
    assert path.read_bytes() == b"right"
    assert on_s3.local("shard") == path


def test_no_bucket_is_named(s3) -> None:
    storage = open_storage("s3://no-such-bucket/lake")
    for attempt in (
        lambda: storage.get("x"),
        lambda: storage.put("x", b""),
        lambda: storage.put_if_absent("x", b""),
        lambda: storage.names("x"),
        lambda: storage.names("x", after="a"),
        lambda: list(storage.files("")),
        lambda: storage.fetch([Blob("x")]),
    ):
        with pytest.raises(StorageError, match="found no bucket 'no-such-bucket'"):
            attempt()


def test_no_credentials_are_named(s3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="found no credentials, expected AWS_ACCESS_KEY_ID"):
        open_storage("s3://bucket/lake").get("x")


def test_no_account_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StorageError, match="expected AZURE_STORAGE_ACCOUNT_NAME"):
        open_storage("az://container/lake")


def test_a_backend_is_one_entry_of_the_table(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend("S3Store", ("AWS_ENDPOINT_URL", "OTHER_ENDPOINT"), "OTHER_KEY")
    monkeypatch.setitem(BACKENDS, "other", backend)
    place = parse_location("OTHER://bucket/lake")
    assert place == Location("other", "bucket", "lake")
    assert place.folder_name({"OTHER_ENDPOINT": "a"}) != place.folder_name({})
    with pytest.raises(ConfigInvalidError, match=r"other://, file:// or memory://"):
        parse_location("http://host/lake")
    storage = open_storage(f"other://{bucket}/lake")
    storage.put("x", b"1")
    assert open_storage(f"s3://{bucket}/lake").get("x") == b"1"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="found no credentials, expected OTHER_KEY"):
        open_storage(f"other://{bucket}/lake").get("x")


@pytest.mark.slow
def test_nobody_at_the_endpoint_is_named(s3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    storage = open_storage("s3://bucket/lake")
    for attempt in (lambda: storage.get("x"), lambda: storage.put_if_absent("x", b"")):
        with pytest.raises(StorageError, match=r"no answer .*expected an object store there"):
            attempt()
