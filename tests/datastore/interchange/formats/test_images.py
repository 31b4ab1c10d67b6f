from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.images import decode_images


def _encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _random(*shape: int, dtype: Any = np.uint8) -> Any:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype)


@pytest.mark.parametrize("channels", [3, 4])
def test_colours_are_exact(channels: int) -> None:
    pixels = _random(2, 5, 7, channels)
    found = decode_images([_encoded(Image.fromarray(one)) for one in pixels], "x")
    np.testing.assert_array_equal(found, pixels)
    assert found.dtype == np.uint8


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grey_has_one_channel(dtype: Any) -> None:
    pixels = _random(5, 7, dtype=dtype)
    found = decode_images([_encoded(Image.fromarray(pixels))], "x")
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[0, :, :, 0], pixels)


def test_a_palette_is_its_colours() -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[0] = (10, 200, 30)
    palette = Image.fromarray(pixels).quantize(4)
    np.testing.assert_array_equal(decode_images([_encoded(palette)], "x")[0], pixels)


def test_jpeg_is_near() -> None:
    pixels = np.full((16, 16, 3), 130, np.uint8)
    found = decode_images([_encoded(Image.fromarray(pixels), "JPEG")], "x")
    assert np.abs(found[0].astype(int) - pixels).max() <= 2


def test_nothing_is_an_empty_array() -> None:
    assert len(decode_images([], "x")) == 0


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "EPS"])
def test_other_kinds_are_refused(kind: str) -> None:
    encoded = _encoded(Image.fromarray(_random(4, 4, 3)), kind)
    with pytest.raises(SourceInvalidError, match="x image 0: could not be decoded"):
        decode_images([encoded], "x")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_damaged_images_are_refused_or_decoded(kind: str) -> None:
    whole = _encoded(Image.fromarray(_random(12, 12, 3)), kind)
    rng = np.random.default_rng(1)
    num_refused = 0
    for at in rng.integers(0, len(whole), 200).tolist():
        damaged = whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
        for data in (damaged, whole[:at]):
            try:
                decode_images([data], "x")
            except SourceInvalidError:
                num_refused += 1
    assert num_refused > 50
