"""Images: their type and size, from their first bytes, without decoding.

Only raster formats that every browser can show. The type is determined from the bytes, not from the
message. SVG is excluded, because it may contain scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# The size of a JPEG follows its metadata, which are usually shorter than this.
HEADER_BYTES: Final = 64 << 10
# Shorter than any image of one pixel, and long enough for every fixed header below.
_MIN_BYTES: Final = 30
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8\xff"
# Frame headers (ITU-T T.81, table B.1): 0xC0 to 0xCF without those of other tables.
_JPEG_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_WITHOUT_LENGTH: Final = frozenset((0x01, *range(0xD0, 0xD8)))


@dataclass(frozen=True)
class ImageHeader:
    """The media type of an image, and its width and height in pixels."""

    media_type: str
    width: int
    height: int


def read_image_header(content: bytes) -> ImageHeader | None:
    """Return the header of a PNG, JPEG, GIF or WebP; None for other bytes.

    content: the file, or at least its first HEADER_BYTES. Also None if these do not have the size.
    """
    if len(content) < _MIN_BYTES:
        return None
    if content.startswith(_PNG) and content[12:16] == b"IHDR":
        return _make_header("image/png", _big(content[16:20]), _big(content[20:24]))
    if content[:6] in (b"GIF87a", b"GIF89a"):
        return _make_header("image/gif", _little(content[6:8]), _little(content[8:10]))
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return _read_webp(content)
    return _read_jpeg(content) if content.startswith(_JPEG) else None


def _read_webp(content: bytes) -> ImageHeader | None:
    """Read the first chunk (RFC 9649): lossy, lossless, or extended."""
    kind, width, height = content[12:16], 0, 0
    if kind == b"VP8 " and content[23:26] == b"\x9d\x01\x2a":
        width, height = _little(content[26:28]) & 0x3FFF, _little(content[28:30]) & 0x3FFF
    elif kind == b"VP8L" and content[20:21] == b"\x2f":
        packed = _little(content[21:25])
        width, height = (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
    elif kind == b"VP8X":
        width, height = _little(content[24:27]) + 1, _little(content[27:30]) + 1
    return _make_header("image/webp", width, height)


def _read_jpeg(content: bytes) -> ImageHeader | None:
    place = 2
    while place + 9 <= len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker in _JPEG_FRAMES:
            height, width = (
                _big(content[place + 5 : place + 7]),
                _big(content[place + 7 : place + 9]),
            )
            return _make_header("image/jpeg", width, height)
        if marker == 0xFF:  # a fill byte
            place += 1
        elif marker in _JPEG_WITHOUT_LENGTH:
            place += 2
        else:
            place += 2 + _big(content[place + 2 : place + 4])
    return None


def _make_header(media_type: str, width: int, height: int) -> ImageHeader | None:
    return ImageHeader(media_type, width, height) if width and height else None


def _big(part: bytes) -> int:
    return int.from_bytes(part, "big")


def _little(part: bytes) -> int:
    return int.from_bytes(part, "little")
