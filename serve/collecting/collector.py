"""The server of `serve` without a policy: episodes, dialogues and feedback into one dataset.

    POST /episodes   episodes that were acted elsewhere: steps, decisions, dialogues
    POST /v1/traces  spans of OpenTelemetry, of which the calls of models become steps
    POST /watermark  the next step of episodes, for a producer that continues
    POST /feedback   rewards and ends of what was sent, at once or later
    GET  /livez /readyz /metrics

One process, from its listening socket to its end. What is received is written to a journal before
it is acknowledged, and moved into the dataset within seconds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool

from replaylake.datastore.episodes.compatibility import is_compatible
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import (
    ConfigInvalidError,
    ReplayLakeError,
    SchemaMismatchError,
    StorageError,
)
from replaylake.datastore.feedback.call_outcomes import find_corrected
from replaylake.datastore.feedback.decisions import DEFAULT_WINDOW_S
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.received_steps import (
    EpisodePosition,
    ReceivedResult,
    find_positions,
    move_received,
)
from replaylake.datastore.feedback.recorded_calls import ensure_calls_dataset
from replaylake.datastore.interchange.formats.generations.rows import EXTRAS
from replaylake.datastore.interchange.ingest.received_spans import (
    AssemblyResult,
    SessionAssembler,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.storage.locations import check_shareable
from replaylake.serve.api.bodies import check_fields, check_name, read_fields
from replaylake.serve.api.episodes import EpisodesEndpoint
from replaylake.serve.api.values import invalid_value_error
from replaylake.serve.collecting.spans import RESULTS, SPANS_FORM, SpanLog, SpansEndpoint
from replaylake.serve.http.connections import NUM_REFUSED, RECEIVED, limit_connections
from replaylake.serve.http.listener import open_server, run_app, shorten_thread_turns
from replaylake.serve.http.request_handler import HandlerState
from replaylake.serve.http.routed_app import RoutedApp
from replaylake.serve.messages import (
    RETRY_LATER,
    Endpoint,
    Request,
    RequestRefusedError,
    Response,
    json_response,
)
from replaylake.serve.monitoring.metrics import CONTENT_TYPE, Metrics
from replaylake.serve.monitoring.telemetry import open_telemetry
from replaylake.serve.processes.launch import STOP_TIMEOUT_S
from replaylake.serve.recording.decision_log import Clock
from replaylake.serve.recording.outcome_log import OutcomeLog
from replaylake.serve.recording.received_log import ReceivedLog
from replaylake.serve.safety.access_log import AccessLog
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.limits import Limits, Safety, check_exposure
from replaylake.serve.safety.tokens import Tokens

FEEDBACK_NAMES: Final = ("episode_id", "session_id", "trace_id", "span_id")
DEFAULT_SETTLE_S: Final = 2.0
DEFAULT_IDLE_S: Final = 300.0
_ROUND_S: Final = 1.0
# A round scans the ids of all that was received: at most a quarter of the time.
_PAUSE_FACTOR: Final = 3.0
_MAX_PAUSE_S: Final = 10.0
# Episodes in one watermark request.
_MAX_POSITIONS: Final = 1000
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectorConfig:
    """One collector.

    lake (a folder or URL) and dataset: where what is received goes. Both are created where they are
    absent, the dataset then for dialogues. window_s: how long steps after a gap wait for those that
    are missing. settle_s: how long no span has to come for a trace whose root ended, until its
    session is written; idle_s: for a trace whose root did not come.
    """

    lake: str
    dataset: str
    host: str = "127.0.0.1"
    port: int = 3000
    window_s: float = DEFAULT_WINDOW_S
    settle_s: float = DEFAULT_SETTLE_S
    idle_s: float = DEFAULT_IDLE_S
    journal: JournalConfig = field(default_factory=JournalConfig)
    safety: Safety = field(default_factory=Safety)

    def __post_init__(self) -> None:
        if not 0 <= self.settle_s <= self.idle_s < float("inf"):
            raise ConfigInvalidError(
                f"collect: idle_s: found {self.idle_s:g} s beside settle_s {self.settle_s:g} s, "
                "expected a number of seconds that is not below it.",
                parameter="idle_s",
            )

    @property
    def url(self) -> str:
        """Where it answers, once `port` is the real one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def allowed_hosts(self) -> AllowedHosts:
        """Host names to answer to: loopback, the listening address, and those of `safety`."""
        own = self.host.partition("%")[0]
        return AllowedHosts((*([own] if own else []), *self.safety.allowed_hosts))


class Collector:
    """What a collector holds while it runs."""

    def __init__(self, config: CollectorConfig) -> None:
        """Create what is absent, commit what killed collectors left, open the journals.

        Raises: SchemaMismatchError for a dataset that served decisions are joined into;
        ConfigInvalidError, StorageError.
        """
        self.config = config
        self.worker = secrets.token_hex(8)
        self.limits: Limits = config.safety.limits
        self.tokens: Tokens = config.safety.tokens(config.dataset)
        self.hosts: AllowedHosts = config.allowed_hosts
        target = config.safety.access_log
        self.access_log: AccessLog | None = None if target is None else AccessLog(target)
        self.dataset: Dataset = open_lake(config.lake, create=True).dataset(config.dataset)
        if not self.dataset.exists():
            ensure_calls_dataset(self.dataset, EXTRAS)
        if self.dataset.decisions.exists():
            raise SchemaMismatchError(
                f"dataset {config.dataset!r}: found decisions of a served policy, whose rewards "
                "the feedback join adds, expected a dataset without. Collect into another one, or "
                "send the episodes to the server of that policy."
            )
        self._received = ReceivedLog(self.dataset, self.worker, config.journal)
        spec = self.dataset.spec
        self.takes_spans = (
            spec.rewards_optional
            and spec.unique is None
            and is_compatible(spec.observation_space, Text())
            and is_compatible(spec.action_space, Text())
        )
        self.span_log = SpanLog(self.dataset, secrets.token_hex(8), config.journal)
        self._assembler = SessionAssembler(
            self.dataset,
            settle_s=config.settle_s,
            idle_s=config.idle_s,
            find_corrected=partial(find_corrected, self.dataset),
        )
        self.last_assembly = AssemblyResult()
        self.num_sessions = 0
        # Acknowledged and not in the dataset: steps, and records of journals.
        self.num_conflicting = self.num_set_aside = 0
        self.num_damaged = self._received.num_damaged
        self.clock = Clock()
        self.outcomes: OutcomeLog | None = None
        self._moved_version = self._read_version = -1
        self._has_waiting = False

    @property
    def journals(self) -> dict[str, Journal]:
        """What is being written to, by the table into which it is committed."""
        journals = {"received": self._received.journal, "spans": self.span_log.journal}
        return journals if self.outcomes is None else {**journals, "rewards": self.outcomes.journal}

    @property
    def failure(self) -> str | None:
        """Why nothing more can be written, or None."""
        return next((one.failure for one in self.journals.values() if one.failure), None)

    @property
    def spaces_hint(self) -> str:
        """A sentence on where a client finds the spaces of the dataset."""
        return f"`replaylake show {self.dataset.name}` has the spaces."

    def find_dataset(self) -> Dataset:
        """Return the dataset that is collected into."""
        return self.dataset

    def open_received(self) -> ReceivedLog:
        """Return the journal of received steps."""
        return self._received

    def find_positions(self, episode_ids: Sequence[str]) -> list[EpisodePosition]:
        """Return the positions of episodes, including everything acknowledged so far.

        Raises: ReplayLakeError if acknowledged steps cannot be committed. Cost: a commit, and that
        of `find_positions`.
        """
        self._received.journal.flush()
        return find_positions(self.dataset, episode_ids)

    def move(self) -> bool:
        """Move what was received into the dataset; return whether steps were added.

        Raises: ReplayLakeError. Cost: as `move_received` and `SessionAssembler.run`; nothing where
        nothing new can come of it.
        """
        has_moved = self._move_steps()
        return self._assemble() or has_moved

    def _assemble(self) -> bool:
        version = self.dataset.spans.log.newest().version
        if version == self._read_version and not self.last_assembly.num_waiting:
            return False
        done = self._assembler.run(self.clock.now())
        self._read_version, self.last_assembly = version, done
        self.num_sessions += done.num_sessions
        return done.num_steps > 0

    def _move_steps(self) -> bool:
        version = self.dataset.received.log.newest().version
        if version == self._moved_version and not self._has_waiting:
            return False
        done = move_received(self.dataset, now_s=time.time(), window_s=self.config.window_s)
        self._moved_version = version
        self._count_lost(done)
        # Of what waits for missing steps it is not known for how long.
        self._has_waiting = done.waiting > 0
        return done.steps > 0

    def _count_lost(self, done: ReceivedResult) -> None:
        """Count, and log once, acknowledged steps that are not in the dataset."""
        if done.conflicting > self.num_conflicting:
            _logger.warning(
                "%d received steps contradict steps of their episodes that came earlier, which are "
                "kept; send what differs under another episode_id",
                done.conflicting,
            )
        if done.quarantined:
            _logger.warning(
                "%d received steps are such as the dataset cannot hold; they are in its "
                "quarantine, with the reasons",
                done.quarantined,
            )
        if done.damaged:
            _logger.error(
                "%d records of a killed server's journal cannot be read; their file is kept below "
                "%s/_received/_journal",
                done.damaged,
                self.dataset.name,
            )
        self.num_conflicting, self.num_set_aside = done.conflicting, done.set_aside
        self.num_damaged += done.damaged

    def close(self) -> None:
        """Commit everything, or log what the next start has to commit."""
        if self.access_log is not None:
            self.access_log.close()
        try:
            self._received.close()
            self.span_log.journal.close()
            self.move()
            if self.outcomes is not None:
                self.outcomes.close()
        except ReplayLakeError as error:
            _logger.error("not committed at the end, the next start does it: %s", error)


class _Watermarks:
    """Positions of episodes, of which one commit and one scan is made at a time.

    Requests that come meanwhile share the next: producers that poll neither hold the threads that
    commits need, nor make a shard each.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector, self._turn = collector, asyncio.Lock()
        self._names: dict[str, None] = {}
        self._next: asyncio.Task[dict[str, list[EpisodePosition]]] | None = None

    async def find(self, names: Sequence[str]) -> list[EpisodePosition]:
        """Return the positions as of now or later. Raises: ReplayLakeError."""
        self._names |= dict.fromkeys(names)
        if self._next is None:
            self._next = asyncio.create_task(self._run())
            # Its error is that of those who wait, of whom there may be none by then.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        # One that is cancelled leaves the others theirs.
        found = await asyncio.shield(self._next)
        return [position for name in dict.fromkeys(names) for position in found[name]]

    async def _run(self) -> dict[str, list[EpisodePosition]]:
        async with self._turn:
            names, self._names, self._next = list(self._names), {}, None
            positions = await run_in_threadpool(self._collector.find_positions, names)
        found: dict[str, list[EpisodePosition]] = {name: [] for name in names}
        for position in positions:
            found[position.episode_id].append(position)
        return found


def create_collector(
    collector: Collector, on_ready: Callable[[], None] = lambda: None
) -> Starlette:
    """Return the ASGI app, which closes the collector when it ends."""
    metrics = Metrics()
    spans = _SpanMetrics(collector)
    state = HandlerState(lambda: collector, metrics)
    watermarks = _Watermarks(collector)

    async def accept_feedback(request: Request) -> Response:
        assert collector.outcomes is not None, "requests come after the start"
        return json_response(collector.outcomes.accept(read_fields(request)), 202)

    async def find_watermark(request: Request) -> Response:
        fields = read_fields(request)
        check_fields(fields, ("episode_ids",))
        names = fields.get("episode_ids")
        if not isinstance(names, list) or not 0 < len(names) <= _MAX_POSITIONS:
            raise invalid_value_error(
                "episode_ids", names, f"a list of 1 to {_MAX_POSITIONS:,} strings"
            )
        for place, name in enumerate(names):
            check_name("" if name is None else name, f"episode_ids[{place}]")
        try:
            found = await watermarks.find(names)
        except StorageError as error:
            message = f"what was received cannot be committed now: {error}"
            raise RequestRefusedError(503, "log", message, headers=RETRY_LATER) from error
        return json_response({"episodes": list(map(asdict, found))})

    async def refuse_policy(request: Request) -> Response:
        message = (
            "no policy is served here: this server only collects, into the dataset "
            f"{collector.dataset.name}. Send observations to a server that serves a policy"
        )
        raise RequestRefusedError(409, "path", message)

    async def livez(request: Request) -> Response:
        return json_response({"alive": True})

    async def readyz(request: Request) -> Response:
        if collector.failure is not None:
            return json_response({"ready": False, "degraded": []}, 503)
        late = [name for name, one in collector.journals.items() if one.commit_failure]
        return json_response({"ready": True, "degraded": ["commit"] if late else []})

    async def metrics_page(request: Request) -> Response:
        return Response(200, metrics.render() + spans.render(), CONTENT_TYPE)

    endpoints: dict[str, tuple[str, Endpoint]] = {
        "/episodes": ("POST", EpisodesEndpoint(lambda: collector, metrics, collector.clock)),
        "/feedback": ("POST", accept_feedback),
        "/v1/traces": (
            "POST",
            SpansEndpoint(
                collector.span_log,
                collector.limits,
                collector.takes_spans,
                spans.count,
                collector.clock,
            ),
        ),
        "/watermark": ("POST", find_watermark),
        "/act": ("POST", refuse_policy),
        "/policy": ("GET", refuse_policy),
        "/livez": ("GET", livez),
        "/readyz": ("GET", readyz),
        "/metrics": ("GET", metrics_page),
    }

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        metrics.count_start()
        metrics.watch_worker(
            collector,
            lambda: state.num_active,
            NUM_REFUSED,
            lambda: (RECEIVED.seconds, RECEIVED.num, RECEIVED.num_bytes),
        )
        outcomes = collector.outcomes = OutcomeLog(
            collector.dataset,
            secrets.token_hex(8),
            collector.clock,
            names=FEEDBACK_NAMES,
            other_clocks=True,
            flush=lambda: None,
            config=collector.config.journal,
        )
        outcomes.start()
        tasks = [
            asyncio.create_task(metrics.keep_fresh()),
            asyncio.create_task(_move_loop(collector, outcomes)),
        ]
        state.telemetry = await run_in_threadpool(
            open_telemetry,
            "replaylake-collector",
            collector.worker,
            lambda: [*metrics.collect_own(), *spans.collect()],
            os.environ,
            {"replaylake.dataset": collector.dataset.name},
        )
        gc.collect()
        gc.freeze()
        on_ready()
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await outcomes.stop()
            await run_in_threadpool(collector.close)
            if state.telemetry is not None:
                await run_in_threadpool(state.telemetry.close)

    return RoutedApp(endpoints, state, {"/v1/traces": SPANS_FORM}, lifespan=lifespan)


class _SpanMetrics:
    """Numbers of spans and sessions, for Prometheus."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._spans = Counter(
            "replaylake_collector_spans",
            "Spans received, by result: accepted, other (of no model, agent or tool), repeated, "
            "rejected.",
            ("result",),
            registry=self._registry,
        )
        for result in RESULTS:
            self._spans.labels(result)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "sessions": ("Sessions written, or written again.", lambda: collector.num_sessions),
            "waiting_traces": (
                "Traces that wait for further spans.",
                lambda: collector.last_assembly.num_waiting,
            ),
            "traces_without_calls": (
                "Traces without a call of a model, which become no session.",
                lambda: collector.last_assembly.num_without_calls,
            ),
            "conflicting_steps": (
                "Received steps that contradict earlier ones, which are kept.",
                lambda: collector.num_conflicting,
            ),
            "unwritable_steps": (
                "Received steps that the dataset cannot hold; they are in its quarantine.",
                lambda: collector.num_set_aside,
            ),
            "damaged_records": (
                "Records of killed servers' journals that cannot be read.",
                lambda: collector.num_damaged,
            ),
            "unmatched_reports": (
                "Reports whose step or episode is not in the dataset, or not yet.",
                lambda: collector.outcomes.last_result.num_unmatched if collector.outcomes else 0,
            ),
        }
        for name, (text, read) in gauges.items():
            gauge = Gauge(f"replaylake_collector_{name}", text, registry=self._registry)
            gauge.set_function(read)

    def count(self, result: str, num: int) -> None:
        """Count spans, by what became of them."""
        self._spans.labels(result).inc(num)

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._registry.collect()

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self._registry)


async def _move_loop(collector: Collector, outcomes: OutcomeLog) -> None:
    pause_s = _ROUND_S
    while True:
        await asyncio.sleep(pause_s)
        begun_s = time.monotonic()
        try:
            if await run_in_threadpool(collector.move):
                outcomes.apply_soon()
        except ReplayLakeError as error:
            _logger.error("not moved into the dataset, will retry: %s", error)
        except Exception:  # a fault must not end what nobody watches
            _logger.exception("not moved into the dataset, will retry")
        pause_s = _PAUSE_FACTOR * (time.monotonic() - begun_s)
        pause_s = min(max(pause_s, _ROUND_S), _MAX_PAUSE_S)


def run_collector(
    config: CollectorConfig, on_ready: Callable[[CollectorConfig], None] | None = None
) -> int:
    """Collect until SIGINT or SIGTERM, then return 0.

    One line on stderr says when it is ready, and where; `on_ready` is then called with the config
    and the port that it listens on. Raises: ServeError if the port is in use; ConfigInvalidError if
    other machines could reach it without a token; whatever `Collector` raises.
    """
    check_shareable(config.lake, "serve")
    check = partial(check_exposure, safety=config.safety)
    with open_server("collector", config, on_ready, check_exposure=check) as server:
        config = server.config
        # Before uvicorn starts: it would say what is wrong in a traceback.
        collector = Collector(config)
        shorten_thread_turns()
        limit_connections(config.safety.connection_limits)

        def announce() -> None:
            server.announce(
                f"collecting into {config.dataset} on {config.url}, "
                f"ready after {server.elapsed_s:.1f} s"
            )

        app = create_collector(collector, announce)
        run_app(app, server.listener, lifespan="on", drain_s=STOP_TIMEOUT_S)
    return 0
