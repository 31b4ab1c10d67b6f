"""Detection: which format a source is, from its content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.catalog import FORMATS
from replaylake.datastore.interchange.formats.format import Format
from replaylake.datastore.interchange.formats.hdf5.files import Hdf5File
from replaylake.datastore.interchange.formats.npz.arrays import npz_arrays
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import format_names

AUTO: Final = "auto"

_TEXT: Final = "text"
_KINDS: Final[dict[bytes, str]] = {
    b"PAR1": "Parquet",
    b"\x89HDF": "HDF5",
    b"ARROW1": "Arrow",
    b"PK\x03\x04": "npz",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}
_PICKLE: Final = (
    "Reading a pickle runs what is in it, so none is read: load it where you trust it, and save "
    "its arrays as npz or HDF5, or its rows as Parquet or JSON lines."
)
_MAP: Final = (
    "If it has a row a step, say which is which: `format` {}, `mapping` observation=NAME ..."
)
# By the first dataset's path.
_LAYOUTS: Final = {
    "data/demo_": "It is laid out as robomimic's and robosuite's files are, a group a "
    "demonstration, which are not read: write each as an episode of D4RL's or Minari's layout.",
    "observations/": "It is laid out as an episode of ACT (ALOHA), a file each, which are not "
    "read: convert the dataset with LeRobot, whose format is.",
}


def find_format(name: str, files: Sequence[SourceFile]) -> Format:
    """Return the format called `name`, or for `auto` the one that the content shows.

    Raises: ConfigInvalidError on an unknown name, SourceInvalidError if no format recognizes the
    files, or they are of several kinds.
    """
    names = [known.name for known in FORMATS]
    if name != AUTO:
        if name not in names:
            raise ConfigInvalidError(
                f"format: found {name!r}, expected {AUTO}, {', '.join(sorted(names))}.",
                parameter="format",
            )
        return next(known for known in FORMATS if known.name == name)
    for known in FORMATS:
        if known.is_folder and known.recognizes(files):
            return known
    _refuse_mixed(files)
    for known in FORMATS:
        if not known.is_folder and known.recognizes(files):
            return known
    raise _unknown_format_error(files[0])


def detect_kind(file: SourceFile) -> str:
    """Return what a file's first bytes say that it is: Parquet, HDF5, Arrow, npz, or text."""
    head = file.head(8)
    return next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), _TEXT)


def _refuse_mixed(files: Sequence[SourceFile]) -> None:
    first = detect_kind(files[0])
    for file in files[1:]:
        if (kind := detect_kind(file)) != first:
            raise SourceInvalidError(
                f"{files[0].name} is {first} and {file.name} is {kind}, expected files of one "
                "kind. Ingest them one kind at a time."
            )


def _unknown_format_error(file: SourceFile) -> SourceInvalidError:
    kind = detect_kind(file)
    if (known := get_advice(file, kind)) is not None:
        return SourceInvalidError(f"{file.name}: {known}")
    found = f"content that begins with {file.head(8)!r}" if kind == _TEXT else f"{kind} file"
    is_csv = Path(file.name).suffix.lower() in (".csv", ".tsv")
    advice = ", or for CSV the `delimiter`" if is_csv else ""
    return SourceInvalidError(
        f"{file.name}: found {found} of an unknown format (`replaylake formats` lists "
        f"them). Convert it, or name the format with `format`{advice}."
    )


def get_advice(file: SourceFile, kind: str) -> str | None:
    """Return what a file of a kind holds and what to do with it, or None where nothing is known."""
    if kind == "a pickle":
        return f"found a pickle. {_PICKLE}"
    try:
        if kind == "HDF5":
            with Hdf5File(file) as hdf5:
                paths = hdf5.arrays()
            layouts = [advice for start, advice in _LAYOUTS.items() if _has_prefix(paths, start)]
            do = layouts[0] if layouts else _MAP.format("d4rl")
            return f"found HDF5 with the datasets {format_names(paths) or 'none'}. {do}"
        if kind == "npz":
            names = format_names([*npz_arrays(file)])
            return f"found npz with the arrays {names or 'none'}. {_MAP.format('npz')}"
    except ReplayLakeError:
        return None
    return None


def _has_prefix(paths: list[str], start: str) -> bool:
    return any(path.startswith(start) for path in paths)
