from __future__ import annotations

import bz2
import gzip
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.sources.compression import refuse_bomb
from replaylake.datastore.interchange.sources.source import find_source

_BLOCK = 64 << 20
_PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


def test_both_limits_have_to_be_passed() -> None:
    refuse_bomb("a", 1 << 30, 1)
    refuse_bomb("a", 20 << 30, 1 << 30)
    with pytest.raises(
        SourceInvalidError, match=r"a: 10 stored bytes unpack to 1,073,741,825 or more"
    ):
        refuse_bomb("a", (1 << 30) + 1, 10)


@pytest.mark.parametrize(
    "packing", [*(pytest.param(p, marks=pytest.mark.slow) for p in ("bz2", "gz")), "zst"]
)
def test_ten_gigabytes_of_zeros_are_refused_while_they_unpack(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"bomb.csv.{packing}"
    # One after the other, as these formats allow: to make it takes no ten gigabytes either.
    path.write_bytes(_PACK[packing](bytes(_BLOCK)) * 160)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SourceInvalidError, match=rf"bomb\.csv\.{packing}: .* unpack to 1,07"):
        find_source([path])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_zip_of_ten_gigabytes_is_refused_by_what_it_declares(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("0.csv", bytes(4 << 20))
    raw = bytearray(path.read_bytes())
    directory = raw.index(b"PK\x01\x02")
    struct.pack_into("<I", raw, directory + 24, (4 << 30) - 2)
    path.write_bytes(raw)
    with pytest.raises(SourceInvalidError, match=r"bomb\.zip/0\.csv: .* unpack to 4,294,967,294"):
        find_source([path])


def test_members_that_are_each_small_count_together(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0.csv", bytes(_BLOCK))
        info = archive.infolist()[0]
        # The same bytes under many names: the directory is all that grows.
        for number in range(1, 40):
            again = zipfile.ZipInfo(f"{number}.csv")
            for name in ("compress_size", "file_size", "CRC", "header_offset", "compress_type"):
                setattr(again, name, getattr(info, name))
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
    with pytest.raises(SourceInvalidError, match=r"bomb\.zip: .* unpack to 2,684,354,560"):
        find_source([path])


def test_a_member_that_holds_more_than_it_declares_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "liar.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.csv", bytes(4 << 20))
    raw = bytearray(path.read_bytes())
    struct.pack_into("<I", raw, raw.index(b"PK\x01\x02") + 24, 100)
    path.write_bytes(raw)
    with pytest.raises(SourceInvalidError, match=r"liar\.zip/a\.csv: could not be read to its end"):
        find_source([path])
