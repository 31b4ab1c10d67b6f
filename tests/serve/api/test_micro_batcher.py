"""Requests that come together are answered as each would be alone."""

import asyncio
import json
import math

import httpx
import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.api import act as act_module
from replaylake.serve.api.act import ActEndpoint
from replaylake.serve.http.deadlines import ArrivalCounter
from replaylake.serve.messages import Request, RequestRefusedError
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.recording.decision_log import Clock, DecisionLog
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.router import Router, ServedPolicy

OBSERVATIONS = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)


class Here:
    """An endpoint in this process, and how many batches its policy has acted for."""

    def __init__(self, policy, log=None, exploration=None):
        self.sizes = []
        signer = DecisionSigner(b"k" * 32, "d")
        served = ServedPolicy("p", 2, self._counting(policy), "p@champion")
        self.serving = ServingState(Router(served), signer, log, exploration or Exploration())
        self.endpoint = ActEndpoint(lambda: self.serving, Metrics(), Clock())

    def _counting(self, policy):
        act = policy.act

        def counted(values, *more, **options):
            self.sizes.append(len(values))
            return act(values, *more, **options)

        policy.act = counted
        return policy

    def run(self, *bodies, num_behind=None):
        """Ask as if all had come at once; returns answers or what was raised."""

        async def ask():
            # The endpoint learns first what one costs.
            await self.endpoint(request({"observation": [0, 0, 0, 0]}))
            self.sizes.clear()
            tasks = []
            for i, body in enumerate(bodies):
                behind = len(bodies) - 1 - i if num_behind is None else num_behind
                tasks.append(asyncio.ensure_future(self.endpoint(request(body, behind))))
            return await asyncio.gather(*tasks, return_exceptions=True)

        return asyncio.run(ask())


def request(body, num_behind=0):
    raw = json.dumps(body).encode()
    return Request("/act", "POST", "/act", b"", raw.ljust(100), num_behind=num_behind)


def one(i, **more):
    return {"observation": OBSERVATIONS[i].tolist(), **more}


@pytest.fixture
def policy(package):
    return load_policy(package)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However slow the machine is today."""
    monkeypatch.setattr(act_module, "_QUICK_S", 60.0)


def test_each_gets_the_answer_to_its_own(policy):
    here = Here(policy)
    found = here.run(*(one(i, episode_id=f"e{i}") for i in range(12)))
    assert here.sizes == [12]
    alone = load_policy_answers(policy)
    for i, answer in enumerate(found):
        said = json.loads(answer.body)
        assert said["action"] == alone[i]
        assert said["log_prob"] == 0
        assert (said["policy"], said["version"]) == ("p", 2)
    assert len({json.loads(answer.body)["decision_id"] for answer in found}) == 12


def load_policy_answers(policy):
    return policy.act(OBSERVATIONS).actions.tolist()


def test_what_is_not_plain_goes_alone(policy):
    here = Here(policy)
    masked = one(1, action_mask=[True, False])
    batch = {"observations": OBSERVATIONS[:3].tolist()}
    seeded = one(2, seed=1, deterministic=False)
    found = here.run(one(0), masked, batch, seeded, one(4), one(5))
    assert sorted(here.sizes) == [1, 1, 3, 3]
    assert json.loads(found[1].body)["action"] == 0
    assert len(json.loads(found[2].body)["actions"]) == 3


def test_one_that_is_refused_refuses_no_other(policy):
    here = Here(policy)
    wrong = {"observation": [1, 2, "three", 4]}
    found = here.run(one(0), wrong, one(2))
    assert isinstance(found[1], RequestRefusedError)
    assert found[1].status == 422
    assert [json.loads(found[i].body)["action"] for i in (0, 2)] == [
        load_policy_answers(policy)[i] for i in (0, 2)
    ]


def test_one_that_the_graph_cannot_take_refuses_no_other(kit, tmp_path):
    weights = np.array([[1e30, -1e30]] * 4, np.float32)
    spec = PolicySpec(Box((4,)), Discrete(2), "categorical")
    graph = kit.linear_graph(weights, "logits", 4)
    here = Here(load_policy(kit.save_policy(tmp_path / "huge", spec, graph)))
    found = here.run(one(0), {"observation": [3e38] * 4}, one(2))
    assert isinstance(found[1], RequestRefusedError)
    assert found[0].status == found[2].status == 200


def test_all_hear_of_a_log_that_refuses(policy, tmp_path, monkeypatch):
    lake = open_lake(tmp_path / "lake", create=True)
    log = DecisionLog(lake.dataset("d"), policy.spec, "0" * 12)
    here = Here(policy, log)

    def refuse(decided):
        if sum(len(one.ids) for one in decided) > 1:
            raise StorageError("full")
        return True

    monkeypatch.setattr(log, "write_decisions", refuse)
    found = here.run(*map(one, range(4)))
    assert [type(error) for error in found] == [StorageError] * 4
    log.close()


def test_each_is_a_row_with_its_own_names(policy, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    log = DecisionLog(lake.dataset("d"), policy.spec, "0" * 12)
    here = Here(policy, log, Exploration(epsilon=0.5))
    bodies = [one(i, episode_id=f"e{i}", request_id=f"r{i}", step=i) for i in range(12)]
    found = [json.loads(answer.body) for answer in here.run(*bodies)]
    log.close()
    rows = lake.dataset("d").decisions.snapshot().read().to_pylist()
    by_id = {row["decision_id"]: row for row in rows}
    for i, said in enumerate(found):
        row = by_id[said["decision_id"]]
        assert (row["episode_id"], row["request_id"], row["step"]) == (f"e{i}", f"r{i}", i)
        assert row["observation"] == OBSERVATIONS[i].tolist()
        assert (row["action"], row["deterministic"]) == (said["action"], False)
        likely = 0.75 if said["action"] == load_policy_answers(policy)[i] else 0.25
        assert said["log_prob"] == row["log_prob"] == pytest.approx(math.log(likely))


def test_nobody_waits_for_one_that_never_comes(policy):
    here = Here(policy)
    found = here.run(one(0), one(1), num_behind=5)
    assert [answer.status for answer in found] == [200, 200]
    assert here.sizes == [2]


def test_one_whose_time_is_up_takes_no_other_along(policy):
    here = Here(policy)

    async def ask():
        await here.endpoint(request({"observation": [0, 0, 0, 0]}))
        first = asyncio.ensure_future(here.endpoint(request(one(0), 1)))
        await asyncio.sleep(0)
        first.cancel()
        second = await here.endpoint(request(one(1), 0))
        return first, second

    first, second = asyncio.run(ask())
    assert first.cancelled()
    assert second.status == 200


def test_arrivals_count_those_behind_and_forget_the_lost():
    async def ask():
        arrivals, loop = ArrivalCounter(), asyncio.get_running_loop()
        for _ in range(3):
            arrivals.record_arrival(loop)
        behind = [arrivals.start_next(), arrivals.start_next()]
        for _ in range(3):
            await asyncio.sleep(0)
        return behind, arrivals.start_next()

    assert asyncio.run(ask()) == ([2, 1], 0)


@pytest.mark.slow
def test_a_real_server_takes_together_what_comes_together(server):
    async def ask():
        async with httpx.AsyncClient(base_url=server.url) as client:
            asked = [client.post("/act", json=one(i % 12)) for i in range(200)]
            return await asyncio.gather(*asked)

    found = asyncio.run(ask())
    assert {answer.status_code for answer in found} == {200}
    assert len({answer.json()["decision_id"] for answer in found}) == 200
    for i, answer in enumerate(found):
        assert answer.json()["action"] == found[i % 12].json()["action"]
