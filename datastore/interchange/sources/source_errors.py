"""Refusal: what is said of files and columns that are not as they should be."""

from __future__ import annotations

from collections.abc import Sequence

from replaylake.datastore.errors import SourceInvalidError


def unreadable_error(name: str, error: Exception) -> SourceInvalidError:
    """Return the error for a file that the system or its format's library could not read."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return SourceInvalidError(
        f"{name}: could not be read to its end ({reason}). It may be damaged: copy or write it "
        "again, or leave it out."
    )


def changed_error(name: str) -> SourceInvalidError:
    """Return the error for a file that was written to after it was hashed."""
    return SourceInvalidError(
        f"{name}: changed while it was being read. Ingest it again once it is complete."
    )


def format_names(names: Sequence[str], limit: int = 10) -> str:
    """Return names as a list for a message, so many of them at most."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
