"""TokenLearner: training of a causal language model on stored token sequences, on or off policy.

Each method is a choice of advantages, of the level of the ratio, and of the mean over tokens
(METHODS). Tokens of other policies get importance weights from their recorded log-probs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import torch

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, SchemaMismatchError
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.datastore.replay.tokens.token_batch import TokenBatch
from replaylake.offline.language.images import (
    ImageInputs,
    ImageProcessor,
    image_arguments,
    naming_images,
)
from replaylake.offline.language.pretrained import (
    ModelFolder,
    Task,
    add_adapter,
    has_images,
    load_pretrained,
    merge_adapter,
    save_pretrained,
)
from replaylake.offline.learning.adam import FusedAdam
from replaylake.offline.learning.options import check_keys, expect, from_options
from replaylake.offline.learning.process_group import SINGLE_PROCESS, ProcessGroup
from replaylake.offline.learning.state import pack_state, unpack_state
from replaylake.offline.losses.policy_gradient import value_loss
from replaylake.offline.losses.preference import (
    bradley_terry,
    direct_preference,
    identity_preference,
    kahneman_tversky,
)
from replaylake.offline.losses.returns import generalized_advantages
from replaylake.offline.losses.token_policy_gradient import (
    Baseline,
    Correction,
    Estimator,
    Level,
    Reduction,
    group_advantages,
    importance_weights,
    kl_penalty,
    reduce_tokens,
    token_surrogate,
)

# All metrics of gradient steps, in the order in which processes exchange them.
_METRICS: Final = (
    "loss",
    "entropy",
    "margin",
    "accuracy",
    "score",
    "kl_mismatched",
    "weight",
    "weight_square",
    "kl_behavior",
    "kl_reference",
    "value_loss",
    "ratio_max",
)
# Of which the entropy is computed at once: it takes two copies of their logits.
_ENTROPY_ROWS: Final = 256

Loss = Literal[
    "likelihood",
    "direct_preference",
    "identity_preference",
    "kahneman_tversky",
    "bradley_terry",
    "policy_gradient",
]
_PAIRED: Final = ("direct_preference", "identity_preference", "bradley_terry")
_RELATIVE: Final = ("direct_preference", "identity_preference", "kahneman_tversky")


@dataclass(frozen=True)
class TokenMethod:
    """The definition of a method.

    loss: `likelihood`, `policy_gradient`, or a function of losses/preference.py. baseline: of the
    advantages; None: a value head. level: of the ratio. clip_low, clip_high: defaults of the
    options. needs_groups: batches contain all sequences of a group.
    """

    summary: str
    loss: Loss
    baseline: Baseline | None = None
    level: Level = "token"
    reduction: Reduction = "sequence_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    needs_groups: bool = True

    @property
    def has_pairs(self) -> bool:
        """Whether the loss compares the best and the worst sequence of each group."""
        return self.loss in _PAIRED

    @property
    def is_relative(self) -> bool:
        """Whether the loss is defined relative to a reference model."""
        return self.loss in _RELATIVE

    def needs_reference(self, options: TokenOptions) -> bool:
        """Whether the divergence from a reference model is part of the loss."""
        return bool(options.kl_coef) or self.is_relative

    @property
    def is_reward_model(self) -> bool:
        """Whether the model is trained to score sequences instead of to generate them."""
        return self.loss == "bradley_terry"


METHODS: Final[Mapping[str, TokenMethod]] = {
    "sft": TokenMethod(
        "supervised: maximizes the likelihood of the tokens",
        "likelihood",
        reduction="token_mean",
        needs_groups=False,
    ),
    "dpo": TokenMethod(
        "best against worst sequence of a group (Rafailov et al. 2023)",
        "direct_preference",
    ),
    "ipo": TokenMethod(
        "best against worst sequence of a group, by a margin (Azar et al. 2023)",
        "identity_preference",
    ),
    "kto": TokenMethod(
        "sequences labeled by their return, without pairs (Ethayarajh et al. 2024)",
        "kahneman_tversky",
        needs_groups=False,
    ),
    "reward": TokenMethod(
        "reward model that scores the best of a group above the worst (Bradley & Terry 1952)",
        "bradley_terry",
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
    correction_level None: the level of the method's ratio. clip_low, clip_high: clipping of the
    ratio to the policy before the update; None: the method's default. kl_coef: weight of the KL
    divergence from the reference model. epochs: passes over each batch, each in `minibatches`
    gradient steps; micro_batch_size: sequences of a step that are in memory at once; None: all.
    lora_rank: of a LoRA adapter, which is trained instead of the model; None: the model is trained.
    lora_alpha, lora_targets: see add_adapter; lora_merge: the output is the model with the adapter
    merged into it, not the adapter alone.
    beta: of `dpo`, `ipo` and `kto`. desirable_threshold: return above which a sequence is desirable
    in `kto`; desirable_weight, undesirable_weight: weights of their losses. center_coef: of
    `reward`. discount, lambda_, value_coef, value_learning_rate: of `ppo`.
    """

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    epochs: int = 1
    minibatches: int = 1
    micro_batch_size: int | None = None
    lora_rank: int | None = None
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] | None = None
    lora_merge: bool = False
    clip_low: float | None = None
    clip_high: float | None = None
    correction: Correction = "truncate"
    correction_level: Level | None = None
    low: float = 0.5
    high: float = 2.0
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k2"
    beta: float = 0.1
    desirable_threshold: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center_coef: float = 0.0
    discount: float = 1.0
    lambda_: float = 1.0
    value_coef: float = 0.5
    value_learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in (
            "learning_rate",
            "max_gradient_norm",
            "lora_alpha",
            "high",
            "beta",
            "value_learning_rate",
        ):
            value = getattr(self, name)
            expect(value > 0, f"method: {name}", value, "more than 0")
        for name in (
            "weight_decay",
            "low",
            "kl_coef",
            "value_coef",
            "clip_low",
            "clip_high",
            "desirable_weight",
            "undesirable_weight",
            "center_coef",
        ):
            value = getattr(self, name)
            expect(value is None or value >= 0, f"method: {name}", value, "0 or more")
        for name in ("epochs", "minibatches", "micro_batch_size", "lora_rank"):
            value = getattr(self, name)
            expect(value is None or value >= 1, f"method: {name}", value, "1 or more")
        for name in ("discount", "lambda_"):
            value = getattr(self, name)
            expect(0 <= value <= 1, f"method: {name}", value, "0 to 1")
        expect(self.low <= self.high, "method: low", self.low, f"at most high, {self.high}")
        if self.lora_rank is None:
            for name in ("lora_targets", "lora_merge"):
                value = getattr(self, name)
                expect(not value, f"method: {name}", value, "lora_rank beside it")
        elif self.lora_targets is not None:
            names = self.lora_targets
            expect(bool(names), "method: lora_targets", names, "names of modules")

    @property
    def writes_adapter(self) -> bool:
        """Whether the output of training is an adapter without its model."""
        return self.lora_rank is not None and not self.lora_merge


_COMMON_OPTIONS: Final = frozenset(
    {
        "learning_rate",
        "weight_decay",
        "max_gradient_norm",
        "epochs",
        "minibatches",
        "micro_batch_size",
        "lora_rank",
        "lora_alpha",
        "lora_targets",
        "lora_merge",
    }
)
_VALUE_OPTIONS: Final = frozenset({"discount", "lambda_", "value_coef", "value_learning_rate"})
_LABEL_OPTIONS: Final = frozenset({"desirable_threshold", "desirable_weight", "undesirable_weight"})
_PREFERENCE_OPTIONS: Final = _LABEL_OPTIONS | {"beta", "center_coef"}


def read_token_options(method: str, options: Mapping[str, Any]) -> TokenOptions:
    """Return the options of a method, a key of METHODS.

    Raises: ConfigInvalidError, also for an option that the method does not use.
    """
    what = f"method {method}"
    known = {one.name for one in fields(TokenOptions)}
    used = {
        "likelihood": _COMMON_OPTIONS,
        "direct_preference": _COMMON_OPTIONS | {"beta"},
        "identity_preference": _COMMON_OPTIONS | {"beta"},
        "kahneman_tversky": _COMMON_OPTIONS | _LABEL_OPTIONS | {"beta"},
        "bradley_terry": _COMMON_OPTIONS | {"center_coef"},
        "policy_gradient": known
        - _PREFERENCE_OPTIONS
        - (_VALUE_OPTIONS if method != "ppo" else set()),
    }[METHODS[method].loss]
    check_keys(options, known, what)
    for name in options:
        if name not in used:
            raise ConfigInvalidError(
                f"{what}: found option {name!r}, which this method does not use, expected "
                f"{', '.join(sorted(used))}. Leave it out.",
                parameter=name,
            )
    return from_options(TokenOptions, options, what)


def find_weight_level(method: str, options: TokenOptions) -> Level:
    """Return of what the importance weights of a method are. Raises: ConfigInvalidError."""
    level = METHODS[method].level
    if options.correction_level == "token" and level != "token":
        # Its loss is one number a sequence: a token cannot be weighted apart from the others.
        raise ConfigInvalidError(
            f"method {method}: correction_level: found 'token', expected sequence or geometric: "
            "the ratio of this method is of whole sequences.",
            parameter="correction_level",
        )
    return options.correction_level or level


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
        reference: ModelFolder | None = None,
        seed: int = 0,
        device: str = "cpu",
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Load the model.

        Args:
            folder: the initial model.
            method: a key of METHODS.
            options: options of the method.
            max_tokens: length of the longest sequence, in tokens.
            reference: the model from which divergence is measured, of the same vocabulary; None:
                the initial one. It is loaded only if the method needs it.
            seed: of the initial weights of an adapter.
            device: a torch device.
            group: processes that make each update together: all are given the same batches, and
                each computes the gradients of its share of the sequences.

        Raises: SourceInvalidError, ExtraMissingError; ConfigInvalidError for modules that the
        model does not have; SchemaMismatchError for sequences above the model's limit.
        """
        self.method, self.options = METHODS[method], options
        self._weight_level = find_weight_level(method, options)
        self._name, self._device, self._max_tokens = method, device, max_tokens
        self._group = group
        is_reward_model = self.method.is_reward_model
        task: Task = "sequence classifier" if is_reward_model else "causal language model"
        head: dict[str, Any] = {"num_outputs": 1, "new_head": True} if is_reward_model else {}
        self._model, self._tokenizer = load_pretrained(folder, task, **head, device=device)
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if limit is not None and max_tokens > limit:
            raise SchemaMismatchError(
                f"model: {folder.path.name} takes sequences of up to {limit:,} tokens, found one "
                f"of {max_tokens:,}. Leave longer ones out with where_sequences = "
                f"'num_tokens <= {limit}'.",
                parameter="where_sequences",
            )
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self.image_processor = ImageProcessor(folder) if has_images(self._model.config) else None
        self._reference: Any = None
        self._has_reference = self.method.needs_reference(options)
        if self._has_reference and reference is not None:
            self._reference = self._load_reference(reference)
        if options.lora_rank is not None:
            self._model = add_adapter(
                self._model,
                task,
                rank=options.lora_rank,
                alpha=options.lora_alpha,
                targets=options.lora_targets,
                seed=seed,
            )
        elif self._has_reference and self._reference is None:
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

    def _load_reference(self, folder: ModelFolder) -> Any:
        """Load a reference model. Raises: as __init__; SchemaMismatchError for other ids."""
        model, _ = load_pretrained(folder, "causal language model", device=self._device)
        vocabulary = int(model.get_input_embeddings().num_embeddings)
        if vocabulary != self._vocabulary:
            raise SchemaMismatchError(
                f"reference: found a vocabulary of {vocabulary:,} in {folder.path}, expected "
                f"{self._vocabulary:,}, as the trained model has. Name an earlier version of it.",
                parameter="reference",
            )
        return model.requires_grad_(False)

    @property
    def needs_log_probs(self) -> bool:
        """Whether only tokens with a recorded log-prob are included in the loss."""
        is_weighted = self.method.loss == "policy_gradient"
        return is_weighted and self.options.correction != "none"

    def update(
        self,
        batch: TokenBatch[Array],
        episodes: Array | None = None,
        images: ImageInputs | None = None,
    ) -> dict[str, float]:
        """Update the model on a padded batch; return the metrics.

        episodes: int64 [B], equal for sequences of one episode, which count once in the mean of a
        group; None: each sequence is an episode. images: those of each sequence, from
        `image_processor`, for a model that takes images.

        Raises: SchemaMismatchError for ids outside the model's vocabulary, for images that do not
        fit the image tokens, and if the correction needs log-probs that the batch does not have.
        """
        self._check_ids(batch)
        tensors = to_torch(batch, self._device)
        data = self._prepare(tensors, episodes, images)
        totals: dict[str, float] = {}
        num = 0
        for _ in range(self.options.epochs):
            for rows in self._split(len(data.mask)):
                part = self._add_divergence(data.select(rows))
                # Without a token in the loss, a step would only apply weight decay and momentum.
                if not part.mask.any():
                    continue
                for parameter in self._parameters:
                    parameter.grad = None
                for name, value in self._accumulate_gradients(part).items():
                    totals[name] = totals.get(name, 0.0) + value
                self._optimizer.step()
                num += 1
        means = {name: total / num for name, total in totals.items()}
        means["tokens"] = float(data.mask.sum())
        if self.method.loss != "likelihood":
            means["return"] = float(tensors.episode_returns.mean())
        return means

    def state_dict(self) -> dict[str, Array]:
        """Return the state of training as named arrays, without the reference model."""
        return pack_state(
            {
                "parameters": [p.detach() for p in self._parameters],
                "optimizer": self._optimizer.state_dict(),
            }
        )

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what state_dict returned."""
        tree = unpack_state(state)
        with torch.no_grad():
            for ours, theirs in zip(self._parameters, tree["parameters"], strict=True):
                ours.copy_(theirs)
        self._optimizer.load_state_dict(tree["optimizer"])

    def save(self, folder: Path) -> None:
        """Write the model, or its adapter in peft's format, and its tokenizer, with safetensors."""
        model = merge_adapter(self._model) if self.options.lora_merge else self._model
        save_pretrained(model, self._tokenizer, folder)
        if self.image_processor is not None:
            self.image_processor.save(folder)

    def _accumulate_gradients(self, data: _Data) -> dict[str, float]:
        """Add the gradient of a step, some sequences at a time; return its metrics."""
        totals: dict[str, float] = {}
        num_tokens = int(data.mask.sum())
        for rows in self._split_rows(len(data.mask)):
            part = data.select(rows)
            if not part.mask.any():
                continue
            loss, metrics = self._loss(part, data.mask)
            loss.backward()  # type: ignore[no-untyped-call]
            totals["loss"] = totals.get("loss", 0.0) + float(loss.detach())
            share = int(part.mask.sum()) / num_tokens
            for name, value in metrics.items():
                if name == "ratio_max":
                    totals[name] = max(totals.get(name, 0.0), float(value))
                else:
                    totals[name] = totals.get(name, 0.0) + share * float(value)
        totals = self._exchange(totals)
        if (square := totals.pop("weight_square", None)) is not None:
            # Kong 1992, "A note on importance sampling using standardized weights".
            totals["effective_share"] = totals["weight"] ** 2 / square if square else 0.0
        return totals

    def _exchange(self, totals: dict[str, float]) -> dict[str, float]:
        """Add up the gradients of all processes, in place; return their metrics."""
        size = self._group.size
        if size == 1:
            return totals
        # A process whose share has no tokens has neither gradients nor metrics.
        has_gradient = [p.grad is not None for p in self._parameters]
        metrics = torch.zeros(2, len(_METRICS))
        for name, value in totals.items():
            metrics[:, _METRICS.index(name)] = torch.tensor([value, 1.0])
        largest = torch.zeros(size)
        largest[self._group.rank] = totals.get("ratio_max", 0.0)
        parts = [
            *(torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters),
            torch.tensor(has_gradient, dtype=torch.float32),
            metrics,
            largest,
        ]
        shared = torch.cat([one.detach().flatten().to(self._device) for one in parts])
        self._group.all_reduce(shared)
        sizes = [one.numel() for one in parts]
        summed = [
            one.view(part.shape)
            for one, part in zip(torch.split(shared, sizes), parts, strict=True)
        ]
        for parameter, gradient, num in zip(
            self._parameters, summed, summed[-3].tolist(), strict=False
        ):
            parameter.grad = gradient if num else None
        values, counts = summed[-2].tolist()
        found = {
            name: value for name, value, num in zip(_METRICS, values, counts, strict=True) if num
        }
        if "ratio_max" in found:
            found["ratio_max"] = float(summed[-1].max())
        return found

    def _prepare(
        self,
        batch: TokenBatch[torch.Tensor],
        episodes: Array | None,
        images: ImageInputs | None = None,
    ) -> _Data:
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
            images=images,
        )
        if self.method.loss == "likelihood":
            return data
        if self.method.has_pairs:
            data = data.select(_find_pairs(batch.episode_returns, batch.groups))
        if self.method.loss == "kahneman_tversky":
            data.is_desirable = batch.episode_returns > options.desirable_threshold
            data.mismatched = self._mismatch(data)
        if self.method.is_relative and len(data.mask):
            data.reference = self._evaluate_reference(data)
        if self.method.loss != "policy_gradient":
            return data
        is_one_step = options.epochs == options.minibatches == 1
        values = None
        if not is_one_step or self._value_head is not None:
            forward = self._evaluate(self._model, data)
            values = forward.values
            data.proximal = None if is_one_step else forward.log_probs
        if self._has_reference:
            data.reference = self._evaluate_reference(data)
        if values is not None:
            data.values = values
            self._add_generalized_advantages(data, batch.episode_returns)
        else:
            assert self.method.baseline is not None
            data.advantages = group_advantages(
                batch.episode_returns,
                batch.groups,
                self.method.baseline,
                None if episodes is None else torch.from_numpy(episodes).to(mask.device),
            )
        return data

    def _mismatch(self, data: _Data) -> _Data:
        """Return each sequence's prompt with the completion of the sequence before it.

        What follows the prompt begins at the first token in the mask. Sequences are cut to the
        model's limit.
        """
        starts, ends = data.mask.int().argmax(dim=1), data.inside.sum(dim=1)
        ids, masks = [], []
        for row in range(len(data.mask)):
            start, before = int(starts[row]), row - 1
            other = slice(int(starts[before]), int(ends[before]))
            ids.append(torch.cat([data.ids[row, :start], data.ids[before, other]]))
            own = torch.zeros(start, dtype=torch.bool, device=data.mask.device)
            masks.append(torch.cat([own, data.mask[before, other]]))
        pad = torch.nn.utils.rnn.pad_sequence
        limit = getattr(self._model.config, "max_position_embeddings", None)
        lengths = torch.tensor([len(one) for one in ids], device=data.mask.device)
        padded = pad(ids, batch_first=True)[:, :limit]
        found = _Data(
            ids=padded,
            inside=torch.arange(padded.shape[1], device=padded.device) < lengths[:, None],
            mask=pad(masks, batch_first=True)[:, :limit],
            images=data.images,
        )
        # A sequence without a token in the mask has no prompt that could precede the other.
        found.mask[:, 0] = False
        found.reference = self._evaluate_reference(found)
        return found

    def _add_divergence(self, data: _Data) -> _Data:
        """Add the KL divergence of a step's sequences from the reference, where it is needed.

        It is estimated from mismatched sequences, one number for all sequences of the step.
        """
        if data.mismatched is None:
            return data
        other = data.mismatched
        assert other.reference is not None
        log_ratios = self._evaluate(self._model, other).log_probs - other.reference
        divergence = (log_ratios * other.mask).sum(dim=1).mean().clamp(min=0)
        return replace(data, divergence=divergence.expand(len(data.mask)))

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

    def _evaluate_reference(self, data: _Data) -> torch.Tensor:
        """Return the log-probs of the reference model, float [B, T]."""
        if self._reference is not None:
            return self._evaluate(self._reference, data).log_probs
        with self._model.disable_adapter():
            return self._evaluate(self._model, data).log_probs

    @torch.no_grad()
    def _evaluate(self, model: Any, data: _Data) -> _Evaluation:
        """Return log-probs and values [B, T] without a gradient, some sequences at a time."""
        shape = data.mask.shape
        log_probs = torch.zeros(shape, device=data.mask.device)
        has_values = self._value_head is not None and model is self._model
        values = torch.zeros_like(log_probs) if has_values else None
        for rows in self._split_rows(len(data.mask)):
            part = self._forward(model, data.select(rows))
            log_probs[rows] = part.log_probs
            if values is not None:
                assert part.values is not None
                values[rows] = part.values
        # Each process has evaluated its share.
        self._group.all_reduce(log_probs)
        if values is not None:
            self._group.all_reduce(values)
        return _Evaluation(log_probs, values)

    def _loss(
        self, data: _Data, whole: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the share of a part of a step in its loss, and the part's metrics.

        whole: the mask of the step.
        """
        options, method, mask = self.options, self.method, data.mask
        if method.is_reward_model:
            return self._score_loss(data, len(whole) // 2)
        forward = self._forward(self._model, data)
        log_probs = forward.log_probs
        metrics = {"entropy": forward.entropy}
        if method.loss == "likelihood":
            loss = reduce_tokens(-log_probs * mask, mask, method.reduction, whole=whole)
            return loss, metrics
        if method.is_relative:
            return self._relative_loss(data, log_probs, len(whole), metrics)
        assert data.advantages is not None
        proximal = log_probs.detach() if data.proximal is None else data.proximal
        weights = mask.to(log_probs.dtype)
        if data.behavior is not None:
            log_ratios = proximal - data.behavior
            weights = importance_weights(
                log_ratios,
                mask,
                correction=options.correction,
                level=self._weight_level,
                low=options.low,
                high=options.high,
            )
            metrics["weight"] = weights[mask].mean()
            metrics["weight_square"] = weights[mask].square().mean()
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
        loss = reduce_tokens(losses * weights, mask, method.reduction, self._max_tokens, whole)
        if data.targets is not None:
            assert forward.values is not None
            errors = value_loss(forward.values, data.targets)
            metrics["value_loss"] = reduce_tokens(errors.detach() * mask, mask, "token_mean")
            value_error = reduce_tokens(errors * mask, mask, "token_mean", whole=whole)
            loss = loss + options.value_coef * value_error
        return loss, metrics

    def _relative_loss(
        self,
        data: _Data,
        log_probs: torch.Tensor,
        num: int,
        metrics: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the share in the loss of a step of `num` sequences, relative to the reference."""
        assert data.reference is not None
        options = self.options
        log_ratios = ((log_probs - data.reference) * data.mask).sum(dim=1)
        if self.method.loss == "kahneman_tversky":
            assert data.is_desirable is not None
            assert data.divergence is not None
            losses = kahneman_tversky(
                log_ratios,
                data.is_desirable,
                data.divergence,
                options.beta,
                desirable_weight=options.desirable_weight,
                undesirable_weight=options.undesirable_weight,
            )
            metrics["kl_mismatched"] = data.divergence.mean()
            metrics["accuracy"] = (
                ((log_ratios > data.divergence) == data.is_desirable).float().mean()
            )
            return losses.sum() / num, metrics
        if self.method.loss == "identity_preference":
            log_ratios = log_ratios / data.mask.sum(dim=1).clamp(min=1)
        chosen, rejected = log_ratios[0::2], log_ratios[1::2]
        metrics |= _compare_pairs(chosen, rejected)
        is_direct = self.method.loss == "direct_preference"
        loss = direct_preference if is_direct else identity_preference
        return loss(chosen, rejected, options.beta).sum() / (num // 2), metrics

    def _score_loss(
        self, data: _Data, num_pairs: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the share of a reward model's pairs in the loss of a step."""
        scores = self._score(data)
        chosen, rejected = scores[0::2], scores[1::2]
        losses = bradley_terry(chosen, rejected, self.options.center_coef)
        metrics = {"score": scores.detach().mean(), **_compare_pairs(chosen, rejected)}
        return losses.sum() / num_pairs, metrics

    def _score(self, data: _Data) -> torch.Tensor:
        """Return the reward model's score of each whole sequence, [B]."""
        pad = self._model.config.pad_token_id
        if pad is not None:
            ids = torch.where(data.inside, data.ids, pad)
            mask = data.inside.long()
            scores: torch.Tensor = self._model(
                input_ids=ids, attention_mask=mask, use_cache=False
            ).logits
            return scores[:, 0]
        # Without a padding token, the model takes the score at the last position of one sequence.
        lengths = data.inside.sum(dim=1).tolist()
        rows = [ids[None, :length] for ids, length in zip(data.ids, lengths, strict=True)]
        found = [self._model(input_ids=ids, use_cache=False).logits[0, 0] for ids in rows]
        return torch.stack(found)

    def _forward(self, model: Any, data: _Data) -> _Forward:
        """Return log-probs and values [B, T] of the tokens, 0 outside of the mask."""
        needs_values = self._value_head is not None and model is self._model
        arguments = {} if data.images is None else image_arguments(model, data.ids, data.images)
        with naming_images(data.images):
            output = model(
                input_ids=data.ids,
                attention_mask=data.inside.long(),
                output_hidden_states=needs_values,
                use_cache=False,
                **arguments,
            )
        # Position t - 1 predicts token t. Only tokens in the mask get log-probs, to save memory.
        logits = output.logits[:, :-1][data.mask[:, 1:]].float()
        taken = logits.gather(1, data.ids[data.mask][:, None])[:, 0] - logits.logsumexp(dim=-1)
        log_probs = torch.zeros(data.mask.shape, dtype=taken.dtype, device=taken.device)
        log_probs = log_probs.masked_scatter(data.mask, taken)
        values = None
        if needs_values:
            assert self._value_head is not None
            # Detached: errors of the values would move the policy, which has the same layers.
            hidden = output.hidden_states[-1][:, :-1][data.mask[:, 1:]].detach()
            found = self._value_head(hidden)[:, 0]
            values = torch.zeros_like(log_probs).masked_scatter(data.mask, found)
        return _Forward(log_probs, _mean_entropy(logits.detach()), values)

    def _split_rows(self, num: int) -> Iterator[slice]:
        """Yield the rows of the parts of this process's share of `num` rows; pairs are whole."""
        unit, size = 2 if self.method.has_pairs else 1, self.options.micro_batch_size
        first, last = (
            num // unit * place // self._group.size * unit
            for place in (self._group.rank, self._group.rank + 1)
        )
        step = max(last - first, 1) if size is None else max(1, size // unit) * unit
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))

    def _split(self, num: int) -> Iterator[slice]:
        """Yield the rows of each gradient step; sizes differ by at most one sequence or pair."""
        unit = 2 if self.method.has_pairs else 1
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
    """A batch: [B, T] each, advantages also [B]; None where the method does not need it.

    is_desirable bool [B], divergence [B]; mismatched: other sequences, one for each, whose width
    may differ.
    """

    ids: torch.Tensor
    inside: torch.Tensor
    mask: torch.Tensor
    behavior: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    images: ImageInputs | None = None
    is_desirable: torch.Tensor | None = None
    divergence: torch.Tensor | None = None
    mismatched: _Data | None = None

    def select(self, rows: slice | torch.Tensor) -> _Data:
        parts: dict[str, Any] = {}
        for name, one in vars(self).items():
            if one is not None:
                is_whole = isinstance(one, _Data | ImageInputs)
                parts[name] = one.select(rows) if is_whole else one[rows]
        return _Data(**parts)


def _mean_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean entropy of rows of logits [N, V], in nats; some rows at a time."""
    total = torch.zeros((), device=logits.device)
    for rows in torch.split(logits, _ENTROPY_ROWS):
        log_probs = torch.log_softmax(rows, dim=-1)
        total = total - (log_probs.exp() * log_probs).sum()
    return total / max(len(logits), 1)


def _compare_pairs(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "margin": (chosen - rejected).detach().mean(),
        "accuracy": (chosen > rejected).float().mean(),
    }


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


@dataclass
class _Evaluation:
    log_probs: torch.Tensor
    values: torch.Tensor | None
