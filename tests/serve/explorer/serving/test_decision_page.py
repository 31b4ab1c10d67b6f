"""Decisions: from the data of the version that decided to the reward, and what is missing."""

from urllib.parse import urlencode

import pytest


@pytest.fixture(scope="module")
def traced(traced_lake, reader_type):
    return reader_type(traced_lake)


def find_decision(lake, dataset, episode, place):
    """Return a decision of a client's episode, by its place in it."""
    query = f"""SELECT decision_id FROM {dataset}.decisions WHERE episode_id = '{episode}'
        ORDER BY "timestamp" LIMIT 1 OFFSET {place}"""
    return lake.sql(query).to_pylist()[0]["decision_id"]


def test_a_decision_leads_to_its_version_run_data_and_episode(traced):
    key = find_decision(traced.lake, "live", "b", 3)
    page = traced.page(f"/decision?id={key}")
    for link in (
        "/policies/clone",
        "/runs/01first",
        "/datasets/walks?at=1",
        "/datasets/walks/episodes?where=num_steps+%3E+4&at=1",
    ):
        assert link in page.links
    body = traced.json(f"/decision.json?id={key}")
    assert body["decision"]["action"] == 1
    assert body["run"]["run_id"] == "01first"
    assert body["datasets"][0]["where"] == "num_steps > 4"
    assert body["joined"]["reward"] == 0.0
    assert (body["joined"]["return"], body["joined"]["num_steps"]) == (0.0, 4)
    episode = urlencode({"id": body["joined"]["episode_id"]})
    assert f"/datasets/live/episode?{episode}" in page.links
    steps = traced.page(f"/datasets/live/episode?{episode}")
    assert f"/decision?id={key}" in steps.links


def test_a_decision_without_a_reward_says_so(traced):
    page = traced.page(f"/decision?id={find_decision(traced.lake, 'live', 'd', 1)}")
    assert "No reward of this decision was reported." in page.text
    assert "The decision is not joined into a step yet." in page.text
    assert "none reported" in page.texts


def test_a_log_lists_its_newest_decisions_with_rewards(traced):
    page = traced.page("/serving/live")
    keys = [link for link in page.links if link.startswith("/decision?id=")]
    assert len(keys) == 10
    assert keys[0].endswith(find_decision(traced.lake, "live", "d", 1))
    assert page.texts.count("not joined") == 2


def test_an_id_that_nobody_signed_is_refused_in_words(traced):
    assert "found no dataset of this lake that signed it" in traced.page("/decision?id=x", 404).text
    assert "expected the decision_id" in traced.page("/decision", 400).text


def test_a_decision_of_a_policy_that_is_not_in_the_lake(served_lake, reader_type, hostile):
    served = reader_type(served_lake)
    key = find_decision(served_lake, "fresh", "a", 0)
    page = served.page(f"/decision?{urlencode({'id': key})}", 404)
    assert hostile in page.text
