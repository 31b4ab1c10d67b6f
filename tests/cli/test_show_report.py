"""`replaylake show --report`: one page that needs nothing else."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box
from replaylake.datastore.lake.lake import open_lake

_SECTIONS = [
    "Episodes",
    "Quantiles",
    "Best and worst episodes",
    "Rewards",
    "Actions",
    "Observations",
    "Coverage",
    "Propensities",
    "Policy versions",
    "Missing values",
    "Checks at ingest",
]


class _Page(HTMLParser):
    """Collects tags, headings and texts, and checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def _page(path: Path) -> _Page:
    page = _Page(path.read_text(encoding="utf-8"))
    assert not page.open
    # Nothing runs and nothing is fetched: links lead into the page, or hold their data.
    assert not page.tags & {"script", "iframe", "link", "object", "embed"}
    assert all(link.startswith(("#", "data:image/png")) for link in page.links)
    return page


def test_the_page_of_a_log(run: Any, log: Path, tmp_path: Path) -> None:
    run("ingest", log, "--dataset", "d", "--map", "observation=x,y")
    path = tmp_path / "report.html"
    ran = run("show", "d", "--report", path)
    assert ran.code == 0
    assert f"report       {path}" in ran.out
    page = _page(path)
    assert page.headings == _SECTIONS
    assert "svg" in page.tags
    assert "d@1" in page.texts
    assert any("Mean return 6.5, from 3 to 10" in text for text in page.texts)


@pytest.mark.slow
def test_json_has_the_numbers_of_the_page(run: Any, log: Path, tmp_path: Path) -> None:
    run("ingest", log, "--dataset", "d", "--map", "observation=x,y")
    body = run("show", "d", "--report", tmp_path / "r.html", "--json").json
    assert body["mean_return"] == 6.5
    assert body["report"] == str(tmp_path / "r.html")
    profile = body["profile"]
    assert [one["name"] for one in profile["observations"]] == ["x", "y"]
    assert sum(profile["returns"]["counts"]) == 2
    assert profile["num_sampled"] == 3


def test_names_from_data_do_nothing_to_the_page(run: Any, lake: Path, tmp_path: Path) -> None:
    num = 30
    hostile = "</p><script>alert(1)</script> $x^2$ & \x1b[31m"
    episode = Episode(
        "a/0",
        observations=np.random.default_rng(0).normal(size=(num, 2)),
        actions=np.zeros(num, np.int64),
        rewards=np.zeros(num),
        policies=np.full(num, hostile, dtype=object),
        policy_versions=np.full(num, 1),
    )
    open_lake(lake, create=True).dataset("d").append([episode])
    path = tmp_path / "report.html"
    assert run("show", "d", "--report", path).code == 0
    page = _page(path)
    assert "script" not in page.tags
    assert any("alert(1)" in text for text in page.texts)


@pytest.mark.parametrize("rewards", [np.full(3, np.nan), np.zeros(3), np.array([0.0, 1e300, 0])])
def test_odd_numbers_make_a_page_too(
    run: Any, lake: Path, tmp_path: Path, rewards: np.ndarray[Any, Any]
) -> None:
    episode = Episode("a/0", np.zeros((3, 2)), np.zeros((3, 1)), rewards)
    dataset = open_lake(lake, create=True).dataset("d")
    dataset.create(Box((2,), "float64"), Box((1,), "float64"), rewards_optional=True)
    dataset.append([episode])
    path = tmp_path / "report.html"
    assert run("show", "d", "--report", path).code == 0
    # Without a known return there is no best episode.
    is_known = bool(np.isfinite(rewards).all())
    expected = [one for one in _SECTIONS if is_known or one != "Best and worst episodes"]
    assert _page(path).headings == expected


def test_episodes_have_quantiles_extremes_days_and_sources(
    run: Any, lake: Path, tmp_path: Path
) -> None:
    # Returns 0, 1, ..., 8, on three days, from two sources.
    day_us, first_us = 86_400_000_000, 1_700_000_000_000_000
    episodes = [
        Episode(
            f"{'robot' if n < 6 else 'sim'}/{n}",
            observations=np.zeros((n + 1, 1)),
            actions=np.zeros((n + 1, 1)),
            rewards=np.array([0.0] * n + [float(n)]),
            terminated=True,
            timestamps=first_us + (n // 3) * day_us + np.arange(n + 1),
            extras={
                "arm": np.full(n + 1, f"<b>{n % 2}", dtype=object),
                "batch": np.full(n + 1, 7),
            },
        )
        for n in range(9)
    ]
    dataset = open_lake(lake, create=True).dataset("d")
    extras = {"arm": pa.string(), "batch": pa.int64()}
    dataset.create(Box((1,), "float64"), Box((1,), "float64"), extras=extras)
    dataset.append(episodes)
    path = tmp_path / "report.html"
    body = run("show", "d", "--report", path, "--json").json["episodes"]
    assert body["return_quantiles"] == pytest.approx([0, 0.4, 2, 4, 6, 7.6, 8])
    assert body["length_quantiles"] == pytest.approx([1, 1.4, 3, 5, 7, 8.6, 9])
    assert [one["return"] for one in body["best"]] == [8, 7, 6, 5, 4]
    assert body["worst"][0]["episode_id"] == "robot/0"
    days = [(one["name"], one["num_episodes"], one["mean"]) for one in body["days"]]
    assert days == [("2023-11-14", 3, 1.0), ("2023-11-15", 3, 4.0), ("2023-11-16", 3, 7.0)]
    sources = [(one["name"], one["num_episodes"], one["mean"]) for one in body["sources"]]
    assert sources == [("robot", 6, 2.5), ("sim", 3, 7.0)]
    assert (body["sources"][1]["low"], body["sources"][1]["high"]) == (6.5, 7.5)
    # A column of one value tells nothing.
    assert list(body["columns"]) == ["arm"]
    arms = [(one["name"], one["num_episodes"], one["mean"]) for one in body["columns"]["arm"]]
    assert arms == [("<b>0", 5, 4.0), ("<b>1", 4, 4.0)]
    page = _page(path)
    assert page.headings[1:6] == [
        "Quantiles",
        "Best and worst episodes",
        "Returns by day",
        "Returns by source",
        "Returns by arm",
    ]
    assert {"robot/0", "sim/8", "2023-11-15", "4 of 3 episodes", "2.5 of 6 episodes"} <= set(
        page.texts
    )


def test_a_bandit_log_has_the_reward_by_action(run: Any, lake: Path, tmp_path: Path) -> None:
    rewards = {0: [0.0, 1.0], 1: [2.0, 2.0, 5.0], 2: [7.0]}
    episodes = [
        Episode(f"b/{a}{n}", np.zeros((1, 1)), np.array([a]), np.array([reward]), terminated=True)
        for a, found in rewards.items()
        for n, reward in enumerate(found)
    ]
    open_lake(lake, create=True).dataset("d").append(episodes)
    path = tmp_path / "report.html"
    body = run("show", "d", "--report", path, "--json").json["episodes"]["action_rewards"]
    assert [(one["action"], one["num_steps"], one["mean"]) for one in body] == [
        ("0", 2, 0.5),
        ("1", 3, 3.0),
        ("2", 1, 7.0),
    ]
    # The standard deviation of 2, 2 and 5 is the root of 3, of which the root of 3 is the error 1.
    assert body[1]["error"] == pytest.approx(1.0)
    assert body[2]["error"] is None
    page = _page(path)
    assert "Reward by action" in page.headings
    assert "3 of 3 steps" in page.texts


@pytest.mark.slow
def test_what_is_encoded_keeps_its_names(run: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(
        "episode_id,age,device,item,reward,terminated\n"
        "a,31,ios,shoes,0,0\na,31,web,hat,1,1\nb,25,ios,hat,0,1\n"
    )
    run("ingest", log, "--dataset", "d", "--map", "observation=age,device", "--map", "action=item")
    body = run("show", "d", "--report", tmp_path / "r.html", "--json").json["profile"]
    names = [one["name"] for one in body["observations"]]
    assert names == ["age", "device: other", "device = ios", "device = web"]
    (actions,) = body["action_counts"]
    assert (actions["names"], actions["counts"]) == (["hat", "shoes"], [2, 1])
    page = _page(tmp_path / "r.html")
    assert {"hat", "shoes", "device = ios"} <= {text.strip() for text in page.texts}


def test_a_page_that_cannot_be_written(run: Any, log: Path, tmp_path: Path) -> None:
    run("ingest", log, "--dataset", "d", "--map", "observation=x,y")
    run("show", "d", "--report", tmp_path / "nowhere" / "r.html").failed("nowhere/r.html", "folder")
    run("show", "nothing", "--report", tmp_path / "r.html").failed("nothing")
    assert not (tmp_path / "r.html").exists()
