"""An episode's agents: the tree of branches, the links in it, and agents side by side."""

from dataclasses import replace
from urllib.parse import urlencode

import numpy as np
import pytest

from replaylake.serve.explorer.episodes import agents_panel


def _branches(page):
    """Return the agents of the tree as (depth, address)."""
    return [
        (a["class"], a["href"])
        for tag, a in page.tags
        if tag == "a" and a.get("class", "").startswith("depth-")
    ]


def test_a_tree_has_each_agent_below_the_one_that_it_goes_on_from(empty, generations_maker):
    def branch(agent, parent, step, num=2):
        own = {"parent_agent_id": [parent] + [None] * (num - 1)}
        own["parent_step"] = [step] + [None] * (num - 1)
        texts = [f"{agent} {n}" for n in range(num)]
        return generations_maker("e", texts, agent=agent, **own)

    def delay(episode, start):
        return replace(episode, env_steps=np.arange(start, start + len(episode)))

    root = delay(generations_maker("e", ["a", "b", "c"], agent="root"), 0)
    agents = [
        root,
        delay(branch("a", "root", 1), 2),
        delay(branch("b", "a", 0), 3),
        delay(branch("z", "root", 0), 1),
    ]
    empty.lake.dataset("tree").append(agents)
    page = empty.page("/datasets/tree/episode?id=e&agent=root")
    shown = [(kind, link.partition("agent=")[2]) for kind, link in _branches(page)]
    assert shown == [("depth-0", "root"), ("depth-1", "a"), ("depth-2", "b"), ("depth-1", "z")]
    assert "step 0 from a step 0" in page.text
    # The turn after which it forks leads to the branch, and the branch back.
    ids = {a["id"] for tag, a in page.tags if a.get("id", "").startswith("turn-")}
    links = [link for link in page.links if link.startswith("#turn-")]
    assert {link[1:] for link in links} <= ids
    assert len(ids) == 9
    assert len(links) == 6
    assert "branched to a step 0" in page.text
    assert "branches from root step 1" in page.text


def test_branches_within_one_agent_and_rewritten_histories_are_told(empty, generations_maker):
    forks = {
        "parent_step": [None, None, 0, None],
        "is_continuation": [None, None, None, False],
    }
    episode = generations_maker("e", ["a", "b", "c", "d"], **forks)
    plain = generations_maker("f", ["a", "b"], parent_step=[None, 0])
    empty.lake.dataset("forks").append([episode, plain])
    text = empty.page("/datasets/forks/episode?id=e").text
    assert "step 2 from step 0 step 3: a rewritten history" in text
    # A parent that is the step before is no branch.
    assert "Branches" not in empty.page("/datasets/forks/episode?id=f").text


def test_an_agent_that_goes_on_from_its_branch_stays_above_it(empty, generations_maker):
    # b begins after a's first step, and a's last step goes on from b.
    back = {"parent_agent_id": [None, "b"], "parent_step": [None, 0]}
    first = replace(
        generations_maker("e", ["x", "y"], agent="a", **back), env_steps=np.array([0, 2])
    )
    out = {"parent_agent_id": ["a"], "parent_step": [0]}
    second = replace(generations_maker("e", ["z"], agent="b", **out), env_steps=np.array([1]))
    empty.lake.dataset("loop").append([first, second])
    page = empty.page("/datasets/loop/episode?id=e")
    assert [kind for kind, _ in _branches(page)] == ["depth-0", "depth-1"]
    assert "step 1 from b step 0" in page.text
    assert "step 0 from a step 0" in page.text


def test_hostile_names_of_agents_are_texts(explored, hostile):
    values = urlencode({"id": "tree#0", "agent": f"solver~{hostile}"})
    page = explored.page(f"/datasets/chats/episode?{values}")
    assert f"solver~{hostile}" in page.texts
    assert "Side by side" in page.texts


def test_agents_side_by_side_by_their_common_time(empty, episode_maker):
    first = replace(episode_maker("e", 3), agent_id="", env_steps=np.array([0, 2, 4]))
    second = replace(episode_maker("e", 2, seed=1), agent_id="b", env_steps=np.array([1, 2]))
    empty.lake.dataset("pairs").append([first, second])
    page = empty.page("/datasets/pairs/episode?id=e&agent=b&sort=steps")
    rows = page.text.partition("Side by side")[2].partition("SQL of")[0]
    a, b = first.actions, second.actions
    assert (
        rows.split()
        == (
            f"Step (no name) b 0 {a[0]} step 0 1 {b[0]} step 0 "
            f"2 {a[1]} step 1 \u00b7 reward 1 {b[1]} step 1 \u00b7 reward 1 "
            f"4 {a[2]} step 2 \u00b7 reward 2"
        ).split()
    )
    # Links keep the list, and name the agent that has no name.
    assert any(link.endswith("sort=steps&agent=") for link in page.links)
    other = empty.page("/datasets/pairs/episode?id=e&agent=&sort=steps")
    assert "Agents" in other.texts


def test_of_many_agents_it_says_which_are_shown(empty, monkeypatch, episode_maker):
    monkeypatch.setattr(agents_panel, "_MAX_AGENTS", 5)
    monkeypatch.setattr(agents_panel, "_MAX_TIMES", 2)
    agents = [replace(episode_maker("e", 3, seed=n), agent_id=f"a{n}") for n in range(8)]
    empty.lake.dataset("many").append(agents)
    page = empty.page("/datasets/many/episode?id=e&agent=a4")
    assert "8 agents, of which these are 5" in page.text
    assert len(_branches(page)) == 5
    assert "6 of 8 agents, from the one that is shown; the first 2 steps" in page.text
    beside = page.text.partition("Side by side")[2]
    # The last six: as many as there is room for.
    assert "Step a2 a3 a4 a5 a6 a7 0" in beside


@pytest.mark.parametrize("text", ["x" * 399, "x" * 400, "x" * 401])
def test_long_actions_are_cut(empty, generations_maker, text):
    agents = [generations_maker("e", [text], agent=name) for name in "ab"]
    empty.lake.dataset("long").append(agents)
    page = empty.page("/datasets/long/episode?id=e")
    beside = page.text.partition("Side by side")[2].partition("Sampled")[0]
    assert beside.count("x" * min(400, len(text))) == 2
    assert ("\u2026" in beside) == (len(text) > 400)
