"""Sampling: completions of prompts by a causal language model, with the log-prob of each token.

For small models on one machine. An engine (vLLM, SGLang) does the same behind the gateway.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from replaylake.datastore.errors import ConfigInvalidError


@dataclass(frozen=True)
class Completion:
    """The completion of one prompt.

    token_ids: those of the completion, including its stop token. log_probs: one for each token,
    under the distribution that it was sampled from (with the temperature). finish_reason: `stop`
    after a stop token, `length` if max_new_tokens was reached before.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]


def sample_completions(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[Completion]:
    """Sample one completion for each prompt, as one batch with a key-value cache.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        prompts: token ids of each prompt, at least one; their lengths may differ.
        max_new_tokens: largest number of tokens of a completion.
        stop_ids: tokens that end a completion.
        temperature: divisor of the logits; 0: greedy decoding, with log-probs of 0.
        generator: a torch generator on the model's device; None: the default one.

    Raises: ConfigInvalidError for an empty prompt, and for lengths above the model's limit.
    Cost: a forward pass for each token of the longest completion.
    """
    if not prompts:
        return []
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=model.device)
    is_open = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
    tokens, log_probs = [], []
    for ids, taken in iter_tokens(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=generator,
    ):
        # -1: no token, because the row has ended.
        tokens.append(torch.where(is_open, ids, -1))
        log_probs.append(taken)
        is_open = is_open & ~torch.isin(ids, stops)
        if not is_open.any():
            break
    all_tokens = torch.stack(tokens, dim=1).tolist()
    all_log_probs = torch.stack(log_probs, dim=1).tolist()
    found = []
    for row, (sampled, scored) in enumerate(zip(all_tokens, all_log_probs, strict=True)):
        kept = [token for token in sampled if token >= 0]
        reason: Literal["stop", "length"] = "length" if bool(is_open[row]) else "stop"
        found.append(Completion(kept, scored[: len(kept)], reason))
    return found


def iter_tokens(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the next token of every prompt, ids int64 [B], and their log-probs float32 [B].

    Arguments and errors as of `sample_completions`; the caller stops at the tokens that it wants to
    stop at. top_k: tokens are sampled among this number of the most likely ones; 0: among all.
    top_p: among the most likely ones that have this probability together (Holtzman et al. 2020).
    The log-probs are under the distribution after both.
    """
    if not all(prompts) or max_new_tokens < 1 or temperature < 0:
        raise ConfigInvalidError(
            "sampling: found an empty prompt, max_new_tokens below 1 or a negative temperature, "
            "expected token ids, 1 or more and 0 or more."
        )
    width = max(map(len, prompts))
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and width + max_new_tokens > limit:
        raise ConfigInvalidError(
            f"sampling: found a prompt of {width:,} tokens and max_new_tokens {max_new_tokens:,}, "
            f"expected at most {limit:,} tokens together, the model's limit.",
            parameter="max_new_tokens",
        )
    device = model.device
    # Padded on the left, so that the last position of every row predicts its next token.
    ids = torch.tensor([[0] * (width - len(one)) + list(one) for one in prompts], device=device)
    lengths = torch.tensor([len(one) for one in prompts], device=device)
    mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
    positions = (torch.cumsum(mask, dim=1) - 1).clamp(min=0)
    # transformers 5.24 renamed it.
    parameters = inspect.signature(model.forward).parameters
    cached = "cache" if "cache" in parameters else "past_key_values"
    cache = None
    for _ in range(max_new_tokens):
        # Not around the loop: between two tokens, the caller's code runs.
        with torch.inference_mode():
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{cached: cache},
            )
            cache, logits = output[cached], output.logits[:, -1].float()
            if temperature:
                scores = _limit_scores(logits / temperature, top_k, top_p)
                ids = torch.multinomial(scores.exp(), 1, generator=generator)
                taken = scores.gather(1, ids)[:, 0]
            else:
                ids = logits.argmax(dim=-1, keepdim=True)
                taken = torch.zeros(len(prompts), device=device)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
            positions = positions[:, -1:] + 1
        yield ids[:, 0], taken


def _limit_scores(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return log-probs [B, V] of the tokens that may be sampled, -inf for the others."""
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    scores = torch.log_softmax(logits, dim=-1)
    if top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True)
        probs = ordered.exp()
        # The most likely token stays, whatever its probability.
        is_left_out = torch.cumsum(probs, dim=-1) - probs >= top_p
        is_left_out[:, 0] = False
        scores = scores.masked_fill(is_left_out.scatter(1, order, is_left_out), -torch.inf)
        scores = torch.log_softmax(scores, dim=-1)
    return scores
