"""Training of language models: they learn, resume, and leave nothing half done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylake.cli.main import main
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    NotFoundError,
    SchemaMismatchError,
    StorageError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.registry import Registry
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.language.pretrained import (
    check_model_folder,
    hash_model_folder,
    load_pretrained,
)
from replaylake.offline.language.token_learner import METHODS
from replaylake.offline.running.train_language import (
    LanguageConfig,
    resume_language,
    train_language,
)
from replaylake.offline.running.training.interruption import RunInterrupted

pytestmark = pytest.mark.slow

REWARDED = 7


def config(model: Path, output: Path, **values: Any) -> LanguageConfig:
    options = {"learning_rate": 3e-3, **values.pop("options", {})}
    values = {"updates": 20, "batch_size": 4, **values}
    return LanguageConfig(model=str(model), output=str(output), options=options, **values)


def probability(folder: Path) -> float:
    """The mean probability of the rewarded token after prompts of which no sample was taken."""
    model, _ = load_pretrained(check_model_folder(folder), "causal language model")
    prompts = torch.from_numpy(np.random.default_rng(5).integers(0, 24, (64, 3)))
    with torch.no_grad():
        return model(prompts).logits[:, -1].softmax(-1)[:, REWARDED].mean().item()


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"sft", "reward"}))
def test_what_was_rewarded_becomes_more_likely(recorded, model_folder, tmp_path, method):
    result = train_language(
        recorded, "agents", config(model_folder, tmp_path / "out", method=method, updates=60)
    )
    assert probability(tmp_path / "out") > 1.5 * probability(model_folder)
    assert result.dataset["num_sequences"] == 64
    origin = json.loads((tmp_path / "out" / "replaylake.json").read_text())
    assert origin["run_id"] == result.run_id
    assert origin["model"]["sha256"] == check_model_folder(model_folder).sha256
    assert origin["datasets"][0]["version"] == recorded.snapshot("agents").version


def test_a_reward_model_scores_dialogues(recorded, model_folder, tmp_path, capsys):
    out = tmp_path / "out"
    options = {"learning_rate": 0.01}
    values = {"method": "reward", "updates": 60, "options": options}
    train_language(recorded, "agents", config(model_folder, out, **values))
    options |= {"lora_rank": 2, "lora_merge": True}
    train_language(recorded, "agents", config(model_folder, tmp_path / "merged", **values))
    check_model_folder(tmp_path / "merged")
    model, _ = load_pretrained(check_model_folder(out), "sequence classifier", num_outputs=1)
    # Sequences that no sample equals, without the rewarded token and with it.
    worse = np.random.default_rng(7).integers(8, 24, (64, 8))
    better = worse.copy()
    better[:, 4:6] = REWARDED
    scores = [
        [model(torch.from_numpy(ids[None])).logits.item() for ids in sequences]
        for sequences in (worse, better)
    ]
    assert np.mean(np.less(*scores)) > 0.8
    lake = tmp_path / "lake"
    shutil.copytree(recorded.path, lake)
    assert main(["score", "agents", "--model", str(out), "--lake", str(lake), "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert (scored["episodes"], scored["failed"]) == (64, 0)
    # Training continues from its head.
    again = config(out, tmp_path / "again", method="reward", updates=1)
    first = train_language(recorded, "agents", again)
    assert first.metrics["accuracy"] > 0.9


def test_supervised_learning_of_the_best_imitates_them(recorded, model_folder, tmp_path):
    train_language(
        recorded,
        "agents",
        config(
            model_folder, tmp_path / "out", method="sft", where_sequences="episode_return > 0",
            updates=40,
        ),
    )  # fmt: skip
    assert probability(tmp_path / "out") > 1.5 * probability(model_folder)


@pytest.mark.parametrize(("method", "lora_rank"), [("grpo", None), ("ppo", None), ("grpo", 2)])
def test_an_interrupted_run_ends_with_the_same_weights(
    recorded, model_folder, tmp_path, method, lora_rank
):
    options = {"kl_coef": 0.1, "epochs": 2} | ({"lora_rank": 2} if lora_rank else {})
    whole = train_language(
        recorded,
        "agents",
        config(model_folder, tmp_path / "whole", method=method, updates=9, options=options),
    )
    seen: list[int] = []
    ends = Callbacks(
        on_metrics=lambda update, _: seen.append(update), should_end=lambda: len(seen) == 2
    )
    cut = config(
        model_folder, tmp_path / "cut", method=method, updates=9, options=options, log_updates=2
    )
    with pytest.raises(RunInterrupted) as interrupted:
        train_language(recorded, "agents", cut, callbacks=ends)
    assert not (tmp_path / "cut").exists()
    resumed = resume_language(recorded, interrupted.value.run_id)
    weights = "adapter_model.safetensors" if lora_rank else "model.safetensors"
    assert (tmp_path / "cut" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    assert resumed.sha256 == hash_model_folder(tmp_path / "cut").sha256
    assert whole.run_id != resumed.run_id
    assert whole.sha256 == resumed.sha256
    again = resume_language(recorded, interrupted.value.run_id)
    assert again.already_finished
    assert again.sha256 == resumed.sha256


def test_the_folder_of_an_adapter_says_that_it_is_one(recorded, model_folder, tmp_path):
    for name, options in (("adapter", {}), ("whole", {"lora_merge": True})):
        values = config(
            model_folder, tmp_path / name, updates=1, options={"lora_rank": 2, **options}
        )
        train_language(recorded, "agents", values)
        origin = json.loads((tmp_path / name / "replaylake.json").read_text())
        assert origin["is_adapter"] is (name == "adapter")
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(model_folder)
    assert adapter["target_modules"] == sorted(adapter["target_modules"])
    assert check_model_folder(tmp_path / "whole").path == tmp_path / "whole"


def test_a_run_that_ends_before_its_record_can_go_on(recorded, model_folder, tmp_path, monkeypatch):
    record_run = Registry.record_run

    def fail_at_the_end(self, run_id, body, **options):
        if body.get("status") == "done":
            raise StorageError("disk: full. Free space.")
        record_run(self, run_id, body, **options)

    monkeypatch.setattr(Registry, "record_run", fail_at_the_end)
    with pytest.raises(StorageError, match="disk: full"):
        train_language(recorded, "agents", config(model_folder, tmp_path / "out", updates=2))
    written = check_model_folder(tmp_path / "out").sha256
    monkeypatch.undo()
    run_id = json.loads((tmp_path / "out" / "replaylake.json").read_text())["run_id"]
    assert resume_language(recorded, run_id).sha256 == written


def test_nothing_begins_that_could_not_end(recorded, model_folder, tmp_path):
    num_runs = len(recorded.registry.runs())
    (tmp_path / "taken").mkdir()
    for change, error, text in (
        ({"output": tmp_path / "taken"}, AlreadyExistsError, "found a file or folder of that name"),
        ({"output": tmp_path / "a" / "b"}, ConfigInvalidError, "no parent folder"),
        ({"model": tmp_path / "absent"}, NotFoundError, "has no config.json"),
        ({"method": "gpro"}, ConfigInvalidError, "found 'gpro', expected gspo or grpo"),
        ({"options": {"learning_rat": 1}}, ConfigInvalidError, "found option 'learning_rat'"),
        ({"method": "gspo", "options": {"correction_level": "token"}}, ConfigInvalidError, "token"),
        ({"method": "sft", "options": {"kl_coef": 1.0}}, ConfigInvalidError, "does not use"),
        ({"options": {"beta": 1.0}}, ConfigInvalidError, "does not use"),
        ({"device": "tpux"}, ConfigInvalidError, "device: found 'tpux'"),
        ({"device": "meta"}, ConfigInvalidError, "device: found 'meta'"),
        ({"device": "cuda:9"}, ConfigInvalidError, "device: found 'cuda:9'"),
        ({"method": "kto", "batch_size": 1}, ConfigInvalidError, "batch_size: found 1, expected 2"),
        ({"reference": "base"}, ConfigInvalidError, "reference: found 'base' for method grpo"),
        ({"method": "dpo", "reference": "absent"}, NotFoundError, "has no config.json"),
        ({"max_staleness": 2}, ConfigInvalidError, "max_staleness and policy_version"),
        ({"updates": 0}, ConfigInvalidError, "updates: found 0, expected 1 or more"),
    ):
        values = {"model": model_folder, "output": tmp_path / "out", **change}
        with pytest.raises(error, match=text):
            train_language(recorded, "agents", config(**values))
    assert len(recorded.registry.runs()) == num_runs
    assert list(tmp_path.iterdir()) == [tmp_path / "taken"]


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("WORLD_SIZE", "2", "found WORLD_SIZE 2, .* with learners = 2"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "mixed precision bf16"),
    ],
)
def test_the_configuration_of_a_launcher_is_not_ignored(
    recorded, model_folder, tmp_path, monkeypatch, variable, value, text
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigInvalidError, match=text):
        train_language(recorded, "agents", config(model_folder, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_only_sequences_that_are_selected_have_to_fit(model_folder, tmp_path):
    import replaylake as rl

    lake = rl.open(tmp_path / "lake", create=True)
    with rl.record_language(lake, "agents", producer="p") as recorder:
        for number, length in enumerate((3, 40)):
            recorder.record(
                prompt="p", completion="c", prompt_ids=[1, 2], completion_ids=[5] * length,
                log_probs=[-3.0] * length, reward=float(number), group_id="g",
            )  # fmt: skip
    values = {"method": "sft", "updates": 1}
    with pytest.raises(SchemaMismatchError, match="num_tokens <= 32"):
        train_language(lake, "agents", config(model_folder, tmp_path / "out", **values))
    values["where_sequences"] = "num_tokens <= 32"
    result = train_language(lake, "agents", config(model_folder, tmp_path / "out", **values))
    assert result.metrics["tokens"] == 3


def test_a_tokenizer_with_several_templates_is_written(recorded, model_folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    train_language(recorded, "agents", config(model, tmp_path / "out", updates=1))
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").exists()


@pytest.mark.parametrize("changed", ["model", "reference"])
def test_another_model_than_the_run_began_with_is_refused(
    recorded, model_folder, tmp_path, changed
):
    for name in ("model", "reference"):
        shutil.copytree(model_folder, tmp_path / name)
    settings = config(
        tmp_path / "model", tmp_path / "out", method="dpo", reference=str(tmp_path / "reference")
    )
    ends = Callbacks(should_end=lambda: True)
    with pytest.raises(RunInterrupted) as interrupted:
        train_language(recorded, "agents", settings, callbacks=ends)
    (tmp_path / changed / "generation_config.json").write_text("{}")
    with pytest.raises(SchemaMismatchError, match=f"{changed}: found .* as at its start"):
        resume_language(recorded, interrupted.value.run_id)


def test_sequences_without_a_return_are_left_out_and_counted(model_folder, tmp_path):
    import replaylake as rl

    lake = rl.open(tmp_path / "lake", create=True)
    with rl.record_language(lake, "agents", producer="p") as recorder:
        for number in range(4):
            recorder.record(
                prompt="p", completion="c", prompt_ids=[1, 2], completion_ids=[3 + number],
                log_probs=[-3.0], reward=None if number == 3 else float(number), group_id="g",
            )  # fmt: skip
    remarks: list[str] = []
    values = {"method": "reinforce++", "updates": 1}
    result = train_language(
        lake,
        "agents",
        config(model_folder, tmp_path / "out", **values),
        callbacks=Callbacks(on_start=lambda start: remarks.extend(start.remarks)),
    )
    assert remarks == ["1 of 4 sequences are left out: their return is unknown"]
    assert result.metrics["tokens"] == 3
    assert (result.dataset["num_sequences"], result.dataset["num_tokens"]) == (3, 9)


def test_the_command_trains_and_lists_its_run(recorded: Lake, model_folder, tmp_path, capsys):
    lake = str(recorded.path)
    arguments = ["train", "language", "agents", "--model", str(model_folder)]
    arguments += ["--output", str(tmp_path / "out"), "--method", "rloo", "--updates", "3"]
    arguments += ["--set", "learning_rate=0.001", "--lake", lake, "--json"]
    assert main(arguments) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["output"] == str(tmp_path / "out")
    assert body["metrics"]["tokens"] > 0
    assert main(["runs", "show", body["run_id"], "--lake", lake]) == 0
    shown = capsys.readouterr().out
    assert "rloo" in shown
    assert "kl_behavior" in shown
    assert main([*arguments[:-1]]) == 1
    assert "output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "options"), [("reward", {}), ("sft", {"lora_rank": 2})], ids=["reward", "adapter"]
)
def test_what_does_not_generate_is_no_policy(method, options):
    with pytest.raises(ConfigInvalidError, match="expected a whole model that generates"):
        LanguageConfig("model", "output", policy="agent", method=method, options=options)
