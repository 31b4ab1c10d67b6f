"""Library: d3rlpy itself, imported quietly, and only when one of its algorithms is asked for."""

from __future__ import annotations

import sys
from types import ModuleType

from replaylake.datastore.errors import ExtraMissingError


def load_d3rlpy() -> ModuleType:
    """Import d3rlpy without its side effects on the terminal. Raises: ExtraMissingError.

    It imports gym, which prints on stderr that it is unmaintained, and points structlog at stdout,
    which is for data here.
    """
    if "d3rlpy" in sys.modules:
        return sys.modules["d3rlpy"]
    _silence_gym()
    try:
        import d3rlpy
        import structlog
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"d3rlpy algorithms: found no module {error.name!r}, expected d3rlpy 2.8.1. Run: "
            "pip install 'replaylake[offline]'."
        ) from error
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
    module: ModuleType = d3rlpy
    return module


def _silence_gym() -> None:
    """Empty the table of notices that gym looks its own version up in; touches nothing else."""
    try:
        # Untyped, and a dependency of a dependency: not worth a line in pyproject.toml.
        from gym_notices import notices  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return
    notices.notices = {}
