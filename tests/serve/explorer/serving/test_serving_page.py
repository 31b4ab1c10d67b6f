"""Serving: decisions, arms, rewards and drift of what servers logged, against numbers by hand."""

import re
import time

import pytest

from replaylake.datastore.feedback.status import feedback_status


@pytest.fixture(scope="module")
def served(served_lake, reader_type):
    return reader_type(served_lake)


def find_rows(page, label):
    """Return the texts of a table's cells, by row."""
    region = re.search(rf'aria-label="{label}".*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", region[1], re.DOTALL)
    return [
        [
            re.sub(r"<[^>]*>", "", cell)
            for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        ]
        for row in rows
    ]


def test_arms_have_what_they_decided_and_earned(served):
    rows = find_rows(served.client.get("/serving/live").text, "Arms")
    assert [row[:9] for row in rows] == [
        ["clone:1", "10", "71.4%", "30.0%", "-0.5", "8", "0.5", "2", "2"],
        ["clone:2", "4", "28.6%", "25.0%", "-1", "4", "2", "1", "8"],
    ]


def test_what_became_of_decisions_is_counted(served):
    page = served.client.get("/serving/live").text
    rows = find_rows(page, "Decisions by what became of them")
    # Joined, of those without a reward, waiting, not joined, rewarded late.
    assert rows == [["clone:1", "8", "0", "2", "0", "0"], ["clone:2", "4", "0", "0", "0", "0"]]
    status = feedback_status(served.lake, "live").total
    assert (status.joined, status.waiting) == (12, 2)
    # The newest joined decision is the last one of c; the second one of d came an hour later.
    assert "59 min 58 s" in page


def test_old_decisions_no_longer_wait(served, monkeypatch):
    now = time.time()
    monkeypatch.setattr(
        "replaylake.serve.explorer.serving.serving_page.time.time", lambda: now + 90_000
    )
    rows = find_rows(served.client.get("/serving/live").text, "Decisions by what became of them")
    assert rows[0] == ["clone:1", "8", "0", "0", "2", "0"]


def test_the_delay_of_rewards_is_drawn(served):
    page = served.page("/serving/live")
    titles = [text for text in page.texts if re.search(r": \d+ rewards$", text)]
    named = dict(title.split(": ") for title in titles)
    assert {name for name, num in named.items() if num != "0 rewards"} == {
        "up to 100 ms",
        "up to 10 s",
        "up to 10 min",
    }
    assert named["up to 10 s"] == "4 rewards"
    rows = find_rows(served.client.get("/serving/live").text, "Delays by version")
    # Half of 5, 5, 5, 5, 500, 500, 500 and 500 seconds.
    assert rows == [["clone:1", "4 min 12 s", "8 min 20 s"], ["clone:2", "50 ms", "50 ms"]]


def test_drift_is_that_of_the_server(served):
    page = served.page("/serving/live")
    place = page.texts.index("clone:1", page.texts.index("Drift of observations"))
    assert page.texts[place + 1 : place + 5] == [
        "observation[0]",
        "+3",
        "observation[1]",
        "+0",
    ]
    assert "clone:2: its package has no statistics of its training observations." in page.texts


def test_requests_are_drawn_over_time(served):
    page = served.page("/serving/live")
    assert "Decisions in 5 min each (UTC)" in page.texts
    drawn = [text for text in page.texts if re.fullmatch(r"clone:[12]: \d+", text)]
    nums = [int(text.split(": ")[1]) for text in drawn]
    assert sum(nums) == 14
    assert "/metrics of the server has it" in page.text


def test_what_is_not_joined_says_how(served, hostile):
    page = served.page("/serving/fresh")
    assert "No reward has been joined." in page.texts
    assert "replaylake feedback join fresh" in page.texts
    assert "replaylake feedback status fresh\nreplaylake feedback join fresh" in page.texts
    assert "No decision has been joined into an episode." in page.texts
    assert f"{hostile}:1: not in this lake." in page.texts
    assert f"{hostile}:1" in page.texts


def test_logs_are_listed_and_linked(served, explored):
    page = served.page("/serving")
    assert "/serving/live" in page.links
    assert "/serving/fresh" in page.links
    rows = served.json("/serving.json")["logs"]
    assert [row["dataset"] for row in rows] == ["fresh", "live"]
    assert rows[1]["decisions"] == {"clone:1": 10, "clone:2": 4}
    assert served.client.get("/serving.csv").text.startswith("dataset,")
    assert "/serving/live" in served.page("/").links
    none = explored.page("/serving")
    assert "No server has logged decisions to this lake." in none.texts


def test_a_dataset_without_decisions_has_no_page(explored):
    for name in ("walks", "nowhere"):
        page = explored.page(f"/serving/{name}", 404)
        assert f"serving {name}: found no decisions" in page.text


def test_a_page_that_is_read_again_counts_nothing_again(served, monkeypatch):
    now = time.time()
    monkeypatch.setattr("replaylake.serve.explorer.serving.serving_page.time.time", lambda: now)
    served.client.get("/serving/live")
    asked = []
    sql = type(served.lake).sql
    monkeypatch.setattr(
        type(served.lake),
        "sql",
        lambda self, *args, **more: asked.append(args) or sql(self, *args, **more),
    )
    assert served.client.get("/serving/live").status_code == 200
    assert asked == []


def test_its_queries_are_those_that_ran(served):
    page = served.page("/serving/live")
    queries = [text for text in page.texts if text.startswith("SELECT")]
    assert len(queries) >= 5
    for query in queries:
        served.lake.sql(query)


@pytest.mark.parametrize("path", ["serving", "serving/live", "policies/clone", "runs", "sql"])
def test_below_a_prefix_links_and_forms_begin_with_it(served_lake, reader_type, path):
    page = reader_type(served_lake, path_prefix="/lake").page(f"/lake/{path}")
    addresses = [
        attributes[key]
        for _, attributes in page.tags
        for key in ("href", "src", "action")
        if key in attributes and not attributes[key].startswith("#")
    ]
    assert len(addresses) > 8
    assert all(address.startswith("/lake/") for address in addresses)
