"""Registration: a directory with a language model becomes a version of a policy.

Its files are copied into the lake with the sha256 of each. Nothing is loaded, and no code in the
directory is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.manifest import describe_model
from replaylake.datastore.lake.policies.package import check_package
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.datastore.names import check_policy_name
from replaylake.offline.language.pretrained import ORIGIN, ModelFolder, check_model_folder

# Fields of a run that a version's lineage has.
_OF_RUN: Final = ("algorithm", "datasets", "seed", "model")
_IMPORTED: Final = "imported"


def find_model(lake: Lake, model: str) -> tuple[Path, PolicyRef | None]:
    """Return the directory of a model, and its version where `model` names one of the lake.

    model: a directory, or `NAME:VERSION` or `NAME@ALIAS` of a language policy; of two that have one
    name, the directory. Raises: as find_version.
    """
    if not is_version_name(model):
        return Path(model), None
    ref = find_version(lake, model)
    return ref.path, ref


def find_version(lake: Lake, name: str) -> PolicyRef:
    """Return a version of a language policy, its manifest checked.

    Raises: InvalidNameError, NotFoundError; PolicyKindError for a policy of another kind;
    PackageInvalidError, StorageError.
    """
    ref = lake.registry.resolve(name)
    _ = check_package(ref.path, ref.manifest_sha256).language
    return ref


def is_version_name(model: str) -> bool:
    """Whether a model is named as a version of a policy, and no such directory exists."""
    return (":" in model or "@" in model) and not Path(model).exists()


def register_language_model(lake: Lake, name: str, directory: str | Path) -> PolicyRef:
    """Register a directory that transformers wrote as the next version of a policy.

    The output of a language training run of this lake gets the lineage of the run. The training
    data of any other model are unknown, and its lineage states this.
    Raises: InvalidNameError, StorageError; NotFoundError, SourceInvalidError or PackageInvalidError
    if the directory has no complete model, code, or a damaged file.
    """
    check_policy_name(name)
    folder = check_model_folder(directory)
    _check_generates(folder)
    origin = _read_origin(folder)
    run_id = str(origin.get("run_id") or "")
    runs = {run["run_id"]: run for run in lake.registry.runs()}
    run = runs.get(run_id, {})
    if (run.get("output") or {}).get("sha256") == folder.sha256:
        return register_trained_model(lake, name, folder, run_id, run)
    facts = {"directory": folder.path.name, "sha256": folder.sha256}
    lineage = {"algorithm": _IMPORTED, _IMPORTED: facts}
    manifest = describe_model(folder.path, folder.files, {**lineage, "config": {}})
    return lake.registry.register_model(name, folder.path, manifest, run_id="", lineage=lineage)


def register_trained_model(
    lake: Lake,
    name: str,
    folder: ModelFolder,
    run_id: str,
    about: Mapping[str, Any],
    *,
    run: Mapping[str, Any] | None = None,
    replaces: Mapping[str, Any] | None = None,
) -> PolicyRef:
    """Register the output of a training run with its lineage.

    about: the fields of the run's record that describe its data and options. run, replaces: the
    record to commit together with the version, and the one before. Raises: as Registry.register.
    """
    lineage = {**{key: about.get(key) for key in _OF_RUN}, "run_id": run_id}
    further = {key: about.get(key) for key in ("config", "sampling", "metrics")}
    manifest = describe_model(folder.path, folder.files, {**lineage, **further})
    return lake.registry.register_model(
        name, folder.path, manifest, run_id=run_id, lineage=lineage, run=run, replaces=replaces
    )


def _check_generates(folder: ModelFolder) -> None:
    """Refuse a model that scores sequences. Raises: SourceInvalidError."""
    config = json.loads((folder.path / "config.json").read_bytes())
    names = config.get("architectures") if isinstance(config, dict) else None
    # A file of another form is refused by describe_model.
    for name in names if isinstance(names, list) else ():
        if str(name).endswith("ForSequenceClassification"):
            raise SourceInvalidError(
                f"model: {folder.path} has a {name}, expected a causal language model: only a "
                "model that generates can be a policy. `score` takes a reward model.",
                parameter="model",
            )


def _read_origin(folder: ModelFolder) -> dict[str, Any]:
    """Return what training wrote beside the model; nothing for other models."""
    path = folder.path / ORIGIN
    try:
        origin = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SourceInvalidError(
            f"model: {path}: {error}, expected the JSON file that training wrote. Remove it to "
            "register the model without its lineage.",
            parameter="model",
        ) from error
    return origin if isinstance(origin, dict) else {}
