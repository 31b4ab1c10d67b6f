"""Train language online: a generator process and a trainer that are joined by the lake.

Round k has a batch of rollouts, recorded under the producer `<run>/<k>`, and a version of the model
that is trained on it, a directory `version-<k + 1>` in the output. The generator (a child process)
takes the newest version that is complete, if it is at most `max_staleness` versions behind; the
trainer waits for the batch. Both find in the lake and in the output what is done, so that either
may be killed at any point: the trainer starts a dead generator again, and a run is resumed.

    python -m replaylake.online.train_language_online LAKE RUN PARENT     # the generator
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    ReplayLakeError,
    RolloutError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import MetricsLog
from replaylake.datastore.names import new_ulid
from replaylake.offline.callbacks import Callbacks, RunStart
from replaylake.offline.language.local_model import LocalModel
from replaylake.offline.language.pretrained import check_model_folder
from replaylake.offline.language.token_learner import METHODS
from replaylake.offline.learning.options import expect, from_options
from replaylake.offline.running.train_language import (
    KIND as TRAIN_KIND,
)
from replaylake.offline.running.train_language import (
    LanguageConfig,
    LanguageResult,
    language_config,
    resume_language,
    train_language,
)
from replaylake.offline.running.training.interruption import RunInterrupted, interrupt_on_sigterm
from replaylake.offline.running.training.run_record import RunRecord, find_run
from replaylake.online.generating.environments import Task, find_task_id, load_environment
from replaylake.online.rollout_language import KIND as ROLLOUT_KIND
from replaylake.online.rollout_language import LanguageRolloutConfig, rollout_language

KIND: Final = "train language online"
_POLL_S: Final = 0.1
# Deaths in a row, without a rollout between them, after which the generator is not started again.
_MAX_DEATHS: Final = 3
_STDERR_CHARS: Final = 600
_OWN: Final = ("rounds", "tasks_per_round", "max_staleness")
# Of a method that compares the samples of a task; with 1 there is nothing to compare.
_GROUP_SAMPLES: Final = 8


@dataclass(frozen=True)
class OnlineLanguageConfig:
    """Options of an online run of a language model.

    rollout: environment and samples of each batch; its env is a text, and its producer is that of
    the run. training: initial model, output, method and updates of each round; its conditions and
    staleness are those of the run. rounds: number of batches and of trained versions.
    tasks_per_round: tasks of a batch, in turn, at most all. max_staleness: largest number of
    versions by which the model that generates a batch is behind the one that is trained on it; 0:
    they alternate.
    """

    rollout: LanguageRolloutConfig
    training: LanguageConfig
    rounds: int = 10
    tasks_per_round: int = 64
    max_staleness: int = 1

    def __post_init__(self) -> None:
        for name, least in zip(_OWN, (1, 1, 0), strict=True):
            value = getattr(self, name)
            is_valid = isinstance(value, int) and value >= least
            expect(is_valid, f"language online: {name}", value, f"{least} or more")
        if not isinstance(self.rollout.env, str) or not isinstance(self.rollout.tasks, str | None):
            raise ConfigInvalidError(
                "language online: env: found a function or a list of tasks, expected module:name "
                "for both: another process loads them.",
                parameter="env",
            )
        for name in ("where", "where_sequences", "policy_version", "max_staleness"):
            if getattr(self.training, name) is not None:
                raise ConfigInvalidError(
                    f"language online: {name}: found it for the training of a round, expected "
                    "none: each round is trained on its own batch.",
                    parameter=name,
                )
        if METHODS[self.training.method].needs_groups and self.rollout.samples < 2:
            raise ConfigInvalidError(
                f"language online: samples: found {self.rollout.samples}, expected 2 or more for "
                f"method {self.training.method}, which compares the samples of a task: with one, "
                "nothing is learned.",
                parameter="samples",
            )


def online_language_config(options: Mapping[str, Any]) -> OnlineLanguageConfig:
    """Split flat options into those of the run, its rollouts and its training.

    `algorithm` is the method, and `seed` that of both. `samples` is 8 by default if the method
    compares the samples of a task. Raises: ConfigInvalidError.
    """
    own = {key: options[key] for key in _OWN if key in options}
    names = {one.name for one in fields(LanguageRolloutConfig)} - {"producer"}
    rollout = {key: value for key, value in options.items() if key in names}
    taken = {*own, *names, "algorithm"} - {"seed"}
    training = {key: value for key, value in options.items() if key not in taken}
    if "algorithm" in options:
        training["method"] = options["algorithm"]
    trained = language_config(training)
    if METHODS[trained.method].needs_groups:
        rollout = {"samples": _GROUP_SAMPLES, **rollout}
    return OnlineLanguageConfig(
        from_options(LanguageRolloutConfig, rollout, "language online"), trained, **own
    )


@dataclass(frozen=True)
class OnlineLanguageResult:
    """The result of a run. output: the directory of the last version; rounds: values of each."""

    run_id: str
    output: Path
    rounds: Sequence[Mapping[str, float]] = field(default_factory=tuple)
    already_finished: bool = False


def train_language_online(
    lake: Lake, dataset: str, config: OnlineLanguageConfig, *, callbacks: Callbacks | None = None
) -> OnlineLanguageResult:
    """Train a language model on rollouts that another process generates with its versions.

    Args:
        lake: the lake of the dataset and of the run's record.
        dataset: the rollouts; created if it does not exist.
        config: environment, model, method, rounds.
        callbacks: on_start, on_metrics (once a round), on_remark (a generator that died, what is
            left out of a round), on_reading and on_progress (of each round's training), should_end.

    Each sampled token is recorded with the version that sampled it. What was recorded survives a
    kill of both processes, and `resume_language_online` goes on.

    Raises: as train_language and rollout_language; RolloutError if the generator dies repeatedly.
    """
    output = Path(config.training.output).absolute()
    if output.exists():
        raise AlreadyExistsError(
            f"output: {output}: found a file or directory of that name, expected a new name. "
            "Choose another one, or resume the run.",
            parameter="output",
        )
    model = str(check_model_folder(config.training.model).path)
    training = replace(config.training, model=model, output=str(output))
    config = replace(config, training=training)
    with ThreadPoolExecutor(1) as executor:
        _load_tasks(config, executor)
    if not lake.registry.exists():
        lake.registry.create()
    run_id = new_ulid()
    body = {"dataset": dataset, "algorithm": training.method, "request": asdict(config)}
    record = RunRecord(lake.registry, run_id, body, kind=KIND)
    with RunLease(lake.storage, run_id):
        output.mkdir(parents=True)
        record.record_start()
        with record.record_errors():
            return _Trainer(lake, record, config, callbacks or Callbacks()).run()


def resume_language_online(
    lake: Lake, run_id: str, *, callbacks: Callbacks | None = None
) -> OnlineLanguageResult:
    """Resume a run that was killed, interrupted or failed.

    Raises: NotFoundError if there is no such run; CommitConflictError while another process
    executes it; otherwise as `train_language_online`.
    """
    with RunLease(lake.storage, run_id):
        body = find_run(lake.registry, run_id, kind=KIND)
        config = _read_config(body)
        if body["status"] == "done":
            output = Path(body["output"]["path"])
            return OnlineLanguageResult(
                run_id, output, tuple(body["rounds"]), already_finished=True
            )
        record = RunRecord(lake.registry, run_id, body, kind=KIND)
        trainer = _Trainer(lake, record, config, callbacks or Callbacks(), resumed=True)
        with record.record_errors():
            record.record_resume(trainer.num_done)
            return trainer.run()


def _read_config(record: Mapping[str, Any]) -> OnlineLanguageConfig:
    request = dict(record["request"])
    return OnlineLanguageConfig(
        rollout=LanguageRolloutConfig(**request.pop("rollout")),
        training=LanguageConfig(**request.pop("training")),
        **request,
    )


def _load_tasks(config: OnlineLanguageConfig, executor: ThreadPoolExecutor) -> list[Any]:
    """Return the tasks of the environment. Raises: ConfigInvalidError for one without a list."""
    rollout = config.rollout
    environment = load_environment(
        rollout.env,
        env_args=rollout.env_args,
        tasks=rollout.tasks,
        num_tasks=rollout.num_tasks,
        seed=rollout.seed or 0,
        executor=executor,
    )
    if environment.digest == "seeds" or environment.name.startswith("verifiers:"):
        raise ConfigInvalidError(
            f"env: found {environment.name}, which has tasks of its own, expected module:function "
            "with a list of tasks.",
            parameter="env",
        )
    return list(environment.tasks)


def _find_version(config: OnlineLanguageConfig, version: int) -> Path:
    """Return the directory of a version; 0 is the initial model."""
    if not version:
        return Path(config.training.model)
    return Path(config.training.output) / f"version-{version}"


def _find_batch(lake: Lake, run_id: str, number: int) -> Mapping[str, Any] | None:
    """Return the record of the rollouts of a batch, if they have begun."""
    for run in reversed(lake.registry.runs()):
        if run.get("kind") == ROLLOUT_KIND and run.get("producer") == f"{run_id}/{number}":
            return run
    return None


class _Trainer:
    """Trains a version for each round, and watches the generator."""

    def __init__(
        self,
        lake: Lake,
        record: RunRecord,
        config: OnlineLanguageConfig,
        callbacks: Callbacks,
        *,
        resumed: bool = False,
    ) -> None:
        self._lake, self._record, self._config = lake, record, config
        self._callbacks, self._resumed = callbacks, resumed
        self._dataset = record.body["dataset"]
        self._deaths, self._last_batch = 0, -1

    @property
    def num_done(self) -> int:
        """The number of versions that are complete."""
        done = 0
        while done < self._config.rounds and _find_version(self._config, done + 1).is_dir():
            done += 1
        return done

    def run(self) -> OnlineLanguageResult:
        config, record = self._config, self._record
        rounds: list[Mapping[str, float]] = list(record.body.get("rounds", ()))
        if self._callbacks.on_start is not None:
            start = RunStart(record.run_id, self.num_done, self._resumed, ())
            self._callbacks.on_start(start)
        try:
            with (
                interrupt_on_sigterm(),
                self._generate(),
                MetricsLog(self._lake.storage, record.run_id) as metrics,
            ):
                for number in range(len(rounds), config.rounds):
                    batch = self._wait_for_batch(number)
                    result = self._train(number)
                    values = self._describe(number, batch, result)
                    metrics.add(number + 1, values, time.time())
                    if self._callbacks.on_metrics is not None:
                        self._callbacks.on_metrics(number + 1, values)
                    rounds.append(values)
                    record.add_fields(rounds=[*rounds], update=number + 1)
        except KeyboardInterrupt as error:
            raise RunInterrupted(record.run_id, len(rounds)) from error
        output = _find_version(config, config.rounds)
        finished = record.to_finished({"output": {"path": str(output)}})
        self._lake.registry.record_run(record.run_id, finished, replaces=record.body)
        return OnlineLanguageResult(record.run_id, output, tuple(rounds))

    def _train(self, number: int) -> LanguageResult:
        """Train the version of a round, or go on with it."""
        config, output = self._config, _find_version(self._config, number + 1)
        for run in reversed(self._lake.registry.runs()):
            is_ours = run.get("kind") == TRAIN_KIND
            if is_ours and run["request"]["output"] == str(output):
                return resume_language(self._lake, run["run_id"], callbacks=self._follow(number))
        training = replace(
            config.training,
            model=str(_find_version(config, number)),
            output=str(output),
            where=f"starts_with(episode_id, '{self._record.run_id}/{number}/')",
            policy_version=number,
            max_staleness=config.max_staleness,
            seed=config.training.seed + number,
        )
        return train_language(self._lake, self._dataset, training, callbacks=self._follow(number))

    def _follow(self, number: int) -> Callbacks:
        """Return the callbacks of a round's training, whose metrics are those of the round."""

        def report_start(start: RunStart) -> None:
            for remark in start.remarks:
                self._callbacks.report_remark(f"round {number + 1}: {remark}")

        return replace(self._callbacks, on_start=report_start, on_metrics=None)

    def _describe(
        self, number: int, batch: Mapping[str, Any], result: LanguageResult
    ) -> dict[str, float]:
        receipt = batch["result"]
        names = ("mean_reward", "pass_rate", "group_pass_rate", "tokens_per_s")
        values = {name: receipt[name] for name in names if receipt[name] is not None}
        values["staleness"] = number - receipt["model"]["policy_version"]
        return {**values, **result.metrics, "updates_per_s": result.updates_per_s}

    def _wait_for_batch(self, number: int) -> Mapping[str, Any]:
        """Return the record of a batch once it is complete. Raises: RolloutError."""
        while True:
            batch = _find_batch(self._lake, self._record.run_id, number)
            if batch is not None and batch["status"] == "done":
                if number > self._last_batch:
                    self._deaths, self._last_batch = 0, number
                return batch
            if self._callbacks.is_end_requested:
                raise KeyboardInterrupt
            code = self._process.poll()
            if code is not None:
                self._restart(code)
            time.sleep(_POLL_S)

    def _restart(self, code: int) -> None:
        self._deaths += 1
        text = self._errors.read_text(errors="replace").strip()[-_STDERR_CHARS:]
        reason = text.rpartition("\n")[2] or f"exit code {code}"
        if self._deaths >= _MAX_DEATHS:
            raise RolloutError(
                f"generator: found {self._deaths} deaths in a row, the last one with {reason}, "
                "expected it to run. What it had recorded remains; correct the cause, then resume "
                f"run {self._record.run_id}."
            )
        self._callbacks.report_remark(f"the generator died ({reason}) and is started again")
        self._start()

    def _start(self) -> None:
        run_id, parent = self._record.run_id, str(os.getpid())
        command = [sys.executable, "-m", __name__, self._lake.url, run_id, parent]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )

    @contextmanager
    def _generate(self) -> Iterator[None]:
        """Run the generator beside the block."""
        self._errors = Path(self._config.training.output) / "generator.log"
        self._start()
        try:
            yield
        finally:
            self._process.kill()
            self._process.wait()


def generate(lake: Lake, run_id: str) -> None:
    """Generate the batches of a run that are not recorded yet."""
    record = find_run(lake.registry, run_id, kind=KIND)
    config, dataset = _read_config(record), record["dataset"]
    with ThreadPoolExecutor(1) as executor:
        tasks = _load_tasks(config, executor)
    for number in range(config.rounds):
        batch = _find_batch(lake, run_id, number)
        if batch is not None and batch["status"] == "done":
            continue
        if batch is not None:  # its rollouts have to be of one version
            version = batch["config"]["model"]["policy_version"]
        else:
            while (version := find_newest(config, number)) < number - config.max_staleness:
                time.sleep(_POLL_S)
        model = LocalModel(
            _find_version(config, version), policy=f"run:{run_id}", policy_version=version
        )
        rollout = replace(
            config.rollout,
            tasks=take_tasks(tasks, number, config.tasks_per_round),
            num_tasks=None,
            producer=f"{run_id}/{number}",
            seed=(config.rollout.seed or 0) + number,
        )
        rollout_language(lake, dataset, model, rollout)


def find_newest(config: OnlineLanguageConfig, number: int) -> int:
    """Return the newest complete version, of those up to the one that a batch is trained on."""
    version = 0
    while version < number and _find_version(config, version + 1).is_dir():
        version += 1
    return version


def take_tasks(tasks: Sequence[Task], number: int, size: int) -> list[Task]:
    """Return the tasks of a batch: the next ones in turn, each at most once."""
    size = min(size, len(tasks))
    places = [place % len(tasks) for place in range(number * size, (number + 1) * size)]
    return [{**tasks[place], "id": find_task_id(tasks[place], place)} for place in places]


def _end_with_parent(parent: int) -> None:
    """End this process once its parent has: nothing that was recorded is lost by it."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def main() -> None:
    url, run_id, parent = sys.argv[1:]
    threading.Thread(target=_end_with_parent, args=(int(parent),), daemon=True).start()
    try:
        generate(open_lake(url), run_id)
    except (ReplayLakeError, KeyboardInterrupt) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
