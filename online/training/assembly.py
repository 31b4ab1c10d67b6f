"""Assembly: the parts of a run, as its config asks for them: view, pool, feed, supply, limiter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from replaylake.datastore.episodes.schema import POLICY_VERSION
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.kernels import kernels
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.offline.evaluation.evaluate import evaluate
from replaylake.offline.evaluation.self_play import AgentPolicies
from replaylake.offline.learning.learner import Learner
from replaylake.offline.running.training.selection import FIRST_SEED, Selection
from replaylake.online.collecting.acting import Acting
from replaylake.online.collecting.shipment import Endless, Order
from replaylake.online.collecting.track import POLICY_STATE
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.monitoring.timings import Timings
from replaylake.online.pools.local_pool import LocalPool
from replaylake.online.pools.pool import WorkerPool
from replaylake.online.pools.ray_pool import RayPool
from replaylake.online.recording.collection import GROUP_INTERVAL_S
from replaylake.online.recording.feed import DirectFeed, Feed, LakeFeed
from replaylake.online.recording.recorder import Recorder
from replaylake.online.recording.refusals import Refusals
from replaylake.online.training.agents import (
    AgentBehaviors,
    AgentLearners,
    AgentSupplies,
    AgentViews,
    own_steps,
)
from replaylake.online.training.behavior import Behavior, OneBehavior
from replaylake.online.training.exploring import exploring
from replaylake.online.training.job import Job
from replaylake.online.training.limiter import RateLimiter, sample_to_insert_ratio
from replaylake.online.training.once_supply import OnceSupply
from replaylake.online.training.parts import Parts
from replaylake.online.training.patient_observer import PatientObserver
from replaylake.online.training.supply import AnySupply, Supply

# What is committed at a time where steps can be sampled without: a crash loses no more.
_LOCAL_INTERVAL_S: Final = 2.0
# Where nothing is learned while it is committed.
_TURN_INTERVAL_S: Final = 0.02
# Episodes of an attempt that goes on with a run have numbers, and so seeds, of their own.
_NUMBERS_PER_ATTEMPT: Final = 1 << 22


def followed(job: Job, producer: str) -> LiveView | AgentViews:
    columns = []
    if job.takes_once:
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
            without_producers=[producer] if job.puts else (),
        )

    # Half a second, which the first batches would wait for.
    kernels.load()
    if job.config.agents == "shared":
        return follow()
    with ExitStack() as stack:
        views = {agent: stack.enter_context(follow(own_steps(agent))) for agent in job.agents}
        stack.pop_all()
    return AgentViews(views)


def made_pool(
    lake: Lake, job: Job, producer: str, attempt: int, should_end: Callable[[], bool]
) -> WorkerPool:
    request, config = job.request, job.config
    is_local = config.env_runner == "local"
    size = config.num_workers
    orders = [
        Order(
            lake.url,
            request.dataset,
            producer,
            worker,
            Endless(attempt * _NUMBERS_PER_ATTEMPT + worker, size),
            Acting(),
            RolloutConfig(
                request.env_id,
                env_args=dict(request.env_args),
                num_envs=config.envs_per_worker,
                seed=config.seed,
            ),
            records=not job.puts,
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
        address=request.address,
        start_timeout_s=config.start_timeout_s,
        answer_timeout_s=config.answer_timeout_s,
        should_end=should_end,
    )


@contextmanager
def made_feed(job: Job, view: LiveView | AgentViews, producer: str) -> Iterator[Feed]:
    if isinstance(view, AgentViews) or not job.puts:
        is_local = job.config.env_runner == "local"
        interval_s = _TURN_INTERVAL_S if is_local else GROUP_INTERVAL_S
        with _recorder(job, producer, interval_s) as recorder:
            yield LakeFeed(view, recorder)
    elif job.config.record:
        with _recorder(job, producer, _LOCAL_INTERVAL_S) as recorder:
            yield DirectFeed(view, recorder)
    else:
        yield DirectFeed(view, None)


def _recorder(job: Job, producer: str, interval_s: float) -> Recorder:
    timeout_s = job.config.answer_timeout_s
    return Recorder(job.dataset, producer, interval_s=interval_s, answer_timeout_s=timeout_s)


def made_parts(
    job: Job,
    view: LiveView | AgentViews,
    pool: WorkerPool,
    feed: Feed,
    observer: PatientObserver,
    refusals: Refusals,
    *,
    name: str,
) -> Parts:
    config, learner, request = job.config, job.learner, job.request

    def measure(policies: AgentPolicies) -> float:
        return evaluate(
            policies,
            request.env_id,
            episodes=config.selection_episodes,
            seed=FIRST_SEED + config.seed,
            env_args=request.env_args,
        ).mean_return

    timings = Timings()
    return Parts(
        learner=learner,
        supply=_supply(job, view, timings),
        pool=pool,
        feed=feed,
        limiter=_limiter(job),
        behavior=_behavior(job, name),
        selection=Selection("environment", True, config.patience),
        observer=observer,
        timings=timings,
        refusals=refusals,
        measure=measure,
    )


def _supply(job: Job, view: LiveView | AgentViews, timings: Timings) -> AnySupply:
    def supply(view: LiveView, learner: Learner) -> Supply | OnceSupply:
        if job.takes_once:
            return OnceSupply(view, learner, job.config, timings)
        return Supply(view, learner, job.config, job.batch_size, job.mixed, timings)

    if not isinstance(view, AgentViews):
        return supply(view, job.learner)
    assert isinstance(job.learner, AgentLearners), "as many learners as views"
    each = {a: supply(view.by_agent[a], one) for a, one in job.learner.by_agent.items()}
    return AgentSupplies(each, job.learner)


def _behavior(job: Job, name: str) -> Behavior:
    """name: whom steps are said to be acted by, with a version that rises as it learns."""
    config = job.config
    explored = exploring(config, job.learner.policy().spec, takes_once=job.takes_once)

    def behavior(learner: Learner) -> OneBehavior:
        is_sent = config.env_runner != "local"
        return OneBehavior(learner, explored, name=name, device=config.device, is_sent=is_sent)

    if isinstance(job.learner, AgentLearners):
        return AgentBehaviors({a: behavior(one) for a, one in job.learner.by_agent.items()})
    return behavior(job.learner)


def _limiter(job: Job) -> RateLimiter:
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
