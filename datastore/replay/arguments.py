"""Arguments: the numbers and texts that callers of replay give, checked where they come in.

What Python would take for another number, or refuse only later in the middle of a batch: a float
for a count, True for 1, NaN for a share, None for a seed, which would be another one each time.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Final, TypeGuard

import numpy as np

from replaylake.datastore.errors import ConfigInvalidError

# No batch, count or version is larger; beyond it there would only be a MemoryError.
_MAX: Final = 2**31 - 1


def check_int(
    what: str, value: object, *, minimum: int = 0, maximum: int = _MAX, advice: str = ""
) -> int:
    """Return an argument as an int. `what` names who was given it, and which one it is.

    Raises: ConfigInvalidError for what is no whole number (True is none), or out of range.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if minimum <= number <= maximum:
            return number
    is_too_large = isinstance(value, Integral) and int(value) > _MAX
    reach = (
        f"from {minimum} to {maximum}"
        if is_too_large or maximum < _MAX
        else f"of {minimum} or more"
    )
    raise ConfigInvalidError(_describe_mismatch(what, value, f"a whole number {reach}", advice))


def check_fraction(what: str, value: object, *, advice: str = "") -> float:
    """Return an argument in 0..1 as a float. Raises: ConfigInvalidError."""
    if _is_number(value) and 0.0 <= (number := float(value)) <= 1.0:
        return number
    raise ConfigInvalidError(_describe_mismatch(what, value, "a number from 0 to 1", advice))


def check_discount(what: str, value: object) -> float:
    """Return a discount as a float. Raises: ConfigInvalidError."""
    return check_fraction(
        f"{what}: discount", value, advice="1 counts all rewards alike, 0.99 is usual."
    )


def check_positive(what: str, value: object, *, advice: str = "") -> float:
    """Return an argument above 0 and finite as a float. Raises: ConfigInvalidError."""
    if _is_number(value) and 0.0 < (number := float(value)) < math.inf:
        return number
    raise ConfigInvalidError(_describe_mismatch(what, value, "a finite number above 0", advice))


def check_seed(what: str, value: object) -> int:
    """Return a seed as an int.

    Raises: ConfigInvalidError for what is not a whole number of 0 or more.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and (number := int(value)) >= 0:
        return number
    advice = "The same seed draws the same batches again."
    raise ConfigInvalidError(
        _describe_mismatch(f"{what}: seed", value, "a whole number of 0 or more", advice)
    )


def check_batch_size(what: str, value: object) -> int:
    """Return a batch size as an int. Raises: ConfigInvalidError."""
    return check_int(
        f"{what}: batch size", value, minimum=1, advice="Give the number of rows of a batch."
    )


def check_rank(what: str, rank: object, num_ranks: object) -> tuple[int, int]:
    """Return a process's rank and the number of all as ints. Raises: ConfigInvalidError."""
    if isinstance(rank, Integral) and isinstance(num_ranks, Integral):
        number, num = int(rank), int(num_ranks)
        if 0 <= number < num:
            return number, num
    raise ConfigInvalidError(
        f"{what}: found rank {rank} of {num_ranks}, expected whole numbers, the rank 0 or more and "
        "less than how many there are. Pass this process's rank and the number of all."
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


def _describe_mismatch(what: str, value: object, expected: str, advice: str) -> str:
    who, _, name = what.rpartition(": ")
    found = f"{name} {value!r}" if isinstance(value, str) else f"{name} {value}"
    return f"{who}: found {found}, expected {expected}.{' ' if advice else ''}{advice}"
