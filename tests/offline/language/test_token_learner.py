"""TokenLearner: its losses by hand, token by token, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from replaylake.datastore.errors import ConfigInvalidError, SchemaMismatchError, SourceInvalidError
from replaylake.datastore.lake.lake import Lake
from replaylake.offline.language.pretrained import check_model_folder, load_pretrained
from replaylake.offline.language.token_learner import METHODS, TokenLearner, TokenOptions

# transformers alone takes 5 s to import.
pytestmark = pytest.mark.slow


def make_learner(folder: Path, method: str, **options) -> TokenLearner:
    return TokenLearner(check_model_folder(folder), method, TokenOptions(**options), max_tokens=8)


@pytest.fixture(scope="module")
def batch(recorded: Lake):
    sequences = recorded.snapshot("agents").token_sequences()
    return sequences.padded(4, seed=0, groups=True).sample()


@pytest.fixture(scope="module")
def current(model_folder: Path, batch):
    """The log-prob of each token under the model, from one pass a sequence."""
    from transformers import AutoModelForCausalLM

    return score_tokens(AutoModelForCausalLM.from_pretrained(model_folder).eval(), batch)


def score_tokens(model, batch):
    found = np.zeros(batch.token_ids.shape)
    with torch.no_grad():
        for row, ids in enumerate(batch.token_ids):
            scores = model(torch.tensor(ids[None]).long()).logits[0].log_softmax(-1)
            for t in range(1, len(ids)):
                found[row, t] = scores[t - 1, ids[t]]
    return found


def by_hand(batch, current, behavior, method, high=2.0):
    # The ratio of RLOO is of whole sequences, and so are its weights.
    """The loss of one step without a proximal policy of its own, where each ratio is 1."""
    advantages = {}
    for group in set(batch.groups.tolist()):
        rows = [row for row in range(len(batch)) if batch.groups[row] == group]
        values = [float(batch.episode_returns[row]) for row in rows]
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        for row, value in zip(rows, values, strict=True):
            advantages[row] = {
                "grpo": (value - mean) / (spread + 1e-4),
                "dr-grpo": value - mean,
                "rloo": value - (sum(values) - value) / (len(values) - 1),
            }[method]
    total = 0.0
    for row in range(len(batch)):
        tokens = np.flatnonzero(batch.loss_mask[row])
        log_ratios = (current - behavior)[row, tokens]
        if method == "rloo":
            log_ratios = np.full(len(tokens), log_ratios.sum())
        losses = [-min(math.exp(one), high) * advantages[row] for one in log_ratios]
        total += sum(losses) / (8 if method == "dr-grpo" else len(tokens))
    return total / len(batch)


@pytest.mark.parametrize("method", ["grpo", "dr-grpo", "rloo"])
def test_the_loss_is_that_of_the_tokens_one_by_one(model_folder, batch, current, method):
    rng = np.random.default_rng(1)
    # As if another policy had sampled them: ratios from 1/3 to 3, truncated at 2.
    behavior = (current + rng.uniform(-1.1, 1.1, current.shape)).astype(np.float32)
    stale = replace(batch, log_probs=np.where(batch.loss_mask, behavior, 0))
    metrics = make_learner(model_folder, method).update(stale)
    assert metrics["loss"] == pytest.approx(by_hand(batch, current, behavior, method), rel=1e-4)
    ratios = np.exp(current - behavior)[batch.loss_mask]
    assert ratios.max() > 2.0
    if method != "rloo":
        weights = np.minimum(ratios, 2.0)
        assert metrics["weight"] == pytest.approx(weights.mean(), rel=1e-4)
        share = weights.mean() ** 2 / np.square(weights).mean()
        assert metrics["effective_share"] == pytest.approx(share, rel=1e-4)
    assert metrics["kl_behavior"] == pytest.approx(-np.log(ratios).mean(), rel=1e-3)


def test_tokens_of_the_policy_itself_have_a_weight_of_one(model_folder, batch):
    metrics = make_learner(model_folder, "grpo").update(batch)
    assert metrics["weight"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["effective_share"] == pytest.approx(1.0, abs=1e-5)


def test_supervised_learning_takes_the_mean_over_the_tokens(model_folder, batch, current):
    metrics = make_learner(model_folder, "sft").update(batch)
    assert metrics["loss"] == pytest.approx(-current[batch.loss_mask].mean(), rel=1e-5)
    assert metrics["tokens"] == batch.loss_mask.sum()


def test_pairs_are_the_best_and_the_worst_of_a_group(model_folder, batch, current):
    returns = np.arange(len(batch), dtype=np.float32)
    returns[batch.groups == batch.groups[0]] = 1.0  # nothing to prefer in this group
    learner = make_learner(model_folder, "dpo", learning_rate=0.01, minibatches=2)
    ranked = replace(batch, episode_returns=returns)
    first = learner.update(ranked)
    # Of the four groups three have a pair; its two sequences have five tokens each.
    assert first["tokens"] == 3 * 2 * 5
    # The second step of the batch, of the other pairs, has begun to learn.
    assert first["loss"] == pytest.approx(math.log(2), abs=0.05)
    for _ in range(20):
        last = learner.update(ranked)
    assert last["accuracy"] == 1.0
    assert last["margin"] > 1.0
    assert last["loss"] < 0.6
    alike = replace(batch, episode_returns=np.ones(len(batch), np.float32))
    before = learner.state_dict()
    assert learner.update(alike)["tokens"] == 0
    assert all(np.array_equal(before[name], one) for name, one in learner.state_dict().items())


def sum_log_ratios(learner, current, batch):
    """What each sequence's log-prob has gained over that of the first model."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        learner.save(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        return (score_tokens(model, batch) - current).astype(float) * batch.loss_mask


@pytest.mark.parametrize("method", ["ipo", "kto"])
def test_preferences_are_relative_to_the_first_model(model_folder, batch, current, method):
    returns = np.arange(len(batch), dtype=np.float32) % 4 - 1.5
    ranked = replace(batch, episode_returns=returns)
    one, two = (
        make_learner(model_folder, method, learning_rate=0.003, epochs=epochs) for epochs in (1, 2)
    )
    first = one.update(ranked)["loss"]
    # Mean over two steps: the second is of the model that one step has made.
    second = 2 * two.update(ranked)["loss"] - first
    gains = sum_log_ratios(one, current, batch)
    if method == "ipo":
        assert first == pytest.approx((1 / 0.2) ** 2)
        means = gains.sum(axis=1) / batch.loss_mask.sum(axis=1)
        best, worst = means.reshape(-1, 4)[:, 3], means.reshape(-1, 4)[:, 0]
        assert second == pytest.approx(np.square(best - worst - 1 / 0.2).mean(), rel=1e-4)
        return
    assert first == pytest.approx(0.5)
    # The divergence is that of completions after the prompt of the next sequence.
    ids = np.concatenate([batch.token_ids[:, :3], np.roll(batch.token_ids[:, 3:], 1, 0)], axis=1)
    other = replace(batch, token_ids=ids)
    learner = make_learner(model_folder, "sft")
    divergence = sum_log_ratios(one, sum_log_ratios(learner, 0, other), other).sum(axis=1).mean()
    signs = np.where(returns > 0, 1, -1)
    losses = 1 - 1 / (1 + np.exp(-0.1 * signs * (gains.sum(axis=1) - max(divergence, 0))))
    assert second == pytest.approx(losses.mean(), rel=1e-4)


def test_a_sequence_that_was_not_sampled_takes_no_part_in_the_divergence(model_folder, batch):
    mask = batch.loss_mask.copy()
    mask[1] = False
    metrics = make_learner(model_folder, "kto").update(replace(batch, loss_mask=mask))
    assert metrics["loss"] == pytest.approx(0.5)
    assert metrics["kl_mismatched"] == pytest.approx(0.0, abs=1e-6)


def test_a_reward_model_begins_with_equal_scores_and_learns_the_order(model_folder, batch):
    ranked = replace(batch, episode_returns=np.arange(len(batch), dtype=np.float32))
    learner = make_learner(model_folder, "reward", learning_rate=0.01, center_coef=0.01)
    first = learner.update(ranked)
    assert (first["loss"], first["score"]) == (pytest.approx(math.log(2)), 0.0)
    for _ in range(30):
        last = learner.update(ranked)
    assert last["accuracy"] == 1.0
    assert last["loss"] < 0.2
    assert abs(last["score"]) < 1.0


def test_a_score_depends_on_no_padding(model_folder, batch, tmp_path):
    shutil.copytree(model_folder, tmp_path / "padded")
    for name, key in (("config.json", "pad_token_id"), ("tokenizer_config.json", "pad_token")):
        path = tmp_path / "padded" / name
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {key: 23 if "id" in key else "t23"})
        )
    lengths = np.where(np.arange(len(batch)) % 2, 8, 6)
    ids = np.where(np.arange(8) < lengths[:, None], batch.token_ids % 23, 0)
    mask = batch.loss_mask & (np.arange(8) < lengths[:, None])
    ragged = replace(
        batch, token_ids=ids, lengths=lengths, loss_mask=mask,
        episode_returns=np.arange(len(batch), dtype=np.float32),
    )  # fmt: skip
    # One pads the sequences of a step, the other reads them one by one.
    found = [
        make_learner(folder, "reward", learning_rate=0.003, epochs=4).update(ragged)
        for folder in (tmp_path / "padded", model_folder)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


# Of transformers 5.24, for a property that peft 0.21 reads.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_alone_is_trained_and_its_base_is_the_reference(model_folder, batch, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ranked = replace(batch, episode_returns=np.arange(len(batch), dtype=np.float32))
    options = {"lora_rank": 4, "learning_rate": 0.01}
    learner = make_learner(model_folder, "dpo", **options)
    # Of the initial model itself, as the adapter adds nothing at first.
    assert learner.update(ranked)["loss"] == pytest.approx(math.log(2))
    for _ in range(10):
        assert learner.update(ranked)["margin"] > 0
    # Two matrices for each of seven linear modules in two layers.
    assert sum(name.startswith("state.parameters") for name in learner.state_dict()) == 2 * 7 * 2
    learner.save(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    before = score_tokens(base, batch)
    after = score_tokens(PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), batch)
    gains = ((after - before) * batch.loss_mask).sum(axis=1)[learner_pairs(ranked)]
    last = learner.update(ranked)
    assert last["margin"] == pytest.approx((gains[0::2] - gains[1::2]).mean(), rel=1e-3)

    merged = make_learner(model_folder, "dpo", lora_merge=True, **options)
    for _ in range(11):
        merged.update(ranked)
    merged.save(tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert np.allclose(score_tokens(whole, batch), after, atol=1e-5)
    # The learner is as it was before it was saved.
    assert merged.update(ranked) == last


def learner_pairs(batch):
    """The best and the worst sequence of each group, one after the other."""
    rows = []
    for group in np.unique(batch.groups):
        (members,) = np.nonzero(batch.groups == group)
        returns = batch.episode_returns[members]
        rows += [members[returns.argmax()], members[returns.argmin()]]
    return rows


def test_a_penalty_for_the_divergence_of_an_adapter_is_from_its_base(model_folder, batch):
    options = {"learning_rate": 0.01, "epochs": 4, "lora_rank": 2, "kl_coef": 0.1}
    learner = make_learner(model_folder, "grpo", **options)
    assert learner.update(batch)["kl_reference"] > 0


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}])
def test_divergence_is_from_the_reference_model(model_folder, batch, tmp_path, options):
    further = make_learner(model_folder, "sft", learning_rate=0.01)
    further.update(batch)
    further.save(tmp_path / "further")
    start = check_model_folder(tmp_path / "further")
    settings = TokenOptions(kl_coef=0.1, **options)
    alone = TokenLearner(start, "grpo", settings, max_tokens=8)
    assert alone.update(batch)["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    first = check_model_folder(model_folder)
    held = TokenLearner(start, "grpo", settings, max_tokens=8, reference=first)
    assert held.update(batch)["kl_reference"] > 1e-6


def test_a_reference_of_another_vocabulary_is_refused(model_folder, tmp_path):
    first = check_model_folder(model_folder)
    model, _ = load_pretrained(first, "causal language model")
    model.resize_token_embeddings(30)
    shutil.copytree(model_folder, tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    other = check_model_folder(tmp_path / "other")
    with pytest.raises(SchemaMismatchError, match="reference: found a vocabulary of 30 in"):
        TokenLearner(first, "dpo", TokenOptions(), max_tokens=8, reference=other)


def test_adapters_that_do_not_fit_are_refused(model_folder, batch, tmp_path):
    with pytest.raises(ConfigInvalidError, match=r"lora_targets: found \('absent',\)"):
        make_learner(model_folder, "sft", lora_rank=2, lora_targets=("absent",))
    learner = make_learner(model_folder, "sft", lora_rank=2, lora_targets=("q_proj",))
    learner.save(tmp_path / "adapter")
    with pytest.raises(SourceInvalidError, match="is an adapter of peft"):
        check_model_folder(tmp_path / "adapter")


def test_later_steps_of_a_batch_are_held_to_the_policy_before_it(model_folder, batch):
    learner = make_learner(
        model_folder, "grpo", epochs=4, minibatches=2, learning_rate=0.01, clip_low=0.01,
        clip_high=0.01,
    )  # fmt: skip
    assert learner.update(batch)["ratio_max"] > 1.02
    # Within one step there is no other policy to be held to.
    assert make_learner(model_folder, "grpo").update(batch)["ratio_max"] == 1.0


def test_a_value_head_gets_the_discounted_return_at_each_sampled_token(model_folder, batch):
    mask = batch.loss_mask.copy()
    mask[:, 5] = False  # read in between: it takes no step
    rewarded = replace(batch, loss_mask=mask, episode_returns=np.ones(len(batch), np.float32))
    learner = make_learner(model_folder, "ppo", discount=0.5, learning_rate=1e-9)
    # Values are 0 at first, so the error is half the mean square of the returns: 1, 1/2, 1/4, 1/8.
    metrics = learner.update(rewarded)
    expected = 0.5 * sum(0.25**k for k in range(4)) / 4
    assert metrics["value_loss"] == pytest.approx(expected, rel=1e-5)
    for _ in range(200):
        metrics = learner.update(rewarded)
    assert metrics["value_loss"] < 0.7 * expected


def test_divergence_from_the_first_model_is_penalized(model_folder, batch):
    options = {"learning_rate": 0.01, "epochs": 8}
    free = make_learner(model_folder, "grpo", **options)
    held = make_learner(model_folder, "grpo", kl_coef=10.0, **options)
    assert held.update(batch)["kl_reference"] >= 0
    free.update(batch)

    start = make_learner(model_folder, "grpo").state_dict()

    def distance(learner):
        state = learner.state_dict()
        names = [name for name in state if name.startswith("state.parameters")]
        return sum(float(np.square(state[name] - start[name]).sum()) for name in names)

    assert distance(held) < distance(free)


@pytest.mark.parametrize("method", [*METHODS])
def test_a_step_in_parts_is_the_step(model_folder, batch, method):
    ranked = replace(batch, episode_returns=np.arange(len(batch), dtype=np.float32))
    options = {"learning_rate": 1e-3} | (
        {"kl_coef": 0.1} if METHODS[method].loss == "policy_gradient" else {}
    )
    whole, parts = (
        make_learner(model_folder, method, micro_batch_size=size, epochs=2, **options)
        for size in (None, 3)
    )
    found, expected = parts.update(ranked), whole.update(ranked)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    ours, theirs = parts.state_dict(), whole.state_dict()
    for name in ours:
        if name.startswith("state.optimizer.moments") and name.endswith("mean"):
            assert np.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("sft", {}),
        ("dpo", {"minibatches": 2}),
        ("kto", {"epochs": 2}),
        ("reward", {"micro_batch_size": 2}),
        ("dr-grpo", {"kl_coef": 0.1, "epochs": 2, "lora_rank": 2}),
        ("ppo", {"minibatches": 3, "kl_coef": 0.1}),
    ],
)
def test_two_processes_make_the_update_of_one(model_folder, batch, together, method, options):
    returns = np.arange(len(batch), dtype=np.float32) % 5 - 2
    ranked = replace(batch, episode_returns=returns)
    folder, settings = check_model_folder(model_folder), TokenOptions(learning_rate=1e-3, **options)
    alone = TokenLearner(folder, method, settings, max_tokens=8)
    expected = [alone.update(ranked) for _ in range(3)]
    # Loaded one after another: transformers' logging is the process's.
    lock = threading.Lock()

    def work(member):
        with lock:
            learner = TokenLearner(folder, method, settings, max_tokens=8, group=member)
        return [learner.update(ranked) for _ in range(3)], learner.state_dict()

    members = together(work)
    for metrics, state in members:
        for found, wanted in zip(metrics, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        for name, array in alone.state_dict().items():
            assert np.allclose(state[name], array, atol=1e-4), name
            assert np.array_equal(state[name], members[0][1][name]), name


def test_a_process_without_tokens_waits_for_the_others(model_folder, batch, together):
    mask = batch.loss_mask.copy()
    mask[len(batch) // 2 :] = False
    half = replace(batch, loss_mask=mask)
    folder, lock = check_model_folder(model_folder), threading.Lock()
    expected = make_learner(model_folder, "sft").update(half)

    def work(member):
        with lock:
            learner = TokenLearner(folder, "sft", TokenOptions(), max_tokens=8, group=member)
        return learner.update(half)

    for found in together(work):
        assert found == pytest.approx(expected, rel=1e-5)


def test_branches_of_an_episode_count_once(model_folder, batch):
    one_each = make_learner(model_folder, "grpo").update(batch, np.arange(len(batch)))
    assert one_each == make_learner(model_folder, "grpo").update(batch)
    # As if each group were two episodes of two branches each.
    returns = np.repeat(np.arange(len(batch) // 2, dtype=np.float32), 2)
    branched = replace(batch, episode_returns=returns)
    episodes = np.arange(len(batch)) // 2
    learner = make_learner(model_folder, "rloo", correction="none", learning_rate=1e-9)
    # Advantages are -1 and 1, so that the loss is 0; ratios are 1.
    assert learner.update(branched, episodes)["loss"] == pytest.approx(0.0, abs=1e-6)


def test_tokens_without_a_known_log_prob_are_left_out(model_folder, batch):
    log_probs = batch.log_probs.copy()
    log_probs[0] = np.nan
    metrics = make_learner(model_folder, "grpo").update(replace(batch, log_probs=log_probs))
    assert metrics["tokens"] == batch.loss_mask[1:].sum()
    assert math.isfinite(metrics["loss"])


def test_what_does_not_fit_is_refused(model_folder, batch):
    learner = make_learner(model_folder, "grpo")
    with pytest.raises(SchemaMismatchError, match="token id 24, expected ids below 24"):
        learner.update(replace(batch, token_ids=np.full_like(batch.token_ids, 24)))
    with pytest.raises(SchemaMismatchError, match="without log-probs"):
        learner.update(replace(batch, log_probs=None))
    with pytest.raises(SchemaMismatchError, match="up to 32 tokens, found one of 33"):
        TokenLearner(check_model_folder(model_folder), "sft", TokenOptions(), max_tokens=33)


@pytest.mark.parametrize(
    "options",
    [
        {"lora_merge": True},
        {"lora_targets": ("q_proj",)},
        {"lora_rank": 0},
        {"learning_rate": 0.0},
        {"low": 3.0},
        {"epochs": 0},
        {"lambda_": 1.5},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigInvalidError, match=rf"method: {next(iter(options))}: found"):
        TokenOptions(**options)


def test_every_method_says_what_it_is():
    assert all(method.summary for method in METHODS.values())
