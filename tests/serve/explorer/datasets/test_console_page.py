"""The SQL console: rows, files, refusals and a query that nobody waits for."""

import asyncio
import io
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest

from replaylake.datastore.errors import QueryError
from replaylake.datastore.query.statements import Cancellation
from replaylake.datastore.query.untrusted import QueryLimits
from replaylake.serve.explorer import app
from replaylake.serve.explorer.datasets.console_page import list_tables
from replaylake.serve.explorer.visits.profiles import ProfileMemory
from replaylake.serve.explorer.visits.request_queue import RequestQueue
from replaylake.serve.explorer.visits.visit import Links, QueryMemory, Visit
from replaylake.serve.messages import RequestRefusedError


def _query(text, **also):
    return urlencode({"q": text, **also}, doseq=True)


def test_the_console_knows_all_tables(explored, explored_lake):
    page = explored.page("/sql")
    assert {"walks.steps", "walks.episodes", "hostile.transitions", "policies"} <= set(page.texts)
    # Each name is one that SQL knows, with these columns.
    for name, columns in list_tables(explored_lake).items():
        found = explored_lake.sql(f"SELECT * FROM {name} LIMIT 0").column_names
        assert sorted(found) == sorted(columns), name


def test_a_query_has_its_rows_and_files(explored):
    text = "SELECT episode_id, num_steps FROM walks.episodes ORDER BY num_steps DESC LIMIT 2"
    page = explored.page(f"/sql?{_query(text)}")
    assert {"w/11", "w/10", "14", "13", "2 rows"} <= set(page.texts)
    links = [link for link in page.links if link.startswith("/sql.")]
    csv, json_, parquet = (explored.client.get(link) for link in links)
    assert csv.text.splitlines() == ['"episode_id","num_steps"', '"w/11",14', '"w/10",13']
    assert csv.headers["content-disposition"] == 'attachment; filename="result.csv"'
    assert json_.json()["rows"][0] == {"episode_id": "w/11", "num_steps": 14}
    assert pq.read_table(io.BytesIO(parquet.content))["num_steps"].to_pylist() == [14, 13]


def test_a_query_reads_the_versions_of_its_address(explored):
    query = _query("SELECT count(*) AS n FROM walks.episodes", at=["walks=first"])
    assert explored.json(f"/sql.json?{query}")["rows"] == [{"n": 11}]


def test_hostile_values_are_texts(explored, hostile):
    page = explored.page(f"/sql?{_query('SELECT remark FROM hostile.steps LIMIT 1')}")
    assert any("<script>" in text for text in page.texts)
    page = explored.page(f"/sql?{_query(f'SELECT 1 AS x -- {hostile}')}")
    assert "1 row" in page.texts


@pytest.mark.parametrize(
    "text",
    [
        "DELETE FROM walks.steps",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM nothing.steps",
        "SELEC 1",
    ],
)
def test_what_is_no_select_over_the_lake_is_refused_in_words(explored, text):
    page = explored.page(f"/sql?{_query(text)}", 400)
    assert "Result" in page.texts
    assert ("div", "alert") in [(tag, a.get("role")) for tag, a in page.tags]


def test_a_file_of_a_refused_query_is_an_error(explored):
    error = explored.json(f"/sql.json?{_query('SELECT 1; SELECT 2')}", 400)["error"]
    assert "one SELECT" in error["message"]


def test_a_version_that_is_no_version(explored):
    page = explored.page(f"/sql?{_query('SELECT 1', at=['walks'])}", 400)
    assert "expected DATASET=VERSION" in page.text
    # `int` refuses so many digits.
    digits = "9" * 5000
    for status, address in (
        (400, f"/sql?{_query('SELECT 1', at=[f'walks={digits}'])}"),
        (404, f"/datasets/walks?at={digits}"),
        (404, f"/datasets/walks/episodes?at={digits}"),
        (404, f"/datasets/walks/diff?a={digits}"),
        (404, f"/datasets/walks?at={digits[:18]}"),
        (400, f"/datasets/images/frame?id=i/0&leaf=&step={digits}"),
    ):
        assert explored.client.get(address).status_code == status, address[:50]


# None of them ends a query before it is cancelled.
_LONG = QueryLimits(wall_s=600, cpu_s=600)


def test_a_query_ends_when_it_is_cancelled(explored_lake):
    cancellation = Cancellation()
    slow = "SELECT max(sin(a.range * b.range)) AS x FROM range(100000) a, range(1000000) b"
    timer = threading.Timer(0.5, cancellation.cancel)
    timer.start()
    with pytest.raises(QueryError, match="cancelled"):
        explored_lake.sql_untrusted(slow, limits=_LONG, cancellation=cancellation)
    timer.join()
    with pytest.raises(QueryError, match="cancelled"):
        explored_lake.sql_untrusted("SELECT 1 AS x", cancellation=cancellation)


def test_few_queries_of_readers_run_at_a_time(explored_lake, reader_type, monkeypatch):
    running, most, lock = 0, 0, threading.Lock()
    run = type(explored_lake).sql_untrusted

    def count(*arguments, **options):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return run(*arguments, **options)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(type(explored_lake), "sql_untrusted", count)
    monkeypatch.setattr(app, "_MAX_SANDBOXES", 2)
    explored = reader_type(explored_lake)
    address = f"/sql.json?{_query('SELECT 1 AS x')}"
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(explored.client.get, [address] * 4))
    assert [answer.json()["rows"] for answer in answers] == [[{"x": 1}]] * 4
    assert most == 2


def test_who_leaves_before_the_turn_takes_none():
    async def check():
        queue, order = RequestQueue(1, 2), []
        left, done = asyncio.Event(), asyncio.Event()

        async def stay():
            return False

        async def leave():
            return left.is_set()

        async def run(name, is_gone, until=None):
            async with queue.take_turn(is_gone):
                order.append(name)
                if until is not None:
                    await until.wait()

        first = asyncio.create_task(run("first", stay, done))
        await asyncio.sleep(0)
        gone = asyncio.create_task(run("gone", leave))
        last = asyncio.create_task(run("last", stay))
        await asyncio.sleep(0)
        with pytest.raises(RequestRefusedError, match="2 queries wait") as refused:
            await run("fourth", stay)
        assert refused.value.status == 503
        left.set()
        with pytest.raises(RequestRefusedError, match="left"):
            await gone
        assert order == ["first"]
        done.set()
        await asyncio.gather(first, last)
        assert order == ["first", "last"]
        await run("after", stay)

    asyncio.run(check())


def test_pages_are_made_while_queries_wait(explored_lake, reader_type, monkeypatch):
    may_end, begun = threading.Event(), threading.Event()
    ran = []

    def hold(lake, text, *arguments, **options):
        ran.append(text)
        begun.set()
        assert may_end.wait(60)
        raise QueryError("ended")

    monkeypatch.setattr(type(explored_lake), "sql_untrusted", hold)
    monkeypatch.setattr(app, "_MAX_SANDBOXES", 1)
    monkeypatch.setattr(app, "_MAX_WAITING", 2)
    explored = reader_type(explored_lake)
    # A condition on episodes runs in the sandbox, too.
    addresses = [
        f"/sql.json?{_query('SELECT 1 AS x')}",
        "/datasets/walks/episodes.json?where=num_steps+%3E+3",
        f"/sql.json?{_query('SELECT 3 AS x')}",
    ]
    with ThreadPoolExecutor(3) as threads:
        try:
            answers = [threads.submit(explored.client.get, addresses[0])]
            assert begun.wait(60)
            answers += [threads.submit(explored.client.get, one) for one in addresses[1:]]
            deadline = time.monotonic() + 60
            while explored.app.sandboxes.num_waiting < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert explored.client.get("/policies").status_code == 200
            assert explored.client.get(addresses[0]).status_code == 503
            assert len(ran) == 1
        finally:
            may_end.set()
        assert [one.result().status_code for one in answers] == [400] * 3
    assert len(ran) == 3


@pytest.mark.parametrize(
    "address",
    [
        "/sql?q=SELECT+1",
        "/sql.csv?q=SELECT+1",
        "/datasets/walks/episodes?where=num_steps+%3E+3",
        "/datasets/walks/episodes.csv?where=num_steps+%3E+3",
        "/datasets/walks/episode?id=w/09&where=num_steps+%3E+3",
    ],
)
def test_all_sql_of_readers_runs_in_a_turn(explored_lake, reader_type, monkeypatch, address):
    turns = []

    def note(*arguments, **options):
        # The ticket of this request alone.
        turns.append(len(explored.app.sandboxes._tickets))
        raise QueryError("ended")

    monkeypatch.setattr(type(explored_lake), "sql_untrusted", note)
    explored = reader_type(explored_lake)
    explored.client.get(address)
    assert set(turns) == {1}
    assert not explored.app.sandboxes._tickets


@pytest.mark.parametrize(
    "address",
    [
        "/datasets/walks/episodes?sort=repetition",
        "/datasets/walks/episode?id=w/09&sort=log_prob",
        "/datasets/walks/next?label=x&sort=repetition",
        "/datasets/walks/breakdown?by=day",
        "/datasets/chats/groups",
        "/datasets/chats/group?id=sum",
    ],
)
def test_pages_that_read_all_steps_have_turns_of_their_own(explored_lake, reader_type, address):
    explored = reader_type(explored_lake)
    explored.app.scans = RequestQueue(0, 0, "pages")
    answer = explored.client.get(address, follow_redirects=False)
    assert answer.status_code == 503
    assert "0 pages wait already" in answer.text
    # Others, and a condition, which is in the sandbox, do not wait for these.
    assert explored.client.get("/datasets/walks/episodes?sort=return").status_code == 200
    condition = "/datasets/walks/episodes?sort=repetition&where=num_steps+%3E+3"
    assert explored.client.get(condition).status_code == 200
    explored.app.scans = RequestQueue(1, 0, "pages")
    answer = explored.client.get(address, follow_redirects=False)
    assert answer.status_code in (200, 303)
    assert not explored.app.scans._tickets


def test_a_link_on_another_site_shows_a_query_and_does_not_run_it(explored):
    headers = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    answer = explored.client.get(f"/sql?{_query('SELECT 41 + 1 AS x')}", headers=headers)
    assert answer.status_code == 200
    assert "SELECT 41 + 1 AS x" in answer.text
    assert "press Run" in answer.text
    assert ">42<" not in answer.text
    for form in ("csv", "json", "parquet"):
        address = f"/sql.{form}?{_query('SELECT 1 AS x')}"
        assert explored.client.get(address, headers=headers).status_code == 403
    headers["sec-fetch-site"] = "same-origin"
    answer = explored.client.get(f"/sql?{_query('SELECT 41 + 1 AS x')}", headers=headers)
    assert ">42<" in answer.text


@pytest.mark.parametrize("page", ["episodes", "episode", "breakdown", "next"])
def test_a_link_on_another_site_shows_a_condition_and_does_not_run_it(
    explored, page_type, monkeypatch, page
):
    where = "num_steps > 3 -- '<b>"
    address = f"/datasets/walks/{page}?{urlencode({'where': where, 'id': 'w/05', 'label': 'x'})}"
    headers = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }

    def refuse(*_, **__):
        raise AssertionError("the condition ran")

    with monkeypatch.context() as patched:
        patched.setattr(Visit, "sql_of_reader", refuse)
        answer = explored.client.get(address, headers=headers)
        assert answer.status_code == 200
        shown = page_type(answer.text)
        assert where in shown.texts
        assert "has not run yet" in shown.text
        file = address.replace("?", ".json?")
        assert explored.client.get(file, headers=headers).status_code == 403
    # "Run" is a link of this page.
    (link,) = (link for link in shown.links if link.startswith(f"/datasets/walks/{page}?"))
    headers["sec-fetch-site"] = "same-origin"
    answer = explored.client.get(link, headers=headers, follow_redirects=False)
    assert answer.status_code == (303 if page == "next" else 200)
    assert "has not run yet" not in answer.text
    # Without a condition of the other site's, a link leads to its page.
    headers["sec-fetch-site"] = "cross-site"
    answer = explored.client.get("/datasets/walks/episodes?sort=steps", headers=headers)
    assert "w/05" in answer.text


def test_no_query_begins_for_a_page_that_nobody_waits_for(explored_lake):
    visit = Visit(explored_lake, Links(), QueryMemory(), ProfileMemory(), {"name": "walks"}, {})
    assert visit.sql("SELECT 1 AS x") == [{"x": 1}]
    visit.cancellation.cancel()
    with pytest.raises(QueryError, match="cancelled"):
        visit.sql("SELECT 1 AS x")
    with pytest.raises(QueryError, match="cancelled"):
        visit.table("SELECT * FROM walks.steps", explored_lake.snapshot("walks"))


def test_a_query_of_a_page_ends_when_its_reader_leaves(explored_lake):
    visit = Visit(explored_lake, Links(), QueryMemory(), ProfileMemory(), {"name": "walks"}, {})
    # Some minutes of one thread, if nothing ends it.
    slow = "SELECT max(sin(a.range * b.range)) AS x FROM range(100000) a, range(1000000) b"
    left = threading.Timer(0.2, visit.cancellation.cancel)
    left.start()
    with pytest.raises(QueryError, match=r"^the query was cancelled\.$"):
        visit.sql(slow)
    left.join()
    # The connections that all queries share still answer.
    assert explored_lake.sql("SELECT 1 AS x").to_pylist() == [{"x": 1}]
    with pytest.raises(QueryError, match="cancelled"):
        explored_lake.sql("SELECT count(*) FROM walks.steps", cancellation=visit.cancellation)


def _chart(reader, query):
    """Return the choices of a result's chart by name, and its columns; None without a chart."""
    html = reader.client.get("/sql", params={"q": query}).text
    found = re.search(r'id="chart-data">(.*?)</script>', html)
    if found is None:
        assert 'id="chart"' not in html
        return None
    selects = re.findall(r'<select id="chart-(\w+)">(.*?)</select>', html)
    choices = {
        name: re.search(r'value="([^"]*)" selected', options)[1] for name, options in selects
    }
    return choices, json.loads(found[1])


def test_a_result_with_numbers_can_be_drawn(explored):
    choices, columns = _chart(explored, "SELECT step, reward FROM walks.steps ORDER BY ALL LIMIT 3")
    assert choices == {"kind": "line", "x": "step", "y": "reward"}
    assert columns["step"] == {"kind": "number", "values": [0.0, 0.0, 0.0]}
    query = """SELECT DATE '1970-01-02' AS day, 'a' AS name, true AS flag, 1.5::DECIMAL(4, 2) AS n,
        [1, 2] AS list UNION ALL SELECT NULL, NULL, NULL, 'nan'::DOUBLE, NULL ORDER BY day"""
    choices, columns = _chart(explored, query)
    assert choices == {"kind": "line", "x": "day", "y": "n"}
    assert columns == {
        "day": {"kind": "time", "values": [86400.0, None]},
        "name": {"kind": "text", "values": ["a", None]},
        "flag": {"kind": "text", "values": ["true", None]},
        "n": {"kind": "number", "values": [1.5, None]},
    }
    choices, _ = _chart(explored, "SELECT range AS n FROM range(2)")
    assert choices["x"] == ""


def test_what_cannot_be_drawn_has_no_chart(explored):
    assert _chart(explored, "SELECT 'a' AS name UNION ALL SELECT 'b'") is None
    assert _chart(explored, "SELECT 1 AS n") is None
    assert _chart(explored, "SELECT 1 AS n WHERE false") is None


def test_a_chart_has_so_many_rows_and_columns(explored):
    names = ", ".join(f"range AS n{i}" for i in range(20))
    _, columns = _chart(explored, f"SELECT {names} FROM range(3000)")
    assert len(columns) == 12
    assert len(columns["n0"]["values"]) == 2000
    assert (
        "The first 2,000 rows."
        in explored.client.get("/sql", params={"q": f"SELECT {names} FROM range(3000)"}).text
    )


def test_hostile_columns_and_values_are_texts_of_a_chart(explored, hostile):
    name = hostile.replace('"', '""')
    query = f"""SELECT 1 AS "{name}", ? AS t UNION ALL SELECT 2, ?"""
    text = hostile.replace("'", "''")
    query = query.replace("?", f"'{text}'")
    page = explored.page("/sql?" + urlencode({"q": query}))
    assert page.texts.count(hostile) >= 2
    _, columns = _chart(explored, query)
    assert columns["t"]["values"] == [hostile, hostile]


def test_the_console_without_a_query_is_json_as_its_page_says(explored):
    assert "/sql.json" in explored.page("/sql").links
    tables = explored.json("/sql.json")["tables"]
    assert "reward" in tables["walks.steps"]
    assert "There is no /sql.csv" in explored.client.get("/sql.csv").text
