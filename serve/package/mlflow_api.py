"""Requests to an MLflow server through its REST API.

MLflow's library would add a web server and a database for a dozen requests.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError
from replaylake.datastore.version import VERSION

TRACKING_URI: Final = "MLFLOW_TRACKING_URI"
REGISTRY_URI: Final = "MLFLOW_REGISTRY_URI"
# The tag of a run with the id that it has in the lake.
RUN_TAG: Final = "replaylake.run_id"
NOT_FOUND: Final = 404
_API: Final = "/api/2.0/mlflow"
_ARTIFACTS_API: Final = "/api/2.0/mlflow-artifacts/artifacts"
_TIMEOUT_S: Final = 10.0
# For each write or read of an artifact, which the server may pass on to an object store.
_UPLOAD_TIMEOUT_S: Final = 60.0


class MlflowError(ReplayLakeError):
    """The server refused a request or did not answer. status: None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class MlflowServer:
    """A server at a URL, with the credentials of MLflow's own environment variables."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._headers = {"User-Agent": f"replaylake/{VERSION}"}
        if authorization := _read_credentials():
            self._headers["Authorization"] = authorization

    @classmethod
    def from_environment(cls, variable: str = TRACKING_URI) -> MlflowServer:
        """Return the server that a variable names.

        Raises: ConfigInvalidError if the variable is not an http or https URL.
        """
        url = os.environ.get(variable, "").strip().rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigInvalidError(
                f"MLflow: {variable}: found {url!r}, expected the URL of a tracking server, for "
                "example http://127.0.0.1:5000. Set it."
            )
        return cls(url)

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a POST of a body, or a GET without one, and return the answer.

        Raises: MlflowError.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{_API}/{path}", data, headers)
        return self._send(request, path.partition("?")[0], _TIMEOUT_S)

    def find_experiment(self, name: str) -> str:
        """Return the id of an experiment, which is created if it is missing.

        Raises: MlflowError.
        """
        try:
            query = urlencode({"experiment_name": name})
            found = self.request(f"experiments/get-by-name?{query}")["experiment"]
        except MlflowError as error:
            if error.status != NOT_FOUND:
                raise
            found = self.request("experiments/create", {"name": name})
        return str(found["experiment_id"])

    def upload(self, path: str, file: Path) -> None:
        """Store a file as the artifact at a path of the server's artifact store.

        Raises: MlflowError; OSError if the file cannot be read.
        """
        headers = {
            **self._headers,
            "Content-Type": "application/octet-stream",
            "Content-Length": str(file.stat().st_size),
        }
        url = f"{self.url}{_ARTIFACTS_API}/{quote(path)}"
        with file.open("rb") as data:
            request = urllib.request.Request(url, data, headers, method="PUT")
            self._send(request, f"artifact {path}", _UPLOAD_TIMEOUT_S)

    def _send(
        self, request: urllib.request.Request, action: str, timeout_s: float
    ) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer: dict[str, Any] = json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                reason = _read_reason(error.read(4096)) or error.reason
            text = f"{self.url}: {action}: status {error.code}, {reason}"
            raise MlflowError(text, error.code) from error
        except (OSError, ValueError) as error:
            raise MlflowError(f"{self.url}: {action}: {error}") from error
        return answer


def _read_credentials() -> str | None:
    """Return the Authorization header for MLflow's variables; None without credentials."""
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return f"Bearer {token}"
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    if not user:
        return None
    pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _read_reason(data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return ""
