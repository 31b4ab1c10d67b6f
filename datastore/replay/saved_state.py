"""Saved state: positions of samplers, refused whole where they are not what the sampler saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from replaylake.datastore.errors import ConfigInvalidError

# In a state: the kind of sampler that it is of. Without it, the state of one that also draws from
# a numpy generator would be taken, and go on with other batches.
KIND: Final = "kind"


@contextmanager
def read_state(kind: str, state: object) -> Iterator[None]:
    """Read a saved position, which anybody may have kept anywhere.

    Raises: ConfigInvalidError if it is that of another kind of sampler, or not whole.
    """
    if not isinstance(state, Mapping):
        raise _invalid_state_error(kind, f"a {type(state).__name__}")
    if state.get(KIND) != kind:
        found = (
            f"one of a {state[KIND]} sampler" if KIND in state else f"the entries {_names(state)}"
        )
        raise _invalid_state_error(kind, found)
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise _invalid_state_error(
            kind, f"one that is not whole ({type(error).__name__}: {error})"
        ) from error


def restore_generator(state: Any) -> np.random.Generator:
    """Return a generator of numpy's (PCG64) at a saved position.

    Raises: KeyError, TypeError, ValueError if it is none, which leaves other generators alone.
    """
    generator = np.random.default_rng(0)
    generator.bit_generator.state = state
    return generator


def _invalid_state_error(kind: str, found: str) -> ConfigInvalidError:
    return ConfigInvalidError(
        f"{kind} sampler: found a saved state that is {found}, expected what state_dict() of a "
        f"{kind} sampler returned. Nothing was changed; restore each state into a sampler made as "
        "the one that it was saved of."
    )


def _names(state: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, state)) or "none"
