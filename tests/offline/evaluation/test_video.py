"""Videos, opened again by the libraries that others open them with."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError
from replaylake.offline.evaluation.video import Video

# So different that no frame is taken for its neighbor: red, green, blue, grey, white.
COLORS = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (100, 100, 100), (255, 255, 255)]


def frame(color: tuple[int, ...], height: int = 160, width: int = 240) -> Array:
    return np.full((height, width, 3), color, np.uint8)


def shown(path: Path) -> list[tuple[int, ...]]:
    """The color in the middle of each frame."""
    with Image.open(path) as image:
        middle = (image.width // 2, image.height // 2)
        return [one.convert("RGB").getpixel(middle) for one in ImageSequence.Iterator(image)]


@pytest.mark.parametrize("suffix", ["gif", "png", "GIF"])
def test_every_frame_is_there_in_order(tmp_path: Path, suffix: str) -> None:
    video = Video(tmp_path / f"v.{suffix}", 10.0)
    for color in COLORS:
        video.add(0, frame(color))
    assert video.num_frames == 5
    video.save()
    assert shown(video.path) == COLORS
    with Image.open(video.path) as image:
        assert image.size == (240, 160)
        assert image.info["duration"] == 100
        assert image.info["loop"] == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"v.{suffix}"]


def test_episodes_that_come_mixed_are_shown_one_after_the_other(tmp_path: Path) -> None:
    video = Video(tmp_path / "v.png", 10.0)
    for episode, color in ((1, 3), (0, 0), (1, 4), (0, 1), (0, 2)):
        video.add(episode, frame(COLORS[color]))
    video.save()
    assert shown(video.path) == COLORS


def test_a_gif_of_a_fast_environment_leaves_frames_out(tmp_path: Path) -> None:
    video = Video(tmp_path / "v.gif", 120.0)
    for color in (*COLORS, COLORS[0]):
        video.add(0, frame(color))
    video.save()
    # Every third: 40 a second, as fast as browsers show.
    assert shown(video.path) == [COLORS[0], COLORS[3]]
    with Image.open(video.path) as image:
        assert image.info["duration"] in (20, 25, 30)


def test_large_pictures_shrink_and_small_ones_grow(tmp_path: Path) -> None:
    for name, sides, expected in (
        ("large", (400, 600), (300, 200)),
        ("odd", (501, 1000), (333, 167)),
        ("small", (84, 84), (168, 168)),
        ("fitting", (210, 160), (160, 210)),
    ):
        video = Video(tmp_path / f"{name}.png", 30.0)
        video.add(0, frame((9, 8, 7), *sides))
        video.add(0, frame((10, 20, 30), *sides))
        video.save()
        with Image.open(video.path) as image:
            assert image.size == expected, name
        assert shown(video.path) == [(9, 8, 7), (10, 20, 30)]


def test_shrinking_takes_means(tmp_path: Path) -> None:
    pixels = np.zeros((400, 600, 3), np.uint8)
    pixels[::2, ::2] = 200
    video = Video(tmp_path / "v.png", 30.0)
    video.add(0, pixels)
    video.add(0, np.zeros_like(pixels))
    video.save()
    assert shown(video.path) == [(50, 50, 50), (0, 0, 0)]


def test_frames_are_kept_compressed(tmp_path: Path) -> None:
    video = Video(tmp_path / "v.gif", 30.0)
    for number in range(20):
        video.add(0, frame((number, 0, 0), 400, 600))
    kept = sum(len(packed) for frames in video._frames.values() for packed, _ in frames)
    assert kept < 20 * 400 * 600 * 3 / 100


@pytest.mark.parametrize("name", ["v.avi", "v", "v.webm"])
def test_other_kinds_of_files_are_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigInvalidError, match=r"expected \.gif, \.png, \.mp4"):
        Video(tmp_path / name, 30.0)


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalidError, match="no folder"):
        Video(tmp_path / "nowhere" / "v.gif", 30.0)


def test_frames_of_two_sizes_are_no_video(tmp_path: Path) -> None:
    video = Video(tmp_path / "v.gif", 30.0)
    video.add(0, frame(COLORS[0]))
    video.add(0, frame(COLORS[0], 200, 200))
    with pytest.raises(ConfigInvalidError, match="expected one size"):
        video.save()
    assert list(tmp_path.iterdir()) == []


def test_without_pyav_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        ExtraMissingError, match=r"pip install 'replaylake\[video\]', or name a \.gif"
    ):
        Video(tmp_path / "v.mp4", 30.0)


def test_an_mp4_has_every_frame(tmp_path: Path) -> None:
    import av

    video = Video(tmp_path / "v.mp4", 12.5)
    for color in COLORS:
        video.add(0, frame(color, 161, 241))
    video.save()
    with av.open(str(video.path)) as container:
        (track,) = container.streams.video
        assert (track.width, track.height) == (240, 160)
        assert float(track.average_rate) == 12.5
        found = [one.to_ndarray(format="rgb24")[80, 120] for one in container.decode(track)]
    # Lossy, but not by much.
    np.testing.assert_allclose(np.array(found, int), COLORS, atol=12)
