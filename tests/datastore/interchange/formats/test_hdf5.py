from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.hdf5.files import Hdf5File, is_hdf5
from replaylake.datastore.interchange.formats.hdf5.writer import Hdf5Writer
from replaylake.datastore.interchange.sources.source import SourceFile, find_source


def _source(path: Path) -> SourceFile:
    return find_source([path]).files[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.hdf5"


def _d4rl(path: Path, num: int = 64) -> Path:
    with h5py.File(path, "w") as file:
        file["observations"] = np.ones((num, 3), np.float32)
        file["actions"] = np.ones((num, 2), np.float32)
        file["rewards"] = np.ones(num)
        file["terminals"] = np.arange(num) % 8 == 7
        file.create_dataset("infos/qpos", data=np.ones((num, 2)), compression="gzip")
        file["metadata/algorithm"] = "SAC"
    return path


def _d3rlpy(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        for i in range(4):
            file[f"observations_{i}"] = np.ones((9, 3), np.float32)
            file[f"actions_{i}"] = np.ones((9, 1), np.int64)
            file[f"rewards_{i}"] = np.ones((9, 1), np.float32)
            file[f"terminated_{i}"] = i % 2 == 0
        file["columns"] = ["observations", "actions", "rewards", "terminated"]
        file["num_episodes"] = 4
        file["version"] = "2.1"
    return path


def _read(path: Path, name: str = "auto") -> int:
    files = find_source([path]).files
    return len(list(find_format(name, files).read(files, ReadOptions())))


def _refused(path: Path, match: str, name: str = "d4rl") -> None:
    with pytest.raises(SourceInvalidError, match=match):
        _read(path, name)


def test_rows_are_read_by_blocks_in_native_types(path: Path) -> None:
    values = np.arange(24, dtype=">f4").reshape(8, 3)
    with h5py.File(path, "w") as file:
        file["big_endian"] = values
        file["packed"] = values.astype("<i2")
        file["flags"] = values[:, 0] > 6
        file["texts"] = ["a", "ä", ""] * 2
        file["name"] = "SAC"
        file["deep/er/one"] = 3
    with Hdf5File(_source(path)) as opened:
        array = opened.array("big_endian")
        assert (array.shape, array.dtype, array.row_bytes) == ((8, 3), np.float32, 12)
        np.testing.assert_array_equal(array.read(2, 5), values[2:5].astype("f4"))
        assert array.read(8, 9).shape == (0, 3)
        assert opened.array("packed").read().dtype == np.int16
        assert opened.array("flags").read().tolist() == [False] * 3 + [True] * 5
        assert opened.array("texts").read(1, 4).tolist() == ["ä", "", "a"]
        assert opened.array("name").value() == "SAC"
        assert opened.array("deep/er/one").value() == 3
        assert opened.arrays("deep") == ["deep/er/one"]
        assert opened.has_path("deep/er")
        assert not opened.has_path("deep/other")
        with pytest.raises(SourceInvalidError, match="'deep' is no dataset"):
            opened.array("deep")


def test_what_is_written_is_read(path: Path) -> None:
    blocks = [np.full((n, 200), n, np.float32) for n in (1, 4000, 3000, 7)]
    with Hdf5Writer(path) as writer:
        for block in blocks:
            writer.append("rows", block)
            writer.append("names", np.asarray([str(len(block))] * len(block), object))
        writer.append("gone", blocks[0])
        writer.drop("gone")
        assert writer.num_rows == {"rows": 7008, "names": 7008}
    with Hdf5File(_source(path)) as opened:
        assert opened.names() == ["names", "rows"]
        np.testing.assert_array_equal(opened.array("rows").read(), np.concatenate(blocks))
        assert opened.array("names").read(0, 3).tolist() == ["1", "4000", "4000"]


def _external_link(file: Any, other: Path) -> None:
    del file["rewards"]
    file["rewards"] = h5py.ExternalLink(other, "rewards")


def _soft_link(file: Any, other: Path) -> None:
    file["elsewhere"] = h5py.ExternalLink(other, "/")
    del file["rewards"]
    file["rewards"] = h5py.SoftLink("/elsewhere/rewards")


def _external_storage(file: Any, other: Path) -> None:
    del file["rewards"]
    file.create_dataset("rewards", (64,), np.float64, external=[(str(other), 0, 512)])


def _virtual(file: Any, other: Path) -> None:
    del file["rewards"]
    layout = h5py.VirtualLayout((64,), np.float64)
    layout[:] = h5py.VirtualSource(str(other), "rewards", (64,))
    file.create_virtual_dataset("rewards", layout)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (_external_link, "is a link to another place"),
        (_soft_link, "is a link to another place"),
        (_external_storage, "keeps its data in other files"),
        (_virtual, "keeps its data in other files"),
    ],
)
def test_data_of_other_files_is_not_followed(
    tmp_path: Path, path: Path, plant: Callable[[Any, Path], None], found: str
) -> None:
    other = _d4rl(tmp_path / "secret.hdf5")
    with h5py.File(_d4rl(path), "a") as file:
        plant(file, other)
    _refused(path, found)


class _Planted:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('executed')",))


def test_objects_and_references_are_not_read(path: Path) -> None:
    with h5py.File(_d4rl(path), "a") as file:
        file["infos/pickled"] = np.void(pickle.dumps(_Planted()))
        file["infos/pickles"] = np.asarray([np.void(pickle.dumps(_Planted()))] * 64)
        file.create_dataset("infos/where", (64,), h5py.ref_dtype)
        file.create_dataset("infos/lists", (64,), h5py.vlen_dtype(np.float32))
        file.create_dataset("infos/pairs", (64,), np.dtype([("a", "f4"), ("b", "i4")]))
    files = find_source([path]).files
    reading = find_format("d4rl", files).read(files, ReadOptions())
    assert len(list(reading)) == 8
    assert [*reading.extras] == ["infos_qpos"]
    notes = "\n".join(reading.notes)
    assert all(f"infos/{n}" in notes for n in ("pickled", "pickles", "where", "lists", "pairs"))
    with h5py.File(path, "a") as file:
        del file["actions"]
        file["actions"] = np.asarray([np.void(pickle.dumps(_Planted()))] * 64)
    _refused(path, r"actions is \|V\d+ of shape \[64\]")


def test_filters_that_are_plugins_are_refused(path: Path) -> None:
    with h5py.File(_d4rl(path), "a") as file:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk((64,))
        plan.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)
        space = h5py.h5s.create_simple((64,))
        del file["rewards"]
        h5py.h5d.create(file.id, b"rewards", h5py.h5t.NATIVE_DOUBLE, space, plan)
    _refused(path, "packed by the HDF5 filter 32015")


def test_a_group_within_itself_is_walked_once(path: Path) -> None:
    with h5py.File(_d4rl(path), "a") as file:
        file["infos/again"] = file["infos"]
        file["infos/root"] = file["/"]
    with Hdf5File(_source(path)) as opened:
        assert len(opened.arrays()) == 6
    assert _read(path) == 8


def test_bombs_are_refused_by_what_they_declare(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name, shape in (("observations", (10**12, 3)), ("actions", (10**12, 1))):
            file.create_dataset(name, shape, np.float32, fillvalue=1.0)
        file.create_dataset("rewards", (10**12,), np.float32)
        file.create_dataset("terminals", (10**12,), bool)
    assert path.stat().st_size < 20_000
    _refused(path, "stored bytes unpack to")


def test_packed_zeros_are_refused_beside_honest_data(path: Path) -> None:
    # 2 GiB of zeros that were never written, and as many that gzip made small.
    with h5py.File(_d4rl(path, 4096), "a") as file:
        shape = (4096, 1 << 17)
        file.create_dataset("infos/never", shape, np.float32, chunks=(64, 1 << 12))
    _refused(path, "dataset 'infos/never'.*stored bytes unpack to")
    with h5py.File(_d4rl(path, 4096), "a") as file:
        zeros = np.zeros((8, 1 << 17), np.float32)
        packed = file.create_dataset(
            "infos/zeros", shape, np.float32, chunks=zeros.shape, compression="gzip"
        )
        packed[:8] = zeros
    _refused(path, "dataset 'infos/zeros'.*stored bytes unpack to")


def _damages(raw: bytes, seed: int) -> Iterator[bytes]:
    for i in range(1, 24):
        yield raw[: len(raw) * i // 24]
    rng = np.random.default_rng(seed)
    for i in range(150):
        changed = bytearray(raw)
        # HDF5's own structures are near the front of these files.
        at = int(rng.integers(4096 if i % 3 else len(raw)))
        changed[at] = int(rng.integers(256)) if i % 2 else changed[at] ^ (1 << int(rng.integers(8)))
        yield bytes(changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d4rl", "d3rlpy"])
def test_torn_and_altered_files_are_refused_or_read(path: Path, name: str) -> None:
    raw = (_d4rl(path) if name == "d4rl" else _d3rlpy(path)).read_bytes()
    assert _read(path) in (4, 8)
    num_refused = 0
    for damaged in _damages(raw, seed=5):
        path.write_bytes(damaged)
        try:
            assert _read(path, name) >= 0
        except SourceInvalidError:
            num_refused += 1
    assert num_refused >= 23
    with contextlib.suppress(SourceInvalidError):
        _read(path)


def test_a_file_is_known_by_its_first_bytes(path: Path) -> None:
    assert is_hdf5(_source(_d4rl(path)))
    path.write_bytes(path.read_bytes()[:900])
    assert is_hdf5(_source(path))
    _refused(path, "could not be read to its end", "auto")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    assert not is_hdf5(_source(path))


def test_heaps_that_libhdf5_would_walk_for_ever_are_refused(path: Path) -> None:
    with h5py.File(_d4rl(path), "a") as file:
        file["infos/words"] = ["abc"] * 64
    raw = bytearray(path.read_bytes())
    heap = raw.index(b"GCOL\x01")
    at = heap + 16
    while index := int.from_bytes(raw[at : at + 2], "little"):
        at += 16 + -(-int.from_bytes(raw[at + 8 : at + 16], "little") // 8) * 8
    assert index == 0
    assert _read(path) == 8
    # Its free space, whose size is counted with its header, has none.
    raw[at + 8 : at + 16] = bytes(8)
    path.write_bytes(raw)
    _refused(path, "has an object of 0 bytes")
    raw[heap + 8 : heap + 16] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(raw)
    _refused(path, "has 1099511627776 bytes declared")


@pytest.mark.parametrize("limit", [1_000, 200_000, 3_000_000])
def test_a_full_disk_is_an_error_and_no_crash(tmp_path: Path, limit: int) -> None:
    # In a process of its own: HDF5 dies at its end if it could not write its caches.
    program = f"""
import resource
import numpy as np
from pathlib import Path
from replaylake.datastore.errors import StorageError
from replaylake.datastore.interchange.formats.hdf5.writer import Hdf5Writer
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    with Hdf5Writer(Path({str(tmp_path / "x.h5")!r})) as writer:
        for i in range(20):
            writer.append("a", np.random.default_rng(i).random((10_000, 4)))
            writer.write(f"b_{{i}}", np.zeros(1000))
except StorageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "x.h5: could not be written" in done.stdout
    assert "File too large" in done.stdout
