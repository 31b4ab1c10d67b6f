"""Minari's spaces: gymnasium's, as JSON; to ours and back, without gymnasium."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
)
from replaylake.datastore.errors import SchemaMismatchError, SourceInvalidError
from replaylake.datastore.interchange.formats.tabular.fields import column_name

_KINDS: Final = "Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict and Tuple"
_LONGEST_TEXT: Final = 2**31 - 1


def parse_space(text: Any, where: str) -> Space:
    """Read a space from its JSON text. `where` begins messages. Raises: SourceInvalidError."""
    try:
        body = json.loads(text)
        return _space(body)
    except (
        AttributeError,
        KeyError,
        OverflowError,
        RecursionError,
        SchemaMismatchError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())[:300]
        raise SourceInvalidError(
            f"{where}: found {str(text)[:200]!r} ({type(error).__name__}: {reason}), expected a "
            f"space as Minari writes it: {_KINDS}. Correct it, or ingest main_data.hdf5 alone."
        ) from error


def to_json_text(space: Space) -> str:
    """Return the text that Minari keeps of a space."""
    return json.dumps(_plain(space))


def _space(body: Mapping[str, Any]) -> Space:
    kind = body["type"]
    if kind == "Box":
        # -0.0 and beyond-float bounds come as JSON has them: Infinity is read by json.
        shape = tuple(int(n) for n in body["shape"])
        low, high = (_parse_bound(body[name], shape) for name in ("low", "high"))
        return Box(shape, np.dtype(body["dtype"]).name, low, high)
    if kind == "Discrete":
        return Discrete(int(body["n"]), int(body.get("start", 0)))
    if kind == "MultiDiscrete":
        return _multi_discrete(body)
    if kind == "MultiBinary":
        if isinstance(body["n"], list):
            return Box(tuple(int(n) for n in body["n"]), "int8", 0, 1)
        return MultiBinary(int(body["n"]))
    if kind == "Text":
        return Text()
    if kind == "Dict":
        members = {
            column_name(n, i): _space(s) for i, (n, s) in enumerate(body["subspaces"].items())
        }
        if len(members) < len(body["subspaces"]):
            raise ValueError(f"keys that stay distinct as column names, not {[*members]}")
        return Dict(members)
    if kind == "Tuple":
        return Tuple(tuple(map(_space, body["subspaces"])))
    raise ValueError(f"type {kind!r}")


def _parse_bound(value: Any, shape: tuple[int, ...]) -> Any:
    bound = np.asarray(value, np.float64)
    if bound.shape not in ((), shape):
        raise ValueError(f"bounds of shape {list(bound.shape)} for values of {list(shape)}")
    return bound


def _multi_discrete(body: Mapping[str, Any]) -> Space:
    nvec, start = np.asarray(body["nvec"], np.int64), np.asarray(body.get("start", 0), np.int64)
    if nvec.ndim == 1 and not start.any():
        return MultiDiscrete(tuple(nvec.tolist()))
    # Ours starts at 0 and has one dim.
    low = np.broadcast_to(start, nvec.shape)
    return Box(nvec.shape, "int64", low.tolist(), (low + nvec - 1).tolist())


def _plain(space: Space) -> dict[str, Any]:
    if isinstance(space, Box):
        dtype = np.dtype(space.dtype)
        low, high = (_fill_bound(bound, space.shape, dtype) for bound in (space.low, space.high))
        shape = list(space.shape)
        return {"type": "Box", "dtype": dtype.name, "shape": shape, "low": low, "high": high}
    if isinstance(space, Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": space.start, "n": space.n}
    if isinstance(space, MultiDiscrete):
        nvec = list(space.nvec)
        return {"type": "MultiDiscrete", "dtype": "int64", "nvec": nvec, "start": [0] * len(nvec)}
    if isinstance(space, MultiBinary):
        return {"type": "MultiBinary", "n": space.n}
    if isinstance(space, Text):
        return {
            "type": "Text",
            "max_length": _LONGEST_TEXT,
            "min_length": 0,
            "charset": string.printable,
        }
    if isinstance(space, Dict):
        return {"type": "Dict", "subspaces": {k: _plain(sub) for k, sub in space.spaces.items()}}
    return {"type": "Tuple", "subspaces": [_plain(sub) for sub in space.spaces]}


def _fill_bound(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return a bound for every element; an integer's open bound is the dtype's own."""
    full = np.broadcast_to(np.asarray(bound, np.float64), shape)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        # Through Python's integers: 2**63 - 1 is no float64.
        ints = [_clip(value, limits) for value in full.reshape(-1).tolist()]
        return np.asarray(ints, object).reshape(shape).tolist()
    if dtype.kind == "b":
        return (full > 0).tolist()
    return full.tolist()


def _clip(value: float, limits: Any) -> int:
    if value <= limits.min:
        return int(limits.min)
    return int(limits.max) if value >= limits.max else int(value)
