"""Several episodes in the same plots."""

import json
from dataclasses import replace
from urllib.parse import urlencode

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.serve.explorer.episodes import compare_page


def _plots(page):
    """Return the steps of the page's plots, and their lines by title and name."""
    (text,) = [text for text in page.texts if text.startswith('{"x":')]
    data = json.loads(text)
    plots = {
        one["title"]: {line["name"]: line["values"] for line in one["series"]}
        for one in data["plots"]
    }
    return data["x"], plots


def test_each_plot_has_a_line_for_each_episode_on_the_same_axis(explored):
    page = explored.page("/datasets/walks/compare?id=w/02&id=w/00")
    steps, plots = _plots(page)
    assert steps == [0, 1, 2, 3, 4]
    assert plots["Reward"] == {"w/02": [0, 1, 2, 3, 4], "w/00": [0, 1, 2, None, None]}
    assert plots["Return so far"]["w/02"] == [0, 1, 3, 6, 10]
    assert set(plots["observation[1]"]) == {"w/02", "w/00"}
    assert [text for text in page.texts if text.startswith("w/")] == ["w/02", "w/00"]
    # The colors of the legend are those of the lines.
    assert [a["class"] for tag, a in page.tags if tag == "rect"] == ["c0", "c1"]
    body = explored.json("/datasets/walks/compare.json?id=w/02&id=w/00")
    assert [one["num_steps"] for one in body["episodes"]] == [5, 3]
    # A shorter form for ids without commas; each episode is there once.
    short = explored.json("/datasets/walks/compare.json?ids=w/02,w/00,w/02")
    assert short["episodes"] == body["episodes"]


def test_more_episodes_than_colors_are_left_out_and_told(explored):
    ids = ",".join(f"w/{n:02}" for n in range(12))
    page = explored.page(f"/datasets/walks/compare?ids={ids}")
    assert len(_plots(page)[1]["Reward"]) == 8
    assert "At most 8 episodes are compared" in page.text
    eight = ",".join(f"w/{n:02}" for n in range(8))
    assert "At most 8" not in explored.page(f"/datasets/walks/compare?ids={eight}").text


def test_an_episode_stands_for_its_agents(empty, episode_maker):
    agents = [replace(episode_maker("e,0", 3, seed=n), agent_id=f"a{n}") for n in range(3)]
    empty.lake.dataset("pairs").append(agents)
    query = urlencode({"id": "e,0"})
    assert set(_plots(empty.page(f"/datasets/pairs/compare?{query}"))[1]["Reward"]) == {
        "e,0 a0",
        "e,0 a1",
        "e,0 a2",
    }
    # From the table of its agents, a link leads here; from the list, each agent is chosen alone.
    assert (
        f"/datasets/pairs/compare?{query}" in empty.page(f"/datasets/pairs/episode?{query}").links
    )
    boxes = [
        (a["name"], a["value"])
        for tag, a in empty.page("/datasets/pairs/episodes").tags
        if a.get("type") == "checkbox"
    ]
    assert boxes[1] == ("of", '["e,0", "a1"]')
    page = empty.page(f"/datasets/pairs/compare?{urlencode(boxes[1:])}")
    assert set(_plots(page)[1]["Reward"]) == {"e,0 a1", "e,0 a2"}


def test_of_long_episodes_steps_are_left_out_and_sums_are_whole(explored, monkeypatch):
    monkeypatch.setattr(compare_page, "_MAX_POINTS", 5)
    page = explored.page("/datasets/walks/compare?ids=w/11,w/00")
    steps, plots = _plots(page)
    assert steps == [0, 3, 6, 9, 12]
    assert plots["Reward"] == {"w/11": [0, 3, 6, 9, 12], "w/00": [0, None, None, None, None]}
    assert plots["Return so far"]["w/11"] == [0, 6, 21, 45, 78]
    assert "One of 3 steps is drawn" in page.text


def test_numbers_beyond_those_that_are_drawn_are_told(empty):
    wide = [
        Episode(f"e{n}", np.ones((4, 9)), np.ones((4, n)), np.zeros(4), terminated=True)
        for n in (300,)
    ]
    empty.lake.dataset("wide").append(wide)
    page = empty.page("/datasets/wide/compare?id=e300")
    _, plots = _plots(page)
    assert [title for title in plots if title.startswith("observation")] == [
        f"observation[{n}]" for n in range(6)
    ]
    assert not any(title.startswith("action") for title in plots)
    assert "the first 6 numbers are drawn, and none of those with more than 256" in page.text


@pytest.mark.parametrize("dataset", ["images", "chats"])
def test_frames_and_texts_have_no_lines(explored, dataset):
    (first, *_) = explored.json(f"/datasets/{dataset}/episodes.json")["episodes"]
    page = explored.page(f"/datasets/{dataset}/compare?{urlencode({'id': first['episode_id']})}")
    assert "Reward" in _plots(page)[1]
    assert not any(title.startswith("observation") for title in _plots(page)[1])


def test_what_is_not_there_is_refused_in_words(explored):
    page = explored.page("/datasets/walks/compare")
    assert "No episode is selected." in page.text
    assert "/datasets/walks/episodes" in page.links
    assert "episode 'x'" in explored.page("/datasets/walks/compare?id=w/00&id=x", 404).text
    of = urlencode({"of": '["w/00", "b"]'})
    assert "of agent 'b'" in explored.page(f"/datasets/walks/compare?{of}", 404).text
    for pair in ("[", "[1, 2]", '["a"]', "{}", "7"):
        page = explored.page(f"/datasets/walks/compare?{urlencode({'of': pair})}", 400)
        assert "Select episodes in their list." in page.text


def test_hostile_names_are_texts(explored, hostile):
    page = explored.page(f"/datasets/hostile/compare?{urlencode({'id': hostile})}")
    # Its middle is left out; the tooltip has all of it.
    shown = f"{hostile[:23]}\u2026{hostile[-10:]}"
    assert shown in page.texts
    assert hostile in [attributes.get("title") for _, attributes in page.tags]
    assert shown in _plots(page)[1]["Reward"]
