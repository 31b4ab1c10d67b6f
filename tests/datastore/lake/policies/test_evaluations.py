"""Saved evaluations: what comes back, what SQL sees, and files that are not what was written."""

import math
from datetime import UTC, datetime

import pytest

from replaylake.datastore.errors import FormatTooNewError, NotFoundError, StorageError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.storage.seals import seal_json
from replaylake.datastore.version import VERSION

REPORT = {"verdict": "weak", "estimates": [{"estimator": "ips", "value": 0.5, "z": math.inf}]}
ABOUT = {"policy": "p", "policy_version": 2, "dataset": "d", "dataset_version": 7}


@pytest.fixture
def lake(tmp_path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def test_a_saved_report_comes_back_with_what_it_is_of(lake):
    before = datetime.now(UTC).replace(microsecond=0)
    saved = lake.registry.evaluations
    first = saved.save("ope", REPORT, **ABOUT, verdict="weak", by="ada")
    second = saved.save("gate", {}, **{**ABOUT, "policy_version": 3}, verdict="refused")
    one = saved.read(first)
    assert one.report == {
        "verdict": "weak",
        "estimates": [{"estimator": "ips", "value": 0.5, "z": None}],
    }
    assert (one.kind, one.policy, one.policy_version, one.verdict) == ("ope", "p", 2, "weak")
    assert (one.dataset, one.dataset_version, one.evaluated_by) == ("d", 7, "ada")
    assert one.replaylake_version == VERSION
    assert before <= one.evaluated_at <= datetime.now(UTC)
    assert [each.evaluation_id for each in saved.list()] == [first, second]
    assert [each.evaluation_id for each in saved.list("p", 3)] == [second]
    assert saved.list("q") == []


def test_the_newest_is_last_within_a_millisecond_too(lake):
    saved = lake.registry.evaluations
    ids = [saved.save("ope", {}, **ABOUT, verdict="weak") for _ in range(20)]
    assert [each.evaluation_id for each in saved.list()] == ids


def test_sql_reads_the_reports(lake):
    assert lake.sql("select * from evaluations").num_rows == 0
    lake.registry.evaluations.save("ope", REPORT, **ABOUT, verdict="weak")
    text = "select policy, policy_version, report->'$.estimates[0].value' as v from evaluations"
    assert lake.sql(text).to_pylist() == [{"policy": "p", "policy_version": 2, "v": "0.5"}]


def test_what_is_not_there_is_named(lake):
    with pytest.raises(NotFoundError, match="evaluation '01x': not in this lake"):
        lake.registry.evaluations.read("01x")


@pytest.mark.parametrize("change", ["flip", "cut", "other"])
def test_a_damaged_file_is_named_and_hides_no_other(lake, change, caplog):
    intact = lake.registry.evaluations.save("ope", REPORT, **ABOUT, verdict="weak")
    evaluation_id = lake.registry.evaluations.save("ope", REPORT, **ABOUT, verdict="weak")
    path = f"_lake/evaluations/{evaluation_id}.json"
    data = lake.storage.get(path)
    damaged = {"flip": data.replace(b"weak", b"week"), "cut": data[:40], "other": b"[1]"}
    lake.storage.put(path, damaged[change])
    with pytest.raises(StorageError, match=f"evaluation {evaluation_id}: .* is damaged"):
        lake.registry.evaluations.read(evaluation_id)
    with pytest.raises(StorageError, match=evaluation_id):
        lake.registry.evaluations.list()
    errors = []
    readable = lake.registry.evaluations.list("p", on_unreadable=errors.append)
    assert [one.evaluation_id for one in readable] == [intact]
    assert [evaluation_id in str(error) for error in errors] == [True]
    rows = lake.sql("select evaluation_id from evaluations").to_pylist()
    assert rows == [{"evaluation_id": intact}]
    assert evaluation_id in caplog.text
    found = [(one.severity, one.check, one.path) for one in fsck(lake).findings]
    assert ("error", "evaluation", path) in found


def test_one_of_a_newer_release_is_refused_and_no_damage(lake):
    lake.storage.put(
        "_lake/evaluations/01x.json", seal_json({"format": 2, "replaylake_version": "9"})
    )
    with pytest.raises(FormatTooNewError, match="saved by ReplayLake 9"):
        lake.registry.evaluations.read("01x")
    assert lake.sql("select * from evaluations").num_rows == 0
    assert [one for one in fsck(lake).findings if one.check == "evaluation"] == []


def test_the_newest_of_a_policy_are_read_and_no_others(lake, monkeypatch):
    saved = lake.registry.evaluations
    ids = [
        saved.save("ope", {}, **{**ABOUT, "policy": name}, verdict="weak")
        for name in ("p", "q", "p", "q", "p", "p", "q")
    ]
    of_p = [ids[5], ids[4], ids[2], ids[0]]
    read = []
    get_many = type(lake.storage).get_many

    def note(storage, paths):
        read.extend(path.rpartition("/")[2].removesuffix(".json") for path in paths)
        return get_many(storage, paths)

    monkeypatch.setattr(type(lake.storage), "get_many", note)

    def list_newest(num, **options):
        found, before = saved.list_newest("p", num, **options)
        return [one.evaluation_id for one in found], before

    assert list_newest(9) == (of_p, None)
    # By pages: the last one ends with the oldest file, so that there is no other.
    assert list_newest(2) == (of_p[:2], ids[4])
    assert list_newest(2, before=ids[4]) == (of_p[2:], None)
    # By the number of files that are looked at.
    read.clear()
    assert list_newest(9, max_files=1) == ([], ids[6])
    assert list_newest(9, max_files=4, before=ids[6]) == (of_p[:3], ids[2])
    assert read == [ids[6], *reversed(ids[2:6])]
    assert list_newest(9, before=ids[0]) == ([], None)
    path = f"_lake/evaluations/{ids[4]}.json"
    lake.storage.put(path, lake.storage.get(path)[:40])
    with pytest.raises(StorageError, match=ids[4]):
        list_newest(9)
    errors = []
    assert list_newest(9, on_unreadable=errors.append)[0] == [ids[5], ids[2], ids[0]]
    assert len(errors) == 1


def test_an_id_leads_to_no_other_file(lake):
    lake.registry.evaluations.save("ope", REPORT, **ABOUT, verdict="weak")
    lake.storage.put("_lake/secret.json", b"{}")
    with pytest.raises(NotFoundError, match="not in this lake"):
        lake.registry.evaluations.read("../secret")
