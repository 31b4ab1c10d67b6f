from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError, NotFoundError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.storage.locations import (
    Location,
    absolute_lake,
    check_shareable,
    open_storage,
    parse_location,
)
from replaylake.datastore.storage.storage import LocalStorage


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("lake", Path("lake")),
        (Path("/a/lake"), Path("/a/lake")),
        ("s3:odd/but/a/folder", Path("s3:odd/but/a/folder")),
        ("file:///a/my%20lake", Path("/a/my lake")),
        ("FILE://localhost/a", Path("/a")),
        ("s3://bucket", Location("s3", "bucket", "")),
        ("s3://bucket/", Location("s3", "bucket", "")),
        ("S3://bucket/a/b/", Location("s3", "bucket", "a/b")),
        ("gs://bucket/a", Location("gs", "bucket", "a")),
        ("az://container/a", Location("az", "container", "a")),
        ("memory://", Location("memory", "", "")),
        ("memory://name", Location("memory", "name", "")),
        # As people see it in a bucket's listing: nothing is decoded.
        ("s3://b/a%20b/ü é'\"*[1]?#+", Location("s3", "b", "a%20b/ü é'\"*[1]?#+")),
    ],
)
def test_what_a_lake_may_be_called(text: str | Path, place: Path | Location) -> None:
    assert parse_location(text) == place


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a folder or a URL"),
        ("a\0b", "a folder or a URL"),
        ("http://host/lake", "s3://, gs://, az://, file:// or memory://"),
        ("hdfs://host/lake", "s3://, gs://, az://, file:// or memory://"),
        ("s3a://bucket/lake", "s3://, gs://, az://, file:// or memory://"),
        (Path("s3://bucket/lake"), "a Path loses one of its slashes"),
        ("s3://", "s3://BUCKET/PREFIX"),
        ("s3:///lake", "s3://BUCKET/PREFIX"),
        ("s3://bucket/a//b", "without control characters"),
        ("s3://bucket/../b", "without control characters"),
        ("s3://bucket/a/./b", "without control characters"),
        ("s3://bucket/a\nb", "without control characters"),
        ("s3://bucket/a\0b", "a folder or a URL"),
        ("file://host/lake", "file:///FOLDER"),
        ("file:///lake?x=1", "file:///FOLDER"),
        ("file://", "file:///FOLDER"),
    ],
)
def test_what_is_no_lake_is_refused(text: str | Path, said: str) -> None:
    with pytest.raises(ConfigInvalidError, match=r"^lake .*`lake`") as refused:
        open_lake(text, create=True)
    assert said in str(refused.value)


def test_a_file_url_is_its_folder(tmp_path: Path) -> None:
    storage = open_storage((tmp_path / "my lake").as_uri())
    assert isinstance(storage, LocalStorage)
    assert storage.root == tmp_path / "my lake"


def test_absolute_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_lake("lake") == str(tmp_path / "lake")
    assert absolute_lake("s3://b/p/") == "s3://b/p"


def test_the_same_bucket_at_another_endpoint_is_another_lake() -> None:
    place = Location("s3", "My_Bucket", "p")
    names = {
        place.folder_name({}),
        place.folder_name({"AWS_ENDPOINT_URL": "http://a"}),
        place.folder_name({"AWS_ENDPOINT_URL": "http://b"}),
        Location("s3", "My_Bucket", "q").folder_name({}),
    }
    assert len(names) == 4
    assert all(name.startswith("my_bucket-") for name in names)


def test_memory_is_one_lake_a_name_and_of_one_process() -> None:
    lake = open_lake("memory://test-locations", create=True)
    assert open_lake("memory://test-locations").url == lake.url
    with pytest.raises(NotFoundError, match="lake memory://another: found none"):
        open_lake("memory://another")
    with pytest.raises(ConfigInvalidError, match="this process's memory alone"):
        check_shareable(lake.url, "serve")
    check_shareable("s3://bucket/lake", "serve")
    with pytest.raises(NotFoundError, match="no folder of this machine"):
        _ = lake.path
    with pytest.raises(NotFoundError, match="no folder of this machine"):
        _ = lake.dataset("d").path
    assert lake.dataset("d").url == "memory://test-locations/d"


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ExtraMissingError, match=r"replaylake\[remote\]"):
        open_storage("s3://bucket/lake")
    open_storage("a/folder")


@pytest.mark.slow
def test_a_folder_needs_no_obstore(tmp_path: Path) -> None:
    code = """
        import sys
        from replaylake.datastore.lake.lake import open_lake
        open_lake(sys.argv[1], create=True)
        assert "obstore" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "lake")]
    subprocess.run(command, check=True, env={**os.environ})
