"""Images by their first bytes, against those that Pillow writes, and files that are none."""

import io

import pytest
from PIL import Image

from replaylake.datastore.episodes.images import HEADER_BYTES, ImageHeader, read_image_header


def write(kind, size=(321, 123), **options):
    sink = io.BytesIO()
    Image.new("RGBA" if options.pop("alpha", False) else "RGB", size, (9, 99, 199)).save(
        sink, kind, **options
    )
    return sink.getvalue()


@pytest.mark.parametrize(
    ("kind", "media_type", "options"),
    [
        ("PNG", "image/png", {}),
        ("GIF", "image/gif", {}),
        ("JPEG", "image/jpeg", {}),
        ("JPEG", "image/jpeg", {"progressive": True, "comment": b"x" * 60_000}),
        ("WEBP", "image/webp", {"quality": 50}),
        ("WEBP", "image/webp", {"lossless": True}),
        ("WEBP", "image/webp", {"alpha": True, "quality": 50}),
    ],
)
def test_an_image_has_a_type_and_a_size(kind, media_type, options):
    content = write(kind, **options)
    expected = ImageHeader(media_type, 321, 123)
    assert read_image_header(content) == expected
    assert read_image_header(content[:HEADER_BYTES]) == expected


def test_other_files_are_no_images():
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    for content in (b"", b"GIF89a", svg, b"%PDF-1.7" + bytes(40), write("BMP"), bytes(100)):
        assert read_image_header(content) is None


@pytest.mark.parametrize("kind", ["PNG", "GIF", "JPEG", "WEBP"])
def test_a_file_that_is_cut_or_damaged_is_read_without_an_error(kind):
    content = write(kind)
    for end in range(min(len(content), 700)):
        read_image_header(content[:end])
        damaged = content[:end] + b"\xff" + content[end + 1 :]
        found = read_image_header(damaged)
        assert found is None or (found.width > 0 and found.height > 0)
    assert read_image_header(content[:20]) is None
