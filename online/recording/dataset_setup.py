"""Destination: the dataset that what is collected in an environment goes into."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from replaylake.datastore.errors import AlreadyExistsError, SchemaMismatchError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.offline.environments.ids import spaces_of
from replaylake.offline.evaluation.evaluate import check_spaces


def ensure_dataset(
    dataset: Dataset, env_id: str, env_args: Mapping[str, Any], *, mask_size: int | None
) -> None:
    """Create the dataset with an environment's spaces, or check that it has such.

    mask_size: width of its action masks, None if it gives none. Raises: SchemaMismatchError.
    """
    if not dataset.exists():
        # Another process may create it at this moment; its spaces are checked below.
        with suppress(AlreadyExistsError):
            dataset.create(*spaces_of(env_id, env_args), mask_size=mask_size)
    spec = dataset.spec
    try:
        check_spaces(env_id, spec.observation_space, spec.action_space, env_args)
    except SchemaMismatchError as error:
        raise SchemaMismatchError(
            f"dataset {dataset.name}: {error} Or collect into a new dataset."
        ) from error
    if mask_size not in (None, spec.mask_size):
        raise SchemaMismatchError(
            f"{dataset.name}: found action masks of width {mask_size} in {env_id}, expected "
            f"{spec.mask_size or 'none'} as the dataset was created. Collect into a new dataset."
        )
