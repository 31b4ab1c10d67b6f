"""The lock: the exact versions, installed here, of all that a requirement leads to.

A wheel's requirements are ranges. With these alone an image that is built again next year would
have other libraries in it than the one that was tried out.
"""

from __future__ import annotations

import platform
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from replaylake.datastore.errors import ExtraMissingError, ServeError
from replaylake.serve.package.wheel import NAME, code_folder, own_distribution

# What training needs and serving must not bring along: torch alone is 200 MB to several GB.
NOT_SERVED: Final = ("torch", "ray", "d3rlpy", "gymnasium")


@dataclass(frozen=True)
class Pin:
    """One library: its version and its size as installed here, in bytes.

    from_index: False where it was installed from a file, folder or repository of its own, so that a
    package index may have something else under this version, or nothing.
    """

    name: str
    version: str
    num_bytes: int
    from_index: bool = True

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def lock(extras: Sequence[str]) -> tuple[Pin, ...]:
    """Return the libraries that ReplayLake with these extras needs, itself left out, by name.

    Markers are evaluated for this interpreter and machine. Raises: ExtraMissingError if one of them
    is not installed, ServeError if one is of a version that another cannot take or belongs to
    training, or if a checkout asks for other libraries than when it was installed.
    """
    own = own_distribution()
    _check_current(own, code_folder(), extras)
    distributions = {NAME: own}
    followed: set[tuple[str, str]] = set()
    waiting = [(NAME, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = step = waiting.pop()
        if step in followed:
            continue
        followed.add(step)
        for text in distributions[name].requires or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
                continue
            key = canonicalize_name(needed.name)
            if key not in distributions:
                distributions[key] = _find_distribution(needed, name)
            _check_version(needed, distributions[key], name)
            waiting.extend((key, canonicalize_name(extra)) for extra in ("", *needed.extras))
    del distributions[NAME]
    pins = tuple(_pin(name, distributions[name]) for name in sorted(distributions))
    if heavy := [str(pin) for pin in pins if pin.name in NOT_SERVED]:
        raise ServeError(
            f"package: found {', '.join(heavy)} among what serving needs, expected none of "
            f"{', '.join(NOT_SERVED)}. An installed library requires it: `pip show` names which."
        )
    return pins


def lock_text(pins: Iterable[Pin], wheel: str) -> str:
    """Return the lock as a requirements file, for pip and for uv.

    wheel: the path of ReplayLake's wheel from where the file is installed.
    """
    python = ".".join(map(str, sys.version_info[:2]))
    lines = [
        f"# What was installed where the policy was packaged: Python {python}, {sys.platform}, "
        f"{platform.machine()}.",
        wheel,
        *map(str, pins),
    ]
    return "\n".join(lines) + "\n"


def _check_current(own: metadata.Distribution, code: Path, extras: Sequence[str]) -> None:
    """Refuse a checkout whose requirements have changed: its metadata is of its installation."""
    pyproject = code.resolve().parents[1] / "pyproject.toml"
    if not pyproject.is_file():
        return  # installed from a wheel
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    if project["name"] != NAME:
        return  # somebody's own, around a virtual environment
    declared = _select_requirements(project["dependencies"])
    for extra in extras:
        declared |= _select_requirements(project["optional-dependencies"][extra])
    installed = set[str]().union(
        *(_select_requirements(own.requires or (), extra) for extra in ("", *extras))
    )
    if declared != installed:
        raise ServeError(
            f"package: found {', '.join(sorted(declared ^ installed))} in only one of {pyproject} "
            "and what was installed from it, expected the same requirements. Install it again: "
            "pip install -e '.[serve]'."
        )


def _select_requirements(requirements: Iterable[str], extra: str = "") -> set[str]:
    """Return what is asked for with an extra, its markers taken off."""
    names = set()
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            requirement.name = canonicalize_name(requirement.name)
            names.add(str(requirement))
    return names


def _find_distribution(needed: Requirement, by: str) -> metadata.Distribution:
    try:
        return metadata.distribution(needed.name)
    except metadata.PackageNotFoundError as error:
        raise ExtraMissingError(
            f"package: found no {needed.name}, expected {needed}, which {by} requires. Run: "
            "pip install 'replaylake[serve]': the lock file lists the versions installed here."
        ) from error


def _check_version(needed: Requirement, dist: metadata.Distribution, by: str) -> None:
    if not needed.specifier.contains(dist.version, prereleases=True):
        raise ServeError(
            f"package: found {needed.name} {dist.version}, expected {needed}, which {by} "
            "requires; pip would not install this. Correct all that `pip check` lists."
        )


def _pin(name: str, dist: metadata.Distribution) -> Pin:
    num_bytes = sum(file.size or 0 for file in dist.files or ())
    return Pin(name, dist.version, num_bytes, dist.read_text("direct_url.json") is None)
