"""Manifest: what a policy package says of itself, and the check that its files are as it says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final

from replaylake.datastore.episodes.encoding import from_json as encoding_from_json
from replaylake.datastore.episodes.spaces import from_json, to_json
from replaylake.datastore.errors import (
    FormatTooNewError,
    NotFoundError,
    PackageInvalidError,
    PolicyKindError,
    ReplayLakeError,
    ShardCorruptError,
)
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.storage.storage import Blob, Storage
from replaylake.datastore.version import VERSION

# 2: the policy has a state. 3: it is a language model. Of other policies, 1 is written: any
# ReplayLake can act with them.
FORMAT_VERSION: Final = 3
_STATEFUL_VERSION: Final = 2
_STATELESS_VERSION: Final = 1
LANGUAGE: Final = "language"
GRAPH: Final = "policy.onnx"
# Files that a language model cannot do without, and the forms in which it may have others: none of
# them is code.
MODEL_CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
_WEIGHTS: Final = ".safetensors"
_MODEL_SUFFIXES: Final = (_WEIGHTS, ".json", ".jinja", ".jsonl", ".model", ".txt")
MANIFEST: Final = "manifest.json"
LEARNER: Final = "learner.safetensors"
# What this module writes itself; a caller's manifest says the rest.
_RESERVED_FIELDS: Final = ("format_version", "written_by", "created_at", "kind", "policy", "files")


@dataclass(frozen=True)
class LanguageSpec:
    """What is known of a language model without loading it.

    architecture: its class in transformers. vocabulary_size: number of token ids. context_tokens:
    largest number of tokens of a prompt and its completion; None where its config names none.
    has_chat_template: whether it takes messages. generation: its generation_config.json.
    """

    architecture: str
    vocabulary_size: int
    context_tokens: int | None
    has_chat_template: bool
    generation: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What a package says of itself.

    contents: spaces and head, or what is known of a language model. body: the whole of
    manifest.json. sha256: of manifest.json, in hex, which stands for the package, because the
    manifest holds the hash of every other file. The registry's entry of a version has it, too.
    """

    contents: PolicySpec | LanguageSpec
    body: Mapping[str, Any]
    sha256: str

    @property
    def spec(self) -> PolicySpec:
        """Spaces and head. Raises: PolicyKindError for a language model, which has neither."""
        if isinstance(self.contents, LanguageSpec):
            raise PolicyKindError(
                f"policy {self._name}: found a language model ({self.contents.architecture}), "
                "expected a policy that maps observations to actions. A language model is compared "
                "by samples of tasks: evaluate it on a dataset of them, and promote it by a gate "
                "with a `measure` such as pass@1."
            )
        return self.contents

    @property
    def language(self) -> LanguageSpec:
        """What is known of the language model. Raises: PolicyKindError for any other policy."""
        if isinstance(self.contents, PolicySpec):
            raise PolicyKindError(
                f"policy {self._name}: found a policy of head {self.contents.head}, expected a "
                "language model."
            )
        return self.contents

    @property
    def is_language(self) -> bool:
        """Whether the policy is a language model."""
        return isinstance(self.contents, LanguageSpec)

    @property
    def _name(self) -> str:
        name, version = self.body.get("name"), self.body.get("version")
        return "of the package" if name is None else f"{name}:{version}"


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
    """Return the manifest of a policy and the bytes of every file that it lists, checked.

    Each file is read once, so that what is used is what was checked. manifest_sha256: that of a
    registered version, PolicyRef's; None for a package from outside of a lake, whose manifest
    nothing vouches for. Raises: NotFoundError, FormatTooNewError, PackageInvalidError;
    PolicyKindError for a language model, whose files may be too large for memory.
    """
    manifest = read_manifest(directory, manifest_sha256)
    _ = manifest.spec
    return manifest, dict(iter_verified(directory, manifest))


def iter_verified(directory: Path, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each file of a package, checked. Raises: PackageInvalidError."""
    for name, sha256 in _hashes(manifest.body).items():
        yield name, _read_verified(directory, name, sha256)


def verify_package(directory: Path, manifest_sha256: str | None = None) -> Manifest:
    """Return the manifest of a package of either kind, every file checked, one at a time.

    Arguments as of `read_verified`. Raises: NotFoundError, FormatTooNewError, PackageInvalidError.
    """
    manifest = read_manifest(directory, manifest_sha256)
    if not manifest.is_language:
        for _ in iter_verified(directory, manifest):
            pass
        return manifest
    hashes = _hashes(manifest.body)
    for name, sha256 in hashes.items():
        path = directory / name
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable_error(path, error) from error
        if digest != sha256:
            raise _checksum_error(path, digest, sha256)
    # transformers reads some files wherever they are, such as adapter_config.json.
    known = {MANIFEST, *hashes}
    files = (path for path in directory.rglob("*") if path.suffix in _MODEL_SUFFIXES)
    added = {path.relative_to(directory).as_posix() for path in files} - known
    if added:
        raise PackageInvalidError(
            f"{directory}: found files {sorted(added)[:3]} that the manifest does not list. Remove "
            "them, or register the model again."
        )
    return manifest


def read_manifest(directory: Path, manifest_sha256: str | None = None) -> Manifest:
    """Return a package's manifest alone; arguments and errors as of `read_verified`."""
    path = directory / MANIFEST
    data = _read_manifest(directory, manifest_sha256)
    try:
        body = json.loads(data)
        version = int(body["format_version"])
        _refuse_newer(directory, version, body)
        is_language = body.get("kind") == LANGUAGE
        about = body["policy"]
        contents = _language_from_json(about) if is_language else _spec_from_json(about)
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
            f"{path}: is no manifest of format {_STATELESS_VERSION} to {FORMAT_VERSION} "
            f"({type(error).__name__}: {error}). Package the policy again."
        ) from error
    needed = {MODEL_CONFIG, TOKENIZER} if is_language else {GRAPH}
    if is_language and not any(name.endswith(_WEIGHTS) for name in hashes):
        needed.add(f"weights (*{_WEIGHTS})")
    if missing := needed - hashes.keys():
        raise PackageInvalidError(
            f"{path}: found files {sorted(hashes)}, expected {', '.join(sorted(missing))} among "
            "them."
        )
    for name in hashes:
        if not _is_file_name(name, is_language=is_language):
            kinds = f" ending in {', '.join(_MODEL_SUFFIXES)}" if is_language else ""
            raise PackageInvalidError(
                f"{path}: found file {name!r}, expected names in the package's own folder{kinds}."
            )
    return Manifest(contents, body, _sha256(data))


def _is_file_name(name: str, *, is_language: bool) -> bool:
    """Whether a manifest may list a file: tokenizers have folders of chat templates."""
    if "\0" in name:
        return False
    if not is_language:
        return Path(name).name == name
    parts = PurePosixPath(name).parts
    is_inside = "/".join(parts) == name and not {"..", "/", "."} & {*parts}
    return is_inside and name != MANIFEST and name.endswith(_MODEL_SUFFIXES)


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
    try:
        data = (directory / name).read_bytes()
    except OSError as error:
        raise _unreadable_error(directory / name, error) from error
    if (digest := _sha256(data)) != sha256:
        raise _checksum_error(directory / name, digest, sha256)
    return data


def _unreadable_error(path: Path, error: OSError) -> PackageInvalidError:
    return PackageInvalidError(
        f"{path}: {error.strerror}, expected the file that the manifest lists. Package the policy "
        "again."
    )


def _checksum_error(path: Path, found: str, expected: str) -> PackageInvalidError:
    return PackageInvalidError(
        f"{path}: found sha256 {found[:16]}, expected {expected[:16]} as the manifest says: the "
        "file was altered. Package the policy again."
    )


def manifest_bytes(
    spec: PolicySpec, manifest: Mapping[str, Any], files: Mapping[str, bytes]
) -> bytes:
    """Return manifest.json for these files.

    Raises: PackageInvalidError if the fields are no JSON.
    """
    version = _STATEFUL_VERSION if spec.state_size else _STATELESS_VERSION
    listed = {name: (_sha256(data), len(data)) for name, data in files.items()}
    return _encode({"format_version": version}, _spec_to_json(spec), manifest, listed)


def describe_model(
    directory: Path, sha256s: Mapping[str, str], manifest: Mapping[str, Any]
) -> Manifest:
    """Return the manifest of a language model in a directory that transformers wrote.

    sha256s: of the files that belong to it, by name. manifest: what else is to be known.
    Raises: PackageInvalidError if config.json is not that of a language model.
    """
    config = _read_json(directory / MODEL_CONFIG)
    # Models of several parts have the numbers of the language model in a config of its own.
    text = {**config, **(config.get("text_config") or {})}
    # The second is GPT-2's name for it.
    limits = (text.get(name) for name in ("max_position_embeddings", "n_positions"))
    architectures = config.get("architectures")
    size = text.get("vocab_size")
    if not isinstance(architectures, list) or not architectures or type(size) is not int:
        raise PackageInvalidError(
            f"{directory / MODEL_CONFIG}: found no `architectures` or no `vocab_size`, expected "
            "the config of a language model. Save the model with transformers."
        )
    tokenizer = _read_json(directory / "tokenizer_config.json")
    templates = [name for name in sha256s if name.endswith(".jinja")]
    contents = LanguageSpec(
        str(architectures[0]),
        size,
        next((limit for limit in limits if type(limit) is int), None),
        bool(templates or tokenizer.get("chat_template")),
        _read_json(directory / "generation_config.json"),
    )
    listed = {name: (sha, (directory / name).stat().st_size) for name, sha in sha256s.items()}
    head = {"format_version": FORMAT_VERSION, "kind": LANGUAGE}
    data = _encode(head, asdict(contents), manifest, listed)
    return Manifest(contents, json.loads(data), _sha256(data))


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, an empty one if the file is absent. Raises: PackageInvalidError."""
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, RecursionError, ValueError) as error:
        raise PackageInvalidError(f"{path}: {error}, expected a JSON file.") from error
    if not isinstance(body, dict):
        raise PackageInvalidError(f"{path}: found {type(body).__name__}, expected a JSON object.")
    return body


def _encode(
    head: Mapping[str, Any],
    policy: Mapping[str, Any],
    manifest: Mapping[str, Any],
    files: Mapping[str, tuple[str, int]],
) -> bytes:
    """Return manifest.json; files: sha256 and bytes by name. Raises: PackageInvalidError."""
    reserved = sorted(set(manifest) & set(_RESERVED_FIELDS))
    if reserved:
        raise PackageInvalidError(
            f"manifest: found fields {reserved}, which the package writes itself."
        )
    body = {
        **head,
        "written_by": VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "policy": policy,
        **manifest,
        "files": {name: {"sha256": sha256, "bytes": num} for name, (sha256, num) in files.items()},
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


def _language_from_json(data: Mapping[str, Any]) -> LanguageSpec:
    limit = data["context_tokens"]
    return LanguageSpec(
        str(data["architecture"]),
        int(data["vocabulary_size"]),
        None if limit is None else int(limit),
        bool(data["has_chat_template"]),
        dict(data["generation"]),
    )
