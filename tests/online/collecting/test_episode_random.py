import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.online.collecting.episode_random import EpisodeRandom


def stream(seed, kind):
    return np.random.default_rng([seed, kind])


actions = st.lists(
    st.tuples(st.sampled_from(["random", "standard_normal", "start"]), st.integers(0, 40)),
    max_size=40,
)


@given(actions, st.integers(1, 4))
def test_each_row_is_drawn_from_its_own_stream(calls, num):
    draws = EpisodeRandom()
    seeds = list(range(num))
    draws.restart(seeds)
    streams = {seed: (stream(seed, 1), stream(seed, 2)) for seed in seeds}
    for call, size in calls:
        if call == "start":
            row, seed = size % num, max(streams) + 1
            seeds[row] = seed
            streams[seed] = (stream(seed, 1), stream(seed, 2))
            draws.start(row, seed)
            continue
        drawn = getattr(draws, call)((num, size, 2))
        for row, seed in enumerate(seeds):
            expected = getattr(streams[seed][call != "random"], call)((size, 2))
            assert drawn[row].tolist() == expected.tolist()


def test_rows_that_stay_go_on():
    draws = EpisodeRandom()
    draws.restart([5, 6, 7])
    first = draws.random((3, 1)), draws.standard_normal(3)
    draws.select_rows([0, 2])
    second = draws.random((2, 3)), draws.standard_normal(2)
    for i, row in enumerate((0, 2)):
        uniforms, normals = stream(5 + row, 1).random(4), stream(5 + row, 2).standard_normal(2)
        assert [*first[0][row], *second[0][i]] == uniforms.tolist()
        assert [first[1][row], second[1][i]] == normals.tolist()


def test_uniform_is_scaled():
    draws = EpisodeRandom()
    draws.restart([1])
    expected = 3 + 2 * stream(1, 1).random(500)
    assert draws.uniform(3, 5, (1, 500))[0] == pytest.approx(expected)


def test_a_draw_that_is_not_one_row_an_episode_is_refused():
    draws = EpisodeRandom()
    draws.restart([1, 2])
    with pytest.raises(SpaceUnsupportedError, match=r"shape \[3\], expected 2 rows"):
        draws.random(3)
