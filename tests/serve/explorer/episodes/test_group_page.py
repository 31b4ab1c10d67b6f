"""Groups: their list, and the samples of one prompt beside each other with their returns."""

import math
from urllib.parse import urlencode

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Discrete, Text
from replaylake.serve.explorer.episodes import group_page


def _bars(page):
    """Return the bars of the page's chart: what each says, and where it leads."""
    return [
        (a["aria-label"], a["href"]) for tag, a in page.tags if tag == "a" and "aria-label" in a
    ]


def _samples(page):
    """Return the ids of the samples that are shown."""
    return [text for text in page.texts if text.startswith(("sum#", "many#", "e#"))]


def test_groups_are_listed_and_sorted(explored, monkeypatch, hostile):
    page = explored.page("/datasets/chats/groups?sort=mean&order=descending")
    assert "3 groups." in page.text
    assert hostile in page.texts
    body = explored.json("/datasets/chats/groups.json?sort=mean&order=descending")
    assert [one["group_id"] for one in body["groups"]] == ["tree", hostile, "sum"]
    assert body["groups"][2]["mean"] == 0.5
    sorts = {a["aria-sort"] for tag, a in page.tags if "aria-sort" in a}
    assert sorts == {"descending"}
    monkeypatch.setattr(group_page, "_PAGE_GROUPS", 2)
    found, address = [], "/datasets/chats/groups"
    while address:
        page = explored.page(address)
        found += [link for link in page.links if "/group?" in link]
        address = next((a for a in page.links if "after=2" in a and a not in address), None)
    assert len(found) == len(set(found)) == 3
    assert "Groups" in explored.page("/datasets/chats").texts
    assert "Groups" not in explored.page("/datasets/walks").texts
    assert "group_id" in explored.page("/datasets/walks/groups", 404).text
    assert "sort: found 'x'" in explored.page("/datasets/chats/groups?sort=x", 400).text
    assert "after: found" in explored.page("/datasets/chats/groups?after=-1", 400).text


def test_a_group_has_its_samples_the_best_first(explored):
    page = explored.page("/datasets/chats/group?id=sum")
    assert _samples(page) == ["sum#4", "sum#3", "sum#2", "sum#1", "sum#0"]
    # Stored advantages of the tokens: the return minus 0.5.
    assert (
        "return 0.25 \u00b7 advantage -0.25 \u00b7 2 steps \u00b7 2 tokens \u00b7 version 3"
        in page.text
    )
    assert "the mean of its stored advantages" in page.text
    assert "prompt 0" in page.texts
    # From the page of an episode, a link leads here.
    assert (
        "/datasets/chats/group?id=sum" in explored.page("/datasets/chats/episode?id=sum%232").links
    )
    lines = explored.client.get("/datasets/chats/group.csv?id=sum").text.splitlines()
    assert lines[0].startswith("episode_id,return,num_steps,num_tokens,advantage")
    assert lines[1].startswith("sum#4,1.0,5,5,0.5,3,3")
    assert "group 'x'" in explored.page("/datasets/chats/group?id=x", 404).text


def test_a_bar_selects_its_samples(explored):
    bars = _bars(explored.page("/datasets/chats/group?id=sum"))
    assert [said for said, _ in bars] == [
        f"{value}: 1 sample" for value in ("0", "0.25", "0.5", "0.75", "1")
    ]
    page = explored.page(bars[1][1])
    assert _samples(page) == ["sum#1"]
    assert "Shown are returns from 0.25 to 0.25." in page.text
    body = explored.json("/datasets/chats/group.json?id=sum&high=0.5")
    assert [one["episode_id"] for one in body["samples"]] == ["sum#2", "sum#1", "sum#0"]
    page = explored.page("/datasets/chats/group?id=sum&low=7")
    assert "No sample has such a return" in page.text
    for low in ("x", "nan", "inf"):
        address = f"/datasets/chats/group?id=sum&low={low}"
        assert "expected a finite number" in explored.page(address, 400).text


@pytest.mark.parametrize("spread", [1.0, 1e308, 1e-300])
def test_bars_of_many_returns_hold_every_sample_once(empty, generations_maker, spread):
    rng = np.random.default_rng(0)
    returns = [spread * one for one in rng.uniform(-1, 1, 40)]
    samples = [generations_maker(f"many#{n}", ["x"], reward=one) for n, one in enumerate(returns)]
    empty.lake.dataset("many").append(samples)
    bars = _bars(empty.page("/datasets/many/group?id=many"))
    assert len(bars) <= 12
    found = []
    for said, address in bars:
        body = empty.json(address.replace("?", ".json?"))
        assert said.endswith(f": {len(body['samples'])} sample{'s' * (len(body['samples']) > 1)}")
        found += [one["episode_id"] for one in body["samples"]]
    assert sorted(found) == sorted(f"many#{n}" for n in range(40))


def test_samples_are_shown_page_by_page(explored, monkeypatch):
    monkeypatch.setattr(group_page, "_PAGE_SAMPLES", 2)
    page = explored.page("/datasets/chats/group?id=sum&low=0.25")
    assert _samples(page) == ["sum#4", "sum#3"]
    assert "4 samples, the best first; these are 1 to 2." in page.text
    (address,) = [link for link in page.links if "after=2" in link]
    page = explored.page(address)
    assert _samples(page) == ["sum#2", "sum#1"]
    assert not any("after=4" in link for link in page.links)


def test_without_stored_advantages_they_are_those_of_the_group(empty, generations_maker):
    samples = [generations_maker(f"e#{n}", ["x"], reward=float(n)) for n in range(3)]
    for sample in samples:
        del sample.extras["action_advantages"]
    empty.lake.dataset("plain").append(samples)
    page = empty.page("/datasets/plain/group?id=e")
    # Returns 0, 1 and 2: mean 1, std 1.
    assert "return 2 \u00b7 advantage +1 \u00b7" in page.text
    assert "return 0 \u00b7 advantage -1 \u00b7" in page.text
    assert "(GRPO)" in page.text


def test_samples_without_a_known_return_are_shown(empty, generations_maker):
    dataset = empty.lake.dataset("odd")
    dataset.create(Text(), Text(), rewards_optional=True)
    none = {"action_advantages": [[0.0]]}
    dataset.append([generations_maker(f"e#{n}", ["x"], reward=math.nan, **none) for n in range(2)])
    page = empty.page("/datasets/odd/group?id=e")
    assert _samples(page) == ["e#0", "e#1"]
    assert "No sample has a known return." in page.text
    assert "return unknown" in page.text


def test_groups_of_numbers_and_long_texts(empty, episode_maker, generations_maker):
    episodes = [episode_maker(f"e#{n}", 3, seed=n) for n in range(2)]
    for episode in episodes:
        episode.extras["group_id"] = np.full(3, 7)
    dataset = empty.lake.dataset("numbers")
    dataset.append(episodes)
    assert isinstance(dataset.snapshot().spec.action_space, Discrete)
    page = empty.page("/datasets/numbers/group?id=7")
    assert _samples(page) == ["e#0", "e#1"]
    assert "Prompt" not in page.texts
    text = "".join(f"{n}," for n in range(500))
    empty.lake.dataset("long").append([generations_maker("e#0", [text])])
    page = empty.page("/datasets/long/group?id=e")
    shown = "".join(one for one in page.texts if one.endswith("\u2026") or one.startswith("\u2026"))
    # Of 2,000 characters, the first 600 at once.
    assert shown.replace("\u2026", "") == text[:2000]


def test_hostile_texts_of_a_group_are_texts(explored, hostile):
    page = explored.page(f"/datasets/chats/group?{urlencode({'id': hostile})}")
    assert f"{hostile}#0" in [attributes.get("title") for _, attributes in page.tags]
    assert f"ok\n{hostile}" in page.texts
