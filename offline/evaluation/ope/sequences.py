"""Off-policy evaluation of a language model, from token sequences that other policies sampled.

An episode's weight is the product over its sampled tokens of the model's probability by that of the
behavior policy. It is unbiased, and its spread grows exponentially with the number of tokens:
for a KL divergence of d nats a token, an episode of T tokens has about exp(-d T) of an effective
episode. So the estimate is refused where few effective episodes are left.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import EmptyReplayError, SchemaMismatchError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.group_views import GROUP_ID
from replaylake.datastore.replay.tokens.sequence_images import SequenceImages
from replaylake.datastore.replay.tokens.token_view import TokenSequences
from replaylake.offline.evaluation.intervals import student_t_quantile
from replaylake.offline.evaluation.ope.evaluation_request import ProgressCallbacks
from replaylake.offline.evaluation.ope.verdict import (
    FEW_EFFECTIVE,
    MEAN_WEIGHT_Z,
    MIN_EFFECTIVE,
    NOT_SUPPORTED,
    SUPPORTED,
    WEAK,
    Verdict,
)
from replaylake.offline.language.pretrained import ORIGIN, ModelFolder, check_model_folder
from replaylake.offline.language.token_scorer import TokenScorer

# Of a forward pass, 512 MiB in float32; longer sequences go one by one.
_MAX_LOGITS: Final = 2**27
# Of the mean weight: float32 log-probs of some thousand tokens.
_ROUNDING: Final = 1e-3


@dataclass(frozen=True, eq=False)
class WeightedEpisodes:
    """E episodes with what the estimate needs of each.

    log_weights: float64 [E], the sum of log-ratios over its tokens; num_tokens int64 [E]; returns
    float64 [E]; tasks int64 [E], equal for samples of one task.
    """

    log_weights: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    returns: NDArray[np.float64]
    tasks: NDArray[np.int64]


@dataclass(frozen=True)
class SequenceEstimate:
    """What sequences say of a model.

    value: self-normalized, sum of weights times returns by sum of weights, with its interval, and
    its difference from log_mean; all None where the verdict is `not_supported`. effective_size:
    (sum w)^2 / sum w^2, in episodes. max_weight_share: of the largest weight. mean_weight: 1 is
    expected; mean_weight_z its distance from 1 in standard errors. kl: mean log-ratio of the
    behavior policy to the model in nats a token, estimated by the behavior policy's tokens.
    """

    value: float | None
    low: float | None
    high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    log_mean: float
    num_episodes: int
    num_tasks: int
    mean_tokens: float
    effective_size: float
    max_weight_share: float
    mean_weight: float
    mean_weight_z: float
    kl: float
    assessment: Verdict


@dataclass(frozen=True)
class SequenceReport:
    """A saved or printed answer. left_out: episodes that do not count, by reason."""

    dataset: str
    version: int
    model: str
    model_sha256: str
    where: str | None
    level: float
    estimate: SequenceEstimate
    left_out: Mapping[str, int]

    @property
    def verdict(self) -> str:
        return self.estimate.assessment.verdict.replace("_", " ")

    def to_json(self) -> dict[str, Any]:
        one = self.estimate
        weights = {
            key: value
            for key, value in asdict(one).items()
            if key in ("effective_size", "max_weight_share", "mean_weight", "mean_weight_z", "kl")
        }
        estimates = []
        if one.value is not None:
            estimates = [
                {
                    "estimator": "sequence_snis",
                    "value": one.value,
                    "ci_low": one.low,
                    "ci_high": one.high,
                    "difference": one.difference,
                    "difference_low": one.difference_low,
                    "difference_high": one.difference_high,
                }
            ]
        return {
            "dataset": self.dataset,
            "version": self.version,
            "policy": None,
            "policy_version": None,
            "model": self.model,
            "model_sha256": self.model_sha256,
            "where": self.where,
            "level": self.level,
            "estimates": estimates,
            "log_mean": one.log_mean,
            "num_episodes": one.num_episodes,
            "num_tasks": one.num_tasks,
            "mean_tokens": one.mean_tokens,
            "sequence_weights": weights,
            "left_out": dict(self.left_out),
            "verdict": self.verdict,
            "reason": one.assessment.reason,
        }


def evaluate_sequences(
    lake: Lake,
    dataset: str,
    model: str,
    *,
    where: str | None = None,
    level: float = 0.95,
    device: str = "cpu",
    callbacks: ProgressCallbacks | None = None,
) -> SequenceReport:
    """Estimate the mean return of a causal language model from stored token sequences.

    Args:
        lake: the lake.
        dataset: name of the dataset, at a version or tag. It needs token columns, and log-probs of
            the behavior policy as it sampled: with its temperature.
        model: directory that transformers wrote. It is taken to sample at temperature 1. A model
            that takes images is given those of the messages.
        where: condition over episodes that selects whole episodes.
        level: of intervals.
        device: a torch device.
        callbacks: told how far it is, in sequences.

    Raises: NotFoundError for the dataset, its token columns or the model; SourceInvalidError for
    the model, or an image; SchemaMismatchError for sequences without log-probs, or that the model
    cannot read; ShardCorruptError for an image without bytes;
    EmptyReplayError without an episode that counts; QueryError, QueryRefusedError,
    ExtraMissingError. Cost: one forward pass over all tokens; in memory, beside the model, the
    logits of one sequence, or of several up to 512 MiB.
    """
    callbacks = callbacks or ProgressCallbacks()
    folder = check_model_folder(model)
    snapshot = lake.snapshot(dataset)
    callbacks.stage("reading the sequences")
    sequences = snapshot.token_sequences(where)
    if not sequences.has_log_probs:
        raise SchemaMismatchError(
            f"off-policy evaluation of {sequences.name}: found sequences without log-probs of the "
            "behavior policy, expected action_log_probs, which weights are made from. Record them."
        )
    scorer = TokenScorer(folder, device=device)
    callbacks.stage("computing log-probs")
    ratios, counts = _sum_log_ratios(snapshot, sequences, scorer, callbacks)
    episodes, left_out = _join_episodes(snapshot, sequences, ratios, counts)
    estimate = estimate_sequences(episodes, level)
    if estimate.assessment.verdict != NOT_SUPPORTED and snapshot.dataset in _list_training(folder):
        reason = (
            f"The model was trained on {snapshot.dataset}: its estimate may be overfitted. "
            "Evaluate it on samples of other tasks."
        )
        estimate = replace(estimate, assessment=Verdict(WEAK, reason))
    return SequenceReport(
        snapshot.dataset,
        snapshot.version,
        folder.path.name,
        folder.sha256,
        where,
        level,
        estimate,
        left_out,
    )


def _list_training(folder: ModelFolder) -> list[str]:
    """Return the datasets that a model was trained on, as far as its directory says."""
    try:
        origin = json.loads((folder.path / ORIGIN).read_bytes())
        return [str(one["dataset"]) for one in origin["datasets"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _sum_log_ratios(
    snapshot: Snapshot,
    sequences: TokenSequences,
    scorer: TokenScorer,
    callbacks: ProgressCallbacks,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return of each sequence the sum of log-ratios, NaN where one is unknown, and its tokens."""
    lengths = np.asarray(sequences.table["num_tokens"])
    # Of similar length together, so that little is padded.
    order = np.argsort(lengths, kind="stable")
    sums, counts = np.zeros(len(order)), np.zeros(len(order), np.int64)
    processor, images = scorer.image_processor, None
    start, limit = 0, _MAX_LOGITS // scorer.vocabulary
    with contextlib.ExitStack() as stack:
        if processor is not None:
            images = stack.enter_context(SequenceImages(snapshot.table, sequences.table, order))
        while start < len(order):
            stop = start + 1
            while stop < len(order) and lengths[order[stop]] * (stop + 1 - start) <= limit:
                stop += 1
            rows = order[start:stop]
            batch = sequences.gather(rows, is_packed=False, versions=False)
            assert batch.log_probs is not None, "the sequences have log-probs"
            mask = np.array(batch.loss_mask, bool)
            mask[:, 0] = False
            inputs = None
            if processor is not None and images is not None:
                inputs = processor.prepare(images.read_sequences(rows))
            log_probs = scorer.compute_log_probs(batch, inputs)
            ratios = log_probs - np.asarray(batch.log_probs, np.float64)
            sums[rows] = np.where(mask, ratios, 0.0).sum(axis=1)
            counts[rows] = mask.sum(axis=1)
            start = stop
            callbacks.progress(start, len(order))
    return sums, counts


def _join_episodes(
    snapshot: Snapshot,
    sequences: TokenSequences,
    ratios: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> tuple[WeightedEpisodes, dict[str, int]]:
    """Add up the branches of each episode: their shared tokens count in one of them alone.

    Raises: EmptyReplayError.
    """
    table = sequences.table
    ids = np.array(table["episode_id"].to_pylist(), object)
    names, first, places = np.unique(ids, return_index=True, return_inverse=True)
    weights = np.zeros(len(names))
    np.add.at(weights, places, ratios)
    tokens = np.bincount(places, weights=counts, minlength=len(names)).astype(np.int64)
    returns = np.array(table["episode_return"].to_pylist(), np.float64)[first]
    groups = np.array(table[GROUP_ID].to_pylist(), object)[first]
    # An episode without a task is one of its own.
    labels = [
        f"g{group}" if group is not None else f"e{name}"
        for group, name in zip(groups, names, strict=True)
    ]
    tasks = np.unique(np.array(labels, object), return_inverse=True)[1].astype(np.int64)
    faults = {
        "without log-probs": np.isnan(weights),
        "with an unknown reward": np.isnan(returns),
        "without a sampled token": tokens == 0,
    }
    usable = np.ones(len(names), np.bool_)
    left_out = {}
    for reason, flags in faults.items():
        if num := int((usable & flags).sum()):
            left_out[reason] = num
        usable &= ~flags
    if usable.sum() < 2:
        drops = ", ".join(f"{num:,} {reason}" for reason, num in left_out.items()) or "none"
        raise EmptyReplayError(
            f"off-policy evaluation of {snapshot.dataset}@{snapshot.version}: found "
            f"{usable.sum()} episodes that count (left out: {drops}), expected two or more."
        )
    return (
        WeightedEpisodes(weights[usable], tokens[usable], returns[usable], tasks[usable]),
        left_out,
    )


def estimate_sequences(episodes: WeightedEpisodes, level: float = 0.95) -> SequenceEstimate:
    """Estimate the mean return by self-normalized importance sampling of whole episodes.

    Intervals are Student's over tasks, by the influence of each (the delta method). Source: Owen
    2013, "Monte Carlo theory, methods and examples", sections 9.2 and 9.3.
    """
    returns, num = episodes.returns, len(episodes.returns)
    # A common factor leaves all but the mean weight as it is.
    largest = float(episodes.log_weights.max())
    scaled = np.exp(episodes.log_weights - largest)
    total = float(scaled.sum())
    size = total**2 / float(np.square(scaled).sum())
    with np.errstate(over="ignore", under="ignore"):
        mean_weight = total / num * float(np.exp(largest))
        gap = total / num - float(np.exp(-largest))
    error = float(scaled.std(ddof=1)) / math.sqrt(num)
    # On a policy's own log the weights are 1 but for the rounding of log-probs.
    deviation = 0.0
    if abs(mean_weight - 1) > _ROUNDING:
        deviation = gap / error if error > 0 else math.copysign(math.inf, gap)
    num_tasks = len(np.unique(episodes.tasks))
    mean_tokens = float(episodes.num_tokens.mean())
    assessment = _judge(size, num, mean_tokens, mean_weight, deviation, num_tasks)
    value = ends = difference = difference_ends = None
    log_mean = float(returns.mean())
    if assessment.verdict != NOT_SUPPORTED:
        value = float((scaled * returns).sum()) / total
        influence = num * scaled / total * (returns - value)
        ends = _interval(value, influence, episodes.tasks, level)
        difference = value - log_mean
        centered = influence - (returns - log_mean)
        difference_ends = _interval(difference, centered, episodes.tasks, level)
    low, high = ends or (None, None)
    difference_low, difference_high = difference_ends or (None, None)
    return SequenceEstimate(
        value=value,
        low=low,
        high=high,
        difference=difference,
        difference_low=difference_low,
        difference_high=difference_high,
        log_mean=log_mean,
        num_episodes=num,
        num_tasks=num_tasks,
        mean_tokens=mean_tokens,
        effective_size=size,
        max_weight_share=float(scaled.max()) / total,
        mean_weight=mean_weight,
        mean_weight_z=deviation,
        kl=-float(episodes.log_weights.sum()) / float(episodes.num_tokens.sum()),
        assessment=assessment,
    )


def _judge(
    size: float,
    num: int,
    mean_tokens: float,
    mean_weight: float,
    deviation: float,
    num_tasks: int,
) -> Verdict:
    found = (
        f"Weights of whole sequences leave an effective {size:,.1f} of {num:,} episodes, of "
        f"{mean_tokens:,.1f} sampled tokens on average"
    )
    # Of 100 episodes whose weights are 1 but for rounding, 99.9999999 are effective.
    if round(size, 1) < MIN_EFFECTIVE:
        return Verdict(
            NOT_SUPPORTED,
            f"{found} ({MIN_EFFECTIVE:.0f} needed): the spread of a product grows with each token. "
            "Sample with the model itself, or evaluate a model that is closer to the behavior "
            "policy.",
        )
    if round(size, 1) < FEW_EFFECTIVE:
        return Verdict(WEAK, f"{found} ({FEW_EFFECTIVE:.0f} needed).")
    if num_tasks < MIN_EFFECTIVE:
        return Verdict(WEAK, f"{num_tasks:,} tasks are few ({MIN_EFFECTIVE:.0f} needed).")
    if abs(deviation) > MEAN_WEIGHT_Z:
        return Verdict(
            WEAK,
            f"The mean weight is {mean_weight:.6g}, {abs(deviation):.1f} standard errors from 1: "
            "the log-probs are not those that the tokens were sampled by, for example of another "
            "temperature, or the model samples what the log lacks.",
        )
    return Verdict(SUPPORTED, f"{found}.")


def _interval(
    value: float, influence: Array, tasks: NDArray[np.int64], level: float
) -> tuple[float, float] | None:
    """Return the interval of a mean of influences [E] that belong together by task."""
    _, places = np.unique(tasks, return_inverse=True)
    sums = np.bincount(places, weights=influence)
    num = len(sums)
    if num < 2:
        return None
    spread = float(np.square(sums - sums.mean()).sum()) * num / (num - 1)
    half = student_t_quantile((1 + level) / 2, num - 1) * math.sqrt(spread) / len(influence)
    return value - half, value + half
