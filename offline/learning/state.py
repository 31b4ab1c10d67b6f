"""State: a nested state_dict as flat named arrays, and back. What a package keeps to resume from.

safetensors holds arrays by name and nothing else, while an optimizer's state nests dicts with
integer keys, numbers and None. Tensors become arrays; the rest becomes one JSON document, kept as
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import PackageInvalidError

_STRUCTURE: Final = "structure"


def pack_state(tree: Any) -> dict[str, Array]:
    """Return the tensors of a tree of dicts, lists, numbers, strings and None by their path.

    Args:
        tree: what state_dict() returned; keys are strings or integers.

    Returns: arrays, and uint8 `structure`, the JSON that says where they belong.
    """
    arrays: dict[str, Array] = {}
    structure = _flatten_tree(tree, "", arrays)
    arrays[_STRUCTURE] = np.frombuffer(json.dumps(structure).encode(), np.uint8).copy()
    return arrays


def unpack_state(arrays: Mapping[str, Array]) -> Any:
    """Rebuild what pack_state took apart, tensors on the CPU. Raises: PackageInvalidError."""
    try:
        structure = json.loads(arrays[_STRUCTURE].tobytes())
        return _unflatten_tree(structure, arrays)
    except (KeyError, ValueError, TypeError) as error:
        raise PackageInvalidError(
            f"learner state: {type(error).__name__}: {error}; expected the arrays that a learner "
            "of this version saved."
        ) from error


def _flatten_tree(tree: Any, path: str, arrays: dict[str, Array]) -> Any:
    if isinstance(tree, torch.Tensor):
        arrays[f"state{path}"] = tree.detach().cpu().numpy().copy()
        return {"array": f"state{path}"}
    if isinstance(tree, Mapping):
        items = [[key, _flatten_tree(sub, f"{path}.{key}", arrays)] for key, sub in tree.items()]
        return {"items": items}
    if isinstance(tree, list | tuple):
        parts = [_flatten_tree(sub, f"{path}.{i}", arrays) for i, sub in enumerate(tree)]
        return {"tuple" if isinstance(tree, tuple) else "list": parts}
    return {"value": tree}


def _unflatten_tree(structure: Any, arrays: Mapping[str, Array]) -> Any:
    ((kind, content),) = structure.items()
    if kind == "array":
        return torch.from_numpy(np.array(arrays[content]))
    if kind == "items":
        return {key: _unflatten_tree(sub, arrays) for key, sub in content}
    if kind in ("list", "tuple"):
        parts = [_unflatten_tree(sub, arrays) for sub in content]
        return parts if kind == "list" else tuple(parts)
    return content
