"""Saved evaluations: whole reports of off-policy evaluation, of task sets and of promotion gates.

Each is a file of its own, `_lake/evaluations/<ulid>.json`, with its checksum inside. It is never
written again, and it stays when its policy is deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from replaylake.datastore.errors import FormatTooNewError, NotFoundError, StorageError
from replaylake.datastore.lake.policies.entries import now_ms
from replaylake.datastore.names import LAKE_ROOT, new_ulid
from replaylake.datastore.storage.seals import read_json, seal_json
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.version import VERSION

Kind = Literal["ope", "gate", "tasks"]
OnUnreadable = Callable[[StorageError | FormatTooNewError], None]
_FOLDER: Final = f"{LAKE_ROOT}/evaluations"
_FORMAT: Final = 1
# Files that are read at the same time.
_BATCH: Final = 100


@dataclass(frozen=True)
class SavedEvaluation:
    """A report as it was saved.

    kind: `ope`, `tasks` for stored samples of tasks, or `gate` for the comparison of a candidate
    with the champion. policy and policy_version: None where the report is of an SQL expression or
    of random actions.
    dataset_version: None of a gate that found nothing to compare. verdict: `supported`, `weak` or
    `not supported`; of a gate `passed` or `refused`. report: as `ope --json`, `promote --json` and
    `evaluate --json` print it, of the latter one policy's; numbers that are not finite are None.
    replaylake_version: that which saved it.
    """

    evaluation_id: str
    kind: Kind
    policy: str | None
    policy_version: int | None
    dataset: str
    dataset_version: int | None
    verdict: str
    evaluated_at: datetime
    evaluated_by: str | None
    replaylake_version: str
    report: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return all fields, the time as ISO text."""
        return {**asdict(self), "evaluated_at": self.evaluated_at.isoformat()}


class Evaluations:
    """The saved evaluations of one lake."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def save(
        self,
        kind: Kind,
        report: Mapping[str, Any],
        *,
        policy: str | None,
        policy_version: int | None,
        dataset: str,
        dataset_version: int | None,
        verdict: str,
        by: str | None = None,
    ) -> str:
        """Save a report durably; returns its id, a ULID. Arguments: as SavedEvaluation has them.

        Raises: StorageError, for example in a lake that is read-only; nothing is written then.
        """
        # After the newest by name too: two of one millisecond, or a clock that was set back.
        evaluation_id = new_ulid(after=max(self._storage.names(_FOLDER), default=""))
        body = {
            "format": _FORMAT,
            "kind": kind,
            "policy": policy,
            "policy_version": policy_version,
            "dataset": dataset,
            "dataset_version": dataset_version,
            "verdict": verdict,
            "evaluated_ms": now_ms(),
            "evaluated_by": by,
            "replaylake_version": VERSION,
            "report": _to_strict_json(report),
        }
        self._storage.put(f"{_FOLDER}/{evaluation_id}.json", seal_json(body))
        return evaluation_id

    def read(self, evaluation_id: str) -> SavedEvaluation:
        """Read one.

        Raises: NotFoundError, FormatTooNewError; StorageError where its file is damaged.
        """
        # An id may come from an address: only a file of this folder is read.
        is_name = evaluation_id.isalnum()
        data = self._storage.get(f"{_FOLDER}/{evaluation_id}.json") if is_name else None
        if data is None:
            raise NotFoundError(
                f"evaluation {evaluation_id!r}: not in this lake. `select evaluation_id from "
                "evaluations` lists those that are."
            )
        return _decode(evaluation_id, data)

    def list(
        self,
        policy: str | None = None,
        policy_version: int | None = None,
        *,
        on_unreadable: OnUnreadable | None = None,
    ) -> list[SavedEvaluation]:
        """Return those of a policy or one of its versions, or all, the newest last.

        on_unreadable: called with the error of each file that is damaged or of a newer release,
        which is left out, as whose evaluation it is cannot be known. Without it, the first raises.
        Cost: reads every saved evaluation of the lake. Raises: as read.
        """
        found = []
        for evaluation_id, data in _iter_files(self._storage):
            one = _decode_readable(evaluation_id, data, on_unreadable)
            if (
                one is not None
                and policy in (None, one.policy)
                and policy_version in (None, one.policy_version)
            ):
                found.append(one)
        return found

    def list_newest(
        self,
        policy: str,
        num: int,
        *,
        before: str | None = None,
        max_files: int = 1000,
        on_unreadable: OnUnreadable | None = None,
    ) -> tuple[Sequence[SavedEvaluation], str | None]:
        """Return `num` evaluations of a policy, the newest first, and where older ones begin.

        before: only evaluations that are older than that id. max_files: of how many evaluations of
        the lake to look at; so there may be fewer than `num` although older ones exist. The second
        value is the `before` of the next call, None where all of the lake has been looked at.
        on_unreadable: as in `list`. Raises: as read.
        """
        names = [name for name in self._storage.names(_FOLDER) if name.endswith(".json")]
        if before is not None:
            names = [name for name in names if name < f"{before}.json"]
        names.reverse()
        looked_at = names[:max_files]
        found: list[SavedEvaluation] = []
        for start in range(0, len(looked_at), _BATCH):
            batch = looked_at[start : start + _BATCH]
            for evaluation_id, data in _read_files(self._storage, batch):
                one = _decode_readable(evaluation_id, data, on_unreadable)
                if one is None or one.policy != policy:
                    continue
                found.append(one)
                if len(found) == num:
                    is_last = f"{evaluation_id}.json" == names[-1]
                    return found, None if is_last else evaluation_id
        is_all = len(looked_at) == len(names)
        return found, None if is_all else looked_at[-1].removesuffix(".json")


def find_damaged_evaluations(storage: Storage) -> Iterator[tuple[str, str]]:
    """Yield (path, what is wrong) for each saved evaluation that cannot be read.

    Those that a newer release wrote are left alone. Raises: StorageError.
    """
    for evaluation_id, data in _iter_files(storage):
        try:
            _decode(evaluation_id, data)
        except FormatTooNewError:
            continue
        except StorageError as error:
            yield f"{_FOLDER}/{evaluation_id}.json", str(error)


def _iter_files(storage: Storage) -> Iterator[tuple[str, bytes]]:
    """Yield the id and content of each file, the oldest first."""
    names = [name for name in storage.names(_FOLDER) if name.endswith(".json")]
    yield from _read_files(storage, names)


def _read_files(storage: Storage, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    contents = storage.get_many([f"{_FOLDER}/{name}" for name in names])
    for name, data in zip(names, contents, strict=True):
        if data is not None:
            yield name.removesuffix(".json"), data


def _decode_readable(
    evaluation_id: str, data: bytes, on_unreadable: OnUnreadable | None
) -> SavedEvaluation | None:
    """Return an evaluation; None for one that cannot be read, if its error has a receiver."""
    try:
        return _decode(evaluation_id, data)
    except (StorageError, FormatTooNewError) as error:
        if on_unreadable is None:
            raise
        on_unreadable(error)
        return None


def _decode(evaluation_id: str, data: bytes) -> SavedEvaluation:
    where = f"evaluation {evaluation_id}"
    try:
        body = read_json(data)
        if body["format"] > _FORMAT:
            raise FormatTooNewError(
                f"{where}: found format {body['format']}, expected at most {_FORMAT}: it was saved "
                f"by ReplayLake {body.get('replaylake_version')}. Update ReplayLake."
            )
        return SavedEvaluation(
            evaluation_id,
            body["kind"],
            body["policy"],
            body["policy_version"],
            body["dataset"],
            body["dataset_version"],
            body["verdict"],
            datetime.fromtimestamp(body["evaluated_ms"] / 1000, UTC),
            body["evaluated_by"],
            body["replaylake_version"],
            body["report"],
        )
    except (ValueError, RecursionError, LookupError, TypeError, OverflowError) as error:
        raise StorageError(
            f"{where}: {_FOLDER}/{evaluation_id}.json is damaged: {error}. Restore the file from a "
            "backup, or delete it and evaluate again."
        ) from error


def _to_strict_json(value: Any) -> Any:
    """Return what every JSON parser reads: numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {str(key): _to_strict_json(sub) for key, sub in value.items()}
    if isinstance(value, list | tuple):
        return [_to_strict_json(sub) for sub in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
