"""ReplayLake's own wheel, written from the code that runs: from a checkout as from an installation.

A build backend would need setuptools where the policy is packaged, and leaves a `build` folder in
the checkout from which deleted modules find their way into later wheels. A wheel of pure Python is
a zip file with a list of its hashes, and this one is the same bytes each time.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ServeError
from replaylake.datastore.version import VERSION

NAME: Final = "replaylake"
# As pyproject.toml has it.
PACKAGE_DATA: Final = (
    "py.typed",
    "serve/explorer/static/*",
    "serve/pages/*.css",
    "serve/pages/*.svg",
    "serve/pages/*.js",
)
_INFO: Final = f"{NAME}-{VERSION}.dist-info"
# What the installer wrote beside the metadata is about that installation alone.
_NOT_METADATA: Final = {"RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json"}
_WHEEL: Final = f"""\
Wheel-Version: 1.0
Generator: {NAME} ({VERSION})
Root-Is-Purelib: true
Tag: py3-none-any
"""
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # the first time that a zip file can hold


@dataclass(frozen=True)
class Wheel:
    """A wheel: its file, its sha256, its size and its size once installed, in bytes."""

    path: Path
    sha256: str
    num_bytes: int
    installed_bytes: int


def write_wheel(folder: Path) -> Wheel:
    """Write the wheel of the ReplayLake that is running into a folder.

    Raises: ServeError if its installed metadata is absent or of another version.
    """
    files = {**dict(_modules()), **_metadata(own_distribution()), f"{_INFO}/WHEEL": _WHEEL.encode()}
    record = f"{_INFO}/RECORD"
    files[record] = _record(files, record)
    path = folder / f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "x") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = 3  # Unix, whatever this is: the next line speaks its language
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    written = path.read_bytes()
    return Wheel(
        path,
        hashlib.sha256(written).hexdigest(),
        len(written),
        sum(len(data) for data in files.values()),
    )


def own_distribution() -> metadata.Distribution:
    """Return ReplayLake's installed metadata. Raises: ServeError."""
    # A checkout on the path may have an egg-info of its own, which no wheel can be made of.
    for dist in metadata.distributions(name=NAME):
        if dist.read_text("METADATA") is None:
            continue
        if dist.version != VERSION:
            raise ServeError(
                f"package: found {NAME} installed as version {dist.version}, but its code is "
                f"version {VERSION}. Install it again: pip install -e . in a checkout."
            )
        return dist
    raise ServeError(
        f"package: found the code of {NAME} but no installed distribution, which declares the "
        "wheel's requirements. Run pip install -e '.[serve]' in the checkout."
    )


def code_folder() -> Path:
    """Return the folder that the running ReplayLake is imported from. Raises: ServeError."""
    spec = importlib.util.find_spec(NAME)
    if spec is None or not spec.submodule_search_locations:
        raise ServeError(f"package: found no folder of the module {NAME}, expected one.")
    return Path(spec.submodule_search_locations[0])


def _modules() -> Iterator[tuple[str, bytes]]:
    """Yield each module's name in the wheel and its code, in order of name.

    Of what lies beside them, only what pyproject.toml calls package data goes along.
    """
    root = code_folder()
    paths = [*root.glob("*.py"), *(path for one in PACKAGE_DATA for path in root.glob(one))]
    for stage in root.iterdir():  # in a checkout a link, which `**` would not follow
        paths.extend(stage.glob("**/*.py"))
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        yield f"{NAME}/{name}", path.read_bytes()


def _metadata(distribution: metadata.Distribution) -> dict[str, bytes]:
    """Return the files of the metadata, among them what the wheel is licensed by."""
    files = {}
    for file in sorted(distribution.files or (), key=str):
        folder, *inside = file.parts
        if folder.endswith(".dist-info") and inside and inside[0] not in _NOT_METADATA:
            files["/".join([_INFO, *inside])] = Path(str(file.locate())).read_bytes()
    return files


def _record(files: dict[str, bytes], record: str) -> bytes:
    """Return the list of files, each with its sha256 and size; it cannot hold its own."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
        lines.writerow((name, f"sha256={digest.decode()}", len(data)))
    lines.writerow((record, "", ""))
    return text.getvalue().encode()
