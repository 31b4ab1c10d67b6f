from __future__ import annotations

import hashlib
import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    FormatTooNewError,
    InvalidNameError,
    LogCorruptError,
    NotFoundError,
    StorageError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.storage.log.state import FORMAT_VERSION
from replaylake.datastore.version import VERSION

Make = Callable[..., Episode]


def newer(log: Path) -> None:
    """Rewrite version 0 as a later ReplayLake would have written it."""
    path = log / f"{0:020d}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        action.get("commitInfo", {}).pop("sha256", None)
        if "metaData" in action:
            configuration = action["metaData"]["configuration"]
            assert configuration["replaylake.format_version"] == "1"
            assert configuration["replaylake.written_by"] == VERSION
            configuration["replaylake.format_version"] = str(FORMAT_VERSION + 1)
            configuration["replaylake.written_by"] = "7.1.0"
    path.write_text("".join(json.dumps(action) + "\n" for action in actions))


def test_handles_say_what_they_are(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a")])
    assert repr(lake) == f"Lake('{lake.path}')"
    assert repr(dataset) == f"Dataset('{lake.path}/d')"
    assert repr(dataset.snapshot()) == "Snapshot('d@1')"


def test_a_lake_is_made_once_and_opened_again(tmp_path: Path, make_episode: Make) -> None:
    lake = open_lake(tmp_path / "x" / "lake", create=True)
    lake.dataset("d").append([make_episode()])
    for again in (open_lake(lake.path), open_lake(str(lake.path), create=True)):
        assert again.datasets() == ["d"]
        assert again.path == lake.path


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, lambda path: path.write_text("")])
def test_what_is_no_lake(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "lake"
    make(path)
    with pytest.raises(
        NotFoundError, match=r"lake: found none there. `replaylake ingest` makes one"
    ):
        open_lake(path)
    assert not path.is_dir() or list(path.iterdir()) == []


def test_a_file_cannot_become_a_lake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="expected to read or write"):
        open_lake(tmp_path / "file", create=True)
    assert (tmp_path / "file").read_text() == "x"


def test_a_newer_lake_is_refused_with_the_version_needed(lake: Lake) -> None:
    newer(lake.path / "_lake" / "_delta_log")
    with pytest.raises(
        FormatTooNewError,
        match=rf"_lake/_delta_log: found format version {FORMAT_VERSION + 1}, expected "
        rf"at most {FORMAT_VERSION}. Install ReplayLake 7\.1\.0 or later",
    ):
        open_lake(lake.path)


def test_a_newer_dataset_is_refused_alone(lake: Lake, make_episode: Make) -> None:
    for name in ("old", "new"):
        lake.dataset(name).append([make_episode()])
    newer(lake.path / "new" / "_delta_log")
    opened = open_lake(lake.path)
    assert opened.sql("SELECT count(*) AS n FROM old.steps")["n"].to_pylist() == [3]
    for use in (
        lambda: opened.dataset("new").snapshot(),
        lambda: opened.dataset("new").append([make_episode()]),
        lambda: opened.sql("SELECT * FROM new.steps"),
    ):
        with pytest.raises(
            FormatTooNewError, match=r"new/_delta_log: .*ReplayLake 7\.1\.0 or later"
        ):
            use()


def test_a_table_that_needs_another_delta_reader_is_refused(lake: Lake, make_episode: Make) -> None:
    lake.dataset("d").append([make_episode()])
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors"]}
    path = lake.path / "d" / "_delta_log" / f"{2:020d}.json"
    path.write_text(json.dumps({"protocol": protocol}) + "\n")
    with pytest.raises(FormatTooNewError, match="d/_delta_log: found Delta reader version 3"):
        open_lake(lake.path).dataset("d").snapshot()


def test_a_table_of_another_engine_is_refused(lake: Lake) -> None:
    deltalake.write_deltalake(str(lake.path / "theirs"), pa.table({"x": [1]}))
    with pytest.raises(LogCorruptError, match="another engine made it"):
        lake.dataset("theirs").snapshot()


def test_datasets_are_listed_by_name(lake: Lake, make_episode: Make) -> None:
    for name in ("b", "a"):
        lake.dataset(name).append([make_episode()])
    lake.dataset("never")
    (lake.path / "empty").mkdir()
    (lake.path / "Notes.txt").write_text("")
    assert lake.datasets() == ["a", "b"]
    assert lake.dataset("a") is lake.dataset("a")


def test_a_snapshot_by_name(lake: Lake, make_episode: Callable[..., Episode]) -> None:
    lake.dataset("d").append([make_episode()])
    found = [lake.snapshot(text) for text in ("d", "d@1", "d@0")]
    assert [(s.dataset, s.version, s.num_steps) for s in found] == [
        ("d", 1, 3),
        ("d", 1, 3),
        ("d", 0, 0),
    ]
    with pytest.raises(
        NotFoundError, match=r"^dataset 'd': found no version 12, expected 0\.\.1\."
    ):
        lake.snapshot("d@12")
    with pytest.raises(NotFoundError, match="dataset 'absent': not in this lake"):
        lake.snapshot("absent@1")
    with pytest.raises(NotFoundError, match="tag d@x: found none of that name, expected a tag"):
        lake.snapshot("d@x")


@pytest.mark.parametrize(
    "text", ["d@", "d@X", "d@a..b", "d@-1", "d@1@2", "d@1.0", "d@²", "D", "", "@1"]
)
def test_a_snapshot_s_name_is_refused(lake: Lake, text: str) -> None:
    with pytest.raises(InvalidNameError, match="dataset"):
        lake.snapshot(text)


def test_a_key_is_made_only_when_asked_for(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match="found no signing key, expected one"):
        lake.signing_key(create=False)
    key = lake.signing_key()
    assert lake.signing_key(create=False) == key


def test_the_signing_key_is_made_once(lake: Lake) -> None:
    key = lake.signing_key()
    assert len(key) == 32
    assert open_lake(lake.path).signing_key() == key
    path = lake.path / "_lake" / "keys" / "signing"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"short")
    with pytest.raises(StorageError, match="found 5 bytes, expected the 32"):
        lake.signing_key()


def test_the_lake_s_own_log_is_a_delta_table(lake: Lake) -> None:
    lake.registry.record_run("r", {"status": "done"})
    assert deltalake.DeltaTable(str(lake.path / "_lake")).version() == 1


def test_what_a_lake_imports() -> None:
    code = (
        "import sys, replaylake.datastore.lake.lake\n"
        "heavy = {'torch', 'ray', 'd3rlpy', 'bentoml', 'gymnasium', 'pandas'}\n"
        "print(*sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_checksum_of_a_commit_covers_its_first_line_too(lake: Lake) -> None:
    data = (lake.path / "_lake" / "_delta_log" / f"{0:020d}.json").read_bytes()
    head = b'{"commitInfo":{"sha256":"'
    assert data.startswith(head)
    digest, body = data[len(head) : len(head) + 64], data[len(head) + 64 :]
    assert hashlib.sha256(body).hexdigest().encode() == digest
