"""Decision ids: signed, so that any worker tells its own from a stranger's without a look-up."""

from __future__ import annotations

import binascii
import hashlib
import hmac
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

_FORMAT: Final = 1
_WORKER_BYTES: Final = 6
_MAC_BYTES: Final = 12
# Without it an id would begin with `-`, which a command line takes for an option.
_PREFIX: Final = "d"
# format, time in us, worker, counter, policy version; then the policy's name and the MAC.
_HEAD: Final = struct.Struct(f">BQ{_WORKER_BYTES}sQI")
# base64 in an alphabet that sorts as its values do: ids sort by time, then worker, then counter.
_STANDARD: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_SORTED: Final = b"-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
_TO_SORTED: Final = bytes.maketrans(_STANDARD, _SORTED)
_TO_STANDARD: Final = bytes.maketrans(_SORTED, _STANDARD)


@dataclass(frozen=True)
class DecisionId:
    """What a decision id says: who acted, when (us since 1970, UTC), and on which worker."""

    policy: str
    policy_version: int
    timestamp: int
    worker: str
    counter: int


class DecisionSigner:
    """Issues and reads decision ids of one dataset.

    An id is signed (keyed BLAKE2b, RFC 7693, 96 bits) with a key derived from the lake's, so any
    worker tells a foreign id from its own without a look-up, and an id of one dataset is refused by
    another. Its text is URL-safe, about 60 characters, and sorts by time.
    """

    def __init__(self, key: bytes, dataset: str, worker: str | None = None) -> None:
        self.worker = worker or os.urandom(_WORKER_BYTES).hex()
        self._worker = bytes.fromhex(self.worker)
        derived = hashlib.blake2b(dataset.encode(), key=key, person=b"decision-id").digest()
        self._mac = hashlib.blake2b(key=derived, digest_size=_MAC_BYTES)
        self._counter = 0

    def issue(self, policy: str, policy_version: int, timestamp: int, num: int = 1) -> list[str]:
        """Return `num` fresh ids, ascending."""
        name = policy.encode()
        first, self._counter = self._counter, self._counter + num
        ids = []
        for counter in range(first, self._counter):
            raw = _HEAD.pack(_FORMAT, timestamp, self._worker, counter, policy_version) + name
            ids.append(_to_text(raw + self._sign(raw)))
        return ids

    def read(self, text: str) -> DecisionId | None:
        """Return what the id says, or None if we did not issue it for this dataset."""
        parsed = _from_text(text)
        if parsed is None or not hmac.compare_digest(self._sign(parsed[0]), parsed[1]):
            return None
        return _unpack(parsed[0])

    def _sign(self, raw: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(raw)
        return mac.digest()


def read_unverified(text: str) -> DecisionId | None:
    """Return what an id says without checking its signature; None if it is not an id at all."""
    parsed = _from_text(text)
    return None if parsed is None else _unpack(parsed[0])


def _to_text(raw: bytes) -> str:
    encoded = binascii.b2a_base64(raw, newline=False).rstrip(b"=")
    return _PREFIX + encoded.translate(_TO_SORTED).decode()


def _from_text(text: str) -> tuple[bytes, bytes] | None:
    """Return (signed bytes, MAC). Another text of the same bytes is no id: ids are keys."""
    with suppress(UnicodeEncodeError, binascii.Error, ValueError):
        encoded = text.removeprefix(_PREFIX).encode("ascii").translate(_TO_STANDARD)
        raw = binascii.a2b_base64(encoded + b"=" * (-len(encoded) % 4), strict_mode=True)
        if len(raw) > _HEAD.size + _MAC_BYTES and raw[0] == _FORMAT and _to_text(raw) == text:
            return raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
    return None


def _unpack(raw: bytes) -> DecisionId | None:
    _, timestamp, worker, counter, version = _HEAD.unpack_from(raw)
    try:
        name = raw[_HEAD.size :].decode()
    except UnicodeDecodeError:
        return None
    return DecisionId(name, version, timestamp, worker.hex(), counter)
