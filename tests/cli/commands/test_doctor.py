from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.cli.installation import Package, extra_of, find_extras, find_packages
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.storage.storage import LocalStorage


@pytest.fixture
def dataset(lake: Path) -> Path:
    store = open_lake(lake, create=True)
    episode = Episode("a", np.zeros((2, 1), np.float32), np.zeros(2, np.int64), np.ones(2))
    store.dataset("walk").create(Box((1,)), Discrete(2))
    store.dataset("walk").append([episode])
    return lake


def checks(ran: Any) -> dict[str, tuple[str, str]]:
    return {check["check"]: (check["result"], check["found"]) for check in ran.json["checks"]}


def test_a_lake_that_is_well(run: Any, dataset: Path) -> None:
    before = {path for path in dataset.rglob("*") if path.is_file()}
    ran = run("doctor", "--port", "1", "--host", "127.0.0.1", "--json")
    found = checks(ran)
    assert ran.code == 0, ran
    assert found["lake"] == ("ok", f"{dataset}, 1 dataset")
    assert found["packages"][0] == found["storage"][0] == found["clock"][0] == "ok"
    assert found["disk of the lake"][0] in ("ok", "note")
    assert {path for path in dataset.rglob("*") if path.is_file()} == before
    assert run("doctor").out.endswith("\nno check failed\n")


def test_no_lake_yet_is_a_note_and_none_is_made(run: Any, lake: Path) -> None:
    ran = run("doctor", "--json")
    assert ran.code == 0
    assert checks(ran)["lake"][0] == "note"
    assert not lake.exists()


def test_a_port_in_use_is_a_note(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result, found = checks(run("doctor", "--port", port, "--json"))["port"]
    assert (result, found.startswith(f"127.0.0.1:{port} cannot be listened on: ")) == ("note", True)


def test_a_storage_that_takes_a_name_twice_fails(
    run: Any, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(self: LocalStorage, path: str, data: bytes, *, private: bool = False) -> bool:
        self.put(path, data)
        return True

    monkeypatch.setattr(LocalStorage, "put_if_absent", put)
    ran = run("doctor", "--json")
    assert ran.code == 3
    result, found = checks(ran)["storage"]
    assert (result, "a name was taken twice" in found) == ("failed", True)
    assert not ran.json["ok"]
    assert list((dataset / "_lake/check").iterdir()) == []


def test_a_clock_that_is_off_fails(
    run: Any, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalStorage.put_if_absent

    def put_late(self: LocalStorage, path: str, data: bytes, *, private: bool = False) -> bool:
        is_new = put(self, path, data, private=private)
        if is_new:
            now = self.local(path).stat().st_mtime
            os.utime(self.local(path), (now + 3600, now + 3600))
        return is_new

    monkeypatch.setattr(LocalStorage, "put_if_absent", put_late)
    result, found = checks(run("doctor", "--json"))["clock"]
    assert result == "failed"
    assert found.startswith("3600 s behind the storage's")


def test_a_full_disk_fails(run: Any, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(dataset)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    ran = run("doctor", "--json")
    assert ran.code == 3
    assert checks(ran)["disk of the lake"][0] == "failed"


def test_a_lake_that_cannot_be_opened_fails(run: Any) -> None:
    ran = run("doctor", "--lake", "ftp://somewhere/lake", "--json")
    assert ran.code == 3
    assert "s3://" in checks(ran)["lake"][1]


def test_a_lake_on_an_object_store(run: Any, bucket: str) -> None:
    open_lake(f"s3://{bucket}/lake", create=True)
    found = checks(run("doctor", "--lake", f"s3://{bucket}/lake", "--json"))
    assert found["storage"][0] == found["clock"][0] == "ok"
    assert found["lake"] == ("ok", f"s3://{bucket}/lake, 0 datasets")


def test_packages_and_their_bounds() -> None:
    assert "duckdb" in {package.name for package in find_packages()}
    # `offline` names `learn`, which names `fast`.
    assert {"d3rlpy", "torch", "numba"} <= {package.name for package in find_packages("offline")}
    assert not {"all", "test"} & {*find_extras()}
    assert extra_of("prometheus_client") == "serve"
    assert extra_of("nonsense") is None
    assert Package("x", "1.9.0", ">=1.10").is_outside_bounds
    assert not Package("x", "2.13.0+cpu", ">=2.5").is_outside_bounds
    assert Package("x", "1.0.1", "==1.0.0").is_outside_bounds
    assert not Package("x", None, ">=1").is_outside_bounds
