"""Aliases of policies in MLflow's model registry, through its REST API.

A policy version is a model version there: a pyfunc among the artifacts of the run that trained it.
A model version is created once for each package and found again by its tags, so that an attempt
that failed can be repeated.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from replaylake.datastore.lake.policies.entries import now_ms
from replaylake.datastore.lake.policies.package import check_package
from replaylake.datastore.lake.policies.registry import PolicyRef, Registry
from replaylake.serve.package.mlflow_api import (
    NOT_FOUND,
    REGISTRY_URI,
    RUN_TAG,
    MlflowError,
    MlflowServer,
)
from replaylake.serve.package.mlflow_model import package_mlflow_model

_POLICY_TAG: Final = "replaylake.policy"
_VERSION_TAG: Final = "replaylake.version"
_PACKAGE_TAG: Final = "replaylake.package_sha256"
_ARTIFACT_SCHEME: Final = "mlflow-artifacts"
_PAGE_SIZE: Final = 1000


class AliasMovedError(MlflowError):
    """An alias of the lake is at another version than the one to set in MLflow."""


@dataclass(frozen=True)
class MlflowAlias:
    """An alias in MLflow's registry: `version` of `model`, MLflow's own number.

    source: the URI of the model's files. is_created: whether the model version is new. url: a page
    of MLflow.
    """

    model: str
    alias: str
    version: str
    source: str
    is_created: bool
    url: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class MlflowRegistry:
    """MLflow's model registry, at the server that the environment names."""

    def __init__(self, model: str, mlflow_source: str | None = None) -> None:
        """Read the environment; nothing is sent.

        model: name of the registered model. mlflow_source: URI of the model's files, where they are
        stored already; None to upload them. Raises: ConfigInvalidError if MLFLOW_TRACKING_URI, or a
        MLFLOW_REGISTRY_URI that is set, is not an http or https URL.
        """
        self.model, self.mlflow_source = model, mlflow_source
        self._tracking = MlflowServer.from_environment()
        self._server = self._tracking
        if os.environ.get(REGISTRY_URI):
            self._server = MlflowServer.from_environment(REGISTRY_URI)

    def set_alias(self, registry: Registry, ref: PolicyRef, alias: str) -> MlflowAlias:
        """Set an alias there as it is in the lake, and create the model version if it is missing.

        Raises: MlflowError if a request fails; AliasMovedError if the lake's alias is at another
        version, or moves to one during the upload; ConfigInvalidError for a policy that is no
        pyfunc, because it has a state; StorageError, PackageInvalidError, NotFoundError if the
        package cannot be read.
        """
        self._check_lake_alias(registry, ref, alias)
        sha256 = ref.manifest_sha256 or check_package(ref.path, None).sha256
        found = self._find_version(ref, sha256)
        version = found or self._create_version(registry, ref, sha256)
        # An upload takes a while. MLflow's alias is left as it is where the lake's has moved: the
        # later move may have set it there, or may be repeated there later.
        self._check_lake_alias(registry, ref, alias)
        number = self._server.read_text(version, "version")
        source = self._server.read_text(version, "source")
        body = {"name": self.model, "alias": alias, "version": number}
        self._server.request("registered-models/alias", body)
        return MlflowAlias(
            self.model,
            alias,
            number,
            source,
            found is None,
            f"{self._server.url}/#/models/{quote(self.model, safe='')}/versions/{number}",
        )

    def _check_lake_alias(self, registry: Registry, ref: PolicyRef, alias: str) -> None:
        current = registry.alias_version(ref.name, alias)
        if current != ref.version:
            found = "not set" if current is None else f"at version {current}"
            raise AliasMovedError(
                f"{self._server.url}: alias {alias} of {self.model} is not set: the lake's "
                f"{ref.name}@{alias} is {found}, expected version {ref.version}"
            )

    def _find_version(self, ref: PolicyRef, sha256: str) -> dict[str, Any] | None:
        """Return the model version of a package; of several, which two attempts made, the first."""
        try:
            self._server.request(f"registered-models/get?{urlencode({'name': self.model})}")
        except MlflowError as error:
            if error.status != NOT_FOUND:
                raise
            self._server.request("registered-models/create", {"name": self.model})
            return None
        name = self.model.replace("'", "''")
        query = {"filter": f"name = '{name}' and tags.`{_PACKAGE_TAG}` = '{sha256}'"}
        query |= {"max_results": str(_PAGE_SIZE), "order_by": "version_number ASC"}
        answer = self._server.request(f"model-versions/search?{urlencode(query)}")
        for one in self._server.read_objects(answer, "model_versions"):
            tags = {
                tag.get("key"): tag.get("value") for tag in self._server.read_objects(one, "tags")
            }
            is_same = (tags.get(_POLICY_TAG), tags.get(_VERSION_TAG)) == (
                ref.name,
                str(ref.version),
            )
            if is_same and self.mlflow_source in (None, one.get("source")):
                return one
        return None

    def _create_version(self, registry: Registry, ref: PolicyRef, sha256: str) -> dict[str, Any]:
        tags = {_POLICY_TAG: ref.name, _VERSION_TAG: str(ref.version), _PACKAGE_TAG: sha256}
        body: dict[str, Any] = {
            "name": self.model,
            "source": self.mlflow_source,
            "description": f"ReplayLake: {ref}",
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        if self.mlflow_source is None:
            run = self._find_run(registry, ref, sha256) or self._create_run(ref, sha256)
            body |= {
                "source": self._upload(ref, run),
                "run_id": self._tracking.read_text(run, "run_id"),
            }
        answer = self._server.request("model-versions/create", body)
        return self._server.read_object(answer, "model_version")

    def _find_run(self, registry: Registry, ref: PolicyRef, sha256: str) -> dict[str, Any] | None:
        """Return the run that trained a version, or that an earlier attempt created for it."""
        experiment_ids: list[str] = []
        page: dict[str, Any] = {"max_results": _PAGE_SIZE}
        while True:
            answer = self._tracking.request("experiments/search", page)
            experiment_ids += [
                self._tracking.read_text(one, "experiment_id")
                for one in self._tracking.read_objects(answer, "experiments")
            ]
            if not answer.get("next_page_token"):
                break
            page["page_token"] = answer["next_page_token"]
        run_id = registry.show(ref)["run_id"]
        for tag, value in ((RUN_TAG, run_id), (_PACKAGE_TAG, sha256)):
            quoted = str(value).replace("'", "''")
            body = {"experiment_ids": experiment_ids, "max_results": 1}
            body["filter"] = f"tags.`{tag}` = '{quoted}'"
            runs = self._tracking.read_objects(self._tracking.request("runs/search", body), "runs")
            if runs:
                return self._tracking.read_object(runs[0], "info")
        return None

    def _create_run(self, ref: PolicyRef, sha256: str) -> dict[str, Any]:
        """Create a run for the artifacts of a version whose training run MLflow does not have."""
        tags = {_PACKAGE_TAG: sha256, "mlflow.source.name": "replaylake"}
        body = {
            "experiment_id": self._tracking.find_experiment(self.model),
            "run_name": str(ref),
            "start_time": now_ms(),
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        info = self._tracking.read_object(
            self._tracking.request("runs/create", body), "run", "info"
        )
        run_id = self._tracking.read_text(info, "run_id")
        body = {"run_id": run_id, "status": "FINISHED", "end_time": now_ms()}
        self._tracking.request("runs/update", body)
        return info

    def _upload(self, ref: PolicyRef, run: dict[str, Any]) -> str:
        """Upload a version as a pyfunc to a run's artifacts, and return its URI."""
        artifact_uri = self._tracking.read_text(run, "artifact_uri")
        uri = f"{artifact_uri}/policies/{ref.name}/{ref.version}"
        parts = urlsplit(uri)
        if parts.scheme != _ARTIFACT_SCHEME or parts.netloc:
            raise MlflowError(
                f"{self._tracking.url}: artifacts of run {run.get('run_id')}: found "
                f"{artifact_uri}, expected a URI of mlflow-artifacts:, to which the server "
                "takes uploads. Store the model that `package_mlflow_model` writes there yourself, "
                "and give its URI as `mlflow_source`"
            )
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            package_mlflow_model(ref, model)
            for file in sorted(path for path in model.rglob("*") if path.is_file()):
                self._tracking.upload(f"{parts.path.lstrip('/')}/{file.relative_to(model)}", file)
        return uri
