"""A lake for the explorer, with hostile texts in every field, and pages of it."""

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.decisions import (
    decisions_encoder,
    ensure_feedback_tables,
    rewards_encoder,
)
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.package import save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.runs.metrics import MetricsLog
from replaylake.serve.explorer.app import create_explorer

HOSTILE = "</td><script>document.title='owned'</script><img src=x onerror=alert(1)>'\"&\u202e$x"


class PageText(HTMLParser):
    """A page taken apart: tags with their attributes, and texts. What is opened is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "link", "input", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def links(self) -> list[str]:
        return [a["href"] for tag, a in self.tags if tag == "a"]


class Reader:
    """Reads pages of one lake."""

    def __init__(self, lake: Lake, **options: Any) -> None:
        self.lake = lake
        self.app = create_explorer(lake, **options)
        self.client = TestClient(self.app, base_url="http://localhost")

    def page(self, path: str, status: int = 200) -> PageText:
        answer = self._get(path, b'data-refresh="')
        assert answer.status_code == status, answer.text
        page = PageText(answer.text)
        # Nothing of the data runs: scripts are files of the explorer, or blocks of JSON.
        for tag, attributes in page.tags:
            assert not [name for name in attributes if name.startswith("on") or name == "style"]
            if tag == "script":
                is_file = "/static/" in attributes.get("src", "")
                assert is_file or attributes["type"] == "application/json"
            assert tag != "img" or attributes["src"].startswith("/datasets/")
        return page

    def fields(self, path: str, identity: str) -> dict[str, str]:
        """Return what a form of a page sends, by the form's id, without its buttons."""
        found: dict[str, str] = {}
        is_within = False
        for tag, attributes in self.page(path).tags:
            if tag == "form":
                is_within = attributes.get("id") == identity
            elif tag == "input" and is_within and "name" in attributes:
                found.setdefault(attributes["name"], attributes.get("value", ""))
        return found

    def post(self, path: str, fields: dict[str, str], **headers: str) -> Any:
        """Send a form as a browser does from a page of the explorer."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"origin": "http://localhost", "sec-fetch-site": "same-origin", **given}
        sent = {name: value for name, value in sent.items() if value}
        return self.client.post(path, data=fields, headers=sent, follow_redirects=False)

    def _get(self, path: str, unfinished: bytes) -> Any:
        """Read an address, again while it says that its profile is being computed."""
        deadline = time.monotonic() + 120
        while unfinished in (answer := self.client.get(path)).content:
            assert time.monotonic() < deadline
        return answer

    def json(self, path: str, status: int = 200) -> Any:
        answer = self._get(path, b'"progress": [')
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        return json.loads(answer.content)


def make_episode(name: str, num: int, *, seed: int = 0, text: str = "plain") -> Episode:
    """Return an episode of two numbers and two actions, whose rewards are 0, 1, 2, ..."""
    rng = np.random.default_rng(seed)
    return Episode(
        name,
        observations=rng.normal(size=(num, 2)),
        actions=rng.integers(0, 2, num),
        rewards=np.arange(num, dtype=np.float64),
        terminated=True,
        behavior_log_probs=np.full(num, -0.7, np.float32),
        policies=np.full(num, text, dtype=object),
        policy_versions=np.full(num, 1),
        extras={"remark": np.full(num, text, dtype=object)},
    )


def make_generations(
    name: str, texts: list[str], *, agent: str = "", reward: float = 1.0, **extras: list[Any]
) -> Episode:
    """Return an episode of a language agent: a generation for each text, a token a character."""
    num = len(texts)
    ids = [[ord(letter) for letter in text] for text in texts]
    log_probs = [[-0.25 * place for place in range(len(text))] for text in texts]
    return Episode(
        name,
        observations=np.array([f"prompt {n}" for n in range(num)], object),
        actions=np.array(texts, object),
        rewards=np.array([0.0] * (num - 1) + [reward]),
        terminated=True,
        agent_id=agent,
        policy_versions=np.full(num, 3),
        extras={
            "observation_tokens": [[7] * 8 for _ in texts],
            "action_tokens": ids,
            "action_log_probs": log_probs,
            "proximal_log_probs": [[one - 0.2 for one in row] for row in log_probs],
            "action_advantages": [[reward - 0.5] * len(row) for row in ids],
            "group_id": [name.partition("#")[0]] * num,
            **extras,
        },
    )


@pytest.fixture(scope="session")
def explored_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """`walks`: 12 episodes of 3 to 14 steps; `images`: frames; `hostile`: texts; `one`: a row;
    `chats`: generations with tokens, in groups, one of them with branches.
    """
    lake = open_lake(tmp_path_factory.mktemp("explored") / "lake", create=True)
    walks = lake.dataset("walks")
    walks.append([make_episode(f"w/{n:02}", n + 3, seed=n) for n in range(11)])
    walks.append([make_episode("w/11", 14, seed=11, text="later")])
    lake.tag("walks@1", "first")
    lake.dataset("hostile").append([make_episode(HOSTILE, 5, text=HOSTILE)])
    single = Episode("o/0", np.zeros((1, 2)), np.zeros(1, np.int64), np.zeros(1), terminated=True)
    lake.dataset("one").append([single])
    frames = np.random.default_rng(0).integers(0, 255, (6, 8, 10, 3), dtype=np.uint8)
    seen = Episode("i/0", frames, np.zeros(6, np.int64), np.ones(6), terminated=True)
    lake.dataset("images").append([seen])
    chats = [make_generations(f"sum#{n}", ["4"] * (n + 1), reward=n / 4) for n in range(5)]
    chats.append(make_generations(f"{HOSTILE}#0", [HOSTILE, f"ok\n{HOSTILE}"]))
    main = make_generations("tree#0", ["plan", "ask", "done"], agent="solver")
    branch = {"parent_agent_id": ["solver", None], "parent_step": [0, None]}
    retry = make_generations("tree#0", ["again", "over"], agent=f"solver~{HOSTILE}", **branch)
    lake.dataset("chats").append([*chats, main, retry])
    lake.registry.record_run("01run", {"run_id": "01run", "kind": "offline", "status": "done"})
    return lake


@pytest.fixture(scope="session")
def explored(explored_lake: Lake) -> Reader:
    return Reader(explored_lake)


@pytest.fixture(scope="session")
def reader_type() -> type[Reader]:
    return Reader


@pytest.fixture(scope="session")
def page_type() -> type[PageText]:
    return PageText


@pytest.fixture(scope="session")
def episode_maker() -> Callable[..., Episode]:
    return make_episode


@pytest.fixture(scope="session")
def generations_maker() -> Callable[..., Episode]:
    return make_generations


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE


@pytest.fixture(scope="session")
def browser(chromium_path: str) -> Iterator[Any]:
    """A Chromium for all tests that drive one."""
    # pytest's importlib mode puts no test folder on the path.
    path = Path(__file__).with_name("browser_client.py")
    spec = importlib.util.spec_from_file_location("browser_client", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    chromium = module.Browser(chromium_path)
    yield chromium
    chromium.close()


@pytest.fixture
def gate_lake(tmp_path: Path, kit: Any) -> Lake:
    """p:1 takes action 0, which earns nothing; p:2 takes 1, which earns 1. `log` has both."""
    lake = open_lake(tmp_path / "gate" / "lake", create=True)
    for place, values in enumerate(([[1.0, 0.0]], [[0.0, 1.0]])):
        graph = kit.linear_graph(np.array(values, np.float32), "q_values", 1)
        spec = PolicySpec(Box((1,)), Discrete(2), "q_values")
        package = kit.save_policy(tmp_path / "gate" / str(place), spec, graph)
        lake.registry.register("p", package, run_id="r", lineage={"datasets": []})
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 2, 400)
    lake.dataset("log").create(Box((1,)), Discrete(2))
    lake.dataset("log").append(
        Episode(
            f"e/{i:03}",
            observations=np.ones((1, 1), np.float32),
            actions=actions[i : i + 1],
            rewards=actions[i : i + 1] + 0.1 * rng.standard_normal(1),
            terminated=True,
            behavior_log_probs=np.log([0.5]).astype(np.float32),
        )
        for i in range(400)
    )
    return lake


@pytest.fixture
def empty(tmp_path: Path) -> Reader:
    return Reader(open_lake(tmp_path / "empty", create=True))


# Version, observation, number of decisions, reward of each, seconds until it comes; by episode.
EPISODES: dict[str, tuple[int, list[float], int, float | None, float]] = {
    "a": (1, [3.0, 0.0], 4, 1.0, 5.0),
    "b": (1, [3.0, 0.0], 4, 0.0, 500.0),
    "c": (2, [0.0, -1.0], 4, 2.0, 0.05),
    "d": (1, [3.0, 0.0], 2, None, 0.0),
}


def write_log(lake: Lake, name: str, policy: str, start_s: float) -> None:
    """Write decisions a second apart, an hour between episodes, and their rewards."""
    dataset = lake.dataset(name)
    ensure_feedback_tables(dataset, Box((2,)), Discrete(2))
    signer = DecisionSigner(lake.signing_key(), name, "00" * 6)
    decisions, rewards = [], []
    for place, (episode, (version, observation, num, reward, delay)) in enumerate(EPISODES.items()):
        for step in range(num):
            at = int((start_s + 3600 * place + step) * 1e6)
            (key,) = signer.issue(policy, version, at)
            decisions.append(
                {
                    "decision_id": key,
                    "episode_id": episode,
                    "timestamp": at,
                    "policy": policy,
                    "policy_version": version,
                    "observation": observation,
                    "action": 1,
                    "log_prob": -0.5 * version,
                    "deterministic": step == 0,
                }
            )
            if reward is not None:
                rewards.append(
                    {
                        "decision_id": key,
                        "timestamp": at + int(delay * 1e6),
                        "reward": reward,
                        "terminated": step == num - 1,
                        "truncated": False,
                    }
                )
    dataset.decisions.append(decisions_encoder(dataset)(decisions), producer="t", sequence=0)
    dataset.rewards.append(rewards_encoder(dataset)(rewards), producer="t", sequence=0)


@pytest.fixture(scope="session")
def served_lake(tmp_path_factory: pytest.TempPathFactory, kit: Any) -> Lake:
    """`live`: joined decisions of two versions of `clone`; `fresh`: not joined, hostile names."""
    lake = open_lake(tmp_path_factory.mktemp("served") / "lake", create=True)
    spec = PolicySpec(Box((2,)), Discrete(2), "categorical")
    moments = {"": {"mean": [0.0, 0.0], "std": [1.0, 2.0]}}
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("package") / str(number)
        save_package(
            folder,
            onnx=kit.linear_graph(np.eye(2, dtype=np.float32) * number, "logits", 2),
            spec=spec,
            manifest={"observation_statistics": moments} if number == 1 else {},
            learner_weights=None,
        )
        data = [{"dataset": "live", "version": 1, "where": "return >= 2", "num_steps": 12}]
        lineage = {"algorithm": "bc", "datasets": data}
        lake.registry.register("clone", folder, run_id="r", lineage=lineage)
    lake.registry.set_alias("clone", "champion", 1)
    start_s = float(int(time.time()) - 4 * 3600)  # whole seconds: differences are exact
    write_log(lake, "live", "clone", start_s)
    join_feedback(lake, "live")
    write_log(lake, "fresh", HOSTILE, start_s)
    return lake


@pytest.fixture(scope="session")
def traced_lake(tmp_path_factory: pytest.TempPathFactory, kit: Any) -> Lake:
    """Two runs on two versions of `walks`; what the first one's policy decided, and earned."""
    lake = open_lake(tmp_path_factory.mktemp("traced") / "lake", create=True)
    lake.dataset("walks").append([make_episode(f"w/{n}", n + 3, seed=n) for n in range(4)])
    lake.dataset("walks").append([make_episode("w/4", 12, seed=4, text="later")])
    where = "num_steps > 4"
    for place, run_id in enumerate(("01first", "02second")):
        used = {"dataset": "walks", "version": place + 1, "where": where, "num_episodes": 2 + place}
        lake.registry.record_run(
            run_id,
            {
                "run_id": run_id,
                "kind": "offline",
                "status": "done",
                "algorithm": "bc",
                "config": {"updates": 30, "learning_rate": 0.1 * (place + 1)},
                "datasets": [used],
                "started_ms": 1_700_000_000_000 + 60_000 * place,
                "ended_ms": 1_700_000_030_000 + 60_000 * place,
            },
        )
        with MetricsLog(lake.storage, run_id) as log:
            for update in range(10, 40, 10):
                log.add(update, {"loss": 1.0 / (update + place)}, time.time())
        folder = tmp_path_factory.mktemp("package") / str(place)
        spec = PolicySpec(Box((2,)), Discrete(2), "categorical")
        graph = kit.linear_graph(np.eye(2, dtype=np.float32), "logits", 2)
        save_package(folder, onnx=graph, spec=spec, manifest={}, learner_weights=None)
        lineage = {"algorithm": "bc", "datasets": [used]}
        lake.registry.register("clone", folder, run_id=run_id, lineage=lineage)
    lake.registry.set_alias("clone", "champion", 1)
    write_log(lake, "live", "clone", time.time() - 4 * 3600)
    join_feedback(lake, "live")
    return lake


@pytest.fixture(scope="session")
def sweep_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A sweep of three trials, `01sweep`: two are done, one is at work; and `02sweep`, of none."""
    lake = open_lake(tmp_path_factory.mktemp("sweep") / "lake", create=True)
    options = [
        {"learning_rate": 1e-5, "hidden_sizes": [64, 64], "note": "plain"},
        {"learning_rate": 1e-3, "hidden_sizes": [256, 256], "note": HOSTILE},
        {"learning_rate": 1e-1, "hidden_sizes": [64, 64], "note": "plain"},
    ]
    for sweep_id in ("01sweep", "02sweep"):
        record = {
            "run_id": sweep_id,
            "kind": "tune",
            "status": "done",
            "algorithm": "bc",
            "combinations": options,
            "measure": "selection/loss",
            "mode": "min",
        }
        lake.registry.record_run(sweep_id, record)
    for number, one in enumerate(options):
        run_id = f"0{number}trial"
        trial: dict[str, Any] = {
            "run_id": run_id,
            "kind": "offline",
            "status": "done" if number < 2 else "interrupted",
            "seed": number,
            "sweep": {"id": "01sweep", "trial": number, "options": one},
        }
        if number < 2:
            trial["selection"] = {"measure": "loss", "value": 0.5 - number / 4, "update": 10}
        lake.registry.record_run(run_id, trial)
    return lake
