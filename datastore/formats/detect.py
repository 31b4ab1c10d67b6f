"""Detection: which format a source is, from its content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from replaylake.datastore.errors import ConfigInvalid, SourceInvalid
from replaylake.datastore.formats.csv import CsvFormat
from replaylake.datastore.formats.format import Format
from replaylake.datastore.formats.jsonl import JsonlFormat
from replaylake.datastore.formats.parquet import ParquetFormat, is_parquet
from replaylake.datastore.formats.rllib import RllibFormat
from replaylake.datastore.formats.source import SourceFile

# In the order they are asked: RLlib's files are Parquet or JSON lines too.
FORMATS: Final[tuple[Format, ...]] = (RllibFormat(), ParquetFormat(), JsonlFormat(), CsvFormat())
AUTO: Final = "auto"

_CONTAINERS: Final[dict[bytes, str]] = {
    b"PK\x03\x04": "a zip or npz file",
    b"\x1f\x8b": "a gzip file",
    b"BZh": "a bzip2 file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\x89HDF": "an HDF5 file",
    b"ARROW1": "an Arrow file",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}


def find_format(name: str, files: Sequence[SourceFile]) -> Format:
    """Return the format called `name`, or for `auto` the one that the content shows.

    Raises: ConfigInvalid on an unknown name, SourceInvalid if no format recognises the files, or
    they are of several kinds.
    """
    names = [known.name for known in FORMATS]
    if name != AUTO:
        if name not in names:
            raise ConfigInvalid(
                f"--format: found {name!r}, expected {AUTO}, {', '.join(sorted(names))}."
            )
        return next(known for known in FORMATS if known.name == name)
    for file in files:
        if _container(file) is not None:
            raise _unknown(file)
    kinds = {is_parquet(file): file for file in reversed(files)}
    if len(kinds) > 1:
        raise SourceInvalid(
            f"{kinds[True].name} is Parquet and {kinds[False].name} is not, expected files of one "
            "format. Ingest them one kind at a time."
        )
    for known in FORMATS:
        if known.recognises(files):
            return known
    raise _unknown(files[0])


def _container(file: SourceFile) -> str | None:
    head = file.head(8)
    return next((what for magic, what in _CONTAINERS.items() if head.startswith(magic)), None)


def _unknown(file: SourceFile) -> SourceInvalid:
    found = _container(file) or f"content that begins with {file.head(8)!r}"
    return SourceInvalid(
        f"{file.name}: found {found}, expected Parquet, JSON lines or CSV with a header. Convert "
        "it, or name the format with --format."
    )
