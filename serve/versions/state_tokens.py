"""State tokens: what a stateful policy remembers of an episode, carried by the client.

The server keeps nothing between requests, so any worker, and any replica with the same key, goes on
with an episode. A token is signed: the policy is only ever given a state that it made itself.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array

_FORMAT: Final = 1
_MAC_BYTES: Final = 16
_KEY_BYTES: Final = 64
_PREFIX: Final = "s"
# format, policy version, bytes of the policy's name; then the name, float32 numbers and the MAC.
_HEAD: Final = struct.Struct(">BIH")
_NUMBERS: Final = np.dtype("<f4")
_TO_URL: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL: Final = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True)
class State:
    """What a token says: whose state it is, and its numbers, float32 [S]."""

    policy: str
    version: int
    numbers: Array


class StateSigner:
    """Issues and reads tokens; workers that share `key` read each other's.

    Signed with keyed BLAKE2b (RFC 7693), 128 bits. Cost: 2 us and 1.4 us more a kB of state.
    """

    def __init__(self, key: bytes) -> None:
        derived = hashlib.blake2b(key=key[:_KEY_BYTES], person=b"policy-state").digest()
        self._mac = hashlib.blake2b(key=derived, digest_size=_MAC_BYTES)

    def issue(self, policy: str, version: int, states: Array) -> list[str]:
        """Return a token for each of the states float32 [N, S]."""
        name = policy.encode()
        head = _HEAD.pack(_FORMAT, version, len(name)) + name
        rows: Iterable[Array] = np.asarray(states, _NUMBERS)
        return [self._format_token(head + row.tobytes()) for row in rows]

    def read(self, text: str) -> State | None:
        """Return what the token says, or None if it was not signed with our key."""
        with suppress(UnicodeEncodeError, binascii.Error, ValueError):
            encoded = text.removeprefix(_PREFIX).encode("ascii").translate(_FROM_URL)
            raw = binascii.a2b_base64(encoded + b"=" * (-len(encoded) % 4), strict_mode=True)
            signed, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
            if hmac.compare_digest(self._sign(signed), mac):
                return _parse_state(signed)
        return None

    def _format_token(self, raw: bytes) -> str:
        encoded = binascii.b2a_base64(raw + self._sign(raw), newline=False)
        return _PREFIX + encoded.rstrip(b"=").translate(_TO_URL).decode()

    def _sign(self, raw: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(raw)
        return mac.digest()


def _parse_state(raw: bytes) -> State | None:
    """Read signed bytes; None where a later format has the same key."""
    known, version, num_name_bytes = _HEAD.unpack_from(raw)
    if known != _FORMAT:
        return None
    end = _HEAD.size + num_name_bytes
    numbers = np.frombuffer(raw, _NUMBERS, offset=end).astype(np.float32)
    return State(raw[_HEAD.size : end].decode(), version, numbers)
