"""What the tests of queries share: a lake of two datasets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake


@pytest.fixture
def filled(lake: Lake, make_episode: Callable[..., Episode]) -> Lake:
    lake.dataset("mine").append([make_episode("a"), make_episode("b", 5)])
    lake.dataset("theirs").append([make_episode("c")])
    return lake
