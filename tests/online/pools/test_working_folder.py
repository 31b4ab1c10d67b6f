import os
import zipfile

import pytest

from replaylake.datastore.errors import ConfigInvalidError, StorageError
from replaylake.datastore.lake.lake import open_lake
from replaylake.online.pools.cluster import IGNORE_FILE, pack_code


def write(folder, files):
    for name, size in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


def test_code_travels_and_nothing_else(tmp_path):
    code = {"my_env.py": 10, "rules/__init__.py": 0, "rules/levels/map.json": 20, "README": 3}
    rest = {
        ".git/HEAD": 9,
        ".secret": 9,
        "venv/pyvenv.cfg": 9,
        "venv/lib/huge.py": 9,
        "rules/__pycache__/a.pyc": 9,
        "logs/old.parquet": 9,
        "notes/private.txt": 9,
        "notes/b/c.py": 9,
        "big/kept_here.py": 9,
    }
    write(tmp_path, {**code, **rest})
    (tmp_path / IGNORE_FILE).write_text("# mine\nnotes/\n\nbig/kept_*.py\n", encoding="utf-8")
    open_lake(tmp_path / "runs" / "lake", create=True)
    write(tmp_path / "runs" / "lake", {"toys/part.py": 9})
    write(tmp_path, {"_lake/runs/a.json": 9, "toys/_delta_log/0.json": 9, "toys/b.py": 9})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pack_code(tmp_path) as archive:
        with zipfile.ZipFile(archive) as found:
            sizes = {info.filename: info.file_size for info in found.infolist()}
        assert sizes == code
        folder = archive.parent
    assert not folder.exists()


def test_too_much_is_refused_with_what_is_largest(tmp_path):
    write(tmp_path, {"a.py": 50, "maps/b.bin": 700, "c.bin": 300, "d.txt": 1})
    with (
        pytest.raises(ConfigInvalidError, match=r"largest are c.bin .*a.py.*\.rayignore"),
        pack_code(tmp_path, most_bytes=349),
    ):
        pass
    with pack_code(tmp_path, most_bytes=1051) as archive:
        assert archive.stat().st_size < 1000


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(StorageError, match="No such file"), pack_code(tmp_path / "gone"):
        pass
