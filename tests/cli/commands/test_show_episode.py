"""`replaylake show --episode`: a dialogue, turn by turn."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    record = {
        "token_ids": [[1, 2, 3, 4, 5, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0, 0]],
        "input_lengths": [5],
        "generation_logprobs": [[0.0, 0.0, -0.01, -2.0, -5.0, 0.0]],
        "rewards": [1.0],
        "content": [["1+1?", "2."]],
    }
    (tmp_path / "train_data_step1.jsonl").write_text(json.dumps(record))
    vocabulary = {"a": 0, "b": 1, "c": 2, "2": 3, "\u010a": 4, ".": 5}
    model = {"model": {"vocab": vocabulary}, "decoder": {"type": "ByteLevel"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(model))
    return tmp_path / "train_data_step1.jsonl"


def test_a_branch_of_the_agent_without_a_name(run: Any) -> None:
    log = Path(__file__).parents[2] / "fixtures/roll/proxy/rollout_dump_data.step_8.jsonl"
    assert run("ingest", log, "--dataset", "agents").code == 0
    name = "proxy_2_4_42_0_20260819_153611_250000"
    lines = run("show", "agents", "--episode", name).out.splitlines()
    branch = lines.index("~1 step 0  reward 1")
    assert lines[branch + 1 : branch + 4] == [
        "  branches from the agent without a name, step 0",
        "    user: seen 2",
        "  > assistant: test",
    ]


def test_a_dialogue(run: Any, tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    question = {"role": "user", "content": [{"type": "text", "text": "Look:\nat it"}, image]}
    record = {
        "id": "a",
        "messages": [
            question,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "7\x1b[31m"},
            {"role": "assistant", "content": "It is 7."},
            {"role": "user", "content": "Thanks"},
        ],
        "rewards": [0.25, 0.75],
        "terminated": True,
    }
    (tmp_path / "log.jsonl").write_text(json.dumps(record))
    assert run("ingest", tmp_path / "log.jsonl", "--dataset", "chats").code == 0
    first, second, *lines = run("show", "chats", "--episode", "a").out.splitlines()
    assert first.startswith("chats@1 episode ")
    assert first.endswith("/a (a)")
    assert re.fullmatch(r"  1 agent, 2 turns, return 1; group [0-9a-f]+", second)
    assert lines == [
        "",
        "step 0  reward 0.25",
        "    user: Look:",
        "      at it",
        "      [image_url: https://x/y.png]",
        '  > assistant: call f({"x": 1})',
        "",
        "step 1  reward 0.75",
        "    tool: 7\\x1b[31m",
        "  > assistant: It is 7.",
        "    user: Thanks",
        "  terminated",
    ]
    body = run("show", "chats", "--episode", "a", "--json").json
    assert [turn["reward"] for turn in body["turns"]] == [0.25, 0.75]
    assert body["turns"][0]["action"][0]["calls"] == ['f({"x": 1})']


def test_tokens_without_a_terminal(run: Any, samples: Path) -> None:
    assert run("ingest", samples, "--dataset", "rollouts").code == 0
    lines = run("show", "rollouts", "--episode", "step1/0", "--tokens").out.splitlines()
    assert "  3 sampled tokens, 2 trainable (66.7%)" in lines
    assert "  > #3(-0.01) #4(-2) #5(-5)(-)" in lines
    assert "  > 2." in lines
    own = samples.with_name("tokenizer.json")
    out = run("show", "rollouts", "--episode", "step1/0", "--tokens", "--tokenizer", own).out
    assert "  > 2(-0.01) \\n(-2) .(-5)(-)" in out.splitlines()
    body = run("show", "rollouts", "--episode", "step1/0", "--tokens", "--json").json
    assert body["turns"][0]["tokens"][2] == {
        "id": 5,
        "text": None,
        "log_prob": -5.0,
        "is_trainable": False,
    }


def test_shades_on_a_terminal(run: Any, samples: Path) -> None:
    assert run("ingest", samples, "--dataset", "rollouts").code == 0
    own = samples.with_name("tokenizer.json")
    command = [sys.executable, "-m", "replaylake.cli.main", "show", "rollouts", "--episode"]
    command += ["step1/0", "--tokens", "--tokenizer", str(own)]
    main, second = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    try:
        subprocess.run(command, stdout=second, check=True, timeout=60, env=environment)
        os.close(second)
        shown = os.read(main, 1 << 16).decode()
    finally:
        os.close(main)
    assert "\x1b[30;48;5;255m above 0.9 \x1b[0m" in shown  # the legend
    assert "\x1b[30;48;5;255m2\x1b[0m\x1b[30;48;5;223m\u21b2\x1b[0m" in shown
    assert "\x1b[30;48;5;209;9m.\x1b[0m" in shown


def test_columns_of_a_dataset_fit_on_a_terminal(run: Any, lake: Path) -> None:
    log = Path(__file__).parents[2] / "fixtures/verifiers/run/traces.jsonl"
    assert run("ingest", log, "--dataset", "graphs").code == 0
    command = [sys.executable, "-m", "replaylake.cli.main", "show", "graphs", "--lake", str(lake)]
    main, second = pty.openpty()
    environment = {**os.environ, "COLUMNS": "70"}
    try:
        subprocess.run(command, stdout=second, check=True, timeout=60, env=environment)
        os.close(second)
        lines = os.read(main, 1 << 16).decode().splitlines()
    finally:
        os.close(main)
    tables = lines[lines.index("  columns") :]
    assert max(map(len, tables)) <= 70
    assert "    reward_components    {name, score, weight}[]" in tables
    assert any("..." in line for line in tables)
    everywhere = run("show", "graphs").out.splitlines()
    assert max(map(len, everywhere)) > 80  # where it is no terminal, nothing is cut to its width


def test_wrong_usage(run: Any, samples: Path) -> None:
    assert run("ingest", samples, "--dataset", "rollouts").code == 0
    assert run("show", "rollouts", "--tokens").code == 2
    assert run("show", "rollouts", "--episode", "a", "--tokenizer", samples).code == 2
    assert run("show", "rollouts", "--episode", "a", "--report", "x.html").code == 2
    assert run("show", "rollouts", "--episode", "a").code == 1
    tokens = ("show", "rollouts", "--episode", "step1/0", "--tokens")
    assert run(*tokens, "--tokenizer", "none").code == 2


def test_what_users_wrote_is_printed_as_it_is(run: Any, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Write `where` and `name`.\nAnd then?"},
        {"role": "assistant", "content": "A clause: `where`."},
    ]
    record = {"id": "a\nstep 1  reward 1", "messages": messages, "rewards": [0.0]}
    (tmp_path / "log.jsonl").write_text(json.dumps(record))
    assert run("ingest", tmp_path / "log.jsonl", "--dataset", "chats").code == 0
    first, _, _, *lines = run("show", "chats", "--episode", record["id"]).out.splitlines()
    assert first.endswith("(a\\nstep 1  reward 1)")
    assert lines == [
        "step 0  reward 0",
        "    user: Write `where` and `name`.",
        "      And then?",
        "  > assistant: A clause: `where`.",
        "  terminated",
    ]


def test_a_long_dialogue_is_shown_without_work_for_what_is_not_printed(
    run: Any, samples: Path, lake: Path
) -> None:
    """Copying each token for --json, and importing pandas, took two thirds of the time."""
    assert run("ingest", samples, "--dataset", "tokens").code == 0
    episode = run("sql", "select episode_id from tokens.episodes", "--json").json["rows"][0]
    code = (
        "import sys\n"
        "from replaylake.cli.main import main\n"
        "from replaylake.datastore.interchange.export import dialogue\n"
        "def refuse(*given, **named): raise AssertionError\n"
        "dialogue.Dialogue.to_json = dialogue.SampledToken.__init__ = refuse\n"
        "code = main(sys.argv[1:])\n"
        "import pyarrow\n"
        "pyarrow.scalar('a')  # as reading a checkpoint does\n"
        "assert 'pandas' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", code, "show", "tokens", "--episode", episode["episode_id"]]
    command += ["--lake", str(lake)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()[0].split()[0]) == (0, "tokens@1"), done.stderr
