"""A tiny language model that writes bytes, with a chat template."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

END = "<end>"
CONTEXT = 65_536
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_byte_model(path: Path, seed: int = 0, **generation: object) -> Path:
    """Write a model of random weights whose tokens are bytes, roles and the end."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [END, "<system>", "<user>", "<assistant>"]
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        additional_special_tokens=special[1:],
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    fast.save_pretrained(path)
    defaults = {"eos_token_id": 0, **generation}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself, so that answers have as many tokens as may be."""
    return save_byte_model(tmp_path_factory.mktemp("models") / "bytes", eos_token_id=[])


@pytest.fixture(scope="session")
def kit():
    return sys.modules[__name__]
