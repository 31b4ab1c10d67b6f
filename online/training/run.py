"""Run: what one process does of an online run, from its parts to the policy that is registered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from replaylake.datastore.episodes.schema import POLICY_VERSION
from replaylake.datastore.errors import (
    LogCorruptError,
    NotFoundError,
    ReplayLakeError,
    StorageError,
    TrainingError,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.checkpoints import Checkpoint
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.datastore.replay.kernels import kernels
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.offline.callbacks import Callbacks, RunStart
from replaylake.offline.evaluation.evaluate import EvaluationConfig, evaluate
from replaylake.offline.evaluation.self_play import AgentPolicies
from replaylake.offline.learning.learner import Learner, torch_threads
from replaylake.offline.running.training.interruption import (
    Interruption,
    RunInterrupted,
    interrupt_on_sigterm,
)
from replaylake.offline.running.training.lake_observer import LakeObserver
from replaylake.offline.running.training.policy_selection import FIRST_SEED, PolicySelection
from replaylake.offline.running.training.run_record import RunRecord
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.rollout_batch import EpisodeNumbers, WorkerSpec
from replaylake.online.collecting.step_buffer import POLICY_STATE
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.pools.local_pool import LocalPool
from replaylake.online.pools.pool import WorkerPool
from replaylake.online.pools.ray_pool import RayPool
from replaylake.online.recording.background_compactor import BackgroundCompactor
from replaylake.online.recording.collection import GROUP_INTERVAL_S
from replaylake.online.recording.committed_steps import producer_of, read_committed
from replaylake.online.recording.episode_committer import EpisodeCommitter
from replaylake.online.recording.feed import DirectFeed, Feed, LakeFeed
from replaylake.online.recording.storage_retry import StorageRetry
from replaylake.online.training.agents import (
    AgentBatches,
    AgentBehaviorSources,
    AgentLearners,
    AgentViews,
    agent_steps_condition,
)
from replaylake.online.training.behavior_source import BehaviorSource, SingleBehaviorSource
from replaylake.online.training.components import Components
from replaylake.online.training.exploration_schedule import make_exploration_schedule
from replaylake.online.training.job import OnlineJob
from replaylake.online.training.limiter import RateLimiter, sample_to_insert_ratio
from replaylake.online.training.on_policy_batches import OnPolicyBatches
from replaylake.online.training.registration import register_policy
from replaylake.online.training.replay_batches import LearnerBatches, ReplayBatches
from replaylake.online.training.result import OnlineResult
from replaylake.online.training.retrying_observer import RetryingObserver
from replaylake.online.training.trainer import OnlineTrainer

# From one look to the next while a view catches up.
_LOOK_S: Final = 0.25
# What is committed at a time where steps can be sampled without: a crash loses no more.
_LOCAL_INTERVAL_S: Final = 2.0
# Where nothing is learned while it is committed.
_TURN_INTERVAL_S: Final = 0.02
# Episodes of an attempt that goes on with a run have numbers, and so seeds, of their own.
_NUMBERS_PER_ATTEMPT: Final = 1 << 22


@dataclass(frozen=True)
class RunAttempt:
    """A process's part of a run: the whole of it, or what is left since it was interrupted.

    record: as it is written down. lease: held by this process. resumed: whether an attempt came
    before.
    """

    lake: Lake
    job: OnlineJob
    record: RunRecord
    lease: RunLease
    callbacks: Callbacks
    resumed: bool = False

    def execute(self) -> OnlineResult:
        """Train and register. Raises: as train_online."""
        timings = Timings("trainer")
        run = LakeObserver(
            self.lake.storage,
            self.lease,
            self.record.run_id,
            self.job.learner,
            keep=self.job.config.keep_checkpoints,
            on_metrics=self.callbacks.on_metrics,
        )
        interruption = Interruption()

        def should_end() -> bool:
            return interruption.is_requested or self.callbacks.is_end_requested

        retry = StorageRetry(self.callbacks.report_remark, should_end)
        observer = RetryingObserver(run, retry, self.callbacks.report_remark)
        try:
            with interrupt_on_sigterm(), ExitStack() as stack:
                stack.callback(_flush, run)
                with timings.measure("start", items=0):
                    trainer = self._trainer(stack, run, observer, retry, should_end, timings)
                self._train(trainer, run, interruption)
                return register_policy(
                    self.lake, self.job, self.record, self.lease, trainer, run, observer, retry
                )
        except RunInterrupted:
            raise
        except KeyboardInterrupt as error:
            raise RunInterrupted(self.record.run_id, run.last_saved) from error

    def _trainer(
        self,
        stack: ExitStack,
        run: LakeObserver,
        observer: RetryingObserver,
        retry: StorageRetry,
        should_end: Callable[[], bool],
        timings: Timings,
    ) -> OnlineTrainer:
        """Put the run together, where it goes on as it was; `stack` is what ends it."""
        job, callbacks, config = self.job, self.callbacks, self.job.config
        attempt = len(self.record.body.get("resumed", ())) + 1 if self.resumed else 0
        run_id = self.record.run_id
        producer = producer_of(run_id, attempt)
        checkpoint = run.load_latest() if self.resumed else None
        stack.enter_context(torch_threads(config.threads))
        view = open_view(job, producer)
        stack.callback(view.close)
        pool = make_pool(self.lake, job, producer, attempt, should_end)
        stack.enter_context(closing(pool))
        feed = stack.enter_context(open_feed(job, view, producer))
        if config.compact and config.record:
            stack.enter_context(
                BackgroundCompactor(self.lake.url, job.dataset, on_remark=callbacks.report_remark)
            )
        trainer = OnlineTrainer(
            make_components(job, view, pool, feed, observer, retry, timings, name=f"run:{run_id}"),
            config,
            on_progress=callbacks.on_progress,
            on_remark=callbacks.report_remark,
            should_end=should_end,
        )
        remarks = list(pool.remarks)
        if self.resumed:
            remarks += self._restore(trainer, view, feed, checkpoint, should_end)
        if callbacks.on_start is not None:
            callbacks.on_start(RunStart(run_id, trainer.update, self.resumed, tuple(remarks)))
        return trainer

    def _restore(
        self,
        trainer: OnlineTrainer,
        view: LiveView | AgentViews,
        feed: Feed,
        checkpoint: Checkpoint | None,
        should_end: Callable[[], bool],
    ) -> Iterator[str]:
        """Let it go on from a checkpoint and what is recorded; yield what is to be told."""
        job = self.job
        steps = read_committed(job.dataset, self.record.run_id, since=job.since)
        if steps.left_open:
            yield (
                f"{len(steps.left_open):,} episodes were open when the run ended and stay without "
                "an end"
            )
        # Until then the limiter would count steps that cannot be sampled.
        _catch_up(view, steps.version, job, should_end)
        if checkpoint is None:
            trainer.start_from(steps)
        else:
            job.learner.load_state_dict(checkpoint.arrays)
            trainer.load_state_dict(checkpoint.update, checkpoint.state, steps)
        self.record.record_resume(trainer.update)
        feed.abandon(steps.left_open)

    def _train(self, trainer: OnlineTrainer, run: LakeObserver, interruption: Interruption) -> None:
        """Run it to its end. Raises: RunInterrupted where it was asked to end before."""
        name, url = self.job.request.dataset, self.lake.url
        try:
            with interruption.handle_signals():
                is_complete = trainer.run()
        except ReplayLakeError as error:
            # Asked anew: this one knows the log that it has read.
            if (damage := _find_damage(self.lake.dataset(name))) is None:
                raise
            raise NotFoundError(
                f"dataset {name!r}: gone from {url} while the run collects into it ({damage}), "
                "expected it to remain. Restore it and resume the run, or begin another."
            ) from error
        if not is_complete:
            raise RunInterrupted(self.record.run_id, run.last_saved)
        if trainer.update == 0:
            raise TrainingError(
                f"training: found no update after {trainer.collector.num_steps:,} steps, expected "
                "at least one: there were too few for a batch. Collect more steps."
            )


def _catch_up(
    view: LiveView | AgentViews, version: int, job: OnlineJob, should_end: Callable[[], bool]
) -> None:
    """Wait until a version can be sampled, as long as more and more of it can.

    Raises: KeyboardInterrupt where it should end; StorageError where nothing comes any more.
    """
    timeout_s, moved_at = job.config.answer_timeout_s, time.monotonic()
    while not view.wait_for(version=version, timeout_s=_LOOK_S):
        if should_end():
            raise KeyboardInterrupt
        decoded = view.timings()
        if decoded.tail.items or decoded.decode.items:
            moved_at = time.monotonic()
        if time.monotonic() - moved_at > timeout_s:
            raise StorageError(
                f"dataset {job.request.dataset!r}: found version {view.version} and nothing more "
                f"in {timeout_s:g} s, expected version {version}, with the steps that the run has "
                "recorded. Check the disk and the network; if it only takes longer, raise "
                "answer_timeout_s."
            )


def _flush(run: LakeObserver) -> None:
    # What ended the run says more; one that goes on measures again what came after a checkpoint.
    with suppress(StorageError):
        run.close()


def _find_damage(dataset: Dataset) -> str | None:
    """Return why a dataset cannot be read; None if it can be."""
    try:
        dataset.snapshot()
    except (NotFoundError, LogCorruptError) as error:
        return str(error).rstrip(".")
    return None


def open_view(job: OnlineJob, producer: str) -> LiveView | AgentViews:
    columns = []
    if job.samples_once:
        columns.append(POLICY_VERSION)
        if job.learner.policy().spec.recorded_state_size:
            columns.append(POLICY_STATE)

    def follow(where_steps: str | None = None) -> LiveView:
        return job.dataset.follow(
            max_steps=job.config.capacity,
            columns=columns,
            frame_stack=job.config.frame_stack,
            where_steps=where_steps,
            since=job.since,
            without_producers=[producer] if job.writes_to_view else (),
        )

    # Half a second, which the first batches would wait for.
    kernels.load()
    if job.config.agents == "shared":
        return follow()
    with ExitStack() as stack:
        views = {
            agent: stack.enter_context(follow(agent_steps_condition(agent))) for agent in job.agents
        }
        stack.pop_all()
    return AgentViews(views)


def make_pool(
    lake: Lake, job: OnlineJob, producer: str, attempt: int, should_end: Callable[[], bool]
) -> WorkerPool:
    request, config = job.request, job.config
    is_local = config.env_runner == "local"
    size = config.num_workers
    orders = [
        WorkerSpec(
            lake.url,
            request.dataset,
            producer,
            worker,
            EpisodeNumbers(attempt * _NUMBERS_PER_ATTEMPT + worker, size),
            BehaviorPolicy(),
            RolloutConfig(
                config.env,
                env_args=dict(config.env_args),
                envs_per_worker=config.envs_per_worker,
                seed=config.seed,
            ),
            records=not job.writes_to_view,
        )
        for worker in range(size)
    ]
    if is_local:
        return LocalPool(orders, interval_s=config.flush_interval_s, with_open=True)
    return RayPool(
        orders,
        interval_s=config.flush_interval_s,
        with_open=True,
        cpus_per_worker=config.worker_cpus,
        address=config.address,
        start_timeout_s=config.start_timeout_s,
        answer_timeout_s=config.answer_timeout_s,
        should_end=should_end,
    )


@contextmanager
def open_feed(job: OnlineJob, view: LiveView | AgentViews, producer: str) -> Iterator[Feed]:
    if isinstance(view, AgentViews) or not job.writes_to_view:
        is_local = job.config.env_runner == "local"
        interval_s = _TURN_INTERVAL_S if is_local else GROUP_INTERVAL_S
        with _recorder(job, producer, interval_s) as recorder:
            yield LakeFeed(view, recorder)
    elif job.config.record:
        with _recorder(job, producer, _LOCAL_INTERVAL_S) as recorder:
            yield DirectFeed(view, recorder)
    else:
        yield DirectFeed(view, None)


def _recorder(job: OnlineJob, producer: str, interval_s: float) -> EpisodeCommitter:
    timeout_s = job.config.answer_timeout_s
    return EpisodeCommitter(
        job.dataset, producer, interval_s=interval_s, answer_timeout_s=timeout_s
    )


def make_components(
    job: OnlineJob,
    view: LiveView | AgentViews,
    pool: WorkerPool,
    feed: Feed,
    observer: RetryingObserver,
    retry: StorageRetry,
    timings: Timings,
    *,
    name: str,
) -> Components:
    config, learner = job.config, job.learner

    def measure(policies: AgentPolicies) -> float:
        measured = EvaluationConfig(
            config.env,
            env_args=config.env_args,
            episodes=config.selection_episodes,
            seed=FIRST_SEED + config.seed,
        )
        return evaluate(policies, measured).mean_return

    return Components(
        learner=learner,
        batches=_make_batches(job, view, timings),
        pool=pool,
        feed=feed,
        limiter=_make_limiter(job),
        behavior=_make_behavior_source(job, name),
        selection=PolicySelection("environment", True, config.patience),
        observer=observer,
        timings=timings,
        storage_retry=retry,
        measure=measure,
    )


def _make_batches(job: OnlineJob, view: LiveView | AgentViews, timings: Timings) -> LearnerBatches:
    def supply(view: LiveView, learner: Learner) -> ReplayBatches | OnPolicyBatches:
        if job.samples_once:
            return OnPolicyBatches(view, learner, job.config, timings)
        return ReplayBatches(view, learner, job.config, job.batch_size, job.mixed, timings)

    if not isinstance(view, AgentViews):
        return supply(view, job.learner)
    assert isinstance(job.learner, AgentLearners), "as many learners as views"
    each = {a: supply(view.by_agent[a], one) for a, one in job.learner.by_agent.items()}
    return AgentBatches(each, job.learner)


def _make_behavior_source(job: OnlineJob, name: str) -> BehaviorSource:
    """name: whom steps are said to be acted by, with a version that rises as it learns."""
    config = job.config
    explored = make_exploration_schedule(
        config, job.learner.policy().spec, takes_once=job.samples_once
    )

    def behavior(learner: Learner) -> SingleBehaviorSource:
        is_sent = config.env_runner != "local"
        return SingleBehaviorSource(
            learner, explored, name=name, device=config.device, is_sent=is_sent
        )

    if isinstance(job.learner, AgentLearners):
        return AgentBehaviorSources({a: behavior(one) for a, one in job.learner.by_agent.items()})
    return behavior(job.learner)


def _make_limiter(job: OnlineJob) -> RateLimiter:
    """Hold the learner to so many samples a step; it never runs ahead of the ratio.

    Of steps taken once each is sampled once: workers may be ahead by a batch, what their
    environments have begun, and a batch for each version of staleness that is let pass.
    """
    config, plan = job.config, job.learner.on_policy
    lanes = config.num_workers * config.envs_per_worker
    if plan is not None:
        # With several agents each has a sequence of its own that is begun, in every environment.
        lanes *= max(1, len(job.agents))
        batch = plan.num_sequences * plan.length
        if config.agents == "each":
            batch *= len(job.agents)
        is_async = config.mode == "async" and config.env_runner == "ray"
        ahead = (config.max_staleness or 1) if is_async else 0
        room = batch * (1 + ahead) + lanes * plan.length
        return RateLimiter(sample_to_insert_ratio(1.0, 1, (1.0, float(room))))
    per_insert = config.samples_per_insert or float(job.batch_size)
    rounds = 2 * config.num_workers * max(lanes // config.num_workers, config.round_steps)
    if config.env_runner == "local" or config.mode == "sync":
        rounds = config.num_workers * config.round_steps
    above = (config.error_buffer or rounds) * per_insert
    above = max(above, 2 * max(per_insert, float(job.batch_size)))
    return RateLimiter(sample_to_insert_ratio(per_insert, config.min_size, (0.0, above)))
