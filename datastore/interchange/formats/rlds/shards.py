"""The files of a TFDS dataset folder: record shards by split, and the JSON beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.interchange.sources.source import SourceFile, unreadable

FEATURES: Final = "features.json"
_INFO: Final = "dataset_info.json"
# NAME-SPLIT.tfrecord-00000-of-00002; other file formats of TFDS have another word in the middle.
SHARD: Final = re.compile(
    r"(?P<name>.+)-(?P<split>[^-/]+)\.(?P<kind>tfrecord|array_record|riegeli|parquet)"
    r"-(?P<shard>\d+)-of-(?P<num>\d+)"
)
_MAX_JSON_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Shard:
    """One of a split's record files, and how many records dataset_info.json says it has."""

    file: SourceFile
    split: str
    number: int
    of: int
    num_records: int | None = None


def find_shards(files: Sequence[SourceFile]) -> tuple[list[Shard], list[str]]:
    """Return the record files, split by split, and what is to be said of them.

    Raises: SourceInvalid if there are none, they are of several datasets, or not TFRecord.
    """
    found = [(file, match) for file in files if (match := SHARD.fullmatch(file.base_name))]
    if not found:
        raise SourceInvalid(
            f"{files[0].name}: found no file like NAME-SPLIT.tfrecord-00000-of-00001, expected the "
            "records of a TFDS dataset. Pass its whole folder."
        )
    names = sorted({match["name"] for _, match in found})
    if len(names) > 1:
        raise SourceInvalid(
            f"{found[0][0].name}: found the datasets {', '.join(names)}, expected one. Ingest them "
            "one by one."
        )
    kinds = sorted({match["kind"] for _, match in found} - {"tfrecord"})
    if kinds:
        raise SourceInvalid(
            f"{found[0][0].name}: found {', '.join(kinds)} files, expected TFRecord. Write the "
            "dataset again with TFDS's file_format='tfrecord'."
        )
    lengths = _lengths(files)
    shards = [
        Shard(file, match["split"], int(match["shard"]), int(match["num"])) for file, match in found
    ]
    shards = [
        replace(one, num_records=known[one.number])
        if (known := lengths.get(one.split)) is not None and one.number < len(known) == one.of
        else one
        for one in sorted(shards, key=lambda one: (one.split, one.number))
    ]
    counts = {one.split: one.of for one in shards}
    notes = []
    if len(counts) > 1:
        notes.append(f"all splits were read: {', '.join(counts)}; the column `split` tells them")
    for split, of in counts.items():
        if (num := sum(one.split == split for one in shards)) < of:
            notes.append(f"of the split {split}, {num} of {of} shards are in the source")
    return shards, notes


def _lengths(files: Sequence[SourceFile]) -> dict[str, list[int]]:
    """Return how many records dataset_info.json says that each split's shards have."""
    for file in files:
        if file.base_name != _INFO:
            continue
        try:
            splits = read_json(file).get("splits") or []
            return {one["name"]: [int(n) for n in one.get("shardLengths", [])] for one in splits}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SourceInvalid(
                f"{file.name}: found splits that cannot be read ({error!r}), expected names and "
                "shardLengths as TFDS writes them. Leave the file out."
            ) from error
    return {}


def check_count(shard: Shard, num: int) -> None:
    """Refuse a shard that holds another number of records than it should. Raises: SourceInvalid."""
    # A file that was cut between two records looks whole, so the number is compared too.
    if shard.num_records not in (None, num):
        raise SourceInvalid(
            f"{shard.file.name}: found {num} records, expected {shard.num_records} as {_INFO} "
            "says. The file was cut or is of another version: copy it again."
        )


def read_json(file: SourceFile) -> Any:
    """Parse a file of JSON. Raises: SourceInvalid."""
    file.check_unchanged()
    try:
        with file.open() as stream:
            return json.loads(stream.read(_MAX_JSON_BYTES))
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise unreadable(file.name, error) from error
