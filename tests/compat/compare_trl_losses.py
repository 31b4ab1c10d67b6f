"""Compare the losses of `train language` with those of TRL's trainers, on batches of the store.

    python tests/compat/compare_trl_losses.py FOLDER

Runs in an environment with TRL and ReplayLake's base. A batch of stale samples is drawn from a
lake. Each method's loss, and its gradient, are compared with those that a trainer of TRL computes
for the same tokens; so is the loss of a second step on the batch, after the weights have moved. For
GRPO and RLOO, advantages and importance weights are the trainer's own as well. Exits with 1 where a
loss differs by more than 1e-5.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from open_exports import make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import replaylake as rl
from replaylake.offline.language.pretrained import check_model_folder, load_pretrained
from replaylake.offline.language.token_learner import METHODS, TokenLearner, TokenOptions

_NUM_GROUPS, _NUM_SAMPLES, _LONGEST = 3, 4, 9
_TOLERANCE = 1e-5
# So that the second step of a batch is outside of the clipped range for some tokens.
_RATE = 0.002
_KL_COEF = 0.05
# What the trainers take besides what is compared.
_QUIET = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
_BATCH = _NUM_GROUPS * _NUM_SAMPLES
_ROWS = {
    "prompt": "a prompt",
    "completion": " a completion",
    "chosen": " a chosen one",
    "rejected": " a rejected one",
    "label": True,
}


def make_model(folder: Path) -> Any:
    """Write a small model of random weights; return its tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def draw_batch(folder: Path, model: Any) -> Any:
    """Record samples of other policies than the model, and draw a batch of them."""
    rng = np.random.default_rng(3)
    lake = rl.open(folder, create=True)
    with rl.record_language(lake, "agents", producer="sampler") as recorder:
        for group in range(_NUM_GROUPS):
            prompt = rng.integers(0, 256, rng.integers(2, 6)).tolist()
            for _ in range(_NUM_SAMPLES):
                completion = rng.integers(0, 256, rng.integers(4, _LONGEST + 1)).tolist()
                log_probs = score(model, prompt + completion)[-len(completion) :]
                # Ratios from 1/3 to 3.
                log_probs += rng.uniform(-1.1, 1.1, len(completion))
                recorder.record(
                    prompt="a prompt",
                    completion="an answer",
                    prompt_ids=prompt,
                    completion_ids=completion,
                    log_probs=log_probs.tolist(),
                    reward=float(rng.normal()),
                    group_id=f"g{group}",
                )
    sequences = lake.snapshot("agents").token_sequences()
    batch = sequences.padded(_NUM_GROUPS, seed=0, groups=True).sample()
    mask = batch.loss_mask.copy()
    # A token that the model has read between those that it sampled.
    for row in range(0, len(mask), 2):
        mask[row, np.flatnonzero(mask[row])[2]] = False
    return replace(batch, loss_mask=mask)


def score(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].double().numpy()


class Rows:
    """The sequences of a batch as TRL has them: a prompt, and what follows it."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.prompts, self.completions, self.masks, self.log_probs = [], [], [], []
        for row in range(len(batch)):
            start, stop = int(np.flatnonzero(batch.loss_mask[row])[0]), int(batch.lengths[row])
            self.prompts.append(batch.token_ids[row, :start].tolist())
            self.completions.append(batch.token_ids[row, start:stop].tolist())
            self.masks.append(batch.loss_mask[row, start:stop].astype(int).tolist())
            self.log_probs.append(batch.log_probs[row, start:stop].tolist())

    def padded(self) -> dict[str, torch.Tensor]:
        inside = np.arange(self.batch.token_ids.shape[1]) < self.batch.lengths[:, None]
        return {
            "input_ids": torch.from_numpy(self.batch.token_ids).long(),
            "attention_mask": torch.from_numpy(inside).long(),
            "completion_mask": torch.from_numpy(self.batch.loss_mask).long(),
        }

    def pairs(self) -> list[int]:
        """The best sequence of each group, then the worst of each."""
        returns, groups = self.batch.episode_returns, self.batch.groups
        members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
        best = [int(rows[returns[rows].argmax()]) for rows in members]
        return best + [int(rows[returns[rows].argmin()]) for rows in members]


# A loss of TRL: of a model, of the model before the batch.
Loss = Callable[[Any, Any], torch.Tensor]


def make_trainer(cls: Any, config: Any, model: Any, tokenizer: Any, folder: Path, **more: Any):
    """Return a trainer that is ready to compute losses; it trains nothing."""
    options = {
        "output_dir": str(folder), "per_device_train_batch_size": _BATCH, **_QUIET,
        **more.pop("options", {}),
    }  # fmt: skip
    columns = more.pop("columns")
    rows = Dataset.from_list([{name: _ROWS[name] for name in columns}] * _BATCH)
    trainer = cls(
        model=model, args=config(**options), train_dataset=rows, processing_class=tokenizer, **more
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def compute_after(trainer: Any, model: Any, before: Any) -> torch.Tensor:
    """Return the trainer's loss of a model for what the model before the batch has stored."""
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    model.load_state_dict(before.state_dict())
    inputs = trainer._generate_and_score_completions([{"prompt": _ROWS["prompt"]}] * _BATCH)
    model.load_state_dict(weights)
    return trainer.compute_loss(model, inputs)


def supervised(rows: Rows, tokenizer: Any, folder: Path) -> Loss:
    def loss(model: Any, _: Any) -> torch.Tensor:
        trainer = make_trainer(
            trl.SFTTrainer, trl.SFTConfig, model, tokenizer, folder,
            columns=("prompt", "completion"),
        )  # fmt: skip
        inputs = rows.padded()
        mask = inputs.pop("completion_mask")
        inputs["labels"] = inputs["input_ids"].masked_fill(mask == 0, -100)
        return trainer.compute_loss(trainer.model, inputs)

    return loss


def preference(rows: Rows, tokenizer: Any, folder: Path, **options: Any) -> Loss:
    def loss(model: Any, before: Any) -> torch.Tensor:
        trainer = make_trainer(
            trl.DPOTrainer, trl.DPOConfig, model, tokenizer, folder, options=options,
            ref_model=before, columns=("prompt", "chosen", "rejected"),
        )  # fmt: skip
        inputs = {name: one[rows.pairs()] for name, one in rows.padded().items()}
        return trainer._compute_loss(trainer.model, inputs, return_outputs=False)

    return loss


def labels(rows: Rows, tokenizer: Any, folder: Path, **options: Any) -> Loss:
    """Losses of KTOTrainer; each prompt's other completion is that of the sequence before it."""

    def loss(model: Any, before: Any) -> torch.Tensor:
        trainer = make_trainer(
            trl.KTOTrainer, trl.KTOConfig, model, tokenizer, folder, options=options,
            ref_model=before, columns=("prompt", "completion", "label"),
        )  # fmt: skip
        inputs = rows.padded()
        inputs["label"] = torch.from_numpy(rows.batch.episode_returns > 0)
        ids = [p + rows.completions[row - 1] for row, p in enumerate(rows.prompts)]
        masks = [[0] * len(p) + rows.masks[row - 1] for row, p in enumerate(rows.prompts)]
        for name, parts in (
            ("input_ids", ids),
            ("attention_mask", [[1] * len(one) for one in ids]),
            ("completion_mask", masks),
        ):
            tensors = [torch.tensor(one) for one in parts]
            inputs[f"KL_{name}"] = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        return trainer._compute_loss(trainer.model, inputs, return_outputs=False)

    return loss


def reward_model(rows: Rows, tokenizer: Any, folder: Path, **options: Any) -> Loss:
    def loss(model: Any, _: Any) -> torch.Tensor:
        trainer = make_trainer(
            trl.RewardTrainer, trl.RewardConfig, model, tokenizer, folder, options=options,
            columns=("prompt", "chosen", "rejected"),
        )  # fmt: skip
        inputs = rows.padded()
        inputs.pop("completion_mask")
        is_inside = inputs["attention_mask"].bool()
        inputs["input_ids"] = inputs["input_ids"].where(is_inside, tokenizer.pad_token_id)
        inputs = {name: one[rows.pairs()] for name, one in inputs.items()}
        return trainer.compute_loss(trainer.model, inputs)

    return loss


def group_policy_gradient(rows: Rows, tokenizer: Any, folder: Path, **options: Any) -> Loss:
    """Losses of GRPOTrainer; `mode`: its importance correction, which it makes for vLLM alone."""
    mode = options.pop("mode", None)
    if mode is not None:
        options |= {
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": 0.5 if mode.endswith("mask") else None,
            "vllm_importance_sampling_clip_max": 2.0,
        }

    def replay(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": rows.prompts,
            "completion_ids": rows.completions,
            "logprobs": rows.log_probs,
            "env_mask": rows.masks,
        }

    def loss(model: Any, before: Any) -> torch.Tensor:
        # From where the trainer loads its reference.
        model.config._name_or_path = before.config._name_or_path
        trainer = make_trainer(
            trl.GRPOTrainer, trl.GRPOConfig, model, tokenizer, folder, columns=("prompt",),
            reward_funcs=lambda prompts, **_: rows.batch.episode_returns.tolist(),
            rollout_func=replay,
            # Two iterations: a trainer that makes one does not compute the log-probs before it.
            options={
                "num_generations": _NUM_SAMPLES, "max_completion_length": _LONGEST,
                "num_iterations": 2, "steps_per_generation": 1, "loss_type": "grpo", **options,
            },
        )  # fmt: skip
        # Its correction by stored log-probs is of vLLM's samples alone.
        trainer.use_vllm = mode is not None
        trainer._last_loaded_step = trainer.state.global_step
        return compute_after(trainer, model, before)

    return loss


def leave_one_out(rows: Rows, tokenizer: Any, folder: Path) -> Loss:
    def loss(model: Any, before: Any) -> torch.Tensor:
        trainer = make_trainer(
            trl.RLOOTrainer, trl.RLOOConfig, model, tokenizer, folder, columns=("prompt",),
            reward_funcs=lambda prompts, **_: rows.batch.episode_returns.tolist(),
            options={
                "num_generations": _NUM_SAMPLES, "max_completion_length": _LONGEST, "beta": 0.0,
            },
        )  # fmt: skip
        trainer._tokenize_prompts = lambda prompts: (rows.prompts, None, {})
        trainer._generate_single_turn = lambda *_, **__: rows.completions
        return compute_after(trainer, model, before)

    return loss


class Case:
    """A method with its options, and the loss of TRL that it is compared with."""

    def __init__(self, name: str, method: str, theirs: Any, **options: Any) -> None:
        self.name, self.method, self.theirs, self.options = name, method, theirs, options
        # RLOOTrainer knows no tokens that the model has read in between.
        self.is_contiguous = theirs is leave_one_out


CASES = [
    Case("sft", "sft", supervised),
    Case("dpo", "dpo", partial(preference, beta=0.1)),
    Case("dpo, beta 0.5", "dpo", partial(preference, beta=0.5), beta=0.5),
    Case("ipo", "ipo", partial(preference, loss_type="ipo", beta=0.1)),
    Case("kto", "kto", partial(labels, beta=0.1)),
    Case(
        "kto, weighted", "kto",
        partial(labels, beta=0.3, desirable_weight=1.5, undesirable_weight=0.7),
        beta=0.3, desirable_weight=1.5, undesirable_weight=0.7,
    ),
    Case("reward", "reward", reward_model),
    Case(
        "reward, centered", "reward", partial(reward_model, center_rewards_coefficient=0.1),
        center_coef=0.1,
    ),
    Case("grpo", "grpo", partial(group_policy_gradient, beta=0.0), correction="none"),
    Case(
        "grpo with a KL penalty", "grpo",
        partial(group_policy_gradient, beta=_KL_COEF, use_bias_correction_kl=False),
        correction="none", kl_coef=_KL_COEF, kl_estimator="k3",
    ),
    Case(
        "grpo, token truncated", "grpo",
        partial(group_policy_gradient, beta=0.0, mode="token_truncate"),
    ),
    Case(
        "grpo, token masked", "grpo",
        partial(group_policy_gradient, beta=0.0, mode="token_mask"), correction="mask",
    ),
    Case(
        "grpo, sequence truncated", "grpo",
        partial(group_policy_gradient, beta=0.0, mode="sequence_truncate"),
        correction_level="sequence",
    ),
    Case(
        "grpo, sequence masked", "grpo",
        partial(group_policy_gradient, beta=0.0, mode="sequence_mask"),
        correction="mask", correction_level="sequence",
    ),
    Case(
        "grpo, unequal clips", "grpo",
        partial(group_policy_gradient, beta=0.0, epsilon=0.1, epsilon_high=0.3),
        correction="none", clip_low=0.1, clip_high=0.3,
    ),
    Case(
        "dr-grpo", "dr-grpo",
        partial(group_policy_gradient, beta=0.0, loss_type="dr_grpo", scale_rewards="none"),
        correction="none",
    ),
    Case(
        "gspo", "gspo",
        partial(
            group_policy_gradient, beta=0.0, importance_sampling_level="sequence",
            epsilon=3e-4, epsilon_high=4e-4,
        ),
        correction="none",
    ),
    Case("rloo", "rloo", leave_one_out, correction="none"),
]  # fmt: skip
# reinforce++ and ppo: TRL 1.16 has no trainer of either.
NOT_IN_TRL = {"reinforce++", "ppo"}


def make_learner(folder: Path, case: Case, epochs: int) -> TokenLearner:
    options = TokenOptions(
        learning_rate=_RATE, max_gradient_norm=1e9, epochs=epochs, **case.options
    )
    # dr-grpo divides by it, as TRL does by max_completion_length.
    return TokenLearner(check_model_folder(folder), case.method, options, max_tokens=_LONGEST)


def load(folder: Path, method: str = "sft") -> Any:
    if METHODS[method].is_reward_model:
        checked = check_model_folder(folder)
        return load_pretrained(checked, "sequence classifier", num_outputs=1, new_head=True)[0]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def compare(case: Case, base: Path, batch: Any, tokenizer: Any, folder: Path) -> float:
    """Return the largest difference of the losses; raise where a gradient differs."""
    if case.is_contiguous:
        starts = batch.loss_mask.argmax(axis=1)[:, None]
        places = np.arange(batch.loss_mask.shape[1])
        inside = (places >= starts) & (places < batch.lengths[:, None])
        batch = replace(batch, loss_mask=inside)
    theirs = case.theirs(Rows(batch), tokenizer, folder / "trainer")
    one, two = (make_learner(base, case, epochs) for epochs in (1, 2))
    ours_first = one.update(batch)["loss"]
    ours_second = 2 * two.update(batch)["loss"] - ours_first
    one.save(folder / "stepped")

    model = load(base, case.method)
    first = theirs(model, load(base, case.method))
    model.zero_grad()
    first.backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    found = [parameter.grad for parameter in one._parameters]
    scale = max(float(gradient.abs().max()) for gradient in wanted)
    for ours, its in zip(found, wanted, strict=True):
        difference = float((ours - its).abs().max()) / scale
        if not difference < 1e-4:
            sys.exit(f"{case.name}: found gradients that differ by {difference:.1e} of the largest")
    second = theirs(load(folder / "stepped", case.method), load(base, case.method)).item()
    if abs(second - first.item()) < 10 * _TOLERANCE:
        sys.exit(f"{case.name}: found a second loss of {second}, expected one unlike the first")
    return max(abs(ours_first - first.item()), abs(ours_second - second))


def main(folder: Path) -> None:
    tokenizer = make_model(folder / "model")
    batch = draw_batch(folder / "lake", load(folder / "model"))
    if missing := set(METHODS) - {case.method for case in CASES} - NOT_IN_TRL:
        sys.exit(f"found no comparison for {', '.join(sorted(missing))}")
    worst = 0.0
    for number, case in enumerate(CASES):
        work = folder / f"case-{number}"
        difference = compare(case, folder / "model", batch, tokenizer, work)
        print(f"{case.name}: losses differ by at most {difference:.1e}", flush=True)
        if not difference < _TOLERANCE:
            sys.exit(f"{case.name}: expected less than {_TOLERANCE}")
        worst = max(worst, difference)
    print(f"losses of {len(CASES)} methods and options differ from TRL's by at most {worst:.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
