"""`replaylake policies package`: a policy as a Bento or an MLflow model, to use elsewhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    PolicyArgument,
)
from replaylake.cli.output.command_output import CommandOutput, size

if TYPE_CHECKING:
    from replaylake.datastore.lake.policies.registry import PolicyRef

_LARGEST: Final = 4


class PackageFormat(StrEnum):
    """Format of a policy package for a server."""

    bento = "bento"
    mlflow = "mlflow"


def package(
    policy: PolicyArgument,
    output: Annotated[
        Path,
        typer.Option("--output", metavar="DIR", help="Directory to create.", show_default=False),
    ],
    kind: Annotated[
        PackageFormat,
        typer.Option("--format", help="Kind of package: a Bento, or a model for MLflow's pyfunc."),
    ] = PackageFormat.bento,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Package a policy as a Bento or an MLflow model.

    The Bento is a directory with the policy, ReplayLake's wheel, a lock of the requirements and a
    Dockerfile. It serves the policy without the lake.

    Example:
      replaylake policies package clone@champion --output clone-bento
      bentoml serve clone-bento
      replaylake policies package clone@champion --format mlflow --output clone-model
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    if kind is PackageFormat.mlflow:
        _package_mlflow_model(report, open_lake(lake).registry.resolve(policy), output)
        return
    from replaylake.serve.package.bento import package_bento

    ref = open_lake(lake).registry.resolve(policy)
    report.print_message(f"policy {ref} ({ref.selected_by})")
    with report.waiting(f"building a Bento of {ref}"):
        receipt = package_bento(ref, output)
    for warning in receipt.warnings:
        report.print_message(f"warning: {warning}")
    largest = sorted(receipt.requirements, key=lambda pin: -pin.num_bytes)[:_LARGEST]
    report.print_result(
        {**receipt.to_json(), "selected_by": ref.selected_by},
        [
            f"packaged {ref} in {receipt.output}, {size(receipt.num_bytes)}",
            *(f"  holds {text}" for text in receipt.includes),
            *(f"  without {text}" for text in receipt.excludes),
            f"installed it takes {size(receipt.installed_bytes)}: "
            + ", ".join(f"{pin.name} {size(pin.num_bytes)}" for pin in largest),
            f"install it: cd {receipt.output}/env/python && pip install -r requirements.txt",
            f"serve it: bentoml serve {receipt.output}",
            f"as an image: docker build -f {receipt.dockerfile} -t {receipt.tag} {receipt.output}",
        ],
    )


def _package_mlflow_model(report: CommandOutput, ref: PolicyRef, output: Path) -> None:
    from replaylake.serve.package.mlflow_model import package_mlflow_model

    report.print_message(f"policy {ref} ({ref.selected_by})")
    receipt = package_mlflow_model(ref, output)
    report.print_result(
        {**receipt.to_json(), "selected_by": ref.selected_by},
        [
            f"packaged {ref} in {receipt.output}, {size(receipt.num_bytes)}",
            f"load it: mlflow.pyfunc.load_model({receipt.output!r})",
        ],
    )
