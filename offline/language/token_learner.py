"""TokenLearner: training of a causal language model on stored token sequences, on or off policy.

Each method is a choice of advantages, of the level of the ratio, and of the mean over tokens
(METHODS). Tokens of other policies get importance weights from their recorded log-probs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import torch

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.datastore.replay.tokens.token_batch import TokenBatch
from replaylake.offline.language.pretrained import ModelFolder, load_pretrained, save_pretrained
from replaylake.offline.learning.adam import FusedAdam
from replaylake.offline.learning.options import expect
from replaylake.offline.learning.state import pack_state, unpack_state
from replaylake.offline.losses.policy_gradient import value_loss
from replaylake.offline.losses.preference import direct_preference
from replaylake.offline.losses.returns import generalized_advantages
from replaylake.offline.losses.token_policy_gradient import (
    Baseline,
    Correction,
    Level,
    Reduction,
    effective_sample_size,
    group_advantages,
    importance_weights,
    kl_penalty,
    reduce_tokens,
    token_surrogate,
)


@dataclass(frozen=True)
class TokenMethod:
    """The definition of a method.

    loss: `likelihood`; `pairs`, the best and the worst sequence of each group; `policy_gradient`.
    baseline: of the advantages; None: a value head. level: of the ratio. clip_low, clip_high:
    defaults of the options. needs_groups: batches contain all sequences of a group.
    """

    summary: str
    loss: Literal["likelihood", "pairs", "policy_gradient"]
    baseline: Baseline | None = None
    level: Level = "token"
    reduction: Reduction = "sequence_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    needs_groups: bool = True


METHODS: Final[Mapping[str, TokenMethod]] = {
    "sft": TokenMethod(
        "supervised: maximizes the likelihood of the tokens",
        "likelihood",
        reduction="token_mean",
        needs_groups=False,
    ),
    "dpo": TokenMethod(
        "best against worst sequence of a group (Rafailov et al. 2023)",
        "pairs",
    ),
    "grpo": TokenMethod(
        "group mean and standard deviation (Shao et al. 2024)", "policy_gradient", "group_norm"
    ),
    "dr-grpo": TokenMethod(
        "group mean, no normalization by length (Liu et al. 2025)",
        "policy_gradient",
        "group_mean",
        reduction="constant",
    ),
    "rloo": TokenMethod(
        "mean of the other samples, ratios of whole sequences (Ahmadian et al. 2024)",
        "policy_gradient",
        "leave_one_out",
        level="sequence",
    ),
    "reinforce++": TokenMethod(
        "mean and standard deviation of the batch (Hu 2025)",
        "policy_gradient",
        "batch_norm",
        reduction="token_mean",
        needs_groups=False,
    ),
    "gspo": TokenMethod(
        "group mean and standard deviation, geometric mean of the ratios (Zheng et al. 2025)",
        "policy_gradient",
        "group_norm",
        level="geometric",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "ppo": TokenMethod(
        "generalized advantages of a value head (Schulman et al. 2017)",
        "policy_gradient",
        reduction="token_mean",
        needs_groups=False,
    ),
}


@dataclass(frozen=True)
class TokenOptions:
    """Options of all methods.

    correction, correction_level, low, high: importance weights of tokens; see importance_weights.
    clip_low, clip_high: clipping of the ratio to the policy before the update; None: the method's
    default. kl_coef: weight of the KL divergence from the initial model. epochs: passes over each
    batch, each in `minibatches` gradient steps. beta: of `dpo`. discount, lambda_,
    value_coef, value_learning_rate: of `ppo`.
    """

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    epochs: int = 1
    minibatches: int = 1
    clip_low: float | None = None
    clip_high: float | None = None
    correction: Correction = "truncate"
    correction_level: Level = "token"
    low: float = 0.5
    high: float = 2.0
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    beta: float = 0.1
    discount: float = 1.0
    lambda_: float = 1.0
    value_coef: float = 0.5
    value_learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_gradient_norm", "high", "beta", "value_learning_rate"):
            value = getattr(self, name)
            expect(value > 0, f"method: {name}", value, "more than 0")
        for name in ("weight_decay", "low", "kl_coef", "value_coef", "clip_low", "clip_high"):
            value = getattr(self, name)
            expect(value is None or value >= 0, f"method: {name}", value, "0 or more")
        for name in ("epochs", "minibatches"):
            value = getattr(self, name)
            expect(value >= 1, f"method: {name}", value, "1 or more")
        for name in ("discount", "lambda_"):
            value = getattr(self, name)
            expect(0 <= value <= 1, f"method: {name}", value, "0 to 1")
        expect(self.low <= self.high, "method: low", self.low, f"at most high, {self.high}")


class TokenLearner:
    """A model of transformers with its optimizer, in float32.

    Dropout is off, so that two policies with equal weights have a ratio of 1.
    """

    def __init__(
        self,
        folder: ModelFolder,
        method: str,
        options: TokenOptions,
        *,
        max_tokens: int,
        device: str = "cpu",
    ) -> None:
        """Load the model.

        Args:
            folder: the initial model.
            method: a key of METHODS.
            options: options of the method.
            max_tokens: length of the longest sequence, in tokens.
            device: a torch device.

        Raises: SourceInvalidError, ExtraMissingError; SchemaMismatchError for sequences above the
        model's limit.
        """
        self.method, self.options = METHODS[method], options
        self._name, self._device, self._max_tokens = method, device, max_tokens
        self._model, self._tokenizer = load_pretrained(
            folder, "causal language model", device=device
        )
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if limit is not None and max_tokens > limit:
            raise SchemaMismatchError(
                f"model: {folder.path.name} takes sequences of up to {limit:,} tokens, found one "
                f"of {max_tokens:,}. Leave longer ones out with where_sequences = "
                f"'num_tokens <= {limit}'.",
                parameter="where_sequences",
            )
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._reference: Any = None
        if options.kl_coef or self.method.loss == "pairs":
            self._reference = copy.deepcopy(self._model).requires_grad_(False)
        self._value_head: torch.nn.Linear | None = None
        groups: list[dict[str, Any]] = [
            {"name": "model", "params": [p for p in self._model.parameters() if p.requires_grad]}
        ]
        if method == "ppo":
            width = self._model.config.get_text_config().hidden_size
            self._value_head = torch.nn.Linear(width, 1, device=device)
            torch.nn.init.zeros_(self._value_head.weight)
            torch.nn.init.zeros_(self._value_head.bias)
            groups.append(
                {
                    "name": "value",
                    "params": list(self._value_head.parameters()),
                    "lr": options.value_learning_rate,
                }
            )
        self._parameters = [p for group in groups for p in group["params"]]
        self._optimizer = FusedAdam(
            groups,
            options.learning_rate,
            weight_decay=options.weight_decay,
            max_gradient_norm=options.max_gradient_norm,
        )

    @property
    def needs_log_probs(self) -> bool:
        """Whether only tokens with a recorded log-prob are included in the loss."""
        is_weighted = self.method.loss == "policy_gradient"
        return is_weighted and self.options.correction != "none"

    def update(self, batch: TokenBatch[Array]) -> dict[str, float]:
        """Update the model on a padded batch; return the metrics.

        Raises: SchemaMismatchError for ids outside the model's vocabulary, and if the correction
        needs log-probs that the batch does not have.
        """
        self._check_ids(batch)
        tensors = to_torch(batch, self._device)
        data = self._prepare(tensors)
        totals: dict[str, float] = {}
        num = 0
        for _ in range(self.options.epochs):
            for rows in self._split(len(data.mask)):
                part = data.select(rows)
                # Without a token in the loss, a step would only apply weight decay and momentum.
                if not part.mask.any():
                    continue
                for parameter in self._parameters:
                    parameter.grad = None
                loss, metrics = self._loss(part)
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()
                for name, value in {"loss": loss.detach(), **metrics}.items():
                    totals[name] = totals.get(name, 0.0) + float(value)
                num += 1
        means = {name: total / num for name, total in totals.items()}
        means["tokens"] = float(data.mask.sum())
        if self.method.loss != "likelihood":
            means["return"] = float(tensors.episode_returns.mean())
        return means

    def state_dict(self) -> dict[str, Array]:
        """Return the complete state of training as named arrays."""
        return pack_state(
            {
                "parameters": [p.detach() for p in self._parameters],
                "reference": None
                if self._reference is None
                else [p.detach() for p in self._reference.parameters()],
                "optimizer": self._optimizer.state_dict(),
            }
        )

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what state_dict returned."""
        tree = unpack_state(state)
        with torch.no_grad():
            for ours, theirs in zip(self._parameters, tree["parameters"], strict=True):
                ours.copy_(theirs)
            if self._reference is not None:
                for ours, theirs in zip(
                    self._reference.parameters(), tree["reference"], strict=True
                ):
                    ours.copy_(theirs)
        self._optimizer.load_state_dict(tree["optimizer"])

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer in the format of transformers, with safetensors."""
        save_pretrained(self._model, self._tokenizer, folder)

    def _prepare(self, batch: TokenBatch[torch.Tensor]) -> _Data:
        """Compute what all gradient steps of a batch share: masks, advantages, old log-probs."""
        options, mask = self.options, batch.loss_mask.clone()
        mask[:, 0] = False  # nothing precedes it, so nothing predicts it
        behavior = batch.log_probs
        needs_behavior = self.needs_log_probs
        if needs_behavior:
            if behavior is None:
                raise SchemaMismatchError(
                    f"method {self._name}: found sequences without log-probs of the behavior "
                    "policy, which the correction needs. Record them (action_log_probs), or "
                    "set correction=none.",
                    parameter="correction",
                )
            mask &= torch.isfinite(behavior)
        positions = torch.arange(mask.shape[1], device=mask.device)
        data = _Data(
            ids=batch.token_ids.long(),
            inside=positions < batch.lengths[:, None],
            mask=mask,
            behavior=behavior if needs_behavior else None,
        )
        if self.method.loss == "likelihood":
            return data
        if self.method.loss == "pairs":
            data = data.select(_find_pairs(batch.episode_returns, batch.groups))
            if len(data.mask):
                with torch.no_grad():
                    data.reference = self._forward(self._reference, data).log_probs
            return data
        is_one_step = options.epochs == options.minibatches == 1
        values = None
        if not is_one_step or self._value_head is not None or self._reference is not None:
            with torch.no_grad():
                forward = self._forward(self._model, data)
                values = forward.values
                data.proximal = None if is_one_step else forward.log_probs
                if self._reference is not None:
                    data.reference = self._forward(self._reference, data).log_probs
        if values is not None:
            data.values = values
            self._add_generalized_advantages(data, batch.episode_returns)
        else:
            assert self.method.baseline is not None
            data.advantages = group_advantages(
                batch.episode_returns, batch.groups, self.method.baseline
            )
        return data

    def _add_generalized_advantages(self, data: _Data, returns: torch.Tensor) -> None:
        """Add advantages and value targets [B, T].

        The return is the reward of the last sampled token. Only sampled tokens are time steps;
        tokens that the model read in between are skipped.
        """
        assert data.values is not None
        mask, options = data.mask, self.options
        num = mask.sum(dim=1)
        width = max(int(num.max()), 1)
        columns = torch.arange(width, device=mask.device)
        place = torch.cumsum(mask, dim=1) - 1
        rows = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)
        values = data.values.new_zeros(len(mask), width + 1)
        values[rows[mask], place[mask]] = data.values[mask]
        is_last = columns == num[:, None] - 1
        rewards = torch.where(is_last, returns[:, None], 0.0)
        # The value after the last sampled token is 0.
        discounts = torch.where(columns < num[:, None] - 1, options.discount, 0.0)
        compact = generalized_advantages(rewards, discounts, values, options.lambda_)
        advantages = torch.zeros_like(data.values)
        advantages[mask] = compact[rows[mask], place[mask]]
        data.targets = advantages + data.values
        inside = advantages[mask]
        if len(inside) > 1:
            advantages = (advantages - inside.mean()) / (inside.std() + 1e-8) * mask
        data.advantages = advantages

    def _loss(self, data: _Data) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        options, method, mask = self.options, self.method, data.mask
        forward = self._forward(self._model, data)
        log_probs = forward.log_probs
        metrics = {"entropy": forward.entropy}
        if method.loss == "likelihood":
            loss = reduce_tokens(-log_probs * mask, mask, method.reduction)
            return loss, metrics
        if method.loss == "pairs":
            assert data.reference is not None
            log_ratios = ((log_probs - data.reference) * mask).sum(dim=1)
            chosen, rejected = log_ratios[0::2], log_ratios[1::2]
            metrics["margin"] = (chosen - rejected).detach().mean()
            metrics["accuracy"] = (chosen > rejected).float().mean()
            return direct_preference(chosen, rejected, options.beta).mean(), metrics
        assert data.advantages is not None
        proximal = log_probs.detach() if data.proximal is None else data.proximal
        weights = mask.to(log_probs.dtype)
        if data.behavior is not None:
            log_ratios = proximal - data.behavior
            weights = importance_weights(
                log_ratios,
                mask,
                correction=options.correction,
                level=options.correction_level,
                low=options.low,
                high=options.high,
            )
            metrics["weight"] = weights[mask].mean()
            metrics["effective_share"] = effective_sample_size(weights, mask)
            metrics["kl_behavior"] = -log_ratios[mask].mean()
        low = method.clip_low if options.clip_low is None else options.clip_low
        high = method.clip_high if options.clip_high is None else options.clip_high
        losses = token_surrogate(
            log_probs,
            proximal,
            data.advantages,
            mask,
            level=method.level,
            clip_low=low,
            clip_high=high,
        )
        metrics["ratio_max"] = (log_probs.detach() - proximal)[mask].exp().max()
        if data.reference is not None:
            divergence = kl_penalty(log_probs, data.reference, mask, options.kl_estimator)
            losses = losses + options.kl_coef * divergence
            metrics["kl_reference"] = divergence.detach()[mask].mean()
        # The KL divergence is an expectation over pi, so it gets importance weights as well.
        loss = reduce_tokens(losses * weights, mask, method.reduction, self._max_tokens)
        if data.targets is not None:
            assert forward.values is not None
            errors = value_loss(forward.values, data.targets)
            value_error = reduce_tokens(errors * mask, mask, "token_mean")
            metrics["value_loss"] = value_error.detach()
            loss = loss + options.value_coef * value_error
        return loss, metrics

    def _forward(self, model: Any, data: _Data) -> _Forward:
        """Return log-probs and values [B, T] of the tokens, 0 outside of the mask."""
        needs_values = self._value_head is not None and model is self._model
        output = model(
            input_ids=data.ids,
            attention_mask=data.inside.long(),
            output_hidden_states=needs_values,
            use_cache=False,
        )
        # Position t - 1 predicts token t. Only tokens in the mask get log-probs, to save memory.
        logits = output.logits[:, :-1][data.mask[:, 1:]].float()
        all_log_probs = torch.log_softmax(logits, dim=-1)
        taken = all_log_probs.gather(1, data.ids[data.mask][:, None])[:, 0]
        log_probs = torch.zeros(data.mask.shape, dtype=taken.dtype, device=taken.device)
        log_probs = log_probs.masked_scatter(data.mask, taken)
        entropy = -(all_log_probs.detach().exp() * all_log_probs.detach()).sum(dim=1).mean()
        values = None
        if needs_values:
            assert self._value_head is not None
            hidden = output.hidden_states[-1][:, :-1][data.mask[:, 1:]]
            found = self._value_head(hidden)[:, 0]
            values = torch.zeros_like(log_probs).masked_scatter(data.mask, found)
        return _Forward(log_probs, entropy, values)

    def _split(self, num: int) -> Iterator[slice]:
        """Yield the rows of each gradient step; sizes differ by at most one sequence or pair."""
        unit = 2 if self.method.loss == "pairs" else 1
        parts = min(self.options.minibatches, num // unit)
        edges = [num // unit * i // parts * unit for i in range(parts + 1)] if parts else []
        for start, stop in pairwise(edges):
            yield slice(start, stop)

    def _check_ids(self, batch: TokenBatch[Array]) -> None:
        largest = int(batch.token_ids.max()) if batch.token_ids.size else 0
        if largest >= self._vocabulary:
            raise SchemaMismatchError(
                f"model: found token id {largest}, expected ids below {self._vocabulary}, the "
                "model's vocabulary size. Use a model with the tokenizer of the sequences.",
                parameter="model",
            )


@dataclass
class _Data:
    """A batch: [B, T] each, advantages also [B]; None where the method does not need it."""

    ids: torch.Tensor
    inside: torch.Tensor
    mask: torch.Tensor
    behavior: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    targets: torch.Tensor | None = None

    def select(self, rows: slice | torch.Tensor) -> _Data:
        parts = {name: None if one is None else one[rows] for name, one in vars(self).items()}
        return _Data(**parts)  # type: ignore[arg-type]


def _find_pairs(returns: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the row of the best, then of the worst sequence of each group with unequal returns."""
    rows: list[int] = []
    for group in torch.unique(groups[groups >= 0]):
        (members,) = torch.nonzero(groups == group, as_tuple=True)
        best = members[returns[members].argmax()]
        worst = members[returns[members].argmin()]
        if returns[best] > returns[worst]:
            rows += [int(best), int(worst)]
    return torch.tensor(rows, dtype=torch.long, device=returns.device)


@dataclass
class _Forward:
    log_probs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor | None
