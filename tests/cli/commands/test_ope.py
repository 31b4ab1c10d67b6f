"""`replaylake ope`: the numbers of others, verdicts, exit codes, and what it prints."""

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.evaluation.ope.estimators import ESTIMATORS

DOCS = (Path(__file__).parents[3] / "docs" / "OPE.md").read_text(encoding="utf-8")
FIELDS = {
    "estimator",
    "value",
    "ci_low",
    "ci_high",
    "difference",
    "effective_sample_size",
    "max_weight",
}


def bandit(lake: Path, num: int = 400, *, propensities: bool = True) -> None:
    """Action 1 earns about 1, action 0 nothing; both are logged as often."""
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 2, num)
    opened = open_lake(lake, create=True)
    opened.dataset("log").create(Discrete(2), Discrete(2))
    opened.dataset("log").append(
        Episode(
            f"e/{i:04d}",
            observations=np.array([i % 2]),
            actions=actions[i : i + 1],
            rewards=actions[i : i + 1] + 0.1 * rng.standard_normal(1),
            terminated=True,
            behavior_log_probs=np.log([0.5]).astype(np.float32) if propensities else None,
        )
        for i in range(num)
    )


CHEAP = ("--estimator", "ips", "--estimator", "snips")


def test_json_has_what_it_promises(run: Any, lake: Path) -> None:
    bandit(lake)
    ran = run("ope", "log", "--target-prob", "0.2 + 0.6 * action", "--unseen", *CHEAP, "--json")
    assert ran.code == 0, ran.err
    body = ran.json
    assert {"log_mean", "verdict", "reason", "estimates"} <= set(body)
    assert body["verdict"] == "supported"
    assert body["log_mean"] == pytest.approx(0.5, abs=0.1)
    for one in body["estimates"]:
        assert set(one) >= FIELDS
        assert one["value"] == pytest.approx(0.8, abs=0.1)
        assert one["ci_low"] < one["value"] < one["ci_high"]
        assert one["difference"] == pytest.approx(one["value"] - body["log_mean"])
    assert [one["estimator"] for one in body["estimates"]] == ["ips", "snips"]
    assert ran.out.count("\n") == 1


def test_a_person_reads_a_table(run: Any, lake: Path) -> None:
    bandit(lake)
    ran = run("ope", "log", "--target-prob", "0.2 + 0.6 * action", "--unseen", *CHEAP)
    lines = ran.out.splitlines()
    assert lines[0].startswith("target policy of probability 0.2 + 0.6 * action on log@1, 400 ")
    header = next(line for line in lines if line.startswith("estimator"))
    rows = [line for line in lines if re.match(r"(sn)?ips ", line)]
    assert len(rows) == 2
    # Numbers end where their heading ends.
    for row in rows:
        assert len(row) == len(header)
    assert lines[-1].startswith("supported: ")
    assert "log mean" in ran.out
    # Nothing is said of what takes a moment.
    assert ran.err == ""


def test_a_value_that_no_policy_can_have_is_explained(run: Any, lake: Path) -> None:
    opened = open_lake(lake, create=True)
    opened.dataset("log").create(Discrete(2), Discrete(2))
    opened.dataset("log").append(
        Episode(
            f"e/{i:04d}",
            observations=np.zeros(5, np.int64),
            actions=np.random.default_rng(i).integers(0, 2, 5),
            rewards=np.full(5, 2.0 + i % 2),
            terminated=True,
            behavior_log_probs=np.full(5, np.log(0.5), np.float32),
        )
        for i in range(100)
    )
    # Few episodes have a weight, and it is clipped: the mean is below the smallest reward, 2.
    options = ("--target-prob", "0.01 + 0.98 * action", "--estimator", "clipped_is", "--clip", "1")
    ran = run("ope", "log", *options, "--json")
    (one,) = ran.json["estimates"]
    assert one["value"] < 2 <= one["ci_low"]
    ran = run("ope", "log", *options)
    assert "note: the value of clipped_is, " in ran.out


def test_exit_codes(run: Any, lake: Path) -> None:
    bandit(lake)
    # Never what was logged: no weight at all.
    ran = run("ope", "log", "--target-prob", "0.0", *CHEAP)
    assert ran.code == 3
    assert ran.out.splitlines()[-1].startswith("not supported: ")
    assert run("ope", "log", "--target-prob", "0.0", *CHEAP, "--json").json["verdict"] == (
        "not supported"
    )
    weak = run("ope", "log", "--target-prob", "0.5", "--where", "episode_id < 'e/0050'", *CHEAP)
    assert (weak.code, weak.out.splitlines()[-1].split(":")[0]) == (0, "weak")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("absent", "--policy", "random"), "absent"),
        (("log",), "neither"),
        (("log", "--policy", "random", "--target-prob", "1"), "found a policy and also"),
        (("log", "--policy", "nobody"), "nobody"),
        (("log", "--policy", "random", "--estimator", "snip"), "snips"),
        (("log", "--policy", "random", "--where", "episode_id = 'x'"), "no episode"),
        (("log", "--policy", "random", "--where", "nothing > 1"), "nothing"),
        (("log", "--policy", "random", "--reward", "random()"), "random"),
        (("log", "--policy", "random", "--gamma", "0"), "discount"),
        (("log", "--target-prob", "-0.5"), "--target-prob: found -0.5"),
        (("log", "--policy", "random", "--plot", "out.txt"), ".png"),
    ],
)
def test_each_error_is_one_line(
    run: Any, lake: Path, arguments: tuple[str, ...], said: str
) -> None:
    bandit(lake, 20)
    run("ope", *arguments).failed(said)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--explore", "epsilon=2"),
        ("--holdout", "1.5"),
        ("--holdout-after", "yesterday"),
        ("--holdout", "0.5", "--holdout-after", "2026-01-01"),
        ("--seed", "-1"),
        ("--updates", "0"),
    ],
)
def test_wrong_usage(run: Any, lake: Path, arguments: tuple[str, ...]) -> None:
    bandit(lake, 20)
    ran = run("ope", "log", "--policy", "random", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert arguments[0] in ran.err


def test_masks_can_be_ignored_in_a_log_without_any(run: Any, lake: Path) -> None:
    bandit(lake)
    plain, ignoring = (
        run("ope", "log", "--policy", "random", *CHEAP, *more) for more in ((), ("--ignore-masks",))
    )
    assert plain.code == 0, plain.err
    assert ignoring.out == plain.out


def test_a_share_of_the_episodes(run: Any, lake: Path) -> None:
    bandit(lake)
    ran = run("ope", "log", "--policy", "random", "--holdout", "0.3", *CHEAP, "--json")
    assert 80 < ran.json["num_episodes"] < 160
    assert ran.json["holdout"] == {"fraction": 0.3, "salt": ""}


@pytest.mark.slow
def test_a_picture(run: Any, lake: Path, tmp_path: Path) -> None:
    bandit(lake)
    for name, begins in (("ope.png", b"\x89PNG"), ("ope.svg", b"<?xml")):
        picture = tmp_path / name
        assert run("ope", "log", "--policy", "random", *CHEAP, "--plot", picture).code == 0
        assert picture.read_bytes().startswith(begins)
    texts = (tmp_path / "ope.svg").read_text()
    assert "difference from the log's mean," in html.unescape(texts)
    # Without any weights there is a picture, too.
    ran = run("ope", "log", "--target-prob", "0.0", "--plot", tmp_path / "no.png", *CHEAP)
    assert ran.code == 3
    assert (tmp_path / "no.png").exists()


@pytest.mark.slow
def test_fitted_propensities_are_said_in_every_number(run: Any, lake: Path) -> None:
    bandit(lake, 300, propensities=False)
    ran = run("ope", "log", "--policy", "random", *CHEAP)
    assert "propensities: fitted (300 steps, cross-fitted over 5 folds)" in ran.out
    assert "calibration error" in ran.out
    rows = [line for line in ran.out.splitlines() if re.match(r"(sn)?ips ", line)]
    assert [row.split()[-1] for row in rows] == ["fitted", "fitted"]
    body = run("ope", "log", "--policy", "random", *CHEAP, "--json").json
    assert all("fitted" in one["assumptions"] for one in body["estimates"])
    assert all(one["propensities"] == "fitted" for one in body["estimates"])


def test_an_answer_that_may_rest_on_training_episodes_is_weak(run: Any, lake: Path) -> None:
    bandit(lake)
    ran = run("ope", "log", "--target-prob", "0.2 + 0.6 * action", *CHEAP, "--json")
    assert (ran.code, ran.json["verdict"], ran.json["unseen"]) == (0, "weak", False)
    assert "not known whether the policy learned" in ran.json["reason"]
    assert "`unseen`" in ran.json["reason"]


def test_the_estimators_table_of_the_docs_is_the_catalog() -> None:
    tables = DOCS.split("\n## The estimators")[1].split("\n## ")[0].split("Episodes of several")
    for is_one_step, table in zip((True, False), tables, strict=True):
        rows = re.findall(r"^\| (\w+) \| .+? \| .+? \| (.+?) \|$", table, re.MULTILINE)
        found = {name: paper for name, paper in rows if name != "name"}
        expected = {e.name for e in ESTIMATORS.values() if e.one_step in (None, is_one_step)}
        assert set(found) == expected
        for name, paper in found.items():
            assert paper in ESTIMATORS[name].paper, name
            assert ESTIMATORS[name].assumptions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("log", "target"), [("random", "bts"), ("bts", "random")], ids=["random", "bts"]
)
def test_open_bandit_is_as_obp_has_it(run: Any, shared_data: Path, log: str, target: str) -> None:
    folder = shared_data / "obd"
    assert run("ingest", folder / log / "men" / "men.csv", "--dataset", "obd").code == 0
    chances = (
        f"SELECT s.episode_id, d.men_{target}[s.action + 1][s.position] AS p "
        f"FROM obd.steps AS s, read_json('{folder / 'action_dist.json'}') AS d"
    )
    assert run("annotate", "obd", chances, "--on", "episode_id", "--add", "p", "--strict").code == 0
    body = run("ope", "obd", "--target-prob", "p", "--json").json
    reference = json.loads((folder / "obp_reference.json").read_text())["results"]
    expected = reference[f"men:{log}->{target}"]
    found = {one["estimator"]: one for one in body["estimates"]}
    assert found["ips"]["value"] == pytest.approx(expected["values"]["ipw"], abs=1e-9)
    assert found["snips"]["value"] == pytest.approx(expected["values"]["snipw"], abs=1e-9)
    assert found["ips"]["effective_sample_size"] == pytest.approx(expected["ess"], rel=1e-5)
    assert found["ips"]["max_weight"] == pytest.approx(expected["w_max"], rel=1e-5)
    assert body["log_mean"] == pytest.approx(expected["behavior_on_policy_value"])
    on_policy = expected["eval_policy_on_policy_value"]
    assert found["snips"]["ci_low"] < on_policy < found["snips"]["ci_high"]


@pytest.mark.slow
def test_a_greedy_policy_does_not_pass_on_its_own_rows(run: Any, shared_data: Path) -> None:
    source = shared_data / "obd" / "random" / "men" / "men.csv"
    assert run("ingest", source, "--dataset", "obd").code == 0
    train = ("train", "offline", "obd", "--algorithm", "ips_bandit", "--updates", "300")
    assert run(*train, "--policy", "seen").code == 0
    ran = run("ope", "obd", "--policy", "seen", *CHEAP, "--json")
    assert (ran.code, ran.json["verdict"], ran.json["trained_on"]) == (3, "not supported", 10_000)
    assert run(*train, "--policy", "held", "--holdout", "0.5").code == 0
    held = run("ope", "obd", "--policy", "held", *CHEAP, "--json").json
    assert held["trained_on"] == 0
    assert held["num_episodes"] == pytest.approx(5000, abs=200)
    # Its own rows' clicks it knows by heart; of the others' it knows nothing.
    own = {one["estimator"]: one["value"] for one in ran.json["estimates"]}
    others = {one["estimator"]: one["value"] for one in held["estimates"]}
    assert own["snips"] > 3 * others["snips"]
    assert held["verdict"] in ("weak", "not supported")


@pytest.mark.slow
def test_a_model_alone_is_shown_without_an_interval(run: Any, lake: Path, tmp_path: Path) -> None:
    bandit(lake)
    asked = ("ope", "log", "--policy", "random", "--estimator", "snips", "--estimator", "dm")
    picture = tmp_path / "alone.png"
    ran = run(*asked, "--plot", picture)
    assert ran.code == 0, ran.err
    assert picture.stat().st_size > 1000
    lines = ran.out.splitlines()
    assert re.match(r"dm +0\.\d+ +-?0?\.?\S+ +400 +no interval$", lines[-3]), lines
    assert any(line.startswith("  note: dm: no interval: resampling") for line in lines)
    snips, dm = run(*asked, "--json").json["estimates"]
    assert snips["no_interval"] == ""
    assert snips["ci_low"] < snips["ci_high"]
    absent = ("ci_low", "ci_high", "difference_low", "difference_high", "interval")
    assert [dm[name] for name in absent] == [None] * 5
    assert (dm["intervals"], dm["differences"]) == ({}, {})


def test_the_report_is_saved_and_listed(run: Any, lake: Path) -> None:
    bandit(lake)
    body = run("ope", "log", "--policy", "random", *CHEAP, "--json").json
    saved = open_lake(lake).registry.evaluations.read(body.pop("evaluation_id"))
    assert saved.report == body
    assert (saved.kind, saved.policy, saved.policy_version) == ("ope", "random", None)
    assert (saved.dataset, saved.dataset_version, saved.verdict) == ("log", 1, "supported")
    weights = body["weights"]
    assert sum(weights["counts"]) + weights["num_zero"] == 400
    assert len(weights["edges"]) == 41
    assert weights["edges"][0] < body["diagnostics"]["weights"]["max_weight"] < weights["edges"][-1]


def test_a_lake_that_cannot_be_written_still_gets_an_answer(run: Any, lake: Path) -> None:
    bandit(lake)
    (lake / "_lake" / "evaluations").write_text("a file in the place of a folder")
    ran = run("ope", "log", "--policy", "random", *CHEAP, "--json")
    assert (ran.code, ran.json["evaluation_id"], ran.json["verdict"]) == (0, None, "supported")
    assert "the report is not saved in the lake: " in ran.err
