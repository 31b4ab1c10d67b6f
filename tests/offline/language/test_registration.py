"""Language models as policy versions: their lineage, and what other commands say of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from replaylake.cli.main import main
from replaylake.datastore.errors import (
    InvalidNameError,
    NotFoundError,
    PackageInvalidError,
    SourceInvalidError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.package import check_package
from replaylake.datastore.lake.policies.registry import Registry
from replaylake.datastore.lake.runs.summary import find_run
from replaylake.datastore.maintenance.lineage.episode_lineage import trace_episode
from replaylake.datastore.maintenance.lineage.lineage import trace_policy
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.language.pretrained import check_model_folder
from replaylake.offline.language.registration import register_language_model
from replaylake.offline.running.train_language import (
    LanguageConfig,
    resume_language,
    train_language,
)
from replaylake.offline.running.training.interruption import RunInterrupted

pytestmark = pytest.mark.slow


@pytest.fixture
def lake(recorded: Lake, tmp_path: Path) -> Lake:
    shutil.copytree(recorded.path, tmp_path / "lake")
    return open_lake(tmp_path / "lake")


def config(model: Path, output: Path, **values: object) -> LanguageConfig:
    options = {"model": str(model), "output": str(output), "method": "sft", "updates": 2}
    return LanguageConfig(**{**options, **values})  # type: ignore[arg-type]


def test_a_trained_model_is_registered_with_its_lineage(lake, model_folder, tmp_path):
    where = "episode_return > 0"
    result = train_language(
        lake,
        "agents",
        config(model_folder, tmp_path / "out", policy="agent", where_sequences=where),
    )
    ref = result.policy
    assert str(ref) == "agent:1"
    assert check_model_folder(ref.path).sha256 == result.sha256
    trace = trace_policy(lake, "agent:1")
    assert trace["run"]["run_id"] == result.run_id
    (data,) = trace["datasets"]
    assert (data["dataset"], data["version"]) == ("agents", lake.snapshot("agents").version)
    assert data["where_sequences"] == where
    assert 0 < data["num_sequences"] < 64
    assert data["num_episodes"] == data["num_sequences"]
    assert len(data["content_hash"]) == 64
    assert data["ingests"]
    body = check_package(ref.path, ref.manifest_sha256).body
    assert body["config"]["options"]["learning_rate"] == 1e-5
    assert body["model"]["sha256"] == check_model_folder(model_folder).sha256
    (run,) = [run for run in lake.registry.runs() if run["run_id"] == result.run_id]
    assert (run["status"], run["policy"], run["policy_version"]) == ("done", "agent", 1)
    # The snapshot that it learned from is retained, and its episodes know who learned from them.
    episode = lake.sql("select min(episode_id) as e from agents.steps").to_pylist()[0]["e"]
    (known,) = trace_episode(lake, "agents", episode)["policies"]
    assert (known["policy"], known["version"]) == ("agent", 1)
    again = train_language(
        lake,
        "agents",
        config(model_folder, tmp_path / "same", policy="agent", where_sequences=where),
    )
    assert str(again.policy) == "agent:2"
    (same,) = trace_policy(lake, "agent:2")["datasets"]
    assert same["content_hash"] == data["content_hash"]


def test_a_run_that_ends_before_it_registers_can_go_on(lake, model_folder, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Registry, "register_model", fail)
    values = config(model_folder, tmp_path / "out", policy="agent")
    with pytest.raises(KeyboardInterrupt):
        train_language(lake, "agents", values)
    monkeypatch.undo()
    with pytest.raises(NotFoundError):
        lake.registry.resolve("agent")
    run_id = json.loads((tmp_path / "out" / "replaylake.json").read_text())["run_id"]
    assert str(resume_language(lake, run_id).policy) == "agent:1"
    assert str(resume_language(lake, run_id).policy) == "agent:1"
    assert len(lake.registry.list()) == 1


def test_an_interrupted_run_registers_nothing(lake, model_folder, tmp_path):
    ends = Callbacks(should_end=lambda: True)
    values = config(model_folder, tmp_path / "out", policy="agent")
    with pytest.raises(RunInterrupted):
        train_language(lake, "agents", values, callbacks=ends)
    assert not lake.registry.list()
    with pytest.raises(InvalidNameError, match="found 'Agent'"):
        config(model_folder, tmp_path / "out", policy="Agent")


def test_a_directory_is_registered_with_what_is_known_of_it(lake, model_folder, tmp_path):
    base = register_language_model(lake, "agent", model_folder)
    assert lake.registry.show(base)["lineage"]["algorithm"] == "imported"
    assert "datasets" not in lake.registry.show(base)["lineage"]
    result = train_language(lake, "agents", config(model_folder, tmp_path / "out"))
    assert result.policy is None
    ref = register_language_model(lake, "agent", tmp_path / "out")
    assert lake.registry.show(ref)["run_id"] == result.run_id
    assert trace_policy(lake, "agent:2")["datasets"][0]["dataset"] == "agents"
    # Weights that are not those of the run are not of its lineage.
    (tmp_path / "out" / "generation_config.json").write_text("{}")
    changed = register_language_model(lake, "agent", tmp_path / "out")
    assert lake.registry.show(changed)["run_id"] == ""
    elsewhere = open_lake(tmp_path / "elsewhere", create=True)
    there = register_language_model(elsewhere, "agent", tmp_path / "out")
    assert elsewhere.registry.show(there)["lineage"]["algorithm"] == "imported"


def test_directories_that_are_no_models_are_refused(lake, model_folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    (model / "replaylake.json").write_text("{")
    with pytest.raises(SourceInvalidError, match=r"replaylake.json"):
        register_language_model(lake, "agent", model)
    (model / "replaylake.json").unlink()
    body = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**body, "auto_map": {"AutoModel": "a.B"}}))
    with pytest.raises(SourceInvalidError, match="code in a model's folder is never executed"):
        register_language_model(lake, "agent", model)
    assert not lake.registry.list()


def test_the_commands_of_policies_take_it_or_refuse_it_by_name(
    lake, model_folder, tmp_path, capsys
):
    def run(*arguments):
        code = main([*map(str, arguments), "--lake", str(lake.path)])
        return code, capsys.readouterr()

    arguments = ["train", "language", "agents", "--model", model_folder, "--method", "sft"]
    arguments += ["--updates", 2]
    code, said = run(*arguments, "--output", tmp_path / "a", "--policy", "agent")
    assert code == 0
    assert said.out.splitlines()[-1] == "saved policy agent:1"
    code, said = run(*arguments, "--output", tmp_path / "b", "--policy", "agent", "--json")
    body = json.loads(said.out)
    assert (body["policy"], body["version"]) == ("agent", 2)
    code, said = run("policies", "register", model_folder, "--policy", "agent")
    assert code == 0
    assert said.out.endswith("as agent:3: its training data are unknown\n")
    code, said = run("policies", "show", "agent:1")
    assert code == 0
    assert "  model    LlamaForCausalLM, vocabulary of 24 tokens" in said.out
    code, said = run("lineage", "--policy", "agent:1")
    assert code == 0
    assert "64 episodes, 64 sequences, 512 tokens" in said.out
    for words in (
        ("policies", "list"),
        ("policies", "diff", "agent:1", "agent:2"),
        ("policies", "note", "agent:1", "the first"),
        ("promote", "agent:1", "--to", "champion"),
        ("policies", "history", "agent"),
        ("fsck",),
    ):
        assert run(*words)[0] == 0, words
    assert run("policies", "show", "agent")[1].out.startswith("agent:1 (alias champion)")
    for words in (
        ("evaluate", "agent:1", "--env", "CartPole-v1"),
        ("ope", "agents", "--policy", "agent:1"),
        ("promote", "agent:2", "--to", "champion", "--gate", "--dataset", "agents"),
        ("replay-decisions", "agent:1", "agents"),
        ("policies", "package", "agent:1", "--output", tmp_path / "bento"),
        ("policies", "package", "agent:1", "--format", "mlflow", "--output", tmp_path / "m"),
    ):
        code, said = run(*words)
        assert code == 1, (words, said)
        assert "found a language model (LlamaForCausalLM)" in said.err, (words, said.err)
    assert lake.registry.alias_version("agent", "champion") == 1
    assert not (tmp_path / "bento").exists()


def test_a_reward_model_is_no_policy(lake, model_folder, tmp_path):
    copy = tmp_path / "scores"
    shutil.copytree(model_folder, copy)
    body = json.loads((copy / "config.json").read_text())
    body["architectures"] = ["LlamaForSequenceClassification"]
    (copy / "config.json").write_text(json.dumps(body))
    with pytest.raises(SourceInvalidError, match="expected a causal language model"):
        register_language_model(lake, "agent", copy)


@pytest.mark.parametrize("config", [[], {"architectures": 5}], ids=["list", "number"])
def test_a_config_of_another_form_is_refused(lake, model_folder, tmp_path, config):
    copy = tmp_path / "damaged"
    shutil.copytree(model_folder, copy)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises((SourceInvalidError, PackageInvalidError), match=r"config\.json"):
        register_language_model(lake, "agent", copy)


def test_training_goes_on_from_a_version(lake, model_folder, tmp_path):
    register_language_model(lake, "agent", model_folder)
    lake.registry.set_alias("agent", "champion", 1)
    result = train_language(lake, "agents", config("agent@champion", tmp_path / "out"))
    record = find_run(lake.registry, result.run_id)
    assert record["request"]["model"] == "agent:1"  # the alias may move
    assert record["initial_policy"] == "agent:1"
    assert record["model"]["sha256"] == check_model_folder(model_folder).sha256
    with pytest.raises(NotFoundError, match="agent:7"):
        train_language(lake, "agents", config("agent:7", tmp_path / "other"))
