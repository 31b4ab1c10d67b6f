"""User code: what `module:name` means, of a module on the path or in the current folder."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from replaylake.datastore.errors import NotFoundError
from replaylake.offline.learning.options import near_matches


def load_object(text: str, what: str, example: str) -> Any:
    """Return what `module:name` names; the module runs, as any that is imported.

    A module that is not on sys.path is looked for in the current folder, which then stays at the
    end of the path: what the module imports later is found too.

    Args:
        text: `module:name`.
        what: who needs it, as in errors: `environment`.
        example: a good one, for errors.

    Raises: NotFoundError if there is no such module, or nothing of that name in it. What the module
    raises as it is imported passes through.
    """
    module_name, _, name = text.partition(":")
    module = _module(module_name, f"{what} {text!r}", example)
    item = getattr(module, name, None)
    if item is None:
        callables = sorted(key for key, value in vars(module).items() if callable(value))
        raise NotFoundError(
            f"{what} {text!r}: module {module_name} ({getattr(module, '__file__', 'built in')}) "
            f"has no {name!r}, expected {near_matches(name, callables)}."
        )
    return item


def import_user_module(module_name: str) -> ModuleType:
    """Import a module, as `named` finds it. Raises: ModuleNotFoundError, and what it raises."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        top, here = module_name.partition(".")[0], os.getcwd()
        is_here = Path(here, f"{top}.py").is_file() or Path(here, top).is_dir()
        if error.name != top or here in sys.path or not is_here:
            raise
        # Commands that are installed, unlike scripts, do not have it there. At the end, so that
        # nothing in it takes the place of an installed module.
        sys.path.append(here)
        importlib.invalidate_caches()
        return importlib.import_module(module_name)


def _module(module_name: str, who: str, example: str) -> ModuleType:
    try:
        return import_user_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is there, but imports one that is not, has its own message.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise NotFoundError(
            f"{who}: found no module {error.name!r}, expected module:function, such as {example}, "
            f"of a module that Python can import, or of a file in {os.getcwd()}. Install it, or "
            "add its folder to PYTHONPATH."
        ) from error
    except ValueError as error:
        raise NotFoundError(
            f"{who}: found no name of a module before the colon, expected module:function, such as "
            f"{example}."
        ) from error
