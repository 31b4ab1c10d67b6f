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
from replaylake.offline.language.images import ImageInputs, image_arguments, naming_images


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
    images: ImageInputs | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    """Sample one completion for each prompt, as one batch with a key-value cache.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        prompts: token ids of each prompt, at least one; their lengths may differ.
        max_new_tokens: largest number of tokens of a completion.
        stop_ids: tokens that end a completion.
        temperature: divisor of the logits; 0: greedy decoding, with log-probs of 0.
        generator: a torch generator on the model's device; None: the default one.
        images: those of each prompt, for a model that takes images.
        seeds: one for each prompt, in the place of a generator: a completion then depends on its
            own prompt and seed alone, but for rounding.

    Raises: ConfigInvalidError for an empty prompt, and for lengths above the model's limit;
    SchemaMismatchError for images that do not fit the image tokens.
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
        images=images,
        seeds=seeds,
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
    images: ImageInputs | None = None,
    seeds: Sequence[int] | None = None,
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
    # Of all other positions, logits are never used: float32 [B, T, V] is 3 GB of 8 prompts of 2,000
    # tokens and 50,000 words.
    kept = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    arguments: dict[str, Any] = {}
    if images is not None:
        arguments |= image_arguments(model, ids, images)
    # Qwen-VL numbers the positions of image tokens by row and column. It does so for whole
    # sequences only, so that nothing is cached.
    is_whole = "mm_token_type_ids" in arguments
    if not is_whole:
        arguments |= {"use_cache": True, "position_ids": positions}
    inputs = ids
    draws = None if seeds is None else _make_draws(seeds, max_new_tokens).to(device)
    for number in range(max_new_tokens):
        # Not around the loop: between two tokens, the caller's code runs.
        with torch.inference_mode(), naming_images(images):
            output = model(input_ids=inputs, attention_mask=mask, **kept, **arguments)
            logits = output.logits[:, -1].float()
            if temperature:
                scores = _limit_scores(logits / temperature, top_k, top_p)
                if draws is None:
                    ids = torch.multinomial(scores.exp(), 1, generator=generator)
                else:
                    ids = _invert(scores, draws[:, number, None])
                taken = scores.gather(1, ids)[:, 0]
            else:
                ids = logits.argmax(dim=-1, keepdim=True)
                taken = torch.zeros(len(prompts), device=device)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
            positions = positions[:, -1:] + 1
            if is_whole:
                inputs = torch.cat([inputs, ids], dim=1)
                types = arguments["mm_token_type_ids"]
                arguments["mm_token_type_ids"] = torch.cat(
                    [types, types.new_zeros(ids.shape)], dim=1
                )
            else:
                # The cache has the images.
                inputs = ids
                arguments = {"use_cache": True, "position_ids": positions, cached: output[cached]}
        yield ids[:, 0], taken


def _make_draws(seeds: Sequence[int], num: int) -> torch.Tensor:
    """Return uniform numbers of [0, 1), float64 [B, num], each row from its own seed."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(num, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def _invert(scores: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the token [B, 1] at each draw [B, 1], by the inverse of the distribution function.

    scores: log-probs [B, V].
    """
    edges = scores.double().exp().cumsum(dim=-1)
    # Rounding leaves the last edge a little off 1.
    found = torch.searchsorted(edges, draws * edges[:, -1:], right=True)
    return found.clamp(max=scores.shape[-1] - 1)


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
