"""Policy package -> Bento: a folder that `bentoml serve` starts, with all in it that it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import AlreadyExistsError, NotFoundError, ServeError, StorageError
from replaylake.datastore.lake.policies.package import check_package
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.datastore.version import VERSION
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import check_servable
from replaylake.serve.package.dockerfile import dockerfile, readme
from replaylake.serve.package.lock import NOT_SERVED, Pin, lock, lock_text
from replaylake.serve.package.wheel import Wheel, write_wheel

_BUILD_TIMEOUT_S: Final = 120
_MODULE: Final = "replaylake_bento"
_PACKAGE: Final = "policy"
_PYTHON: Final = Path("env", "python")
_WHEELS: Final = "wheels"
_DOCKERFILE: Final = Path("env", "docker", "Dockerfile")

# The Bento's own code. The package lies beside it: a model from outside the build folder would go
# to BentoML's store and not into the Bento.
_SERVICE: Final = '''\
"""Serves {policy}:{version} from the package beside this file, as README.md says."""

import os
from pathlib import Path

os.environ["REPLAYLAKE_SERVE_PACKAGE"] = str(Path(__file__).resolve().parent / "{package}")
os.environ["REPLAYLAKE_SERVE_POLICY"] = "{policy}"
os.environ["REPLAYLAKE_SERVE_VERSION"] = "{version}"
os.environ.setdefault("REPLAYLAKE_SERVE_MANIFEST_SHA256", "{manifest_sha256}")
os.environ.setdefault("BENTOML_DO_NOT_TRACK", "True")

from replaylake.serve.package.listen_address import resolve_address  # noqa: E402
from replaylake.serve.service import PolicyService  # noqa: E402

# BentoML would listen on every address by default.
address = resolve_address(os.environ)
port = int(os.environ.get("REPLAYLAKE_SERVE_PORT", "3000"))
PolicyService.config["http"] = {{"host": address, "port": port}}

__all__ = ["PolicyService"]
'''
# Neither `wheels` here nor `image` in the service: with the first BentoML goes back to its old
# layout, and with the second it drops the wheels. Ours is put into the Bento afterwards.
_BUILD: Final = """\
service: "{module}:PolicyService"
name: "{policy}"
description: "file:README.md"
labels:
  policy: "{policy}"
  policy_version: "{version}"
  policy_sha256: "{sha256}"
include:
  - "{module}.py"
  - "{package}/*"
python:
  lock_packages: false
  requirements_txt: "requirements.txt"
"""


@dataclass(frozen=True)
class BentoReceipt:
    """What was built: where, under which tag, how large, and what it holds and does not.

    num_bytes: of the folder. installed_bytes: of what its lock installs, as it is installed here.
    dockerfile: its path; `docker build -f DOCKERFILE OUTPUT`. wheel: ReplayLake's file name.
    """

    output: str
    tag: str
    policy: str
    version: int
    package_sha256: str
    num_bytes: int
    dockerfile: str
    wheel: str
    wheel_sha256: str
    installed_bytes: int
    requirements: tuple[Pin, ...]
    includes: tuple[str, ...]
    excludes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def package_bento(policy: PolicyRef, output: Path) -> BentoReceipt:
    """Build a Bento of a registered policy in the folder `output`; two of one policy are the same.

    It holds the policy package, ReplayLake's wheel, the lock of what is installed here and serving
    needs, a Dockerfile and a README. It runs with neither the lake nor this checkout. Takes about 3
    seconds. Raises: PackageInvalidError if the package is not whole, SpaceUnsupportedError if it
    cannot be served, AlreadyExistsError if `output` exists, NotFoundError if its parent does not,
    ExtraMissingError or ServeError if what is installed here cannot be locked, ServeError if
    BentoML refuses.
    """
    output = Path(output).absolute()
    manifest = check_package(policy.path, policy.manifest_sha256)
    check_servable(ServeConfig(policy.path, policy.name, policy.version))
    _check_output_absent(output)
    # With obstore, for lakes on object stores, where it is installed.
    pins = lock(("serve", "remote") if find_spec("obstore") else ("serve",))
    tag = f"{policy.name}:{policy.version}"
    with tempfile.TemporaryDirectory(prefix="replaylake-bento-") as folder:
        source, home, wheels = (Path(folder, name) for name in ("source", "home", _WHEELS))
        source.mkdir()
        wheels.mkdir()
        wheel = write_wheel(wheels)
        shutil.copytree(policy.path, source / _PACKAGE)
        words = {
            "module": _MODULE,
            "package": _PACKAGE,
            "policy": policy.name,
            "version": policy.version,
            "sha256": manifest.sha256[:63],  # a label's limit
            "manifest_sha256": manifest.sha256,
        }
        required = lock_text(pins, f"./{_WHEELS}/{wheel.path.name}")
        files = {
            f"{_MODULE}.py": _SERVICE.format(**words),
            "bentofile.yaml": _BUILD.format(**words),
            "README.md": readme(tag),
            # BentoML adds its own line, and pip takes no line twice.
            "requirements.txt": _drop_requirement(required, "bentoml"),
        }
        for name, text in files.items():
            (source / name).write_text(text, encoding="utf-8")
        _run_build(source, home, str(policy.version), tag)
        built = home / "bentos" / policy.name / str(policy.version)
        shutil.copytree(wheels, built / _PYTHON / _WHEELS)
        (built / _PYTHON / "requirements.lock.txt").write_text(required, encoding="utf-8")
        (built / _DOCKERFILE).write_text(dockerfile(tag), encoding="utf-8")
        _move(built, output)
    # What was checked is what was copied.
    check_package(output / "src" / _PACKAGE, manifest.sha256)
    return _receipt(policy, output, manifest.sha256, wheel, pins)


def _check_output_absent(output: Path) -> None:
    if output.exists():
        raise AlreadyExistsError(
            f"{output}: found a file or directory of that name, expected none: the Bento is "
            "written there. Remove it, or choose another `output`.",
            parameter="output",
        )
    if not output.parent.is_dir():
        raise NotFoundError(
            f"{output.parent}: found no such directory, expected one to write the Bento to. Create "
            "it, or choose another `output`.",
            parameter="output",
        )


def _drop_requirement(requirements: str, name: str) -> str:
    lines = requirements.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(f"{name}=="))


def _receipt(
    policy: PolicyRef, output: Path, sha256: str, wheel: Wheel, pins: tuple[Pin, ...]
) -> BentoReceipt:
    elsewhere = ", ".join(str(pin) for pin in pins if not pin.from_index)
    return BentoReceipt(
        output=str(output),
        tag=f"{policy.name}:{policy.version}",
        policy=policy.name,
        version=policy.version,
        package_sha256=sha256,
        num_bytes=sum(path.stat().st_size for path in output.rglob("*") if path.is_file()),
        dockerfile=str(output / _DOCKERFILE),
        wheel=wheel.path.name,
        wheel_sha256=wheel.sha256,
        installed_bytes=wheel.installed_bytes + sum(pin.num_bytes for pin in pins),
        requirements=pins,
        includes=(
            "the policy package (graph, manifest, and learner weights where it has them)",
            f"ReplayLake {VERSION} as a wheel",
            f"a lock of the {len(pins)} libraries that serving needs",
            "a Dockerfile",
        ),
        excludes=(
            f"{', '.join(NOT_SERVED)}",
            "the lake: decisions are logged only where REPLAYLAKE_SERVE_LAKE and _LOG_TO are set",
        ),
        warnings=()
        if not elsewhere
        else (
            f"{elsewhere}: installed here from a file, folder or repository, and locked by version "
            "alone: a package index may have something else under it",
        ),
    )


def _run_build(source: Path, home: Path, version: str, tag: str) -> None:
    """Build in a process of its own: BentoML fixes its home folder when it is first imported."""
    # What the caller has set for a server of its own would be written into this one's bento.yaml.
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("BENTOML_", "REPLAYLAKE_"))}
    # BentoML looks for uv even where it locks nothing, and without one installs it from the network
    # into this environment. One that is found and never run keeps it from that.
    tools = home.with_name("tools")
    tools.mkdir()
    (tools / "uv").write_text("#!/bin/sh\nexit 1\n")
    (tools / "uv").chmod(0o755)
    environment = {
        **ours,
        "BENTOML_HOME": str(home),
        "BENTOML_DO_NOT_TRACK": "True",
        "PATH": os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)]),
    }
    command = [sys.executable, "-m", "bentoml", "build", str(source), "--version", version]
    try:
        result = subprocess.run(
            command,
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServeError(
            f"package {tag}: BentoML did not finish building within {_BUILD_TIMEOUT_S} s, expected "
            "a few seconds. Try again."
        ) from error
    if result.returncode != 0:
        # The cause is the first line after this, not the last.
        output = (result.stderr + result.stdout).rpartition("Error: ")[2]
        message = " ".join(output.split()) or "no message"
        raise ServeError(
            f"package {tag}: BentoML could not build it: {message}. "
            "Check that replaylake[serve] and its dependencies are installed."
        )


def _move(built: Path, output: Path) -> None:
    """Give the Bento its name in one step, so that nobody sees half of it."""
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        shutil.copytree(built, partial)
        # The container's user is nobody of ours, and some of these are for our eyes alone.
        for path in (partial, *partial.rglob("*")):
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        partial.rename(output)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"{output}: {error.strerror or error} while the Bento was written. Nothing was saved."
        ) from error
