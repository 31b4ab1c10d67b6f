"""Packed sources: the same logs, packed in any way, are the same source."""

from __future__ import annotations

import bz2
import gzip
import random
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.sources.source import find_source

_PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
_LOG = b"episode_id,observation,action,reward\n" + b"e1,0.5,1,1.0\n" * 1000


def _folder(folder: Path) -> Path:
    for name, data in {
        "part-1.csv": _LOG,
        "part-10.csv": b"b",
        "part-9.csv": b"c",
        "more/part-01.csv": b"d",
        "more/part-1.csv": b"e",
        "metadata.json": b"{}",
        "_SUCCESS": b"",
        "__MACOSX/._part-1.csv": b"x",
        ".part-1.csv.crc": b"x",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def _zip(path: Path, folder: Path, prefix: str = "") -> Path:
    members = sorted(p for p in folder.rglob("*") if p.is_file())
    random.Random(0).shuffle(members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            archive.write(member, prefix + member.relative_to(folder).as_posix())
    return path


@pytest.mark.parametrize("prefix", ["", "logs/"])
def test_the_zip_of_a_folder_is_the_folder(tmp_path: Path, prefix: str) -> None:
    plain = find_source([_folder(tmp_path / "logs")])
    zipped = find_source([_zip(tmp_path / "logs.zip", tmp_path / "logs", prefix)])
    assert zipped.content_hash == plain.content_hash
    for one, other in zip(plain.files, zipped.files, strict=True):
        assert (one.relative, one.num_bytes) == (other.relative, other.num_bytes)
        with one.open() as first, other.open() as second:
            assert first.read() == second.read()
        assert one.path.read_bytes() == other.path.read_bytes()
        assert one.head(3) == other.head(3)
    assert zipped.files[-1].name == "logs.zip/part-10.csv"
    assert "_SUCCESS" in zipped.notes[0]
    both = find_source([tmp_path / "logs", tmp_path / "logs.zip"])
    assert both.content_hash == plain.content_hash


@pytest.mark.parametrize("packing", sorted(_PACK))
def test_packed_files_are_what_they_unpack_to(tmp_path: Path, packing: str) -> None:
    plain = _folder(tmp_path / "plain")
    packed = tmp_path / "packed"
    for path in plain.rglob("*"):
        if path.is_file():
            to = packed / path.relative_to(plain).with_name(f"{path.name}.{packing}")
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(_PACK[packing](path.read_bytes()))
    expected, found = find_source([plain]), find_source([packed])
    assert found.content_hash == expected.content_hash
    assert [f.relative for f in found.files] == [f.relative for f in expected.files]
    zipped = find_source([_zip(tmp_path / "packed.zip", packed)])
    assert zipped.content_hash == expected.content_hash
    one = next(f for f in found.files if f.relative == "part-1.csv")
    assert one.name == f"packed/part-1.csv.{packing}"
    assert one.num_bytes == len(_LOG)
    assert one.head(7) == _LOG[:7]
    assert find_format("auto", [one]).name == "csv"


def test_an_archive_in_a_folder_is_as_a_folder_in_it(tmp_path: Path) -> None:
    _folder(tmp_path / "one" / "logs")
    (tmp_path / "two").mkdir()
    _zip(tmp_path / "two" / "logs.zip", tmp_path / "one" / "logs", "logs/")
    first, second = find_source([tmp_path / "one"]), find_source([tmp_path / "two"])
    assert first.content_hash == second.content_hash
    assert [f.relative for f in first.files] == [f.relative for f in second.files]


def test_an_npz_stays_one_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", obs=np.zeros(3), acts=np.zeros(3))
    (file,) = find_source([tmp_path / "a.npz"]).files
    assert file.path == (tmp_path / "a.npz").resolve()
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.write(tmp_path / "a.npz", "a.npz")
    (inside,) = find_source([tmp_path / "b.zip"]).files
    assert inside.sha256 == file.sha256
    with np.load(inside.path) as arrays:
        assert set(arrays) == {"obs", "acts"}


def test_a_file_of_torch_save_stays_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a/data.pkl", "a/byteorder", "a/data/0", "a/version"):
            archive.writestr(name, "x")
    (file,) = find_source([path]).files
    assert file.path == path.resolve()
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.write(path, "a.pt")
    (inside,) = find_source([tmp_path / "b.zip"]).files
    assert inside.sha256 == file.sha256


def test_real_zip_with_litter(shared_data: Path) -> None:
    source = find_source([shared_data / "reagent" / "dqn_workflow.zip"])
    assert len(source.files) == 12
    assert source.files[0].relative.startswith("part-00000")


def _hostile(path: Path, name: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo(name)
        archive.writestr(info, "x")


@pytest.mark.parametrize("name", ["/etc/x.csv", "../x.csv", "a/../../x.csv", "C:\\x.csv", "..\\x"])
def test_paths_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    _hostile(tmp_path / "a.zip", name)
    with pytest.raises(SourceInvalidError, match=r"a\.zip: member .* leads out of the archive"):
        find_source([tmp_path / "a.zip"])


def test_a_member_without_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    _hostile(path, "q.csv")
    path.write_bytes(path.read_bytes().replace(b"q.csv", b"\0.csv"))
    with pytest.raises(SourceInvalidError, match=r"a\.zip: member '': found no name, expected the"):
        find_source([path])


def test_other_hostile_members_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    link = zipfile.ZipInfo("link.csv")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(SourceInvalidError, match="symbolic link"):
        find_source([path])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.csv", "x")
    with pytest.raises(SourceInvalidError, match="compression method 14"):
        find_source([path])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", "x")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.csv", "y")
    with pytest.raises(SourceInvalidError, match=r"'a\.csv' twice"):
        find_source([path])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", "x")
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(SourceInvalidError, match="encrypted"):
        find_source([path])
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as archive:
        archive.write(_zip(tmp_path / "in.zip", _folder(tmp_path / "logs")), "in.zip")
    with pytest.raises(SourceInvalidError, match="zip inside a zip"):
        find_source([tmp_path / "outer.zip"])


def test_torn_and_flipped_bytes_are_refused_and_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(0)
    noise = bytes(rng.randrange(256) for _ in range(3000))
    _folder(tmp_path / "logs")
    packed = {kind: pack(noise) for kind, pack in _PACK.items()}
    packed["zip"] = _zip(tmp_path / "logs.zip", tmp_path / "logs").read_bytes()
    for kind, raw in packed.items():
        path = tmp_path / f"torn.{kind}"
        for cut in (20, len(raw) // 2, len(raw) - 1):
            path.write_bytes(raw[:cut])
            with pytest.raises(SourceInvalidError, match=rf"torn\.{kind}"):
                find_source([path])
        for _ in range(60):
            flipped = bytearray(raw)
            flipped[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            with suppress(SourceInvalidError):
                for file in find_source([path]).files:
                    file.head(10)


def test_a_packed_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"1"))
    (file,) = find_source([path]).files
    file.check_unchanged()
    path.write_bytes(gzip.compress(b"12"))
    with pytest.raises(SourceInvalidError, match="changed while"):
        file.check_unchanged()


_KILLED = """
import os, signal, sys
from replaylake.datastore.interchange.sources.source import find_source
source = find_source([sys.argv[1]])
print(source.files[0].path)
sys.stdout.flush()
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_unpacked_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(_LOG))

    def left(how: str) -> Path:
        command = [sys.executable, "-c", _KILLED, str(path), how]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        return Path(ran.stdout.strip())

    killed = left("kill")
    assert killed.is_file()
    assert killed.suffix == ".csv"
    ended = left("end")
    assert not ended.exists()
    assert not killed.parent.exists()
    assert not any((tmp_path / "temporary").iterdir())
    source = find_source([path])
    own = source.files[0].path
    assert own.read_bytes() == _LOG
    del source
    assert not own.exists()
