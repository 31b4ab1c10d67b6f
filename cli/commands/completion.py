"""`replaylake completion`: the script with which a shell completes commands, options and names."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput


class Shell(StrEnum):
    """The shells that are supported."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[
        Shell, typer.Argument(metavar="SHELL", show_default=False, help="Shell: bash, zsh or fish.")
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the script of Tab completion for a shell.

    It completes commands, options, and the names of datasets, policies and runs of the lake that
    the line or REPLAYLAKE_LAKE names. The script is the same for every lake.

    Example:
      replaylake completion bash >> ~/.bashrc
      replaylake completion zsh >> ~/.zshrc
      replaylake completion fish > ~/.config/fish/completions/replaylake.fish
    """
    # Typer has no other way to its scripts than an option of the program, --show-completion.
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(
        prog_name="replaylake", complete_var="_REPLAYLAKE_COMPLETE", shell=shell.value
    )
    CommandOutput(as_json).print_result({"shell": shell.value, "script": script}, [script])
