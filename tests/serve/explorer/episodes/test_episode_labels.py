"""Labels on an episode's page: what its form writes, the queue of a list, and what is refused."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.maintenance.labels.episode_labels import (
    label_episode,
    read_episode_labels,
)
from replaylake.datastore.maintenance.scoring.function_scorer import FunctionScorer
from replaylake.datastore.maintenance.scoring.score import score
from replaylake.datastore.storage.table.table import Table
from replaylake.serve.explorer.episodes import episode_page, episodes_page
from replaylake.serve.explorer.visits.request_queue import RequestQueue
from replaylake.serve.safety.tokens import Tokens

TOKEN = "a-token-of-24-characters"
LABEL = "/datasets/walks/label"
# Numbers that need all their digits, an exponent, or both.
NUMBERS = [1 / 3, 1e-7, -1.7e308, 9007199254740991.0, 4.0]


@pytest.fixture
def lake(tmp_path, episode_maker):
    """`walks`: episodes w/0 to w/4 of 3 to 7 steps, whose returns are 3, 6, 10, 15 and 21."""
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("walks").append([episode_maker(f"w/{n}", n + 3, seed=n) for n in range(5)])
    return lake


@pytest.fixture
def reader(lake, reader_type):
    return reader_type(lake)


def make_still(name):
    """Return an episode that always acts alike."""
    return Episode(
        name,
        observations=np.zeros((4, 2)),
        actions=np.zeros(4, np.int64),
        rewards=np.zeros(4),
        terminated=True,
        extras={"remark": np.full(4, "still", dtype=object)},
    )


def _page(number, **values):
    more = "".join(f"&{name}={value}" for name, value in values.items())
    return f"/datasets/walks/episode?id=w/{number}{more}"


def _set(reader, number, value="bad", *, path=None, status=303, **changes):
    """Send the form of a page, or, sooner, the same without reading its page."""
    if path is not None:
        fields = reader.fields(path, "labels")
    else:
        fields = {
            "form_token": reader.app._form_tokens.issue(b""),
            "id": f"w/{number}",
            "seen": str(reader.lake.snapshot("walks").version),
            "label": "verdict",
        }
    fields |= {"by": "Ada", "value": value, **changes}
    answer = reader.post(LABEL, fields)
    assert answer.status_code == status, answer.text
    return answer


def _labels(reader, number):
    snapshot = reader.lake.snapshot("walks")
    return {k: v.value for k, v in read_episode_labels(snapshot, f"w/{number}").items()}


def test_a_label_is_set_with_who_and_when(reader):
    answer = _set(reader, 1, path=_page(1))
    page = reader.page(answer.headers["location"])
    assert "Saved in version 2: verdict of w/1 is bad." in page.text
    assert {"verdict", "bad", "Ada"} <= set(page.texts)
    body = reader.json(_page(1).replace("episode?", "episode.json?"))
    assert body["labels"]["verdict"]["value"] == "bad"
    assert body["labels"]["verdict"]["by"] == "Ada"
    # The browser keeps the name for the next form.
    assert ("input", "Ada") in [(tag, a.get("value")) for tag, a in page.tags]
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]


def test_episodes_of_a_lake_on_s3_are_labeled(bucket, episode_maker, reader_type):
    lake = open_lake(f"s3://{bucket}/team a/lake", create=True)
    lake.dataset("walks").append([episode_maker(f"w/{n}", n + 3, seed=n) for n in range(3)])
    reader = reader_type(lake)
    address = reader.app._links("datasets", "walks", "next", sort="return")
    answer = reader.client.get(address, follow_redirects=False)
    answer = _set(reader, None, path=answer.headers["location"])
    assert _labels(reader, 0) == {"verdict": "bad"}
    # Another process has labeled the episode that this page shows.
    fields = reader.fields(_page(1), "labels")
    label_episode(
        lake, "walks", "verdict", "good", by="Bo", episode_id="w/1", agent_id="", seen=None
    )
    refused = reader.post(LABEL, {**fields, "by": "Ada", "value": "bad"})
    assert refused.status_code == 409
    assert _labels(reader, 1) == {"verdict": "good"}
    undo = {"by": "Ada", "undo": "2", "id": "w/0"}
    fields = {"form_token": reader.app._form_tokens.issue(b""), **undo}
    assert reader.post(LABEL, fields).status_code == 303
    assert _labels(reader, 0) == {}
    assert "w/2" in reader.page("/datasets/walks/episodes").texts


def test_a_label_of_a_list_leads_to_the_next_without_it(reader):
    page = reader.page("/datasets/walks/episodes?sort=return&order=descending")
    address = next(link for link in page.links if "/next?" in link)
    seen = []
    for _ in range(5):
        answer = reader.client.get(address, follow_redirects=False)
        values = parse_qs(urlsplit(answer.headers["location"]).query)
        seen.append(values["id"][0])
        assert values["queue"] == ["verdict"]
        answer = _set(reader, None, path=answer.headers["location"])
        address = answer.headers["location"]
    # By return from the top.
    assert seen == ["w/4", "w/3", "w/2", "w/1", "w/0"]
    page = reader.page(address)
    assert "Every episode of this list has the label verdict." in page.text
    assert "Saved in version 6: verdict of w/0 is bad." in page.text


@pytest.mark.parametrize("most", [5000, 2])
def test_labels_of_a_ranked_list_compute_no_measure_again(reader, monkeypatch, most):
    monkeypatch.setattr(episodes_page, "_MAX_RANKED", most)
    computed = []
    sql = Lake.sql

    def count(self, text, *arguments, **options):
        computed.append("AS repetition" in text)
        return sql(self, text, *arguments, **options)

    monkeypatch.setattr(Lake, "sql", count)
    rows = reader.json("/datasets/walks/episodes.json?sort=repetition&order=descending")
    order = [row["episode_id"] for row in rows["episodes"]]
    address = "/datasets/walks/next?sort=repetition&order=descending&label=verdict"
    seen = []
    for _ in range(5):
        answer = reader.client.get(address, follow_redirects=False)
        page = answer.headers["location"]
        name = parse_qs(urlsplit(page).query)["id"][0]
        seen.append(name)
        place = order.index(name)
        body = reader.json(page.replace("episode?", "episode.json?"))
        assert body["episode"]["repetition"] == rows["episodes"][place]["repetition"]
        for key, at in (("previous", place - 1), ("next", place + 1)):
            found = body[key] and body[key]["episode_id"]
            assert found == (order[at] if 0 <= at < 5 else None)
        address = _set(reader, None, path=page).headers["location"]
    assert seen == order
    assert "Every episode of this list has the label" in reader.page(address).text
    if most == 5000:
        # For the list, and for the ranking, of which each label is a later version.
        assert sum(computed) == 2
    # Further data is another ranking.
    dataset = reader.lake.dataset("walks")
    dataset.append([make_still("w/9")])
    answer = reader.client.get(address, follow_redirects=False)
    assert "id=w%2F9" in answer.headers["location"]


def test_the_queue_is_within_the_condition_of_the_list(reader):
    where = "num_steps IN (4, 6) -- the second and the fourth"
    for number in (0, 1):
        _set(reader, number)
    address = reader.app._links("datasets", "walks", "next", where=where)
    answer = reader.client.get(address, follow_redirects=False)
    values = parse_qs(urlsplit(answer.headers["location"]).query)
    assert (values["id"], values["where"]) == (["w/3"], [where])
    page = reader.page(reader.app._links("datasets", "walks", "next", where="no_column > 1"), 400)
    assert "no_column" in page.text


def test_the_queue_begins_again_after_its_end(reader):
    for number in (3, 4):
        _set(reader, number)
    after = reader.fields(_page(4), "labels")["after"]
    address = f"/datasets/walks/next?label=verdict&after={after}"
    answer = reader.client.get(address, follow_redirects=False)
    assert answer.headers["location"].startswith("/datasets/walks/episode?id=w%2F0&")


def test_a_flag_stays_on_the_page_and_is_removed(reader):
    path = _page(2, queue="verdict")
    answer = _set(reader, 2, path=path, flag="true")
    assert urlsplit(answer.headers["location"]).path == "/datasets/walks/episode"
    assert _labels(reader, 2) == {"flagged": True}
    assert "Remove flag" in reader.page(path).text
    _set(reader, 2, path=path, flag="false")
    assert _labels(reader, 2) == {"flagged": None}
    assert "removed by Ada" in reader.page(path).text


def test_numbers_are_numbers_and_texts_stay_texts(reader):
    _set(reader, 0, "4", label="rating")
    _set(reader, 1, "2.5", label="rating")
    _set(reader, 0, "good", label="verdict")
    _set(reader, 1, "4", label="remark_of_me")
    _set(reader, 1, "many", label="verdict")
    _set(reader, 1, "4", label="verdict")
    assert _labels(reader, 0) == {"rating": 4.0, "verdict": "good"}
    assert _labels(reader, 1) == {"rating": 2.5, "remark_of_me": 4.0, "verdict": "4"}
    answer = _set(reader, 2, "good", label="rating", status=400)
    assert "found 'good', expected a number" in answer.text
    # The values have the keys 1 and 2 on every page, in the order in which they came.
    quick = [a["value"] for _, a in reader.page(_page(3)).tags if a.get("name") == "quick"]
    assert quick == ["4", "2.5"]
    _set(reader, 3, quick="2.5", label="rating")
    assert _labels(reader, 3) == {"rating": 2.5}


def test_a_number_survives_its_text_and_its_condition(tmp_path, reader_type, episode_maker):
    num = len(NUMBERS)
    lake = open_lake(tmp_path / "numbers", create=True)
    lake.dataset("walks").append([episode_maker(f"w/{n}", 2, seed=n) for n in range(2 * num)])
    for n, number in enumerate(NUMBERS):
        label_episode(lake, "walks", "rating", number, episode_id=f"w/{n}", by="Ada")
    reader = reader_type(lake)
    page = reader.page(_page(num, label="rating"))
    quick = [a["value"] for _, a in page.tags if a.get("name") == "quick"]
    assert [float(text) for text in quick] == NUMBERS
    for n, text in enumerate(quick):
        _set(reader, num + n, quick=text, label="rating")
        assert _labels(reader, num + n) == {"rating": NUMBERS[n]}
    page = reader.page(_page(0))
    conditions = [text for text in page.texts if text.startswith("any(rating = ")]
    assert len(conditions) == num
    snapshot = lake.snapshot("walks")
    for condition in conditions:
        assert snapshot.replay(where=condition).num_steps == 4, condition
    for link in [link for link in page.links if "IN+%28SELECT" in link]:
        assert reader.json(link.replace("?", ".json?"))["num_matching"] == 2


def test_what_is_no_number_of_a_float_stays_a_text(reader):
    for label, text in (
        ("long", "12345678901234567890"),
        ("other", "\u0661\u0662"),
        ("big", "1e999"),
    ):
        _set(reader, 0, text, label=label)
    assert _labels(reader, 0) == {
        "long": "12345678901234567890",
        "other": "\u0661\u0662",
        "big": "1e999",
    }
    _set(reader, 0, "1e-7", label="rating")
    assert "found inf" in _set(reader, 1, "1e999", label="rating", status=400).text


def test_a_label_is_undone_by_the_button_beside_it(reader):
    _set(reader, 0)
    address = _set(reader, 0, "good").headers["location"]
    page = reader.page(address)
    assert [a["value"] for _, a in page.tags if a.get("name") == "undo"] == ["3"]
    token = reader.fields(address, "labels")["form_token"]
    fields = {"undo": "3", "id": "w/0", "agent": "", "by": "Ada"}
    answer = reader.post(LABEL, fields | {"form_token": token})
    assert answer.status_code == 303
    assert _labels(reader, 0) == {"verdict": "bad"}
    assert "Saved in version 4: verdict of w/0 is bad." in (
        reader.page(answer.headers["location"]).text
    )
    again = reader.post(LABEL, fields | {"form_token": token})
    assert again.status_code == 409
    assert "somebody else labeled the episode meanwhile" in again.text
    answer = _set(reader, 0, removed="verdict")
    assert "verdict of w/0 was removed" in reader.page(answer.headers["location"]).text


def test_each_value_shows_how_to_train_on_it(reader):
    _set(reader, 0, "it's $bad")
    _set(reader, 1, "good")
    _set(reader, 2, "good")
    page = reader.page(_page(0))
    assert "any(verdict = 'good')" in page.texts
    lake = reader.lake.url
    command = "replaylake train offline walks --algorithm bc --policy NAME --where "
    assert f"{command}\"any(verdict = 'good')\" --lake {lake}" in page.texts
    (odd,) = (text for text in page.texts if text.startswith(command) and "$bad" in text)
    # A shell passes on what the page shows as the condition.
    done = subprocess.run(
        ["sh", "-c", odd.replace("replaylake", "printf '%s\\n'", 1)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    condition = done.stdout.splitlines()[8]
    assert condition == "any(verdict = 'it''s $bad')"
    assert reader.lake.snapshot("walks").replay(where=condition).num_steps == 3
    links = [link for link in page.links if "IN+%28SELECT" in link]
    shown = [json.loads(reader.client.get(link.replace("?", ".json?")).content) for link in links]
    assert [one["num_matching"] for one in shown] == [1, 2]


def test_a_list_shows_the_labels_of_its_episodes(reader, hostile):
    assert "Labels" not in reader.page("/datasets/walks/episodes").texts
    text = hostile.replace("\u202e", "")[:90]
    _set(reader, 0, text)
    _set(reader, 0, flag="true")
    _set(reader, 1, "4", label="rating")
    _set(reader, 2)
    _set(reader, 2, removed="verdict")
    page = reader.page("/datasets/walks/episodes")
    assert "Labels" in page.texts
    pills = [text for text in page.texts if text.startswith(("verdict", "flagged", "rating"))]
    assert pills == [f"verdict: {text}", "flagged", "rating: 4"]
    (query,) = (text for text in page.texts if "from_json" in text)
    assert reader.lake.sql(query).num_rows == 2


def test_scores_are_shown_with_their_scorer(reader):
    def length(episode):
        return {"score": len(episode.rewards), "half": [0.5 * one for one in episode.rewards]}

    score(reader.lake, "walks", FunctionScorer(length, revision="1"), by="Bob")
    page = reader.page(_page(1))
    start = page.texts.index("length")
    assert page.texts[start : start + 2] == ["length", "4"]
    assert page.texts[start + 2].endswith("length, Bob")
    assert page.texts[start + 3].startswith("2")
    # A component has no scorer of its own, and can be seen in the curves.
    assert "length_half" not in page.texts[:start]
    # Commits that were read before are not read again.
    _set(reader, 1)
    assert {"length", "bad"} <= set(reader.page(_page(1)).texts)
    answer = _set(reader, 1, label="length", status=400)
    assert "that is no label" in answer.text


@pytest.mark.slow
def test_the_command_that_a_label_shows_trains(reader):
    pytest.importorskip("torch")
    for number in (1, 3):
        _set(reader, number, 'it\'s "good"')
    page = reader.page(_page(0))
    (command,) = (text for text in page.texts if text.startswith("replaylake train offline"))
    run = command.replace("replaylake", f"{sys.executable} -m replaylake.cli.main", 1)
    done = subprocess.run(
        ["sh", "-c", run.replace("NAME", "clone", 1) + " --updates 2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (used,) = reader.lake.registry.entry("clone", 1)["lineage"]["datasets"]
    # w/1 has 4 steps, w/3 has 6.
    assert used["num_steps"] == 10


def test_what_another_reader_said_is_not_overwritten_unseen(reader):
    fields = reader.fields(_page(0), "labels")
    label_episode(reader.lake, "walks", "verdict", "good", episode_id="w/0", by="Bob")
    answer = reader.post(LABEL, fields | {"by": "Ada", "value": "bad"})
    assert answer.status_code == 409
    page_link = "/datasets/walks/episode?id=w%2F0"
    assert f'href="{page_link}"' in answer.text
    assert "by Bob" in answer.text
    assert _labels(reader, 0) == {"verdict": "good"}
    # Another episode's label is no conflict, though the page is as old.
    fields = reader.fields(_page(1), "labels") | {"seen": fields["seen"]}
    assert reader.post(LABEL, fields | {"by": "Ada", "value": "bad"}).status_code == 303
    _set(reader, 0)
    assert _labels(reader, 0) == {"verdict": "bad"}


def test_who_labels_at_once_waits_and_nothing_is_written_twice(reader, monkeypatch):
    write, written = Table.write, []

    def note(self, *args, **options):
        written.append(self)
        return write(self, *args, **options)

    monkeypatch.setattr(Table, "write", note)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: _set(reader, number), range(4)))
    assert len(written) == 4
    assert [_labels(reader, number) for number in range(4)] == [{"verdict": "bad"}] * 4
    reader.app.writes = RequestQueue(0, 0, "forms")
    assert "0 forms wait already; try again" in _set(reader, 4, status=503).text


def test_columns_of_the_log_and_wrong_forms_are_refused(reader):
    annotate(
        reader.lake, "walks", reader.lake.sql("SELECT 'w/0' AS episode_id, 1.5 AS score"),
        on="episode_id", add="score",
    )  # fmt: skip
    for name in ("score", "reward", "two words", ""):
        answer = _set(reader, 0, label=name, status=400)
        assert "name: found" in answer.text, name
    for changes, words in (
        ({"by": " "}, "by: found nothing"),
        ({"value": ""}, "value: found nothing"),
        ({"value": "x" * 501}, "501 characters"),
        ({"value": "a\x00b"}, "control characters"),
        ({"seen": "-1"}, "seen: found"),
        ({"seen": "9" * 5000}, "seen: found"),
        ({"undo": "x"}, "undo: found"),
        ({"sort": "nothing"}, "sort: found"),
    ):
        answer = _set(reader, 0, status=400, **changes)
        assert words in answer.text, changes
    assert _set(reader, 0, status=404, id="nobody").text.count("episode 'nobody'") == 1
    assert _set(reader, 0, status=404, seen="99")
    assert reader.lake.snapshot("walks").version == 2


def test_hostile_labels_and_names_stay_text(reader, hostile):
    hostile = hostile.replace("\u202e", "")
    answer = _set(reader, 0, hostile, by=hostile)
    # Reader.page checks that no element came out of a text.
    page = reader.page(answer.headers["location"])
    assert page.texts.count(hostile) >= 2
    assert reader.page(_page(1)).text.count(hostile) >= 1
    odd = ["x", "[]", "[1,2]", '{"a":1}', '["x",1,2]', "[[" * 5000]
    odd += [f'[{one},"w/0",""]' for one in (1, 99, -1, "Infinity", "NaN", "9" * 400, "2.5", "null")]
    for last in odd:
        page = reader.page(_page(1, last=last))
        assert "Saved in" not in page.text


def test_earlier_versions_show_labels_without_a_form(reader):
    _set(reader, 0)
    _set(reader, 0, "good")
    page = reader.page(_page(0, at=2))
    assert {"verdict", "bad", "Ada"} <= set(page.texts)
    assert "Labels are set in the newest version ." in page.text
    assert "form" not in [tag for tag, _ in page.tags]
    assert reader.fields(_page(0, at=2), "labels") == {}


def test_a_dataset_that_grows_is_labeled_too(reader, episode_maker, monkeypatch):
    read_labels = episode_page.read_episode_labels

    def grow(*arguments):
        reader.lake.dataset("walks").append([episode_maker("w/9", 3)])
        return read_labels(*arguments)

    monkeypatch.setattr(episode_page, "read_episode_labels", grow)
    fields = reader.fields(_page(0), "labels")
    assert fields["seen"] == "1"
    assert reader.lake.snapshot("walks").version == 2
    assert reader.post(LABEL, fields | {"by": "Ada", "value": "bad"}).status_code == 303
    assert _labels(reader, 0) == {"verdict": "bad"}


def test_an_explorer_that_only_reads_has_no_forms(lake, reader_type):
    writing, reader = reader_type(lake), reader_type(lake, read_only=True)
    page = reader.page(_page(0))
    assert "Labels" not in page.texts
    assert [a for tag, a in page.tags if tag == "form"] == []
    page = reader.page("/datasets/walks/episodes")
    assert not [link for link in page.links if "/next?" in link]
    fields = writing.fields(_page(0), "labels") | {"by": "Ada", "value": "bad"}
    answer = reader.post(LABEL, fields)
    assert answer.status_code == 403
    assert "started to read the lake alone" in answer.text
    assert lake.snapshot("walks").version == 1
    _set(writing, 0)
    page = reader.page(_page(0))
    assert {"verdict", "bad", "Ada"} <= set(page.texts)
    assert [a for tag, a in page.tags if tag in ("form", "button")] == []


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"origin": "https://evil.example", "sec_fetch_site": "cross-site"}, "not allowed"),
        ({"origin": "http://localhost:3000", "sec_fetch_site": ""}, "from another site"),
        ({"origin": "http://localhost:3000", "sec_fetch_site": "same-site"}, "another site"),
        ({"origin": "", "sec_fetch_site": "cross-site"}, "another site"),
        ({"origin": "null", "sec_fetch_site": ""}, "not allowed"),
        ({"origin": "", "sec_fetch_site": ""}, "does not say which page"),
        ({"origin": "", "sec_fetch_site": "none"}, "does not say which page"),
    ],
)
def test_forms_of_other_sites_are_refused(reader, headers, words):
    fields = reader.fields(_page(0), "labels") | {"by": "Ada", "value": "bad"}
    answer = reader.post(LABEL, fields, **headers)
    assert answer.status_code == 403
    assert words in answer.text
    assert reader.lake.snapshot("walks").version == 1


def test_a_browser_that_names_the_page_in_origin_alone_may_write(reader):
    fields = reader.fields(_page(0), "labels") | {"by": "Ada", "value": "bad"}
    assert reader.post(LABEL, fields, sec_fetch_site="").status_code == 303


def test_a_form_needs_the_token_of_its_session(lake, reader, reader_type):
    fields = reader.fields(_page(0), "labels") | {"by": "Ada", "value": "bad"}
    without = {name: value for name, value in fields.items() if name != "form_token"}
    for sent, words in (
        (without, "has no token"),
        (fields | {"form_token": "0" * 64}, "is not valid"),
        (fields | {"form_token": "\u20ac"}, "is not valid"),
        (reader_type(lake).fields(_page(0), "labels") | {"by": "Ada"}, "was started again"),
    ):
        answer = reader.post(LABEL, sent)
        assert answer.status_code == 403, words
        assert words in answer.text
    tokens = Tokens(((TOKEN.encode(), "admin"), (b"another-token-of-24-chars", "admin")))
    guarded = reader_type(lake, tokens=tokens)
    assert guarded.post(LABEL, fields).status_code == 401
    issued = []
    for token in ("another-token-of-24-chars", TOKEN):
        guarded.client.cookies.clear()
        guarded.client.post("/sign-in", data={"token": token})
        issued.append(guarded.fields(_page(0), "labels") | {"by": "Ada", "value": "bad"})
    assert guarded.post(LABEL, issued[0]).status_code == 403
    assert lake.snapshot("walks").version == 1
    assert guarded.post(LABEL, issued[1]).status_code == 303


def test_what_is_no_form_is_refused(reader):
    assert reader.client.get(LABEL).status_code == 405
    assert reader.client.get(f"{LABEL}.json").status_code == 404
    assert reader.client.put(LABEL).status_code == 405
    headers = {"origin": "http://localhost", "content-type": "application/json"}
    assert reader.client.post(LABEL, content=b"{}", headers=headers).status_code == 415
    headers["content-type"] = "application/x-www-form-urlencoded"
    for body, status in (
        (b"a=" + b"x" * 70_000, 413),
        (b"a=%ff", 400),
        (b"a=\xff", 400),
        (b"&".join(b"a%d=" % n for n in range(200)), 400),
    ):
        answer = reader.client.post(LABEL, content=body, headers=headers)
        assert answer.status_code == status, body[:20]
    # After signing in, no form's address is opened.
    assert reader.client.post("/datasets/nothing/label").status_code == 403


def test_below_a_prefix_forms_lead_below_it(lake, reader_type):
    reader = reader_type(lake, path_prefix="/lake")
    page = reader.page(f"/lake{_page(0)}")
    (action,) = {a["action"] for tag, a in page.tags if tag == "form"}
    assert action == f"/lake{LABEL}"
    fields = reader.fields(f"/lake{_page(0)}&queue=verdict", "labels")
    answer = reader.post(action, fields | {"by": "Ada", "value": "bad"})
    assert answer.headers["location"].startswith("/lake/datasets/walks/next?")
    assert "Path=/lake/" in answer.headers["set-cookie"]
    assert _labels(reader, 0) == {"verdict": "bad"}


def test_one_agent_of_an_episode_is_labeled(tmp_path, episode_maker, reader_type):
    lake = open_lake(tmp_path / "lake", create=True)
    agents = [replace(episode_maker("w/0", 3), agent_id=agent) for agent in ("p", "q")]
    lake.dataset("walks").append(agents)
    reader = reader_type(lake)
    _set(reader, 0, path=_page(0, agent="q"))
    snapshot = lake.snapshot("walks")
    assert read_episode_labels(snapshot, "w/0", "p") == {}
    assert read_episode_labels(snapshot, "w/0", "q")["verdict"].value == "bad"
    answer = reader.client.get("/datasets/walks/next?label=verdict", follow_redirects=False)
    assert "agent=p" in answer.headers["location"]


@pytest.mark.slow
def test_a_lake_on_a_disk_that_is_read_only_says_so(tmp_path: Path):
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("not run: unshare is not installed, so no disk can be mounted")
    mount = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    inside = [unshare, "--mount", "--map-root-user", "sh", "-c", mount, "sh", str(tmp_path)]
    probe = subprocess.run([*inside, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"not run: no disk may be mounted here: {probe.stderr.strip()[-200:]}")
    code = """
import re, subprocess, sys
from pathlib import Path
import numpy as np
import replaylake as rl
from starlette.testclient import TestClient
from replaylake.serve.explorer.app import create_explorer
lake = rl.open(Path(sys.argv[1]) / "lake", create=True)
steps = np.zeros((2, 3), np.float32), np.zeros(2, int), np.zeros(2)
lake.dataset("d").append([rl.Episode("a", *steps, terminated=True)])
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
client = TestClient(create_explorer(lake), base_url="http://localhost")
page = client.get("/datasets/d/episode?id=a").text
fields = dict(re.findall(r'type="hidden" name="(\\w+)" value="([^"]*)"', page))
fields |= {"id": "a", "after": "", "label": "verdict", "value": "bad", "by": "Ada"}
answer = client.post("/datasets/d/label", data=fields, headers={"origin": "http://localhost"})
print(answer.status_code)
print(answer.text)
"""
    done = subprocess.run(
        [*inside, sys.executable, code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    status, _, text = done.stdout.partition("\n")
    assert status == "503"
    assert "Read-only file system" in text
    assert "Mount the file system for writing" in text
