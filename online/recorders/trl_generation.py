"""Generation by TRL's `GRPOTrainer` itself, for a hook in the place of its `rollout_func`.

Read from `_generate`, `_generate_single_turn` and `_get_per_token_logps_and_entropies` in
trl/trainer/grpo_trainer.py, TRL 1.16.0: private methods, which another version may not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence


def generate(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Generate with the trainer's model or engine; the log-probs are those the trainer computes."""
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    completion_ids, log_probs = trainer._generate_single_turn(
        prompt_ids, images, fields, count_samples(trainer)
    )
    if log_probs is None:  # only vLLM returns them
        log_probs = _compute_log_probs(trainer, prompt_ids, completion_ids)
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": log_probs}


def count_samples(trainer: Any) -> int:
    """Return how many samples of a prompt the trainer generates, in training or evaluation."""
    return int(trainer.num_generations if trainer.model.training else trainer.num_generations_eval)


def _compute_log_probs(
    trainer: Any, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]]
) -> list[list[float]]:
    parts, masks = [], []
    for lists, side in ((prompt_ids, "left"), (completion_ids, "right")):
        rows = [torch.tensor(ids) for ids in lists]
        pad = trainer._tokenizer.pad_token_id
        parts.append(pad_sequence(rows, True, pad, padding_side=side))
        masks.append(pad_sequence([torch.ones_like(row) for row in rows], True, padding_side=side))
    device = trainer.accelerator.device
    ids, mask = torch.cat(parts, 1).to(device), torch.cat(masks, 1).to(device)
    with torch.no_grad():
        log_probs = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, parts[1].size(1), trainer.args.per_device_train_batch_size
        )[0]
    return [row[: len(ids)].tolist() for row, ids in zip(log_probs, completion_ids, strict=True)]
