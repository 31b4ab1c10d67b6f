"""Randomness: a learner's own state of torch's global generators, which d3rlpy draws from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class IsolatedRandomState:
    """The states of the CPU's generator and, where it learns there, of the GPU's.

    Lending both costs 2 us on the CPU.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        """Take the states that `seed` gives; the global ones are left as they were."""
        self._gpu = device if device.type == "cuda" else None
        before = self._global()
        torch.manual_seed(seed)
        self._own = self._global()
        self._set(before)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Lend the states to the global generators for the block."""
        before = self._global()
        self._set(self._own)
        try:
            yield
        finally:
            self._own = self._global()
            self._set(before)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the states, uint8 each."""
        return dict(self._own)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue with them; those of a device that is not used here are left out."""
        self._own = {**self._own, **{name: state[name] for name in self._own if name in state}}

    def _global(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._gpu is not None:
            states["cuda"] = torch.cuda.get_rng_state(self._gpu)
        return states

    def _set(self, states: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self._gpu is not None:
            torch.cuda.set_rng_state(states["cuda"], self._gpu)
