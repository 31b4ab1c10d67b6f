"""Measures by which episodes are ranked, against numbers that are worked out by hand."""

import math
from dataclasses import replace
from urllib.parse import urlencode

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.explorer.episodes import episodes_page, outliers


def _episode(name, observations, actions, **further):
    num = len(observations)
    return Episode(
        name, np.array(observations), np.array(actions), np.zeros(num), terminated=True, **further
    )


def _ranked(reader, dataset, measure, **query):
    """Return the episodes of a list by a measure as (id, value), from all of its pages."""
    address = f"/datasets/{dataset}/episodes?{urlencode({'sort': measure, **query})}"
    found = []
    while address:
        body = reader.json(address.replace("?", ".json?"))
        found += [(one["episode_id"], one[measure]) for one in body["episodes"]]
        address = body["next"]
    return found


@pytest.fixture(scope="module")
def robots(tmp_path_factory, reader_type):
    """Three episodes of two observed numbers and one action; `c` has one step."""
    lake = open_lake(tmp_path_factory.mktemp("robots") / "lake", create=True)
    lake.dataset("robots").append(
        [
            # Distances 5, 0, 0.01; the third difference of the actions: 27 - 24 + 3 - 0 = 6.
            _episode(
                "a",
                [[0.0, 0.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.01]],
                [[0.0], [1.0], [8.0], [27.0]],
                behavior_log_probs=np.array([-1.0, -3.0, -1.0, -1.0], np.float32),
            ),
            # Distances of 1; actions that are equal.
            _episode(
                "b",
                [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [2.0, 1.0], [2.0, 2.0]],
                [[0.0], [0.0], [0.0], [0.0], [0.0]],
                behavior_log_probs=np.array([-2.0] * 5, np.float32),
            ),
            _episode("c", [[9.0, 9.0]], [[1.0]]),
        ]
    )
    return reader_type(lake)


def test_stillness_is_relative_to_the_mean_distance(robots):
    # The mean of 5, 0, 0.01, 1, 1, 1 and 1 is 1.287: nearer than 0.0129 are two of three of `a`.
    found = _ranked(robots, "robots", "stillness", order="descending")
    assert found == [("a", pytest.approx(2 / 3)), ("b", 0.0), ("c", None)]


def test_jerk_is_the_norm_of_the_third_difference(robots):
    found = _ranked(robots, "robots", "jerk", order="descending")
    assert found == [("a", pytest.approx(6.0)), ("b", 0.0), ("c", None)]


def test_repetition_is_of_the_action_before(robots):
    found = _ranked(robots, "robots", "repetition", order="descending")
    assert found == [("b", 1.0), ("a", 0.0), ("c", None)]


def test_log_prob_is_the_mean_of_the_actions(robots):
    assert _ranked(robots, "robots", "log_prob") == [("b", -2.0), ("a", -1.5), ("c", None)]


def test_jerk_of_vectors_is_a_norm_over_all_numbers(empty, monkeypatch):
    # Third differences 3 and 4 in the first two numbers, and 12 in a third one.
    actions = [[0.0, 0.0, 0.0]] * 3 + [[3.0, 4.0, 12.0]]
    empty.lake.dataset("arms").append([_episode("e", [[0.0]] * 4, actions)])
    assert _ranked(empty, "arms", "jerk") == [("e", 13.0)]
    monkeypatch.setattr(outliers, "_MAX_WIDTH", 2)
    assert (
        "over the first 2 of their 3 numbers"
        in empty.page("/datasets/arms/episodes?sort=jerk").text
    )


def test_stillness_of_what_is_no_vector_is_equality(empty):
    dataset = empty.lake.dataset("cells")
    dataset.create(Discrete(5), Discrete(2))
    dataset.append([_episode("e", [3, 3, 3, 4, 4], [0, 1, 0, 1, 1])])
    assert _ranked(empty, "cells", "stillness") == [("e", 0.75)]
    assert _ranked(empty, "cells", "repetition") == [("e", 0.25)]
    # Discrete actions have no jerk.
    page = empty.page("/datasets/cells/episodes?sort=jerk", 400)
    assert "expected one of episode, return, steps, version, started, stillness" in page.text


def test_numbers_that_are_no_lists_are_vectors_of_one(empty):
    scalars = _episode("e", [0.0, 0.0, 2.0, 4.0], [0.0, 0.0, 0.0, 7.0])
    empty.lake.dataset("scalars").append([scalars])
    assert _ranked(empty, "scalars", "stillness") == [("e", pytest.approx(1 / 3))]
    assert _ranked(empty, "scalars", "jerk") == [("e", 7.0)]


def test_structs_and_matrices_have_the_measures_that_they_allow(empty):
    pair = Dict({"a": Box((2,), "float32"), "n": Discrete(4)})
    values = {"a": np.zeros((4, 2), np.float32), "n": np.array([0, 0, 1, 1])}
    matrix = np.arange(16.0).reshape(4, 2, 2) ** 3
    cases = {
        "observed": (pair, Box((2, 2), "float64"), values, matrix),
        "acted": (Box((2, 2), "float64"), pair, matrix, values),
    }
    for name, (observation_space, action_space, observations, actions) in cases.items():
        dataset = empty.lake.dataset(name)
        dataset.create(observation_space, action_space)
        dataset.append([Episode("e", observations, actions, np.zeros(4), terminated=True)])
    assert _ranked(empty, "observed", "stillness") == [("e", pytest.approx(2 / 3))]
    # The third difference of (4 t + i) cubed is 6 times 4 cubed, in each of four numbers.
    assert _ranked(empty, "observed", "jerk") == [("e", pytest.approx(2 * 6 * 4**3))]
    assert _ranked(empty, "acted", "stillness") == [("e", 0.0)]
    assert _ranked(empty, "acted", "repetition") == [("e", pytest.approx(2 / 3))]
    assert not any("sort=jerk" in link for link in empty.page("/datasets/acted/episodes").links)


def test_repetition_of_tokens_is_of_their_4_grams(empty, generations_maker):
    # abcabcabc has the 4-grams abca, bcab, cabc, abca, bcab, cabc: three of six are distinct.
    dataset = empty.lake.dataset("talks")
    dataset.append(
        [
            generations_maker("loop", ["abcabcabc"]),
            generations_maker("free", ["abcdefgh", "xyz"]),
            generations_maker("short", ["abc"]),
        ]
    )
    found = _ranked(empty, "talks", "repetition", order="descending")
    assert found == [("loop", 0.5), ("free", 0.0), ("short", None)]
    # Log-probs are of a token: 0, -0.25, -0.5, ... in each step.
    means = dict(_ranked(empty, "talks", "log_prob"))
    assert means["loop"] == pytest.approx(-0.25 * 4)
    assert means["free"] == pytest.approx(-0.25 * (28 + 3) / 11)


def test_steps_of_agents_and_pieces_are_their_own(empty):
    one = _episode("e", [[0.0], [0.0]], [[1.0], [1.0]])
    two = replace(_episode("e", [[0.0], [9.0]], [[1.0], [2.0]]), agent_id="b")
    empty.lake.dataset("pair").append([replace(one, agent_id="a"), two])
    body = empty.json("/datasets/pair/episodes.json?sort=repetition&order=descending")
    assert [(row["agent_id"], row["repetition"]) for row in body["episodes"]] == [
        ("a", 1.0),
        ("b", 0.0),
    ]


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("measure", ["stillness", "jerk", "repetition", "log_prob"])
def test_pages_by_a_measure_hold_every_episode_once(empty, monkeypatch, measure, order):
    monkeypatch.setattr(episodes_page, "_PAGE_ROWS", 3)
    rng = np.random.default_rng(0)
    episodes = [
        _episode(
            f"e{n}",
            rng.normal(size=(n + 1, 2)) * (rng.random((n + 1, 1)) < 0.5),
            rng.normal(size=(n + 1, 1)).round(),
            behavior_log_probs=-rng.random(n + 1).astype(np.float32),
        )
        for n in range(8)
    ]
    empty.lake.dataset("many").append(episodes)
    found = _ranked(empty, "many", measure, order=order)
    assert sorted(name for name, _ in found) == [f"e{n}" for n in range(8)]
    values = [value for _, value in found]
    known = [value for value in values if value is not None]
    assert values == sorted(known, reverse=order == "descending") + [None] * (8 - len(known))
    assert len(known) >= 5


def test_a_measure_is_the_same_to_the_last_bit_on_each_page(empty):
    # Of several shards and row groups, which threads read as they come.
    rng = np.random.default_rng(0)
    for shard in range(4):
        num = 4_000
        empty.lake.dataset("long").append(
            _episode(
                f"e{shard}/{n}",
                rng.normal(size=(num, 2)),
                rng.normal(size=(num, 2)),
                behavior_log_probs=-rng.random(num).astype(np.float32),
            )
            for n in range(20)
        )
    snapshot = empty.lake.snapshot("long")
    for name in ("jerk", "log_prob", "stillness"):
        measure = outliers.find_measure(None, snapshot, name)
        listed = episodes_page.EpisodeList(snapshot, sort=name, measure=measure)
        text = f"SELECT {name} FROM {listed.rows} ORDER BY episode_id"
        first, *further = (empty.lake.sql(text, {}, at={"long": 4}) for _ in range(4))
        assert all(one.equals(first) for one in further), name


def test_what_never_moves_is_still(empty):
    resting = [_episode(f"e{n}", [[1.0, 2.0]] * 4, [[0.0]] * 4) for n in range(3)]
    empty.lake.dataset("resting").append(resting)
    found = _ranked(empty, "resting", "stillness", order="descending")
    assert found == [(f"e{n}", 1.0) for n in range(3)]


def test_the_sample_of_a_dataset_that_grew_is_a_part_of_the_one_before(empty, monkeypatch):
    monkeypatch.setattr(outliers, "_MAX_NUMBERS", 80)
    dataset = empty.lake.dataset("grown")
    samples = []
    for start in (0, 60, 90):
        stop = {0: 60, 60: 90, 90: 200}[start]
        dataset.append([_episode(f"e{n:03}", [[0.0]] * 4, [[1.0]] * 4) for n in range(start, stop)])
        found = _ranked(empty, "grown", "repetition", at=dataset.snapshot().version)
        known = {name for name, value in found if value is not None}
        assert known
        samples.append(known)
    # One in 4 of 240 steps, in 8 of 360 and in 16 of 800: of the first 60, ever fewer.
    old = {f"e{n:03}" for n in range(60)}
    assert samples[2] & old <= samples[1] & old <= samples[0]


def test_a_condition_may_name_the_measure_and_neighbors_follow_its_order(robots):
    query = {"sort": "jerk", "order": "descending", "where": "jerk < 3 -- or more"}
    assert _ranked(robots, "robots", "jerk", **query) == [("b", 0.0)]
    page = robots.page(f"/datasets/robots/episodes?{urlencode({**query, 'where': 'x'})}", 400)
    assert "jerk" in page.texts
    body = robots.json("/datasets/robots/episode.json?id=b&sort=jerk&order=descending")
    assert (body["previous"]["episode_id"], body["next"]["episode_id"]) == ("a", "c")
    page = robots.page("/datasets/robots/episode?id=a&sort=jerk&order=descending")
    assert "jerk 6" in page.text


def test_values_that_are_not_finite_are_unknown(empty):
    # The square of the difference overflows.
    actions = [[0.0], [0.0], [0.0], [1e300], [0.0]]
    empty.lake.dataset("odd").append([_episode("e", [[0.0]] * 5, actions)])
    assert _ranked(empty, "odd", "jerk") == [("e", None)]


def test_of_a_large_dataset_a_sample_is_measured_and_told(empty, monkeypatch):
    episodes = [_episode(f"e{n:02}", [[0.0]] * 4, [[1.0]] * 4) for n in range(40)]
    empty.lake.dataset("large").append(episodes)
    monkeypatch.setattr(outliers, "_MAX_NUMBERS", 40)
    found = _ranked(empty, "large", "repetition", order="descending")
    known = [value for _, value in found if value is not None]
    assert len(found) == 40
    assert 1 <= len(known) < 40
    assert not any(value is None for _, value in found[: len(known)])
    page = empty.page("/datasets/large/episodes?sort=repetition")
    assert "about one of 4 episodes" in page.text


def test_the_odd_ones_come_first(explored):
    page = explored.page("/datasets/walks/episodes")
    links = [link for link in page.links if "sort=" in link]
    assert any("sort=repetition&order=descending" in link for link in links)
    assert "/datasets/walks/episodes?sort=log_prob" in links
    assert not any("sort=jerk" in link for link in links)
    page = explored.page("/datasets/walks/episodes?sort=log_prob")
    assert "Log-prob: the mean log-prob of an episode's actions" in page.text
    assert math.isclose(float(page.text.partition("w/00")[2].split()[0]), -0.7, rel_tol=1e-6)
    # Frames are not compared.
    links = explored.page("/datasets/images/episodes").links
    assert not any("sort=stillness" in link for link in links)
