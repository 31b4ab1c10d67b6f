"""Rollout language: dialogues of a language model with an environment, recorded as they end.

A rollout is one sample of a task. It is recorded whole, under the producer's name and the numbers
of task and sample; so a run that was killed goes on with the rollouts that are not recorded yet.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    GenerationError,
    ReplayLakeError,
    RolloutError,
    SchemaMismatchError,
)
from replaylake.datastore.interchange.rollout_rows import COMPLETED, FAILED, FILTERED, RolloutFacts
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import MetricsLog
from replaylake.datastore.names import new_ulid
from replaylake.offline.callbacks import Callbacks, RunStart
from replaylake.offline.learning.options import expect
from replaylake.offline.running.training.interruption import Interruption, RunInterrupted
from replaylake.offline.running.training.run_record import RunRecord
from replaylake.online.generating.chat import (
    Chat,
    LanguageModel,
    Outcome,
    describe_failure,
    read_outcome,
)
from replaylake.online.generating.environments import (
    EnvironmentFunction,
    LanguageEnvironment,
    Task,
    find_task_id,
    load_environment,
)
from replaylake.online.recorders.language_recorder import LanguageRecorder, record_language

KIND: Final = "rollout language"
_PROGRESS_INTERVAL_S: Final = 0.25
_POLL_S: Final = 0.1


@dataclass(frozen=True)
class LanguageRolloutConfig:
    """Options of rollouts of a language model; lake, dataset and model are arguments.

    env: `module:function` of a function(task, chat) that returns the reward, the function
    itself, a Gymnasium environment of texts or `verifiers:NAME`
    (online/generating/environments.py). env_args: further arguments of it. tasks: a file of
    JSON lines, `module:name`, or a list of objects; None: those of the environment. num_tasks:
    the first ones. samples: rollouts of each task, which are a group. concurrency: rollouts at
    a time. seed: of the samples; None: that of the producer's earlier run, else a new one.
    sampling: parameters of each call, such as temperature and max_tokens. producer: the name
    that the rollouts are recorded under; a run under the same name goes on with it. max_turns:
    calls of a rollout. max_failures: rollouts in a row that may fail before the run ends.
    pass_reward: least reward of a rollout that counts as passed, in the metrics. log_rollouts:
    rollouts between two points of the metrics.
    """

    env: str | EnvironmentFunction = ""
    env_args: Mapping[str, Any] = field(default_factory=dict)
    tasks: str | Sequence[Task] | None = None
    num_tasks: int | None = None
    samples: int = 1
    concurrency: int = 16
    seed: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    producer: str | None = None
    max_turns: int = 100
    max_failures: int = 20
    pass_reward: float = 1.0
    log_rollouts: int = 64

    def __post_init__(self) -> None:
        for name in ("samples", "concurrency", "max_turns", "max_failures", "log_rollouts"):
            value = getattr(self, name)
            expect(value >= 1, f"language rollout: {name}", value, "1 or more")
        expect(
            self.num_tasks is None or self.num_tasks >= 1,
            "language rollout: num_tasks",
            self.num_tasks,
            "1 or more",
        )
        is_seed = self.seed is None or 0 <= self.seed < 2**63
        expect(is_seed, "language rollout: seed", self.seed, "0 to 2^63 - 1")
        is_given = callable(self.env) or (isinstance(self.env, str) and bool(self.env))
        expect(is_given, "language rollout: env", self.env, "an environment")


@dataclass(frozen=True)
class LanguageRolloutProgress:
    """Rollouts that have ended, with those recorded before, of those requested.

    num_failed: of this run. mean_reward: None before the first one. tokens_per_s: generated.
    """

    num_rollouts: int
    rollouts: int
    num_failed: int
    mean_reward: float | None
    tokens_per_s: float


@dataclass(frozen=True)
class LanguageRolloutReceipt:
    """What a run recorded; version is the dataset's after its last commit.

    num_rollouts: of this run, num_recorded_before: those that were there. mean_reward and pass_rate
    are of the completed rollouts of this run, None without any; group_pass_rate: share of the tasks
    with a rollout that passed.
    """

    run_id: str
    dataset: str
    version: int
    env: str
    model: Mapping[str, Any]
    producer: str
    seed: int
    num_tasks: int
    num_rollouts: int
    num_recorded_before: int
    num_failed: int
    num_filtered: int
    num_truncated: int
    num_turns: int
    num_prompt_tokens: int
    num_completion_tokens: int
    mean_reward: float | None
    pass_rate: float | None
    group_pass_rate: float | None
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.num_completion_tokens / self.wall_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


def rollout_language(
    lake: Lake,
    dataset: str,
    model: LanguageModel,
    config: LanguageRolloutConfig,
    *,
    callbacks: Callbacks | None = None,
) -> LanguageRolloutReceipt:
    """Let a language model act in an environment, and record each rollout when it has ended.

    A rollout whose environment raises is recorded as failed, with the reason. A rollout that was
    recorded before under the same producer is not made again, so a run that was killed or
    interrupted goes on where it is called again with the same producer.

    Args:
        lake: the lake of the dataset and of the run's record.
        dataset: of language agents; created if it does not exist.
        model: `LocalModel`, `EngineModel` or another `LanguageModel`; it is closed at the end.
        config: environment, tasks, samples.
        callbacks: on_start (RunStart), on_progress (LanguageRolloutProgress), on_metrics.

    Raises: NotFoundError, SourceInvalidError, ConfigInvalidError, SpaceUnsupportedError,
    SchemaMismatchError before anything is recorded; RolloutError if `max_failures` rollouts fail in
    a row or the model is out of reach; StorageError; RunInterrupted. What had ended is recorded in
    each case.
    """
    callbacks = callbacks or Callbacks()
    earlier = _find_run(lake, dataset, config.producer)
    if config.seed is None:
        seed = secrets.randbits(30) if earlier is None else earlier["seed"]
        config = replace(config, seed=seed)
    assert config.seed is not None
    with (
        closing(model),
        ThreadPoolExecutor(config.concurrency, thread_name_prefix="environment") as executor,
    ):
        environment = load_environment(
            config.env,
            env_args=config.env_args,
            tasks=config.tasks,
            num_tasks=config.num_tasks,
            seed=config.seed,
            executor=executor,
        )
        if not lake.registry.exists():
            lake.registry.create()
        request = _describe_request(environment, model, config)
        record = _make_record(lake, dataset, request, config, earlier)
        facts: RolloutFacts = {"run_id": record.run_id, "source_framework": "replaylake"}
        with (
            RunLease(lake.storage, record.run_id),
            record_language(lake, dataset, producer=record.body["producer"], **facts) as recorder,
        ):
            run = _Run(environment, model, config, recorder, record.run_id, lake, callbacks)
            if earlier is None:
                record.record_start()
            else:
                record.record_resume(run.num_before)
                record.add_fields(config=request)
            with record.record_errors():
                receipt = run.execute(dataset)
            finished = record.to_finished({"update": run.num_ended, "result": receipt.to_json()})
            lake.registry.record_run(record.run_id, finished, replaces=record.body)
    return receipt


def _describe_request(
    environment: LanguageEnvironment, model: LanguageModel, config: LanguageRolloutConfig
) -> dict[str, Any]:
    """Return what determines the rollouts, as JSON has it."""
    names = [one.name for one in fields(config) if one.name not in ("env", "tasks", "producer")]
    own = {name: getattr(config, name) for name in names}
    request = {
        "env": environment.name,
        "tasks": config.tasks if isinstance(config.tasks, str) else None,
        "tasks_sha256": environment.digest,
        "model": model.describe(),
        **own,
    }
    found: dict[str, Any] = json.loads(json.dumps(request, default=str))
    return found


def _find_run(lake: Lake, dataset: str, producer: str | None) -> Mapping[str, Any] | None:
    """Return the record of the producer's run, if there is one."""
    if producer is None or not lake.registry.exists():
        return None
    for run in reversed(lake.registry.runs()):
        if (run.get("kind"), run.get("dataset"), run.get("producer")) == (KIND, dataset, producer):
            return run
    return None


def _make_record(
    lake: Lake,
    dataset: str,
    request: Mapping[str, Any],
    config: LanguageRolloutConfig,
    earlier: Mapping[str, Any] | None,
) -> RunRecord:
    """Return the record of the run to go on with, or of a new one.

    Raises: ConfigInvalidError if the earlier run's rollouts are of another kind.
    """
    if earlier is not None:
        _check_same(earlier["config"], request, earlier["producer"])
        return RunRecord(lake.registry, earlier["run_id"], earlier, kind=KIND)
    run_id = new_ulid()
    body = {
        "dataset": dataset,
        "producer": config.producer or f"rollout/{run_id}",
        "seed": config.seed,
        "config": dict(request),
    }
    return RunRecord(lake.registry, run_id, body, kind=KIND)


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], producer: str) -> None:
    for name in ("env", "env_args", "tasks_sha256", "seed", "sampling", "model", "max_turns"):
        if before.get(name) != now[name]:
            raise ConfigInvalidError(
                f"producer: found {name} {now[name]!r:.200} for {producer}, whose rollouts were "
                f"made with {before.get(name)!r:.200}, expected the same, or another producer.",
                parameter="producer",
            )


@dataclass
class _Window:
    """Sums over the rollouts since the last point of the metrics, or over all of a run."""

    begun_s: float
    num_rollouts: int = 0
    num_failed: int = 0
    num_filtered: int = 0
    num_truncated: int = 0
    num_turns: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    # By group: rewards of its rollouts, in the order in which they ended.
    groups: dict[int, list[float]] = field(default_factory=dict)

    def metrics(self, pass_reward: float) -> dict[str, float]:
        """Return the values by name; those of rewards only where one is known."""
        num = self.num_rollouts
        seconds = max(time.perf_counter() - self.begun_s, 1e-9)
        values = {
            "tokens_per_s": self.num_completion_tokens / seconds,
            "prompt_tokens": self.num_prompt_tokens / num,
            "completion_tokens": self.num_completion_tokens / num,
            "turns": self.num_turns / num,
            "failed": self.num_failed / num,
            "filtered": self.num_filtered / num,
            "truncated": self.num_truncated / num,
        }
        if self.rewards:
            values["reward"] = math.fsum(self.rewards) / len(self.rewards)
            values["pass_rate"] = _share(one >= pass_reward for one in self.rewards)
            values["group_pass_rate"] = _share(
                max(one) >= pass_reward for one in self.groups.values()
            )
            # Groups of equal rewards have advantages of 0.
            values["mixed_groups"] = _share(min(one) < max(one) for one in self.groups.values())
        return values


def _share(flags: Iterator[bool]) -> float:
    found = list(flags)
    return sum(found) / len(found)


class _Run:
    """One execution: the rollouts that are not recorded yet."""

    def __init__(
        self,
        environment: LanguageEnvironment,
        model: LanguageModel,
        config: LanguageRolloutConfig,
        recorder: LanguageRecorder,
        run_id: str,
        lake: Lake,
        callbacks: Callbacks,
    ) -> None:
        self._environment, self._model, self._config = environment, model, config
        self._recorder, self._run_id, self._callbacks = recorder, run_id, callbacks
        self._metrics = MetricsLog(lake.storage, run_id)
        assert config.seed is not None
        self._seed = config.seed
        pairs = [
            (task, sample)
            for task in range(len(environment.tasks))
            for sample in range(config.samples)
        ]
        self._left = [one for one in pairs if not recorder.is_recorded(_name(*one))]
        self._total = len(pairs)
        self.num_before = len(pairs) - len(self._left)
        self._num_failed_in_row = 0
        self._last_failure = ""
        self._all = self._window = _Window(time.perf_counter())
        self._reported_s = 0.0
        self._interruption = Interruption()

    @property
    def num_ended(self) -> int:
        return self.num_before + self._all.num_rollouts

    def execute(self, dataset: str) -> LanguageRolloutReceipt:
        """Make the rollouts that are left, and commit. Raises: as rollout_language."""
        begun_s = time.perf_counter()
        self._all, self._window = _Window(begun_s), _Window(begun_s)
        if self._callbacks.on_start is not None:
            start = RunStart(self._run_id, self.num_before, self.num_before > 0, ())
            self._callbacks.on_start(start)
        try:
            with self._interruption.handle_signals(), closing(self._metrics):
                _run_event_loop(self._make_all)
                self._log_metrics()
        except KeyboardInterrupt as error:
            raise RunInterrupted(self._run_id, self.num_ended) from error
        if self._interruption.is_requested and self.num_ended < self._total:
            raise RunInterrupted(self._run_id, self.num_ended)
        self._report(is_last=True)
        version = self._recorder.flush()
        whole = self._all
        values = whole.metrics(self._config.pass_reward) if whole.num_rollouts else {}
        return LanguageRolloutReceipt(
            run_id=self._run_id,
            dataset=dataset,
            version=version,
            env=self._environment.name,
            model=self._model.describe(),
            producer=self._recorder.producer,
            seed=self._seed,
            num_tasks=len(self._environment.tasks),
            num_rollouts=whole.num_rollouts,
            num_recorded_before=self.num_before,
            num_failed=whole.num_failed,
            num_filtered=whole.num_filtered,
            num_truncated=whole.num_truncated,
            num_turns=whole.num_turns,
            num_prompt_tokens=whole.num_prompt_tokens,
            num_completion_tokens=whole.num_completion_tokens,
            mean_reward=values.get("reward"),
            pass_rate=values.get("pass_rate"),
            group_pass_rate=values.get("group_pass_rate"),
            wall_s=time.perf_counter() - begun_s,
        )

    async def _make_all(self) -> None:
        # The model's connections are those of this event loop.
        with closing(self._model):
            async with self._environment.serve():
                await self._make_left()

    async def _make_left(self) -> None:
        left = iter(self._left)

        async def work() -> None:
            for task, sample in left:
                await self._make(task, sample)

        workers = [asyncio.create_task(work()) for _ in range(self._config.concurrency)]
        watch = asyncio.create_task(self._watch(workers))
        try:
            await asyncio.gather(*workers)
        except asyncio.CancelledError:
            if not self._interruption.is_requested:
                raise
        finally:
            for one in (watch, *workers):
                one.cancel()
            await asyncio.gather(watch, *workers, return_exceptions=True)

    async def _watch(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the rollouts under way once an interruption is requested."""
        while not (self._interruption.is_requested or self._callbacks.is_end_requested):
            await asyncio.sleep(_POLL_S)
        self._interruption.is_requested = True
        for one in workers:
            one.cancel()

    async def _make(self, task_number: int, sample: int) -> None:
        """Make one rollout and record it. Raises: RolloutError, StorageError."""
        config = self._config
        task = self._environment.tasks[task_number]
        seed = [self._seed, task_number, sample]
        chat = Chat(self._model, config.sampling, seed, config.max_turns)
        try:
            outcome = read_outcome(await self._environment.play(task, chat))
        except Exception as error:  # whatever the environment raises is a failed rollout
            if chat.failure is not None:
                raise chat.failure from error
            if isinstance(error, ReplayLakeError) and not isinstance(
                error, ConfigInvalidError | EpisodeInvalidError | GenerationError
            ):
                raise
            outcome = Outcome(status=FAILED, status_reason=describe_failure(error))
        if chat.failure is not None:  # the environment took it for a failed call
            raise chat.failure
        if outcome.status == COMPLETED and not chat.num_turns:
            outcome = Outcome(status=FAILED, status_reason="the environment did not call the model")
        self._record(task, task_number, sample, chat, outcome)
        self._count(task_number, chat, outcome)

    def _record(
        self, task: Task, task_number: int, sample: int, chat: Chat, outcome: Outcome
    ) -> None:
        task_id = find_task_id(task, task_number)
        facts: RolloutFacts = {
            "group_id": f"{self._recorder.producer}/{task_id}",
            "metadata": {**outcome.metadata, "task_id": task_id, "sample": sample},
        }
        name = _name(task_number, sample)
        try:
            chat.record(self._recorder, name, outcome, facts)
        except (EpisodeInvalidError, SchemaMismatchError) as error:
            raise RolloutError(
                f"{error} The rollout of task {task_id} cannot be recorded: check what the "
                "environment or the model returned."
            ) from error

    def _count(self, group: int, chat: Chat, outcome: Outcome) -> None:
        is_failed = outcome.status == FAILED
        reward = chat.total_reward
        if outcome.reward is not None:
            reward = outcome.reward + (reward or 0.0)
        read, generated = chat.count_tokens()
        for one in (self._all, self._window):
            one.num_rollouts += 1
            one.num_failed += is_failed
            one.num_filtered += outcome.status == FILTERED
            one.num_truncated += outcome.truncated or chat.is_cut
            one.num_turns += chat.num_turns
            one.num_prompt_tokens += read
            one.num_completion_tokens += generated
            if reward is not None and outcome.status == COMPLETED:
                one.rewards.append(reward)
                one.groups.setdefault(group, []).append(reward)
        if self._window.num_rollouts >= self._config.log_rollouts:
            self._log_metrics()
        self._report()
        self._num_failed_in_row = self._num_failed_in_row + 1 if is_failed else 0
        if self._num_failed_in_row >= self._config.max_failures:
            raise RolloutError(
                f"environment {self._environment.name}: found {self._num_failed_in_row} rollouts "
                f"in a row that failed, the last one with {outcome.status_reason}, expected fewer "
                "than max_failures. They are recorded as failed. Fix the environment, then start "
                "with another producer."
            )

    def _log_metrics(self) -> None:
        if not self._window.num_rollouts:
            return
        values = self._window.metrics(self._config.pass_reward)
        self._metrics.add(self.num_ended, values, time.time())
        if self._callbacks.on_metrics is not None:
            self._callbacks.on_metrics(self.num_ended, values)
        self._window = _Window(time.perf_counter())

    def _report(self, *, is_last: bool = False) -> None:
        now = time.perf_counter()
        if self._callbacks.on_progress is None or (
            not is_last and now - self._reported_s < _PROGRESS_INTERVAL_S
        ):
            return
        self._reported_s, whole = now, self._all
        rewards = whole.rewards
        self._callbacks.on_progress(
            LanguageRolloutProgress(
                self.num_ended,
                self._total,
                whole.num_failed,
                math.fsum(rewards) / len(rewards) if rewards else None,
                whole.num_completion_tokens / max(now - whole.begun_s, 1e-9),
            )
        )


def _name(task: int, sample: int) -> str:
    return f"{task}-{sample}"


def _run_event_loop(main: Callable[[], Any]) -> None:
    """Run a coroutine function to its end, also from within an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(main())
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, main()).result()
