"""Working folder: the user's code as it is sent to the nodes of a Ray cluster.

What travels is the current folder without what is hidden, installed, derived or data; Ray unpacks
it on each node as the working folder of its processes, from which Python imports.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ConfigInvalid, StorageFailed

# A tenth of what Ray takes: what is larger is no code, and each node would wait for it.
MOST_BYTES: Final = 50 << 20
# One pattern a line, of a name or of a path from the folder; `#` begins a comment. Ray's name.
IGNORE_FILE: Final = ".rayignore"
_DERIVED: Final = ("__pycache__", "node_modules", "*.egg-info", "_lake", "_delta_log")
_DATA: Final = (
    "*.parquet", "*.arrow", "*.h5", "*.hdf5", "*.npz", "*.safetensors", "*.pt", "*.ckpt", "*.mp4",
)  # fmt: skip
# Of a lake, a dataset and a virtual environment.
_MARKS: Final = ("_lake", "_delta_log", "pyvenv.cfg")


@contextmanager
def packed(folder: Path, most_bytes: int = MOST_BYTES) -> Iterator[Path]:
    """Yield a zip file of what travels of a folder; it is removed with the block.

    Raises: ConfigInvalid naming the largest files where it is more than `most_bytes` before
    compression; StorageFailed where it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="replaylake-code-") as temporary:
        target = Path(temporary) / "code.zip"
        with _reported(folder):
            _pack(folder, target, most_bytes)
        yield target


def _pack(folder: Path, target: Path, most_bytes: int) -> None:
    sizes: dict[str, int] = {}
    total = 0
    for path in _files(folder):
        sizes[path] = (folder / path).stat().st_size
        # Found out before everything was looked at: the folder may be somebody's home.
        if (total := total + sizes[path]) > most_bytes:
            raise _too_large(folder, sizes, most_bytes)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in sizes:
            archive.write(folder / path, path)


def _files(folder: Path) -> Iterator[str]:
    """Yield the files that travel, as paths from the folder, in order."""
    patterns = (*_DERIVED, *_DATA, *_ignored(folder / IGNORE_FILE))
    for parent, folders, names in os.walk(folder, onerror=_raise):
        at = os.path.relpath(parent, folder)
        folders[:] = sorted(
            name
            for name in folders
            if _travels(os.path.normpath(os.path.join(at, name)), patterns)
            and not any(os.path.exists(os.path.join(parent, name, mark)) for mark in _MARKS)
        )
        for name in sorted(names):
            path = os.path.normpath(os.path.join(at, name))
            # Neither pipes and sockets nor links that lead nowhere.
            if _travels(path, patterns) and os.path.isfile(os.path.join(parent, name)):
                yield path


def _raise(error: OSError) -> None:
    raise error


def _travels(path: str, patterns: tuple[str, ...]) -> bool:
    name = os.path.basename(path)
    ignored = any(fnmatch(name, one) or fnmatch(path, one) for one in patterns)
    return not name.startswith(".") and not ignored


def _ignored(file: Path) -> list[str]:
    if not file.is_file():
        return []
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return [line.strip("/") for line in lines if line and not line.startswith("#")]


@contextmanager
def _reported(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"{folder}: {error.strerror or error} ({error.filename}), expected to send its code to "
            f"the nodes. Mend the permission, or name it in {IGNORE_FILE}."
        ) from error


def _too_large(folder: Path, sizes: dict[str, int], most_bytes: int) -> ConfigInvalid:
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    listed = ", ".join(f"{path} ({sizes[path] / 1e6:.1f} MB)" for path in largest)
    return ConfigInvalid(
        f"{folder}: found more than {most_bytes / 1e6:.0f} MB to send to the nodes of --address, "
        f"of which the largest are {listed}, expected the environment's code alone. Name what "
        f"nodes do not need in {IGNORE_FILE}, or start from the folder that holds the code."
    )
