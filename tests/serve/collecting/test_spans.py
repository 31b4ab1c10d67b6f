"""POST /v1/traces: spans of real exporters become sessions, as a file of them would."""

import base64
import contextlib
import gzip
import json
import random
import re
from functools import partial
from pathlib import Path

import hypothesis
import pyarrow as pa
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.call_outcomes import (
    apply_outcomes,
    ensure_outcomes_table,
    find_corrected,
)
from replaylake.datastore.feedback.decisions import rewards_encoder
from replaylake.datastore.interchange.formats.otlp.spans import read_spans
from replaylake.datastore.interchange.ingest import received_spans
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.received_spans import (
    SessionAssembler,
    encode_spans,
    ensure_spans_table,
    make_span_record,
    split_request,
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.storage.table.rewrite import RewritePlan, rewrite
from replaylake.serve.collecting.collector import Collector, CollectorConfig
from replaylake.serve.collecting.otlp_protobuf import decode_trace_request

TRACE = "5b8efff798038103d269b633813fc60c"
# Columns in which a received session differs from one of a file, and those that only it has.
OWN = ("episode_id", "trace_id", "span_ids", "spans_digest")


def attribute(name, value):
    kind = "intValue" if isinstance(value, int) else "stringValue"
    return {"key": name, "value": {kind: str(value)}}


def span(number, parent=None, trace=TRACE, **attributes):
    """Return a span; names of attributes have `__` for a dot."""
    fields = {
        "traceId": trace,
        "spanId": f"{number:016x}",
        "name": f"span {number}",
        "kind": 1,
        "startTimeUnixNano": str(1_700_000_000_000_000_000 + number * 1_000_000),
        "endTimeUnixNano": str(1_700_000_000_500_000_000 + number * 1_000_000),
        "attributes": [attribute(k.replace("__", "."), v) for k, v in attributes.items()],
    }
    return fields if parent is None else {**fields, "parentSpanId": f"{parent:016x}"}


def call(number, parent, asked, answer, trace=TRACE, **attributes):
    messages = {"input": asked, "output": [("assistant", answer)]}
    texts = {
        f"gen_ai__{name}__messages": json.dumps(
            [{"role": r, "parts": [{"type": "text", "content": t}]} for r, t in several]
        )
        for name, several in messages.items()
    }
    return span(number, parent, trace, gen_ai__operation__name="chat", **texts, **attributes)


def request(*spans):
    scope = {"scope": {"name": "tests"}, "spans": list(spans)}
    resource = {"attributes": [attribute("service.name", "shop")]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def session(trace=TRACE, start=0, **attributes):
    """Return the spans of an agent with a tool and a sub-agent, the root first."""
    asked = [("user", "What is due?")]
    after = [*asked, ("assistant", "look"), ("user", "and then?")]
    agent = {"gen_ai__operation__name": "invoke_agent"}
    s = start
    return [
        span(s + 1, None, trace, **attributes),
        span(s + 2, s + 1, trace, **agent, gen_ai__agent__name="planner"),
        call(s + 3, s + 2, asked, "look", trace),
        span(s + 4, s + 2, trace, http__method="GET"),
        span(s + 5, s + 4, trace, **agent, gen_ai__agent__name="helper"),
        call(s + 6, s + 5, [("user", "sub")], "found", trace),
        call(s + 7, s + 2, after, "done", trace),
    ]


SPANS = [
    *session(),
    *session("11" * 16, 100, session__id="talk"),
    *session("22" * 16, 200, session__id="talk"),
    span(300, None, "33" * 16, http__method="GET"),
]


def read_rows(lake, name):
    columns = "* exclude (episode_id)"
    rows = lake.sql(
        f"select {columns} from {name}.steps order by source_episode_id, env_step, agent_id"
    ).to_pylist()
    return [{k: v for k, v in row.items() if k not in OWN and v is not None} for row in rows]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The rows that the format otlp reads from one file of all spans."""
    folder = tmp_path_factory.mktemp("file")
    (folder / "spans.json").write_text(json.dumps(request(*SPANS)))
    lake = open_lake(folder / "lake", create=True)
    ingest(lake, [folder / "spans.json"], "agents")
    rows = read_rows(lake, "agents")
    assert len(rows) == 9
    return rows


class Receiver:
    """A dataset whose spans are written without a server."""

    def __init__(self, path):
        collector = Collector(CollectorConfig(str(path), "agents"))
        collector.close()
        self.dataset, self.lake = collector.dataset, open_lake(path)
        ensure_spans_table(self.dataset)
        self.assembler = SessionAssembler(
            self.dataset,
            settle_s=1,
            idle_s=60,
            find_corrected=partial(find_corrected, self.dataset),
        )
        self.now_us, self.number = 1_800_000_000_000_000, 0

    def receive(self, *spans):
        self.number += 1
        self.now_us += 1000
        records = [
            json.loads(make_span_record(one, body, self.now_us))
            for one, body in split_request(request(*spans))
        ]
        self.dataset.spans.append(encode_spans(records), producer="test", sequence=self.number)

    def report(self, **fields):
        """Append a report of the time, and apply it."""
        ensure_outcomes_table(self.dataset)
        self.number += 1
        row = {"terminated": False, "truncated": False, "timestamp": self.now_us, **fields}
        rows = rewards_encoder(self.dataset)([row])
        self.dataset.rewards.append(rows, producer="test", sequence=self.number)
        return apply_outcomes(self.dataset, other_clocks=True)

    def label(self, text, **options):
        """Label steps: `text` selects the labels, and which steps they are of."""
        keys = ["episode_id", "agent_id", "step"]
        labels = self.lake.sql(f"select {', '.join(keys)}, {text}")
        annotate(self.lake, "agents", labels, on=keys, **options)

    def assemble(self, seconds=0.0):
        self.now_us += int(seconds * 1e6)
        return self.assembler.run(self.now_us)


@pytest.fixture
def receiver(tmp_path):
    return Receiver(tmp_path / "lake")


@pytest.mark.parametrize("seed", range(3))
def test_any_split_and_order_gives_the_rows_of_one_file(receiver, expected, seed):
    rng = random.Random(seed)
    spans = SPANS.copy()
    rng.shuffle(spans)
    spans += rng.sample(spans, 4)  # an exporter sends a batch again
    while spans:
        part, spans = spans[:5], spans[5:]
        receiver.receive(*part)
        receiver.assemble(rng.choice([0, 2, 100]))  # sessions may be written before they are whole
    receiver.assemble(100)
    assert read_rows(receiver.lake, "agents") == expected
    assert receiver.assemble(100).version is None  # nothing is left to do


def test_commits_count_the_episodes_and_steps_that_are_new(receiver):
    *first, late = session()
    receiver.receive(*first)
    receiver.assemble(2)
    receiver.receive(late, *session("11" * 16, 100))
    receiver.assemble(2)
    commits = receiver.lake.sql(
        "select num_episodes, num_steps from commits where operation = 'SESSIONS' order by version"
    )
    # The last span is one more step of the first session, which is written again.
    assert [tuple(row.values()) for row in commits.to_pylist()] == [(1, 2), (1, 4)]


def test_a_trace_waits_for_its_root_and_then_for_a_moment(receiver):
    root, *others = session()
    receiver.receive(*others)
    assert receiver.assemble(30).num_waiting == 1
    receiver.receive(root)
    assert receiver.assemble(0.5).num_waiting == 1
    done = receiver.assemble(1)
    assert (done.num_sessions, done.num_steps, done.num_waiting) == (1, 3, 0)


def test_a_trace_whose_root_never_comes_is_written_when_nothing_came_for_long(receiver):
    receiver.receive(*session()[1:])
    assert receiver.assemble(59).version is None
    assert receiver.assemble(2).num_steps == 3


def test_labels_and_rewards_stay_where_a_late_span_adds_to_a_session(receiver):
    *spans, last = session()
    receiver.receive(*spans)
    assert receiver.assemble(2).num_steps == 2
    receiver.label("7 as mark from agents.steps", add="mark")
    receiver.report(decision_id=f"{2:016x}", reward=1.0, terminated=True)
    receiver.receive(last)
    assert receiver.assemble(2).num_steps == 3
    apply_outcomes(receiver.dataset, other_clocks=True)
    columns = "agent_id, step, mark, reward, terminated"
    found = receiver.lake.sql(f"select {columns} from agents.steps order by env_step").to_pylist()
    assert [tuple(row.values()) for row in found] == [
        ("planner", 0, 7, None, False),
        ("helper", 0, 7, None, False),
        ("planner", 1, None, 1.0, True),
    ]


def read_outcomes(receiver, trace=TRACE):
    columns = "agent_id, step, reward, terminated"
    rows = receiver.lake.sql(
        f"select {columns} from agents.steps where trace_id = '{trace}' order by env_step"
    )
    return [tuple(row.values()) for row in rows.to_pylist()]


def test_a_late_span_keeps_the_reward_that_a_person_corrected(receiver):
    # The span that comes late is not a call: the steps stay the same.
    *spans, last = session()
    late = span(9, 1, http__method="GET")
    receiver.receive(*spans, last)
    receiver.assemble(2)
    receiver.report(episode_id=TRACE, reward=1.0, terminated=True)
    reported = [("planner", 0, 0, False), ("helper", 0, 0, True), ("planner", 1, 1, True)]
    assert read_outcomes(receiver) == reported
    correction = "-5.0 as human from agents.steps where agent_id = 'planner' and step = 1"
    receiver.label(correction, set={"reward": "human"})
    receiver.receive(late)
    assert receiver.assemble(2).num_steps == 3
    apply_outcomes(receiver.dataset, other_clocks=True)
    corrected = [*reported[:2], ("planner", 1, -5, True)]
    assert read_outcomes(receiver) == corrected
    receiver.now_us += 1
    receiver.report(episode_id=TRACE, reward=2.0)
    assert read_outcomes(receiver)[2] == ("planner", 1, 2, False)  # a newer report counts


def test_reports_are_applied_where_the_clock_of_the_steps_is_ahead(receiver):
    receiver.receive(*session())
    receiver.assemble(2)
    before = 1_600_000_000_000_000  # years before the steps, by their clock
    receiver.report(episode_id=TRACE, reward=1.0, terminated=True, timestamp=before)
    rewarded = [("planner", 0, 0, False), ("helper", 0, 0, True), ("planner", 1, 1, True)]
    assert read_outcomes(receiver) == rewarded
    done = receiver.report(episode_id="unknown", reward=1.0)
    assert (done.version, done.num_unmatched) == (None, 1)


def test_a_late_span_keeps_a_reward_whose_report_was_purged(receiver):
    receiver.receive(*session())
    receiver.assemble(2)
    receiver.report(decision_id=f"{3:016x}", reward=4.0)
    rewards = receiver.dataset.rewards
    rewrite(
        rewards,
        lambda snapshot: RewritePlan(
            {entry: lambda rows: rows[:0] for entry in snapshot.files}, {}
        ),
        producer="purge",
        sequence=0,
        operation="DELETE",
    )
    assert rewards.snapshot().num_rows == 0
    receiver.receive(span(9, 1, http__method="GET"))
    assert receiver.assemble(2).num_steps == 3
    assert read_outcomes(receiver)[0] == ("planner", 0, 4, False)


def test_a_late_span_leaves_the_steps_and_labels_of_a_conversation_in_place(receiver):
    *first, late = session("11" * 16, 100, session__id="talk")
    receiver.receive(*first, *session("22" * 16, 200, session__id="talk"))
    assert receiver.assemble(2).num_steps == 5
    receiver.label("env_step as mark from agents.steps", add="mark")
    receiver.receive(late)
    assert receiver.assemble(0.5).version is None  # the steps of the trace stay while it waits
    assert receiver.assemble(2).num_steps == 6
    found = receiver.lake.sql("select trace_id, mark from agents.steps order by env_step")
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        ("11" * 16, 0),
        ("11" * 16, 1),
        ("11" * 16, None),
        ("22" * 16, 2),
        ("22" * 16, 3),
        ("22" * 16, 4),
    ]


def test_a_trace_that_changes_its_conversation_is_never_in_two(receiver):
    first, second, third = (f"{n}{n}" * 16 for n in range(1, 4))
    *a, a_late = session(first, 100, session__id="talk")
    receiver.receive(*a, *session(second, 200, session__id="talk"))
    receiver.receive(*session(third, 300, session__id="other"))
    assert receiver.assemble(2).num_steps == 8
    # The second trace names two conversations now, so it is a session of its own.
    receiver.receive(span(208, 201, second, session__id="other"))
    receiver.assemble(0.8)
    receiver.receive(a_late)
    assert receiver.assemble(0.5).version is None  # "talk" has steps of it and waits
    assert receiver.assemble(2).num_steps == 6
    found = receiver.lake.sql(
        "select source_episode_id as name, count(*) as num from agents.steps group by all"
    )
    names = {row["name"]: row["num"] for row in found.to_pylist()}
    assert names == {second: 3, "other": 3, "talk": 3}


def test_a_session_that_was_deleted_does_not_come_back(receiver):
    receiver.receive(*session())
    receiver.assemble(2)
    delete(receiver.lake, "agents", where=f"source_episode_id = '{TRACE}'")
    assert receiver.dataset.spans.snapshot().num_rows == 0
    receiver.receive(*session()[:3])
    assert receiver.assemble(100).num_steps == 0
    assert read_rows(receiver.lake, "agents") == []


def test_a_session_that_the_dataset_cannot_hold_does_not_hold_up_others(
    tmp_path, caplog, monkeypatch
):
    lake = open_lake(tmp_path / "lake", create=True)
    extras = {"finish_reason": pa.int64()}  # the reader's are texts
    lake.dataset("agents").create(Text(), Text(), extras=extras, rewards_optional=True)
    receiver = Receiver(tmp_path / "lake")
    told = [{"role": "assistant", "parts": [], "finish_reason": "stop"}]
    asked = {"gen_ai__input__messages": "[]", "gen_ai__output__messages": json.dumps(told)}
    # Each read scans all spans.
    reads = []
    read = received_spans._read_episodes
    monkeypatch.setattr(
        received_spans, "_read_episodes", lambda *given: reads.append(given) or read(*given)
    )
    others = [call(1, None, [("user", "q")], "a", f"{number:032x}") for number in range(1, 32)]
    receiver.receive(span(1, None, "66" * 16, gen_ai__operation__name="chat", **asked), *others)
    assert receiver.assemble(2).num_steps == 31
    assert "66" * 16 in caplog.text
    assert len(reads) == 11  # all 32, and then two halves of what has it five times
    assert receiver.assemble(2).version is None  # it is not read again and again


def export(collector, body, kind="application/json", **headers):
    return collector.client.post(
        "/v1/traces", content=body, headers={"content-type": kind, **headers}
    )


def test_json_protobuf_and_gzip_are_received_alike(collect_in, expected, tmp_path):
    with collect_in(tmp_path / "lake", settle_s=0.1, idle_s=0.3) as server:
        # Nothing settles before all of it is there.
        server.collector.move = lambda: False
        plain = json.dumps(request(*SPANS[:9])).encode()
        assert (answer := export(server, plain)).json() == {}, answer.text
        message = ParseDict(_with_base64(request(*SPANS[9:])), ExportTraceServiceRequest())
        packed = gzip.compress(message.SerializeToString())
        kind = "application/x-protobuf"
        answer = export(server, packed, kind, **{"content-encoding": "gzip"})
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == kind
        del server.collector.move
        server.read(num=9)
        assert read_rows(server.lake, "agents") == expected
        page = server.get("/metrics").text
    assert 'replaylake_collector_spans_total{result="accepted"} 15.0' in page
    assert 'replaylake_collector_spans_total{result="other"} 7.0' in page


def _with_base64(body):
    """Return a request as protobuf's own JSON has it, whose ids are base64."""
    text = json.dumps(body)

    def swap(match):
        return f'"{match[1]}": "{base64.b64encode(bytes.fromhex(match[2])).decode()}"'

    return json.loads(re.sub(r'"(traceId|spanId|parentSpanId)": "([0-9a-f]+)"', swap, text))


def test_malformed_spans_are_counted_and_the_others_taken(collector):
    broken = {**span(1, trace="44" * 16), "spanId": "x"}
    body = json.dumps(request(broken, call(2, None, [("user", "a")], "b", "44" * 16))).encode()
    partial = export(collector, body).json()["partialSuccess"]
    assert partial["rejectedSpans"] == "1"
    assert "spanId: found 'x'" in partial["errorMessage"]
    bad_id = _with_base64(request(span(3, trace="44" * 15)))
    message = ParseDict(bad_id, ExportTraceServiceRequest()).SerializeToString()
    answer = export(collector, message, "application/x-protobuf")
    read = ExportTraceServiceResponse.FromString(answer.content)
    assert read.partial_success.rejected_spans == 1
    assert "traceId" in read.partial_success.error_message


@pytest.mark.parametrize(
    ("body", "kind", "headers", "status"),
    [
        (b"{", "application/json", {}, 400),
        (b"[]", "application/json", {}, 400),
        (b'{"resourceSpans": 3}', "application/json", {}, 400),
        (b"\xff\xff", "application/x-protobuf", {}, 400),
        (b"\x0a\x05abc", "application/x-protobuf", {}, 400),
        (b"no gzip", "application/json", {"content-encoding": "gzip"}, 400),
        (gzip.compress(b"{}", mtime=0)[:-4], "application/json", {"content-encoding": "gzip"}, 400),
        (gzip.compress(bytes(9 << 20)), "application/json", {"content-encoding": "gzip"}, 413),
        (b"{}", "application/json", {"content-encoding": "br"}, 415),
        (b"{}", "text/plain", {}, 415),
        (b"{}", "application/json", {}, 200),
        (b"", "application/x-protobuf", {}, 200),
    ],
)
def test_statuses_are_those_of_otlp(collector, body, kind, headers, status):
    answer = export(collector, body, kind, **headers)
    assert answer.status_code == status, answer.text
    if status != 200 and kind == "application/x-protobuf":
        assert answer.headers["content-type"] == kind
        assert answer.content[:1] == b"\x12"  # google.rpc.Status.message
    elif status != 200:
        assert answer.json()["message"]


def test_a_resource_that_is_stored_with_too_many_spans_is_refused(collector):
    def encode(num):
        resource = {"attributes": [attribute("process.command_line", "x" * 200_000)]}
        spans = [span(number + 1, trace="88" * 16) for number in range(num)]
        scope = {"scopeSpans": [{"spans": spans}]}
        return json.dumps({"resourceSpans": [{"resource": resource, **scope}]}).encode()

    def count():
        name = r'replaylake_collector_spans_total\{result="other"\} ([0-9.]+)'
        return float(re.search(name, collector.get("/metrics").text)[1])

    before = count()
    answer = export(collector, encode(500))
    assert answer.status_code == 413
    assert "send smaller batches" in answer.json()["message"]
    assert export(collector, encode(20)).json() == {}
    assert count() - before == 20  # of the first request no span


def test_spans_of_an_older_exporter_and_of_a_malformed_resource():
    older = request(span(1), span(2))
    (group,) = older["resourceSpans"]
    group["instrumentationLibrarySpans"] = group.pop("scopeSpans")
    bodies = [body for _, body in split_request(older)]
    assert [[one.span_id for one in read_spans(body)] for body in bodies] == [
        [f"{1:016x}"],
        [f"{2:016x}"],
    ]
    group["resource"] = {"attributes": 3}
    faults = [*split_request(older)]
    assert len(faults) == 2
    assert all("attributes" in fault for fault in faults)


def test_a_full_disk_is_an_error_that_an_exporter_retries(collector, monkeypatch):
    def refuse(records):
        raise StorageError("no space left")

    monkeypatch.setattr(collector.collector.span_log.journal, "append", refuse)
    body = json.dumps(request(span(1, trace="55" * 16))).encode()
    answer = export(collector, body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    monkeypatch.undo()
    assert export(collector, body).json() == {}  # not taken for one that is stored


ids = st.binary(min_size=8, max_size=8)
values = st.recursive(
    st.one_of(
        st.builds(lambda v: {"stringValue": v}, st.text(max_size=5)),
        st.builds(lambda v: {"intValue": str(v)}, st.integers(-(2**63), 2**63 - 1)),
        st.builds(lambda v: {"doubleValue": v}, st.floats(allow_nan=False, allow_infinity=False)),
        # As JSON of protobuf has them: its library refuses numbers for these.
        st.sampled_from([{"doubleValue": "Infinity"}, {"doubleValue": "-Infinity"}]),
        st.builds(lambda v: {"boolValue": v}, st.booleans()),
        st.just({}),
    ),
    lambda inner: st.one_of(
        st.builds(lambda v: {"arrayValue": {"values": v}}, st.lists(inner, max_size=3)),
        st.builds(
            lambda v: {"kvlistValue": {"values": [{"key": "k", "value": one} for one in v]}},
            st.lists(inner, max_size=3),
        ),
    ),
    max_leaves=6,
)


@hypothesis.given(st.lists(values, max_size=4), ids, st.integers(0, 2**64 - 1), st.text())
@hypothesis.settings(max_examples=60, deadline=None)
def test_protobuf_is_decoded_as_its_own_library_does(attributes, span_id, time, name):
    fields = {
        "spanId": base64.b64encode(span_id).decode(),
        "name": name,
        "startTimeUnixNano": str(time),
        "attributes": [{"key": str(i), "value": v} for i, v in enumerate(attributes)],
        "status": {"code": 2, "message": name},
        "events": [{"name": name, "timeUnixNano": str(time)}],
    }
    hypothesis.assume(not re.search("[\ud800-\udfff]", name))
    message = ParseDict(request(fields), ExportTraceServiceRequest())
    options = {"use_integers_for_enums": True}
    oracle = json.dumps(MessageToDict(message, **options), sort_keys=True)
    decoded = decode_trace_request(message.SerializeToString())
    hexed = json.loads(oracle)
    own = hexed["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    own["spanId"] = base64.b64decode(own["spanId"]).hex()
    assert _drop_defaults(decoded) == _drop_defaults(hexed)


def _drop_defaults(value):
    """Return a message without what is absent on the wire: a name of no letters, a time of 0."""
    if isinstance(value, dict):
        return {k: _drop_defaults(v) for k, v in value.items()}
    return [_drop_defaults(one) for one in value] if isinstance(value, list) else value


@hypothesis.given(st.binary(max_size=60))
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_bytes_are_decoded_or_refused(data):
    with contextlib.suppress(ValueError):
        assert "resourceSpans" in decode_trace_request(data)


@pytest.mark.slow
def test_a_real_sdk_exports_through_a_kill(collectors, tmp_path):
    def make_tracer(url):
        provider = TracerProvider(resource=Resource.create({"service.name": "shop"}))
        exporter = OTLPSpanExporter(f"{url}/v1/traces", compression=None, timeout=10)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        return provider.get_tracer("tests")

    def ask(tracer, text):
        with tracer.start_as_current_span("handle"):
            with tracer.start_as_current_span("chat") as one:
                one.set_attribute("gen_ai.operation.name", "chat")
                asked = [{"role": "user", "parts": [{"type": "text", "content": text}]}]
                one.set_attribute("gen_ai.input.messages", json.dumps(asked))
                told = [{"role": "assistant", "parts": [{"type": "text", "content": "ok"}]}]
                one.set_attribute("gen_ai.output.messages", json.dumps(told))
            return one.get_span_context().span_id

    first = collectors(tmp_path / "lake")
    tracer = make_tracer(first.url)
    for number in range(10):
        span_id = ask(tracer, f"q{number}")
    report = {"span_id": f"{span_id:016x}", "reward": 2}
    assert first.post("/feedback", report).status_code == 202  # before its session is written
    first.kill()
    second = collectors(tmp_path / "lake")
    tracer = make_tracer(second.url)
    for number in range(10, 12):
        ask(tracer, f"q{number}")
    rows = second.read("observation, action, reward", 12, order="timestamp")
    assert [row["observation"] for row in rows] == [f"user: q{n}" for n in range(12)]
    (row,) = second.read("observation", 1, "reward = 2")
    assert row["observation"] == "user: q9"
    assert second.stop() == 0
    assert Path(second.lake_path).exists()


def test_feedback_by_span_trace_and_session(collect_in, tmp_path):
    with collect_in(tmp_path / "lake", settle_s=0.1, idle_s=0.3) as server:
        # Before anything of it is known: by a span that the helper's call is within.
        report = {"span_id": f"{5:016X}", "trace_id": TRACE.upper(), "reward": 5}
        assert server.post("/feedback", report).json()["accepted"]
        wrong = {**report, "trace_id": "77" * 16, "reward": 9}
        assert server.post("/feedback", wrong).status_code == 202
        assert export(server, json.dumps(request(*SPANS)).encode()).status_code == 200
        (row,) = server.read("agent_id, step", 1, "reward = 5")
        assert (row["agent_id"], row["step"]) == ("helper", 0)
        for name, value, reward in (
            ("session_id", "talk", 6),
            ("trace_id", TRACE, 7),
            ("span_id", f"{103:016x}", 8),
        ):
            assert server.post("/feedback", {name: value, "reward": reward}).status_code == 202
        rows = server.read("source_episode_id as s, agent_id, step, reward", 3, "reward > 5")
        assert {tuple(row.values()) for row in rows} == {
            ("talk", "planner", 3, 6),
            (TRACE, "planner", 1, 7),
            ("talk", "planner", 0, 8),
        }
        assert not server.read(where="reward = 9")
        both = server.post("/feedback", {"session_id": "talk", "trace_id": TRACE, "reward": 1})
        assert both.status_code == 422
