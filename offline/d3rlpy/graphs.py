"""Graphs: the acting part of a d3rlpy algorithm as a module that exports.

d3rlpy's own `save_policy(".onnx")` fails for every algorithm on torch 2.13. These modules share the
learner's parameters, so they act as it does now. Each is what the algorithm's
`inner_predict_best_action` computes; what that draws is the graph's input `noise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.d3rlpy.algorithms import D3rlpyAlgorithm
from replaylake.offline.d3rlpy.features import Features
from replaylake.offline.learning.action_scaling import ActionScaling, ActionUnscaler
from replaylake.offline.networks.graph import PolicyGraph


def policy_graph(
    algorithm: D3rlpyAlgorithm,
    impl: Any,
    features: Features,
    observation_space: Space,
    action_space: Space,
    scaling: ActionScaling | None,
) -> PolicyGraph:
    """Return the graph for the algorithm's head; see PolicyGraph for its inputs and outputs."""
    module = _GRAPHS[algorithm.graph](features, impl, scaling, algorithm.head)
    noise_size = getattr(module, "noise_size", 0)
    spec = PolicySpec(observation_space, action_space, algorithm.head, noise_size)
    return PolicyGraph(module, spec)


class _Graph(nn.Module):
    """Turns the graph's inputs into the features that the networks were trained on."""

    def __init__(
        self, features: Features, impl: Any, scaling: ActionScaling | None, head: str
    ) -> None:
        super().__init__()
        self._features = features
        self.build(impl, head)
        if scaling is not None:
            self.scaled = ActionUnscaler(scaling)

    def build(self, impl: Any, head: str) -> None:
        """Take what acts out of d3rlpy's implementation."""
        raise NotImplementedError

    def encode_inputs(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        features: torch.Tensor = self._features(self._features.nest(inputs))
        return features


class _QValues(_Graph):
    """The mean of the ensemble's action values, whose maximum d3rlpy's greedy action takes."""

    def build(self, impl: Any, head: str) -> None:
        self.q_funcs = impl.modules.q_funcs

    def q_values(self, features: torch.Tensor) -> torch.Tensor:
        return _mean_q(self.q_funcs, features)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.q_values(self.encode_inputs(inputs)),)


class _DiscreteBCQ(_QValues):
    """Action values above their least, 0 where the imitated policy finds the action too unlikely.

    Fujimoto et al. 2019, "Benchmarking Batch Deep Reinforcement Learning Algorithms", in the
    form whose argmax is the same.
    """

    def build(self, impl: Any, head: str) -> None:
        super().build(impl, head)
        self.imitator = impl.modules.imitator
        self._threshold = math.log(impl._action_flexibility)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.encode_inputs(inputs)
        log_probs = torch.log_softmax(_logits(self.imitator, features), dim=1)
        likely = log_probs - log_probs.amax(dim=1, keepdim=True) > self._threshold
        values = self.q_values(features)
        # Above 0 for the least value too, so that a likely action always beats an unlikely one.
        return ((values - values.amin(dim=1, keepdim=True) + 1e-5) * likely.float(),)


class _Actor(_Graph):
    """Acts with one network: d3rlpy's policy, or its imitator where there is nothing else."""

    def build(self, impl: Any, head: str) -> None:
        modules = impl.modules
        self.network = modules.policy if hasattr(modules, "policy") else modules.imitator


class _Logits(_Actor):
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_logits(self.network, self.encode_inputs(inputs)),)


class _Gaussian(_Actor):
    """A mean and log_std: before the tanh where the head squashes and scales, else in its units."""

    def build(self, impl: Any, head: str) -> None:
        super().build(impl, head)
        self._head_squashes = head == "squashed_gaussian"

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.network(self.encode_inputs(inputs))
        log_stds = output.logstd + torch.zeros_like(output.mu)
        if self._head_squashes:
            return output.mu, log_stds
        return self.scaled(output.squashed_mu), self.scaled.log_stds(log_stds)


class _Deterministic(_Actor):
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.scaled(self.network(self.encode_inputs(inputs)).squashed_mu),)


class _PLAS(_Actor):
    """What the decoder makes of the policy's latent action (Zhou et al. 2020)."""

    def build(self, impl: Any, head: str) -> None:
        super().build(impl, head)
        self.decoder = impl.modules.vae_decoder
        self.perturbation = getattr(impl.modules, "perturbation", None)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.encode_inputs(inputs)
        actions = self.decoder(features, 2.0 * self.network(features).squashed_mu)
        if self.perturbation is not None:
            actions = self.perturbation(features, actions).squashed_mu
        return (self.scaled(actions),)


class _Candidates(_Actor):
    """Draws several actions for each observation and takes one by what they are worth."""

    def build(self, impl: Any, head: str) -> None:
        super().build(impl, head)
        self.q_funcs = impl.modules.q_funcs
        self.num = impl._n_action_samples
        self.size = impl.action_size
        self.noise_size = self.num * self.size

    def repeat_features(self, features: torch.Tensor) -> torch.Tensor:
        """Map [N, *features] to [N * num, *features], an observation's side by side."""
        rest = features.shape[1:]
        return features[:, None].expand(-1, self.num, *rest).reshape(-1, *rest)

    def draw_actions(self, output: Any, noise: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return mean + std * noise, [N, num, size]."""
        noise = noise.reshape(-1, self.num, self.size)
        stds = (output.logstd + torch.zeros_like(mean)).exp()
        actions: torch.Tensor = mean[:, None] + noise * stds[:, None]
        return actions

    def choose_best(self, actions: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return, of actions [N, num, size], those of the highest score [N, num]."""
        best = scores.argmax(dim=1)[:, None, None].expand(-1, 1, self.size)
        return (self.scaled(actions.gather(1, best)[:, 0]),)


class _BCQ(_Candidates):
    """The perturbed decoded action of the highest first critic (Fujimoto et al. 2019)."""

    def build(self, impl: Any, head: str) -> None:
        super().build(impl, head)
        self.decoder = impl.modules.vae_decoder
        self.noise_size = self.num * 2 * self.size

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.repeat_features(self.encode_inputs(inputs))
        latents = inputs[-1].reshape(-1, 2 * self.size).clamp(-0.5, 0.5)
        actions = self.network(features, self.decoder(features, latents)).squashed_mu
        values = _q_value(self.q_funcs[0], features, actions)
        return self.choose_best(actions.view(-1, self.num, self.size), values.view(-1, self.num))


class _BEAR(_Candidates):
    """The action of the highest first critic among samples (Kumar et al. 2019)."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.encode_inputs(inputs)
        output = self.network(features)
        actions = torch.tanh(self.draw_actions(output, inputs[-1], output.mu))
        flat = actions.reshape(-1, self.size)
        values = _q_value(self.q_funcs[0], self.repeat_features(features), flat)
        return self.choose_best(actions, values.view(-1, self.num))


class _CRR(_Candidates):
    """A sample, drawn again by the softmax of its value (Wang et al. 2020, CWP).

    argmax(value - ln(e)) with e ~ Exp(1) draws from the softmax, which is how torch.multinomial
    draws one; half the sum of two squared standard normals is such an e.
    """

    def build(self, impl: Any, head: str) -> None:
        super().build(impl, head)
        self.noise_size = self.num * (self.size + 2)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features, noise = self.encode_inputs(inputs), inputs[-1]
        output = self.network(features)
        of_actions = noise[:, : self.num * self.size]
        actions = self.draw_actions(output, of_actions, output.squashed_mu).clamp(-1.0, 1.0)
        flat = actions.reshape(-1, self.size)
        values = _mean_q(self.q_funcs, self.repeat_features(features), flat).view(-1, self.num)
        normals = noise[:, self.num * self.size :].reshape(-1, self.num, 2)
        exponentials = normals.square().sum(dim=2) / 2
        return self.choose_best(actions, values - exponentials.log())


def _logits(network: Any, features: torch.Tensor) -> torch.Tensor:
    """Return a CategoricalPolicy's logits without its Categorical, which cannot be traced."""
    logits: torch.Tensor = network._fc(network._encoder(features))
    return logits


def _mean_q(q_funcs: Any, *inputs: torch.Tensor) -> torch.Tensor:
    return torch.stack([_q_value(q_func, *inputs) for q_func in q_funcs]).mean(dim=0)


def _q_value(q_func: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """Return the expected value; an implicit quantile network's own code fixes N when traced."""
    if not hasattr(q_func, "_n_greedy_quantiles"):
        value: torch.Tensor = q_func(*inputs).q_value
        return value
    # Dabney et al. 2018, eq. 4, at the quantiles that d3rlpy takes when it acts: [T, features].
    hidden = q_func._encoder(*inputs)
    taus = torch.linspace(0, 1, q_func._n_greedy_quantiles, device=hidden.device)
    steps = torch.arange(q_func._embed_size, device=hidden.device).float() + 1
    embedded = torch.relu(q_func._embed(torch.cos(math.pi * steps * taus[:, None])))
    quantiles: torch.Tensor = q_func._fc(hidden[:, None] * embedded)
    return quantiles.mean(dim=1)


_GRAPHS: Final[Mapping[str, Callable[[Features, Any, ActionScaling | None, str], nn.Module]]] = {
    "q_values": _QValues,
    "likely_q_values": _DiscreteBCQ,
    "logits": _Logits,
    "gaussian": _Gaussian,
    "deterministic": _Deterministic,
    "plas": _PLAS,
    "bcq": _BCQ,
    "bear": _BEAR,
    "crr": _CRR,
}
