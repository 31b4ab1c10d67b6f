"""`promote` and its gate, `rollback`, the history of aliases, notes, protection and deletion."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decisions import decisions_encoder, ensure_feedback_tables
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.manifest import GRAPH, MANIFEST, manifest_bytes
from replaylake.datastore.lake.policies.package import load_policy, save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.networks.graph import PolicyGraph

torch = pytest.importorskip("torch")
CHEAP = ("--estimator", "ips", "--estimator", "snips")
GATE = ("--gate", "--dataset", "log", *CHEAP)


class Constant(torch.nn.Module):
    """The same q-values whatever is seen."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = torch.tensor(values)

    def forward(self, observations: Any) -> Any:
        return (observations[:, :1] * 0 + self.values,)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """p:1 takes action 0 and earns nothing, p:2 takes 1 and earns about 1; a log of both."""
    folder = tmp_path_factory.mktemp("promote")
    opened = open_lake(folder / "lake", create=True)
    spec = PolicySpec(Box((2,)), Discrete(2), "q_values")
    for number, values in enumerate(([1.0, 0.0], [0.0, 1.0])):
        package = folder / f"package-{number}"
        onnx = export_onnx(PolicyGraph(Constant(values), spec))
        save_package(package, onnx=onnx, spec=spec, manifest={}, learner_weights=None)
        opened.registry.register("p", package, run_id="r", lineage={"datasets": []})
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 2, 400)
    opened.dataset("log").create(Box((2,)), Discrete(2))
    opened.dataset("log").append(
        Episode(
            f"e/{i:04d}",
            observations=np.zeros((1, 2), np.float32),
            actions=actions[i : i + 1],
            rewards=actions[i : i + 1] + 0.1 * rng.standard_normal(1),
            terminated=True,
            behavior_log_probs=np.log([0.5]).astype(np.float32),
        )
        for i in range(400)
    )
    return folder / "lake"


@pytest.fixture
def opened(lake: Path, template: Path) -> Lake:
    return open_lake(shutil.copytree(template, lake))


@pytest.fixture
def plain(lake: Path, tmp_path: Path) -> Lake:
    """Four versions of p that nobody loads."""
    opened = open_lake(lake, create=True)
    folder = tmp_path / "plain"
    folder.mkdir()
    spec, files = PolicySpec(Box((2,)), Discrete(2), "categorical"), {GRAPH: b"graph"}
    for name, data in {**files, MANIFEST: manifest_bytes(spec, {}, files)}.items():
        (folder / name).write_bytes(data)
    for _ in range(4):
        opened.registry.register("p", folder, run_id="r", lineage={"datasets": []})
    return opened


def test_a_gate_lets_the_better_one_pass(run: Any, opened: Lake) -> None:
    first = run("promote", "p:1", "--to", "champion", "--by", "ada", "--note", "to begin")
    assert (first.code, first.out) == (0, "p@champion is p:1\n")
    ran = run("promote", "p", "--to", "champion", *GATE, "--by", "ada")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].startswith("p:2 against p:1, acting greedy, on log@1, 400 episodes, 400 steps")
    header = next(line for line in lines if line.startswith("estimator"))
    assert header.split() == ["estimator", "candidate", "champion", "difference", "from", "to"]
    for row in (line for line in lines if re.match(r"(sn)?ips ", line)):
        assert len(row) == len(header)
    assert lines[-2].startswith("passed: Better than the champion: of 2 estimators the least: ")
    assert lines[-1] == "p@champion is p:2, was p:1"
    assert opened.registry.alias_version("p", "champion") == 2
    (_, move) = opened.registry.alias_history("p")
    assert (move.by, move.kind, move.forced, move.gate["passed"]) == ("ada", "promote", False, True)
    again = run("promote", "p:2", "--to", "champion")
    assert (again.code, again.out) == (0, "p@champion is p:2 already\n")
    assert len(opened.registry.alias_history("p")) == 2


def test_a_gate_refuses_the_worse_one_with_3_and_the_numbers(run: Any, opened: Lake) -> None:
    opened.registry.set_alias("p", "champion", 2)
    # The log has no masks: it makes no difference.
    ran = run("promote", "p:1", "--to", "champion", *GATE, "--ignore-masks")
    assert ran.code == 3
    lines = ran.out.splitlines()
    assert re.match(r"refused: i?s?n?ips puts the difference from the champion at -", lines[-2])
    assert lines[-1] == ("p:1 is not promoted to champion: use --force to promote it anyway")
    (refused,) = opened.registry.evaluations.list("p", 1)
    assert (refused.kind, refused.verdict, refused.dataset) == ("gate", "refused", "log")
    assert refused.report["alias"] == "champion"
    assert len(refused.report["reports"]) == 2
    shown = run("policies", "show", "p:1").out.splitlines()
    assert shown[-1].split()[1:] == ["gate", "log@1", "refused", refused.evaluation_id]
    assert opened.registry.alias_version("p", "champion") == 2
    forced = run("promote", "p:1", "--to", "champion", *GATE, "--force", "--ignore-masks", "--json")
    assert forced.code == 0
    body = forced.json
    assert body["promoted"]
    assert not body["gate"]["passed"]
    assert body["gate"]["ignore_masks"]
    assert body["move"]["forced"]
    assert body["move"]["gate"]["comparisons"][0]["high"] < 0
    assert [report["policy_version"] for report in body["gate"]["reports"]] == [1, 2]
    assert run("promote", "p:2", "--to", "challenger", *GATE).code == 0
    rows = opened.sql("SELECT alias, to_version, passed, forced FROM promotions").to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("champion", 2, None, False),
        ("champion", 1, False, True),
        ("challenger", 2, True, False),
    ]


def test_the_first_champion_is_compared_with_the_log(run: Any, opened: Lake) -> None:
    ran = run("promote", "p:2", "--to", "champion", *GATE)
    assert ran.code == 0
    assert ran.out.startswith(
        "p has no champion to compare with: compared with the mean return of the log\n"
        "p:2 against the log's mean, "
    )
    assert run("rollback", "p").code == 1


def test_a_log_that_says_too_little(run: Any, opened: Lake) -> None:
    opened.registry.set_alias("p", "champion", 1)
    ran = run("promote", "p:2", "--to", "champion", *GATE, "--where", "episode_id < 'e/0040'")
    assert ran.code == 3
    assert "candidate: not supported" in ran.out
    assert "refused: not supported of the champion, p:1: Importance weights leave" in ran.out


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("episode_id = 'e/0040'", "found 1 episode, expected 2 or more"),
        (
            "episode_id = 'nobody'",
            "found no episode where episode_id = 'nobody', expected at least",
        ),
    ],
)
def test_a_log_without_episodes_to_compare_on_refuses_too(
    run: Any, opened: Lake, where: str, said: str
) -> None:
    opened.registry.set_alias("p", "champion", 1)
    ran = run("promote", "p:2", "--to", "champion", *GATE, "--where", where)
    assert ran.code == 3
    assert "refused: off-policy evaluation" in ran.out
    assert said in ran.out
    assert opened.registry.alias_version("p", "champion") == 1
    forced = run("promote", "p:2", "--to", "champion", *GATE, "--where", where, "--force", "--json")
    assert forced.code == 0
    gate = forced.json["move"]["gate"]
    assert (gate["passed"], forced.json["move"]["forced"]) == (False, True)
    assert said in gate["reasons"][0]
    assert run("policies", "history", "p").code == 0


@pytest.mark.slow
def test_what_learned_to_keep_a_cost_low_is_judged_by_that(run: Any, opened: Lake) -> None:
    """Trained with --reward=-reward, it takes the action that earns nothing, and is the better."""
    ran = run("train", "offline", "log", "--algorithm", "ips_bandit", "--policy", "p",
              "--reward=-reward", "--holdout", "0.7", "--updates", "60",
              "--set", "select=last", "--set", "hidden_sizes=[8]",
              "--set", "learning_rate=0.02")  # fmt: skip
    assert ran.code == 0, ran.err
    ran = run("ope", "log", "--policy", "p:3", *CHEAP)
    assert ran.code == 0, ran.out
    assert "  reward: (-(reward)); the policy was trained with it; gamma 1, 0.99 in training" in (
        ran.out.splitlines()
    )
    body = run("ope", "log", "--policy", "p:3", *CHEAP, "--json").json
    assert (body["reward"], body["reward_source"]) == ("(-(reward))", "training")
    assert (body["gamma"], body["training_gamma"]) == (1.0, 0.99)
    assert body["estimates"][0]["value"] == pytest.approx(0.0, abs=0.1)
    assert body["log_mean"] == pytest.approx(-0.5, abs=0.1)
    asked = run("ope", "log", "--policy", "p:3", *CHEAP, "--reward", "reward").out
    assert "  reward: as stored, as asked; the policy was trained with (-(reward)); " in asked
    plain = run("ope", "log", "--policy", "p:2", *CHEAP).out
    assert "  reward: as stored; the policy's lineage names none that it was trained with" in plain
    opened.registry.set_alias("p", "champion", 2)
    refused = run("promote", "p:3", "--to", "champion", *GATE)
    assert refused.code == 3
    assert refused.out.startswith("refused: p:3 was trained with the reward (-(reward)), ")
    named = run("promote", "p:3", "--to", "champion", *GATE, "--reward=-reward")
    assert named.code == 0, named.out
    assert "  reward: (-(reward)), as asked; the policy was trained with it; gamma 1" in named.out
    assert "  reward of the champion: (-(reward)), as asked; the policy's lineage na" in named.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("ope", "log", "--policy", "p:2", *CHEAP),
        ("promote", "p:2", "--to", "champion", *GATE),
        ("replay-decisions", "p:2", "log"),
        ("evaluate", "p:2", "--env", "CartPole-v1"),
        ("rollout", "--env", "CartPole-v1", "--policy", "p:2", "--dataset", "new",
         "--episodes", "1"),
        ("train", "online", "--env", "CartPole-v1", "--algorithm", "dqn", "--policy", "q",
         "--dataset", "new", "--steps", "10", "--start-from", "p:2"),
        ("policies", "show", "p:2"),
        ("serve", "p:2", "--check"),
        ("policies", "package", "p:2", "--output", "bento"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_a_manifest_that_was_altered_is_refused(
    run: Any, opened: Lake, arguments: tuple[str, ...]
) -> None:
    """Actions that start at 5 in place of 0: all of them would be others."""
    path = opened.registry.resolve("p:2").path / "manifest.json"
    before = path.read_text()
    path.write_text(before.replace('"start": 0', '"start": 5'))
    assert path.read_text() != before
    ran = run(*arguments)
    assert ran.code == 1, ran
    assert f"error: {path}: found sha256 " in ran.err
    assert "the manifest was altered. Restore it from a copy of the lake" in ran.err
    assert opened.datasets() == ["log"]
    assert not Path("bento").exists()
    assert run("fsck").code == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gate",), "--dataset"),
        (("--force",), "requires --gate"),
        (("--dataset", "log"), "requires --gate"),
        (("--alpha", "0.1"), "requires --gate"),
        ((*GATE, "--explore", "often"), "--explore"),
        ((*GATE, "--holdout", "2"), "--holdout"),
    ],
)
def test_options_that_mean_nothing_together(
    run: Any, plain: Lake, arguments: tuple[str, ...], said: str
) -> None:
    ran = run("promote", "p:1", "--to", "champion", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert plain.registry.alias_history() == []


def test_rolling_back(run: Any, plain: Lake) -> None:
    for version in (1, 2, 3):
        assert run("promote", f"p:{version}", "--to", "champion").code == 0
    assert run("rollback", "p").out == "p@champion is p:2, was p:3\n"
    run("rollback", "p", "--from-version", "3").failed("found version 2, expected version 3")
    ran = run("rollback", "p", "--to-version", "3", "--by", "ada", "--note", "it was not it")
    assert ran.out == "p@champion is p:3, was p:2\n"
    run("rollback", "p", "--alias", "challenger").failed("no such alias")
    body = run("policies", "history", "p", "--json").json
    moves = [(m["kind"], m["from_version"], m["to_version"]) for m in body["moves"]]
    assert moves == [
        ("promote", None, 1),
        ("promote", 1, 2),
        ("promote", 2, 3),
        ("rollback", 3, 2),
        ("rollback", 2, 3),
    ]
    assert (body["moves"][-1]["by"], body["moves"][-1]["note"]) == ("ada", "it was not it")
    assert body["moves"][0]["by"]
    assert body["served"] == []
    lines = run("policies", "history", "p").out.splitlines()
    assert lines[0].split() == ["at", "alias", "from", "to", "by", "how", "gate", "note"]
    assert lines[-1] == "no decision of p is in this lake"


def test_two_versions_differ_in_these_fields(run: Any, plain: Lake) -> None:
    package = plain.path.parent / "other"
    package.mkdir()
    spec = PolicySpec(Box((2,)), Discrete(3), "q_values")
    files = {GRAPH: b"another graph"}
    for name, data in {**files, MANIFEST: manifest_bytes(spec, {}, files)}.items():
        (package / name).write_bytes(data)
    lineage = {"datasets": [{"dataset": "log", "version": 7}], "seed": 1}
    plain.registry.register("p", package, run_id="another", lineage=lineage)
    assert run("promote", "p:1", "--to", "champion").code == 0
    body = run("policies", "diff", "p", "p:5", "--json").json
    assert [(one["version"], one["selected_by"]) for one in body["policies"]] == [
        (1, "alias champion"),
        (5, "version"),
    ]
    fields = body["fields"]
    assert fields["aliases"] == [["champion"], []]
    assert fields["run_id"][1] == "another"
    assert fields["lineage.seed"] == [None, 1]
    assert fields["lineage.datasets.0.version"] == [None, 7]
    assert fields["manifest.action_space.n"][1] == 3
    assert "protected" not in fields
    header, *lines = run("policies", "diff", "p", "p:5").out.splitlines()
    assert header.split() == ["field", "p:1", "p:5"]
    assert ["aliases", "[champion]", "[]"] in [line.split() for line in lines]
    assert run("policies", "diff", "p:2", "p:2").out == "no difference\n"
    run("policies", "diff", "p:2", "p:9").failed("p:9")


def test_notes_protection_and_deletion(run: Any, plain: Lake) -> None:
    assert run("policies", "note", "p:2", "a good one", "--by", "ada").code == 0
    assert run("policies", "protect", "p:2").out == "p:2 is protected from deletion\n"
    assert run("policies", "protect", "p:2").out == "p:2 is protected from deletion already\n"
    run("policies", "delete", "p:2", "--yes").failed("p:2: is protected", "unprotect p:2")
    body = run("policies", "unprotect", "p:2", "--json").json
    assert (body["protected"], body["changed"]) == (False, True)
    assert run("policies", "delete", "p").code == 2
    would = run("policies", "delete", "p:2")
    assert re.match("would delete p:2; .* files in _lake/policies/p/", would.out)
    assert "use --yes to delete" in would.err
    assert len(plain.registry.list()) == 4
    assert run("policies", "delete", "p:2", "--yes").out.startswith("deleted p:2; ")
    assert [row["version"] for row in plain.registry.list()] == [1, 3, 4]
    run("policies", "show", "p:2").failed("that one was deleted")


def decisions(opened: Lake) -> None:
    live = opened.dataset("live")
    ensure_feedback_tables(live, Box((2,)), Discrete(2))
    records = [
        {
            "decision_id": f"d{i}",
            "timestamp": i * 1_000_000,
            "policy": "p",
            "policy_version": 1 + i % 2,
            "observation": [0.0, 0.0],
            "action": i % 2,
            "log_prob": -0.5,
            "deterministic": False,
        }
        for i in range(6)
    ]
    live.decisions.append(decisions_encoder(live)(records), producer="w", sequence=0)


def test_decisions_are_replayed(run: Any, opened: Lake) -> None:
    decisions(opened)
    ran = run("replay-decisions", "p:2", "live", "--by", "policy_version", "--explore", "epsilon=1")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == "policy p:2 (version), acting epsilon=1, on 6 decisions of live.decisions"
    assert "  agreement of its best action           50.00%" in lines
    assert any("mean probability of the logged action  0.5" in line for line in lines)
    assert any("latency of one decision" in line for line in lines)
    header = lines.index(next(line for line in lines if line.startswith("policy_version ")))
    assert [line.split()[:3] for line in lines[header + 1 :]] == [["1", "3", "0"], ["2", "3", "1"]]
    body = run("replay-decisions", "p:1", "live", "--limit", "3", "--json").json
    assert (body["num_decisions"], body["num_impossible"], body["kl"]) == (3, 1, None)
    assert body["agreement"] == pytest.approx(2 / 3)
    # 1 - 2/3 and 1/3 differ in their last bit; of countable actions no distance is told.
    assert "distance" not in run("replay-decisions", "p:1", "live", "--limit", "3").out
    run("replay-decisions", "p:1", "live", "--by", "nothing").failed("found no column nothing")
    assert run("replay-decisions", "p:1", "live", "--limit", "0").code == 2


def test_who_served_when(run: Any, opened: Lake) -> None:
    decisions(opened)
    lines = run("policies", "history", "p").out.splitlines()
    assert lines[0] == "no alias of p was ever set"
    assert lines[2].split() == ["version", "dataset", "num_decisions", "first_at", "last_at"]
    assert [line.split()[:3] for line in lines[3:]] == [["1", "live", "3"], ["2", "live", "3"]]
    body = run("lineage", "--policy", "p:2", "--json").json
    assert [one["num_decisions"] for one in body["served"]] == [3]


def test_lineage_from_an_episode(run: Any, opened: Lake, tmp_path: Path) -> None:
    trained = {"dataset": "log", "version": 1, "where": None, "num_episodes": 400}
    folder = opened.registry.resolve("p:1").path
    lineage = {"datasets": [trained]}
    opened.registry.register("q", folder, run_id="r", lineage=lineage)
    opened.registry.set_alias("q", "champion", 1)
    followed = {**trained, "since": 0, "num_episodes": None}
    opened.registry.register("q", folder, run_id="r", lineage={"datasets": [followed]})
    opened.tag("log", "golden")
    ran = run("lineage", "--dataset", "log", "--episode", "e/0007")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[:3] == ["episode e/0007 of log", "  in version 1", "  tag golden, version 1"]
    assert lines[-2] == "  policy q:1: learned from it, in log@1, all episodes"
    assert lines[-1].startswith("  policy q:2: learned from it, came while the run followed log@0")
    run("lineage", "--dataset", "log", "--episode", "e/9").failed("found in no version of it")
    assert run("lineage", "--policy", "q", "--episode", "e/0007").code == 2
    # Lineages that do not say how much it was.
    for version in ("q:1", "q:2"):
        shown = run("lineage", "--policy", version)
        assert shown.code == 0, shown.err
    assert "dataset log@1, followed from version 0 on" in shown.out
    assert "champion moved to 1 at " in run("lineage", "--policy", "q:1").out


class FirstStep(torch.nn.Module):
    """Logits that matter at the first step, which is seen as (1, 0), and else are the same."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.first = torch.tensor([-first, first])
        self.later = torch.tensor([0.3, -0.4])

    def forward(self, observations: Any) -> Any:
        return (observations[:, :1] * self.first + observations[:, 1:] * self.later,)


def test_on_the_champions_own_log_of_hundreds_of_steps(
    run: Any, lake: Path, tmp_path: Path
) -> None:
    """p:1 wrote it, as it is served; p:2 takes action 1 first, which earns 10, more often."""
    opened = open_lake(lake, create=True)
    spec = PolicySpec(Box((2,)), Discrete(2), "categorical")
    for number, first in enumerate((0.1, 0.9, -0.7)):
        package = tmp_path / f"package-{number}"
        onnx = export_onnx(PolicyGraph(FirstStep(first), spec))
        save_package(package, onnx=onnx, spec=spec, manifest={}, learner_weights=None)
        opened.registry.register("p", package, run_id="r", lineage={"datasets": []})
    policy = load_policy(opened.registry.resolve("p:1").path)
    rng = np.random.default_rng(0)
    opened.dataset("own").create(spec.observation_space, spec.action_space)
    episodes = []
    for i in range(200):
        seen = np.tile(np.array([0, 1], np.float32), (int(rng.integers(200, 300)), 1))
        seen[0] = 1, 0
        act = policy.act(seen, rng=rng, deterministic=False)
        episodes.append(
            Episode(
                f"e/{i:04d}",
                observations=seen,
                actions=act.actions,
                rewards=10.0 * act.actions * seen[:, 0] + 0.1 * rng.standard_normal(len(seen)),
                terminated=True,
                behavior_log_probs=act.log_probs,
            )
        )
    opened.dataset("own").append(episodes)
    own = ("own", "--explore", "temperature=1", "--estimator", "is", "--estimator", "wpdis")
    found = run("ope", *own, "--policy", "p:1")
    assert (found.code, found.out.splitlines()[-1].partition(":")[0]) == (0, "supported"), found.out
    opened.registry.set_alias("p", "champion", 1)
    gate = ("--to", "champion", "--gate", "--dataset", *own)
    worse = run("promote", "p:3", *gate)
    assert worse.code == 3
    assert "champion: supported" in worse.out
    better = run("promote", "p:2", *gate)
    assert better.code == 0, better.out
    assert opened.registry.alias_version("p", "champion") == 2


@pytest.fixture
def sampled(plain: Lake) -> Lake:
    """p:1 passes in one of two samples of 24 tasks, p:2 in each."""
    plain.dataset("math").append(
        Episode(
            f"t{task:02d}#{version}.{number}",
            observations=np.array(["?"], object),
            actions=np.array(["!"], object),
            rewards=np.array([float(version == 2 or number == 0)]),
            terminated=True,
            policies=["p"],
            policy_versions=np.array([version]),
            extras={"group_id": [f"t{task:02d}"]},
        )
        for version in (1, 2)
        for task in range(24)
        for number in range(2)
    )
    return plain


SAMPLES = ("--gate", "--dataset", "math", "--measure", "pass@1")


def test_a_gate_compares_samples_of_tasks(run: Any, sampled: Lake) -> None:
    first = run("promote", "p:1", "--to", "champion", *SAMPLES, "--margin", "0.2")
    assert first.code == 0, first.err
    lines = first.out.splitlines()
    assert lines[:2] == [
        "p:1 on math@1, 24 tasks",
        "p has no champion to compare with: compared with the margin",
    ]
    assert lines[3].split() == ["estimator", "candidate", "from", "to"]
    assert lines[-1] == "p@champion is p:1"
    ran = run("promote", "p:2", "--to", "champion", *SAMPLES, "--by", "ada")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == "p:2 against p:1 on math@1, 24 tasks"
    assert lines[3].split()[:4] == ["pass@1", "1", "0.5", "0.5"]
    assert lines[4].startswith("passed: Better than the champion: the difference of pass@1 is 0.5")
    assert lines[5] == "p@champion is p:2, was p:1"
    move = sampled.registry.alias_history("p")[-1]
    assert (move.gate["measure"], move.gate["passed"]) == ("pass@1", True)


def test_a_gate_by_samples_refuses_with_3_and_the_lake_keeps_why(run: Any, sampled: Lake) -> None:
    sampled.registry.set_alias("p", "champion", 2)
    ran = run("promote", "p:1", "--to", "champion", *SAMPLES, "--success", "return > 0.5")
    assert ran.code == 3
    assert "refused: the difference of pass@1 from the champion is -0.5" in ran.out
    (refused,) = sampled.registry.evaluations.list("p", 1)
    assert (refused.kind, refused.verdict, refused.dataset) == ("gate", "refused", "math")
    assert (refused.dataset_version, refused.report["success"]) == (1, "return > 0.5")
    missing = run("promote", "p:3", "--to", "champion", *SAMPLES, "--json")
    assert missing.code == 3
    assert "found no sample of p:3" in missing.json["gate"]["reasons"][0]
    assert sampled.registry.alias_version("p", "champion") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--measure", "pass@1"], "--measure: requires --gate"),
        (["--gate", "--dataset", "math", "--task", "x"], "--task: requires --measure"),
        ([*SAMPLES, "--gamma", "0.9"], "--gamma: cannot be used with --measure"),
        (
            ["--gate", "--dataset", "math", "--measure", "x"],
            "--measure: found 'x', expected pass@K",
        ),
    ],
)
def test_options_of_the_other_gate_are_wrong_usage(
    run: Any, sampled: Lake, options: list[str], said: str
) -> None:
    ran = run("promote", "p:1", "--to", "champion", *options)
    assert ran.code == 2
    assert said in " ".join(ran.err.split())
