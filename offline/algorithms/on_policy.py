"""On-policy: what algorithms have in common that learn once from what their own policy just did.

Each estimates advantages and value targets of a batch's sequences before the first step on it. Then
single steps, without the sequences' padding, are shuffled and learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Box, Space, leaves
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.offline.algorithms.action_heads import ActionHead, SquashedGaussianHead, action_head
from replaylake.offline.algorithms.network_options import check_network
from replaylake.offline.algorithms.sequence_models import (
    FeedforwardModel,
    RecurrentModel,
    SequenceModel,
)
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.adam import OptimizerFunction
from replaylake.offline.learning.algorithm import (
    Algorithm,
    Losses,
    Networks,
    OnPolicy,
    tensor,
    weighted_mean,
)
from replaylake.offline.learning.options import expect, to_options

NETWORK: Final = "actor_critic"
# Columns that are added to a batch.
_ADVANTAGES: Final = "advantages"
_TARGETS: Final = "value_targets"
_VALUES: Final = "values"


class OnPolicyOptions(Protocol):
    """The options that both have; see PPOConfig."""

    @property
    def hidden_sizes(self) -> Sequence[int]: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def shared(self) -> bool | None: ...
    @property
    def recurrent(self) -> bool: ...
    @property
    def core(self) -> Literal["gru", "lstm"]: ...
    @property
    def length(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def minibatches(self) -> int: ...
    @property
    def entropy_weight(self) -> float: ...
    @property
    def value_weight(self) -> float: ...
    @property
    def max_gradient_norm(self) -> float: ...


def check_on_policy(name: str, config: OnPolicyOptions) -> None:
    """Refuse common options out of range. Raises: ConfigInvalidError."""
    check_network(name, config)
    for option in ("length", "num_sequences", "epochs", "minibatches"):
        value = getattr(config, option)
        expect(value >= 1, f"{name}: {option}", value, "1 or more")
    for option in ("entropy_weight", "value_weight"):
        value = getattr(config, option)
        expect(value >= 0, f"{name}: {option}", value, "0 or more")
    norm = config.max_gradient_norm
    expect(norm > 0, f"{name}: max_gradient_norm", norm, "more than 0")
    is_possible = not config.recurrent or config.shared is not False
    expected = "it left out: what is remembered is one state, for policy and values"
    expect(is_possible, f"{name}: shared", config.shared, expected)


class SequenceInputs(NamedTuple):
    """What estimates are made of, float [B, T] each; nothing is known of steps outside the mask.

    values: [B, T + 1], of what was observed, and after the last step of each sequence of what
    followed it. log_rho_tm1: ln pi - ln mu of the actions taken, -inf outside of the mask; None
    unless it was asked for.
    """

    r_t: torch.Tensor
    discount_t: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    log_rho_tm1: torch.Tensor | None


class AdvantageEstimates(NamedTuple):
    """Advantages of the actions taken and what values are fitted to, float [B, T] each."""

    advantages: torch.Tensor
    targets: torch.Tensor


class MinibatchTerms(NamedTuple):
    """What a minibatch of M steps is learned from, float [M] each: log_rho_tm1 is ln pi - ln mu."""

    log_probs_tm1: torch.Tensor
    log_rho_tm1: torch.Tensor
    advantages_tm1: torch.Tensor
    v_tm1: torch.Tensor
    v_before_tm1: torch.Tensor
    targets_tm1: torch.Tensor


class OnPolicyRule(Protocol):
    """What one algorithm does that others do not."""

    @property
    def needs_log_rho(self) -> bool:
        """Whether its estimates do."""
        ...

    def estimate(self, sequences: SequenceInputs) -> AdvantageEstimates:
        """Return the estimates; what they say of steps outside the mask does not matter."""
        ...

    def policy_loss(self, terms: MinibatchTerms) -> torch.Tensor:
        """Return what the policy costs, [M]."""
        ...

    def value_loss(self, terms: MinibatchTerms) -> torch.Tensor:
        """Return what the values cost, [M]."""
        ...

    def metrics(self, terms: MinibatchTerms) -> Mapping[str, torch.Tensor]:
        """Return what is worth watching."""
        ...


def on_policy_algorithm(
    name: str,
    observation_space: Space,
    action_space: Space,
    config: OnPolicyOptions,
    facts: DatasetStatistics,
    *,
    rule: OnPolicyRule,
    optimizer: OptimizerFunction,
) -> Algorithm:
    """Return the algorithm that learns one actor-critic by this rule.

    Raises: SpaceUnsupportedError for actions that are neither countable nor a Box with bounds.
    """
    head = action_head(name, observation_space, action_space, facts)
    sizes = config.hidden_sizes
    model: SequenceModel = FeedforwardModel(head, sizes, facts, shared=_is_shared(config, head))
    if config.recurrent:
        model = RecurrentModel(head, sizes, facts, core=config.core)

    def losses(
        networks: Networks, targets: Networks, batch: Batch, rng: torch.Generator, *_: Any
    ) -> Losses:
        steps, outputs = model.outputs(networks[NETWORK], batch)
        codes = head.encode_actions(steps)
        distribution = head.distribution(outputs.parameters, steps.action_masks)
        log_probs_tm1 = distribution.log_probs(codes.actions)
        columns: Mapping[str, torch.Tensor] = steps.columns or {}
        terms = MinibatchTerms(
            log_probs_tm1,
            log_probs_tm1 - codes.log_probs,
            columns[_ADVANTAGES],
            outputs.values,
            columns[_VALUES],
            columns[_TARGETS],
        )
        policy_loss = weighted_mean(rule.policy_loss(terms), steps)
        value_loss = weighted_mean(rule.value_loss(terms), steps)
        entropy = weighted_mean(distribution.entropies(rng), steps)
        loss = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return Losses({NETWORK: loss}, metrics={**metrics, **rule.metrics(terms)})

    return Algorithm(
        spec=model.spec,
        losses=losses,
        networks=lambda: Networks({NETWORK: model.network()}),
        postprocess=_postprocess(name, head, model, rule),
        optimizer=optimizer,
        policy=lambda nets: model.policy(nets[NETWORK]),
        needs_propensities=True,
        on_policy=OnPolicy(config.length, config.num_sequences, config.epochs, config.minibatches),
        config=to_options(config),
        normalization=(
            {"actions": head.scaling.to_json()} if isinstance(head, SquashedGaussianHead) else {}
        ),
    )


def normalize_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return advantages [B, T] of mean 0 and standard deviation 1 over the mask."""
    known = advantages[mask]
    if not len(known):
        return advantages
    return (advantages - known.mean()) / (known.std(correction=0) + 1e-8)


def _postprocess(
    name: str, head: ActionHead, model: SequenceModel, rule: OnPolicyRule
) -> Callable[[Networks, Batch], Batch]:
    def postprocess(networks: Networks, batch: Batch) -> Batch:
        mask = tensor(batch.mask)
        if batch.bootstrappable is not None:
            # What followed is not known: a last step that cannot be judged.
            mask = mask & tensor(batch.bootstrappable)
        _check_known(name, tensor(batch.behavior_log_probs)[mask])
        network = networks[NETWORK]
        output = model.forward_batch(network, batch, mask, with_parameters=rule.needs_log_rho)
        log_rho_tm1 = None
        if output.parameters is not None:
            codes = head.encode_actions(output.steps)
            distribution = head.distribution(output.parameters, output.steps.action_masks)
            log_rho_tm1 = torch.full(mask.shape, -torch.inf, device=mask.device)
            log_rho_tm1[mask] = distribution.log_probs(codes.actions) - codes.log_probs
        rewards, discounts = tensor(batch.rewards), tensor(batch.discounts)
        estimates = rule.estimate(
            SequenceInputs(rewards, discounts, output.values, mask, log_rho_tm1)
        )
        columns = {
            _ADVANTAGES: estimates.advantages,
            _TARGETS: estimates.targets,
            _VALUES: output.values[:, :-1],
        }
        return model.rows(batch, output.steps, mask, columns)

    return postprocess


def _check_known(name: str, log_probs: torch.Tensor) -> None:
    """Refuse steps of unknown propensity. Raises: ConfigInvalidError."""
    if torch.isnan(log_probs).any():
        num = int(torch.isnan(log_probs).sum())
        raise ConfigInvalidError(
            f"{name}: found {num} of {len(log_probs)} steps without a behavior log-probability, "
            "expected one for each: actions are weighted by their probability. Collect with a "
            "policy that samples its actions (temperature above 0, no noise added)."
        )


def _is_shared(config: OnPolicyOptions, head: ActionHead) -> bool:
    """Whether policy and values have layers in common: by default where those are convolutions."""
    if config.shared is not None:
        return config.shared
    observed = leaves(head.spec.observation_space)
    return any(isinstance(leaf, Box) and leaf.is_image for _, leaf in observed)
