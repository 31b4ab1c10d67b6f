"""Sampling by a tiny model: transformers' own generation and passes are the oracle."""

from __future__ import annotations

import pytest
import torch

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.offline.language.pretrained import check_model_folder, load_pretrained
from replaylake.offline.language.sampling import sample_completions

pytestmark = pytest.mark.slow

PROMPTS = [[3, 5, 7], [1], [2, 4, 6, 8, 10]]


@pytest.fixture(scope="module")
def model(model_folder):
    return load_pretrained(check_model_folder(model_folder), "causal language model")[0]


def test_the_log_probs_are_those_of_whole_sequences(model):
    generator = torch.Generator().manual_seed(3)
    found = sample_completions(model, PROMPTS, max_new_tokens=8, generator=generator)
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert len(one.token_ids) == len(one.log_probs) == 8
        assert one.finish_reason == "length"
        ids = torch.tensor([[*prompt, *one.token_ids]])
        with torch.no_grad():
            scores = model(ids).logits[0].log_softmax(-1)
        expected = [
            scores[len(prompt) - 1 + i, token].item() for i, token in enumerate(one.token_ids)
        ]
        assert one.log_probs == pytest.approx(expected, abs=1e-4)


def test_logits_are_made_of_the_last_position_alone(model):
    shapes = []
    hook = model.register_forward_hook(lambda *call: shapes.append(call[-1].logits.shape[:2]))
    try:
        sample_completions(model, PROMPTS, max_new_tokens=2)
    finally:
        hook.remove()
    assert shapes == [(3, 1), (3, 1)]


def test_the_most_likely_tokens_are_those_of_transformers(model):
    found = sample_completions(model, PROMPTS, max_new_tokens=6, temperature=0)
    for prompt, one in zip(PROMPTS, found, strict=True):
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert one.token_ids == whole[0, len(prompt) :].tolist()
        assert one.log_probs == [0.0] * 6


def test_tokens_come_as_often_as_they_are_likely(model):
    generator = torch.Generator().manual_seed(0)
    found = sample_completions(
        model, [[3, 5]] * 4000, max_new_tokens=1, temperature=0.5, generator=generator
    )
    with torch.no_grad():
        expected = (model(torch.tensor([[3, 5]])).logits[0, -1] / 0.5).softmax(-1)
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in found]), minlength=24)
    # Five standard deviations of a share of 4,000.
    spread = 5 * (expected * (1 - expected) / 4000).sqrt()
    assert ((counts / 4000 - expected).abs() <= spread).all()
    one = found[0]
    assert one.log_probs[0] == pytest.approx(expected[one.token_ids[0]].log().item(), abs=1e-5)


def test_seeds_give_each_row_its_own_randomness(model):
    seeds = [5, 6, 5]
    found = sample_completions(model, [[3, 5]] * 3, max_new_tokens=12, seeds=seeds)
    assert found[0].token_ids == found[2].token_ids != found[1].token_ids
    (alone,) = sample_completions(model, [[3, 5]], max_new_tokens=12, seeds=[6])
    assert alone.token_ids == found[1].token_ids
    many = sample_completions(model, [[3, 5]] * 4000, max_new_tokens=1, seeds=range(4000))
    with torch.no_grad():
        expected = model(torch.tensor([[3, 5]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in many]), minlength=24)
    spread = 5 * (expected * (1 - expected) / 4000).sqrt()
    assert ((counts / 4000 - expected).abs() <= spread).all()


def test_a_stop_token_ends_its_row_alone(model):
    generator = torch.Generator().manual_seed(1)
    stops = set(range(12))
    found = sample_completions(
        model, PROMPTS * 20, max_new_tokens=16, stop_ids=stops, generator=generator
    )
    for one in found:
        assert not stops & set(one.token_ids[:-1])
        assert (one.token_ids[-1] in stops) == (one.finish_reason == "stop")
        assert len(one.log_probs) == len(one.token_ids)
    assert len({len(one.token_ids) for one in found}) > 2


def test_what_cannot_be_sampled_is_refused(model):
    with pytest.raises(ConfigInvalidError, match="expected at most 32 tokens together"):
        sample_completions(model, PROMPTS, max_new_tokens=30)
    with pytest.raises(ConfigInvalidError, match="an empty prompt"):
        sample_completions(model, [[1], []], max_new_tokens=2)
    assert sample_completions(model, [], max_new_tokens=2) == []
