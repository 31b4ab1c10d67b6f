"""Fsck: look at every byte of datasets and say what is wrong, where, and what to do.

Nothing is written unless `repair` is asked for; `quarantine.py` does that. Summaries of a dataset
with a damaged shard go all the same: they may be made of its bytes, and are made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    ReplayLakeError,
    StorageError,
)
from replaylake.datastore.lake.lake import KEYS, Lake
from replaylake.datastore.lake.policies.evaluations import find_damaged_evaluations
from replaylake.datastore.lake.policies.manifest import MANIFEST, Manifest
from replaylake.datastore.lake.policies.package import check_package
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.datastore.lake.runs.checkpoints import find_damaged_checkpoints
from replaylake.datastore.lake.runs.lease import find_damaged_heartbeats
from replaylake.datastore.lake.runs.metrics import find_damaged_pieces
from replaylake.datastore.maintenance.fsck.dataset_check import (
    CheckedDataset,
    DatasetCheck,
    OnProgress,
    age_text,
)
from replaylake.datastore.maintenance.fsck.finding import ERROR, NOTE, FsckFinding
from replaylake.datastore.maintenance.fsck.quarantine import Repair
from replaylake.datastore.names import LAKE_ROOT
from replaylake.datastore.storage.seals import read_json
from replaylake.datastore.storage.storage import Storage

DEFAULT_ORPHAN_AGE_S: Final = 7 * 86_400.0
# A writer puts its shards down before it commits them: a younger file may be about to be linked.
MIN_ORPHAN_AGE_S: Final = 3600.0


@dataclass(frozen=True)
class FsckReport:
    """What fsck found. `counts` are of all findings by check, `findings` the first hundred each."""

    datasets: tuple[CheckedDataset, ...]
    num_policies: int
    num_errors: int
    num_notes: int
    counts: dict[str, int]
    findings: tuple[FsckFinding, ...]
    repairs: tuple[Repair, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether no error was found; notes are none."""
        return not self.num_errors

    def to_json(self) -> dict[str, Any]:
        return {
            "clean": self.is_clean,
            "num_errors": self.num_errors,
            "num_notes": self.num_notes,
            "counts": self.counts,
            "datasets": [vars(one) for one in self.datasets],
            "num_policies": self.num_policies,
            "findings": [finding.to_json() for finding in self.findings],
            "repairs": [repair.to_json() for repair in self.repairs],
        }


def fsck(
    lake: Lake,
    datasets: Sequence[str] = (),
    *,
    all_versions: bool = False,
    repair: bool = False,
    orphan_age_s: float = DEFAULT_ORPHAN_AGE_S,
    on_progress: OnProgress | None = None,
    now_ms: int | None = None,
) -> FsckReport:
    """Check datasets; by default all of them, and the lake's own log and policies.

    Args:
        lake: the lake.
        datasets: names of datasets, also of those whose log can no longer be read.
        all_versions: check the shards of every retained version, not only of the newest.
        repair: move damaged shards, duplicate rows and old orphans into `<dataset>/_quarantine`,
            write damaged checkpoints again, and record the hashes of manifests that have none. No
            data is deleted permanently.
        orphan_age_s: the age from which a file that no version names counts as an orphan.
        on_progress: called after each shard.
        now_ms: the time for comparing ages; the clock's by default.

    Raises: NotFoundError for an unknown dataset, ConfigInvalidError for an age below an hour,
    StorageError. Cost: reads every shard once. Memory: a row group per thread (on an object store a
    shard), and 512 MB for the steps of all shards; the rest is on disk.
    """
    if orphan_age_s < MIN_ORPHAN_AGE_S:
        raise ConfigInvalidError(
            f"orphan_age_s: found {orphan_age_s:g}, expected at least {MIN_ORPHAN_AGE_S:g}: a "
            "younger file may be of a writer that is about to commit it."
        )
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    names = list(dict.fromkeys(datasets)) or _all_datasets(lake)
    horizon_ms = now_ms - int(orphan_age_s * 1000)
    check = DatasetCheck(lake, all_versions, repair, horizon_ms, on_progress)
    for name in names:
        check.run(name)
    num_policies = 0 if datasets else _check_lake(lake, check, horizon_ms, repair=repair)
    return FsckReport(
        datasets=tuple(check.datasets),
        num_policies=num_policies,
        num_errors=check.findings.count(ERROR),
        num_notes=check.findings.count(NOTE),
        counts=check.findings.counts(),
        findings=tuple(check.findings.shown),
        repairs=tuple(check.repairs),
    )


def _all_datasets(lake: Lake) -> list[str]:
    """Return every folder that has a log, also one that cannot be read."""
    names = []
    for name in lake.storage.names(""):
        try:
            table = lake.dataset(name).table
        except ReplayLakeError:
            continue
        if not table.log.folder.is_empty():
            names.append(name)
    return names


def _find_damaged_work_lists(storage: Storage) -> Iterator[tuple[str, str]]:
    """Yield (path, what is wrong) for the work lists of purges that were not finished."""
    for file in storage.files(f"{LAKE_ROOT}/purge"):
        try:
            read_json(storage.get(file.path) or b"{}")
        except (ValueError, RecursionError) as error:
            yield (
                file.path,
                f"{error}. Restore the file from a copy of the lake; or remove it, and run the "
                "purge again.",
            )


# The kinds of files with a checksum of their own, and who finds the damaged ones: path and reason.
_SEALED_FILES: Final[tuple[tuple[str, Callable[[Storage], Iterator[tuple[str, str]]]], ...]] = (
    ("metrics", find_damaged_pieces),
    ("run checkpoint", find_damaged_checkpoints),
    ("evaluation", find_damaged_evaluations),
    ("heartbeat", find_damaged_heartbeats),
    ("purge", _find_damaged_work_lists),
)


def _check_lake(lake: Lake, check: DatasetCheck, horizon_ms: int, *, repair: bool) -> int:
    """Check the lake's log, its policies, the files of its runs and what crashes left.

    Returns how many policies there are.
    """
    storage = lake.storage
    checked = check.check_lake_log(LAKE_ROOT)
    for file in storage.files(f"{LAKE_ROOT}/tmp"):
        if file.modified_ms < horizon_ms:
            age = age_text(file.modified_ms)
            message = (
                f"was left by a writer that did not finish, {age}. `replaylake maintain vacuum` "
                "removes it."
            )
            check.add(NOTE, "temporary", file.path, message)
    for name, find in _SEALED_FILES:
        for path, reason in find(storage):
            check.add(ERROR, name, path, reason)
    try:
        lake.signing_key(create=False)
    except NotFoundError:
        pass  # nothing was served yet
    except StorageError as error:
        check.add(ERROR, "signing key", KEYS, str(error))
    if checked.state is None:
        return 0
    policies = lake.registry.list()
    for row in policies:
        name = f"{row['policy']}:{row['version']}"
        folder = LAKE_ROOT
        try:
            ref = lake.registry.resolve(name)
            folder = ref.folder
            # What the store has is checked, and not a copy of this machine's.
            storage.forget(file.path for file in storage.files(folder))
            manifest = check_package(ref.path, ref.manifest_sha256)
            if ref.manifest_sha256 is None:
                _check_unrecorded(lake, check, ref, manifest, repair=repair)
        except ReplayLakeError as error:
            check.add(ERROR, "policy", folder, f"policy {name}: {error}")
    return len(policies)


def _check_unrecorded(
    lake: Lake, check: DatasetCheck, ref: PolicyRef, manifest: Manifest, *, repair: bool
) -> None:
    """Note a manifest whose hash is not in the registry; with repair, record the one it has."""
    path = f"{ref.folder}/{MANIFEST}"
    message = (
        f"policy {ref} was registered before the sha256 of manifests was recorded, so its "
        f"manifest cannot be verified. Look at it with `replaylake policies show {ref} --json`; "
        "`repair` records its current hash."
    )
    check.add(NOTE, "unverified", path, message)
    if repair:
        lake.registry.record_manifest(ref, manifest.sha256)
        check.repairs.append(Repair("recorded", "", path, "", None, 0, None))
