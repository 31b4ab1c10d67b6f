"""Policy package -> MLflow model: a folder that `mlflow.pyfunc.load_model` loads.

    MLmodel     the flavor `python_function`, its parameters, and what it came from
    code/       the module that MLflow calls, and ReplayLake as a wheel, from which that module
                imports it where it is not installed
    data/       the policy package
    requirements.txt, python_env.yaml

It is written without MLflow, whose format is stable where its library is large. Loading needs
mlflow, numpy and onnxruntime.
"""

from __future__ import annotations

import json
import platform
import shutil
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import AlreadyExistsError, NotFoundError, StorageError
from replaylake.datastore.lake.policies.package import check_package, load_policy
from replaylake.datastore.lake.policies.pyfunc import PARAMETERS, PyfuncPolicy
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.datastore.version import VERSION
from replaylake.serve.package.wheel import write_wheel

# The release whose form it has; later ones read it.
_MLFLOW_VERSION: Final = "2.20.0"
_LOADER_MODULE: Final = "replaylake_pyfunc"
_REQUIREMENTS: Final = ("numpy", "onnxruntime")
_TYPES: Final = {bool: "boolean", float: "double", int: "long"}
_LOADER: Final = '''\
"""Loads the policy package of this model, with the ReplayLake beside this file if none is there."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("replaylake") is None:
    sys.path.append(str(Path(__file__).resolve().with_name("{wheel}")))

from replaylake.datastore.lake.policies.pyfunc import load_pyfunc


def _load_pyfunc(path):
    return load_pyfunc(path)
'''


@dataclass(frozen=True)
class MlflowModelReceipt:
    """What was written: where, of which version, and how large."""

    output: str
    policy: str
    version: int
    package_sha256: str
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def package_mlflow_model(policy: PolicyRef, output: Path) -> MlflowModelReceipt:
    """Write a registered policy as an MLflow model into the new folder `output`.

    Raises: PackageInvalidError if the package is not whole; ConfigInvalidError for a policy with a
    state; AlreadyExistsError if `output` exists, NotFoundError if its parent does not; ServeError
    if the running ReplayLake has no metadata; StorageError.
    """
    output = Path(output).absolute()
    manifest = check_package(policy.path, policy.manifest_sha256)
    PyfuncPolicy(load_policy(policy.path, policy.manifest_sha256))
    if output.exists():
        raise AlreadyExistsError(
            f"{output}: found a file or directory of that name, expected a free one for the model."
        )
    if not output.parent.is_dir():
        raise NotFoundError(f"{output.parent}: found no such directory, expected one.")
    partial = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    try:
        (partial / "code").mkdir(parents=True)
        shutil.copytree(policy.path, partial / "data")
        wheel = write_wheel(partial / "code")
        loader = _LOADER.format(wheel=wheel.path.name)
        (partial / "code" / f"{_LOADER_MODULE}.py").write_text(loader, encoding="utf-8")
        pins = [f"{name}=={metadata.version(name)}" for name in _REQUIREMENTS]
        (partial / "requirements.txt").write_text("\n".join(["mlflow", *pins, ""]))
        (partial / "python_env.yaml").write_text(_python_env())
        (partial / "MLmodel").write_text(_describe(policy, manifest.sha256), encoding="utf-8")
        partial.rename(output)
    except OSError as error:
        raise StorageError(f"{output}: {error.strerror or error}. Check its space.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    num_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return MlflowModelReceipt(str(output), policy.name, policy.version, manifest.sha256, num_bytes)


def _python_env() -> str:
    lines = (
        f"python: {json.dumps(platform.python_version())}",
        "build_dependencies: [pip]",
        "dependencies: [-r requirements.txt]",
        "",
    )
    return "\n".join(lines)


def _describe(policy: PolicyRef, sha256: str) -> str:
    """Return the MLmodel file. JSON is YAML."""
    parameters = [
        {"name": name, "type": _TYPES[type(default)], "default": default, "shape": None}
        for name, default in PARAMETERS.items()
    ]
    body = {
        "flavors": {
            "python_function": {
                "loader_module": _LOADER_MODULE,
                "code": "code",
                "data": "data",
                "env": {"virtualenv": "python_env.yaml"},
                "python_version": platform.python_version(),
            }
        },
        "mlflow_version": _MLFLOW_VERSION,
        "model_uuid": uuid.uuid4().hex,
        "utc_time_created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
        "signature": {"inputs": None, "outputs": None, "params": json.dumps(parameters)},
        "metadata": {
            "replaylake": {
                "policy": policy.name,
                "version": policy.version,
                "package_sha256": sha256,
                "replaylake_version": VERSION,
            }
        },
    }
    return json.dumps(body, indent=2) + "\n"
