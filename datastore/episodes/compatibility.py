"""Compatibility: which spaces hold the same stored values, so that their episodes train together.

One rule for joining datasets, for logging a policy's decisions into a dataset, and for evaluating
in an environment: kind, shape and dtype have to agree, and the number and start of discrete
actions. The bounds of a Box do not: a log seldom states them. float32 and float64 are one, because
the writer rounds between them and replay decodes both to float32. Where columns were encoded, the
rules have to be the same ones: the same vocabularies, in the same places. Token ids have to be
those of one tokenizer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.schema import DatasetSpec, UniqueKeys
from replaylake.datastore.episodes.spaces import Box, Dict, Space, Tuple, bounds, children, describe
from replaylake.datastore.episodes.tokenizer import find_tokenizer_mismatch
from replaylake.datastore.episodes.tokens import has_tokens


def is_compatible(first: Space, second: Space, *, any_width: bool = False) -> bool:
    """Whether values of one space are stored as values of the other.

    `any_width` lets int32 stand for int64 too, and so on: values that are cast, not joined.
    """
    return bool(_storage_form(first, any_width) == _storage_form(second, any_width))


def find_spec_mismatch(first: DatasetSpec, second: DatasetSpec) -> str | None:
    """Say what keeps two datasets from being joined, as `the ... is A and B`; None if nothing."""
    for what, one, other in (
        ("observation space", first.observation_space, second.observation_space),
        ("action space", first.action_space, second.action_space),
    ):
        if not is_compatible(one, other):
            return f"the {what} is {describe(one)} and {describe(other)}"
    sizes = first.mask_size, second.mask_size
    if None not in sizes and sizes[0] != sizes[1]:
        return f"the action mask has {sizes[0]} and {sizes[1]} actions"
    mismatch = find_encoding_mismatch(first.encoding, second.encoding)
    return mismatch or _find_tokenizer_mismatch(first, second)


def _find_tokenizer_mismatch(first: DatasetSpec, second: DatasetSpec) -> str | None:
    """Say what keeps the token ids of two datasets from meaning the same; None if nothing."""
    if first.tokenizer is not None and second.tokenizer is not None:
        return find_tokenizer_mismatch(first.tokenizer, second.tokenizer)
    for stated, other in ((first, second), (second, first)):
        if stated.tokenizer is not None and has_tokens(other.extras):
            name = stated.tokenizer.describe()
            return f"the tokenizer is {name} for one, and not stated for the tokens of the other"
    return None


def join_specs(first: DatasetSpec, second: DatasetSpec) -> DatasetSpec:
    """Return the spec that two datasets without a `difference` have together.

    Bounds are those that hold for both; a mask is there, and a reward may be unknown, if either
    says so. Of encodings that only name numbers, different names are given up, and so are
    different references of scores and environments.
    """
    encodings = [spec.encoding for spec in (first, second) if spec.encoding is not None]
    named_alike = len({tuple(one.name for one in e.fields) for e in encodings}) == 1
    return replace(
        first,
        observation_space=_widest(first.observation_space, second.observation_space),
        action_space=_widest(first.action_space, second.action_space),
        mask_size=second.mask_size if first.mask_size is None else first.mask_size,
        rewards_optional=first.rewards_optional or second.rewards_optional,
        encoding=encodings[0] if named_alike else None,
        score_reference=first.score_reference
        if first.score_reference == second.score_reference
        else None,
        unique=_join_unique(first.unique, second.unique),
        env_spec=first.env_spec if first.env_spec == second.env_spec else None,
        tokenizer=first.tokenizer or second.tokenizer,
    )


def find_unique_mismatch(first: DatasetSpec, second: DatasetSpec) -> str | None:
    """Say that two datasets have different unique keys; None if they have the same, or none."""
    one, other = (None if s.unique is None else s.unique.columns for s in (first, second))
    if one == other:
        return None
    names = ["no columns" if key is None else ", ".join(key) for key in (one, other)]
    return f"the unique key is of {names[0]} and {names[1]}"


def _join_unique(first: UniqueKeys | None, second: UniqueKeys | None) -> UniqueKeys | None:
    if first is None or second is None:
        return None
    return UniqueKeys(first.columns, tuple(dict.fromkeys((*first.late, *second.late))))


def find_encoding_mismatch(first: Encoding | None, second: Encoding | None) -> str | None:
    """Say what keeps vectors made by two encodings from meaning the same; None if nothing."""
    one, other = (None if encoding is None else encoding.rules for encoding in (first, second))
    if one == other:
        return None
    if one is None or other is None:
        return "one has encoded columns (categories, times, action names) and the other has not"
    if one.action_names != other.action_names:
        mine, theirs = _abbreviate(one.action_names), _abbreviate(other.action_names)
        return f"the action names are {mine} and {theirs}"
    pairs = [pair for pair in zip(one.fields, other.fields, strict=False) if pair[0] != pair[1]]
    names = [[field.name for field in encoding.fields] for encoding in (one, other)]
    where = f"column {pairs[0][0].name!r}" if names[0] == names[1] else f"{names[0]} and {names[1]}"
    return f"the columns that observations are encoded from differ ({where})"


def _abbreviate(names: tuple[str, ...] | None) -> str:
    return "none" if names is None else ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _storage_form(space: Space, any_width: bool) -> Any:
    if isinstance(space, Dict | Tuple):
        return {key: _storage_form(sub, any_width) for key, sub in children(space).items()}
    if isinstance(space, Box):
        dtype = np.dtype(space.dtype)
        if any_width:
            return (space.shape, dtype.kind)
        return (space.shape, "float32" if dtype == np.float64 else dtype.name)
    return space


def _widest(first: Space, second: Space) -> Space:
    if isinstance(first, Box) and isinstance(second, Box):
        (low, high), (other_low, other_high) = bounds(first), bounds(second)
        return Box(
            first.shape,
            np.promote_types(first.dtype, second.dtype).name,
            np.minimum(low, other_low),
            np.maximum(high, other_high),
        )
    if isinstance(first, Dict) and isinstance(second, Dict | Tuple):
        others = children(second)
        return Dict({key: _widest(sub, others[key]) for key, sub in first.spaces.items()})
    if isinstance(first, Tuple) and isinstance(second, Dict | Tuple):
        others = children(second)
        return Tuple(tuple(_widest(sub, others[f"_{i}"]) for i, sub in enumerate(first.spaces)))
    return first
