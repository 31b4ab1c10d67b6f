"""Source files: found, put in order, and known by the sha256 of their bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import NotFound, SourceInvalid

# What Spark, macOS and people leave beside data. Hidden and underscored names are skipped too.
_JUNK_SUFFIXES: Final = (".crc", ".md", ".tmp")
_JUNK_NAMES: Final = {"license", "license.txt", "notice", "readme", "readme.txt", "__macosx"}
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """One file as it was when its sha256 was taken; `name` is how messages call it."""

    path: Path
    name: str
    num_bytes: int
    modified_ns: int
    sha256: str

    def head(self, num_bytes: int) -> bytes:
        """Return the first bytes. Raises: SourceInvalid if the file cannot be read."""
        try:
            with self.path.open("rb") as stream:
                return stream.read(num_bytes)
        except OSError as error:
            raise unreadable(self.name, error) from error

    def check_unchanged(self) -> None:
        """Refuse a file that was written to after it was hashed. Raises: SourceInvalid."""
        try:
            stat = self.path.stat()
        except OSError as error:
            raise unreadable(self.name, error) from error
        if (stat.st_size, stat.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            raise SourceInvalid(
                f"{self.name}: changed while it was being read. Ingest it again once it is "
                "complete."
            )


@dataclass(frozen=True)
class Source:
    """Distinct files in reading order; `content_hash` covers their bytes and order, no names.

    `repeated` are further files of the same bytes as one of them, under the first one's path.
    """

    files: tuple[SourceFile, ...]
    content_hash: str
    notes: tuple[str, ...] = ()
    repeated: tuple[SourceFile, ...] = ()


def find_source(given: Sequence[Path | str]) -> Source:
    """Collect files and folders (walked) in the natural order of their paths, and hash them.

    A file given twice is one file; a second file of the same bytes is `repeated`. Raises: NotFound
    if a path does not exist, SourceInvalid if there is no file, or one is empty or unreadable.
    """
    paths: dict[Path, None] = {}
    skipped = []
    for path in map(Path, given):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file())
            kept = [p for p in inside if not _is_junk(p.relative_to(path))]
            skipped += [p.name for p in inside if _is_junk(p.relative_to(path))]
            paths |= dict.fromkeys(p.resolve() for p in kept)
        elif path.exists():
            paths[path.resolve()] = None
        else:
            raise NotFound(f"{path}: found no such file or folder. Check the path.")
    if not paths:
        raise SourceInvalid(
            f"{', '.join(map(str, given))}: found no data file, expected at least one. "
            "Pass files, or a folder of them."
        )
    return _hashed(sorted(paths, key=_natural), skipped)


def unreadable(name: str, error: Exception) -> SourceInvalid:
    """Return the error for a file that the system or its format's library could not read."""
    reason = " ".join(str(error).split())
    return SourceInvalid(
        f"{name}: could not be read to its end ({reason}). It may be torn: copy or write it again, "
        "or leave it out."
    )


def _hashed(paths: Sequence[Path], skipped: Sequence[str]) -> Source:
    files: dict[str, SourceFile] = {}
    notes, repeated = [], []
    if skipped:
        notes.append(f"skipped by name: {', '.join(sorted(set(skipped))[:10])}")
    names = list(_short_names(paths))
    for path, name in zip(paths, names, strict=True):
        file = _hash(path, name)
        if file.num_bytes == 0:
            raise SourceInvalid(f"{name}: found 0 bytes, expected data. Leave the file out.")
        if (first := files.setdefault(file.sha256, file)) is not file:
            repeated.append(first)
            notes.append(f"{name} holds the same bytes as {first.name}: committed once")
    joined = hashlib.sha256("".join(files).encode()).hexdigest()
    return Source(tuple(files.values()), joined, tuple(notes), tuple(repeated))


def _hash(path: Path, name: str) -> SourceFile:
    digest = hashlib.sha256()
    try:
        stat = path.stat()
        with path.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise unreadable(name, error) from error
    return SourceFile(path, name, stat.st_size, stat.st_mtime_ns, digest.hexdigest())


def _short_names(paths: Sequence[Path]) -> Iterator[str]:
    """Yield file names, with their folder where two files share one."""
    counts: dict[str, int] = {}
    for path in paths:
        counts[path.name] = counts.get(path.name, 0) + 1
    for path in paths:
        yield path.name if counts[path.name] == 1 else f"{path.parent.name}/{path.name}"


def _is_junk(relative: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in relative.parts)
    name = relative.name.lower()
    return hidden or name in _JUNK_NAMES or name.endswith(_JUNK_SUFFIXES)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort part-9 before part-10."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(p), "") if p.isdigit() else (0, 0, p) for p in parts]
