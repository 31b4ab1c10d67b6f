"""Leftovers: looking for ids in journals, and taking records out of those that are kept damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.segments import DAMAGED, SUFFIX, journal_folder
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.storage import fsync_folder
from replaylake.datastore.storage.table.table import Table

# Whether bytes hold an id that is looked for.
IdPredicate = Callable[[bytes], bool]


def find_journals(table: Table, holds: IdPredicate) -> list[Path]:
    """Return the journals of a table, damaged ones too, that hold an id."""
    folder = journal_folder(table)
    if not folder.is_dir():
        return []
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (SUFFIX, DAMAGED)]
    return [path for path in files if holds(_read(path))]


def drop_damaged(table: Table, holds: IdPredicate) -> int:
    """Take the records that hold an id out of the journals that nothing reads any more.

    A file of which nothing is left goes. Returns how many were changed.
    """
    changed = [path for path in find_journals(table, holds) if path.suffix == DAMAGED]
    for path in changed:
        lines = [line for line in _read(path).splitlines(keepends=True) if not holds(line)]
        try:
            if lines:
                temporary = path.with_name(f"{new_ulid()}.tmp")
                temporary.write_bytes(b"".join(lines))
                temporary.replace(path)
            else:
                path.unlink(missing_ok=True)
            fsync_folder(path.parent)
        except OSError as error:
            raise _unreadable_journal_error(path, error) from error
    return len(changed)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""  # committed meanwhile
    except OSError as error:
        raise _unreadable_journal_error(path, error) from error


def _unreadable_journal_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: {error.strerror or error} while the journal was searched for ids. Repair the "
        "disk or correct the permission, then run it again."
    )
