"""Source files: found, put in order, and known by the sha256 of their bytes.

A packed file (a member of a zip; gz, bz2, zst) is the file that it unpacks to: hash, size and bytes
are those of what is inside, so the same logs packed and unpacked are one source.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from replaylake.datastore.errors import NotFoundError, SourceInvalidError, StorageError
from replaylake.datastore.interchange.sources.compression import strip_suffix
from replaylake.datastore.interchange.sources.source_bytes import SourceBytes, find_source_bytes
from replaylake.datastore.interchange.sources.source_errors import unreadable_error
from replaylake.datastore.interchange.sources.temporary_files import new_file

STDIN: Final = "-"
_STDIN_NAME: Final = "<stdin>"
# What Spark, macOS and Windows leave beside data: no data wherever it is, also if it was named.
_LITTER_NAMES: Final = {"_success", ".ds_store", "thumbs.db", "desktop.ini"}
_LITTER_SUFFIXES: Final = (".crc",)
_LITTER_FOLDER: Final = "__macosx"
# What people put beside data. Hidden and underscored names are skipped too.
_JUNK_SUFFIXES: Final = (".md", ".tmp")
_JUNK_NAMES: Final = {"license", "license.txt", "notice", "readme", "readme.txt"}
_VIDEO_SUFFIXES: Final = (".mp4", ".avi", ".mkv", ".webm", ".mov")
_READ_BYTES: Final = 1 << 20
_COMMITTED_ONCE: Final = ": committed once"
OnBytes = Callable[[int, int | None], None]


@dataclass(frozen=True)
class SourceFile:
    """One file as it was when its sha256 was taken.

    `open` is for readers that go from start to end, `path` for those that jump about in a file.
    `name` is how messages call it, `relative` where it lies in the folder that was named, with `/`;
    a file that was named itself has its name there, and a packed one is without the packing's
    suffix. `num_bytes` and `sha256` are of the unpacked bytes.
    """

    stored: SourceBytes
    name: str
    relative: str
    num_bytes: int
    sha256: str

    @property
    def base_name(self) -> str:
        """The file's name without its folders."""
        return self.relative.rpartition("/")[2]

    @cached_property
    def path(self) -> Path:
        """Where the bytes lie on this machine.

        A packed file is unpacked on first use, to a temporary file that is there as long as this
        object is. Raises: SourceInvalidError, StorageError.
        """
        if not self.stored.is_packed:
            return self.stored.path
        path = self.stored.unpack(self.name)
        weakref.finalize(self, path.unlink, missing_ok=True)
        return path

    def head(self, num_bytes: int) -> bytes:
        """Return the first bytes. Raises: SourceInvalidError if the file cannot be read."""
        try:
            with self.open() as stream:
                return stream.read(num_bytes)
        except OSError as error:
            raise unreadable_error(self.name, error) from error

    def open(self) -> BinaryIO:
        """Open the bytes for reading in order, unpacked as they are read; nothing is written.

        Only a file that is not packed can be read from elsewhere than its start. Raises:
        SourceInvalidError, here or while it is read.
        """
        return self.stored.open(self.name)

    def check_unchanged(self) -> None:
        """Refuse a file that was written to after it was hashed. Raises: SourceInvalidError."""
        self.stored.check_unchanged(self.name)


OnRows = Callable[[SourceFile, int, int], None]


@dataclass(frozen=True)
class Source:
    """Distinct files in reading order; `content_hash` covers their bytes and order, no names.

    `repeated` are further files with the same bytes as one of them, under the first one's path;
    `every_file` are all files, each under its own path; empty if no bytes are repeated.
    `references` are the relative paths of video files, which are neither read nor hashed.
    """

    files: tuple[SourceFile, ...]
    content_hash: str
    notes: tuple[str, ...] = ()
    repeated: tuple[SourceFile, ...] = ()
    references: tuple[str, ...] = ()
    every_file: tuple[SourceFile, ...] = ()

    def keep_repeated(self) -> Source:
        """Return the source with repeated files included.

        In a folder that is one dataset, two files with the same bytes are two parts of it.
        """
        if not self.repeated:
            return self
        notes = tuple(note for note in self.notes if not note.endswith(_COMMITTED_ONCE))
        return Source(
            self.every_file, _hash_order(self.every_file), notes, references=self.references
        )


def find_source(inputs: Sequence[Path | str], on_bytes: OnBytes | None = None) -> Source:
    """Collect files in the natural order of their paths, and hash them.

    `inputs` are files, folders (walked), patterns such as `logs/**/*.csv`, zips, which count as
    folders, and `-` for standard input. Any file may be packed as gz, bz2 or zst. A file given
    twice is one file; a second file of the same bytes is `repeated`. `on_bytes` is called with how
    much of the files was hashed, of how much; the latter is None where one is packed. Cost: one
    pass over the bytes.

    Raises: NotFoundError if a path does not exist, SourceInvalidError if there is no file, one is
    empty, unreadable or not safe to unpack, StorageError if standard input does not fit on the
    disk.
    """
    search = FileSearch()
    for path in inputs:
        search.add(path)
    files = list(search.iter_ordered())
    if not files:
        raise _no_file_error(inputs, search)
    return _hash_files(files, search, on_bytes)


def peek_source(inputs: Sequence[Path | str]) -> Source:
    """Collect the same files without reading them: none has a hash, or is known to be repeated.

    Raises: as find_source.
    """
    search = FileSearch()
    for path in inputs:
        search.add(path)
    found = list(search.iter_ordered())
    if not found:
        raise _no_file_error(inputs, search)
    files = [
        # What tells one file from another here is its place.
        SourceFile(one.stored, name, one.relative, one.stored.num_bytes, f"{i}")
        for i, (one, name) in enumerate(zip(found, short_names(found), strict=True))
    ]
    return Source(tuple(files), "", references=tuple(search.references))


def _no_file_error(inputs: Sequence[Path | str], search: FileSearch) -> SourceInvalidError:
    videos = f" (but {len(search.references)} video files)" if search.references else ""
    return SourceInvalidError(
        f"{', '.join(map(str, inputs))}: found no data file{videos}, expected at least one. "
        "Pass files, or a folder of them."
    )


def _hash_files(found: Sequence[FoundFile], search: FileSearch, on_bytes: OnBytes | None) -> Source:
    files: dict[str, SourceFile] = {}
    every_file: list[SourceFile] = []
    notes, repeated = [], []
    is_packed = any(one.stored.is_packed for one in found)
    total = None if is_packed else sum(one.stored.num_bytes for one in found)
    num_hashed = 0

    def report(num_bytes: int) -> None:
        nonlocal num_hashed
        num_hashed += num_bytes
        if on_bytes is not None:
            on_bytes(num_hashed, total)

    if search.skipped:
        notes.append(f"skipped by name: {', '.join(sorted(set(search.skipped))[:10])}")
    if search.references:
        notes.append(f"{len(search.references)} video files kept as references: not read")
    for one, name in zip(found, short_names(found), strict=True):
        file = _hash(one, name, report)
        if file.num_bytes == 0:
            raise SourceInvalidError(f"{name}: found 0 bytes, expected data. Leave the file out.")
        every_file.append(file)
        if (first := files.setdefault(file.sha256, file)) is not file:
            repeated.append(first)
            notes.append(f"{name} holds the same bytes as {first.name}{_COMMITTED_ONCE}")
    distinct = tuple(files.values())
    return Source(
        distinct,
        _hash_order(distinct),
        tuple(notes),
        tuple(repeated),
        tuple(search.references),
        tuple(every_file) if repeated else (),
    )


def _hash_order(files: Sequence[SourceFile]) -> str:
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()


def _hash(file: FoundFile, name: str, on_bytes: Callable[[int], None]) -> SourceFile:
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with file.stored.open(name) as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
                num_bytes += len(block)
                on_bytes(len(block))
    except OSError as error:
        raise unreadable_error(name, error) from error
    return SourceFile(file.stored, name, file.relative, num_bytes, digest.hexdigest())


@dataclass(frozen=True)
class FoundFile:
    """A file: `key` is what it is sorted by, `name` what messages call it, if not by its path."""

    stored: SourceBytes
    relative: str
    key: str
    name: str | None = None


@dataclass
class FileSearch:
    """What was found, by where it lies, and what was passed over: by name, and as video."""

    files: dict[tuple[Path, str], FoundFile] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)

    def add(self, item: Path | str) -> None:
        """Look where a person says. Raises: NotFoundError, SourceInvalidError, StorageError."""
        path = Path(item)
        try:
            self._add(path, str(item))
        except OSError as error:
            where = error.filename or path
            raise SourceInvalidError(
                f"{where}: cannot be read ({error.strerror}). Correct the permission, or leave it "
                "out."
            ) from error

    def _add(self, path: Path, text: str) -> None:
        if text == STDIN:
            self._add_stdin()
        elif path.is_dir():
            self._walk(path)
        elif path.exists():
            self._add_named(path)
        elif glob.has_magic(text):
            self._add_pattern(text)
        else:
            raise NotFoundError(f"{path}: found no such file or folder. Check the path.")

    def iter_ordered(self) -> Iterator[FoundFile]:
        """Return the files in the natural order of their paths: part-9 before part-10."""
        yield from sorted(self.files.values(), key=lambda found: _natural_key(found.key))

    def _walk(self, folder: Path, prefix: str = "") -> None:
        for path in _files_below(folder):
            inside = path.relative_to(folder).as_posix()
            if _is_junk(inside):
                self.skipped.append(path.name)
            else:
                self._add_file(path, prefix + inside)

    def _add_pattern(self, pattern: str) -> None:
        root = _root(pattern)
        matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
        if not matches:
            raise NotFoundError(f"{pattern}: found no file that matches. Check the pattern.")
        for path in matches:
            relative = Path(os.path.relpath(path, root)).as_posix()
            if path.is_dir():
                # `**` matches folders beside the files in them; each file counts once.
                self._walk(path, "" if relative == "." else f"{relative}/")
            elif _is_junk(relative):
                self.skipped.append(path.name)
            else:
                self._add_file(path, relative)

    def _add_named(self, path: Path) -> None:
        if _is_litter(path.name):
            self.skipped.append(path.name)
        else:
            self._add_file(path, path.name, is_named=True)

    def _add_file(self, path: Path, relative: str, *, is_named: bool = False) -> None:
        if relative.lower().endswith(_VIDEO_SUFFIXES):
            self.references.append(relative)
            return
        where = path.resolve()
        members = find_source_bytes(where, path.name)
        if (plain := members.get("")) is not None:
            packed = plain.packing is not None
            inner = strip_suffix(relative) if packed else relative
            key = strip_suffix(str(where)) if packed else str(where)
            self.files.setdefault((where, ""), FoundFile(plain, inner, key))
            return
        folder = os.path.splitext(str(where))[0]
        # An archive that was named is the folder that was named; in a folder it is one of its own.
        beside = "" if is_named else f"{os.path.splitext(relative)[0]}/"
        for member, inside in self._inside(members):
            stored = members[member]
            inner = strip_suffix(inside) if stored.packing else inside
            file = FoundFile(stored, beside + inner, f"{folder}/{inner}", f"{path.name}/{inside}")
            self.files.setdefault((where, member), file)

    def _inside(self, members: dict[str, SourceBytes]) -> Iterator[tuple[str, str]]:
        """Yield the members of a zip with their paths in the folder that holds all of them."""
        rest = [member for member in members if not _is_litter(member)]
        self.skipped += [PurePosixPath(member).name for member in members if member not in rest]
        tops = {member.partition("/")[0] for member in rest if "/" in member}
        is_one = len(tops) == 1 and all("/" in member for member in rest)
        for member in rest:
            inside = member.partition("/")[2] if is_one else member
            if _is_junk(inside):
                self.skipped.append(PurePosixPath(member).name)
            elif inside.lower().endswith(_VIDEO_SUFFIXES):
                self.references.append(inside)
            else:
                yield member, inside

    def _add_stdin(self) -> None:
        try:
            descriptor, path = new_file("")
            with os.fdopen(descriptor, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        except OSError as error:
            raise StorageError(
                f"{_STDIN_NAME}: could not be stored in a temporary file ({error}), expected "
                "enough space. Set TMPDIR to a folder with more space, or pass a file."
            ) from error
        for member, stored in find_source_bytes(path, _STDIN_NAME).items():
            name = f"{_STDIN_NAME}/{member}" if member else _STDIN_NAME
            self.files[(path, member)] = FoundFile(stored, member or _STDIN_NAME, f"{name}", name)


def _files_below(folder: Path) -> list[Path]:
    """Return all files, sorted. Raises: OSError for a folder that cannot be listed."""

    def refuse(error: OSError) -> None:
        raise error

    # Path.rglob passes over what it may not list, and so would lose its files silently.
    walked = os.walk(folder, onerror=refuse)
    return sorted(path for at, _, names in walked for n in names if (path := Path(at, n)).is_file())


def short_names(files: Sequence[FoundFile]) -> Iterator[str]:
    """Yield what messages call the files: their names, with the folder where two share one."""
    counts: dict[str, int] = {}
    for file in files:
        counts[file.stored.path.name] = counts.get(file.stored.path.name, 0) + 1
    for file in files:
        path = file.stored.path
        plain = path.name if counts[path.name] == 1 else f"{path.parent.name}/{path.name}"
        yield plain if file.name is None else file.name


def _root(pattern: str) -> str:
    """Return the folder above the first part of a pattern that is one."""
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first]) or ("/" if pattern.startswith("/") else ".")


def _is_litter(relative: str) -> bool:
    parts = relative.lower().split("/")
    name = parts[-1]
    return (
        _LITTER_FOLDER in parts
        or name in _LITTER_NAMES
        or name.startswith("._")
        or name.endswith(_LITTER_SUFFIXES)
    )


def _is_junk(relative: str) -> bool:
    hidden = any(part.startswith((".", "_")) for part in relative.split("/"))
    name = relative.rpartition("/")[2].lower()
    return hidden or _is_litter(relative) or name in _JUNK_NAMES or name.endswith(_JUNK_SUFFIXES)


def _natural_key(path: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort part-9 before part-10, and part-1 before part-01 wherever they come from."""
    parts = re.split(r"(\d+)", path)
    return [(1, int(p), "") if p.isdigit() else (0, 0, p) for p in parts], path
