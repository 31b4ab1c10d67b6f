"""Locations: what `--lake` names, a folder or a prefix of an object store, and how it is opened.

lake, /data/lake, file:///data/lake      a folder
s3://bucket/prefix                       S3, and what speaks its protocol
gs://bucket/prefix, az://container/prefix
memory://name                            this process's memory, gone when it ends
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.storage.remote.object_storage import (
    BACKENDS,
    MEMORY,
    ObjectStorage,
    open_store,
)
from replaylake.datastore.storage.remote.shard_cache import CacheConfig, ShardCache
from replaylake.datastore.storage.storage import LocalStorage, Storage

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# What a URL becomes as a pathlib.Path: `Path("s3://bucket")` is the folder `s3:/bucket`.
_COLLAPSED_URL: Final = re.compile(rf"({'|'.join((*BACKENDS, 'file'))}):/[^/]")


@dataclass(frozen=True)
class Location:
    """A prefix of a bucket; a URL's text is taken as it is, `%20` is no space."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """As people write it, without a slash at the end."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def folder_name(self, environment: Mapping[str, str]) -> str:
        """Return a name for this lake's own folder on this machine."""
        # A bucket of the same name at another endpoint is another bucket.
        endpoint = [environment.get(name, "") for name in BACKENDS[self.scheme].endpoints]
        digest = hashlib.sha256("\n".join([self.url, *endpoint]).encode()).hexdigest()
        return f"{re.sub('[^a-z0-9.-]', '_', self.bucket.lower())[:40]}-{digest[:16]}"


def parse_location(lake: str | Path) -> Path | Location:
    """Tell a folder from a URL. Raises: ConfigInvalidError for a URL that names no lake of ours."""
    text = str(lake)
    match = _SCHEME.fullmatch(text)
    if not text or "\0" in text or _COLLAPSED_URL.match(text):
        raise _invalid_location_error(
            text, "a folder or a URL, as text: a Path loses one of its slashes"
        )
    if match is None:
        return Path(text)
    scheme, rest = match.group(1).lower(), match.group(2)
    if scheme == "file":
        return _file_folder(text)
    if scheme not in BACKENDS:
        others = [f"{one}://" for one in (*BACKENDS, "file") if one != MEMORY]
        raise _invalid_location_error(
            text, f"a folder, or a URL of {', '.join(others)} or {MEMORY}://"
        )
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    parts = prefix.split("/") if prefix else []
    if not bucket and scheme != MEMORY:
        raise _invalid_location_error(text, f"{scheme}://BUCKET/PREFIX")
    if any(part in ("", ".", "..") for part in parts) or not rest.isprintable():
        raise _invalid_location_error(
            text, "a prefix without control characters and empty, `.` or `..` parts"
        )
    return Location(scheme, bucket, prefix)


def open_storage(lake: str | Path) -> Storage:
    """Return the storage of a lake, which need not exist yet.

    Raises: ConfigInvalidError for a URL that names no lake of ours, ExtraMissingError,
    StorageError.
    """
    place = parse_location(lake)
    if isinstance(place, Path):
        return LocalStorage(place)
    if place.scheme == MEMORY:
        return _memory_storage(place)
    name = place.folder_name(os.environ)
    cache = ShardCache(CacheConfig.from_environment(os.environ), name)
    return ObjectStorage(
        open_store(place.scheme, place.bucket, place.prefix),
        place.url,
        cache,
        state_home(os.environ) / name,
    )


def absolute_lake(lake: str | Path) -> str:
    """Return what names the same lake from any working directory. Raises: ConfigInvalidError."""
    place = parse_location(lake)
    return str(place.resolve()) if isinstance(place, Path) else place.url


def check_shareable(lake: str | Path, what: str) -> None:
    """Refuse a lake that other processes cannot see. Raises: ConfigInvalidError."""
    place = parse_location(lake)
    if isinstance(place, Location) and place.scheme == MEMORY:
        raise ConfigInvalidError(
            f"{what}: found lake {lake}, which is in this process's memory alone, expected one "
            "that other processes see too. Use a folder or an object store."
        )


def state_home(environment: Mapping[str, str]) -> Path:
    """Return where remote lakes' journals are: REPLAYLAKE_STATE, else below XDG_STATE_HOME."""
    home = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(environment.get("REPLAYLAKE_STATE") or Path(home) / "replaylake").absolute()


_memories: dict[str, ObjectStorage] = {}
_memories_lock = threading.Lock()
_scratch: list[tempfile.TemporaryDirectory[str]] = []


def _memory_storage(place: Location) -> ObjectStorage:
    """Return the store of that name; its copies and journals end with the process too."""
    with _memories_lock:
        if (storage := _memories.get(place.url)) is None:
            _scratch.append(tempfile.TemporaryDirectory(prefix="replaylake-memory-"))
            folder = Path(_scratch[-1].name)
            storage = _memories[place.url] = ObjectStorage(
                open_store(MEMORY, "", ""),
                place.url,
                ShardCache(CacheConfig(folder / "cache"), "lake"),
                folder / "state",
            )
        return storage


def _file_folder(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise _invalid_location_error(
            text, "file:///FOLDER, with `?`, `#` and `%` written as %3F, %23 and %25"
        )
    return Path(unquote(parts.path))


def _invalid_location_error(text: str, expected: str) -> ConfigInvalidError:
    return ConfigInvalidError(
        f"lake {text!r}: expected {expected}. Check `lake` or REPLAYLAKE_LAKE."
    )
