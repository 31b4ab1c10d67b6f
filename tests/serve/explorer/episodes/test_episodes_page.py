"""The table of episodes: order, pages and conditions; and an episode's page."""

import json
import struct
import zlib
from dataclasses import replace
from urllib.parse import quote, urlencode

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.serve.explorer.episodes import episode_page, episodes_page
from replaylake.serve.explorer.episodes.frames import encode_png


def _read_all(reader, dataset, **query):
    """Follow the link to the next page until there is none; return ids, and each page's length."""
    address = f"/datasets/{dataset}/episodes?{urlencode(query)}"
    ids, lengths = [], []
    while address:
        path, _, values = address.partition("?")
        body = reader.json(f"{path}.json?{values}")
        ids += [one["episode_id"] for one in body["episodes"]]
        lengths.append(len(body["episodes"]))
        address = body["next"]
    return ids, lengths


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("sort", list(episodes_page.SORTS))
def test_pages_hold_every_episode_once_in_order(explored, monkeypatch, sort, order):
    monkeypatch.setattr(episodes_page, "_PAGE_ROWS", 5)
    ids, lengths = _read_all(explored, "walks", sort=sort, order=order)
    assert lengths == [5, 5, 2]
    numbers = [f"w/{n:02}" for n in range(12)]
    # All have version 1 and no time: then by id, in either order.
    backward = order == "descending" and sort in ("episode", "return", "steps")
    assert ids == (numbers[::-1] if backward else numbers)


def test_the_next_page_is_of_the_same_version(empty, monkeypatch, episode_maker):
    monkeypatch.setattr(episodes_page, "_PAGE_ROWS", 2)
    dataset = empty.lake.dataset("grows")
    dataset.append([episode_maker(f"e/{n}", 2) for n in range(3)])
    follows = empty.json("/datasets/grows/episodes.json?sort=steps")["next"]
    dataset.append([episode_maker("e/9", 2)])
    rest = empty.json(follows.replace("?", ".json?"))
    assert (rest["version"], [one["episode_id"] for one in rest["episodes"]]) == (1, ["e/2"])


def test_the_agent_that_is_shown_is_marked_for_those_who_hear_it(empty, episode_maker):
    both = [replace(episode_maker("e/0", 2, seed=n), agent_id=f"a{n}") for n in range(2)]
    empty.lake.dataset("pairs").append(both)
    page = empty.page("/datasets/pairs/episode?id=e/0&agent=a1")
    marked = [a["href"] for t, a in page.tags if t == "a" and a.get("aria-current") == "page"]
    assert any("agent=a1" in link for link in marked)
    assert not any("agent=a0" in link for link in marked)


def test_unknown_and_undefined_values_come_last(empty, monkeypatch):
    monkeypatch.setattr(episodes_page, "_PAGE_ROWS", 2)
    dataset = empty.lake.dataset("odd")
    returns = {"a": 1.0, "b": np.nan, "c": -7.0, "d": 5.0, "e": np.nan}
    dataset.create(Box((1,), "float64"), Discrete(2), rewards_optional=True)
    dataset.append(
        [
            Episode(k, np.zeros((1, 1)), np.zeros(1, np.int64), np.array([v]), terminated=True)
            for k, v in returns.items()
        ]
    )
    assert _read_all(empty, "odd", sort="return")[0] == ["c", "a", "d", "b", "e"]
    assert _read_all(empty, "odd", sort="return", order="descending")[0] == [
        "d",
        "a",
        "c",
        "b",
        "e",
    ]
    body = empty.json("/datasets/odd/episode.json?id=b&sort=return")
    assert body["previous"]["episode_id"] == "d"
    assert body["next"]["episode_id"] == "e"


def test_a_condition_is_sql_and_is_counted(explored):
    query = {"where": 'num_steps > 10 -- "return"', "sort": "steps", "order": "descending"}
    body = explored.json(f"/datasets/walks/episodes.json?{urlencode(query)}")
    assert [one["num_steps"] for one in body["episodes"]] == [14, 13, 12, 11]
    assert body["num_matching"] == 4
    page = explored.page(f"/datasets/walks/episodes?{urlencode(query)}")
    assert "4 episodes match" in page.text
    # The links to the episodes keep it, so that their neighbors are those of the list.
    assert any("where=num_steps" in link and "id=w%2F11" in link for link in page.links)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nonsense > 1", "nonsense"),
        ("1 = 1) UNION SELECT path, 1 FROM policies WHERE (true", "could not be used"),
        ("(SELECT count(*) FROM read_csv('/etc/passwd')) > 0", "read_csv"),
    ],
)
def test_a_condition_is_kept_in_the_sandbox(explored, where, said):
    page = explored.page(f"/datasets/walks/episodes?{urlencode({'where': where})}", 400)
    assert said in page.text
    assert "max_policy_version" in page.text  # the columns that it may name
    assert ("input", where) in [(tag, a.get("value")) for tag, a in page.tags]


def test_an_address_that_was_changed_is_refused_in_words(explored):
    assert "sort: found 'x'" in explored.page("/datasets/walks/episodes?sort=x", 400).text
    for after in ("[1,2]", "{}", "nonsense", '["1", 2, "x"]'):
        page = explored.page(f"/datasets/walks/episodes?{urlencode({'after': after})}", 400)
        assert "Begin with the first page." in page.text


def test_csv_of_the_episodes(explored):
    lines = explored.client.get("/datasets/walks/episodes.csv?sort=steps").text.splitlines()
    assert lines[0].startswith("episode_id,agent_id,num_steps,return")
    assert lines[1].startswith("w/00,,3,3.0,True,False")


def test_an_episode_has_its_curves(explored):
    page = explored.page("/datasets/walks/episode?id=w/02")
    assert ("div", "curves") in [(tag, a.get("data-plots")) for tag, a in page.tags]
    (data,) = [text for text in page.texts if text.startswith('{"x":')]
    plots = {one["title"]: one["series"] for one in json.loads(data)["plots"]}
    assert plots["Reward"][0]["values"] == [0, 1, 2, 3, 4]
    # The sum of the rewards from each step on.
    assert plots["Return to go"][0]["values"] == [10, 10, 9, 7, 4]
    assert [one["name"] for one in plots["Observation"]] == ["observation[0]", "observation[1]"]
    assert plots["Log-prob of the action, by its behavior policy"][0]["values"] == [-0.7] * 5


def test_the_return_to_go_of_a_long_episode_has_all_its_rewards(explored, monkeypatch):
    monkeypatch.setattr(episode_page, "_MAX_STEPS", 3)
    page = explored.page("/datasets/walks/episode?id=w/02")
    (data,) = [text for text in page.texts if text.startswith('{"x":')]
    plots = {one["title"]: one["series"] for one in json.loads(data)["plots"]}
    assert plots["Reward"][0]["values"] == [0, 1, 2]
    assert plots["Return to go"][0]["values"] == [10, 10, 9]


def test_an_episode_of_large_steps_is_cut_by_bytes(explored, monkeypatch):
    whole = explored.json("/datasets/walks/episode.json?id=w/09")["steps"]
    monkeypatch.setattr(episode_page, "_FIRST_STEPS", 2)
    # Read in parts, it is the same.
    assert explored.json("/datasets/walks/episode.json?id=w/09")["steps"] == whole
    lines = explored.client.get("/datasets/walks/episode.csv?id=w/09").text.splitlines()
    assert len(lines) == 1 + len(whole["step"]) == 13
    place = lines[0].split(",").index("step")
    assert [int(line.split(",")[place]) for line in lines[1:]] == whole["step"]
    monkeypatch.setattr(episode_page, "_MAX_STEP_BYTES", 1)
    page = explored.page("/datasets/walks/episode?id=w/09")
    assert "These are the first 2 of 12 steps." in page.text
    (data,) = [text for text in page.texts if text.startswith('{"x":')]
    plots = {one["title"]: one["series"] for one in json.loads(data)["plots"]}
    assert plots["Return to go"][0]["values"] == [66, 66]


def test_whole_numbers_are_exact_and_an_unknown_rest_is_no_return(empty, monkeypatch):
    dataset = empty.lake.dataset("ids")
    dataset.create(Box((1,), "float64"), Discrete(1 << 25), rewards_optional=True)
    actions = np.array([(1 << 24) + 1, 2, 3])
    rewards = np.array([1.0, 1.0, np.nan])
    dataset.append([Episode("e", np.zeros((3, 1)), actions, rewards, terminated=True)])
    monkeypatch.setattr(episode_page, "_MAX_STEPS", 2)
    page = empty.page("/datasets/ids/episode?id=e")
    (data,) = [text for text in page.texts if text.startswith('{"x":')]
    plots = {one["title"]: one["series"] for one in json.loads(data)["plots"]}
    assert plots["Action"][0]["values"] == [16_777_217, 2]
    assert "Return to go" not in plots


def test_an_episode_knows_its_neighbors_in_the_list(explored):
    where = urlencode({"id": "w/04", "where": "num_steps % 2 = 1", "sort": "steps"})
    body = explored.json(f"/datasets/walks/episode.json?{where}")
    assert (body["previous"]["episode_id"], body["next"]["episode_id"]) == ("w/02", "w/06")
    first = explored.json("/datasets/walks/episode.json?id=w/00")
    assert (first["previous"], first["next"]["episode_id"]) == (None, "w/01")
    assert len(first["steps"]["reward"]) == 3
    assert explored.page("/datasets/walks/episode?id=nothing", 404)
    assert explored.page("/datasets/walks/episode?id=w/00&agent=x", 404)


def test_hostile_texts_of_an_episode_are_texts(explored, hostile):
    query = urlencode({"id": hostile})
    page = explored.page(f"/datasets/hostile/episode?{query}")
    assert hostile in page.texts
    assert f"{hostile}:1" in page.texts
    assert hostile in explored.page("/datasets/hostile/episodes").texts
    assert explored.json(f"/datasets/hostile/episode.json?{query}")["episode"]["policy"] == hostile


def test_frames_are_pictures(explored, explored_lake):
    page = explored.page("/datasets/images/episode?id=i/0")
    (source,) = [a["src"] for tag, a in page.tags if tag == "img"]
    answer = explored.client.get(source)
    assert answer.headers["content-type"] == "image/png"
    frames = explored_lake.snapshot("images").arrays(["observation"])["observation"]
    assert np.array_equal(_decode_png(answer.content), frames[0])
    # Frames of a slider are read once each, and are not remembered.
    assert not any("frame" in str(key) for key in explored.client.app._memory._results)
    assert explored.client.get(source.replace("step=0", "step=99")).status_code == 404
    assert explored.client.get(source.replace("step=0", "step=x")).status_code == 400
    assert explored.page("/datasets/walks/frame?id=w/00&step=0", 404)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((5, 7), (5, 7, 1)), ((5, 7, 3), (5, 7, 3)), ((3, 5, 7), (5, 7, 3)), ((2, 5, 7), (5, 7, 1))],
)
def test_frames_of_each_layout(shape, expected):
    frame = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    decoded = _decode_png(encode_png(frame))
    assert decoded.shape == expected
    if shape == (3, 5, 7):
        assert np.array_equal(decoded, np.moveaxis(frame, 0, 2))
    if shape == (2, 5, 7):
        assert np.array_equal(decoded[:, :, 0], frame[-1])  # the last of a stack


def _decode_png(data):
    """Return the pixels [H, W, C] of a PNG whose lines have no filter."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, parts = 8, {}
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        (crc,) = struct.unpack(">I", data[place + 8 + size : place + 12 + size])
        assert crc == zlib.crc32(kind + body)
        parts[kind], place = body, place + 12 + size
    width, height, depth, color, *_ = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    channels = {0: 1, 2: 3, 6: 4}[color]
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, -1)
    assert depth == 8
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


def test_a_dialogue_is_a_conversation(empty):
    talk = Episode(
        "t/0",
        observations=["What is 2 < 3?", "<b>Sure?</b>"],
        actions=["<script>true</script>", "Yes."],
        rewards=[0.0, 1.0],
        terminated=True,
    )
    empty.lake.dataset("talks").append([talk])
    page = empty.page("/datasets/talks/episode?id=" + quote("t/0"))
    assert {"What is 2 < 3?", "<b>Sure?</b>", "<script>true</script>", "Yes."} <= set(page.texts)
    assert "Conversation" in page.texts
