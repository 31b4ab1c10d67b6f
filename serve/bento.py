"""Policy package -> Bento: a folder that `bentoml serve` starts, with the model inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import AlreadyExists, NotFound, ServeFailed, StorageFailed
from replaylake.datastore.policies.package import check_package
from replaylake.datastore.policies.policy import check_stateless
from replaylake.datastore.policies.registry import PolicyRef
from replaylake.datastore.version import VERSION

_BUILD_TIMEOUT_S: Final = 120
_MODULE: Final = "replaylake_bento"
_PACKAGE: Final = "policy"

# The Bento's own code. The package lies beside it: a model from outside the build folder would go
# to BentoML's store and not into the Bento.
_SERVICE: Final = '''\
"""Serves {policy}:{version} from the package beside this file.

To log decisions and rewards, set REPLAYLAKE_SERVE_LAKE and REPLAYLAKE_SERVE_LOG_TO; to explore,
REPLAYLAKE_SERVE_EXPLORE (epsilon=0.05 or temperature=1).
"""

import os
from pathlib import Path

os.environ["REPLAYLAKE_SERVE_PACKAGE"] = str(Path(__file__).resolve().parent / "{package}")
os.environ["REPLAYLAKE_SERVE_POLICY"] = "{policy}"
os.environ["REPLAYLAKE_SERVE_VERSION"] = "{version}"
os.environ.setdefault("BENTOML_DO_NOT_TRACK", "True")

from replaylake.serve.service import PolicyService  # noqa: E402

__all__ = ["PolicyService"]
'''
# No `image`: a service that sets one drops its bundled files of the Python environment.
_BUILD: Final = """\
service: "{module}:PolicyService"
name: "{policy}"
description: "{policy}:{version}, packaged by ReplayLake {product}"
labels:
  policy: "{policy}"
  policy_version: "{version}"
  policy_sha256: "{sha256}"
include:
  - "{module}.py"
  - "{package}/*"
python:
  lock_packages: false
  packages:
    - "replaylake[serve]=={product}"
"""


@dataclass(frozen=True)
class BentoReceipt:
    """What was built: where, under which tag, how large, and what it holds and does not."""

    output: str
    tag: str
    policy: str
    version: int
    package_sha256: str
    num_bytes: int
    includes: tuple[str, ...]
    excludes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def package_bento(policy: PolicyRef, output: Path) -> BentoReceipt:
    """Build a Bento of a registered policy in the folder `output`.

    `bentoml serve OUTPUT` starts it wherever replaylake[serve] is installed; it needs neither the
    lake nor this checkout. Raises: PackageInvalid if the package is not whole, AlreadyExists if
    `output` exists, NotFound if its parent does not, SpaceUnsupported for a policy with a state,
    ServeFailed if BentoML refuses.
    """
    output = Path(output).absolute()
    manifest = check_package(policy.path)
    check_stateless(manifest.spec, f"policy {policy}")
    if output.exists():
        raise AlreadyExists(
            f"{output}: found a file or folder of that name, expected a free one for the Bento. "
            "Remove it, or choose another --output."
        )
    if not output.parent.is_dir():
        raise NotFound(
            f"{output.parent}: found no such folder, expected one to build the Bento in."
        )
    words = {
        "module": _MODULE,
        "package": _PACKAGE,
        "policy": policy.name,
        "version": policy.version,
        "sha256": manifest.sha256[:63],  # a label's limit
        "product": VERSION,
    }
    with tempfile.TemporaryDirectory(prefix="replaylake-bento-") as folder:
        source, home = Path(folder, "source"), Path(folder, "home")
        source.mkdir()
        shutil.copytree(policy.path, source / _PACKAGE)
        (source / f"{_MODULE}.py").write_text(_SERVICE.format(**words))
        (source / "bentofile.yaml").write_text(_BUILD.format(**words))
        tag = f"{policy.name}:{policy.version}"
        _run_build(source, home, str(policy.version), tag)
        built = home / "bentos" / policy.name / str(policy.version)
        _move(built, output)
    check_package(output / "src" / _PACKAGE)
    return BentoReceipt(
        output=str(output),
        tag=tag,
        policy=policy.name,
        version=policy.version,
        package_sha256=manifest.sha256,
        num_bytes=sum(path.stat().st_size for path in output.rglob("*") if path.is_file()),
        includes=(
            "the policy package (graph, manifest, and learner weights where it has them)",
            "the service's definition",
            f"requirements: replaylake[serve]=={VERSION}",
        ),
        excludes=(
            "ReplayLake itself: install replaylake[serve] where the Bento runs",
            "the lake: decisions are logged only where REPLAYLAKE_SERVE_LAKE and _LOG_TO are set",
        ),
    )


def _run_build(source: Path, home: Path, version: str, tag: str) -> None:
    """Build in a process of its own: BentoML fixes its home folder when it is first imported."""
    environment = {**os.environ, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"}
    command = [sys.executable, "-m", "bentoml", "build", str(source), "--version", version]
    try:
        done = subprocess.run(
            command,
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServeFailed(
            f"package {tag}: found BentoML still building after {_BUILD_TIMEOUT_S} s, expected a "
            "few seconds. Try again."
        ) from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise ServeFailed(
            f"package {tag}: BentoML did not build it: {lines[-1] if lines else 'no message'}. "
            "Check that replaylake[serve] is installed whole."
        )


def _move(built: Path, output: Path) -> None:
    """Give the Bento its name in one step, so that nobody sees half of it."""
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        shutil.copytree(built, partial)
        partial.rename(output)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageFailed(
            f"{output}: {error.strerror or error} while the Bento was written. Nothing was kept."
        ) from error
