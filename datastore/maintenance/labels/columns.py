"""Label columns: which columns of a dataset labels may write, and in which types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from replaylake.datastore.episodes.schema import REWARD, STANDARD_COLUMNS, check_names
from replaylake.datastore.errors import ConfigInvalid, SchemaMismatch
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    REPORTED,
    REQUEST_ID,
    REWARD_LATE,
    REWARDED_AT,
)
from replaylake.datastore.maintenance.labels.labels import Key, Labels

_RESERVED: Final = (
    *STANDARD_COLUMNS,
    DECISION_ID,
    REPORTED,
    REQUEST_ID,
    REWARDED_AT,
    REWARD_LATE,
)


def check_assigned(given: Mapping[str, str], added: Mapping[str, str], key: Key, to: str) -> None:
    """Refuse what labels may not write. Raises: ConfigInvalid."""
    if not given and not added:
        raise ConfigInvalid("annotate: found nothing to write, expected --set reward=... or --add.")
    if other := sorted({*given} - {REWARD}):
        raise ConfigInvalid(
            f"--set: found {other[0]}, expected reward: what else a step has says what happened. "
            "Ends come with the log or with feedback; new columns with --add."
        )
    if taken := sorted({*added} & {*_RESERVED}):
        raise ConfigInvalid(
            f"--add: found {taken[0]}, expected none of the columns that every step has. Name it "
            f"otherwise, as in --add my_{taken[0]}={added[taken[0]]}; a reward is --set."
        )
    if to not in ("last", "each"):
        raise ConfigInvalid(f"--to: found {to!r}, expected last or each.")
    if to == "each" and (not given or key.names_steps):
        raise ConfigInvalid(
            "--to each: expected a reward and a key of episodes: other labels go to all steps that "
            "they name. Leave it out."
        )


def typed_columns(
    labels: Labels, added: Mapping[str, str], schema: pa.Schema
) -> dict[str, pa.Array]:
    """Return the columns to add in the types that the dataset keeps. Raises: SchemaMismatch."""
    check_names(name for name in added if name not in schema.names)
    typed = {}
    for name, source in added.items():
        values = labels.values.column(source).unify_dictionaries().combine_chunks()
        if name in schema.names and not values.type.equals(schema.field(name).type):
            values = _cast(values, name, schema.field(name).type)
        typed[name] = values
    return typed


def _cast(values: pa.Array, name: str, kind: pa.DataType) -> pa.Array:
    found, types = values.type, pa.types
    texts = types.is_string(found) and types.is_dictionary(kind)
    texts |= types.is_dictionary(found) and types.is_string(kind)
    numbers = types.is_integer(found) and (types.is_floating(kind) or types.is_integer(kind))
    numbers |= types.is_floating(found) and types.is_floating(kind)
    try:
        if texts or numbers:
            return values.dictionary_encode().cast(kind) if texts else values.cast(kind)
    except pa.ArrowException as error:
        raise _other_type(name, f"{found} ({error})", kind) from error
    raise _other_type(name, str(found), kind)


def _other_type(name: str, found: str, kind: pa.DataType) -> SchemaMismatch:
    return SchemaMismatch(
        f"column {name!r}: found {found}, expected {kind} as the dataset has it. Cast it, or add "
        f"it under another name, as in --add {name}_2={name}."
    )
