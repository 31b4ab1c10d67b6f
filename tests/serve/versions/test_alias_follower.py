"""An alias moves and servers follow: at once, without a failed request, and never to a bad one."""

import logging
import shutil
import threading
from collections import defaultdict

import httpx
import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import NotFoundError, PackageInvalidError, StorageError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy, save_package
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import check_servable, load_serving
from replaylake.serve.processes.check import check_server
from replaylake.serve.versions.alias_follower import parse_alias

GOOD = [0.1, 0.2, 0.3, 0.4]


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


@pytest.fixture
def register(kit, lake, tmp_path):
    """Register versions of `clone`: each acts on one element, so that its answer tells it."""
    made = []

    def register(spec=kit.CARTPOLE, graph=None):
        if graph is None:
            weights = np.zeros((4, 2), np.float32)
            weights[:, len(made) % 2] = 1.0
            graph = kit.linear_graph(weights, "logits", 4)
        folder = kit.save_policy(tmp_path / f"package-{len(made)}", spec, graph)
        made.append(folder)
        return lake.registry.register("clone", folder, run_id="01", lineage={})

    return register


def config(lake, ref, **fields):
    known = {"package": ref.path, "policy": ref.name, "version": ref.version, "lake": lake.path}
    return ServeConfig(**{**known, "reference": "clone@champion", **fields})


def test_what_is_followed():
    assert parse_alias("clone@challenger") == ("clone", "challenger")
    assert parse_alias("clone") == ("clone", "champion")
    assert parse_alias("clone:3") is None
    assert parse_alias(None) is None


def test_it_goes_where_the_alias_goes(lake, register):
    first, second = register(), register()
    lake.registry.set_alias("clone", "champion", 1)
    serving = load_serving(config(lake, first))
    router, follower = serving.router, serving.follower
    old = router.one
    follower.poll()
    assert router.one is old
    lake.registry.set_alias("clone", "champion", 2)
    follower.poll()
    assert (router.one.version, router.one.reference) == (2, "clone@champion")
    assert router.find_version("clone", 1) is old
    (following,) = follower.followed
    assert (following.last_change.from_version, following.last_change.to_version) == (1, 2)
    observations = np.eye(4, dtype=np.float32)
    expected = load_policy(second.path).act(observations).actions
    assert (router.one.policy.act(observations).actions == expected).all()
    assert (old.policy.act(observations).actions != expected).all()
    serving.close()


def test_a_worker_that_starts_again_begins_where_the_alias_is(lake, register):
    first = register()
    register()
    lake.registry.set_alias("clone", "champion", 2)
    serving = load_serving(config(lake, first))
    assert serving.router.one.version == 2
    serving.close()


def test_a_version_and_never_are_not_followed(lake, register):
    first = register()
    register()
    lake.registry.set_alias("clone", "champion", 2)
    for fields in ({"reference": "clone:1"}, {"reference": None}, {"follow_s": 0.0}):
        serving = load_serving(config(lake, first, **fields))
        assert (serving.follower, serving.router.one.version) == (None, 1)
        serving.close()
    # A policy's name alone is its champion, also one that is named later.
    serving = load_serving(config(lake, first, reference="clone"))
    assert serving.router.one.version == 2
    serving.close()


def refused_versions(kit):
    other_space = kit.PolicySpec(Box((3,)), Discrete(2), "categorical")
    other_dtype = kit.PolicySpec(Box((4,), "float64"), Discrete(2), "categorical")
    other_actions = kit.PolicySpec(Box((4,)), Discrete(3), "categorical")
    nan = np.full((4, 2), np.nan, np.float32)
    return {
        "observation space": (other_space, kit.linear_graph(np.ones((3, 2), "f4"), "logits", 3)),
        "float64": (other_dtype, kit.linear_graph(np.ones((4, 2), "f4"), "logits", 4)),
        "action space": (other_actions, kit.linear_graph(np.ones((4, 3), "f4"), "logits", 4)),
        "cannot act": (kit.CARTPOLE, kit.linear_graph(nan, "logits", 4)),
    }


@pytest.mark.parametrize("reason", ["observation space", "float64", "action space", "cannot act"])
def test_what_does_not_pass_is_refused_once_and_the_old_goes_on(
    kit, lake, register, caplog, reason
):
    first = register()
    register(*refused_versions(kit)[reason])
    third = register()
    lake.registry.set_alias("clone", "champion", 1)
    serving = load_serving(config(lake, first))
    lake.registry.set_alias("clone", "champion", 2)
    with caplog.at_level(logging.INFO, "replaylake.serve.versions.alias_follower"):
        for _ in range(3):
            serving.follower.poll()
    assert serving.router.one.version == 1
    (following,) = serving.follower.followed
    assert (following.last_refusal.version, following.num_refusals) == (2, 1)
    assert reason in following.last_refusal.reason
    (line,) = [record.getMessage() for record in caplog.records]
    assert "version 2 is refused, version 1 goes on" in line
    lake.registry.set_alias("clone", "champion", third.version)
    serving.follower.poll()
    assert serving.router.one.version == 3
    assert following.last_refusal is None
    serving.close()


def test_an_altered_package_and_a_foreign_one_are_refused(kit, lake, register, tmp_path):
    first, second, third = register(), register(), register()
    lake.registry.set_alias("clone", "champion", 1)
    serving = load_serving(config(lake, first))
    graph = second.path / "policy.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    lake.registry.set_alias("clone", "champion", 2)
    serving.follower.poll()
    (following,) = serving.follower.followed
    assert "sha256" in following.last_refusal.reason
    for file in third.path.iterdir():
        file.write_bytes((first.path / file.name).read_bytes())
    lake.registry.set_alias("clone", "champion", 3)
    serving.follower.poll()
    assert "as it was registered: the manifest was altered" in following.last_refusal.reason
    assert serving.router.one.version == 1
    serving.close()
    # From outside of a lake nothing vouches for the manifest but what it says.
    with pytest.raises(PackageInvalidError, match=r"names clone:1, expected clone:3"):
        load_serving(ServeConfig(first.path, "clone", 3))


def test_a_damaged_manifest_is_neither_loaded_nor_followed(lake, register, caplog):
    first, second = register(), register()
    lake.registry.set_alias("clone", "champion", 1)
    asked = config(lake, first, manifest_sha256=first.manifest_sha256)
    # A worker that is started again has what the first was told.
    asked = ServeConfig.from_environment(asked.to_environment())
    serving = load_serving(asked)
    path = second.path / "manifest.json"
    data = path.read_bytes()
    (following,) = serving.follower.followed
    for position in range(0, len(data), 40):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        following.last_refusal = None
        lake.registry.set_alias("clone", "champion", 2)
        serving.follower.poll()
        assert "manifest was altered" in following.last_refusal.reason
        assert serving.router.one.version == 1
        lake.registry.set_alias("clone", "champion", 1)
    assert "clone@champion: version 2 is refused, version 1 goes on: " in caplog.text
    serving.close()
    with pytest.raises(PackageInvalidError, match="manifest was altered"):
        load_serving(config(lake, first, canary=("clone:2=0.1",)))
    path.write_bytes(data)
    path = first.path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"n": 2', b'"n": 3'))
    for load in (load_serving, check_servable):
        with pytest.raises(PackageInvalidError, match="manifest was altered"):
            load(asked)
    (package, *_) = check_server(asked)
    assert (package.what, package.is_ok) == ("package", False)


def test_what_the_head_cannot_explore_is_refused(kit, lake, tmp_path):
    box = Box((1,), low=-1, high=1)
    for number, head in enumerate(("squashed_gaussian", "deterministic")):
        spec = kit.PolicySpec(Box((4,)), box, head)
        weights = np.ones((4, 1), np.float32)
        graph = (
            kit.linear_graph(weights, "actions", 4)
            if head == "deterministic"
            else two_outputs(weights)
        )
        folder = tmp_path / f"c{number}"
        save_package(folder, onnx=graph, spec=spec, manifest={}, learner_weights=None)
        ref = lake.registry.register("clone", folder, run_id="01", lineage={})
    lake.registry.set_alias("clone", "champion", 1)
    first = lake.registry.resolve("clone:1")
    serving = load_serving(config(lake, first, explore="temperature=1"))
    lake.registry.set_alias("clone", "champion", ref.version)
    serving.follower.poll()
    assert "found temperature with a policy" in serving.follower.followed[0].last_refusal.reason
    assert serving.router.one.version == 1
    serving.close()


def two_outputs(weights):
    from onnx import TensorProto, helper, numpy_helper

    names = ("means", "log_stds")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["observations", "w"], [name]) for name in names],
        "gaussian",
        [helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in names],
        [numpy_helper.from_array(weights, "w")],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


def test_a_lake_that_is_away_for_a_while_is_asked_again(lake, register, caplog):
    first = register()
    register()
    lake.registry.set_alias("clone", "champion", 1)
    serving = load_serving(config(lake, first))
    lake.registry.set_alias("clone", "champion", 2)
    follower, heard = serving.follower, []
    follower.on_look = lambda following: heard.append(following.unreachable)
    reader, follower._aliases = follower._aliases, Away()
    follower.poll()
    follower.poll()
    assert follower.followed[0].unreachable == "the network: away"
    assert len(caplog.records) == 1
    follower._aliases = reader
    follower.poll()
    assert serving.router.one.version == 2
    assert heard == ["the network: away", None]
    serving.close()


class Away:
    def alias_version(self, name, alias):
        raise StorageError("the network: away")


def test_canaries_are_loaded_checked_and_followed(kit, lake, register):
    first = register()
    register()
    register()
    lake.registry.set_alias("clone", "challenger", 2)
    fields = {"reference": "clone:1", "canary": ("clone@challenger=0.25",)}
    asked = config(lake, first, **fields)
    assert ServeConfig.from_environment(asked.to_environment()).canary == asked.canary
    check_servable(asked)
    serving = load_serving(asked)
    assert [(arm.served.version, arm.weight) for arm in serving.router.arms] == [
        (1, 0.75),
        (2, 0.25),
    ]
    lake.registry.set_alias("clone", "challenger", 3)
    serving.follower.poll()
    assert [arm.served.version for arm in serving.router.arms] == [1, 3]
    serving.close()
    register(*refused_versions(kit)["action space"])
    with pytest.raises(Exception, match="action space"):
        check_servable(config(lake, first, canary=("clone:4=0.1",)))
    with pytest.raises(NotFoundError):
        check_servable(config(lake, first, canary=("clone:9=0.1",)))


class Load:
    """Acts without a pause in some threads, and keeps what answered."""

    def __init__(self, url, num=4):
        self.answers, self.failures = [], []
        self._url, self._stopping = url, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def is_served(self, version):
        """Whether a version alone has answered of late."""
        last = self.answers[-200:]
        return len(last) == 200 and {answered for answered, _ in last} == {version}

    def _run(self):
        with httpx.Client(base_url=self._url) as client:
            while not self._stopping.is_set():
                try:
                    answer = client.post("/act", json={"observation": GOOD})
                    if answer.status_code != 200:
                        self.failures.append(answer.text)
                        continue
                    said = answer.json()
                    self.answers.append((said["version"], said["action"]))
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))


def served_version(server):
    """Return the version that a worker serves, by a connection of its own."""
    return httpx.get(f"{server.url}/policy").json()["version"]


@pytest.mark.slow
def test_two_workers_under_load_follow(kit, lake, register):
    first = register()
    lake.registry.set_alias("clone", "champion", 1)
    server = kit.start_server(
        package=first.path,
        policy="clone",
        version=1,
        reference="clone@champion",
        lake=lake.path,
        log_to="served",
        workers=2,
    )
    assert ServeConfig(first.path, "clone", 1).follow_s <= 0.5
    try:
        with Load(server.url) as load:
            for version in (2, 3):
                register()
                num = len(load.answers) + 50
                kit.wait_until(lambda num=num: len(load.answers) > num)
                lake.registry.set_alias("clone", "champion", version)
                # Connections enough for both workers.
                kit.wait_until(lambda v=version: {served_version(server) for _ in range(20)} == {v})
                kit.wait_until(lambda version=version: load.is_served(version))
        with httpx.Client(base_url=server.url) as client:
            said = client.get("/policy").json()
    finally:
        server.stop()
    assert load.failures == []
    assert {version for version, _ in load.answers} == {1, 2, 3}
    # The action is the version's own: nothing was answered half by one and half by the other.
    actions = defaultdict(set)
    for version, action in load.answers:
        actions[version].add(action)
    assert actions == {1: {0}, 2: {1}, 3: {0}}
    assert said["version"] == 3
    rows = lake.sql("select distinct policy_version as v from served.decisions order by 1")
    assert [row["v"] for row in rows.to_pylist()] == [1, 2, 3]


def test_a_lake_that_is_a_url_is_asked_less_often_and_gives_copies(kit, tmp_path):
    url = f"memory://reload-{tmp_path.name}"
    lake = open_lake(url, create=True)
    for number in range(2):
        folder = kit.save_policy(tmp_path / f"package-{number}")
        lake.registry.register("clone", folder, run_id="01", lineage={})
    lake.registry.set_alias("clone", "champion", 1)
    first = lake.registry.resolve("clone:1")
    asked = ServeConfig(first.path, "clone", 1, url, reference="clone@champion")
    serving = load_serving(asked)
    assert serving.follower.interval_s == 5.0
    lake.registry.set_alias("clone", "champion", 2)
    serving.follower.poll()
    assert serving.router.one.version == 2
    # All of it is in memory: the cache may let its copy go.
    shutil.rmtree(lake.registry.resolve("clone:2").path)
    assert serving.router.one.policy.act(np.ones((1, 4), np.float32)).actions.shape == (1,)
    serving.close()


def test_a_package_that_cannot_be_read_now_is_not_refused(lake, register):
    first = register()
    register()
    lake.registry.set_alias("clone", "champion", 1)
    serving = load_serving(config(lake, first))
    follower = serving.follower
    load = follower._load

    def away(name, version, reference):
        follower._load = load
        raise StorageError("the network: away")

    follower._load = away
    lake.registry.set_alias("clone", "champion", 2)
    follower.poll()
    (following,) = follower.followed
    assert (following.last_refusal, following.unreachable) == (None, "the network: away")
    follower.poll()
    assert (serving.router.one.version, following.unreachable) == (2, None)
    serving.close()
