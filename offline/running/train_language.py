"""Train language: runs that train a causal language model on token sequences of a dataset.

`train_language` starts a run and `resume_language` resumes one. The model is written as a folder
that transformers loads, with its lineage in `replaylake.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    NotFoundError,
    SchemaMismatchError,
    StorageError,
    TrainingError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.names import check_policy_name, new_ulid
from replaylake.datastore.replay.tokens.sequence_images import SequenceImages
from replaylake.datastore.replay.tokens.token_sampler import TokenSampler
from replaylake.datastore.replay.tokens.token_view import TokenSequences
from replaylake.datastore.storage.storage import fsync_folder
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.language.pretrained import (
    ORIGIN,
    ModelFolder,
    check_model_folder,
    hash_model_folder,
)
from replaylake.offline.language.registration import find_model, register_trained_model
from replaylake.offline.language.token_learner import (
    METHODS,
    TokenLearner,
    TokenOptions,
    find_weight_level,
    read_token_options,
)
from replaylake.offline.learning.learner import torch_threads
from replaylake.offline.learning.options import (
    check_keys,
    expect,
    from_options,
    near_matches,
    to_options,
)
from replaylake.offline.learning.process_group import (
    ALREADY_FINISHED,
    SINGLE_PROCESS,
    ProcessGroup,
)
from replaylake.offline.running.distributed import run_distributed
from replaylake.offline.running.training.interruption import Interruption
from replaylake.offline.running.training.lake_observer import LakeObserver, NullObserver
from replaylake.offline.running.training.run_loop import (
    follow_updates,
    record_lost_leader,
    run_updates,
)
from replaylake.offline.running.training.run_record import RunRecord, find_run
from replaylake.offline.running.training.trainer import MetricSums, Observer, TrainProgress

KIND: Final = "train language"
_PROGRESS_INTERVAL_S: Final = 0.25
_KNOWN_RETURN: Final = "isfinite(episode_return)"
_FROM_ONE: Final = (
    "updates",
    "batch_size",
    "max_tokens",
    "bucket_batches",
    "learners",
    "threads",
    "log_updates",
    "checkpoint_updates",
    "keep_checkpoints",
)


@dataclass(frozen=True)
class LanguageConfig:
    """Options of a language training run; the lake and its dataset are arguments.

    model: folder of the initial causal language model, or a version of a policy. output: folder to
    create for the trained model. policy: name to register it under, as the next version of this
    policy; None: it is not registered. method: a key of METHODS. reference: folder of the model
    from which divergence is measured, if the method measures it; None: the initial model. where:
    SQL condition over `episodes`; where_sequences: SQL condition over `sequences`. batch_size:
    sequences in a batch, or groups of sequences if the method compares samples of one prompt.
    max_tokens: largest number of tokens in a batch, padding included. policy_version: the version
    that is trained; max_staleness: largest difference between it and the version that sampled a
    token. learners: processes that make each update together. options: options of the method, see
    TokenOptions.
    """

    model: str = ""
    output: str = ""
    policy: str | None = None
    method: str = "grpo"
    reference: str | None = None
    where: str | None = None
    where_sequences: str | None = None
    updates: int = 100
    batch_size: int = 8
    max_tokens: int | None = None
    bucket_batches: int = 1
    max_staleness: int | None = None
    policy_version: int | None = None
    seed: int = 0
    device: str = "cpu"
    learners: int = 1
    threads: int = 1
    log_updates: int = 10
    # None: a tenth of the updates.
    checkpoint_updates: int | None = None
    keep_checkpoints: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _FROM_ONE:
            value = getattr(self, name)
            expect(value is None or value >= 1, f"language training: {name}", value, "1 or more")
        for name in ("model", "output"):
            value = getattr(self, name)
            is_given = isinstance(value, str) and bool(value)
            expect(is_given, f"language training: {name}", value, "a folder")
        if self.policy is not None:
            check_policy_name(self.policy)
        expect(0 <= self.seed < 2**63, "language training: seed", self.seed, "0 to 2^63 - 1")
        if self.method not in METHODS:
            raise ConfigInvalidError(
                f"language training: method: found {self.method!r}, expected "
                f"{near_matches(self.method, METHODS)}.",
                parameter="method",
            )
        has_others = self.method != "kto" or self.batch_size > 1
        expect(has_others, "language training: batch_size", self.batch_size, "2 or more for kto")
        if (self.max_staleness is None) != (self.policy_version is None):
            raise ConfigInvalidError(
                "language training: found one of max_staleness and policy_version, expected both "
                "or none: staleness is policy_version minus the version of a token.",
                parameter="max_staleness",
            )
        options = self.method_options()
        find_weight_level(self.method, options)
        if self.reference is not None and not self.needs_reference:
            raise ConfigInvalidError(
                f"language training: reference: found {self.reference!r} for method {self.method}, "
                "which measures no divergence from it, expected none. Leave reference out, or set "
                "kl_coef where the method has it.",
                parameter="reference",
            )
        is_generator = not (METHODS[self.method].is_reward_model or options.writes_adapter)
        if self.policy is not None and not is_generator:
            raise ConfigInvalidError(
                f"language training: policy: found {self.policy!r} for a reward model or an "
                "adapter, expected a whole model that generates. Leave policy out, or set "
                "lora_merge.",
                parameter="policy",
            )

    def method_options(self) -> TokenOptions:
        """Return the options of the method. Raises: ConfigInvalidError."""
        return read_token_options(self.method, self.options)

    @property
    def needs_reference(self) -> bool:
        """Whether the divergence from a reference model is part of the loss."""
        return METHODS[self.method].needs_reference(self.method_options())

    @property
    def save_interval_updates(self) -> int:
        """Updates from one checkpoint to the next."""
        return self.checkpoint_updates or max(1, self.updates // 10)


def language_config(options: Mapping[str, Any]) -> LanguageConfig:
    """Split flat options into LanguageConfig's and the method's. Raises: ConfigInvalidError."""
    nested = options.get("options", {})
    if not isinstance(nested, dict):
        raise ConfigInvalidError(
            f"language training: options: found {nested!r}, expected a table of options. "
            "Give names and values."
        )
    own = {one.name for one in fields(LanguageConfig)} - {"options"}
    ours = {key: value for key, value in options.items() if key in own}
    theirs = {key: value for key, value in options.items() if key not in own | {"options"}}
    check_keys(theirs, [one.name for one in fields(TokenOptions)], "language training", own)
    return replace(
        from_options(LanguageConfig, ours, "language training"), options={**nested, **theirs}
    )


@dataclass(frozen=True)
class LanguageResult:
    """The result of a run.

    output: the folder of the model; sha256: over its files. policy: the version that it was
    registered as, if it was. dataset: name, version, conditions, and counts of episodes, sequences
    and tokens. metrics: means over the updates since the last recorded point.
    """

    run_id: str
    config: LanguageConfig
    output: Path
    sha256: str
    policy: PolicyRef | None
    dataset: Mapping[str, Any]
    metrics: Mapping[str, float]
    updates_per_s: float
    already_finished: bool = False


def train_language(
    lake: Lake, dataset: str, config: LanguageConfig, *, callbacks: Callbacks | None = None
) -> LanguageResult:
    """Train a causal language model on the token sequences of a dataset.

    Args:
        lake: the lake of the dataset and of the run's record.
        dataset: `NAME`, `NAME@VERSION` or `NAME@TAG`.
        config: model, output, method and its options.
        callbacks: on_reading, on_start, on_progress (TrainProgress), on_metrics, should_end.

    On the CPU, training is deterministic: the same data, model, config and seed give bitwise the
    same weights, even if the run was killed and resumed. Ctrl-C and SIGTERM save a checkpoint
    first.

    With `config.learners`, further processes compute each update together with the first, each on a
    share of the batch's sequences; the weights are those of one process, up to the rounding of sums
    of gradients.

    Raises: NotFoundError, SourceInvalidError, SchemaMismatchError, EmptyReplayError,
    InvalidNameError, ConfigInvalidError, AlreadyExistsError and ExtraMissingError before anything
    is recorded; TrainingError that names the update if a metric is not finite, or a learner that
    died; StorageError; RunInterrupted. In each case, no model is written.
    """
    snapshot, run_id = lake.snapshot(dataset), new_ulid()
    directory, ref = find_model(lake, config.model)
    # Whoever resumes the run may be in another folder, and an alias may have been moved.
    config = replace(
        config,
        model=str(directory.absolute()) if ref is None else str(ref),
        output=str(Path(config.output).absolute()),
        reference=config.reference and str(Path(config.reference).absolute()),
    )
    pinned = f"{snapshot.dataset}@{snapshot.version}"
    return _execute(lake, _RunSpec(run_id, pinned, dataset, config), callbacks or Callbacks())


def resume_language(
    lake: Lake, run_id: str, *, callbacks: Callbacks | None = None
) -> LanguageResult:
    """Resume a run that was killed, interrupted or failed, from its newest complete checkpoint.

    Raises: NotFoundError if there is no such run; CommitConflictError while another process
    executes it; SchemaMismatchError if the initial model was changed since; otherwise as
    `train_language`.
    """
    record = find_run(lake.registry, run_id, kind=KIND)
    if record["status"] == "done":
        return _load_finished_result(lake, record)
    (one,) = record["datasets"]
    pinned = f"{one['dataset']}@{one['version']}"
    config = LanguageConfig(**record["request"])
    spec = _RunSpec(run_id, pinned, record["named"], config, resumed=True)
    return _execute(lake, spec, callbacks or Callbacks())


@dataclass(frozen=True)
class _RunSpec:
    """A run, in a form that another process can execute. dataset: pinned; named: as requested."""

    run_id: str
    dataset: str
    named: str
    config: LanguageConfig
    resumed: bool = False


def _execute(lake: Lake, spec: _RunSpec, callbacks: Callbacks) -> LanguageResult:
    """Execute a run in this process, or in several."""
    config = spec.config
    _check_launcher()
    if config.learners == 1:
        return _lead(lake, spec, callbacks, SINGLE_PROCESS)
    try:
        run_distributed(_run_process, (lake.url, spec), config.learners, config.device, callbacks)
    except BaseException as error:
        record_lost_leader(lake, spec.run_id, KIND, error)
        raise
    return _make_result(lake, find_run(lake.registry, spec.run_id, kind=KIND), config)


def _run_process(group: ProcessGroup, callbacks: Callbacks, url: str, spec: _RunSpec) -> None:
    """Execute a run in one of its processes: the first has the record, the others follow it."""
    lake = open_lake(url)
    if group.rank:
        _follow(lake, spec, group)
    else:
        _lead(lake, spec, callbacks, group)


def _lead(lake: Lake, spec: _RunSpec, callbacks: Callbacks, group: ProcessGroup) -> LanguageResult:
    """Execute a run as the process that records it."""
    run_id = spec.run_id
    if not spec.resumed:
        job = _prepare(lake, spec, callbacks, group)
        with job, RunLease(lake.storage, run_id) as lease:
            first = {**job.describe(), "named": spec.named, "request": asdict(spec.config)}
            running = RunRecord(lake.registry, run_id, first, kind=KIND)
            running.record_start()
            with running.record_errors():
                return _run(lake, job, running, lease, callbacks)
    with RunLease(lake.storage, run_id) as lease:
        # Read again: the previous holder of the lease may have finished it in between.
        record = find_run(lake.registry, run_id, kind=KIND)
        if record["status"] == "done":
            group.broadcast(ALREADY_FINISHED)
            return _load_finished_result(lake, record)
        job = _prepare(lake, spec, callbacks, group)
        for name, folder in job.folders.items():
            if folder.sha256 != record[name]["sha256"]:
                raise SchemaMismatchError(
                    f"run {run_id}: {name}: found sha256 {folder.sha256[:12]} of {folder.path}, "
                    f"expected {record[name]['sha256'][:12]}, as at its start. Restore the folder, "
                    "or start a new run.",
                    parameter=name,
                )
        running = RunRecord(lake.registry, run_id, record, kind=KIND)
        with job, running.record_errors():
            return _run(lake, job, running, lease, callbacks, resumed=True)


def _follow(lake: Lake, spec: _RunSpec, group: ProcessGroup) -> None:
    """Make the updates of a run that another process leads."""
    job = _prepare(lake, spec, Callbacks(), group)
    loop = _Loop(job, NullObserver(), Callbacks(), Interruption())
    with job, torch_threads(spec.config.threads):
        follow_updates(loop, job.learner, lake, spec.run_id, group)


def _load_finished_result(lake: Lake, record: Mapping[str, Any]) -> LanguageResult:
    """Return the result of a run that is done, and remove its checkpoints."""
    Checkpoints(lake.storage, record["run_id"]).remove()
    return _make_result(lake, record, LanguageConfig(**record["request"]), was_done=True)


@dataclass(frozen=True)
class _Job:
    config: LanguageConfig
    # The version that the initial model is, if it was named as one.
    initial: PolicyRef | None
    # By field of the configuration.
    folders: Mapping[str, ModelFolder]
    sequences: TokenSequences
    sampler: TokenSampler
    learner: TokenLearner
    group: ProcessGroup
    episodes: NDArray[np.int64]
    content_hash: str
    remarks: tuple[str, ...]
    # Of a model that takes images.
    images: SequenceImages | None = None

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *args: object) -> None:
        if self.images is not None:
            self.images.close()

    def update(self) -> dict[str, float]:
        """Sample a batch and update the model on it; return the metrics."""
        batch, inputs = self.sampler.sample(), None
        if self.images is not None and self.learner.image_processor is not None:
            images = self.images.read_sequences(batch.indices)
            inputs = self.learner.image_processor.prepare(images)
        return self.learner.update(batch, self.episodes[batch.indices], inputs)

    def describe(self) -> dict[str, Any]:
        """Return the fields of the run's record and of the model's `replaylake.json`."""
        return {
            "algorithm": self.config.method,
            "seed": self.config.seed,
            **{
                name: {"path": str(one.path), "sha256": one.sha256}
                for name, one in self.folders.items()
            },
            **({} if self.initial is None else {"initial_policy": str(self.initial)}),
            "config": {
                **asdict(self.config),
                "options": to_options(self.config.method_options()),
            },
            "datasets": [
                {
                    "dataset": self.sequences.dataset,
                    "version": self.sequences.version,
                    "where": self.config.where,
                    "where_sequences": self.config.where_sequences,
                    "content_hash": self.content_hash,
                    "num_episodes": len(np.unique(self.episodes[self.sampler.sequences])),
                    "num_sequences": len(self.sampler.sequences),
                    "num_tokens": int(self.sampler.lengths.sum()),
                }
            ],
            "sampling": self.sampler.describe(),
        }


def _prepare(lake: Lake, spec: _RunSpec, callbacks: Callbacks, group: ProcessGroup) -> _Job:
    """Open data and model. Raises: as train_language."""
    dataset, config = spec.dataset, spec.config
    method, options = METHODS[config.method], config.method_options()
    _check_output(Path(config.output), spec.run_id)
    _check_device(config.device)
    directory, ref = find_model(lake, config.model)
    folders = {"model": check_model_folder(directory)}
    if config.reference is not None:
        folders["reference"] = check_model_folder(config.reference)
    snapshot = lake.snapshot(dataset)
    sequences = snapshot.token_sequences(config.where, on_progress=callbacks.on_reading)
    is_weighted = method.loss == "policy_gradient" and options.correction != "none"
    if is_weighted and not sequences.has_log_probs:
        raise SchemaMismatchError(
            f"{dataset}: found no log-probs of the behavior policy, which the correction of method "
            f"{config.method} needs. Record action_log_probs, or set correction=none to treat the "
            "tokens as sampled by the trained policy.",
            parameter="correction",
        )
    remarks: list[str] = []

    def make_sampler(where: str | None) -> TokenSampler:
        return sequences.padded(
            config.batch_size,
            seed=config.seed,
            max_tokens=config.max_tokens,
            bucket_batches=config.bucket_batches,
            groups=method.needs_groups,
            where_sequences=where,
            max_staleness=config.max_staleness,
            policy_version=config.policy_version,
        )

    where = config.where_sequences
    sampler = make_sampler(where)
    if method.loss != "likelihood":
        returns = sequences.table["episode_return"].to_numpy(zero_copy_only=False)
        if not np.isfinite(returns[sampler.sequences].astype(float)).all():
            known = f"({where}) AND {_KNOWN_RETURN}" if where else _KNOWN_RETURN
            num_before, sampler = len(sampler.sequences), make_sampler(known)
            num_left_out = num_before - len(sampler.sequences)
            reason = ", or that of another sample of the group," if method.needs_groups else ""
            remarks.append(
                f"{num_left_out:,} of {num_before:,} sequences are left out: their return{reason} "
                "is unknown"
            )
    names = sequences.table["episode_id"].to_pylist()
    _, episodes = np.unique(np.array(names, object).astype(str), return_inverse=True)
    if method.needs_groups and not _has_groups(sequences, sampler):
        effect = "there are no pairs" if method.has_pairs else "all advantages are 0"
        remarks.append(f"no group has two episodes: {effect} in method {config.method}")
    learner = TokenLearner(
        folders["model"],
        config.method,
        options,
        max_tokens=int(sampler.lengths.max()),
        reference=folders.get("reference"),
        seed=config.seed,
        device=config.device,
        group=group,
    )
    content_hash = _hash_content(snapshot, sequences, sampler)
    images = None
    if learner.image_processor is not None:
        images = SequenceImages(snapshot.table, sequences.table, sampler.sequences)
    return _Job(
        config,
        ref,
        folders,
        sequences,
        sampler,
        learner,
        group,
        episodes,
        content_hash,
        tuple(remarks),
        images,
    )


def _hash_content(snapshot: Snapshot, sequences: TokenSequences, sampler: TokenSampler) -> str:
    """Return sha256 over the sorted shard hashes and the keys of the selected sequences."""
    digest = hashlib.sha256()
    for entry in sorted(snapshot.files, key=lambda one: one.sha256):
        digest.update(entry.sha256.encode())
    rows = sequences.table.select(["episode_id", "agent_id", "first_step", "last_step"])
    keys = sorted(tuple(row.values()) for row in rows.take(sampler.sequences).to_pylist())
    digest.update(json.dumps(keys).encode())
    return digest.hexdigest()


def _has_groups(sequences: TokenSequences, sampler: TokenSampler) -> bool:
    """Whether a group has two episodes."""
    rows = sequences.table.select(["group_id", "episode_id"]).take(sampler.sequences)
    pairs = {(one["group_id"], one["episode_id"]) for one in rows.to_pylist()}
    return len({group for group, _ in pairs}) < len(pairs)


def _run(
    lake: Lake,
    job: _Job,
    record: RunRecord,
    lease: RunLease,
    callbacks: Callbacks,
    *,
    resumed: bool = False,
) -> LanguageResult:
    """Make the remaining updates, and write the model."""
    config, interruption = job.config, Interruption()
    with ExitStack() as stack:
        observer = LakeObserver(
            lake.storage,
            lease,
            record.run_id,
            job.learner,
            keep=config.keep_checkpoints,
            on_metrics=callbacks.on_metrics,
        )
        stack.enter_context(closing(observer))
        stack.enter_context(torch_threads(config.threads))
        loop = _Loop(job, observer, callbacks, interruption)
        run_updates(
            loop,
            job.learner,
            observer,
            record,
            callbacks=callbacks,
            interruption=interruption,
            group=job.group,
            resumed=resumed,
            remarks=job.remarks,
        )
        observer.close()
        lease.confirm()
        folder = _write_model(job, record)
        finished = record.to_finished(
            {
                "update": loop.update,
                "metrics": dict(loop.means),
                "updates_per_s": loop.updates_per_s,
                "output": {"path": config.output, "sha256": folder.sha256},
            }
        )
        if config.policy is None:
            lake.registry.record_run(record.run_id, finished, replaces=record.body)
        else:
            # The policy and the end of its run are one commit.
            ref = register_trained_model(
                lake,
                config.policy,
                folder,
                record.run_id,
                finished,
                run=finished,
                replaces=record.body,
            )
            finished |= {"policy": ref.name, "policy_version": ref.version}
        observer.checkpoints.remove()
    return _make_result(lake, {**finished, "run_id": record.run_id}, config)


class _Loop:
    """The training loop: updates, and metrics, progress and checkpoints between them."""

    def __init__(
        self,
        job: _Job,
        observer: Observer,
        callbacks: Callbacks,
        interruption: Interruption,
    ) -> None:
        self._job, self._observer = job, observer
        self._callbacks, self._interruption = callbacks, interruption
        self.update = 0
        self.means: dict[str, float] = {}
        self._sums, self._update_s = MetricSums(), 0.0

    @property
    def updates_per_s(self) -> float:
        """Updates per second, including the sampling of batches, without checkpoints."""
        return self.update / self._update_s if self._update_s else 0.0

    def load_state_dict(self, update: int, state: Mapping[str, Any]) -> None:
        self.update = update
        self._job.sampler.load_state_dict(state["sampler"])
        self._sums.load_state_dict(state["sums"])
        self.means, self._update_s = dict(state["means"]), state["update_s"]

    def run(self) -> bool:
        """Make the remaining updates; return false if it was interrupted before the last one."""
        config, job = self._job.config, self._job
        reported = 0.0
        while self.update < config.updates:
            start = time.perf_counter()
            metrics = job.update()
            self.update += 1
            self._check(metrics)
            self._sums.add(metrics)
            now = time.perf_counter()
            self._update_s += now - start
            is_last = self.update == config.updates
            is_ending = self._is_end_requested()
            if self._callbacks.on_progress is not None and (
                is_last or now - reported > _PROGRESS_INTERVAL_S
            ):
                reported = now
                left_s = (config.updates - self.update) / self.updates_per_s
                means = self._sums.means()
                self._callbacks.on_progress(
                    TrainProgress(self.update, config.updates, means, self.updates_per_s, left_s)
                )
            if is_last or self.update % config.log_updates == 0:
                self.means, self._sums = self._sums.means(), MetricSums()
                self._observer.record_metrics(self.update, self.means)
            if is_last or is_ending or self.update % config.save_interval_updates == 0:
                self._save()
            if is_ending:
                return is_last
        return True

    def _is_end_requested(self) -> bool:
        """Whether the run ends after this update; in all processes, as the leader was asked."""
        is_asked = self._interruption.is_requested or self._callbacks.is_end_requested
        return bool(self._job.group.broadcast(float(is_asked)))

    def _save(self) -> None:
        state = {
            "sampler": self._job.sampler.state_dict(),
            "sums": self._sums.state_dict(),
            "means": self.means,
            "update_s": self._update_s,
        }
        self._observer.save(self.update, state, best=None)

    def _check(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                saved = self._observer.last_saved
                good = "none was saved" if saved is None else f"the last is that of update {saved}"
                raise TrainingError(
                    f"training: {name} is {value} at update {self.update}, expected a finite "
                    f"number (checkpoints: {good}). No model was written. Lower learning_rate or "
                    "high."
                )


def _check_device(device: str) -> None:
    """Refuse a device that is not here. Raises: ConfigInvalidError."""
    try:
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        text = str(error).split("\n", 1)[0]
        raise ConfigInvalidError(
            f"language training: device: found {device!r}, expected a device of torch that this "
            f"machine has, such as cpu ({text}).",
            parameter="device",
        ) from error


def _check_launcher() -> None:
    """Refuse a launcher's configuration, which would be ignored. Raises: ConfigInvalidError."""
    num = os.environ.get("WORLD_SIZE", "1")
    if num != "1":
        # Each of its processes would train the whole run.
        raise ConfigInvalidError(
            f"language training: found WORLD_SIZE {num}, which accelerate and torchrun set for "
            "processes that train together, expected one process. Start it without a launcher, "
            f"with learners = {num}: it starts the others itself.",
            parameter="learners",
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise ConfigInvalidError(
            f"language training: found mixed precision {precision} in the configuration of "
            "accelerate, expected no: training is in float32. Start it without a launcher."
        )


def _is_written(folder: Path, run_id: str) -> bool:
    """Whether a folder is the model of this run, which was killed before it was recorded."""
    try:
        origin = json.loads((folder / ORIGIN).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(origin, dict) and origin.get("run_id") == run_id


def _check_output(folder: Path, run_id: str) -> None:
    if _is_written(folder, run_id):
        return
    if folder.exists() or not folder.parent.is_dir():
        found = "a file or folder of that name" if folder.exists() else "no parent folder"
        error = AlreadyExistsError if folder.exists() else ConfigInvalidError
        raise error(
            f"output: {folder}: found {found}, expected a new name in an existing folder for the "
            "trained model. Choose another name, or create the parent folder.",
            parameter="output",
        )


def _write_model(job: _Job, record: RunRecord) -> ModelFolder:
    """Write the folder atomically, and return it."""
    output = Path(job.config.output)
    if _is_written(output, record.run_id):
        return hash_model_folder(output)
    # Of this run: one that was killed while it wrote has left it behind.
    temporary = output.parent / f".{output.name}.{record.run_id}"
    shutil.rmtree(temporary, ignore_errors=True)
    is_adapter = job.config.method_options().writes_adapter
    origin = {"run_id": record.run_id, "is_adapter": is_adapter, **job.describe()}
    try:
        job.learner.save(temporary)
        (temporary / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
        # Some tokenizers have a folder of chat templates.
        for path in [*temporary.rglob("*"), temporary]:
            if path.is_dir():
                fsync_folder(path)
                continue
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temporary.rename(output)
        fsync_folder(output.parent)
    except OSError as error:
        raise StorageError(
            f"{output}: {error.strerror or error} while the model was written. Free space or "
            f"correct the permission, then resume run {record.run_id}."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return hash_model_folder(output)


def _make_result(
    lake: Lake, record: Mapping[str, Any], config: LanguageConfig, *, was_done: bool = False
) -> LanguageResult:
    output, policy = record["output"], None
    if (name := record.get("policy")) is not None:
        # A version that was deleted since is none any more.
        with suppress(NotFoundError):
            policy = lake.registry.resolve(f"{name}:{record['policy_version']}")
    return LanguageResult(
        run_id=record["run_id"],
        config=config,
        output=Path(output["path"]),
        sha256=output["sha256"],
        policy=policy,
        dataset=record["datasets"][0],
        metrics=record["metrics"],
        updates_per_s=record["updates_per_s"],
        already_finished=was_done,
    )
