"""Limits: what a small file may unpack to."""

from __future__ import annotations

from typing import Final

from replaylake.datastore.errors import SourceInvalidError

MAX_UNPACKED_BYTES: Final = 1 << 30
MAX_RATIO: Final = 1000


def refuse_bomb(name: str, declared_bytes: int, stored_bytes: int) -> None:
    """Refuse what would unpack to more than 1 GiB and more than 1000 times its stored size.

    `name` is the file's in messages; `declared_bytes` what it says, or was counted, to unpack to.
    Raises: SourceInvalidError.
    """
    if declared_bytes > MAX_UNPACKED_BYTES and declared_bytes > MAX_RATIO * stored_bytes:
        raise SourceInvalidError(
            f"{name}: {stored_bytes:,} stored bytes unpack to {declared_bytes:,} or more, expected "
            f"at most {MAX_RATIO} times as many or {MAX_UNPACKED_BYTES:,}. If the data is really "
            "that regular, unpack it yourself and pass what it holds."
        )
