"""Episodes by day, source and column."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.explorer.episodes import breakdown_page


def _episode(name, reward, day, num=2, **extras):
    at = datetime(2026, 11, day, 23, 59, tzinfo=UTC)
    times = [int((at + timedelta(seconds=n)).timestamp() * 1e6) for n in range(num)]
    return Episode(
        name,
        np.zeros((num, 1)),
        np.zeros(num, np.int64),
        np.array([0.0] * (num - 1) + [reward]),
        truncated=True,
        timestamps=np.array(times),
        extras={key: np.array([value] * num, object) for key, value in extras.items()},
    )


@pytest.fixture(scope="module")
def days(tmp_path_factory, reader_type, hostile):
    """Five episodes on three days, of two sources, with an operator; one has no time."""
    timeless = replace(_episode("y/4", 9.0, 1, operator=hostile), timestamps=None)
    lake = open_lake(tmp_path_factory.mktemp("days") / "lake", create=True)
    lake.dataset("days").append(
        [
            _episode("x/0", 1.0, 1, operator="ann"),
            _episode("x/1", 3.0, 1, operator="o'brien"),
            _episode("y/2", -8.0, 2, num=4, operator="ann"),
            _episode("y/3", 4.0, 3, operator="o'brien"),
            timeless,
        ]
    )
    return reader_type(lake)


def _rows(reader, **query):
    body = reader.json(f"/datasets/days/breakdown.json?{urlencode(query)}")
    return {row["key"]: row for row in body["rows"]}


def test_days_have_their_means_and_quartiles(days):
    found = _rows(days, by="day")
    assert list(found) == ["2026-11-03", "2026-11-02", "2026-11-01", None]
    assert found["2026-11-01"] == {
        "key": "2026-11-01",
        "num_episodes": 2,
        "num_terminated": 0,
        "num_known": 2,
        "mean_return": 2.0,
        "mean_num_steps": 2.0,
        "mean": 2.0,
        "low": 1.5,
        "high": 2.5,
    }
    page = days.page("/datasets/days/breakdown")
    assert "line: mean, 1.8" in page.texts
    assert "Return by day (UTC)" in page.texts


def test_the_line_is_the_mean_of_the_episodes_whose_value_is_known(empty, monkeypatch):
    # Nine episodes of `a` are too short for a jerk; that of the others is 1 and 9.
    cubes = np.array([[0.0], [0.0], [0.0], [1.0]])
    short = [_episode(f"a/{n}", 0.0, 1) for n in range(9)]
    short = [replace(one, actions=np.zeros((2, 1))) for one in short]
    long = [
        replace(_episode(name, 0.0, 1, num=4), actions=cubes * scale)
        for name, scale in (("a/9", 1.0), ("b/0", 9.0))
    ]
    empty.lake.dataset("arms").append([*short, *long])
    address = "/datasets/arms/breakdown?by=source&sort=jerk"
    body = empty.json(address.replace("?", ".json?"))
    assert body["overall_mean"] == 5.0
    assert [(row["num_episodes"], row["num_known"]) for row in body["rows"]] == [(10, 1), (1, 1)]
    assert "line: mean, 5" in empty.page(address).texts
    # Rows that are left out count, too.
    monkeypatch.setattr(breakdown_page, "_MAX_ROWS", 1)
    body = empty.json(address.replace("?", ".json?"))
    assert (len(body["rows"]), body["overall_mean"]) == (1, 5.0)


@pytest.mark.parametrize("by", ["day", "source", "policy", "version", "operator", "agent_id"])
def test_a_row_leads_to_its_episodes(days, by):
    page = days.page(f"/datasets/days/breakdown?by={by}")
    rows = _rows(days, by=by)
    links = [link for link in page.links if "/episodes?where=" in link]
    assert len(links) == len(rows)
    ids = []
    for link, row in zip(links, rows.values(), strict=True):
        # In this process, as a sandbox for each would take long.
        (where,) = parse_qs(urlsplit(link).query)["where"]
        found = days.lake.sql(f"SELECT episode_id FROM days.episodes WHERE {where}")
        assert found.num_rows == row["num_episodes"], where
        ids += found["episode_id"].to_pylist()
    assert sorted(ids) == ["x/0", "x/1", "y/2", "y/3", "y/4"]


def test_the_condition_of_a_row_is_beside_that_of_the_list(days):
    query = urlencode({"by": "operator", "where": "num_steps < 9 -- all"})
    page = days.page(f"/datasets/days/breakdown?{query}")
    (link,) = [link for link in page.links if "brien" in link and "/episodes?where=" in link]
    body = days.json(link.replace("?", ".json?"))
    assert [one["episode_id"] for one in body["episodes"]] == ["x/1", "y/3"]


def test_columns_are_of_the_first_known_value(days, hostile):
    found = _rows(days, by="operator")
    assert {key: row["mean_return"] for key, row in found.items()} == {
        "ann": -3.5,
        "o'brien": 3.5,
        hostile: 9.0,
    }
    page = days.page("/datasets/days/breakdown?by=operator")
    assert hostile in page.texts


def test_the_value_is_what_the_list_is_sorted_by(days):
    found = _rows(days, by="source", sort="steps")
    assert {key: row["mean"] for key, row in found.items()} == {"x": 2.0, "y": 8 / 3}
    page = days.page("/datasets/days/breakdown?by=source&sort=repetition")
    assert "Repetition by source" in page.texts
    assert "Mean repetition" in page.texts
    found = _rows(days, by="source", sort="repetition", where="repetition > 0.5")
    assert {key: row["mean"] for key, row in found.items()} == {"x": 1.0, "y": 1.0}


def test_a_condition_is_kept_in_the_sandbox_and_refused_in_words(days):
    where = "(SELECT count(*) FROM read_csv('/etc/passwd')) > 0"
    page = days.page(f"/datasets/days/breakdown?{urlencode({'where': where})}", 400)
    assert "read_csv" in page.text
    assert (
        "expected one of day, source, policy"
        in days.page("/datasets/days/breakdown?by=reward", 400).text
    )
    assert (
        "No episode matches."
        in days.page(f"/datasets/days/breakdown?{urlencode({'where': 'num_steps > 99'})}").text
    )


def test_the_sql_of_the_panel_runs(days):
    page = days.page("/datasets/days/breakdown?by=operator&sort=repetition")
    (address,) = [link for link in page.links if link.startswith("/sql?")]
    assert "o'brien" in days.page(address).texts


def test_lists_lead_here(explored):
    page = explored.page("/datasets/walks/episodes?sort=steps")
    assert "/datasets/walks/breakdown?sort=steps" in page.links
    assert "later" in explored.page("/datasets/walks/breakdown?by=remark").texts
