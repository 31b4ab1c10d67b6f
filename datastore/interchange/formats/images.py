"""Images: files such as PNG and JPEG to arrays of pixels."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ExtraMissingError, SourceInvalidError
from replaylake.datastore.interchange.sources.compression import refuse_bomb

# Whatever else Pillow can open, its other decoders stay out of reach of a log's bytes.
_FORMATS: Final = ("PNG", "JPEG")
_MESSAGE_FORMATS: Final = (*_FORMATS, "GIF", "WEBP")
# Bytes a pixel in Pillow's modes of several bytes; of the others each band takes one.
_WIDE: Final = {"I": 4, "F": 4, "I;16": 2, "I;16B": 2, "I;16L": 2}
# What Pillow raises for bytes that are torn or lie.
_DECODE_ERRORS: Final = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    struct.error,
    zlib.error,
)


def decode_images(encoded: Sequence[bytes], where: str) -> Array:
    """Decode PNG or JPEG images of one size to an array [n, height, width, channels].

    uint8 (uint16 for a PNG of that depth); a grey image has one channel. `where` begins messages.
    Cost: all pixels, in memory. Raises: SourceInvalidError if one is torn, is of another size than
    the first, or declares more pixels than its bytes can mean; ExtraMissingError without Pillow.
    """
    image_of = _opener()
    _refuse_bombs(encoded, where, image_of)
    shape: tuple[int, ...] | None = None
    decoded: list[Array] = []
    for index, data in enumerate(encoded):
        one = f"{where} image {index}"
        try:
            with image_of(data) as image:
                pixels = _pixels(image)
        except _DECODE_ERRORS as error:
            raise _undecodable_error(one, error) from error
        shape = shape or pixels.shape
        if pixels.shape != shape:
            raise SourceInvalidError(
                f"{one}: found {list(pixels.shape)} pixels, expected {list(shape)} as in the "
                "first. Resize them to one size where the log is written."
            )
        decoded.append(pixels)
    return np.stack(decoded) if decoded else np.empty((0, 0, 0, 0), np.uint8)


def decode_rgb(encoded: bytes, where: str) -> Array:
    """Decode an image of a message, PNG, JPEG, GIF or WebP, to uint8 [height, width, 3].

    Of an animation, the first picture. `where` begins messages. Raises: as `decode_images`.
    """
    image_of = _opener(_MESSAGE_FORMATS)
    _refuse_bombs([encoded], where, image_of)
    try:
        with image_of(encoded) as image:
            return np.asarray(image.convert("RGB"))
    except _DECODE_ERRORS as error:
        raise _undecodable_error(where, error, "PNG, JPEG, GIF or WebP") from error


def _refuse_bombs(encoded: Sequence[bytes], where: str, image_of: Any) -> None:
    """Weigh what all headers declare, before a pixel is decoded."""
    num_declared = 0
    for index, data in enumerate(encoded):
        try:
            with image_of(data) as image:
                size = _WIDE.get(image.mode, len(image.getbands()))
                num_declared += image.width * image.height * size
        except _DECODE_ERRORS as error:
            raise _undecodable_error(f"{where} image {index}", error) from error
    refuse_bomb(f"{where} images", num_declared, sum(map(len, encoded)))


def _opener(formats: tuple[str, ...] = _FORMATS) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ExtraMissingError(
            "images: Pillow is not installed, expected it to decode PNG and JPEG. "
            "pip install 'replaylake[formats]'"
        ) from error

    def open_image(data: bytes) -> Any:
        # Pillow warns of many pixels and refuses more; our own rule weighs them by what is stored.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            try:
                return Image.open(io.BytesIO(data), formats=formats)
            except Image.DecompressionBombError as error:
                raise ValueError(str(error)) from error

    return open_image


def _pixels(image: Any) -> Array:
    if image.mode == "P":
        # A palette is only how the colors are packed.
        image = image.convert("RGB")
    pixels = np.asarray(image)
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _undecodable_error(
    where: str, error: Exception, expected: str = "PNG or JPEG"
) -> SourceInvalidError:
    reason = " ".join(str(error).split())
    return SourceInvalidError(
        f"{where}: could not be decoded ({reason}), expected a complete {expected}. Write it "
        "again, or leave its episode out."
    )
