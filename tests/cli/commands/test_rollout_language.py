"""`rollout --model` and `--upstream`: what a command line makes of a language model."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

from replaylake.online.monitoring import prometheus

SUMS = """
tasks = [{"id": f"t{n}", "text": f"{n}+1="} for n in range(3)]
async def play(task, chat):
    reply = await chat(task["text"], max_tokens=2)
    return 2.0 + (reply["content"] is None)
"""
ROLLOUT = ("rollout", "--env", "sums_of_cli:play", "--dataset", "sums")


@pytest.fixture(autouse=True)
def sums(tmp_path, monkeypatch):
    (tmp_path / "sums_of_cli.py").write_text(SUMS)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate("~0123456789+=")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="~"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=32,
        eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="~").save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_model_acts_and_the_same_producer_makes_the_rest(run: Any, model: Any) -> None:
    command = (*ROLLOUT, "--model", model, "--producer", "gen", "--samples", "2")
    body = run(*command, "--num-tasks", "2", "--sampling", "temperature=0.5", "--json").json
    assert (body["num_rollouts"], body["num_turns"], body["mean_reward"]) == (4, 4, 2.0)
    again = run(*command, "--sampling", "temperature=0.5", "--concurrency", "1")
    assert again.code == 0
    first, second = again.out.splitlines()
    assert first.startswith("sums@2: 2 rollouts of 3 tasks, 2 generations, 4 tokens generated; 4 ")
    assert second.endswith(f"producer gen, seed {body['seed']}")
    assert f"run {body['run_id']}, which has 4 rollouts" in again.err
    query = "select count(*) as n, count(distinct group_id) as groups from sums.steps"
    assert run("sql", query, "--format", "csv").out.splitlines()[1] == "6,3"
    other = run(*command, "--sampling", "temperature=1")
    assert other.code == 2
    assert "--producer: found sampling {'temperature': 1} for gen" in other.err
    assert "kind" in run("runs", "show", body["run_id"], "--json").json


def test_options_of_the_other_kind_are_wrong_usage(run: Any) -> None:
    for command, option in (
        ((*ROLLOUT, "--model", "x", "--workers", "2"), "--workers"),
        ((*ROLLOUT, "--model", "x", "--policy", "clone"), "--policy"),
        ((*ROLLOUT, "--samples", "2"), "--samples"),
        ((*ROLLOUT, "--model", "x", "--engine", "vllm"), "--engine"),
        (
            (*ROLLOUT, "--upstream", "http://x", "--upstream-key-env", "NO_KEY"),
            "--upstream-key-env",
        ),
        ((*ROLLOUT, "--model", "x", "--sampling", "temperature"), "--sampling"),
    ):
        ran = run(*command)
        assert ran.code == 2, command
        assert option in ran.err


def test_what_is_not_there_is_named_and_nothing_is_written(run: Any, lake: Any) -> None:
    run(*ROLLOUT, "--model", "absent").failed("absent has no config.json")
    ran = run(*ROLLOUT, "--upstream", "ftp://x")
    assert ran.code == 2
    assert "--upstream: found 'ftp://x', expected a URL" in ran.err
    assert not lake.exists()


@pytest.mark.slow
def test_rounds_of_train_online_are_metrics_of_prometheus(
    run: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []

    class ReadAtItsEnd(prometheus.MetricsServer):
        def close(self) -> None:
            with urllib.request.urlopen(self.url) as answer:
                texts.append(answer.read().decode())
            super().close()

    monkeypatch.setattr(prometheus, "MetricsServer", ReadAtItsEnd)
    body = run(
        *("train", "online", "--env", "sums_of_cli:play", "--algorithm", "rloo", "--model", model),
        *("--output", "new", "--dataset", "sums", "--set", "rounds=1", "--set", "samples=2"),
        *("--set", "updates=1", "--metrics-port", "0", "--json"),
    ).json
    labels = f'env="sums_of_cli:play",policy="run:{body["run_id"]}",run_id="{body["run_id"]}"'
    (text,) = texts
    assert f"replaylake_run_updates_total{{{labels}}} 1.0" in text
    assert f"replaylake_run_staleness_versions{{{labels}}} 0.0" in text
    for name in ("tokens_per_s", "mean_reward", "kl_behavior"):
        assert f'metric="{name}"' in text


def test_train_online_names_options_that_are_missing_or_of_other_runs(run: Any) -> None:
    train = ("train", "online", "--env", "sums_of_cli:play", "--model", "absent")
    for command, option in (
        ((*train, "--dataset", "sums"), "--output"),
        ((*train, "--output", "new"), "--dataset"),
        ((*train, "--output", "new", "--dataset", "d", "--workers", "2"), "--workers"),
        (("train", "online", "--output", "new"), "--output"),
    ):
        ran = run(*command)
        assert ran.code == 2, command
        assert option in ran.err
    ran = run(*train, "--output", "new", "--dataset", "sums", "--set", "rounds=0")
    ran.failed("rounds: found 0")
    run(*train, "--output", "new", "--dataset", "sums").failed("absent has no config.json")


@pytest.mark.slow
def test_steps_have_the_name_and_version_of_the_policy(run: Any, model: Any) -> None:
    run("policies", "register", model, "--policy", "agent")
    body = run(*ROLLOUT, "--model", "agent:1", "--json").json
    assert (body["num_rollouts"], body["model"]["policy_version"]) == (3, 1)
    query = "select distinct policy, policy_version from sums.steps"
    assert run("sql", query, "--format", "csv").out.splitlines()[1:] == ['"agent",1']
    refused = run(*ROLLOUT, "--model", "agent:1", "--policy-version", "3")
    assert refused.code == 2
    assert "--policy-version: found it beside a version" in refused.err
