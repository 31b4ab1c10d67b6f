"""Manifest: what a policy package says of itself, and the check that its files are as it says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.episodes.encoding import from_json as encoding_from_json
from replaylake.datastore.episodes.spaces import from_json, to_json
from replaylake.datastore.errors import (
    FormatTooNewError,
    NotFoundError,
    PackageInvalidError,
    ReplayLakeError,
    ShardCorruptError,
)
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.storage.storage import Blob, Storage
from replaylake.datastore.version import VERSION

# 2: the policy has a state. Of what has none, 1 is written: any ReplayLake can act with it.
FORMAT_VERSION: Final = 2
_STATELESS_VERSION: Final = 1
GRAPH: Final = "policy.onnx"
MANIFEST: Final = "manifest.json"
LEARNER: Final = "learner.safetensors"
# What this module writes itself; a caller's manifest says the rest.
_RESERVED_FIELDS: Final = ("format_version", "written_by", "created_at", "policy", "files")


@dataclass(frozen=True)
class Manifest:
    """What a package says of itself.

    spec: spaces and head. body: the whole of manifest.json. sha256: of manifest.json, in hex, which
    stands for the package, because the manifest holds the hash of every other file. The registry's
    entry of a version has it, too.
    """

    spec: PolicySpec
    body: Mapping[str, Any]
    sha256: str


def fetch_package(storage: Storage, folder: str, manifest_sha256: str | None = None) -> Path:
    """Return a folder of this machine that holds a package of the lake, its manifest checked.

    Where the lake is remote its files are copied, and checked against the manifest as they are.
    manifest_sha256: what the registry has; None where it has nothing, and nothing is checked.
    Raises: StorageError, NotFoundError, PackageInvalidError.
    """
    if (path := storage.local_folder(folder)) is not None:
        if manifest_sha256 is not None:
            _read_manifest(path, manifest_sha256)
        return path
    manifest = Blob(f"{folder}/{MANIFEST}", sha256=manifest_sha256 or "")
    try:
        (path,) = storage.fetch([manifest])
        if manifest_sha256 is not None and _sha256(path.read_bytes()) != manifest_sha256:
            # A copy of this machine's went bad since it was checked; what it was made of need not.
            storage.forget([manifest.path])
            (path,) = storage.fetch([manifest])
        storage.fetch([Blob(f"{folder}/{name}", *about) for name, about in _list_files(path)])
    except ShardCorruptError as error:
        raise PackageInvalidError(f"policy package: {error}") from error
    return path.parent


def _list_files(manifest: Path) -> list[tuple[str, tuple[int, str]]]:
    """Return (name, (bytes, sha256)) of a manifest's files; none where it says nothing of sense.

    Whoever reads the package finds out what is wrong with it.
    """
    try:
        files = json.loads(manifest.read_bytes())["files"].items()
        return [(str(name), (int(about["bytes"]), str(about["sha256"]))) for name, about in files]
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError):
        return []


def read_verified(
    directory: Path, manifest_sha256: str | None = None
) -> tuple[Manifest, dict[str, bytes]]:
    """Return a package's manifest and the bytes of every file that it lists, checked.

    Each file is read once, so that what is used is what was checked. manifest_sha256: that of a
    registered version, PolicyRef's; None for a package from outside of a lake, whose manifest
    nothing vouches for. Raises: NotFoundError, FormatTooNewError, PackageInvalidError.
    """
    manifest = read_manifest(directory, manifest_sha256)
    hashes = _hashes(manifest.body)
    files = {name: _read_verified(directory, name, sha256) for name, sha256 in hashes.items()}
    return manifest, files


def read_manifest(directory: Path, manifest_sha256: str | None = None) -> Manifest:
    """Return a package's manifest alone; arguments and errors as of `read_verified`."""
    path = directory / MANIFEST
    data = _read_manifest(directory, manifest_sha256)
    try:
        body = json.loads(data)
        version = int(body["format_version"])
        _refuse_newer(directory, version, body)
        spec = _spec_from_json(body["policy"])
        hashes = _hashes(body)
    except FormatTooNewError:
        raise
    except (
        AttributeError,
        KeyError,
        RecursionError,
        ReplayLakeError,
        TypeError,
        ValueError,
    ) as error:
        raise PackageInvalidError(
            f"{path}: is no manifest of format {_STATELESS_VERSION} or {FORMAT_VERSION} "
            f"({type(error).__name__}: {error}). Package the policy again."
        ) from error
    if GRAPH not in hashes:
        raise PackageInvalidError(
            f"{path}: found files {sorted(hashes)}, expected {GRAPH} among them."
        )
    return Manifest(spec, body, _sha256(data))


def _hashes(body: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(entry["sha256"]) for name, entry in body["files"].items()}


def hash_manifest(directory: Path) -> str:
    """Return the sha256 of a package's manifest. Raises: NotFoundError, PackageInvalidError."""
    return _sha256(_read_manifest(directory, None))


def _read_manifest(directory: Path, sha256: str | None) -> bytes:
    """Return manifest.json, of that hash where one is given.

    Raises: NotFoundError, PackageInvalidError.
    """
    path = directory / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{directory}: found no {MANIFEST}, expected a policy package. Give the directory that "
            "`replaylake policies package` wrote."
        ) from error
    except OSError as error:
        raise PackageInvalidError(f"{path}: cannot be read: {error.strerror}.") from error
    if sha256 is not None and (digest := _sha256(data)) != sha256:
        raise PackageInvalidError(
            f"{path}: found sha256 {digest[:16]}, expected {sha256[:16]} as it was registered: the "
            "manifest was altered. Restore it from a copy of the lake, or register the policy "
            "again."
        )
    return data


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _refuse_newer(directory: Path, version: int, body: Mapping[str, Any]) -> None:
    if version > FORMAT_VERSION:
        raise FormatTooNewError(
            f"{directory}: found policy package format {version}, this ReplayLake {VERSION} reads "
            f"up to {FORMAT_VERSION}. Install ReplayLake {body.get('written_by', 'newer')} or "
            "later."
        )


def _read_verified(directory: Path, name: str, sha256: str) -> bytes:
    if Path(name).name != name or "\0" in name:
        raise PackageInvalidError(
            f"{directory / MANIFEST}: found file {name!r}, expected names in the package's own "
            "folder."
        )
    try:
        data = (directory / name).read_bytes()
    except OSError as error:
        raise PackageInvalidError(
            f"{directory / name}: {error.strerror}, expected the file that the manifest lists. "
            "Package the policy again."
        ) from error
    digest = _sha256(data)
    if digest != sha256:
        raise PackageInvalidError(
            f"{directory / name}: found sha256 {digest[:16]}, expected {sha256[:16]} as the "
            "manifest says: the file was altered. Package the policy again."
        )
    return data


def manifest_bytes(
    spec: PolicySpec, manifest: Mapping[str, Any], files: Mapping[str, bytes]
) -> bytes:
    """Return manifest.json for these files.

    Raises: PackageInvalidError if the fields are no JSON.
    """
    reserved = sorted(set(manifest) & set(_RESERVED_FIELDS))
    if reserved:
        raise PackageInvalidError(
            f"manifest: found fields {reserved}, which the package writes itself."
        )
    body = {
        "format_version": FORMAT_VERSION if spec.state_size else _STATELESS_VERSION,
        "written_by": VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "policy": _spec_to_json(spec),
        **manifest,
        "files": {
            name: {"sha256": _sha256(data), "bytes": len(data)} for name, data in files.items()
        },
    }
    try:
        return json.dumps(body, indent=2, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise PackageInvalidError(
            f"manifest: {error}; expected finite numbers, strings, lists and objects only."
        ) from error


def stamp_manifest(manifest: Manifest, name: str, version: int) -> bytes:
    """Return manifest.json with the name and version that the package is registered as."""
    body = {**manifest.body, "name": name, "version": version}
    return json.dumps(body, indent=2).encode() + b"\n"


def _spec_to_json(spec: PolicySpec) -> dict[str, Any]:
    return {
        "observation_space": to_json(spec.observation_space),
        "action_space": to_json(spec.action_space),
        "head": spec.head,
        "noise_size": spec.noise_size,
        **({"state_size": spec.state_size} if spec.state_size else {}),
        **({"frame_stack": spec.frame_stack} if spec.frame_stack > 1 else {}),
        **({} if spec.encoding is None else {"encoding": spec.encoding.to_json()}),
    }


def _spec_from_json(data: Mapping[str, Any]) -> PolicySpec:
    encoding = data.get("encoding")
    return PolicySpec(
        from_json(data["observation_space"]),
        from_json(data["action_space"]),
        data["head"],
        int(data["noise_size"]),
        None if encoding is None else encoding_from_json(encoding),
        int(data.get("state_size", 0)),
        int(data.get("frame_stack", 1)),
    )
