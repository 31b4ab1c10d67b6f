"""`replaylake policies register`: a language model in a directory as a policy version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replaylake.cli.name_completion import complete_policies
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput


def register_policy(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            show_default=False,
            help="Causal language model: a directory that transformers wrote.",
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME",
            autocompletion=complete_policies,
            show_default=False,
            help="Name to register it under, as its next version.",
        ),
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Register a language model as a policy version.

    Copies its files into the lake, which is created if it does not exist. The output of `train
    language` keeps its lineage. Code in the directory is refused.

    Example:
      replaylake policies register base --policy agent
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.offline.language.registration import register_language_model

    report = CommandOutput(as_json)
    store = open_lake(lake, create=True)
    ref = register_language_model(store, policy, directory)
    entry = store.registry.show(ref)
    run_id = entry["run_id"] or None
    body = {
        "policy": ref.name,
        "version": ref.version,
        "run_id": run_id,
        "package_sha256": ref.manifest_sha256,
    }
    origin = "its training data are unknown" if run_id is None else f"trained by run {run_id}"
    report.print_result(body, [f"registered {directory} as {ref}: {origin}"])
