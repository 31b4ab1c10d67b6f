"""ActionInputs: logged actions as what critics take."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Values,
    describe,
)
from replaylake.datastore.errors import SpaceUnsupported
from replaylake.offline.learning.action_scaling import ActionScaling, action_scaling


class ActionInputs:
    """Discrete actions count from 0, of `size` there are; others become vectors of that length.

    A Box is scaled to [-1, 1] by its bounds, or where one is infinite by what was logged; each
    action of a MultiDiscrete or MultiBinary space becomes a one-hot vector. Raises:
    SpaceUnsupported.
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
            raise SpaceUnsupported(
                f"a model of action values: found action space {describe(space)}, expected "
                "Discrete, MultiDiscrete, MultiBinary or a float Box. Name other estimators."
            )

    def encoded(self, actions: Values) -> torch.Tensor:
        """Return actions [N, *act] as int64 [N], or float32 [N, size]."""
        given = torch.from_numpy(np.ascontiguousarray(np.asarray(actions))).to(self._device)
        if isinstance(self._space, Discrete):
            return given.long() - self._space.start
        if isinstance(self._space, MultiDiscrete):
            columns = [F.one_hot(given[:, i].long(), n) for i, n in enumerate(self._space.nvec)]
            return torch.cat(columns, dim=1).float()
        if self._scaling is None:
            return given.float()
        return self._scaling.normalise(given)
