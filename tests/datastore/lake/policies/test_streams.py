import numpy as np
import pytest

from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.policies.streams import EpisodeStreams


def _streams():
    return EpisodeStreams([np.random.default_rng(seed) for seed in (1, 2, 3)])


def test_each_row_continues_its_own_stream():
    streams = _streams()
    first, second = streams.random((3, 1)), streams.random((3, 2))
    alone = np.random.default_rng(2).random(3)
    assert first[1, 0] == alone[0]
    assert second[1].tolist() == alone[1:].tolist()


def test_a_row_does_not_depend_on_its_neighbours():
    together = _streams().standard_normal((3, 4))
    alone = EpisodeStreams([np.random.default_rng(3)]).standard_normal((1, 4))
    assert together[2].tolist() == alone[0].tolist()


def test_uniform_stretches_the_same_draws():
    drawn = _streams().uniform(np.array([-1.0, 0.0]), np.array([1.0, 10.0]), (3, 2))
    unit = _streams().random((3, 2))
    assert drawn == pytest.approx(unit * [2, 10] - [1, 0])


def test_a_draw_for_another_number_of_episodes_is_refused():
    with pytest.raises(
        SpaceUnsupportedError, match=r"found a random draw of shape \[2, 1\], expected 3"
    ):
        _streams().random((2, 1))
