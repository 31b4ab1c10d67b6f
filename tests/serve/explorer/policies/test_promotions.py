"""Promotion on a policy's page: the gate of `promote`, one at a time, and only where allowed."""

import os
import threading
import time

import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import CommitConflictError
from replaylake.serve.explorer.policies import policies_page
from replaylake.serve.explorer.visits.promotions import PromotionRequest, Promotions

pytest.importorskip("torch")
from replaylake.cli.commands.explore import load_promote

PAGE = "/policies/p"
PROMOTE = "/policies/p/promote"
CANCEL = "/policies/p/cancel"
CHEAP = {"estimators": "ips, snips", "unseen": "yes"}


@pytest.fixture
def reader(gate_lake, reader_type):
    return reader_type(gate_lake, promote=load_promote())


def _promote(reader, version, status=303, **changes):
    """Send the form, and wait until the gate has said something."""
    fields = reader.fields(PAGE, "promote") | {"version": version, "dataset": "log", "by": "Ada"}
    answer = reader.post(PROMOTE, fields | CHEAP | changes)
    assert answer.status_code == status, answer.text
    _wait_for_end(reader.app._promotions)
    return answer


def _wait_for_end(promotions):
    deadline = time.monotonic() + 120
    while promotions.find("p")[1] is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _find(reader):
    """Return the last promotion of the policy, and the one that is running."""
    return reader.app._promotions.find("p")


def test_a_version_that_passes_is_promoted_on_record(reader):
    answer = _promote(reader, "2", note="better <b>and</b> safer", explore="epsilon=0.1")
    assert answer.headers["location"] == f"{PAGE}#promotion"
    registry = reader.lake.registry
    (move,) = registry.alias_history("p")
    assert (move.alias, move.to_version, move.kind, move.by) == ("champion", 2, "promote", "Ada")
    assert (move.note, move.forced) == ("better <b>and</b> safer", False)
    assert move.gate["passed"]
    assert move.gate["acts"] == "epsilon=0.1"
    (saved,) = registry.evaluations.list("p")
    assert (saved.kind, saved.verdict, saved.evaluated_by) == ("gate", "passed", "Ada")
    page = reader.page(PAGE)
    assert "promoted" in page.texts
    assert "better <b>and</b> safer" in page.texts
    assert f"/policies/p?evaluation={saved.evaluation_id}#evaluation" in page.links
    body = reader.json(f"{PAGE}.json")["promotion"]
    assert (body["promoted"], body["evaluation_id"]) == (True, saved.evaluation_id)
    # What it is already is no promotion.
    assert "which p@champion is already" in _promote(reader, "2", status=400).text


def test_a_version_that_is_refused_says_why_and_moves_nothing(reader):
    reader.lake.registry.set_alias("p", "champion", 2)
    _promote(reader, "1")
    registry = reader.lake.registry
    assert registry.alias_version("p", "champion") == 2
    (saved,) = registry.evaluations.list("p", 1)
    assert saved.verdict == "refused"
    page = reader.page(PAGE)
    assert "refused" in page.texts
    for reason in saved.report["reasons"]:
        # Below the promotion, in the list of evaluations, and above the comparison.
        assert page.texts.count(reason) == 3
    # There is no way around it.
    assert "force" not in [a.get("name") for _, a in page.tags]
    _promote(reader, "1", force="yes")
    assert registry.alias_version("p", "champion") == 2


def test_a_log_without_such_episodes_refuses_too(reader):
    reader.lake.dataset("nothing_yet").create(Box((1,)), Discrete(2))
    _promote(reader, "2", dataset="nothing_yet", alias="challenger")
    assert "refused" in reader.page(PAGE).texts
    assert "found no episode" in reader.page(PAGE).text
    assert reader.lake.registry.alias_history("p") == []


def test_a_report_that_cannot_be_saved_is_told(reader):
    folder = reader.lake.path / "_lake" / "evaluations"
    folder.write_text("a file in the place of a folder")
    reader.lake.registry.set_alias("p", "champion", 2)
    _promote(reader, "1")
    body = _find(reader)[0].to_json()
    assert (body["promoted"], body["evaluation_id"]) == (False, None)
    folder.unlink()
    assert "The report is not saved: " in reader.page(PAGE).text


def test_a_gate_that_cannot_be_evaluated_says_so(reader):
    _promote(reader, "2", alpha="0")
    page = reader.page(PAGE)
    assert "failed" in page.texts
    assert "alpha: found 0, expected more than 0" in page.text
    assert "The alias was not moved." in page.texts
    _promote(reader, "2", estimators="guess")
    assert "estimator: found 'guess'" in reader.page(PAGE).text
    assert reader.lake.registry.alias_history("p") == []


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"by": " "}, 400, "by: found nothing"),
        ({"version": "two"}, 400, "version: found 'two'"),
        ({"version": "9"}, 404, "p:9"),
        ({"version": "9" * 5000}, 400, "version: found '99"),
        ({"dataset": "nothing"}, 404, "nothing"),
        ({"alias": "Not An Alias"}, 404, "Not An Alias"),
        ({"alpha": "much"}, 400, "alpha: found 'much', expected a number"),
        ({"gamma": "nan"}, 400, "gamma: found 'nan', expected a number"),
        ({"gamma": "1.5"}, 400, "gamma: found 1.5, expected at least 0 and at most 1"),
        # The gate is not weaker than by default.
        ({"margin": "-1e300"}, 400, "margin: found -1e+300, expected at least 0:"),
        ({"alpha": "0.03"}, 400, "alpha: found 0.03, expected at least 0 and at most 0.025"),
        # SQL of a reader's would run in the explorer's process, without limits.
        ({"where": "list_sum(range(num_steps * 1000000)) > 0"}, 400, "where: found"),
        ({"holdout": "2"}, 400, "holdout"),
        ({"explore": "often"}, 400, "explore: found 'often'"),
        ({"note": "x" * 1001}, 400, "note: found 1,001 characters"),
        ({"by": "x" * 101}, 400, "by: found 101 characters"),
        ({"by": "Ada\x1b"}, 400, "by: found 'Ada\\x1b'"),
    ],
)
def test_a_wrong_form_starts_nothing(reader, changes, status, words):
    answer = _promote(reader, **{"version": "2", "status": status, **changes})
    assert words in answer.text
    assert 'href="/policies/p"' in answer.text
    assert _find(reader) == (None, None)


@pytest.mark.parametrize("name", ["p:1", "p@champion", "nobody", "..%2Fp", "%3Cb%3E"])
def test_what_is_no_policy_is_not_promoted(reader, name):
    reader.lake.registry.set_alias("p", "champion", 1)
    fields = reader.fields(PAGE, "promote") | {"version": "2", "dataset": "log", "by": "Ada"}
    assert reader.post(f"/policies/{name}/promote", fields).status_code in (400, 404)
    assert _find(reader)[1] is None
    assert reader.lake.registry.alias_version("p", "champion") == 1


def test_one_gate_runs_at_a_time_and_the_page_follows_it(gate_lake, reader_type):
    has_begun, may_go = threading.Event(), threading.Event()

    def promote(lake, request, on_stage):
        on_stage("reading the steps")
        has_begun.set()
        assert may_go.wait(60)
        raise ZeroDivisionError("secret detail")

    reader = reader_type(gate_lake, promote=promote)
    fields = reader.fields(PAGE, "promote") | {"version": "2", "dataset": "log", "by": "Ada"}
    assert reader.post(PROMOTE, fields).status_code == 303
    assert has_begun.wait(60)
    text = reader.client.get(PAGE).text
    assert "p:2 as champion, on log: reading the steps, asked for by Ada at " in text
    assert 'data-refresh="2"' in text
    assert 'id="promote"' not in text
    # Whoever waits for it on the page of another policy sees it end, too.
    package = gate_lake.registry.resolve("p:1").path
    gate_lake.registry.register("other", package, run_id="r", lineage={"datasets": []})
    other = reader.client.get("/policies/other").text
    assert "The gate of p:2 is being evaluated" in other
    assert 'data-refresh="2"' in other
    assert 'id="cancel-promotion"' not in other
    # A page that is followed requests itself: it would act on what another site's link chose.
    headers = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    for site, is_followed in (("cross-site", False), ("same-origin", True)):
        page = reader.client.get(
            f"{PAGE}?observation=[1]", headers=headers | {"sec-fetch-site": site}
        )
        assert ('data-refresh="2"' in page.text) == is_followed
    again = reader.post(PROMOTE, fields | {"by": "Bob"})
    assert again.status_code == 409
    assert "found the gate of p:2 running, asked for by Ada" in again.text
    may_go.set()
    page = reader.page(PAGE)
    assert "a fault in ReplayLake" in page.text
    assert "secret detail" not in page.text


def test_the_gate_of_another_policy_is_waited_for(tmp_path):
    may_go = threading.Event()
    running = Promotions(None, lambda *_: (may_go.wait(60), {"promoted": True})[1])
    running.start(PromotionRequest("p", 1, "champion", "log", "Ada"))
    with pytest.raises(CommitConflictError, match="one is evaluated at a time"):
        running.start(PromotionRequest("q", 1, "champion", "log", "Bob"))
    assert running.find("q")[0] is None
    may_go.set()


def _hold(stages, may_go):
    """Return a `promote` that waits in its first stage, and then goes through further ones."""

    def promote(lake, request, on_stage):
        on_stage("reading the steps")
        stages.append("begun")
        assert may_go.wait(60)
        on_stage(None)
        stages.append("moved")
        raise AssertionError("not cancelled")

    return promote


def test_a_promotion_is_cancelled_before_the_alias_moves(gate_lake, reader_type, kit):
    may_go, stages = threading.Event(), []
    reader = reader_type(gate_lake, promote=_hold(stages, may_go))
    fields = reader.fields(PAGE, "promote") | {"version": "2", "dataset": "log", "by": "Ada"}
    assert reader.post(PROMOTE, fields).status_code == 303
    kit.wait_until(lambda: stages)
    page = reader.client.get(PAGE).text
    assert 'id="cancel-promotion"' in page
    sent = {"form_token": fields["form_token"], "by": "Bob"}
    assert reader.post(CANCEL, sent | {"form_token": ""}).status_code == 403
    assert reader.post("/policies/other/cancel", sent).status_code == 404
    answer = reader.post(CANCEL, sent)
    assert (answer.status_code, answer.headers["location"]) == (303, f"{PAGE}#promotion")
    assert ">being cancelled<" in reader.client.get(PAGE).text
    may_go.set()
    _wait_for_end(reader.app._promotions)
    page = reader.page(PAGE)
    assert "cancelled by Bob" in page.texts
    assert "The alias was not moved." in page.texts
    assert stages == ["begun"]
    again = reader.post(CANCEL, sent)
    assert again.status_code == 404
    assert "found none that is running" in again.text
    # The next one may begin.
    assert reader.fields(PAGE, "promote")


def test_a_gate_that_is_cancelled_while_it_estimates_moves_nothing(gate_lake):
    promotions = Promotions(gate_lake, None)

    def promote(lake, request, on_stage):
        def cancel_late(stage):
            if stage == "saving the report":
                promotions.cancel("p", "Bob")
            on_stage(stage)

        return load_promote()(lake, request, cancel_late)

    promotions._promote = promote
    promotions.start(PromotionRequest("p", 2, "champion", "log", "Ada", unseen=True))
    _wait_for_end(promotions)
    assert promotions.find("p")[0].error == "cancelled by Bob"
    assert gate_lake.registry.alias_history("p") == []
    assert gate_lake.registry.evaluations.list("p") == []


def test_a_page_that_is_made_while_the_gate_ends_is_read_again(gate_lake, reader_type, monkeypatch):
    has_begun, may_go = threading.Event(), threading.Event()

    def promote(lake, request, on_stage):
        has_begun.set()
        assert may_go.wait(60)
        return {"promoted": False, "evaluation_id": None, "gate": {"reasons": ["weak"]}}

    reader = reader_type(gate_lake, promote=promote)
    fields = reader.fields(PAGE, "promote") | {"version": "2", "dataset": "log", "by": "Ada"}
    assert reader.post(PROMOTE, fields).status_code == 303
    assert has_begun.wait(60)
    draw = policies_page.draw_lineage

    def end_meanwhile(*arguments):
        may_go.set()
        _wait_for_end(reader.app._promotions)
        return draw(*arguments)

    monkeypatch.setattr(policies_page, "draw_lineage", end_meanwhile)
    page = reader.client.get(PAGE).text
    assert ">running<" in page
    assert 'data-refresh="2"' in page
    page = reader.client.get(PAGE).text
    assert ">refused<" in page
    assert "data-refresh" not in page


def test_a_gate_has_the_priority_that_the_explorer_was_started_with():
    found = []

    def promote(lake, request, on_stage):
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        # Whatever a gate ends with, the next one is evaluated.
        raise SystemExit(1) if len(found) == 1 else ZeroDivisionError

    def start_and_yield():
        # As run_explorer does; in a thread, so that the tests keep their own priority.
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        promotions = Promotions(None, promote)
        os.nice(1)
        for _ in range(2):
            promotions.start(PromotionRequest("p", 1, "champion", "log", "Ada"))
            _wait_for_end(promotions)
        expected.append(before)

    expected = []
    thread = threading.Thread(target=start_and_yield)
    thread.start()
    thread.join(120)
    assert found == expected * 2 != []


def test_without_leave_nobody_promotes(gate_lake, reader_type):
    allowed = reader_type(gate_lake, promote=load_promote())
    fields = allowed.fields(PAGE, "promote") | {"version": "2", "dataset": "log", "by": "Ada"}
    assert fields["form_token"]
    for options in ({}, {"read_only": True, "promote": load_promote()}):
        reader = reader_type(gate_lake, **options)
        assert reader.fields(PAGE, "promote") == {}
        token = reader.app._form_tokens.issue(b"")
        answer = reader.post(PROMOTE, fields | {"form_token": token})
        assert answer.status_code == 403
        assert ("moves no aliases" in answer.text) == (not options)
    for changed in (
        allowed.post(PROMOTE, fields, origin="https://evil.example", sec_fetch_site="cross-site"),
        allowed.post(PROMOTE, fields | {"form_token": ""}),
    ):
        assert changed.status_code == 403
    assert _find(allowed) == (None, None)
    assert gate_lake.registry.alias_history("p") == []
