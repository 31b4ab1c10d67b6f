"""`replaylake policies import`: import a policy of another library as a policy version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, count

if TYPE_CHECKING:
    from replaylake.offline.importing.import_policy import PolicyImport


def import_policy(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="File of the policy."),
    ],
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="NAME", show_default=False, help="Name to register it under."
        ),
    ],
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            metavar="NAME[@VERSION]",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset with the observation and action spaces of the policy, which is tested on "
            "its first steps.",
        ),
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Format of the file: sb3, d3rlpy, cleanrl, onnx, xgboost or torchscript; by "
            "default it is recognized.",
        ),
    ] = "auto",
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="HEAD",
            help="Meaning of the outputs of an ONNX or TorchScript model: categorical, "
            "multi_categorical, q_values, gaussian, squashed_gaussian, deterministic, "
            "probabilities or choices.",
        ),
    ] = None,
    outputs: Annotated[
        str | None,
        typer.Option(
            "--outputs",
            metavar="NAMES",
            help="Names of the outputs of an ONNX model that make up the head, separated by "
            "commas.",
        ),
    ] = None,
    normalization: Annotated[
        Path | None,
        typer.Option(
            "--normalization",
            metavar="FILE",
            help="Statistics by which observations were normalized: an .npz file with mean, var "
            "and, optionally, epsilon and clip.",
        ),
    ] = None,
    frame_stack: Annotated[
        int,
        typer.Option(
            "--frame-stack",
            metavar="N",
            min=1,
            help="Number of consecutive observations that the policy acts on.",
        ),
    ] = 1,
    activation: Annotated[
        str | None,
        typer.Option(
            "--activation",
            metavar="NAME",
            help="Activation function of a CleanRL script's network, if it was changed.",
        ),
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option(
            "--expect",
            metavar="FILE",
            help="Best actions according to the library that trained the policy, a .npy file: the "
            "import is refused if the imported policy's differ.",
        ),
    ] = None,
    observations: Annotated[
        Path | None,
        typer.Option(
            "--observations",
            metavar="FILE",
            help="Observations of --expect, a .npy file; by default the first steps of the "
            "dataset, by episode id, agent id and step.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Import a policy that another library trained.

    Converts the file into a policy package, tests it on logged observations, and registers it.
    `ope`, `promote` and `serve` then accept it like any other policy. Pickles in the file are not
    executed.

    Example:
      replaylake policies import ppo.zip --policy ppo --dataset cartpole --expect actions.npy
      replaylake policies import model.onnx --policy net --dataset cartpole --head categorical
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.offline.importing.import_policy import ImportOptions
    from replaylake.offline.importing.import_policy import import_policy as import_file

    report = CommandOutput(as_json)
    options = ImportOptions(
        format=format,
        head=head,
        outputs=tuple(name.strip() for name in outputs.split(",")) if outputs else (),
        normalization=normalization,
        frame_stack=frame_stack,
        activation=activation,
    )
    result = import_file(
        open_lake(lake),
        dataset,
        policy,
        file,
        options=options,
        expect=expect,
        observations=observations,
    )
    report.print_result(result.to_json(), _lines(result, dataset))


def _lines(result: PolicyImport, dataset: str) -> Iterator[str]:
    yield f"imported {result.policy} ({result.algorithm}), head {result.head}"
    tried = f"tested on {count(result.num_observations, 'observation')} of {dataset}"
    if result.agreement is not None:
        tried += f": its best action is the logged one in {result.agreement:.1%} of them"
    yield tried
    if result.num_compared:
        line = f"compared with {count(result.num_compared, 'expected action')}: the same"
        if result.max_difference is not None:
            line += f", to {result.max_difference:.1e}"
        if result.num_ties:
            line += f", but {result.num_ties:,} differ between actions of equal score"
        yield line
        if result.num_distinct == 1:
            yield "  all of them are the same action, which shows little: give different ones"
    else:
        yield "compared with no expected actions: give some with --expect"
    if result.not_carried:
        yield "the package may lack:"
        yield from (f"  {note}" for note in result.not_carried)
