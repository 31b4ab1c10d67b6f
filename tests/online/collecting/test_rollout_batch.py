import math
import pickle
import shutil
import time
from contextlib import closing
from dataclasses import replace

import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.environments.ids import spaces_of
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.rollout_batch import EpisodeNumbers, RecordingWorker, WorkerSpec
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.pools.local_pool import LocalPool


@pytest.mark.parametrize("on", ["folder", "s3"])
def test_a_worker_finds_the_package_where_the_drivers_copy_is_not(
    request, tmp_path, toys, loaded_die, on
):
    url = str(tmp_path / "lake")
    if on == "s3":
        url = f"s3://{request.getfixturevalue('bucket')}/lake"
    lake = open_lake(url, create=True)
    lake.registry.register("die", loaded_die, run_id="test", lineage={})
    shutil.rmtree(loaded_die)
    elsewhere = BehaviorPolicy("die", 1, tmp_path / "on another machine")
    order = WorkerSpec(lake.url, "d", "p", 0, range(2), elsewhere, RolloutConfig(f"{toys}:any"))
    acting = RecordingWorker(order)._localize_policies(elsewhere)
    assert (acting.load(None).spec.head, acting.version) == ("categorical", 1)


def _order(lake, toys, name="Countdown", *, records=True, **config):
    lake.dataset("toys").create(*spaces_of(f"{toys}:{name}-v0"))
    given = RolloutConfig(f"{toys}:{name}-v0", **config)
    return WorkerSpec(lake.url, "toys", "p", 0, range(6), BehaviorPolicy(), given, records=records)


_STEPS = "select seed, step, action, terminated or truncated as ended from toys.steps order by 1, 2"


def _in_lake(lake):
    return lake.sql(_STEPS).to_pylist()


def test_pieces_of_open_episodes_come_to_be_whole_in_the_lake(lake, toys):
    order = _order(lake, toys, envs_per_worker=2, seed=4)
    worker = RecordingWorker(order)
    dataset, num, open_ = lake.dataset("toys"), 0, []
    while True:
        shipment = worker.collect_batch(2, math.inf, with_open=True)
        assert (shipment.pieces, shipment.blocked_reason) == ((), None)
        assert shipment.written.num_steps == shipment.num_steps > 0
        assert shipment.first_step_at <= shipment.last_step_at <= time.time()
        for link in ("env_step", "inference", "encode", "shard_write"):
            assert shipment.timings.totals["workers", link].items == shipment.num_steps
        num += len(shipment.ends)
        open_.append(len(shipment.open_episodes))
        dataset.commit([shipment.written], producer="p", sequence=len(open_))
        if shipment.exhausted:
            break
    assert (num, open_[-1], max(open_)) == (6, 0, 2)
    incomplete = lake.sql("select count(*) as n from toys.episodes where not complete")
    assert incomplete.to_pylist() == [{"n": 0}]
    assert [row["step"] for row in _in_lake(lake)] == [0, 1, 0, 1, 2, 0, 0, 1, 0, 1, 2, 0]


def test_what_is_not_recorded_is_handed_over(lake, toys):
    worker = RecordingWorker(_order(lake, toys, records=False, seed=4))
    shipment = worker.collect_batch(100, math.inf)
    assert shipment.written is None
    assert shipment.exhausted
    assert sorted(len(piece) for piece in shipment.pieces) == [1, 1, 2, 2, 3, 3]
    copy = pickle.loads(pickle.dumps(shipment))
    assert [end.seed for end in copy.ends] == [piece.extras["seed"][0] for piece in copy.pieces]
    assert (_shards(lake), lake.dataset("toys").snapshot().version) == ([], 0)


def _shards(lake):
    return [*lake.path.rglob("*.parquet")]


def test_every_kind_of_observation_reaches_the_lake(lake, toys):
    worker = RecordingWorker(_order(lake, toys, "Museum", envs_per_worker=2, seed=298))
    shipment = worker.collect_batch(100, math.inf)
    lake.dataset("toys").commit([shipment.written], producer="p", sequence=0)
    rows = lake.sql(
        "select seed, step, observation.said, observation.place, observation.pair._0 as half,"
        " action, final_observation.said as last from toys.steps order by 1, 2"
    ).to_pylist()
    assert [row["said"] for row in rows] == [f"{row['seed']}.{row['step']}" for row in rows]
    assert [row["place"] for row in rows] == [row["seed"] / 7 + row["step"] for row in rows]
    assert [row["half"] for row in rows] == [row["step"] - 4 for row in rows]
    assert {row["last"] for row in rows} == {
        None, "298.2", "299.3", "300.1", "301.2", "302.3", "303.1",
    }  # fmt: skip
    assert all(0 <= row["action"][0] < 3 and 0 <= row["action"][1] < 2 for row in rows)


def test_a_full_disk_keeps_the_steps_in_the_worker(lake, toys, nearly_full_disk):
    worker = RecordingWorker(_order(lake, toys, envs_per_worker=2, seed=4))
    with nearly_full_disk(100):
        refused = [worker.collect_batch(100, math.inf), worker.collect_batch(100, math.inf)]
    for shipment in refused:
        assert "No space left" in shipment.blocked_reason
        assert (shipment.written, shipment.num_steps, shipment.ends) == (None, 0, ())
        assert not shipment.exhausted
    assert _shards(lake) == []
    shipment = worker.collect_batch(100, math.inf)
    assert (shipment.blocked_reason, shipment.num_steps, len(shipment.ends)) == (None, 12, 6)
    assert shipment.exhausted
    lake.dataset("toys").commit([shipment.written], producer="p", sequence=0)
    assert len(_in_lake(lake)) == 12
    assert worker.collect_batch(100, math.inf).written is None


def test_a_pool_in_process_answers_in_the_order_of_asking(lake, toys):
    order = _order(lake, toys, envs_per_worker=1, seed=4)
    orders = [
        replace(order, worker=i, episodes=EpisodeNumbers(i, 2), records=False) for i in range(2)
    ]
    with closing(LocalPool(orders, interval_s=math.inf)) as pool:
        assert (pool.size, pool.receive(0)) == (2, None)
        pool.request_steps(1, 5)
        pool.broadcast(BehaviorPolicy("other", 7))
        pool.request_steps(0, 1)
        first, second = pool.receive(0), pool.receive(0)
        assert pool.receive(0) is None
    assert (first.worker, second.worker) == (1, 0)
    assert (first.num_steps, second.num_steps) == (5, 1)
    # Seeds 5, 7 and the first step of 9 by worker 1; of seed 4 the first of two by worker 0.
    assert [(end.seed, end.number) for end in first.ends] == [(5, 1), (7, 3)]
    assert second.ends == []
    assert {*first.pieces[0].policy_versions.tolist()} == {7}
