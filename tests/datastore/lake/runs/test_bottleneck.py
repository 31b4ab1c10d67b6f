"""What holds a run up, on times worked out by hand: of 100 seconds, and mostly of 2 workers."""

from __future__ import annotations

import pytest

from replaylake.datastore.lake.runs.run_profile import Bottleneck, find_bottleneck
from replaylake.datastore.lake.runs.timings import Link, Place

WORKER_LINKS = {"env_step", "inference", "encode", "shard_write", "worker_wait"}
BACKGROUND_LINKS = {"encode", "shard_write", "commit", "tail", "decode"}


def found(num_workers: int = 2, *, is_sync: bool = False, **seconds: float) -> Bottleneck:
    times: dict[tuple[Place, Link], float] = {}
    for link, one in seconds.items():
        of: Place = "workers" if link in WORKER_LINKS and num_workers else "trainer"
        if link in BACKGROUND_LINKS and (num_workers == 0 or link not in WORKER_LINKS):
            of = "background"
        times[of, link] = one  # type: ignore[index]
    return find_bottleneck(times, 100.0, num_workers, is_sync=is_sync)


def test_the_learner_is_it_where_the_workers_wait() -> None:
    # Of their 200 seconds the workers waited 120; of its 100 the learner 2.
    one = found(env_step=50, inference=20, worker_wait=120, sample=10, update=80, learner_wait=2)
    assert (one.cause, one.link) == ("learner", "update")
    assert one.reason == (
        "update takes 80% of the trainer's time, 90% with sample; "
        "the learner waits 2.0% of its time, the workers 60%"
    )


def test_the_workers_are_it_where_the_learner_waits() -> None:
    one = found(env_step=120, inference=60, encode=10, worker_wait=4, update=30, learner_wait=65)
    assert (one.cause, one.link) == ("workers", "env_step")
    assert one.reason == (
        "env_step takes 60% of the workers' time, 90% with inference; "
        "the learner waits 65% of its time, the workers 2.0%"
    )


@pytest.mark.parametrize(
    ("seconds", "link"),
    [
        # The workers write for longer than they collect.
        ({"env_step": 40, "shard_write": 90, "encode": 60, "learner_wait": 70}, "shard_write"),
        # 100 of the workers' 200 seconds are less than 80 of the trainer's 100.
        ({"env_step": 100, "commit": 80, "learner_wait": 70, "worker_wait": 10}, "commit"),
        # Not so at 40 of 100: then it is the environments.
        ({"env_step": 100, "commit": 40, "learner_wait": 70, "worker_wait": 10}, "env_step"),
        # The workers wait for a trainer that decodes more than it learns.
        ({"worker_wait": 150, "decode": 60, "tail": 5, "update": 30}, "decode"),
        # Both wait, for what lies between them.
        ({"worker_wait": 100, "learner_wait": 60, "commit": 15, "update": 20}, "commit"),
    ],
)
def test_the_storage(seconds: dict[str, float], link: str) -> None:
    one = found(**seconds)
    assert (one.cause, one.link) == ("workers" if link == "env_step" else "storage", link)


def test_the_limit_is_it_where_both_wait_alike_and_storage_is_quick() -> None:
    seconds = {"worker_wait": 100, "learner_wait": 60, "commit": 9, "update": 30, "env_step": 90}
    one = found(**seconds)
    assert (one.cause, one.link) == ("rate limiter", None)
    assert one.reason == (
        "neither may run further ahead; the learner waits 60% of its time, the workers 50%"
    )
    assert found(is_sync=True, **seconds).reason.startswith("they take turns; ")


def test_one_waits_for_the_other_below_half_of_what_that_waits() -> None:
    common = {"env_step": 120, "update": 40, "learner_wait": 60}
    # Half of 60% of 200 seconds are 60.
    assert found(worker_wait=59.9, **common).cause == "workers"
    assert found(worker_wait=60.1, **common).cause == "rate limiter"


def test_where_nobody_waits_it_is_what_takes_most_of_its_place() -> None:
    # 180 of 200 seconds are as much as 90 of 100.
    seconds = {"worker_wait": 10, "learner_wait": 9, "env_step": 180}
    assert found(update=89, **seconds).cause == "workers"
    assert found(update=91, **seconds).cause == "learner"


@pytest.mark.parametrize(
    ("seconds", "cause", "link"),
    [
        ({"env_step": 30, "inference": 25, "update": 40}, "workers", "env_step"),
        ({"env_step": 30, "update": 35, "sample": 5}, "learner", "update"),
        ({"env_step": 20, "encode": 15, "shard_write": 16, "update": 30}, "storage", "shard_write"),
    ],
)
def test_a_process_alone_waits_for_nobody(seconds: dict[str, float], cause: str, link: str) -> None:
    one = found(0, **seconds)
    assert (one.cause, one.link) == (cause, link)
    assert "of the run's time" in one.reason
    assert "waits" not in one.reason


def test_time_that_no_link_accounts_for_is_said_where_it_is_the_most() -> None:
    """As while workers start, or where what they do is nothing that is measured."""
    one = found(update=20, learner_wait=65, env_step=30, encode=5, worker_wait=10)
    # Of the workers' 200 seconds 45 are in links.
    assert one.reason == (
        "env_step takes 15% of the workers' time, while 78% of it is in no link; "
        "the learner waits 65% of its time, the workers 5.0%"
    )
    # Of the trainer's 100 there are 80.
    one = found(update=50, tail=10, learner_wait=30, worker_wait=130)
    assert "no link" not in one.reason
    # Threads of one process may take more than its time.
    assert "no link" not in found(0, update=60, commit=70).reason


def test_a_run_without_times_says_so() -> None:
    reason = found().reason
    assert reason.startswith("sample takes 0% of the trainer's time, while 100% of it is in no ")
