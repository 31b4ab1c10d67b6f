"""Rollouts of a language model by the command: of a version of the lake."""

from __future__ import annotations

import json

import pytest

from replaylake.cli.main import main
from replaylake.datastore.lake.lake import open_lake

pytestmark = pytest.mark.slow


@pytest.fixture
def version(tmp_path):
    """A model of random weights that writes digits, as agent:1."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from replaylake.offline.language.registration import register_language_model

    letters = {letter: number for number, letter in enumerate("?0123456789+=.")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token=".")
    fast.save_pretrained(tmp_path / "base")
    lake = open_lake(tmp_path / "lake", create=True)
    return register_language_model(lake, "agent", tmp_path / "base")


def test_steps_have_the_name_and_version_of_the_policy(version, tmp_path, capsys, monkeypatch):
    (tmp_path / "digits.py").write_text(
        "tasks = [{'n': 1}, {'n': 2}]\n\n"
        "async def play(task, chat):\n"
        "    return float('7' in (await chat(f\"{task['n']}=\"))['content'])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["rollout", "--env", "digits:play", "--dataset", "digits", "--lake", "lake"]
    assert main([*command, "--model", "agent:1", "--sampling", "max_tokens=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_rollouts"] == 2
    rows = open_lake(tmp_path / "lake").sql(
        "select distinct policy, policy_version from digits.steps"
    )
    assert rows.to_pylist() == [{"policy": "agent", "policy_version": 1}]
    assert main([*command, "--model", "agent:1", "--policy-version", "3"]) == 2
