"""Object storage: a lake below a prefix of S3, GCS, Azure or memory. The home of obstore.

Reads and replacing writes are repeated by obstore itself. A put-if-absent is repeated here, because
one that was sent and not answered may have been carried out: only then is a taken name looked at.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

from replaylake.datastore.errors import (
    ExtraMissingError,
    InvalidNameError,
    ShardCorruptError,
    StorageError,
    TransientStorageError,
)
from replaylake.datastore.storage.remote.shard_cache import (
    PARALLEL_REQUESTS,
    ShardCache,
    trim_cache,
)
from replaylake.datastore.storage.storage import Blob, StoredFile

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

# A server that says nothing for half a minute is asked again, four times or for a minute in all; a
# whole shard of 256 MB may take five.
_CLIENT: Final[ClientConfig] = {
    "connect_timeout": "5s",
    "read_timeout": "30s",
    "timeout": "300s",
}
_MAX_RETRIES: Final = 4
_RETRY_S: Final = 60.0
_FIRST_WAIT_S: Final = 0.1
_COPY_BYTES: Final = 1 << 22
_Answer = TypeVar("_Answer")
_CUT_OFF_SIGN: Final = "response body error"
_MISSING_BUCKET_SIGNS: Final = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
# What is asked where the environment has no credentials.
_MISSING_CREDENTIALS_SIGNS: Final = (
    "/latest/api/token",
    "/meta-data/iam",
    "computeMetadata",
    "metadata/identity",
    "Account must be specified",
    "MissingCredentials",
)


@dataclass(frozen=True)
class Backend:
    """A kind of object store.

    store_class: the name of its class in `obstore.store`. endpoints: environment variables that say
    which server a bucket's name belongs to. credentials: those that error messages name.
    """

    store_class: str
    endpoints: tuple[str, ...]
    credentials: str


MEMORY: Final = "memory"
# By the scheme of their URLs.
BACKENDS: Final[Mapping[str, Backend]] = {
    "s3": Backend(
        "S3Store",
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    "gs": Backend("GCSStore", ("GOOGLE_BASE_URL",), "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": Backend(
        "AzureStore",
        ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    ),
    MEMORY: Backend("MemoryStore", (), "none"),
}


@dataclass(frozen=True)
class StoreHandles:
    """Handles on one prefix: `retrying` repeats what fails in passing, `once` does not."""

    scheme: str
    bucket: str
    retrying: ObjectStore
    once: ObjectStore


def open_store(scheme: str, bucket: str, prefix: str) -> StoreHandles:
    """Return handles; nothing is sent yet. Raises: ExtraMissingError, StorageError."""
    try:
        import obstore.exceptions
        import obstore.store as stores
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"{scheme}://: found no obstore, expected it for a lake on an object store. Run: "
            "pip install 'replaylake[remote]'."
        ) from error
    backend = BACKENDS[scheme]
    make: Callable[..., ObjectStore] = getattr(stores, backend.store_class)
    if scheme == MEMORY:
        memory = make()
        return StoreHandles(scheme, bucket, memory, memory)
    # Whoever names an endpoint without TLS means it: a server on loopback or in a cluster.
    endpoints = [os.environ.get(name, "") for name in backend.endpoints]
    without_tls = any(text.startswith("http://") for text in endpoints)
    client: ClientConfig = {**_CLIENT, "allow_http": without_tls}
    options: dict[str, Any] = {"prefix": prefix or None, "client_options": client}
    try:
        return StoreHandles(
            scheme,
            bucket,
            make(bucket, retry_config=_retry_config(_MAX_RETRIES), **options),
            make(bucket, retry_config=_retry_config(0), **options),
        )
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise to_storage_error(scheme, bucket, f"{scheme}://{bucket}", error) from error


def _retry_config(max_retries: int) -> RetryConfig:
    return {
        "max_retries": max_retries,
        "retry_timeout": timedelta(seconds=_RETRY_S),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_WAIT_S),
            "max_backoff": timedelta(seconds=2),
            "base": 2,
        },
    }


def _repeat_cut_off(read: Callable[[], _Answer]) -> _Answer:
    """Read again if the connection was reset within the answer.

    obstore repeats most of what fails, but not a listing, or an answer that there is no such blob,
    such as the next commit, which readers request again and again. Raises: what `read` raises.
    """
    wait_s = _FIRST_WAIT_S
    for _ in range(_MAX_RETRIES):
        try:
            return read()
        except TransientStorageError as error:
            if _CUT_OFF_SIGN not in str(error):
                raise
        time.sleep(wait_s)
        wait_s *= 2
    return read()


class ObjectStorage:
    """Blobs below a prefix of an object store, with this machine's copies in a cache.

    Whoever may read the bucket reads all of it: `private` adds nothing here.
    """

    def __init__(self, store: StoreHandles, url: str, cache: ShardCache, state: Path) -> None:
        """Use a store; `state` is this machine's folder for the lake's journals."""
        self._store = store
        self._url = url
        self._cache = cache
        self._state = state

    @property
    def url(self) -> str:
        """Such as s3://bucket/prefix."""
        return self._url

    @property
    def is_metered(self) -> bool:
        return True

    @property
    def shares_state(self) -> bool:
        return False

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Write a blob, in parts where it is large; it is there once the last one is."""
        with self._translate_errors(path):
            _obstore().put(self._store.retrying, _key(path), memoryview(data).cast("B"))

    def put_if_absent(self, path: str, data: bytes, *, private: bool = False) -> bool:
        """Create a blob with If-None-Match; one that holds our bytes after a lost reply is ours."""
        obstore, key = _obstore(), _key(path)
        deadline, wait_s, lost = time.monotonic() + _RETRY_S, _FIRST_WAIT_S, False
        for attempt in range(_MAX_RETRIES + 1):
            try:
                with self._translate_errors(path):
                    obstore.put(self._store.once, key, data, mode="create")
                return True
            except _NameTakenError:
                stored = self.get(path)
                if stored is not None:
                    return lost and stored == data
                # S3 says 409 to one of two creates at once, where it may then have neither.
                last: Exception = StorageError(
                    f"{self._name(path)}: the store answers that it exists and has no such blob, "
                    "expected one or the other. Run it again."
                )
            except TransientStorageError as error:
                lost, last = True, error
            if attempt == _MAX_RETRIES or time.monotonic() + wait_s > deadline:
                break
            time.sleep(wait_s)
            wait_s *= 2
        raise TransientStorageError(str(last)) from last

    def get(self, path: str) -> bytes | None:
        """Return the blob, or None if there is none. Raises: StorageError if no bucket is."""
        return _repeat_cut_off(lambda: self._get_once(path))

    def _get_once(self, path: str, span: tuple[int, int] | None = None) -> bytes | None:
        """Return a blob, or the bytes of a span (start, end)."""
        options: Any = None if span is None else {"range": span}
        with self._translate_errors(path):
            try:
                got = _obstore().get(self._store.retrying, _key(path), options=options)
                return bytes(got.bytes())
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                return None

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        """Read blobs side by side."""
        if len(paths) < 2:
            return [self.get(path) for path in paths]
        with ThreadPoolExecutor(min(len(paths), PARALLEL_REQUESTS)) as pool:
            return list(pool.map(self.get, paths))

    def read_ends(self, blobs: Sequence[Blob], num_bytes: int) -> list[bytes | None]:
        """Read the ends of blobs in parallel."""

        def read(blob: Blob) -> bytes | None:
            # Not as a suffix range, which Azure does not support.
            span = max(0, blob.size_bytes - num_bytes), blob.size_bytes
            return _repeat_cut_off(lambda: self._get_once(blob.path, span))

        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            return list(pool.map(read, blobs))

    def names(self, folder: str, *, after: str = "") -> list[str]:
        """List what is directly below a prefix, or what of it sorts after a name."""
        return _repeat_cut_off(lambda: self._list_names(folder, after))

    def _list_names(self, folder: str, after: str) -> list[str]:
        obstore, key = _obstore(), _key(folder)
        with self._translate_errors(folder):
            if not after:
                listed = obstore.list_with_delimiter(self._store.retrying, key or None)
                paths = [*listed["common_prefixes"], *(o["path"] for o in listed["objects"])]
            else:
                offset = f"{key}/{after}" if key else after
                stream = obstore.list(self._store.retrying, key or None, offset=offset)
                paths = [item["path"] for item in stream.collect()]
        start = len(key) + 1 if key else 0
        parts = {path[start:].partition("/")[0] for path in paths if len(path) > start}
        return sorted(name for name in parts if name > after)

    def files(self, folder: str) -> Iterator[StoredFile]:
        """List everything below a prefix."""
        with self._translate_errors(folder):
            stream = _obstore().list(self._store.retrying, _key(folder) or None, chunk_size=1000)
            for chunk in stream:
                for item in chunk:
                    modified_ms = round(item["last_modified"].timestamp() * 1000)
                    yield StoredFile(item["path"], item["size"], modified_ms)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete blobs, and this machine's copies of them."""
        keys = [_key(path) for path in paths]
        if not keys:
            return
        obstore = _obstore()
        with self._translate_errors(keys[0]):
            try:
                obstore.delete(self._store.retrying, keys)
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                # Stores without a call for many answer for each, also that there was none.
                for key in keys:
                    try:
                        obstore.delete(self._store.retrying, key)
                    except FileNotFoundError:
                        continue
        self.forget(keys)

    def local(self, path: str) -> Path:
        """Return a copy in the cache."""
        return self.fetch([Blob(path)])[0]

    def local_folder(self, path: str) -> Path | None:
        """Return None: there are only copies of single blobs."""
        return None

    def open_original(self, path: str) -> BinaryIO:
        """Read the blob into memory. Raises: FileNotFoundError, StorageError."""
        if (data := self.get(path)) is None:
            raise FileNotFoundError(self._name(path))
        return io.BytesIO(data)

    def is_link(self, path: str) -> bool:
        return False

    def fetch(self, blobs: Sequence[Blob]) -> list[Path]:
        """Return copies in the cache."""
        for blob in blobs:
            _key(blob.path)
        return self._cache.fetch(blobs, self._copy)

    def release(self, blobs: Sequence[Blob]) -> None:
        """Let the cache remove these copies, when it has to."""
        self._cache.release(blobs)

    def forget(self, paths: Iterable[str]) -> None:
        """Remove this machine's copies."""
        self._cache.forget([_key(path) for path in paths])

    def trim_copies(self, max_bytes: int | None = None) -> None:
        """Trim the cache, which all lakes of this machine share."""
        trim_cache(max_bytes)

    def state_folder(self, path: str) -> Path:
        """Return a folder of this machine, the same for every process that opens this URL."""
        return self._state / _key(path)

    def _copy(self, blob: Blob, target: Path) -> None:
        """Stream a blob into a new file. Raises: ShardCorruptError, StorageError."""
        digest, num_bytes = hashlib.sha256(), 0
        with self._translate_errors(blob.path):
            try:
                got = _obstore().get(self._store.retrying, blob.path)
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                raise ShardCorruptError(
                    f"{self._name(blob.path)}: found no such file, expected the one that the log "
                    "names. Restore it from a copy of the lake."
                ) from error
            stream = iter(got.stream(min_chunk_size=_COPY_BYTES))
        with target.open("xb") as file:
            while (chunk := self._next(blob.path, stream)) is not None:
                file.write(chunk)
                digest.update(chunk)
                num_bytes += len(chunk)
        actual = digest.hexdigest()
        if blob.size_bytes not in (-1, num_bytes) or blob.sha256 not in ("", actual):
            raise ShardCorruptError(
                f"{self._name(blob.path)}: found {num_bytes} bytes of sha256 {actual[:16]}, "
                f"expected {'any number' if blob.size_bytes < 0 else blob.size_bytes} of "
                f"{blob.sha256[:16]} as committed. Restore the file from a copy of the lake."
            )

    def _next(self, path: str, stream: Iterator[Any]) -> Any:
        with self._translate_errors(path):
            return next(stream, None)

    def _name(self, path: str) -> str:
        return f"{self._url}/{path}"

    @contextmanager
    def _translate_errors(self, path: str) -> Iterator[None]:
        from obstore import exceptions

        try:
            yield
        except exceptions.AlreadyExistsError as error:
            raise _NameTakenError from error
        except (exceptions.BaseError, OSError, ValueError) as error:
            denied = isinstance(
                error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
            )
            store, name = self._store, self._name(path)
            raise to_storage_error(
                store.scheme, store.bucket, name, error, denied=denied
            ) from error


class _NameTakenError(Exception):
    """A create found the name taken, perhaps by itself."""


def _obstore() -> Any:
    import obstore

    return obstore


def _key(path: str) -> str:
    """Return a path that stays below the prefix and, in the cache, below its folder."""
    if path and (any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path):
        raise InvalidNameError(
            f"{path!r}: expected the path of a file inside of the lake, such as dataset/shards/x. "
            "Something other than ReplayLake wrote it."
        )
    return path


def is_missing_bucket(error: Exception) -> bool:
    """Whether it is the bucket that is not there."""
    return any(sign in str(error) for sign in _MISSING_BUCKET_SIGNS)


def to_storage_error(
    scheme: str, bucket: str, name: str, error: Exception, *, denied: bool = False
) -> StorageError:
    """Return what to raise for obstore's error on `name`; `denied` where it is of that class."""
    text = str(error)
    # A shared access signature is a secret, and in the query.
    what = re.sub(r"\?\S*", "", text.split("\n\n")[0].replace("\n", " "))[:300]
    variables = BACKENDS[scheme].credentials
    if is_missing_bucket(error):
        return StorageError(
            f"{name}: found no bucket {bucket!r}, expected one. Make it, or check `lake`."
        )
    if any(sign in text for sign in _MISSING_CREDENTIALS_SIGNS):
        return StorageError(
            f"{name}: found no credentials, expected {variables} in the environment. Set them; "
            "docs/STORAGE.md names all that are read."
        )
    if denied or re.search(r"status code: 40[013]\b", text):
        return StorageError(
            f"{name}: the store refused ({what}), expected credentials that may list, read and "
            f"write there. Check {variables} and what they may do."
        )
    kind = StorageError if re.search(r"status code: [34]\d\d", text) else TransientStorageError
    if re.search(r"kind: (Connect|Timeout)\b", text):
        return kind(
            f"{name}: no answer ({what}), expected an object store there. Check the network and "
            "the endpoint (AWS_ENDPOINT_URL for S3), then run it again."
        )
    return kind(
        f"{name}: {what}, expected to read or write it. Run it again: what was committed before is "
        "recognized."
    )
