"""A tiny language model with random weights, and a dataset of what it sampled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import replaylake as rl
from replaylake.datastore.lake.lake import Lake, open_lake

VOCABULARY, PROMPT, COMPLETION = 24, 3, 5
REWARDED = 7
WORDS = ["?", "[u]", "[a]", "[t]", "[end]", "(", ")", *"0123456789+="]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.n }}){% endfor %}[end]"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Lake:
    """16 prompts with 4 samples each; the reward of a sample is how often it has one token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    lake = open_lake(tmp_path_factory.mktemp("language") / "lake", create=True)
    with rl.record_language(lake, "agents", producer="sampler") as recorder:
        for group in range(16):
            prompt = [int(token) for token in rng.integers(0, VOCABULARY, PROMPT)]
            for _ in range(4):
                ids, log_probs = [*prompt], []
                for _ in range(COMPLETION):
                    with torch.no_grad():
                        scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(0)
                    token = int(torch.multinomial(scores.exp(), 1, generator=generator))
                    ids.append(token)
                    log_probs.append(float(scores[token]))
                recorder.record(
                    prompt="a prompt",
                    completion="an answer",
                    prompt_ids=prompt,
                    completion_ids=ids[PROMPT:],
                    log_probs=log_probs,
                    reward=float(ids[PROMPT:].count(REWARDED)),
                    group_id=f"g{group}",
                )
    return lake


@pytest.fixture(scope="session")
def make_model_folder(tmp_path_factory: pytest.TempPathFactory):
    """A function that writes a model with random weights, with a chat template or without."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    def make(template: str | None) -> Path:
        tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
        tokenizer.add_special_tokens([AddedToken(word) for word in WORDS[1:5]])
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
            bos_token_id=None, eos_token_id=WORDS.index("[end]"),
        )  # fmt: skip
        path = tmp_path_factory.mktemp("models") / "letters"
        LlamaForCausalLM(config).save_pretrained(path)
        written = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="?", eos_token="[end]", chat_template=template
        )
        written.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def chat_model_folder(make_model_folder) -> Path:
    return make_model_folder(TEMPLATE)


@pytest.fixture(scope="session")
def plain_model_folder(make_model_folder) -> Path:
    return make_model_folder(None)


@pytest.fixture(scope="session")
def words() -> list[str]:
    """The tokens of these models by id."""
    return WORDS
