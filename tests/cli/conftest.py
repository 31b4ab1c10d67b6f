"""Runs commands in this process, as `replaylake ...` would, and keeps what they print apart."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from replaylake.cli.main import main
from replaylake.cli.output import progress
from replaylake.datastore.interchange.formats.rlds.tfrecord import records
from replaylake.datastore.interchange.sources.source import find_source


@dataclass(frozen=True)
class Ran:
    """An exit code and the two streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What stdout holds, which has to be one JSON object and nothing else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def failed(self, *said: str) -> None:
        """Check that it was one clear line and exit code 1; an error in SQL also shows where."""
        assert self.code == 1, self
        line, *excerpt = self.err.splitlines()
        if excerpt:
            assert excerpt[0].startswith("LINE ")
            assert excerpt[1].strip(" ^") == ""
            assert len(excerpt) == 2
        assert line.startswith("error: ")
        assert "fault in ReplayLake" not in line
        for text in said:
            assert text in line, (text, line)


Run = Callable[..., Ran]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def run(
    lake: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Run:
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(lake))
    # Every two seconds a command says how far it is: a slow machine would read more of it.
    monkeypatch.setattr(progress, "_LINE_INTERVAL_S", 3600.0)

    def call(*arguments: object) -> Ran:
        capfdbinary.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfdbinary.readouterr()
        return Ran(code, captured.out.decode(errors="surrogateescape"), captured.err.decode())

    return call


@pytest.fixture
def tree(lake: Path) -> Callable[[], dict[str, bytes]]:
    """Returns every file of the lake, to show that a command changed nothing."""
    return lambda: {
        str(path.relative_to(lake)): path.read_bytes()
        for path in sorted(lake.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def cartpole() -> Path:
    """The RLlib log that ships with the project."""
    return Path(__file__).parents[2] / "examples" / "data" / "rllib_cartpole"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two hand-made episodes: returns 3 and 10, the first terminated, the second truncated."""
    rows = [
        "episode_id,step,x,y,action,reward,terminated,truncated",
        "a,0,0.5,1.0,0,1.0,false,false",
        "a,1,1.5,2.0,1,2.0,true,false",
        "b,0,2.5,3.0,1,10.0,false,true",
    ]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


_FIELD = descriptor_pb2.FieldDescriptorProto
# tensorflow/core/util/event.proto and framework/summary.proto, as far as scalars need them.
_MESSAGES: dict[str, list[tuple[str, int, int, str]]] = {
    "Value": [("tag", 1, _FIELD.TYPE_STRING, ""), ("simple_value", 2, _FIELD.TYPE_FLOAT, "")],
    "Summary": [("value", 1, _FIELD.TYPE_MESSAGE, "Value")],
    "SessionLog": [("status", 1, _FIELD.TYPE_INT32, "")],
    "Event": [
        ("wall_time", 1, _FIELD.TYPE_DOUBLE, ""),
        ("step", 2, _FIELD.TYPE_INT64, ""),
        ("file_version", 3, _FIELD.TYPE_STRING, ""),
        ("summary", 5, _FIELD.TYPE_MESSAGE, "Summary"),
        ("session_log", 7, _FIELD.TYPE_MESSAGE, "SessionLog"),
    ],
}


def _event_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of in fields:
            repeated = (name, field) == ("Summary", "value")
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            message.field.add(
                name=field,
                number=number,
                type=kind,
                label=label,
                type_name=f".t.{of}" if of else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


class EventsOf:
    """Reads event files; every checksum is compared by another implementation than the writer's."""

    def __init__(self) -> None:
        self._event = _event_class()

    def read(self, path: Path) -> list[Any]:
        (source,) = find_source([path]).files
        return [self._event.FromString(record) for record in records(source)]

    def scalars(self, events: list[Any]) -> list[tuple[int, dict[str, float]]]:
        return [
            (event.step, {value.tag: value.simple_value for value in event.summary.value})
            for event in events
            if event.HasField("summary")
        ]


@pytest.fixture(scope="session")
def events_of() -> EventsOf:
    return EventsOf()


MLFLOW_API = "/api/2.0/mlflow/"
MLFLOW_ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts/"


class Refusal(Exception):
    """A status and a message, as MLflow answers them."""


class MlflowServer:
    """The part of MLflow's REST API that runs and the registry need, in memory, with its limits."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, Any]] = {}
        self.artifacts: dict[str, bytes] = {}
        self.artifact_root = "mlflow-artifacts:"
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.headers: list[dict[str, str]] = []
        self.fail: Callable[[str], int | None] = lambda path: None
        tracking = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def do_PUT(self) -> None:
                path = unquote(self.path).removeprefix(MLFLOW_ARTIFACTS)
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if tracking.fail(path) is None:
                    tracking.artifacts[path] = data
                self.answer({})

            def answer(self, body: dict[str, Any]) -> None:
                parts = urlsplit(self.path)
                path = parts.path.removeprefix(MLFLOW_API)
                tracking.headers.append(dict(self.headers))
                try:
                    if (status := tracking.fail(path)) is not None:
                        raise Refusal(status, "out of order")
                    query, found, status = parse_qs(parts.query), {}, 200
                    if self.command != "PUT":
                        found = tracking.handle(path, body, query)
                except Refusal as refusal:
                    status, found = refusal.args[0], {"message": refusal.args[1]}
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def handle(self, path: str, body: dict[str, Any], query: dict[str, list[str]]) -> Any:
        if path == "experiments/get-by-name":
            name = query["experiment_name"][0]
            if name not in self.experiments:
                raise Refusal(404, "no experiment")
            return {"experiment": {"experiment_id": self.experiments[name]}}
        if path == "experiments/create":
            self.experiments[body["name"]] = str(len(self.experiments) + 1)
            return {"experiment_id": self.experiments[body["name"]]}
        if path == "runs/create":
            run_id = f"m{len(self.runs)}"
            tags = {tag["key"]: tag["value"] for tag in body["tags"]}
            self.runs[run_id] = {"params": {}, "metrics": [], "status": "RUNNING", "tags": tags}
            self.runs[run_id] |= {"name": body["run_name"], "experiment": body["experiment_id"]}
            return {"run": {"info": self.info(run_id)}}
        if path == "experiments/search":
            # A page for each.
            ids = sorted(self.experiments.values())
            begin = int(body.get("page_token", 0))
            found = {"experiments": [{"experiment_id": one} for one in ids[begin : begin + 1]]}
            return found | ({"next_page_token": str(begin + 1)} if begin + 1 < len(ids) else {})
        if path.startswith(("registered-models", "model-versions")):
            return self.handle_registry(path, body, {key: one[0] for key, one in query.items()})
        if path == "runs/search":
            tag, wanted = body["filter"].split("`")[1], body["filter"].split("'")[1]
            runs = [
                {"info": self.info(run_id)}
                for run_id, run in self.runs.items()
                if run["tags"].get(tag) == wanted and run["experiment"] in body["experiment_ids"]
            ]
            return {"runs": runs[: body["max_results"]]}
        run = self.runs[body["run_id"]]
        if path == "runs/update":
            run["status"] = body["status"]
            return {}
        assert path == "runs/log-batch"
        params, metrics = body.get("params", []), body.get("metrics", [])
        assert len(params) <= 100
        assert len(metrics) <= 1000
        for param in params:
            assert len(param["value"]) <= 6000
            assert run["params"].setdefault(param["key"], param["value"]) == param["value"]
        run["metrics"] += [(one["step"], one["key"], one["value"]) for one in metrics]
        return {}

    def info(self, run_id: str) -> dict[str, Any]:
        uri = f"{self.artifact_root}/{self.runs[run_id]['experiment']}/{run_id}/artifacts"
        return {"run_id": run_id, "artifact_uri": uri}

    def handle_registry(self, path: str, body: dict[str, Any], query: dict[str, str]) -> Any:
        if path == "registered-models/create":
            self.models[body["name"]] = {"versions": [], "aliases": {}}
            return {}
        if path == "model-versions/search":
            name, tag, value = query["filter"].split("'")[1], *query["filter"].split("`")[1:]
            versions = self.models[name]["versions"]
            wanted = {"key": tag, "value": value.split("'")[1]}
            return {"model_versions": [one for one in versions if wanted in one["tags"]]}
        name = query.get("name") or body["name"]
        if name not in self.models:
            raise Refusal(404, "no model")
        model = self.models[name]
        if path == "model-versions/create":
            model["versions"].append({**body, "version": str(len(model["versions"]) + 1)})
            return {"model_version": model["versions"][-1]}
        if path == "registered-models/alias":
            model["aliases"][body["alias"]] = body["version"]
        else:
            assert path == "registered-models/get"
        return {}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def tracking(monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    server = MlflowServer()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{server.url}/")
    for name in ("TRACKING_TOKEN", "TRACKING_USERNAME", "TRACKING_PASSWORD", "REGISTRY_URI"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    yield server
    server.close()
