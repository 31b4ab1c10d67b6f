"""What docs/ENVIRONMENTS.md says to type works, in the folder of the file that it shows."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from replaylake.cli.main import main

_DOCS = (Path(__file__).parents[1] / "docs" / "ENVIRONMENTS.md").read_text()
# The policy that the last command names is whoever plays there.
_OWN_POLICY = "player_2=champion"


@pytest.mark.slow
def test_the_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (module,) = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", _DOCS, re.DOTALL)
    Path(module[0]).write_text(module[1])
    commands = re.findall(r"^    replaylake (.*)$", _DOCS, re.MULTILINE)
    assert len(commands) == 7
    try:
        for command in commands:
            typed = shlex.split(command.replace(_OWN_POLICY, "player_2=random"))
            assert main(typed) == 0, capsys.readouterr().err
            out = capsys.readouterr().out
            if typed[0] == "evaluate":
                # Four steps, of which the last is paid 1.
                assert "mean return 0.7 over 20 episodes" in out
    finally:
        sys.modules.pop("my_environments", None)
