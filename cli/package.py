"""`replaylake package`: a policy as a Bento, to serve elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    PolicyArgument,
)
from replaylake.cli.report import Report, size


def package(
    policy: PolicyArgument,
    output: Annotated[
        Path,
        typer.Option("--output", metavar="DIR", help="A folder to make.", show_default=False),
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Package a policy as a Bento.

    The result is a folder that serves the policy without the lake.

    Example:
      replaylake package clone@champion --output clone-bento
      bentoml serve clone-bento
    """
    from replaylake.datastore.lake import open_lake
    from replaylake.serve.bento import package_bento

    report = Report(as_json)
    ref = open_lake(lake).registry.resolve(policy)
    report.say(f"policy {ref} ({ref.selected_by})")
    with report.waiting(f"building a Bento of {ref}"):
        receipt = package_bento(ref, output)
    report.answer(
        {**receipt.to_json(), "selected_by": ref.selected_by},
        [
            f"packaged {ref} in {receipt.output}, {size(receipt.num_bytes)}",
            *(f"  holds {text}" for text in receipt.includes),
            *(f"  without {text}" for text in receipt.excludes),
            f"serve it: bentoml serve {receipt.output}",
        ],
    )
