"""ValueModel: action values of a policy by gradient descent, over any spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Values,
    describe,
    num_values,
    take,
)
from replaylake.datastore.errors import SpaceUnsupportedError, TrainingError
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig, OnProgress
from replaylake.offline.evaluation.ope.moments import observation_moments
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy
from replaylake.offline.evaluation.ope.transition_arrays import TransitionArrays
from replaylake.offline.learning.action_scaling import ActionScaling, action_scaling
from replaylake.offline.learning.adam import FusedAdam
from replaylake.offline.learning.flat import FlatGroup, flatten_parameters
from replaylake.offline.networks.critics import Critics, QNetworks

_ROWS_AT_ONCE: Final = 1 << 15
# Batches whose rows are drawn together.
_DRAWN_AT_ONCE: Final = 64
_CHECK_UPDATES: Final = 250
# Of the values at so many first observations it is seen whether they still move.
_NUM_CONVERGENCE_ROWS: Final = 2048


class ValueModel:
    """Action values of a policy, fitted on transitions."""

    def __init__(
        self,
        target: TargetPolicy,
        arrays: TransitionArrays,
        config: FQEConfig,
        seed: int,
        device: torch.device | str = "cpu",
        on_progress: OnProgress | None = None,
    ) -> None:
        """Fit it. Raises: TrainingError where it diverges, SpaceUnsupportedError."""
        self._model = ActionValues(arrays, config, seed, torch.device(device))
        self._target, self._seed = target, seed
        model, rng = self._model, np.random.default_rng([seed, 0])
        masks = arrays.next_action_masks
        after = model.query_policy(target, arrays.next_observations, masks, rng)
        rows = TransitionRows(model, arrays, after)
        masks = arrays.initial_action_masks
        watched = slice(0, _NUM_CONVERGENCE_ROWS)
        first = take(arrays.initial_observations, watched)
        actions = model.query_policy(target, first, None if masks is None else masks[watched], rng)

        def value_now() -> float:
            return float(model.v(model.frozen, first, actions).mean())

        self.num_updates = _fit(model, rows, config, seed, value_now, on_progress)
        # q' is the mean of q over its last updates.
        model.online.load_state_dict(model.frozen.state_dict())

    def q(self, observations: Values, actions: Values) -> NDArray[np.float64]:
        """Return values float64 [N] of actions [N, *act] at observations [N, *obs]."""
        inputs = self._model.actions.encode(actions)

        def ask(some: slice) -> Array:
            return self._model.q(self._model.online, take(observations, some), inputs[some])

        return map_chunks(num_values(observations), ask)

    def v(
        self, observations: Values, action_masks: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Return values float64 [N] of observations under the policy."""
        rng = np.random.default_rng([self._seed, 1])

        def ask(some: slice) -> Array:
            part = take(observations, some)
            masks = None if action_masks is None else action_masks[some]
            actions = self._model.query_policy(self._target, part, masks, rng)
            return self._model.v(self._model.online, part, actions)

        return map_chunks(num_values(observations), ask)


def _fit(
    model: ActionValues,
    rows: TransitionRows,
    config: FQEConfig,
    seed: int,
    value_now: Callable[[], float],
    on_progress: OnProgress | None,
) -> int:
    """Make the updates; returns how many."""
    online, optimizer = make_adam(model.online, config.learning_rate)
    frozen = FlatGroup(model.frozen).flat
    generator = torch.Generator(model.device).manual_seed(seed)
    history: list[float] = []
    batches: list[torch.Tensor] = []
    for update in range(config.updates):
        if not batches:
            size = (_DRAWN_AT_ONCE, config.batch_size)
            some = torch.randint(len(rows), size, generator=generator, device=model.device)
            batches = list(some.unbind())
        batch = batches.pop()
        if update % 50 == 0:
            optimizer.set_learning_rate(config.learning_rate * (1 - update / config.updates))
        loss = rows.loss(batch)
        online.differentiate(loss, retain_graph=False)
        optimizer.step()
        with torch.no_grad():
            frozen.lerp_(online.flat, config.target_tau)
        if (update + 1) % _CHECK_UPDATES == 0 or update + 1 == config.updates:
            history.append(value_now())
            _check_finite(history[-1], float(loss.detach()), update + 1)
            if on_progress is not None:
                on_progress(update + 1, config.updates)
            if _has_converged(history, config, model.scale):
                return update + 1
    return config.updates


def make_adam(network: nn.Module, learning_rate: float) -> tuple[FlatGroup, FusedAdam]:
    """Return a network's parameters as one tensor, and what steps it (Kingma & Ba 2015)."""
    (group,) = flatten_parameters({"values": network})[0].values()
    group.flat.grad = group.gradients
    return group, FusedAdam([{"params": [group.flat]}], learning_rate)


def _has_converged(history: Sequence[float], config: FQEConfig, scale: float) -> bool:
    num = max(2, config.updates // 10 // _CHECK_UPDATES)
    if not config.tolerance or len(history) <= num:
        return False
    recent = history[-num - 1 :]
    return max(recent) - min(recent) < config.tolerance * scale


def _check_finite(value: float, loss: float, update: int) -> None:
    if not np.isfinite(value) or not np.isfinite(loss):
        raise TrainingError(
            f"fitted Q evaluation, update {update}: found a loss of {loss} and values of {value}, "
            "expected finite numbers. Give a lower discount or learning rate; with discount 1 the "
            "values of episodes that never terminate have no bound."
        )


class TransitionRows:
    """The transitions as tensors on the device, and what the policy does after each."""

    def __init__(
        self,
        model: ActionValues,
        arrays: TransitionArrays,
        actions: torch.Tensor | None,
    ) -> None:
        """Take what the policy does next, as ActionValues.chosen has it; None: no step goes on."""
        self._model = model
        self._observations = model.tensors(arrays.observations)
        self._actions = model.actions.encode(arrays.actions)
        self._next_actions = actions
        if actions is not None:
            self._next = model.tensors(arrays.next_observations)
        shift, scale = model.shift, model.scale
        # In units of the model: q = shift + scale * output.
        rewards = (arrays.rewards + arrays.discounts * shift - shift) / scale
        self._rewards = model.tensor(rewards.astype(np.float32))
        self._discounts = model.tensor(arrays.discounts.astype(np.float32))

    def __len__(self) -> int:
        return len(self._rewards)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of a batch: Le et al. 2019, algorithm 3, line 3 and 4."""
        model = self._model
        target_tm1 = self._rewards[rows]
        if self._next_actions is not None:
            with torch.no_grad():
                v_t = model.outputs_v(
                    model.frozen, select_rows(self._next, rows), self._next_actions[rows]
                )
                target_tm1 = target_tm1 + self._discounts[rows] * v_t
        q_tm1 = model.outputs_q(
            model.online, select_rows(self._observations, rows), self._actions[rows]
        )
        return nn.functional.mse_loss(q_tm1, target_tm1)


class ActionValues:
    """q and q' over normalized observations and actions, in units of the logged returns."""

    def __init__(
        self,
        arrays: TransitionArrays,
        config: FQEConfig,
        seed: int,
        device: torch.device,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        """Compute moments and units from the transitions `rows`, by default from all."""
        space, self.device = arrays.spec.observation_space, device
        actions = arrays.actions if rows is None else take(arrays.actions, rows)
        returns = arrays.returns if rows is None else arrays.returns[rows]
        self.actions = ActionInputs(arrays.spec.action_space, actions, device)
        self._space = space
        self._samples = config.action_samples
        moments = observation_moments(space, arrays.observations, rows)
        facts = DatasetStatistics(observations=moments)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.online = self._network(config, facts).to(device)
            torch.manual_seed(seed)
            self.frozen = self._network(config, facts).to(device).requires_grad_(False)
        self.shift = float(returns.mean())
        spread = float(returns.std())
        self.scale = spread if spread > 0 else 1.0

    def _network(self, config: FQEConfig, facts: DatasetStatistics) -> nn.Module:
        if self.actions.is_discrete:
            size = self.actions.size
            return QNetworks(self._space, size, config.hidden_sizes, facts, num=1)
        return Critics(self._space, self.actions.size, config.hidden_sizes, facts, num=1)

    def outputs_q(
        self, network: nn.Module, observations: Any, actions: torch.Tensor
    ) -> torch.Tensor:
        """Return outputs [N] for encoded actions [N] or [N, D]."""
        if self.actions.is_discrete:
            every: torch.Tensor = network(observations)[0]
            return every.gather(1, actions[:, None])[:, 0]
        outputs: torch.Tensor = network(observations, actions)[0]
        return outputs

    def outputs_v(
        self, network: nn.Module, observations: Any, actions: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean output [N] over what the policy does, as `actions` has it."""
        if self.actions.is_discrete and actions.dim() == 1:
            return self.outputs_q(network, observations, actions)
        if self.actions.is_discrete:
            every: torch.Tensor = network(observations)[0]
            return (actions * every).sum(dim=1)
        sampled = [self.outputs_q(network, observations, one) for one in actions.unbind(1)]
        return torch.stack(sampled).mean(dim=0)

    def query_policy(
        self,
        target: TargetPolicy,
        observations: Values,
        masks: NDArray[np.bool_] | None,
        rng: np.random.Generator,
    ) -> torch.Tensor:
        """Ask what the policy does: Discrete actions [N], or their probabilities [N, A], or draws.

        Draws are encoded actions [N, samples, D]; one suffices for a policy that does not draw.
        """
        if self.actions.is_discrete and not target.is_deterministic:
            return self.tensor(target.action_probs(observations, masks).astype(np.float32))
        num = 1 if target.is_deterministic else self._samples
        draws = [self.actions.encode(target.actions(observations, rng, masks)) for _ in range(num)]
        return draws[0] if self.actions.is_discrete else torch.stack(draws, dim=1)

    def q(self, network: nn.Module, observations: Values, actions: torch.Tensor) -> Array:
        """Return values float64 [N] in the environment's units."""
        with torch.no_grad():
            outputs = self.outputs_q(network, self.tensors(observations), actions)
        return self._in_units(outputs)

    def v(self, network: nn.Module, observations: Values, actions: torch.Tensor) -> Array:
        """Return the values float64 [N] of observations, in the environment's units."""
        with torch.no_grad():
            outputs = self.outputs_v(network, self.tensors(observations), actions)
        return self._in_units(outputs)

    def tensor(self, array: Array) -> torch.Tensor:
        """Return an array on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def tensors(self, values: Values) -> Any:
        """Return observations on the device, floats as float32."""
        if isinstance(values, Mapping):
            return {key: self.tensors(sub) for key, sub in values.items()}
        array = np.asarray(values)
        return self.tensor(
            array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array
        )

    def _in_units(self, outputs: torch.Tensor) -> Array:
        return self.shift + self.scale * outputs.cpu().numpy().astype(np.float64)


def map_chunks(num: int, ask: Callable[[slice], Array]) -> NDArray[np.float64]:
    """Join what is said of some rows at a time, so that no layer's output is as long as all."""
    starts = range(0, max(1, num), _ROWS_AT_ONCE)
    return np.concatenate([ask(slice(at, min(num, at + _ROWS_AT_ONCE))) for at in starts])


def select_rows(observations: Any, rows: torch.Tensor) -> Any:
    if isinstance(observations, Mapping):
        return {key: select_rows(sub, rows) for key, sub in observations.items()}
    return observations[rows]


class ActionInputs:
    """Discrete actions count from 0, of `size` there are; others become vectors of that length.

    A Box is scaled to [-1, 1] by its bounds, or where one is infinite by what was logged; each
    action of a MultiDiscrete or MultiBinary space becomes a one-hot vector. Raises:
    SpaceUnsupportedError.
    """

    def __init__(self, space: Space, logged: Values, device: torch.device | str = "cpu") -> None:
        self._space, self._device = space, device
        self.is_discrete = isinstance(space, Discrete)
        self._scaling: ActionScaling | None = None
        if isinstance(space, Discrete | MultiBinary):
            self.size = space.n
        elif isinstance(space, MultiDiscrete):
            self.size = sum(space.nvec)
        elif isinstance(space, Box):
            array: Array = np.asarray(logged)
            self._scaling = action_scaling(space, (array.min(axis=0), array.max(axis=0)))
            self.size = len(self._scaling.center)
        else:
            raise SpaceUnsupportedError(
                f"a model of action values: found action space {describe(space)}, expected "
                "Discrete, MultiDiscrete, MultiBinary or a float Box. Name other estimators."
            )

    def encode(self, actions: Values) -> torch.Tensor:
        """Return actions [N, *act] as int64 [N], or float32 [N, size]."""
        values = torch.from_numpy(np.ascontiguousarray(np.asarray(actions))).to(self._device)
        if isinstance(self._space, Discrete):
            return values.long() - self._space.start
        if isinstance(self._space, MultiDiscrete):
            columns = [F.one_hot(values[:, i].long(), n) for i, n in enumerate(self._space.nvec)]
            return torch.cat(columns, dim=1).float()
        if self._scaling is None:
            return values.float()
        return self._scaling.normalize(values)
