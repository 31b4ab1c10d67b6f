"""GET / and /docs in a browser: what they show, to whom, and that nothing in them is markup."""

import asyncio
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import httpx
import pytest

from replaylake.datastore.episodes.encoding import CATEGORY, NUMBER, TIME, Encoding, Field
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.app import create_app
from replaylake.serve.safety.tokens import Tokens
from replaylake.serve.versions.router import Router, ServedPolicy

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
HOSTILE = "</td><script>document.title='owned'</script>'\"&"


class Document(HTMLParser):
    """A page: its tags with their attributes, and its text."""

    def __init__(self, answer):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(answer.text)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def client(limited_client):
    return limited_client


def open_page(client, path, status=200, **headers):
    answer = client.get(path, headers={**HTML, **headers})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = Document(answer)
    # Nothing is loaded from elsewhere or written into the page, and every address is relative.
    for name, attributes in page.tags:
        assert not [key for key in attributes if key.startswith("on") or key == "style"]
        for key in ("href", "src", "action"):
            assert attributes.get(key, "./").startswith(("./", "#")), attributes
        assert name != "script" or "src" in attributes
        assert name != "style"
    return page


def test_browsers_get_pages_and_other_clients_what_they_got(client, refused):
    for path in ("/", "/docs"):
        for headers in ({}, {"accept": "application/json"}, {"accept": "*/*"}):
            error = refused(client.get(path, headers=headers), 404, "path")
            assert "/static" not in error["message"]
            assert error["message"].endswith("/docs.json")
        refused(client.post(path, json={}, headers=HTML), 404, "path")
        open_page(client, path)
        head = client.request("HEAD", path, headers=HTML)
        assert (head.status_code, head.content) == (200, b"")
    refused(client.get("/other", headers=HTML), 404, "path")


def test_the_first_page_says_what_is_served(client):
    page = open_page(client, "/")
    for text in ("p@champion", "p:2", "by_hand", "Box float32[4]", "Discrete(2)", "categorical"):
        assert text in page.text, text
    assert "logs to nothing" in page.text
    assert "explores no" in page.text
    assert re.search(r"up for [\d.]+ m?s\b", page.text)
    assert "Follows" not in page.text
    assert "Held" not in page.text


def test_several_versions_and_what_is_degraded_are_shown(app_client, policy, serving, monkeypatch):
    canary = ServedPolicy("p", 3, policy, "p@challenger", {"run_id": "01run"}, since_ms=10**12)
    one = serving(policy, exploration=Exploration(epsilon=0.05))
    one.router = Router(one.router.one, [(canary, 0.25)])
    monkeypatch.setattr(one, "find_degraded", lambda: ["commit"])
    with app_client(create_app(lambda: one)) as client:
        page = open_page(client, "/")
    for text in ("p@challenger", "0.25", "0.75", "01run", "2001-09-09", "epsilon 0.05"):
        assert text in page.text, text
    assert "degraded: commit" in page.text


def test_the_form_holds_what_act_takes(client):
    page = open_page(client, "/")
    observation = json.loads(page.texts[page.texts.index("[0.0, 0.0, 0.0, 0.0]")])
    (form,) = page.all("form")
    assert form["data-address"] == "./act"
    assert client.post("/act", json={"observation": observation}).status_code == 200
    names = [one["data-option"] for one in (*page.all("select"), *page.all("input"))]
    assert names == ["deterministic", "temperature", "epsilon", "seed"]


def test_a_server_says_that_what_is_tried_is_logged(logged):
    assert "The decision is logged to d as every other" in open_page(logged, "/").text


def test_a_server_without_options_offers_none(app_client, policy, serving):
    with app_client(create_app(lambda: serving(policy, takes_options=False))) as client:
        page = open_page(client, "/")
    assert page.all("select") == page.all("input") == []


def test_named_fields_are_offered_by_name(app_client, kit, serving, tmp_path):
    fields = (
        Field("age", NUMBER),
        Field("device", CATEGORY, ("ios", "web")),
        Field("hour", TIME),
    )
    encoding = Encoding(fields)
    size = encoding.width
    spec = PolicySpec(Box((size,)), Discrete(2), "categorical", encoding=encoding)
    weights = kit.WEIGHTS[:1].repeat(size, 0)
    package = kit.save_policy(tmp_path / "p", spec, kit.linear_graph(weights, "logits", size))
    with app_client(create_app(lambda: serving(load_policy(package)))) as client:
        page = open_page(client, "/")
        text = next(one for one in page.texts if one.startswith('{"age"'))
        assert client.post("/act", json={"observation": json.loads(text)}).status_code == 200
    assert json.loads(text)["device"] == "ios"
    assert "Fields of an observation" in str(page.tags)


def test_a_long_observation_has_no_form(app_client, kit, serving, tmp_path):
    spec = PolicySpec(Box((84, 84)), Discrete(2), "categorical")

    class Policy:
        def __init__(self):
            self.spec = spec

    with app_client(create_app(lambda: serving(Policy()))) as client:
        page = open_page(client, "/")
    assert page.all("form") == []
    assert "more than a form takes" in page.text


def test_texts_of_packages_are_texts(app_client, policy, serving):
    one = serving(policy)
    about = {"algorithm": HOSTILE, "run_id": HOSTILE, "datasets": [{"dataset": HOSTILE}]}
    one.router = Router(ServedPolicy(HOSTILE, 2, policy, HOSTILE, about))
    with app_client(create_app(lambda: one)) as client:
        for path in ("/", "/docs"):
            page = open_page(client, path)
            assert HOSTILE in "".join(page.texts)


def test_the_api_page_has_every_operation_and_schema_of_the_document(client):
    page = open_page(client, "/docs")
    api = client.get("/docs.json").json()
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            assert f"{method.upper()} {path}" in page.text
            assert operation["summary"] in page.text
            for parameter in operation.get("parameters", ()):
                assert parameter["name"] in page.texts
    identities = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    for name, schema in api["components"]["schemas"].items():
        assert f"schema-{name}" in identities
        assert set(schema.get("properties", ())) <= set(page.texts)
    links = {one["href"] for one in page.all("a") if one["href"].startswith("#")}
    assert {link[1:] for link in links} <= identities
    assert "#schema-Observation" in links
    assert "array of 4 x number" in page.text
    # An example is shown as a client sends it.
    texts = [one for one in page.texts if one.lstrip().startswith("{")]
    assert {"observation": [0.0] * 4, "episode_id": "visit-1", "step": 0} in map(json.loads, texts)


def test_without_a_token_a_page_asks_for_one_and_says_nothing(app_client, policy, serving):
    admin, act = "admin-" * 4, "act-" * 6
    tokens = Tokens(((admin.encode(), "admin"), (act.encode(), "act")))
    with app_client(create_app(lambda: serving(policy, tokens=tokens))) as client:
        for path in ("/", "/docs"):
            page = open_page(client, path, 401)
            assert "champion" not in page.text
            assert [one["id"] for one in page.all("form")] == ["token-form"]
            page = open_page(client, path, 403, authorization=f"Bearer {act}")
            assert "token lacks role admin" in page.text
            page = open_page(client, path, authorization=f"Bearer {admin}")
            assert "champion" in page.text
        answer = client.get("/", headers=HTML)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (
            "Needs a token of role act."
            in open_page(client, "/docs", authorization=f"Bearer {admin}").text
        )
        first = open_page(client, "/", authorization=f"Bearer {admin}")
        assert "act-token" in [one.get("id") for one in first.all("input")]
        # What pages load is in every release, and so for everybody.
        for one in first.all("link") + first.all("script"):
            file = client.get("/" + one.get("href", one.get("src")).removeprefix("./"))
            assert file.status_code == 200
            assert file.headers["x-content-type-options"] == "nosniff"


def test_pages_of_other_sites_and_hosts_are_refused(client):
    page = open_page(client, "/", 421, host="evil.example")
    assert "unknown host evil.example" in page.text
    assert "champion" not in page.text


def test_an_unknown_file_is_refused(client, refused):
    error = refused(client.get("/static/none.js"), 404, "path")
    assert "page.css" in error["message"]
    refused(client.get("/static/", headers=HTML), 404, "path")
    refused(client.post("/static/page.css", json={}), 404, "path")


def test_a_server_loads_no_page_before_somebody_opens_one():
    code = """if True:
        import sys
        from replaylake.serve.app import create_app
        create_app(lambda: None)
        assert "replaylake.serve.api.server_pages" not in sys.modules
        assert "replaylake.serve.pages.frame" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_pages_are_counted_by_route(app_client, policy, serving):
    with app_client(create_app(lambda: serving(policy))) as client:
        open_page(client, "/")
        open_page(client, "/docs")
        client.get("/static/page.css")
        client.get("/static/server.js")
        text = client.get("/metrics").text
    for route, num in (("/", 1), ("/docs", 1), ("/static", 2)):
        assert f'replaylake_requests_total{{route="{route}",status="200"}} {num}.0' in text


def test_a_server_that_starts_says_so_in_a_page(policy, serving):
    async def ask():
        transport = httpx.ASGITransport(create_app(lambda: serving(policy)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/", headers=HTML)

    answer = asyncio.run(ask())
    assert answer.status_code == 503
    assert "starting or stopping" in Document(answer).text
