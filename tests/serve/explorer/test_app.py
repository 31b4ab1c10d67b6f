"""The explorer's app: who may read, in which forms, and what a page may do in a browser."""

import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from starlette.testclient import TestClient

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.feedback.decisions import decisions_encoder, ensure_feedback_tables
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.serve.explorer.config import ExplorerConfig
from replaylake.serve.explorer.datasets import lake_page
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.tokens import Tokens

TOKEN = "a-token-of-24-characters"
TOKENS = Tokens(((TOKEN.encode(), "admin"),))


def test_the_lake_lists_its_datasets(explored):
    page = explored.page("/")
    names = ["chats", "hostile", "images", "one", "walks"]
    assert set(names) <= set(page.texts)
    assert "/datasets/walks" in page.links
    body = explored.json("/index.json")
    walks = next(one for one in body["datasets"] if one["dataset"] == "walks")
    # 3 + 4 + ... + 14 steps; the return of n steps is 0 + 1 + ... + n - 1.
    assert (walks["num_episodes"], walks["num_steps"], walks["version"]) == (12, 102, 2)
    assert walks["mean_return"] == sum(n * (n - 1) / 2 for n in range(3, 15)) / 12
    assert walks["policies"] == ["plain", "later"]
    lines = explored.client.get("/index.csv").text.splitlines()
    assert lines[0].startswith("dataset,version,num_episodes,num_steps")
    assert sorted(line.split(",")[0] for line in lines[1:]) == names


def test_the_lake_draws_the_returns_of_each_dataset(empty, episode_maker):
    # Rewards 0, 1, 2, ...: the returns are 0 (twice), 10 and 45; those of `same` are 3.
    walks = [episode_maker(f"w/{place}", num) for place, num in enumerate((1, 1, 5, 10))]
    empty.lake.dataset("walks").append(walks)
    empty.lake.dataset("same").append([episode_maker(f"s/{place}", 3) for place in range(4)])
    text = empty.client.get("/").text
    bars = {
        name: re.findall(r'<rect x="([\d.]+)" y="\d+" width="9" height="(\d+)" class="bar">', svg)
        for name, svg in re.findall(r"<title>(Returns of [^<]*)</title>(.*?)</svg>", text)
    }
    # 24 columns of 10 units; 10 is in the sixth: 10 / 45 * 24 = 5.3. Half of two is 50 of 100.
    assert bars == {
        "Returns of walks: 0 to 45": [("0.5", "100"), ("50.5", "50"), ("230.5", "50")],
        "Returns of same: 3": [("120.5", "100")],
    }


def test_the_lake_draws_the_way_from_data_to_decisions(traced_lake, reader_type, empty):
    page = reader_type(traced_lake).page("/")
    assert "From data to decisions" in page.texts
    for address in ("/datasets/walks?at=1", "/runs/01first", "/policies/clone", "/serving/live"):
        assert address in page.links
    assert "from clone:1 champion, clone:2 no alias" in page.text
    # The newest runs, also those that have ended.
    runs = [link for link in page.links if link.startswith("/runs/")]
    assert runs[-2:] == ["/runs/02second", "/runs/01first"]
    assert "From data to decisions" not in empty.page("/").texts
    assert "No run has trained in this lake." in empty.page("/").texts


def test_the_lake_shows_few_of_many_versions(gate_lake, reader_type, monkeypatch):
    monkeypatch.setattr(lake_page, "_MAX_VERSIONS", 1)
    page = reader_type(gate_lake).page("/")
    assert "Not shown: 1 other version ." in page.text
    assert "p:2" in page.texts
    assert "p:1" not in page.texts
    # One with an alias is shown however old it is.
    gate_lake.registry.set_alias("p", "champion", 1)
    page = reader_type(gate_lake).page("/")
    assert {"p:1", "p:2"} <= set(page.texts)
    assert "Not shown: " not in page.text


def test_the_lake_reads_each_commit_once(empty, episode_maker, monkeypatch):
    dataset = empty.lake.dataset("grows")
    dataset.create(Box((2,), "float64"), Discrete(2))
    read = []
    of_storage = Dataset.history

    def note(self, since=0):
        read.append(since)
        return of_storage(self, since)

    monkeypatch.setattr(Dataset, "history", note)
    for number in range(3):
        dataset.append([episode_maker(f"e/{number}", number + 1)])
        for _ in range(2):
            body = empty.json("/index.json")
        assert body["datasets"][0]["num_steps"] == sum(range(1, number + 2))
    # Version 0 creates the dataset.
    assert read == [0, 2, 3]
    page = empty.page("/")
    days = [text for text in page.texts if text.startswith("grows: ")]
    assert days == ["grows: 6"]
    query = next(text for text in page.texts if "AS day" in text)
    assert [row["num"] for row in empty.lake.sql(query).to_pylist()] == [6]


def test_logged_decisions_are_counted_again_once_there_are_more(empty, monkeypatch):
    live = empty.lake.dataset("live")
    ensure_feedback_tables(live, Box((2,)), Discrete(2))
    sql = Visit.sql
    ran = []

    def note(self, text, at=(), **parameters):
        ran.append(text)
        return sql(self, text, at, **parameters)

    monkeypatch.setattr(Visit, "sql", note)
    for number in range(2):
        record = {
            "decision_id": f"d{number}",
            "timestamp": number * 1_000_000,
            "policy": "walker",
            "policy_version": 3,
            "observation": [0.0, 0.0],
            "action": 1,
            "log_prob": -0.5,
            "deterministic": False,
        }
        data = decisions_encoder(live)([record])
        live.decisions.append(data, producer="w", sequence=number)
        for _ in range(2):
            page = empty.page("/")
            assert page.texts[page.texts.index("walker:3") + 1 :][:2] == ["live", str(number + 1)]
            assert any("FROM live.decisions" in text for text in page.texts)
    assert sum("live.decisions" in text for text in ran) == 2
    # Two within a second, whose times have seconds.
    page = empty.page("/serving/live")
    assert "Decisions in 1 s each (UTC)" in page.texts
    times = [attributes for tag, attributes in page.tags if tag == "time"]
    assert sum("data-seconds" in attributes for attributes in times) == 2


def test_each_panel_links_its_sql_to_the_console(explored):
    page = explored.page("/")
    links = [link for link in page.links if link.startswith("/sql?q=")]
    assert any("walks.episodes" in link and "at=walks%3D2" in link for link in links)


def test_the_sql_of_every_panel_runs(explored):
    pages = (
        "/",
        "/datasets/walks?at=1",
        "/datasets/walks/episodes",
        "/datasets/walks/episode?id=w/09",
        "/datasets/walks/diff?a=1&b=2",
        "/runs",
        "/runs/01run",
        "/policies",
    )
    ran = set()
    for path in pages:
        for link in explored.page(path).links:
            address = urlsplit(link)
            values = parse_qs(address.query)
            if address.path == "/sql" and "q" in values:
                at = dict(one.split("=") for one in values.get("at", ()))
                explored.lake.sql(values["q"][0], at={k: int(v) for k, v in at.items()})
                ran.add(values["q"][0])
    tables = ("commits", "walks.steps", "runs", "policies")
    for table in (*tables, "walks.episodes"):
        assert any(f"FROM {table}" in query for query in ran), table


def test_an_empty_lake_says_what_to_do(empty):
    page = empty.page("/")
    assert "This lake has no dataset yet." in page.text
    assert "replaylake ingest LOG --dataset NAME" in page.text
    assert empty.json("/index.json")["datasets"] == []
    assert empty.client.get("/index.csv").text == "\n"


def test_an_unknown_address_is_a_page_in_plain_words(explored):
    page = explored.page("/nowhere", 404)
    assert "There is no page /nowhere." in page.text
    assert "/" in page.links
    missing = explored.page("/datasets/nothing", 404)
    # Commands of a message are code, without their backticks.
    assert "replaylake list" in missing.texts
    assert "`" not in missing.text
    assert explored.json("/nowhere.json", 404)["error"]["message"].startswith("There is no page")
    assert explored.client.post("/").status_code == 405
    assert explored.client.get("/static/%2e%2e/app.py").status_code == 404


def test_a_fault_is_a_page_without_its_traceback(explored, monkeypatch, caplog):
    def fail(lake):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(Lake, "datasets", fail)
    page = explored.page("/", 500)
    assert "a fault in ReplayLake" in page.text
    assert "secret detail" not in page.text
    assert "secret detail" in caplog.text


def test_headers_let_nothing_run_but_the_explorer_itself(explored):
    for path in ("/", "/nowhere", "/index.json"):
        headers = explored.client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_files_are_cached_by_their_digest(explored):
    page = explored.page("/")
    for tag, attributes in page.tags:
        address = attributes.get("src") or (attributes.get("href") if tag == "link" else "")
        if address and address.startswith("/static/"):
            answer = explored.client.get(address)
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]


def test_other_names_of_the_server_are_refused(explored):
    answer = explored.client.get("/", headers={"host": "evil.example"})
    assert answer.status_code == 421
    answer = explored.client.get("/", headers={"origin": "https://evil.example"})
    assert answer.status_code == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_page_of_another_site_embeds_is_refused(explored, site):
    # An image, a frame or a script of another page: a browser sends no Origin with these.
    for mode, kind in (("no-cors", "image"), ("navigate", "iframe"), ("cors", "empty")):
        headers = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": kind}
        for path in ("/", "/sql.json?q=SELECT+1", "/sql?q=SELECT+1"):
            answer = explored.client.get(path, headers=headers)
            assert answer.status_code == 403, (mode, path)
    headers = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert explored.client.get("/", headers=headers).status_code == 200
    assert explored.client.post("/sign-in", headers=headers).status_code == 403
    for own in ("same-origin", "none"):
        headers = {"sec-fetch-site": own, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
        assert explored.client.get("/", headers=headers).status_code == 200


def test_below_a_prefix_every_address_begins_with_it(explored_lake, reader_type):
    reader = reader_type(explored_lake, path_prefix="/lake")
    page = reader.page("/lake/")
    own = [link for link in page.links if not link.startswith(("#", "https:"))]
    assert own
    assert all(link.startswith("/lake/") for link in own)
    assert reader.client.get("/lake", follow_redirects=False).headers["location"] == "/lake/"
    assert reader.client.get("/").status_code == 404


@pytest.fixture
def guarded(explored_lake, reader_type):
    return reader_type(explored_lake, tokens=TOKENS)


def test_with_a_token_pages_ask_for_it_once(guarded):
    page = guarded.page("/?x=1", 401)
    assert "walks" not in page.text
    assert ("input", "/?x=1") in [(tag, a.get("value")) for tag, a in page.tags]
    wrong = guarded.client.post("/sign-in", data={"token": "another", "to": "/"})
    assert wrong.status_code == 401
    right = guarded.client.post(
        "/sign-in", data={"token": TOKEN, "to": "/?x=1"}, follow_redirects=False
    )
    assert right.headers["location"] == "/?x=1"
    cookie = right.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert "Secure" not in cookie
    assert TOKEN not in cookie
    assert "walks" in guarded.page("/").texts


def test_a_reader_signs_out(guarded):
    guarded.client.post("/sign-in", data={"token": TOKEN, "to": "/"})
    forms = [
        attributes.get("action") for tag, attributes in guarded.page("/").tags if tag == "form"
    ]
    assert "/sign-out" in forms
    headers = {"sec-fetch-site": "cross-site"}
    assert guarded.client.post("/sign-out", headers=headers).status_code == 403
    assert guarded.client.get("/sign-out").status_code == 405
    guarded.page("/")
    answer = guarded.client.post("/sign-out", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
    page = guarded.page("/", 401)
    assert "/sign-out" not in [attributes.get("action") for _, attributes in page.tags]


@pytest.mark.parametrize(
    "to",
    [
        "//evil.example",
        "https://evil.example",
        "/\\evil.example",
        "/\t/evil.example/x",
        "/%09/evil.example/x",
        "/%2F/evil.example",
        "evil",
        "",
        "/nowhere",
        "/index.json",
    ],
)
def test_after_signing_in_no_other_site_is_visited(guarded, to):
    answer = guarded.client.post(
        "/sign-in", data={"token": TOKEN, "to": to}, follow_redirects=False
    )
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


def test_after_signing_in_the_page_that_asked_is_shown(guarded, reader_type):
    for path in ("/policies/%C3%A9%E2%82%AC%3F", "/sql?q=SELECT+%27%C3%A9%27&at=a%3D1"):
        page = guarded.page(path, 401)
        (to,) = (a["value"] for _, a in page.tags if a.get("name") == "to")
        for token, status in (("another", 401), (TOKEN, 303)):
            answer = guarded.client.post(
                "/sign-in", data={"token": token, "to": to}, follow_redirects=False
            )
            assert answer.status_code == status
        assert answer.headers["location"] == path
        guarded.client.cookies.clear()
    # What a browser would not send is no fault, either.
    answer = guarded.client.post(
        "/sign-in", data={"token": TOKEN, "to": "/sql?q=\u20ac\r\n"}, follow_redirects=False
    )
    assert answer.headers["location"] == "/sql?q=%E2%82%AC%0D%0A"
    reader = reader_type(guarded.lake, tokens=TOKENS, path_prefix="/lake")
    answer = reader.client.post(
        "/lake/sign-in", data={"token": TOKEN, "to": "/runs"}, follow_redirects=False
    )
    assert answer.headers["location"] == "/lake/runs"


def test_two_explorers_of_one_host_keep_their_readers(explored_lake, empty, reader_type):
    # A browser sends the cookies of a host to all of its ports.
    jar = {}
    clients = [
        TestClient(reader.app, base_url=f"http://localhost:{port}")
        for port, lake in enumerate((explored_lake, explored_lake, empty.lake), start=8080)
        for reader in [reader_type(lake, tokens=TOKENS)]
    ]
    for client in clients:
        sent = {"token": TOKEN, "to": "/"}
        answer = client.post("/sign-in", data=sent, follow_redirects=False)
        jar |= dict(answer.cookies)
        client.cookies.clear()
    assert len(jar) == len(clients)
    header = "; ".join(f"{name}={value}" for name, value in jar.items())
    for client in clients:
        assert client.get("/", headers={"cookie": header}).status_code == 200
        assert client.get("/").status_code == 401


def test_behind_https_the_cookie_is_sent_over_https_alone(guarded):
    answer = guarded.client.post(
        "/sign-in",
        data={"token": TOKEN},
        headers={"origin": "https://localhost"},
        follow_redirects=False,
    )
    assert "Secure" in answer.headers["set-cookie"]


def test_scripts_send_the_token_in_a_header(guarded):
    assert guarded.client.get("/index.json").status_code == 401
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert guarded.client.get("/index.json", headers=headers).status_code == 200
    headers = {"authorization": "Bearer another-token-of-24-chars"}
    assert guarded.client.get("/index.json", headers=headers).status_code == 401


def test_the_address_that_it_shows_is_one_that_it_answers(explored_lake, reader_type):
    for host, shown in (
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("explorer.example", "explorer.example"),
        ("fe80::1%eth0", "[fe80::1%eth0]"),
    ):
        config = ExplorerConfig("lake", host=host, allowed_hosts=("lake.example",))
        assert config.url == f"http://{shown}:8080/"
        reader = reader_type(explored_lake, allowed_hosts=config.hosts)
        for name, status in ((f"{shown}:8080", 200), ("lake.example", 200), ("other.example", 421)):
            answer = reader.client.get("/static/icon.svg", headers={"host": name})
            assert (answer.status_code == 421) == (status == 421), (host, name)


def test_another_address_needs_a_token(tmp_path: Path):
    config = ExplorerConfig("lake")
    nothing = config.read_tokens({})
    config.check_exposure("127.0.0.1", nothing)
    with pytest.raises(ConfigInvalidError, match="no tokens"):
        config.check_exposure("0.0.0.0", nothing)
    with pytest.raises(ConfigInvalidError, match="anybody could write") as caught:
        ExplorerConfig("lake", insecure=True).check_exposure("0.0.0.0", nothing)
    assert caught.value.parameter == "insecure"
    ExplorerConfig("lake", insecure=True).check_exposure("127.0.0.1", nothing)
    ExplorerConfig("lake", insecure=True, read_only=True).check_exposure("0.0.0.0", nothing)
    known = config.read_tokens({"REPLAYLAKE_ADMIN_TOKEN": TOKEN, "REPLAYLAKE_ACT_TOKEN": "x" * 24})
    assert known.pairs == ((TOKEN.encode(), "admin"),)
    config.check_exposure("0.0.0.0", known)
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    assert ExplorerConfig("lake", admin_token_file=file).read_tokens({}).roles == {"admin"}


@pytest.mark.parametrize("prefix", ["lake", "/lake/", "/a//b", "/<b>"])
def test_a_prefix_is_a_path(prefix):
    with pytest.raises(ConfigInvalidError, match="path_prefix"):
        ExplorerConfig("lake", path_prefix=prefix)


def test_a_name_of_a_proxy_is_answered_where_it_is_allowed(explored_lake, reader_type):
    reader = reader_type(explored_lake, allowed_hosts=AllowedHosts(["lake.example"]))
    assert reader.client.get("/", headers={"host": "lake.example"}).status_code == 200
