"""Commands on a lake that is no folder."""

import pytest

from replaylake.datastore.lake.lake import open_lake


def test_commands_on_s3(run, bucket, log) -> None:
    url = f"s3://{bucket}/team/lake"
    receipt = run("ingest", log, "--dataset", "ads", "--map", "observation=x,y", "--lake", url)
    assert receipt.code == 0, receipt.err
    assert receipt.out.startswith("ads@1: 2 episodes, 3 steps")
    again = run(
        "ingest", log, "--dataset", "ads", "--map", "observation=x,y", "--lake", url, "--json"
    )
    assert again.json["steps"]["already_present"] == 3
    rows = run("sql", "select sum(reward) as total from ads.steps", "--lake", url, "--json")
    assert rows.json["rows"] == [{"total": 13.0}]
    assert run("list", "--lake", url, "--json").json["datasets"][0]["dataset"] == "ads"
    assert run("show", "ads@1", "--lake", url, "--json").json["num_steps"] == 3
    assert run("policies", "list", "--lake", url, "--json").json == {"policies": []}
    assert open_lake(url).snapshot("ads").num_steps == 3


def test_the_lake_in_the_environment_may_be_a_url(run, bucket, log, monkeypatch) -> None:
    monkeypatch.setenv("REPLAYLAKE_LAKE", f"s3://{bucket}/lake")
    run("list").failed(f"lake s3://{bucket}/lake: found none there")
    assert run("ingest", log, "--dataset", "ads", "--map", "observation=x,y").code == 0
    assert run("list", "--json").json["datasets"][0]["num_steps"] == 3


@pytest.mark.parametrize("command", [["list"], ["ingest", "LOG", "--dataset", "d"], ["serve", "p"]])
def test_an_unknown_scheme_is_refused(run, log, tmp_path, monkeypatch, command) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    command = [str(log) if part == "LOG" else part for part in command]
    run(*command, "--lake", "ftp://host/lake").failed(
        "lake 'ftp://host/lake'", "s3://, gs://, az://, file:// or memory://"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bucket_that_is_not_there_is_named(run, s3, log) -> None:
    for command in (["list"], ["ingest", log, "--dataset", "d", "--map", "observation=x,y"]):
        run(*command, "--lake", "s3://not-made/lake").failed("found no bucket 'not-made'")


def test_memory_is_refused_where_other_processes_are_needed(run, tmp_path) -> None:
    url = f"memory://{tmp_path.name}"
    lake = open_lake(url, create=True)
    assert run("list", "--lake", url, "--json").json == {"datasets": []}
    assert lake.datasets() == []
    arguments = ["--env", "CartPole-v1", "--dataset", "d", "--workers", "1", "--lake", url]
    run("rollout", *arguments).failed("in this process's memory alone")


def test_a_file_url_is_a_folder(run, tmp_path, log) -> None:
    url = (tmp_path / "my lake").as_uri()
    assert (
        run("ingest", log, "--dataset", "ads", "--map", "observation=x,y", "--lake", url).code == 0
    )
    assert run("list", "--lake", tmp_path / "my lake", "--json").json["datasets"]
