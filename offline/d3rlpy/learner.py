"""D3rlpyLearner: a d3rlpy algorithm behind our Learner, fed from our batches.

d3rlpy's own sampler, scalers, logger and files are not used. Actions are normalised here, and a
step is terminal where its discount is 0: our batches keep the last step of a truncated episode,
which d3rlpy's sampler drops.

d3rlpy takes no action masks, no importance weights, and one discount for all steps. A batch that
would need them is refused, never learned from as if they were not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Final, get_type_hints

import numpy as np
import torch

from replaylake.datastore.batch import Batch
from replaylake.datastore.errors import ConfigInvalid, SpaceUnsupported
from replaylake.datastore.policies.policy import PolicySpec
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.datastore.spaces import Array, Box, Discrete, Space
from replaylake.offline.action_scaling import ActionScaling, action_scaling
from replaylake.offline.d3rlpy.graphs import policy_module
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.d3rlpy.table import D3rlpyAlgorithm
from replaylake.offline.graph import PolicyGraph
from replaylake.offline.learner import Update
from replaylake.offline.networks import ObservationFeatures
from replaylake.offline.options import cast, check_keys
from replaylake.offline.state import pack_state, unpack_state

# d3rlpy's names for what is stated once for all algorithms, and where to say it instead.
_SAID_ELSEWHERE: Final = {
    "batch_size": "the training option batch_size",
    "gamma": "the training option discount",
    "observation_scaler": "nothing: observations are given as they are",
    "action_scaler": "nothing: actions are always normalised by their bounds or logged range",
    "reward_scaler": "the training option reward, an SQL expression",
}


def check_options(
    algorithm: D3rlpyAlgorithm, options: Mapping[str, Any], others: Iterable[str] = ()
) -> None:
    """Refuse options that the algorithm does not have. Raises: ConfigInvalid with near matches."""
    config_class = getattr(load_d3rlpy().algos, algorithm.config_class)
    _check_keys(config_class, options, f"algorithm d3rlpy:{algorithm.name}", others)


class D3rlpyLearner:
    """One algorithm of the table, with its own parameters, optimizers and random state."""

    def __init__(
        self,
        algorithm: D3rlpyAlgorithm,
        observation_space: Space,
        action_space: Space,
        *,
        options: Mapping[str, Any],
        seed: int,
        discount: float = 0.99,
        device: torch.device | str = "cpu",
        logged_actions: tuple[Array, Array] | None = None,
    ) -> None:
        """Build the networks under `seed`; the global random state is left as it was.

        Raises: ConfigInvalid for options that d3rlpy does not have, SpaceUnsupported for images,
        text, or Box actions without bounds or logged range.
        """
        self._features = ObservationFeatures(observation_space)
        self._action_space = action_space
        self._scaling: ActionScaling | None = None
        if not isinstance(action_space, Discrete):
            self._scaling = action_scaling(action_space, logged_actions)
            if algorithm.head == "squashed_gaussian" and isinstance(action_space, Box):
                action_space = self._scaling.bounded(action_space)
        self._spec = PolicySpec(observation_space, action_space, algorithm.head)
        self._algorithm = algorithm
        self._discount = discount
        self._device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._random_state = torch.get_rng_state()
        with self._own_randomness():
            self._d3rlpy = self._build(options)
        self._impl = self._d3rlpy.impl
        self._num_updates = 0
        self._torch_batch = load_d3rlpy().TorchMiniBatch

    @property
    def discount(self) -> float:
        """Gamma."""
        return self._discount

    @property
    def needs_bootstrap(self) -> bool:
        """Whether the algorithm looks at next observations: all but cloning do."""
        return self._algorithm.kind != "imitation"

    @property
    def config(self) -> Mapping[str, Any]:
        """d3rlpy's own serialised config."""
        config: dict[str, Any] = self._d3rlpy.config.serialize_to_dict()
        return {key: value for key, value in config.items() if key not in _SAID_ELSEWHERE}

    @property
    def normalisation(self) -> Mapping[str, Any]:
        """What actions are scaled by."""
        return {} if self._scaling is None else {"actions": self._scaling.to_json()}

    def update(self, batch: Batch) -> Update:
        """Take one gradient step; d3rlpy draws from this learner's own random state.

        Raises: SpaceUnsupported for action masks that are not all true, ConfigInvalid for weights
        other than 1, and for discounts other than 0 and gamma where the algorithm bootstraps.
        """
        self._refuse_unsupported(batch)
        with self._own_randomness():
            metrics = self._impl.update(self._d3rlpy_batch(batch), self._num_updates)
        self._num_updates += 1
        return Update(metrics)

    def policy(self) -> PolicyGraph:
        """Return the acting modules with their outputs in the environment's units."""
        module = policy_module(self._algorithm, self._impl, self._spec, self._scaling)
        return PolicyGraph(module, self._spec)

    def state_dict(self) -> dict[str, Array]:
        """Return modules, optimizers, random state and the number of updates."""
        modules = {name: module.state_dict() for name, module in self._stateful().items()}
        return pack_state(
            {"modules": modules, "rng": self._random_state, "num_updates": self._num_updates}
        )

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Continue bit for bit (on the CPU) where state_dict was called."""
        tree = unpack_state(state)
        for name, module in self._stateful().items():
            module.load_state_dict(tree["modules"][name])
        self._random_state = tree["rng"]
        self._num_updates = tree["num_updates"]

    def _build(self, options: Mapping[str, Any]) -> Any:
        algos = load_d3rlpy().algos
        config_class = getattr(algos, self._algorithm.config_class)
        what = f"algorithm d3rlpy:{self._algorithm.name}"
        config = config_class(
            gamma=self._discount, **_checked_options(config_class, options, what, self._device)
        )
        space = self._action_space
        size = space.n if isinstance(space, Discrete) else len(self._scaled().center)
        try:
            # d3rlpy wants an index with every device, the CPU too.
            index = self._device.index or 0
            algorithm = config.create(device=f"{self._device.type}:{index}")
            algorithm.create_impl((self._features.num_features,), size)
        except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigInvalid(
                f"{what}: d3rlpy refuses the options {dict(options)}: {error}. Mend or leave them "
                "out."
            ) from error
        return algorithm

    def _refuse_unsupported(self, batch: Batch) -> None:
        what = f"algorithm d3rlpy:{self._algorithm.name}"
        for masks in (batch.action_masks, batch.next_action_masks):
            if masks is not None and not masks.all():
                raise SpaceUnsupported(
                    f"{what}: found action masks that are not all true, expected none: d3rlpy "
                    "has no masks. Use an algorithm that honours them, such as bc."
                )
        if not (batch.weights == 1).all():
            raise ConfigInvalid(
                f"{what}: found importance weights of {batch.weights.min():g} to "
                f"{batch.weights.max():g}, expected 1: d3rlpy has none. Sample uniformly."
            )
        if not self.needs_bootstrap:
            return
        if batch.bootstrappable is not None and not batch.bootstrappable.all():
            raise ConfigInvalid(
                f"{what}: found steps without a next observation, expected none: d3rlpy would "
                "bootstrap from their own. Sample with only_bootstrappable."
            )
        discounts = batch.discounts
        others = discounts[(discounts != 0) & (discounts != np.float32(self._discount))]
        if len(others):
            raise ConfigInvalid(
                f"{what}: found a discount of {others[0]:g} in a batch, expected 0 (terminated) or "
                f"{self._discount:g}, the one that d3rlpy was given. Sample with the learner's "
                "discount and single steps."
            )

    def _d3rlpy_batch(self, batch: Batch) -> Any:
        tensors = to_torch(batch, self._device)
        raw: Any = tensors.actions
        if isinstance(self._action_space, Discrete):
            actions = (raw - self._action_space.start)[:, None].float()
        else:
            actions = self._scaled().normalise(raw)
        rewards: Any = tensors.rewards
        rewards = rewards[:, None]
        return self._torch_batch(
            observations=self._observed(tensors.observations),
            actions=actions,
            rewards=rewards,
            next_observations=self._observed(tensors.next_observations),
            next_actions=torch.zeros_like(actions),
            returns_to_go=torch.zeros_like(rewards),
            terminals=torch.as_tensor(tensors.discounts == 0)[:, None].float(),
            intervals=torch.ones_like(rewards),
            device=self._d3rlpy.impl.device,
        )

    def _observed(self, observations: torch.Tensor | Mapping[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            features: torch.Tensor = self._features(observations)
        return features

    def _scaled(self) -> ActionScaling:
        assert self._scaling is not None, "a Discrete space has no scaling"
        return self._scaling

    def _stateful(self) -> Mapping[str, Any]:
        """Return every module and optimizer by name."""
        modules: Mapping[str, Any] = self._impl.modules.create_checkpointer(
            self._impl.device
        ).modules
        return modules

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Lend this learner's random state to torch's global one, which d3rlpy draws from."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(before)


def _check_keys(
    config_class: Any, options: Mapping[str, Any], what: str, others: Iterable[str] = ()
) -> None:
    for key, instead in _SAID_ELSEWHERE.items():
        if key in options:
            raise ConfigInvalid(f"{what}: found option {key!r}, expected {instead}.")
    known = {field.name for field in fields(config_class)} - {*_SAID_ELSEWHERE}
    check_keys(options, [*known, "hidden_sizes"], what, others)


def _checked_options(
    config_class: Any, options: Mapping[str, Any], what: str, device: torch.device
) -> dict[str, Any]:
    """Turn options into the config's arguments.

    Numbers and words are taken as they are, factories from {type, params}, and `hidden_sizes` is
    given to every network at once.
    """
    _check_keys(config_class, options, what)
    known = {field.name: field for field in fields(config_class)}
    encoders = [name for name in known if name.endswith("encoder_factory")]
    if options.get("compile_graph") and device.type != "cuda":
        raise ConfigInvalid(f"{what}: found compile_graph on {device}, expected a CUDA device.")
    arguments: dict[str, Any] = {}
    if "hidden_sizes" in options:
        sizes = cast(tuple[int, ...], options["hidden_sizes"], f"{what}: hidden_sizes")
        factory = load_d3rlpy().models.VectorEncoderFactory
        arguments |= {name: factory(hidden_units=list(sizes)) for name in encoders}
    hints = get_type_hints(config_class)
    for key, value in options.items():
        if key == "hidden_sizes":
            continue
        decoder = known[key].metadata.get("dataclasses_json", {}).get("decoder")
        if decoder is None:
            arguments[key] = cast(hints[key], value, f"{what}: {key}")
        else:
            arguments[key] = _decoded(decoder, value, f"{what}: {key}")
    return arguments


def _decoded(decoder: Any, value: Any, what: str) -> Any:
    try:
        return decoder({"params": {}, **value})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigInvalid(
            f"{what}: found {value!r}, expected {{type = ..., params = {{...}}}} as d3rlpy "
            f"serialises it ({type(error).__name__}: {error})."
        ) from error
