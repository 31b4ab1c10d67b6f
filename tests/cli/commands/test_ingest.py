"""`replaylake ingest`: receipts, and bad input that gives one line and changes nothing."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake

MAP = ("--map", "observation=x,y")
Tree = Callable[[], dict[str, bytes]]


def test_a_log_becomes_a_dataset(run: Any, log: Path) -> None:
    ran = run("ingest", log, "--dataset", "d", *MAP)
    assert ran.code == 0, ran.err
    first, second, *_ = ran.out.splitlines()
    assert first.startswith("d@1: 2 episodes, 3 steps committed in 1 shard, ")
    assert second == (
        "  read 1 file (csv): 2 episodes, 3 steps; rejected 0 and 0; already present 0 and 0"
    )
    rows = run("sql", 'select "return" as r from d.episodes order by r', "--json").json["rows"]
    assert rows == [{"r": 3.0}, {"r": 10.0}]


def test_the_receipt_adds_up_and_a_repeat_adds_nothing(run: Any, log: Path, tree: Tree) -> None:
    arguments = ("ingest", log, "--dataset", "d", *MAP, "--json")
    receipt = run(*arguments).json
    assert receipt["dataset"] == "d"
    assert receipt["version"] == 1
    counts = {"read": 2, "committed": 2, "rejected": 0, "already_present": 0}
    assert receipt["episodes"] == counts
    assert receipt["steps"] == {**counts, "read": 3, "committed": 3}
    assert receipt["shards"] == 1
    assert receipt["bytes"] > 0
    before = tree()
    again = run(*arguments).json
    assert again["version"] is None
    assert again["steps"] == {"read": 3, "committed": 0, "rejected": 0, "already_present": 3}
    assert tree() == before


def test_the_rllib_log_that_ships(run: Any, cartpole: Path) -> None:
    source = cartpole / "cartpole-v1_large"
    receipt = run("ingest", source, "--dataset", "cartpole", "--env", "CartPole-v1", "--json").json
    assert receipt["episodes"]["committed"] == 21
    assert receipt["steps"]["committed"] == 4137
    assert receipt["source"]["num_files"] == 200
    shown = run("show", "cartpole", "--json").json
    assert (shown["num_episodes"], shown["num_steps"], shown["mean_return"]) == (21, 4137, 197.0)


def test_an_invalid_episode_is_quarantined(run: Any, log: Path) -> None:
    log.write_text(log.read_text().replace(",10.0,", ",nan,"))
    receipt = run("ingest", log, "--dataset", "d", *MAP, "--json").json
    assert receipt["episodes"] == {"read": 2, "committed": 1, "rejected": 1, "already_present": 0}
    check = receipt["checks"][0]
    assert (check["name"], check["outcome"], check["num_episodes"]) == ("not_finite", "rejected", 1)
    assert receipt["quarantined_rows"] == 1
    ran = run("ingest", log, "--dataset", "e", *MAP)
    assert ran.code == 0
    assert "rejected 1 and 1" in ran.out
    lines = ran.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:2] == ["check", "outcome"])
    assert lines[at + 1].split()[:4] == ["not_finite", "rejected", "1", "1"]
    (said,) = [line for line in lines if "1 episode was quarantined: SELECT" in line]
    rows = run("sql", said.partition(": ")[2], "--json").json["rows"]
    assert rows[0]["file"] == log.name
    assert "column 'r" in rows[0]["reasons"][0]


def test_a_repeated_ingest_reports_only_what_it_did(run: Any, log: Path, cartpole: Path) -> None:
    log.write_text(log.read_text().replace(",10.0,", ",nan,"))
    arguments = ("ingest", log, "--dataset", "d", *MAP)
    assert "1 episode was quarantined: SELECT" in run(*arguments).out
    again = run(*arguments).out
    assert "1 episode was already quarantined: SELECT" in again
    assert "not_finite" not in again
    arguments = ("ingest", cartpole / "cartpole-v1_large", "--dataset", "c", "--env", "CartPole-v1")
    first, again = run(*arguments, "--json").json, run(*arguments, "--json").json
    assert first["checks"]
    assert again["checks"] == []
    assert first["alignment"] == again["alignment"]
    assert again["notes"] == ["already ingested: the dataset has this content, nothing was added"]


def test_alignment_of_a_source_without_a_valid_episode(run: Any, cartpole: Path, log: Path) -> None:
    arguments = ("--dataset", "c", "--env", "CartPole-v1")
    assert run("ingest", cartpole / "cartpole-v1_large", *arguments).code == 0
    fields = ",".join(f"x{i}" for i in range(4))
    log.write_text(f"episode_id,{fields},action,reward,terminated\ne,0,0,0,0,1,nan,1\n")
    ran = run("ingest", log, *arguments, "--map", "observation=x*")
    assert "alignment was not checked: no episode is valid" in ran.out


def test_a_source_without_a_valid_episode(run: Any, tree: Tree, lake: Path, log: Path) -> None:
    header, *rows = log.read_text().splitlines()
    at = header.split(",").index("reward")
    cells = [row.split(",") for row in rows]
    bad = [",".join([*row[:at], "nan", *row[at + 1 :]]) for row in cells]
    log.write_text("\n".join([header, *bad]) + "\n")
    ran = refused(run, tree, lake, log, "--dataset", "d", *MAP)
    ran.failed("no valid episode", "not_finite in 2")
    assert ran.out.splitlines()[1].split()[:3] == ["not_finite", "rejected", "2"]


def test_a_time_limit_is_a_truncation(run: Any, log: Path) -> None:
    run("ingest", log, "--dataset", "d", *MAP, "--time-limit", "2")
    shown = run("show", "d", "--json").json
    assert (shown["num_terminated"], shown["num_truncated"]) == (0, 2)


@pytest.fixture(params=["in a new lake", "beside a dataset", "into a dataset"])
def target(request: pytest.FixtureRequest, run: Any, log: Path) -> str:
    """A dataset name to ingest into: the lake, and the dataset, may be there or not."""
    if request.param == "in a new lake":
        return "new"
    assert run("ingest", log, "--dataset", "old", *MAP).code == 0
    return "old" if request.param == "into a dataset" else "new"


def refused(run: Any, tree: Tree, lake: Path, *arguments: object) -> Any:
    before, existed = tree(), lake.exists()
    ran = run("ingest", *arguments)
    assert tree() == before
    assert lake.exists() == existed
    return ran


def test_a_source_that_is_not_there(run: Any, tree: Tree, lake: Path, target: str) -> None:
    refused(run, tree, lake, "none.csv", "--dataset", target).failed("none.csv", "no such file")


def test_a_torn_parquet_file(
    run: Any, tree: Tree, lake: Path, target: str, cartpole: Path, tmp_path: Path
) -> None:
    whole = (cartpole / "cartpole-v1_large" / "1_000000_000000.parquet").read_bytes()
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(whole[: len(whole) // 2])
    refused(run, tree, lake, torn, "--dataset", target).failed("torn.parquet", "torn")


def test_a_csv_without_the_mapped_column(
    run: Any, tree: Tree, lake: Path, target: str, log: Path
) -> None:
    ran = refused(run, tree, lake, log, "--dataset", target, "--map", "observation=x,why")
    ran.failed("log.csv", "'why'", "'y'", "--map")


@pytest.mark.parametrize("reward", ["nan", "inf", ""])
def test_a_reward_that_is_no_number(
    run: Any, tree: Tree, lake: Path, target: str, log: Path, reward: str
) -> None:
    bad = log.with_name("bad.csv")
    bad.write_text(log.read_text().replace(",2.0,", f",{reward},"))
    arguments = (bad, "--dataset", target, *MAP, "--on-invalid", "abort")
    refused(run, tree, lake, *arguments).failed("reward")


def test_a_value_outside_the_environment(
    run: Any, tree: Tree, lake: Path, target: str, log: Path
) -> None:
    ran = refused(run, tree, lake, log, "--dataset", target, *MAP, "--env", "CartPole-v1")
    assert ran.code == 1
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dataset", "Bad-Name"), "Bad-Name"),
        (("--dataset", "new", "--env", "CartPoll-v1"), "CartPole-v1"),
    ],
)
def test_names_that_are_not_known(
    run: Any, tree: Tree, lake: Path, log: Path, arguments: tuple[str, ...], said: str
) -> None:
    refused(run, tree, lake, log, *arguments).failed(said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--format", "xlsx"), "'xlsx'"),
        (("--action-scale", "0"), "0.0"),
        (("--action-scale", "2", "--action-low", "-1", "--action-high", "1"), "one or the other"),
        (("--timezone", "Mars/Base"), "'Mars/Base'"),
        (("--map", "reward=reward,step"), "2 columns"),
        (("--map", "reward="), "'reward='"),
        (("--flush-every", "3s"), "--follow"),
        (("--follow", "--gaps", "split"), "split"),
    ],
)
def test_a_flag_that_makes_no_sense_is_wrong_usage(
    run: Any, tree: Tree, log: Path, flags: tuple[str, ...], said: str
) -> None:
    ran = run("ingest", log, "--dataset", "d", *MAP, *flags)
    assert (ran.code, ran.out) == (2, ""), ran
    assert said in ran.err.splitlines()[-1]
    assert tree() == {}


def test_a_name_that_is_nearly_right_is_suggested(run: Any, log: Path) -> None:
    run("ingest", log, "--dataset", "d", *MAP, "--map", "reward=rewrad").failed(
        "Did you mean 'reward'?"
    )
    run("ingest", log, "--dataset", "d", *MAP, "--fill", "rewrad=0").failed(
        "Did you mean 'reward'?"
    )
    ran = run("ingest", log, "--dataset", "d", *MAP, "--map", "acton=action")
    assert "--map action=action" in ran.err.splitlines()[0]


def test_nothing_valid_is_one_json_object(run: Any, log: Path) -> None:
    log.write_text(log.read_text().replace(",0.5,", ",nan,").replace(",2.5,", ",nan,"))
    ran = run("ingest", log, "--dataset", "d", *MAP, "--json")
    error = ran.json["error"]
    assert (ran.code, error["kind"]) == (1, "NothingValidError")
    assert [check["name"] for check in error["checks"]] == ["not_finite"]


def test_what_is_long_is_short_in_the_receipt(run: Any, log: Path, tmp_path: Path) -> None:
    header, *rows = log.read_text().splitlines()
    extra = [f"user-item {i}" for i in range(34)]
    log = tmp_path / f"{'part-00011-' * 12}.csv"
    lines = [f"{row},{','.join('1' * 34)}" for row in rows]
    log.write_text("\n".join([",".join([header, *extra]), *lines]).replace(",2.5,", ",nan,") + "\n")
    ran = run("ingest", log, "--dataset", "d", *MAP)
    assert ran.code == 0, ran
    assert "  34 columns renamed, such as 'user-item 0' -> user_item_0; --json lists all" in ran.out
    (example,) = [line for line in ran.out.splitlines() if line.startswith("    such as")]
    assert "row 2, column 'x': found NaN or infinity" in example
    assert len(example) < 160


def test_control_characters_of_a_log_do_not_reach_the_terminal(run: Any, tmp_path: Path) -> None:
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    log = tmp_path / f"a\x1b[31m\n{hostile}.csv"
    log.write_text(
        f'episode_id,step,obs,action,reward,terminated,"{hostile}"\n'
        f'"{hostile}",0,0.5,0,1,0,1\n"{hostile}",2,0.5,0,1,1,1\nok,0,0.1,1,1,1,1\n'
    )
    for ran in (
        run("ingest", log, "--dataset", "d"),
        run("ingest", log, "--dataset", "e", "--map", "reward=nothing"),
        run("ingest", log, "--dataset", "f", "--json"),
        run("sql", "select file, reasons from d.quarantine"),
    ):
        said = (ran.out + ran.err).replace("\n", "")
        assert said
        assert said.isprintable(), ran


def test_help_has_its_options_under_headings(run: Any) -> None:
    text = run("ingest", "--help").out
    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "Arguments:",
        "Options:",
        "Column options:",
        "Episode options:",
        "Action options:",
        "Key options:",
        "Stream options:",
        "Quarantine options:",
        "Common options:",
    ]


def test_progress_has_each_stage(lake: Path, log: Path) -> None:
    seen: list[Any] = []
    options = ReadOptions(mapping={"observation": "x,y"})
    ingest(open_lake(lake, create=True), [log], "d", options=options, on_progress=seen.append)
    assert list(dict.fromkeys(one.stage for one in seen)) == ["hash", "read", "check", "commit"]
    num_bytes = log.stat().st_size
    for stage, rows in (("hash", 0), ("read", 3)):
        last = [one for one in seen if one.stage == stage][-1]
        assert (last.num_steps, last.num_bytes, last.total_bytes) == (rows, num_bytes, num_bytes)
    assert [(one.num_steps, one.total_steps) for one in seen if one.stage == "check"] == [(3, 3)]


def test_the_profile_of_an_ingest(run: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40_000, 3)).round(6).tolist()
    lines = (
        f"e{i // 100},{i % 100},{x},{y},{i % 2},{reward},{str(i % 100 == 99).lower()},false"
        for i, (x, y, reward) in enumerate(values)
    )
    source = tmp_path / "large.csv"
    header = "episode_id,step,x,y,action,reward,terminated,truncated"
    source.write_text("\n".join([header, *lines]) + "\n")
    arguments = ("ingest", source, "--dataset", "d", *MAP, "--profile")
    receipt = run(*arguments, "--json").json
    profile = receipt["profile"]
    links = {one["link"]: one for one in profile["links"]}
    of_thread = sum(one["seconds"] for one in profile["links"] if one["place"] == "process")
    assert of_thread == pytest.approx(profile["wall_s"])
    assert links.keys() >= {"start", "hash", "parse", "validate", "assemble", "encode", "other"}
    assert links["hash"]["num_bytes"] == links["parse"]["num_bytes"] == source.stat().st_size
    for link in ("parse", "validate", "assemble", "encode", "compress", "shard_write"):
        assert links[link]["items"] == 40_000, link
    assert links["compress"]["num_bytes"] == links["shard_write"]["num_bytes"] == receipt["bytes"]
    assert links["fsync"]["num_calls"] >= 4  # the shard and the commit, each with its folder
    # Nothing is committed again, nor is it measured unless that is asked for.
    lines = run(*arguments).out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("link "))
    assert lines[header].split()[:4] == ["link", "of", "seconds", "share"]
    assert {line.split()[0] for line in lines[header + 1 :]} >= {"start", "hash", "parse", "other"}
    assert "profile" not in run("ingest", source, "--dataset", "e", *MAP, "--json").json


@pytest.mark.parametrize("flag", ["--check", "--follow", "--from-quarantine"])
def test_what_has_no_profile(run: Any, log: Path, flag: str) -> None:
    source = () if flag == "--from-quarantine" else (log,)
    ran = run("ingest", *source, "--dataset", "d", "--profile", flag)
    assert ran.code == 2
    assert "--profile" in ran.err
    assert flag in ran.err


@pytest.mark.slow
def test_ingest_imports_no_pandas(tmp_path: Path) -> None:
    """It would take a third of the time of an ingest of a few rows."""
    program = """
import sys
from replaylake.cli.main import main
try:
    main()
finally:
    sys.exit("pandas" in sys.modules)
"""
    path = tmp_path / "log.csv"
    path.write_text("x,action,reward,prob,note\n" + "0.5,1,1,0.5,a\n1.5,0,0,0.5,\n" * 50)
    given = ["--map", "observation=x", "--format", "bandit", "--lake", tmp_path / "lake"]
    command = [sys.executable, "-c", program, "ingest", path, "--dataset", "d", *given]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "100 episodes, 100 steps committed" in done.stdout
