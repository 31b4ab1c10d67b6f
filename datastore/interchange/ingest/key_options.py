"""Key options: the unique key that an ingest or a stream was given."""

from __future__ import annotations

from collections.abc import Sequence

from replaylake.datastore.episodes.schema import EPISODE_ID, SOURCE_EPISODE_ID, UniqueKeys
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.unique_keys import parse_unique


def parse_ingest_key(
    dataset: Dataset, unique: Sequence[str], late: Sequence[str]
) -> UniqueKeys | None:
    """Return the key that an ingest was given, or None. Raises: ConfigInvalidError."""
    known = dataset.spec.unique if dataset.exists() else None
    if not unique:
        if late and known is None:
            raise ConfigInvalidError(
                "late: requires `unique`, since the dataset has no unique key.",
                parameter="late",
            )
        return None if not late or known is None else parse_unique(known.columns, late)
    if EPISODE_ID in unique:
        raise ConfigInvalidError(
            f"unique: found {EPISODE_ID}, which is another in each ingest, expected "
            f"{SOURCE_EPISODE_ID}, the id that the log has.",
            parameter="unique",
        )
    return parse_unique(unique, late)
