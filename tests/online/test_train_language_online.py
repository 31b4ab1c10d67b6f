"""A language model trained on its own rollouts: versions, staleness, and kills of both sides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import replaylake as rl
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    NotFoundError,
    RolloutError,
)
from replaylake.offline.running.training.run_record import RunRecord
from replaylake.online import train_language_online as online

RUN = "01m8hm4vnmkz67x9xfeexfwzm0"
ENV = """
tasks = [{"text": f"{n}{n}="} for n in range(3)]
async def play(task, chat):
    reply = await chat(task["text"])
    return float(reply["content"].count("7"))
"""


@pytest.fixture(scope="session")
def letters_model(tmp_path_factory):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate("~0123456789=")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="~"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "letters"
    LlamaForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="~").save_pretrained(path)
    return path


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Options of a run whose model has no weights, for what is decided before it is loaded."""
    (tmp_path / "empty").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "empty" / name).write_text("{}")
    (tmp_path / "sevens_of_tests.py").write_text(ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return online.online_language_config(
        {
            "env": "sevens_of_tests:play",
            "algorithm": "grpo",
            "model": str(tmp_path / "empty"),
            "output": str(tmp_path / "trained"),
            "rounds": 3,
            "tasks_per_round": 4,
            "samples": 4,
            "sampling": {"max_tokens": 4},
            "updates": 3,
            "batch_size": 2,
            "seed": 5,
        }
    )


SCRIPT = """
import json, sys
import replaylake as rl
from replaylake.online.train_language_online import online_language_config, train_language_online

if __name__ == "__main__":
    config = online_language_config(json.loads(sys.argv[2]))
    train_language_online(rl.open(sys.argv[1]), "sevens", config)
"""


def wait_until(condition, process):
    while not (found := condition()):
        assert process.poll() is None, "the trainer ended before"
        time.sleep(0.02)
    return found


def find_generator(trainer):
    """Return the id of the child of a process."""
    path = f"/proc/{trainer.pid}/task/{trainer.pid}/children"
    with open(path) as file:
        return next(map(int, file.read().split()), None)


def count_steps(lake):
    if "sevens" not in lake.datasets():
        return 0
    return lake.sql("select count(*) as n from sevens.steps").to_pylist()[0]["n"]


@pytest.mark.slow
def test_kills_of_both_sides_lose_nothing_and_repeat_nothing(lake, tmp_path, config, letters_model):
    options = {
        "env": config.rollout.env, "algorithm": "grpo", "model": str(letters_model),
        "output": config.training.output, "rounds": 3, "tasks_per_round": 4, "samples": 4,
        "sampling": {"max_tokens": 4}, "updates": 3, "batch_size": 2, "seed": 5,
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, lake.url, json.dumps(options)]
    trainer = subprocess.Popen(command, start_new_session=True)
    try:
        first = wait_until(lambda: find_generator(trainer), trainer)
        wait_until(lambda: count_steps(lake), trainer)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: find_generator(trainer) not in (None, first), trainer)
        wait_until((tmp_path / "trained" / "version-1").is_dir, trainer)
    finally:
        trainer.kill()
        trainer.wait()
    before = {r["episode_id"] for r in lake.sql("select episode_id from sevens.steps").to_pylist()}
    (run,) = [one for one in lake.registry.runs() if one["kind"] == online.KIND]
    points = {}
    callbacks = rl.Callbacks(on_metrics=lambda number, values: points.update({number: values}))
    result = rl.resume_language_online(lake, run["run_id"], callbacks=callbacks)
    assert (result.output.name, len(result.rounds)) == ("version-3", 3)
    assert [one["staleness"] <= 1 for one in result.rounds] == [True] * 3
    rows = lake.sql("select episode_id, policy, policy_version from sevens.steps").to_pylist()
    names = {row["episode_id"] for row in rows}
    assert len(rows) == len(names) == 3 * 3 * 4
    assert before <= names
    for number in range(3):
        batch = [row for row in rows if row["episode_id"].startswith(f"{run['run_id']}/{number}/")]
        (version,) = {row["policy_version"] for row in batch}
        assert len(batch) == 12
        assert number - 1 <= version <= number
    assert {row["policy"] for row in rows} == {f"run:{run['run_id']}"}
    kinds = [one["status"] for one in lake.registry.runs()]
    assert kinds == ["done"] * 7  # the run, three batches and three trainings
    assert lake.registry.runs()[0]["output"]["path"] == str(result.output)
    again = rl.resume_language_online(lake, run["run_id"])
    assert (again.already_finished, again.output) == (True, result.output)


def test_a_generator_that_dies_again_and_again_ends_the_run(lake, config, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    remarks = []
    callbacks = rl.Callbacks(on_remark=remarks.append)
    with pytest.raises(RolloutError, match="3 deaths in a row, the last one with exit code 1"):
        rl.train_language_online(lake, "sevens", config, callbacks=callbacks)
    assert len(remarks) == 2
    assert lake.registry.runs()[0]["status"] == "failed"


def make_trainer(lake, config, model, callbacks=None):
    """Return the trainer of a run, without a generator."""
    config = replace(config, training=replace(config.training, model=str(model)))
    if not lake.registry.exists():
        lake.registry.create()
    (Path(config.training.output)).mkdir(exist_ok=True)
    body = {"dataset": "sevens", "request": asdict(config)}
    record = RunRecord(lake.registry, RUN, body, kind=online.KIND)
    record.record_start()
    return online._Trainer(lake, record, config, callbacks or rl.Callbacks())


def record_batch(lake, number, rewards):
    """Record a batch: by task, the rewards of its samples."""
    facts = {"policy": f"run:{RUN}", "policy_version": number}
    with rl.record_language(lake, "sevens", producer=f"{RUN}/{number}", **facts) as recorder:
        for task, samples in enumerate(rewards):
            for sample, reward in enumerate(samples):
                recorder.record(
                    prompt_ids=[1, 1, 11],
                    completion_ids=[7, sample],
                    log_probs=[-2.5, -2.5],
                    reward=reward,
                    sequence=f"{task}-{sample}",
                    group_id=f"{RUN}/{number}/{task}",
                )


def test_the_training_of_a_round_reports_to_the_callbacks_of_the_run(lake, config, letters_model):
    record_batch(lake, 0, [[0.0, 1.0], [1.0, None]])
    remarks, readings, updates = [], [], []
    callbacks = rl.Callbacks(
        on_remark=remarks.append,
        on_reading=lambda *shards: readings.append(shards),
        on_progress=lambda progress: updates.append(progress.update),
        on_metrics=lambda *_: pytest.fail("metrics of a round are reported once, by the run"),
    )
    result = make_trainer(lake, config, letters_model, callbacks)._train(0)
    assert result.output.name == "version-1"
    (remark,) = remarks
    assert remark.startswith("round 1: 2 of 4 sequences are left out: their return")
    assert updates[-1] == 3
    assert readings


def test_the_training_of_a_round_ends_where_the_run_is_asked_to(lake, config, letters_model):
    record_batch(lake, 0, [[0.0, 1.0]])
    callbacks = rl.Callbacks(should_end=lambda: True)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(lake, config, letters_model, callbacks)._train(0)
    assert online._find_version(config, 1).exists() is False


def test_methods_that_compare_samples_have_several(tmp_path):
    options = {"env": "sevens:play", "model": "base", "output": str(tmp_path / "x")}
    made = {
        method: online.online_language_config({**options, "algorithm": method}).rollout.samples
        for method in ("grpo", "rloo", "dpo", "sft", "ppo")
    }
    assert made == {"grpo": 8, "rloo": 8, "dpo": 8, "sft": 1, "ppo": 1}


def test_a_batch_gets_the_newest_version_up_to_its_own(config):
    assert [online.find_newest(config, number) for number in (0, 1, 4)] == [0, 0, 0]
    for number in (1, 2, 4):  # version 3 is missing: 4 is not of this run
        online._find_version(config, number).mkdir(parents=True)
    assert [online.find_newest(config, number) for number in (0, 1, 2, 4)] == [0, 1, 2, 2]


def test_tasks_are_taken_in_turn_and_once_in_a_batch():
    tasks = [{"id": "a"}, {"text": "b"}, {"id": "c"}]
    batches = [online.take_tasks(tasks, number, 2) for number in range(3)]
    ids = [[task["id"] for task in batch] for batch in batches]
    assert ids == [["a", "1"], ["c", "a"], ["1", "c"]]
    assert len(online.take_tasks(tasks, 5, 8)) == 3


def test_options_go_to_the_run_its_rollouts_and_its_training(config):
    assert (config.rounds, config.tasks_per_round, config.max_staleness) == (3, 4, 1)
    assert (config.rollout.samples, config.rollout.seed) == (4, 5)
    assert (config.training.method, config.training.updates, config.training.seed) == ("grpo", 3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 0}, "rounds: found 0"),
        ({"max_staleness": -1}, "max_staleness: found -1"),
        ({"where": "true"}, "where: found it for the training of a round"),
        ({"samples": "many"}, "samples: found 'many'"),
        ({"round": 2}, "found option 'round', expected"),
        ({"producer": "x"}, "found option 'producer'"),
        ({"samples": 1}, "samples: found 1, expected 2 or more for method grpo"),
    ],
)
def test_options_that_no_run_has_are_refused(tmp_path, change, message):
    options = {"env": "sevens:play", "model": "base", "output": str(tmp_path / "x"), **change}
    with pytest.raises(ConfigInvalidError, match=message):
        online.online_language_config(options)


def test_what_cannot_run_is_refused_before_anything_is_written(lake, tmp_path, config):
    def start(rollout=(), training=()):
        changed = replace(
            config,
            rollout=replace(config.rollout, **dict(rollout)),
            training=replace(config.training, **dict(training)),
        )
        rl.train_language_online(lake, "sevens", changed)

    with pytest.raises(AlreadyExistsError, match="output"):
        start(training={"output": str(tmp_path)})
    with pytest.raises(NotFoundError, match=r"config\.json"):
        start(training={"model": str(tmp_path)})
    with pytest.raises(NotFoundError, match="absent"):
        start(rollout={"env": "sevens_of_tests:absent"})
    with pytest.raises(ConfigInvalidError, match="another process loads them"):
        start(rollout={"env": lambda task, chat: None})
    assert lake.registry.runs() == []
    assert not (tmp_path / "trained").exists()
