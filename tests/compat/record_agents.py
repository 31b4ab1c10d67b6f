"""Records agents of libraries that know nothing of the gateway, and compares what it recorded.

python tests/compat/record_agents.py PYTHON LIBRARY...

PYTHON: of the environment that has the libraries. The engine is that of the gateway's tests. Prints
a line for each library, and exits with 1 where one was not recorded as one episode of three steps.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from replaylake.datastore.lake.lake import open_lake

_HERE = Path(__file__).parent
_ENGINE = _HERE.parent / "serve" / "gateway" / "engine.py"
# Agent, step, action, and the step that it follows: the tool asks while its call waits.
_STEPS = [
    ("", 0, "CALL look", None),
    ("~1", 0, "FIND IT", ("", 0)),
    ("", 1, "FIND IT", None),
]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(stack, port, *command):
    process = stack.enter_context(subprocess.Popen(command))
    stack.callback(process.terminate)
    for _ in range(1200):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return process
        assert process.poll() is None, f"{command[0]} ended"
        time.sleep(0.1)
    raise TimeoutError(f"{command[0]} does not listen")


def read_steps(lake, library):
    """Return the agent, step, action and parent of each step, in the order of the calls."""
    text = (
        "select agent_id, step, action, tool_name, parent_agent_id, parent_step, episode_id "
        f"from agents.steps where source_episode_id = '{library}' order by env_step"
    )
    for _ in range(300):
        rows = open_lake(lake).sql(text).to_pylist()
        if len(rows) >= len(_STEPS):
            break
        time.sleep(0.1)
    assert len({row["episode_id"] for row in rows}) == 1, rows
    found = []
    for row in rows:
        is_fork = row["parent_step"] is not None
        parent = (row["parent_agent_id"], row["parent_step"]) if is_fork else None
        action = f"CALL {row['tool_name']}" if row["tool_name"] else row["action"]
        found.append((row["agent_id"], row["step"], action, parent))
    return found


def main(python, libraries):
    failed = False
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        lake, engine, port = Path(folder) / "lake", free_port(), free_port()
        start(stack, engine, sys.executable, str(_ENGINE), "vllm", str(engine))
        command = [
            str(Path(sys.executable).with_name("replaylake")),
            "gateway",
            "--lake",
            str(lake),
        ]
        command += ["--upstream", f"http://127.0.0.1:{engine}", "--dataset", "agents"]
        start(stack, port, *command, "--port", str(port))
        for library in libraries:
            url = f"http://127.0.0.1:{port}/episode/{library}/v1"
            environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
            done = subprocess.run(
                [python, str(_HERE / "run_agent.py"), library],
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode or done.stdout.strip() != "FIND IT":
                print(f"failed: {library}: {done.stdout}{done.stderr}")
                failed = True
                continue
            steps = read_steps(lake, library)
            is_equal = steps == _STEPS
            failed |= not is_equal
            print(f"passed: {library}, 3 steps" if is_equal else f"failed: {library}: {steps}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
