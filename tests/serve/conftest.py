"""A tiny policy, and a real server on a free port."""

import asyncio
import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import certifi
import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decision_id import (
    DecisionSigner,
    read_unverified,  # noqa: F401  (for tests, through `kit`)
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.package import load_policy, save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.app import create_app
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.safety.limits import Limits, Safety  # noqa: F401  (for tests, through `kit`)
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.router import Router, ServedPolicy

WEIGHTS = np.array([[1.0, -1.0], [0.5, 0.25], [-2.0, 2.0], [3.0, -3.0]], np.float32)
CARTPOLE = PolicySpec(Box((4,)), Discrete(2), "categorical")


def linear_graph(weights, output, num_inputs):
    """Return `output = observations @ weights` as ONNX."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["observations", "w"], [output])],
        "linear",
        [helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["n", num_inputs])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", weights.shape[1]])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def stateful_graph(num_inputs, state_size):
    """Return a graph whose logits are its first two observations, and whose state stays."""
    graph = helper.make_graph(
        [
            helper.make_node("Split", ["observations"], ["logits", "rest"], axis=1),
            helper.make_node("Identity", ["state"], ["next_state"]),
        ],
        "stateful",
        [
            helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["n", num_inputs]),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, ["n", state_size]),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2]),
            helper.make_tensor_value_info("next_state", TensorProto.FLOAT, ["n", state_size]),
        ],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


def save_policy(folder: Path, spec: PolicySpec = CARTPOLE, graph: bytes | None = None) -> Path:
    save_package(
        folder,
        onnx=graph or linear_graph(WEIGHTS, "logits", 4),
        spec=spec,
        manifest={"algorithm": "by_hand"},
        learner_weights=None,
    )
    return folder


@dataclass
class Server:
    """A running server: its process (a group of its own), address, and what it wrote to stderr."""

    process: subprocess.Popen
    url: str
    lines: list

    def processes(self):
        return process_tree(self.process.pid)

    def stop(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)
        self.process.wait(30)

    def kill(self):
        """kill -9 of everything at once.

        Returns when all are gone: a killed worker holds its journal's lock for 30-50 ms more, and
        whoever recovers leaves the journals of live workers alone.
        """
        killed = self.processes()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        wait_until(lambda: not any(map(has_threads, killed)))


def start_server(**config) -> Server:
    """Run serve() in a process of its own and wait for its ready line."""
    return await_ready(spawn_server(**config))


def spawn_server(**config) -> subprocess.Popen:
    fields = {k: str(v) if isinstance(v, Path) else v for k, v in config.items()}
    variables = config["safety"].to_environment() if "safety" in config else {}
    fields.pop("safety", None)
    code = f"""
        import json
        from pathlib import Path
        from replaylake.serve.safety.limits import Safety
        from replaylake.serve.processes.server import ServeConfig, serve
        fields = json.loads({json.dumps(fields)!r})
        for name in ("package", "lake"):
            if fields.get(name):
                fields[name] = Path(fields[name])
        fields["safety"] = Safety.from_environment(json.loads({json.dumps(variables)!r}))
        raise SystemExit(serve(ServeConfig(**{{"port": 0, **fields}})))
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def await_ready(process) -> Server:
    """Read lines until the one that says where it serves; then go on reading in the background."""
    lines: list = []
    for line in process.stdout:
        lines.append(line)
        if " on http://" in line and "ready after" in line:
            break
    else:
        process.stdout.close()
        raise AssertionError("".join(lines))

    address = line.split(" on ")[1].split(",")[0]

    def read_on():
        with process.stdout:
            lines.extend(process.stdout)

    threading.Thread(target=read_on, daemon=True).start()
    return Server(process, address, lines)


class AppClient:
    """Requests to an app in process, its lifespan around them."""

    def __init__(self, app):
        self._app = app

    def __enter__(self):
        self._runner = asyncio.Runner()
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._runner.run(self._lifespan.__aenter__())
        transport = httpx.ASGITransport(self._app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        return self

    def __exit__(self, *error):
        self._runner.run(self._client.aclose())
        self._runner.run(self._lifespan.__aexit__(None, None, None))
        self._runner.close()

    def request(self, method, path, **body):
        return self._runner.run(self._client.request(method, path, **body))

    def idle(self, seconds):
        """Let tasks of the app run, which have the event loop only during a request otherwise."""
        self._runner.run(asyncio.sleep(seconds))

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, **body):
        if "content" in body:
            body["headers"] = {"content-type": "application/json", **body.get("headers", {})}
        return self.request("POST", path, **body)


class OtlpReceiver:
    """An OTLP receiver on loopback, which keeps what it decodes."""

    def __init__(self):
        receiver = self
        self.spans, self.metrics, self.agents = [], [], []
        self._condition = threading.Condition()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.agents.append(self.headers["user-agent"])
                receiver.keep(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self):
        """What a process needs to report here, a few times a second."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
        }

    def keep(self, path, body):
        with self._condition:
            if path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    about = decode_attributes(resource.resource.attributes)
                    for scope in resource.scope_spans:
                        self.spans += [(about, span) for span in scope.spans]
            elif path == "/v1/metrics":
                for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    about = decode_attributes(resource.resource.attributes)
                    for scope in resource.scope_metrics:
                        self.metrics += [(about, metric) for metric in scope.metrics]
            self._condition.notify_all()

    def wait_for_span(self, name, where=lambda attributes: True):
        """Return the resource, the span and its attributes of the first span of this name."""

        def find():
            for about, span in self.spans:
                attributes = decode_attributes(span.attributes)
                if span.name == name and where(attributes):
                    return about, span, attributes
            return None

        with self._condition:
            assert self._condition.wait_for(find, 20), [span.name for _, span in self.spans]
            return find()

    def wait_for_metric(self, name, is_wanted=lambda about, metric: True):
        """Return the newest metric of this name that is wanted, and its resource."""

        def find():
            for about, metric in reversed(self.metrics):
                if metric.name == name and is_wanted(about, metric):
                    return about, metric
            return None

        with self._condition:
            assert self._condition.wait_for(find, 20), {one.name for _, one in self.metrics}
            return find()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def decode_attributes(pairs):
    """Return the attributes of OTLP's protobuf as a dict."""

    def read(value):
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [read(one) for one in value.array_value.values]
        return getattr(value, kind)

    return {pair.key: read(pair.value) for pair in pairs}


@pytest.fixture
def otlp_receiver():
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


def make_serving(policy, *, log=None, exploration=None, limits=None, signer=None, **more):
    """Return what a worker holds that serves one policy, and nothing else unless it is given."""
    return ServingState(
        Router(ServedPolicy("p", 2, policy, "p@champion", {"algorithm": "by_hand"})),
        signer or DecisionSigner(b"k" * 32, "d"),
        log,
        exploration or Exploration(),
        limits or Limits(),
        **more,
    )


def check_refused(response, status, field):
    """Check that a response is an error of this status at this field, and return the error."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) - {"found", "expected"} == {"field", "message"}
    assert ("found" in error) == ("expected" in error)
    assert error["field"] == field, error
    assert all(isinstance(text, str) and text for text in error.values())
    return error


def process_tree(root: int) -> list:
    """Return the pids of a process and its descendants: workers are in groups of their own."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = [root] if root in parents else []
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def is_running(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def stopped(pid: int):
    """Hold a process still: whatever it is asked waits until the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(
            lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        )
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def has_threads(pid: int) -> bool:
    """Whether a process has files open still: its first thread may be gone before the others."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    return len(tasks) > 1 or is_running(pid)


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.02)


END_TOKEN = "<end>"
# As long a context as a test could wish for.
CONTEXT_TOKENS = 65_536
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_byte_model(path: Path, seed: int = 0, **generation: object) -> Path:
    """Write a model of random weights whose tokens are bytes, roles and the end."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [END_TOKEN, "<system>", "<user>", "<assistant>"]
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        additional_special_tokens=special[1:],
    )
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=CONTEXT_TOKENS,
        eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    fast.save_pretrained(path)
    defaults = {"eos_token_id": 0, **generation}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself, so that answers have as many tokens as may be."""
    return save_byte_model(tmp_path_factory.mktemp("models") / "bytes", eos_token_id=[])


@pytest.fixture(scope="session", autouse=True)
def few_authorities(tmp_path_factory):
    """Trust one authority: to load all of certifi's takes 18 ms in each client, also for http."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    path = tmp_path_factory.mktemp("authorities") / "one.pem"
    path.write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session")
def kit():
    """This module: pytest's importlib mode puts no test folder on the path."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def app_client():
    return AppClient


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "package")


@pytest.fixture(scope="session")
def serving():
    return make_serving


@pytest.fixture(scope="session")
def refused():
    return check_refused


@pytest.fixture(scope="module")
def policy(package):
    return load_policy(package)


@pytest.fixture(scope="module")
def limited_client(app_client, policy):
    """An app in process that takes bodies of 20 kB and batches of 16."""
    limits = Limits(body_bytes=20_000, batch=16)
    with app_client(create_app(lambda: make_serving(policy, limits=limits))) as client:
        yield client


@pytest.fixture
def logged(app_client, policy, tmp_path):
    """An app in process that logs to the dataset `d` of a new lake."""
    lake = open_lake(tmp_path / "lake", create=True)
    signer = DecisionSigner(lake.signing_key(), "d")
    log = DecisionLog(lake.dataset("d"), policy.spec, signer.worker, window_s=60)
    serving = make_serving(policy, log=log, signer=signer)
    with app_client(create_app(lambda: serving)) as client:
        client.lake, client.log, client.signer, client.serving = lake, log, signer, serving
        yield client


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    return open_lake(tmp_path_factory.mktemp("lake") / "lake", create=True)


@pytest.fixture(scope="module")
def server(package, lake):
    running = start_server(
        package=package,
        policy="by_hand",
        version=3,
        reference="by_hand@champion",
        lake=lake.path,
        log_to="served",
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url) as client:
        yield client
