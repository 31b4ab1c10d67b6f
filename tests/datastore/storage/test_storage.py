from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.errors import InvalidNameError, StorageError
from replaylake.datastore.storage.storage import LocalStorage


def test_put_replaces_and_put_if_absent_does_not(storage: LocalStorage) -> None:
    storage.put("a/b", b"one")
    storage.put("a/b", b"two")
    assert storage.get("a/b") == b"two"
    assert storage.put_if_absent("a/b", b"three") is False
    assert storage.put_if_absent("a/c", b"three") is True
    assert storage.get("a/b") == b"two"
    assert storage.names("a") == ["b", "c"]


def test_what_is_not_there_is_none_or_empty(storage: LocalStorage) -> None:
    assert storage.get("nothing") is None
    assert storage.names("nothing") == []
    storage.put("file", b"x")
    assert storage.get("file/below") is None
    assert storage.names("file") == []


def test_the_names_of_all_new_folders_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = [], os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    LocalStorage(tmp_path / "a" / "b" / "lake").put("d/x", b"1")
    new = [
        tmp_path,
        tmp_path / "a",
        tmp_path / "a/b",
        tmp_path / "a/b/lake",
        tmp_path / "a/b/lake/d",
    ]
    assert {str(folder) for folder in new} <= {*synced}


def test_no_temporary_file_is_left(storage: LocalStorage) -> None:
    storage.put("a", b"1")
    storage.put_if_absent("b", b"2")
    storage.put_if_absent("b", b"3")
    assert storage.names("_lake/tmp") == []


def test_private_files_are_for_their_owner_alone(storage: LocalStorage) -> None:
    storage.put_if_absent("key", b"secret", private=True)
    assert stat.S_IMODE(storage.local("key").stat().st_mode) == 0o600


class Calls:
    """Records the system calls of interest, with what they were made on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}
        for name in ("open", "write", "fsync", "link", "replace"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    def _recording(self, name: str, call: Any) -> Any:
        def recording(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if name == "open":
                self._names[result] = os.path.basename(args[0])
            else:
                target = self._names[args[0]] if isinstance(args[0], int) else str(args[1])
                self.made.append((name, os.path.basename(target)))
            return result

        return recording


@pytest.mark.parametrize(("operation", "naming"), [("put", "replace"), ("put_if_absent", "link")])
def test_a_blob_is_synced_before_its_name_and_its_name_before_we_return(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, operation: str, naming: str
) -> None:
    storage.put("folder/other", b"makes the folders")
    calls = Calls(monkeypatch)
    getattr(storage, operation)("folder/blob", b"bytes")
    temporary = calls.made[0][1]
    assert calls.made == [
        ("write", temporary),
        ("fsync", temporary),
        (naming, "blob"),
        ("fsync", "folder"),
    ]


def test_a_new_folder_is_synced_into_its_parent(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("warm", b"")
    calls = Calls(monkeypatch)
    storage.put("one/two/blob", b"bytes")
    folders = [name for call, name in calls.made if call == "fsync"][1:]
    assert folders == [storage.root.name, "one", "two"]


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_failing_call_leaves_no_name_and_no_temporary(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    storage.put("folder/other", b"makes the folders")

    def failing(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with pytest.raises(StorageError, match=r"blob: No space left on device.*Free disk space"):
            storage.put_if_absent("folder/blob", b"bytes")
    assert storage.get("folder/blob") is None
    assert storage.names("_lake/tmp") == []
    assert storage.put_if_absent("folder/blob", b"bytes") is True


def _killed_before(call: str, root: Path) -> None:
    setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    LocalStorage(root).put_if_absent("folder/blob", b"bytes")


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_killed_before_the_name_nothing_is_visible(storage: LocalStorage, call: str) -> None:
    storage.put("folder/other", b"makes the folders")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_killed_before, args=(call, storage.root))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert storage.names("folder") == ["other"]
    assert storage.names("") == ["_lake", "folder"]
    assert storage.put_if_absent("folder/blob", b"again") is True
    assert storage.get("folder/blob") == b"again"


def test_a_link_out_of_the_lake_is_refused(storage: LocalStorage, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"x")
    storage.put("warm", b"")
    (storage.root / "linked").symlink_to(outside)
    for attempt in (
        lambda: storage.get("linked/secret"),
        lambda: storage.put("linked/new", b""),
        lambda: storage.put_if_absent("linked/new", b""),
        lambda: storage.names("linked/"),
        lambda: storage.local("linked/secret"),
        lambda: storage.local("../outside/secret"),
        lambda: storage.local(str(outside / "secret")),
    ):
        with pytest.raises(InvalidNameError, match="inside of the lake"):
            attempt()
    assert os.listdir(outside) == ["secret"]


def test_a_lake_may_itself_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage = LocalStorage(tmp_path / "link")
    storage.put("a/b", b"x")
    assert LocalStorage(tmp_path / "real").get("a/b") == b"x"


def test_no_module_outside_of_storage_asks_which_storage_it_has() -> None:
    root = Path(__file__).parents[3]
    modules = [
        module
        for stage in ("cli", "datastore", "offline", "online", "serve")
        for module in (root / stage).rglob("*.py")
        if not module.is_relative_to(root / "datastore" / "storage")
    ]
    assert len(modules) > 100
    for module in modules:
        text = module.read_text(encoding="utf-8")
        if "LocalStorage" not in text and "ObjectStorage" not in text:
            continue
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imports for alias in node.names}
        assert not names & {"LocalStorage", "ObjectStorage"}, module
