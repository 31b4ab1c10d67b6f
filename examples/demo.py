"""The whole loop, once, on a real log: what `make demo` runs.

Every step prints the `replaylake` command that does it. The lake is `./demo/lake`, made afresh each
time. Nothing but the standard library is used here, as any HTTP client could play this part.
"""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = Path("demo")
LAKE = FOLDER / "lake"
MARKER = FOLDER / "MADE_BY_DEMO"
SERVER_LOG = FOLDER / "server.log"
LOG = Path(os.path.relpath(HERE / "data" / "rllib_cartpole" / "cartpole-v1_large"))
COMMAND = str(Path(sys.executable).with_name("replaylake"))
NUM_SERVED_EPISODES = 10
_READY_TIMEOUT_S = 60


def main() -> None:
    """Run the loop and print what it gave."""
    started = time.monotonic()
    clear()
    port = free_port()
    os.environ["REPLAYLAKE_LAKE"] = str(LAKE)
    print(f"  $ export REPLAYLAKE_LAKE={LAKE}")

    step("Ingest RLlib's CartPole log")
    receipt = replaylake("ingest", str(LOG), "--dataset", "cartpole", "--env", "CartPole-v1")
    say(f"{receipt['steps']['committed']:,} steps in {receipt['episodes']['committed']} episodes")

    step("Ask SQL what is in it")
    query = 'select count(*) episodes, avg("return") mean_return from cartpole.episodes'
    logged = replaylake("sql", query)["rows"][0]
    say(f"{logged['episodes']} episodes, mean return {logged['mean_return']:.1f}")

    step("Clone the episodes that went well")
    first = train()
    say(f"policy {first['policy']}:{first['version']}")

    step("Play it")
    evaluation = evaluate("clone")
    say(f"mean return {evaluation['mean_return']:.1f} over {len(evaluation['returns'])} episodes")

    step("Package it as a Bento")
    bento = replaylake("policies", "package", "clone", "--output", str(FOLDER / "bento"))
    say(f"{bento['output']}: start it with bentoml serve {FOLDER / 'bento'}")

    step("Serve it with some exploration, and play over HTTP")
    with Server(port) as server:
        decisions = 0
        for seed in range(NUM_SERVED_EPISODES):
            num, episode_return = server.play(seed)
            decisions += num
            say(f"episode {seed + 1} of {NUM_SERVED_EPISODES}: return {episode_return:.0f}")
    decision_id = server.last_decision_id
    say(f"{decisions} decisions, {decisions} rewards sent back, server stopped")

    step("Join decisions and rewards into episodes")
    joined = replaylake("feedback", "join", "cartpole")
    say(
        f"{joined['joined']} rewards joined, {joined['episodes']} episodes, {joined['steps']} steps"
    )

    step("Train on both, the log and what was served")
    second = train()
    retrained = evaluate("clone")
    say(f"policy {second['policy']}:{second['version']}, mean {retrained['mean_return']:.1f}")

    step("Follow one served decision back to its data")
    lineage = replaylake("lineage", "--decision", decision_id)
    total = replaylake("sql", "select count(*) steps from cartpole.steps")["rows"][0]["steps"]

    decision, source = lineage["decision"], lineage["datasets"][0]
    table(
        [
            ("logged policy, mean return", f"{logged['mean_return']:.1f}"),
            ("learned policy, mean return (20 episodes)", f"{evaluation['mean_return']:.1f}"),
            ("retrained policy, mean return (20 episodes)", f"{retrained['mean_return']:.1f}"),
            ("decisions served", f"{decisions:,}"),
            ("rewards joined", f"{joined['joined']:,}"),
            ("steps now in the lake", f"{total:,}"),
            ("one decision", decision_id),
            (
                "  made by",
                f"{decision['policy']}:{decision['version']}, run {lineage['run']['run_id']}",
            ),
            ("  trained on", f"{source['dataset']}@{source['version']} where {source['where']}"),
            ("  content hash", source["content_hash"][:16]),
        ]
    )
    print(f"\nDone in {time.monotonic() - started:.0f} s. Now by hand:\n")
    print(f"    export PATH={Path(COMMAND).parent}:$PATH REPLAYLAKE_LAKE={LAKE.resolve()}")
    print("    replaylake explore --open")
    print("    replaylake serve clone --log-to cartpole --explore epsilon=0.05")
    print(
        "    curl -s localhost:3000/act -H 'content-type: application/json' "
        "-d '{\"observation\": [0, 0, 0.02, 0]}'"
    )
    print("    replaylake sql 'select policy, count(*) steps from cartpole.steps group by policy'")


class Server:
    """`replaylake serve` as a child process, and a client that plays CartPole through it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.last_decision_id = ""
        self._arguments = [
            *["serve", "clone", "--log-to", "cartpole", "--explore", "epsilon=0.05", "--port"],
            str(port),
        ]

    def __enter__(self) -> Server:
        show(self._arguments)
        with SERVER_LOG.open("w") as log:
            self._process = subprocess.Popen(
                [COMMAND, *self._arguments],
                stderr=log,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                sys.exit(f"the server did not start:\n{SERVER_LOG.read_text()}")
            time.sleep(0.1)
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def play(self, seed: int) -> tuple[int, float]:
        """Play one episode; return its number of decisions and its return."""
        environment = CartPole(seed)
        episode_id = f"demo-{seed}"
        total = 0.0
        for count in range(1, 501):
            observation = environment.observation()
            answer = self._post("/act", {"observation": observation, "episode_id": episode_id})
            terminated = environment.step(answer["action"])
            total += 1.0
            feedback = {
                "decision_id": answer["decision_id"],
                "reward": 1.0,
                "terminated": terminated,
                "truncated": count == 500 and not terminated,
            }
            if terminated or count == 500:
                feedback["final_observation"] = environment.observation()
            self._post("/feedback", feedback)
            self.last_decision_id = answer["decision_id"]
            if terminated:
                break
        return count, total

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.load(answer))


class CartPole:
    """The dynamics of CartPole-v1 (Barto, Sutton and Anderson 1983), in plain Python."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._state = [rng.uniform(-0.05, 0.05) for _ in range(4)]

    def observation(self) -> list[float]:
        """Return cart position, cart velocity, pole angle (rad) and pole velocity."""
        return list(self._state)

    def step(self, action: int) -> bool:
        """Push left (0) or right (1) with 10 N for 20 ms; return whether the pole fell."""
        x, x_dot, theta, theta_dot = self._state
        force = 10.0 if action == 1 else -10.0
        cos, sin = math.cos(theta), math.sin(theta)
        push = (force + 0.05 * theta_dot**2 * sin) / 1.1
        theta_acceleration = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        x_acceleration = push - 0.05 * theta_acceleration * cos / 1.1
        x, theta = x + 0.02 * x_dot, theta + 0.02 * theta_dot
        x_dot, theta_dot = x_dot + 0.02 * x_acceleration, theta_dot + 0.02 * theta_acceleration
        self._state = [x, x_dot, theta, theta_dot]
        return abs(x) > 2.4 or abs(theta) > 12 * 2 * math.pi / 360


def replaylake(*arguments: str) -> dict[str, Any]:
    """Print and run a command; return its `--json` answer."""
    show(arguments)
    done = subprocess.run([COMMAND, *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return dict(json.loads(done.stdout))


def train() -> dict[str, Any]:
    """Clone the logged episodes that went well, as the next version of `clone`."""
    return replaylake(
        *("train", "offline", "cartpole", "--algorithm", "bc", "--policy", "clone"),
        *("--where", "return >= 150", "--updates", "2000", "--seed", "0"),
    )


def evaluate(policy: str) -> dict[str, Any]:
    """Play 20 seeded episodes."""
    return replaylake("evaluate", policy, "--env", "CartPole-v1", "--episodes", "20", "--seed", "0")


def clear() -> None:
    """Remove what an earlier run left, and nothing else that is called `demo`."""
    if FOLDER.exists() and not MARKER.exists():
        sys.exit(f"{FOLDER.resolve()}: found a folder that is not this demo's; run it elsewhere.")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    MARKER.write_text("Made by examples/demo.py, which removes this folder when it runs again.\n")


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def step(title: str) -> None:
    """Announce a step."""
    print(f"\n{title}", flush=True)


def show(arguments: list[str] | tuple[str, ...]) -> None:
    """Print a command as a person would type it."""
    print(f"  $ replaylake {shlex.join(arguments)}", flush=True)


def say(text: str) -> None:
    """Print a result."""
    print(f"  {text}", flush=True)


def table(lines: list[tuple[str, str]]) -> None:
    """Print two aligned columns."""
    width = max(len(name) for name, _ in lines)
    print()
    for name, value in lines:
        print(f"  {name:<{width}}  {value}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; no server is left")
