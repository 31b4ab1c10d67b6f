"""A policy's page: what evaluations and gates said, also those that refused."""

import re

import pytest

pytest.importorskip("torch")
from replaylake.datastore.errors import StorageError
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest
from replaylake.offline.evaluation.ope.promotion_gate import evaluate_gate
from replaylake.serve.explorer.policies import policies_page
from replaylake.serve.explorer.serving import lineage_panel
from replaylake.serve.pages.charts import flow_chart


@pytest.fixture
def gated(gate_lake, reader_type):
    """A gate refuses p:1."""
    lake = gate_lake
    refs = [lake.registry.resolve(f"p:{version}") for version in (1, 2)]
    lake.registry.set_alias("p", "champion", 2)
    request = EvaluationRequest("log", "p:1", estimators=("ips", "snips"), unseen=True)
    result = evaluate_gate(lake, *refs, request)
    assert not result.passed
    lake.registry.evaluations.save(
        "gate",
        {**result.to_json(), "alias": "champion"},
        policy="p",
        policy_version=1,
        dataset="log",
        dataset_version=1,
        verdict="refused",
        by="ada",
    )
    return reader_type(lake), result


def test_a_refused_gate_says_why(gated):
    reader, result = gated
    page = reader.page("/policies/p")
    assert "Gate of version 1 as champion" in page.texts
    for reason in result.reasons:
        # In the list of evaluations, and above the comparison.
        assert page.texts.count(reason) == 2
    for one in result.comparisons:
        assert f"{one.difference:,.4g} ({one.low:,.4g} to {one.high:,.4g})" in page.texts
    assert {"Candidate p:1 in the log", "Champion p:2 in the log"} <= set(page.texts)
    size = result.candidate.diagnostics.weights.worst_step_size
    assert f"{size:,.1f}" in page.texts
    zeros = result.candidate.count_weights()["num_zero"]
    assert any(text.endswith(f"; {zeros} more are 0") for text in page.texts)
    body = reader.json("/policies/p.json")
    (listed,) = body["evaluations"]
    assert (listed["verdict"], listed["reasons"]) == ("refused", list(result.reasons))
    assert body["shown_evaluation"]["report"]["comparisons"]
    # The list's SQL finds the same.
    query = next(
        text for text in page.texts if text.startswith("SELECT") and "FROM evaluations" in text
    )
    assert reader.lake.sql(query).num_rows == 1


def test_a_large_estimate_has_no_exponent(gated):
    reader, _ = gated
    estimate = {"estimator": "ips", "value": 12345.6, "ci_low": 9876.5, "ci_high": 20000.0}
    about = {"policy": "p", "policy_version": 2, "dataset": "log", "dataset_version": 1}
    save = reader.lake.registry.evaluations.save
    save("ope", {"estimates": [estimate]}, **about, verdict="weak")
    assert "12,346 (9,876 to 20,000)" in reader.page("/policies/p").texts


def test_each_evaluation_has_an_address_and_any_report_is_shown(gated, hostile):
    reader, _ = gated
    about = {"policy": "p", "policy_version": 2, "dataset": "log", "dataset_version": 1}
    saved = reader.lake.registry.evaluations
    first = saved.list()[0].evaluation_id
    odd = {
        "reason": hostile,
        "estimates": [{"estimator": hostile, "value": 1e308}, {"value": -1e308}, 5, {}],
        "weights": {"edges": [1.0], "counts": [3, 4]},
        "diagnostics": {"weights": "none"},
        "refused": {"dr": hostile},
    }
    second = saved.save("ope", odd, **about, verdict="weak")
    page = reader.page("/policies/p")
    assert "Evaluation of version 2" in page.texts
    assert hostile in page.texts
    assert "1e+308, no interval" in page.texts
    assert "Gate of version 1 as champion" in reader.page(f"/policies/p?evaluation={first}").texts
    links = [link for link in page.links if link.endswith("#evaluation")]
    assert links == [f"/policies/p?evaluation={one}#evaluation" for one in (second, first)]
    reader.page("/policies/p?evaluation=01x", 404)


def test_many_evaluations_are_shown_by_pages(gated, monkeypatch):
    reader, _ = gated
    monkeypatch.setattr(policies_page, "_MAX_ROWS", 3)
    monkeypatch.setattr(policies_page, "_MAX_EVALUATIONS", 4)
    about = {"policy_version": 1, "dataset": "log", "dataset_version": 1, "verdict": "weak"}
    save = reader.lake.registry.evaluations.save
    newest = [save("ope", {}, policy="p", **about) for _ in range(4)]
    others = [save("ope", {}, policy="other", **about) for _ in range(5)]

    def follow(address):
        page = reader.page(address)
        older = [
            link for link in page.links if re.search(r"\?evaluated_before=.*#evaluations", link)
        ]
        rows = re.findall("[?&]evaluation=([^&#]+)", " ".join(page.links))
        return page, rows, older[0] if older else None

    # Four files are looked at, all of them of another policy.
    page, rows, older = follow("/policies/p")
    assert rows == []
    assert "None of the 4 evaluations that this page looked at is of p." in page.texts
    page, rows, older = follow(older)
    assert rows == [newest[3], newest[2], newest[1]]
    # The newest on the page is the one whose report is shown.
    assert "Evaluation of version 1" in page.texts
    page, rows, older = follow(older)
    assert rows[0] == newest[0]
    assert len(rows) == 2
    assert (
        "Gate of version 1 as champion"
        in reader.page(next(link for link in page.links if f"evaluation={rows[1]}" in link)).texts
    )
    assert older is None
    assert "/policies/p#evaluations" in page.links
    # One that no page lists has its address, too, and only below its policy.
    assert "Evaluation of version 1" in reader.page(f"/policies/p?evaluation={newest[0]}").texts
    page = reader.page(f"/policies/p?evaluation={others[0]}", 404)
    assert "found one of policy other, expected one of policy p" in page.text


def test_an_evaluation_has_differences_from_the_log(gated):
    reader, _ = gated
    estimates = [
        {
            "estimator": "ips",
            "value": 2.0,
            "difference": 0.5,
            "difference_low": 0.25,
            "difference_high": 0.75,
        },
        {"estimator": "dm", "value": 1.0, "difference": -0.5},
    ]
    about = {"policy": "p", "policy_version": 2, "dataset": "log", "dataset_version": 1}
    saved = reader.lake.registry.evaluations.save(
        "ope", {"estimates": estimates}, **about, verdict="supported"
    )
    page = reader.page(f"/policies/p?evaluation={saved}")
    assert "Difference from the log's own mean, paired by episode" in page.texts
    assert {"0.5 (0.25 to 0.75)", "-0.5, no interval"} <= set(page.texts)


def test_samples_of_tasks_show_pass_at_k_and_tokens(gated, hostile):
    reader, _ = gated
    report = {
        "task": "group_id",
        "policy": "p",
        "policy_version": 2,
        "against": hostile,
        "num_tasks": 24,
        "num_samples": 1200,
        "tokens": {"prompt": 31.25, "completion": 8.5, "completion_per_success": None},
        "estimates": [
            {
                "estimator": "pass@1",
                "value": 0.5,
                "ci_low": 0.25,
                "ci_high": 0.75,
                "difference": 0.1,
                "difference_low": -0.1,
                "difference_high": 0.3,
            },
        ],
        "reason": "24 tasks, drawn independently.",
    }
    about = {"policy": "p", "policy_version": 2, "dataset": "log", "dataset_version": 1}
    reader.lake.registry.evaluations.save("tasks", report, **about, verdict="supported")
    page = reader.page("/policies/p")
    assert {
        "samples of tasks",
        "Evaluation of version 2",
        "Mean over the tasks",
        f"Difference from {hostile}, paired by task",
        "Policy p:2 on the tasks",
        "0.5 (0.25 to 0.75)",
        "0.1 (-0.1 to 0.3)",
        "1,200",
        "31.25",
        "24 tasks, drawn independently.",
    } <= set(page.texts)


def test_a_damaged_report_is_named_and_hides_no_other(gated):
    reader, _ = gated
    reader.lake.storage.put("_lake/evaluations/00x.json", b"{}")
    try:
        page = reader.page("/policies/p")
    finally:
        reader.lake.storage.delete(["_lake/evaluations/00x.json"])
    assert any(re.match("Left out: evaluation 00x: .* is damaged", text) for text in page.texts)
    assert "Gate of version 1 as champion" in page.text or "Evaluation of version" in page.text


def test_the_newest_versions_moves_and_evaluations_are_shown(gated, monkeypatch):
    reader, _ = gated
    monkeypatch.setattr(policies_page, "_MAX_ROWS", 1)
    registry = reader.lake.registry
    registry.set_alias("p", "challenger", 1)
    about = {"policy": "p", "policy_version": 2, "dataset": "log", "dataset_version": 1}
    registry.evaluations.save("ope", {}, **about, verdict="weak")
    page = reader.page("/policies/p")
    assert page.texts.count("the newest 1 of 2; SQL and JSON have all") == 1
    assert "/policies/p?below=2" in page.links
    body = reader.json("/policies/p.json")
    assert [one["version"] for one in body["versions"]] == [2]
    assert len(body["moves"]) == 2
    (evaluation,) = body["evaluations"]
    assert body["older_evaluations_before"] == evaluation["evaluation_id"]
    older = reader.page("/policies/p?below=2")
    assert "Newest" in older.texts
    assert [one["version"] for one in reader.json("/policies/p.json?below=2")["versions"]] == [1]
    # Versions with an alias are part of the lineage on each of these pages.
    assert {"p:1", "p:2"} <= set(page.texts) & set(older.texts)
    assert reader.json("/policies/p.json?below=1")["versions"] == []
    assert "expected the number of a version" in reader.page("/policies/p?below=x", 400).text


def test_a_log_that_cannot_be_read_hides_no_policy(gated, monkeypatch):
    def fail(visit, dataset):
        raise StorageError(f"{dataset}: found no answer. Try again.")

    monkeypatch.setattr(lineage_panel, "read_arms", fail)
    page = gated[0].page("/policies/p")
    assert "Decisions of log: log: found no answer. Try again." in page.texts
    assert "p:1" in page.texts


def test_decisions_of_a_lineage_are_counted_at_most_twice_a_minute(
    served_lake, reader_type, monkeypatch
):
    read = []

    def count(visit, dataset):
        read.append(dataset)
        return []

    monkeypatch.setattr(lineage_panel, "read_arms", count)
    reader = reader_type(served_lake)
    for _ in range(2):
        reader.page("/policies/clone")
    assert sorted(read) == sorted(served_lake.datasets())
    monkeypatch.setattr(lineage_panel, "_RECENT_S", -1.0)
    reader.page("/policies/clone")
    assert len(read) == 2 * len(served_lake.datasets())


def test_without_an_evaluation_the_command_is_there(empty, kit, tmp_path):
    package = kit.save_policy(tmp_path / "package")
    empty.lake.registry.register("walker", package, run_id="r", lineage={})
    page = empty.page("/policies/walker")
    assert "replaylake promote walker --to champion --gate --dataset DATASET" in page.texts


def test_lineage_leads_from_data_to_decisions(served_lake, reader_type):
    page = reader_type(served_lake).page("/policies/clone")
    place = page.texts.index("Lineage")
    texts = page.texts[place:]
    for text in (
        "live@1",
        "where return >= 2",
        "r",
        "clone:2",
        "clone:1",
        "champion",
        "14 decisions",
    ):
        assert text in texts, text
    assert "/serving/live" in page.links
    assert "/serving/fresh" not in page.links
    paths = [attributes["d"] for tag, attributes in page.tags if tag == "path"]
    # Data to the run, the run to both versions, both versions to the log.
    assert len(paths) == 5


def test_lineage_counts_the_decisions_of_other_policies_too(served_lake, reader_type, monkeypatch):
    def read(visit, dataset):
        arms = [("clone", 2, 3), ("other", 1, 1500)] if dataset == "live" else []
        return [dict(zip(("policy", "policy_version", "num"), arm, strict=True)) for arm in arms]

    monkeypatch.setattr(lineage_panel, "read_arms", read)
    page = reader_type(served_lake).page("/policies/clone")
    assert "3 of 1,503 decisions" in page.texts[page.texts.index("Lineage") :]


def test_lineage_of_versions_of_one_run_leads_to_each_from_its_own_data(
    tmp_path, kit, reader_type, monkeypatch
):
    lake = open_lake(tmp_path / "lake", create=True)
    package = kit.save_policy(tmp_path / "p")
    for data in ("x", "y", "y"):
        lineage = {"datasets": [{"dataset": data, "version": 1}]}
        lake.registry.register("p", package, run_id="r", lineage=lineage)
    drawn = []

    def draw(stages, links, *, label):
        drawn.append((dict(stages), links))
        return flow_chart(stages, links, label=label)

    monkeypatch.setattr(lineage_panel, "flow_chart", draw)
    reader_type(lake).page("/policies/p")
    ((stages, links),) = drawn
    runs = {key: node.name for key, node in list(stages.values())[1].items()}
    assert list(runs.values()) == ["r", "r"]
    into = {(start.strip(), run) for place, start, run in links if place == 0}
    out = {(run, version) for place, run, version in links if place == 1}
    found = {(data, version) for data, run in into for at, version in out if at == run}
    assert found == {("x@1", "p:1"), ("y@1", "p:2"), ("y@1", "p:3")}


def test_lineage_of_what_was_not_recorded_and_of_many_versions(tmp_path, kit, reader_type, hostile):
    lake = open_lake(tmp_path / "lake", create=True)
    package = kit.save_policy(tmp_path / "p")
    lineage = {"algorithm": hostile, "datasets": [{"dataset": "gone", "where": hostile}]}
    for number in range(12):
        lake.registry.register("p", package, run_id="", lineage=lineage if number else {})
    lake.registry.set_alias("p", "champion", 1)
    page = reader_type(lake).page("/policies/p")
    texts = page.texts[page.texts.index("Lineage") :]
    assert [text for text in texts if text.startswith("p:")][:9] == [
        *(f"p:{number}" for number in range(12, 4, -1)),
        "p:1",
    ]
    # The data of the first version, its run, and the run of the others.
    assert texts.count("not recorded") == 3
    assert f"where {hostile}" in texts
    assert any(text.startswith("The newest 8 versions, and those") for text in texts)
