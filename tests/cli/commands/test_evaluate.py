"""`replaylake evaluate`: one policy, several on the same seeds, and the pictures of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageSequence

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.environments.ids import spaces_of

ENV = "replaylake-test/Toss-v0"


class Toss(gymnasium.Env):
    """Two steps, each worth the action, and a start worth the seed; draws itself."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - Gymnasium's form
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._seed, self._step = seed or 0, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        start = 10.0 * self._seed if self._step == 1 else 0.0
        return np.zeros(1, np.float32), start + action, self._step == 2, False, {}

    def render(self) -> Any:
        return np.full((8, 8, 3), 40 * self._step + self._seed, np.uint8)


@pytest.fixture(autouse=True)
def env() -> Any:
    gymnasium.register(ENV, entry_point=Toss)
    yield
    del gymnasium.registry[ENV]


@pytest.fixture(autouse=True)
def policies(lake: Path, tmp_path: Path, env: None) -> None:
    """`coin:1` takes action 0, `coin:2` mostly 1."""
    opened = open_lake(lake, create=True)
    spec = PolicySpec(*spaces_of(ENV), "categorical")
    for number, logits in enumerate(([1.0, 0.0], [0.0, 1.0])):
        path = tmp_path / f"package{number}"
        manifest: dict[str, Any] = {"algorithm": "bc"}
        save_package(
            path, onnx=_constant(logits), spec=spec, manifest=manifest, learner_weights=None
        )
        opened.registry.register("coin", path, run_id=f"r{number}", lineage={"datasets": []})


def _constant(logits: list[float]) -> bytes:
    initializers = [
        numpy_helper.from_array(np.zeros((1, 2), np.float32), "w"),
        numpy_helper.from_array(np.array(logits, np.float32), "b"),
    ]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["observations", "w", "b"], ["logits"])],
        "constant",
        [helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["N", 1])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def test_one_policy(run: Any) -> None:
    ran = run("evaluate", "coin", "--env", ENV, "--episodes", "3")
    # The seeds 0, 1 and 2 start with 0, 10 and 20, and two steps bring 1 each.
    assert ran.out == (
        f"coin:2 (newest) in {ENV}: mean return 12 over 3 episodes, 95% interval "
        "-12.8414 to 36.8414\n"
    )
    body = run("evaluate", "coin:1", "--env", ENV, "--episodes", "2", "--seed", "5", "--json").json
    assert (body["policy"], body["version"], body["returns"]) == ("coin", 1, [50.0, 60.0])
    assert body["deterministic"] is True


def test_sampling(run: Any) -> None:
    arguments = ("evaluate", "coin:2", "--env", ENV, "--episodes", "40", "--json")
    body = run(*arguments, "--sample").json
    assert body["deterministic"] is False
    heads = np.array(body["returns"]) - 10 * np.arange(40)
    # Two draws an episode of probability e / (1 + e) = 0.73.
    assert set(heads) == {0.0, 1.0, 2.0}
    assert 1.2 < heads.mean() < 1.75
    assert run(*arguments, "--sample").json == body


def test_policies_are_compared_on_the_same_seeds(run: Any) -> None:
    ran = run("evaluate", "coin:1", "coin:2", "random", "--compare", "--env", ENV,
              "--episodes", "4")  # fmt: skip
    assert ran.code == 0, ran.err
    head, columns, *rows = ran.out.splitlines()
    assert head == (
        f"in {ENV}, 4 episodes each on seeds 0 to 3; differences from coin:1 (version), seed by "
        "seed"
    )
    assert columns.split("  ")[0] == "policy"
    assert rows[0].startswith("coin:1 (version)           15  -5.5") or "15" in rows[0]
    assert "2 to 2" in rows[1]
    assert rows[1].rstrip().endswith("100%    0%") or "100%" in rows[1]
    body = run("evaluate", "coin:1", "coin:2", "--compare", "--env", ENV,
               "--episodes", "4", "--json").json  # fmt: skip
    first, second = body["policies"]
    assert (first["version"], first["difference"]) == (1, None)
    assert (second["version"], second["difference"]) == (2, 2.0)
    assert (second["difference_ci_low"], second["difference_ci_high"]) == (2.0, 2.0)
    assert (second["share_better"], second["share_equal"]) == (1.0, 0.0)
    assert second["returns"] == [2.0, 12.0, 22.0, 32.0]


def test_a_video_of_the_first_episodes(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "coin.png"
    ran = run("evaluate", "coin:2", "--env", ENV, "--episodes", "3", "--video", path,
              "--video-episodes", "2")  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.err.splitlines()[-1] == f"wrote {path}  6 frames"
    with Image.open(path) as image:
        shades = [one.convert("RGB").getpixel((0, 0))[0] for one in ImageSequence.Iterator(image)]
    assert shades == [0, 40, 80, 1, 41, 81]
    assert run("evaluate", "random", "--env", ENV, "--episodes", "1", "--video",
               tmp_path / "r.gif").code == 0  # fmt: skip


def test_a_picture_of_the_returns(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "returns.svg"
    ran = run("evaluate", "coin:1", "coin:2", "--compare", "--env", ENV, "--plot", path)
    assert ran.err.splitlines()[-1] == f"wrote {path}"
    text = path.read_text()
    assert "coin:1 (version): mean 95" in text
    assert "coin:2 (version): mean 97" in text
    assert run("evaluate", "coin", "--env", ENV, "--plot", tmp_path / "one.png").code == 0
    with Image.open(tmp_path / "one.png") as image:
        assert min(image.size) > 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("coin:1", "coin:2"), "expected one, or --compare"),
        (("coin", "--compare"), "found 1 policy, expected two or more"),
        (("coin", "coin:2", "--compare"), "twice"),
        (("coin:1", "coin:2", "--compare", "--video", "x.gif"), "--video"),
    ],
)
def test_wrong_usage(run: Any, arguments: tuple[str, ...], said: str) -> None:
    ran = run("evaluate", *arguments, "--env", ENV)
    assert ran.code == 2
    assert said in " ".join(ran.err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--video", "x.avi"), "expected .gif, .png, .mp4"),
        (("--video", "nowhere/x.gif"), "no folder"),
        (("--plot", "x.jpeg"), "expected .png, .svg, .pdf"),
        (("--plot", "nowhere/x.png"), "no folder"),
    ],
)
def test_a_picture_that_cannot_be_made_is_said_first(
    run: Any, arguments: tuple[str, ...], said: str
) -> None:
    run("evaluate", "coin", "--env", ENV, "--episodes", "1000000", *arguments).failed(said)


def test_an_environment_that_cannot_draw(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Toss.metadata, "render_modes", [])
    run("evaluate", "coin", "--env", ENV, "--video", "x.gif").failed("cannot be rendered")
    assert not Path("x.gif").exists()
