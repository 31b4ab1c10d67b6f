"""The server of a language policy: versions on steps, moved aliases, canaries, engines that end.

Each test is the life of a server, which takes seconds to start.
"""

from __future__ import annotations

import os
import signal
import threading

import httpx
import pytest


def test_a_server_from_its_first_call_to_its_end(serve, lake, tmp_path, kit):
    server = serve("agent@champion", REFUSED="unstartable agent:3")

    # Steps have the version that answered, and rewards are joined.
    first = server.ask("hello")
    second = server.ask("hello", first, "and now?")
    assert first.startswith("agent:1 pid")
    assert second == first
    rows = server.steps(2)
    assert [(row["policy"], row["version"], row["step"]) for row in rows] == [
        ("agent", 1, 0), ("agent", 1, 1),
    ]  # fmt: skip
    assert {(row["reference"], row["share"]) for row in rows} == {("agent@champion", 1.0)}
    assert rows[0]["action_tokens"] == [1, 2]
    assert rows[0]["action_log_probs"] == [-0.5, 0]
    assert rows[0]["behavior_log_prob"] == -0.5
    report = {"episode_id": rows[0]["episode_id"], "reward": 2.5, "terminated": True}
    assert httpx.post(f"{server.url}/v1/feedback", json=report).status_code == 202
    kit.wait_until(lambda: [row["reward"] for row in server.steps(2)] == [0.0, 2.5])

    # A moved alias is followed, and calls in progress end as they began.
    pid = int(first.split()[-1])
    held: list[str] = []
    caller = threading.Thread(target=lambda: held.append(server.ask("hold")))
    caller.start()
    kit.wait_until((tmp_path / "held").exists)
    lake.registry.set_alias("agent", "champion", 2)
    kit.wait_until(lambda: server.ask("after").startswith("agent:2"))
    assert not held
    assert kit.is_running(pid)
    (tmp_path / "hold").touch()
    caller.join()
    assert held[0] == f"agent:1 pid {pid}"
    kit.wait_until(lambda: not kit.is_running(pid))

    # A version whose engine does not start is refused, and the one before stays.
    lake.registry.set_alias("agent", "champion", 3)
    assert any("version 3 is refused" in line for line in iter(server.process.stderr.readline, ""))
    assert server.ask("still?").startswith("agent:2")
    lake.registry.set_alias("agent", "champion", 2)

    # An engine that ends is started again, and calls wait for it.
    pid = int(server.ask("before").split()[-1])
    os.kill(pid, signal.SIGKILL)
    again = server.ask_again("again")
    assert again.startswith("agent:2")
    assert int(again.split()[-1]) != pid
    dying = {"model": "agent", "messages": [{"role": "user", "content": "die"}]}
    died = httpx.post(f"{server.url}/v1/chat/completions", json=dying, timeout=60)
    assert died.status_code == 502
    assert server.ask_again("at last").startswith("agent:2")
    kit.wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)

    answers = server.steps(server.num_calls)
    assert all(row["answer"].startswith(f"agent:{row['version']} ") for row in answers)
    pid = int(server.ask("goodbye").split()[-1])
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert not kit.is_running(pid)


@pytest.mark.slow
def test_a_canary_has_its_share_and_conversations_stay_with_it(serve, lake, kit):
    lake.registry.set_alias("agent", "challenger", 2)
    arguments = ("agent@champion", "agent@challenger=0.5")
    server = serve(*arguments)
    versions = {}
    for number in range(12):
        answer = server.ask("hello", episode=f"e{number}")
        versions[f"e{number}"] = answer.split()[0]
        assert server.ask("other", episode=f"e{number}") == answer
    # By the hash of the names.
    assert {*versions.values()} == {"agent:1", "agent:2"}
    # Without a name, the dialogue decides.
    dialogues = [["hello", server.ask("hello", agent=f"a{number}")] for number in range(12)]
    for number, (question, answer) in enumerate(dialogues):
        more = server.ask(question, answer, "more", agent=f"a{number}")
        assert more.split()[0] == answer.split()[0]
    rows = server.steps(48)
    assert all(row["answer"].startswith(f"agent:{row['version']} ") for row in rows)
    shares = {(row["version"], row["reference"], row["share"]) for row in rows}
    assert shares == {(1, "agent@champion", 0.5), (2, "agent@challenger", 0.5)}
    # A server that is started again assigns them alike; if it is killed, its engines end with it.
    server.process.terminate()
    assert server.process.wait(60) == 0
    again = serve(*arguments)
    for name, version in versions.items():
        assert again.ask("again", episode=name).split()[0] == version
    pids = set()
    for number, (question, answer) in enumerate(dialogues):
        more = again.ask(question, answer, "more again", agent=f"a{number}")
        assert more.split()[0] == answer.split()[0]
        pids.add(int(more.split()[-1]))
    again.process.kill()
    kit.wait_until(lambda: not any(map(kit.is_running, pids)))
