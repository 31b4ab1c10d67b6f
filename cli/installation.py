"""Installation: which extras of ReplayLake are installed, and in which versions."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final

_REQUIREMENT: Final = re.compile(
    r"(?P<name>[\w.-]+)(?:\[(?P<extras>[^]]*)\])?\s*(?P<bounds>[^;]*)"
    r"(?:;.*\bextra == ['\"](?P<extra>[\w-]+)['\"])?"
)
# Extras for those who work on ReplayLake itself, or that only name other extras.
_NOT_SHOWN: Final = ("all", "test")


@dataclass(frozen=True)
class Package:
    """A package that ReplayLake needs: its version, None if it is missing, and the bounds on it."""

    name: str
    version: str | None
    bounds: str

    @property
    def is_outside_bounds(self) -> bool:
        """Whether the installed version is below the lower bound or differs from the pinned one."""
        if self.version is None or (bound := re.search(r"([>=]=)\s*([\d.]+)", self.bounds)) is None:
            return False
        found, wanted = _numbers(self.version), _numbers(bound[2])
        return found < wanted if bound[1] == ">=" else found != wanted


def find_packages(extra: str = "") -> list[Package]:
    """Return the packages of an extra and of those that it names; by default the base's."""
    found: dict[str, Package] = {}
    for name, extras, bounds in _requirements().get(extra, ()):
        if _normalize(name) == "replaylake":
            for other in extras:
                found |= {package.name: package for package in find_packages(other)}
        else:
            found[name] = Package(name, _version(name), bounds)
    return sorted(found.values(), key=lambda package: package.name)


def find_extras() -> list[str]:
    """Return the names of the extras that users install, sorted."""
    return sorted(name for name in _requirements() if name and name not in _NOT_SHOWN)


def extra_of(module: str) -> str | None:
    """Return the first extra whose packages hold an import name, or None."""
    return next(
        (
            extra
            for extra, requirements in _requirements().items()
            for name, _, _ in requirements
            if extra and _normalize(name) == _normalize(module)
        ),
        None,
    )


def describe_platform() -> str:
    """Return Python's version and the machine, for example `Python 3.11.7, Linux x86_64`."""
    return f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"


@functools.cache
def _requirements() -> Mapping[str, list[tuple[str, list[str], str]]]:
    """Return names, their extras and version bounds by extra; those of the base under ''."""
    found: dict[str, list[tuple[str, list[str], str]]] = {"": []}
    try:
        texts = metadata.requires("replaylake") or []
    except metadata.PackageNotFoundError:  # run from its folder, without being installed
        texts = []
    for text in texts:
        if match := _REQUIREMENT.match(text):
            extras = [one.strip() for one in (match["extras"] or "").split(",") if one.strip()]
            entry = (match["name"], extras, match["bounds"].strip())
            found.setdefault(match["extra"] or "", []).append(entry)
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release's numbers: of 2.13.0+cpu, (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
