"""Requests to an MLflow server through its REST API.

MLflow's library would add a web server and a database for a dozen requests.
"""

from __future__ import annotations

import base64
import http.client
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


class _RedirectRefuser(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect to the handler of errors.

    To follow one would send the credentials to another host, and turn a POST into a GET.
    """

    def redirect_request(self, *_: Any) -> None:
        return None


_opener: Final = urllib.request.build_opener(_RedirectRefuser)


class MlflowServer:
    """A server at a URL, with the credentials of MLflow's own environment variables.

    Redirects are refused.
    """

    def __init__(self, url: str, variable: str = TRACKING_URI) -> None:
        """variable: the environment variable that holds the URL, for messages."""
        self.url, self._variable = url, variable
        self._headers = {"User-Agent": f"replaylake/{VERSION}"}
        if authorization := _read_credentials():
            self._headers["Authorization"] = authorization

    @classmethod
    def from_environment(cls, variable: str = TRACKING_URI) -> MlflowServer:
        """Return the server that a variable names.

        Raises: ConfigInvalidError if the variable is not an http or https URL.
        """
        url = os.environ.get(variable, "").strip().rstrip("/")
        if not _is_http_url(url):
            raise ConfigInvalidError(
                f"MLflow: {variable}: found {url!r}, expected the URL of a tracking server, for "
                "example http://127.0.0.1:5000. Set it."
            )
        return cls(url, variable)

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
            answer = self.request(f"experiments/get-by-name?{query}")
            return self.read_text(answer, "experiment", "experiment_id")
        except MlflowError as error:
            if error.status != NOT_FOUND:
                raise
            answer = self.request("experiments/create", {"name": name})
            return self.read_text(answer, "experiment_id")

    def read_object(self, answer: Mapping[str, Any], *names: str) -> dict[str, Any]:
        """Return the object that an answer has under names, from the outermost to the innermost.

        Raises: MlflowError if there is none.
        """
        found = _find_member(answer, names)
        if not isinstance(found, dict):
            raise self._report_answer(".".join(names), found, "an object")
        return found

    def read_objects(self, answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        """Return the list of objects that an answer has under a name; [] without the name.

        Raises: MlflowError if it is no list of objects.
        """
        found = answer.get(name) or []
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise self._report_answer(name, found, "a list of objects")
        return found

    def read_text(self, answer: Mapping[str, Any], *names: str) -> str:
        """Return the text, or a number as text, that an answer has under names.

        Raises: MlflowError if there is none.
        """
        found = _find_member(answer, names)
        if not isinstance(found, str | int):
            raise self._report_answer(".".join(names), found, "a text")
        return str(found)

    def _report_answer(self, name: str, found: Any, expected: str) -> MlflowError:
        return MlflowError(
            f"{self.url}: {name} of an answer: found {found!r:.100}, expected {expected}. Set "
            f"{self._variable} to the URL of an MLflow server."
        )

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
            with _opener.open(request, timeout=timeout_s) as response:
                answer = json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                reason = self._read_reason(error)
            text = f"{self.url}: {action}: status {error.code}, {reason}"
            raise MlflowError(text, error.code) from error
        # HTTPException: an answer that is cut off, or that is no HTTP.
        except (OSError, ValueError, http.client.HTTPException) as error:
            text = f"{self.url}: {action}: {str(error) or type(error).__name__}"
            raise MlflowError(text) from error
        if not isinstance(answer, dict):
            raise self._report_answer(action, answer, "an object")
        return answer

    def _read_reason(self, error: urllib.error.HTTPError) -> str:
        """Return why a request was refused."""
        if location := error.headers.get("Location"):
            return (
                f"a redirect to {location!r:.300}, which is not followed. Set {self._variable} to "
                "the URL of the server itself."
            )
        try:
            return str(json.loads(error.read(4096))["message"])[:300]
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            return str(error.reason)


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # A port that is no number raises only when it is read.
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _find_member(answer: Any, names: tuple[str, ...]) -> Any:
    """Return what an answer has under names; None where one is missing."""
    for name in names:
        answer = answer.get(name) if isinstance(answer, dict) else None
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
