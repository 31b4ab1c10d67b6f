"""`replaylake promote` and `replaylake rollback`: an alias moves, on record and by a gate."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.commands.ope import reward_text
from replaylake.cli.name_completion import complete_policies
from replaylake.cli.options import (
    DEFAULT_LAKE,
    ByOption,
    DebugOption,
    JsonOption,
    LakeOption,
    NoteOption,
    name_options,
    user_name,
)
from replaylake.cli.output.command_output import CommandOutput, count, table_lines
from replaylake.datastore.errors import CommitConflictError, ReplayLakeError

if TYPE_CHECKING:
    from replaylake.datastore.lake.policies.aliases import Move
    from replaylake.datastore.lake.policies.registry import PolicyRef, Registry
    from replaylake.offline.evaluation.ope.promotion import GatedPromotion
    from replaylake.offline.evaluation.ope.promotion_gate import GateNotApplicable, GateResult
    from replaylake.offline.evaluation.task_sets.gate import TaskGateResult
    from replaylake.serve.package.mlflow_registry import MlflowRegistry

_EXIT_NO: Final = 3
_CHAMPION: Final = "champion"
_GATE: Final = "Gate options"
_TASKS: Final = "Gate options for samples of tasks"
# Of the gate options, those that it also has with --measure.
_COMMON: Final = ("dataset", "where", "alpha", "margin")

MlflowOption = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="MODEL",
        show_default=False,
        help="Registered model of MLflow whose alias is set too, at the server that "
        "MLFLOW_TRACKING_URI names. The model version is created if it is missing.",
    ),
]
MlflowSourceOption = Annotated[
    str | None,
    typer.Option(
        "--mlflow-source",
        metavar="URI",
        show_default=False,
        help="URI of the model's files, if they are already stored, for a new model version. By "
        "default, they are uploaded.",
    ),
]


def promote(
    context: typer.Context,
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            autocompletion=complete_policies,
            show_default=False,
            help="Policy, as name:version, name@alias, or name (its newest version).",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="ALIAS",
            show_default=False,
            help="Alias to move, for example champion or challenger.",
        ),
    ],
    gate: Annotated[
        bool,
        typer.Option(
            "--gate",
            help="Promote only if off-policy evaluation, or with --measure samples of tasks, find "
            "the version better than the champion.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Promote even if the gate refuses; the refusal is recorded."),
    ] = False,
    mlflow: MlflowOption = None,
    mlflow_source: MlflowSourceOption = None,
    mlflow_only: Annotated[
        bool,
        typer.Option(
            "--mlflow-only",
            help="Move nothing in the lake, and set MLflow's alias if the lake's is at this "
            "version already, for example after a failure of MLflow.",
        ),
    ] = False,
    note: NoteOption = None,
    by: ByOption = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="NAME[@VERSION]",
            rich_help_panel=_GATE,
            help="Dataset with the logged episodes, or samples, to compare on, as NAME[@VERSION].",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            rich_help_panel=_GATE,
            help="Condition over episodes and their steps that selects whole episodes.",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            metavar="SQL",
            rich_help_panel=_GATE,
            help="Expression over the columns of steps for the reward; by default the one that "
            "both were trained with.",
        ),
    ] = None,
    gamma: Annotated[
        float, typer.Option("--gamma", metavar="G", rich_help_panel=_GATE, help="Discount factor.")
    ] = 1.0,
    explore: Annotated[
        str | None,
        typer.Option(
            "--explore",
            metavar="HOW",
            rich_help_panel=_GATE,
            help="Exploration of both policies, as in serve: epsilon=E or temperature=T. By "
            "default they take their best actions.",
        ),
    ] = None,
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            "--estimator",
            metavar="NAME",
            rich_help_panel=_GATE,
            help="Estimator to compute, as in ope. Repeatable, and all have to agree; by default "
            "snips or wpdis, and dr.",
        ),
    ] = None,
    alpha: Annotated[
        float,
        typer.Option(
            "--alpha",
            metavar="A",
            rich_help_panel=_GATE,
            help="Probability of passing a version that is no better.",
        ),
    ] = 0.025,
    margin: Annotated[
        float,
        typer.Option(
            "--margin",
            metavar="M",
            rich_help_panel=_GATE,
            help="Minimum improvement, in units of the return, or of the measure.",
        ),
    ] = 0.0,
    holdout: Annotated[
        float | None,
        typer.Option(
            "--holdout",
            metavar="SHARE",
            rich_help_panel=_GATE,
            help="Share of the episodes to evaluate on, as in ope.",
        ),
    ] = None,
    ignore_masks: Annotated[
        bool,
        typer.Option(
            "--ignore-masks",
            rich_help_panel=_GATE,
            help="Let both policies also take actions that the log's action masks forbid.",
        ),
    ] = False,
    unseen: Annotated[
        bool,
        typer.Option(
            "--unseen",
            rich_help_panel=_GATE,
            help="Assert that neither policy was trained on these episodes, where lineage does not "
            "say.",
        ),
    ] = False,
    updates: Annotated[
        int | None,
        typer.Option(
            "--updates",
            metavar="N",
            rich_help_panel=_GATE,
            help="FQE updates per fold.",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            rich_help_panel=_GATE,
            help="Random seed.",
        ),
    ] = 0,
    measure: Annotated[
        str | None,
        typer.Option(
            "--measure",
            metavar="NAME",
            rich_help_panel=_TASKS,
            help="Compare samples of tasks that both have made, by pass@1, pass@K or mean reward.",
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            metavar="SQL",
            rich_help_panel=_TASKS,
            help="Expression over the columns of steps that names an episode's task.",
        ),
    ] = "group_id",
    success: Annotated[
        str,
        typer.Option(
            "--success",
            metavar="SQL",
            rich_help_panel=_TASKS,
            help="Condition over episodes and their steps; a sample passed if it holds.",
        ),
    ] = "return > 0",
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Set an alias to a version, optionally after a gate.

    With --gate, the version is compared with the champion on the same held-out episodes, by
    off-policy evaluation; with --measure, on samples of the same tasks, as evaluate --dataset
    has them. Exit code 3 if it is not better, or if the data does not support the comparison.

    Example:
      replaylake promote clone:3 --to champion --gate --dataset live --explore epsilon=0.05
      replaylake promote agent:2 --to champion --gate --dataset math --measure pass@1
      replaylake promote clone:3 --to challenger --note 'ten times the data'
    """
    _check_gate_options(context, gate=gate, force=force, dataset=dataset, measure=measure)
    if mlflow_only:
        _check_mlflow_only(mlflow, gate=gate, note=note, by=by)
    elsewhere = _open_mlflow(mlflow, mlflow_source)
    from replaylake.datastore.lake.policies.exploration import parse_exploration

    exploration = parse_exploration(explore)
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    store = open_lake(lake)
    registry = store.registry
    ref = _candidate(registry, policy)
    now_at = registry.alias_version(ref.name, to)
    if mlflow_only and now_at != ref.version:
        found = "not set" if now_at is None else f"{ref.name}:{now_at}"
        raise CommitConflictError(
            f"promote: {ref.name}@{to} is {found}, expected {ref}: MLflow's alias is not set. Give "
            "the version that the lake's alias is at, or promote this one."
        )
    if now_at == ref.version:
        body = {"promoted": False, "policy": ref.name, "version": ref.version, "alias": to}
        lines = [f"{ref.name}@{to} is {ref} already"]
        body |= {"move": None, "gate": None}
        _report_move(report, body, lines, registry, ref, to, elsewhere, lake)
        return
    who = by or user_name()
    if not gate:
        moved = registry.aliases.move(
            ref.name, to, ref.version, kind="promote", expected=now_at or 0, by=who, note=note
        )
        body = {
            "promoted": True,
            "policy": ref.name,
            "version": ref.version,
            "alias": to,
            "move": moved.to_json(),
            "gate": None,
            "evaluation_id": None,
        }
        _report_move(report, body, [_format_move(moved)], registry, ref, to, elsewhere, lake)
        return
    from replaylake.datastore.lake.holdout import Holdout
    from replaylake.offline.evaluation.ope.evaluation_request import (
        EvaluationRequest,
        ProgressCallbacks,
    )
    from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
    from replaylake.offline.evaluation.ope.promotion import promote_through_gate
    from replaylake.offline.evaluation.task_sets.gate import TaskGateRequest
    from replaylake.offline.evaluation.task_sets.task_set import TaskSetRequest

    request: EvaluationRequest | TaskGateRequest
    if measure is not None:
        passed = None if _is_default(context, "success") else success
        samples = TaskSetRequest(str(dataset), task=task, success=passed, where=where)
        request = TaskGateRequest(samples, measure)
    else:
        request = EvaluationRequest(
            dataset=str(dataset),
            policy=str(ref),
            where=where,
            reward=reward,
            discount=gamma,
            holdout=None if holdout is None else Holdout(holdout),
            exploration=exploration,
            estimators=tuple(estimator) if estimator else None,
            ignore_masks=ignore_masks,
            unseen=unseen,
            seed=seed,
            fqe=FQEConfig() if updates is None else FQEConfig(updates=updates),
        )
    with report.progress("reading the steps", "") as progress:
        done = promote_through_gate(
            store,
            ref,
            to,
            request,
            alpha=alpha,
            margin=margin,
            force=force,
            by=who,
            note=note,
            callbacks=ProgressCallbacks(lambda stage: progress.stage(stage, ""), progress),
        )
    if done.unsaved is not None:
        report.print_message(f"the report is not saved in the lake: {done.unsaved}")
    lines = list(_promotion_lines(done))
    if done.move is None:
        report.print_result({**done.to_json(), "mlflow": None}, lines)
        raise typer.Exit(_EXIT_NO)
    _report_move(report, done.to_json(), lines, registry, ref, to, elsewhere, lake)


def rollback(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=complete_policies,
            show_default=False,
            help="Name of the policy.",
        ),
    ],
    alias: Annotated[
        str, typer.Option("--alias", metavar="ALIAS", help="Alias to roll back.")
    ] = _CHAMPION,
    to_version: Annotated[
        int | None,
        typer.Option(
            "--to-version", metavar="N", help="Version to go back to; by default the previous one."
        ),
    ] = None,
    from_version: Annotated[
        int | None,
        typer.Option(
            "--from-version",
            metavar="N",
            help="Roll back only if the alias is at this version, so that two people do not do it "
            "twice.",
        ),
    ] = None,
    mlflow: MlflowOption = None,
    mlflow_source: MlflowSourceOption = None,
    note: NoteOption = None,
    by: ByOption = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Set an alias back to its previous version.

    A repeated rollback goes back by one more version. No gate is evaluated.

    Example:
      replaylake rollback clone --note 'returns fell since noon'
      replaylake rollback clone --from-version 3 --to-version 1
    """
    elsewhere = _open_mlflow(mlflow, mlflow_source)
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    registry = open_lake(lake).registry
    move = registry.aliases.rollback(
        registry.resolve(policy).name,
        alias,
        to_version=to_version,
        expected=from_version,
        by=by or user_name(),
        note=note,
    )
    body, lines = {"move": move.to_json()}, [_format_move(move)]
    if elsewhere is None:
        report.print_result({**body, "mlflow": None}, lines)
        return
    ref = registry.resolve(f"{move.policy}:{move.to_version}")
    _report_move(report, body, lines, registry, ref, alias, elsewhere, lake)


def _open_mlflow(model: str | None, source: str | None) -> MlflowRegistry | None:
    """Return MLflow's registry where it is configured, before anything is moved.

    Raises: typer.BadParameter (exit 2), ConfigInvalidError.
    """
    if source is not None and model is None:
        raise typer.BadParameter("requires --mlflow.", param_hint="--mlflow-source")
    if model is None:
        return None
    if not model.strip():
        raise typer.BadParameter(
            "found an empty one, expected the name of a registered model.", param_hint="--mlflow"
        )
    from replaylake.serve.package.mlflow_registry import MlflowRegistry

    return MlflowRegistry(model, source)


def _check_mlflow_only(model: str | None, *, gate: bool, note: str | None, by: str | None) -> None:
    """Refuse options of a move, as there is none. Raises: typer.BadParameter (exit 2)."""
    if model is None:
        raise typer.BadParameter("requires --mlflow.", param_hint="--mlflow-only")
    for option, is_given in (("--gate", gate), ("--note", note), ("--by", by)):
        if is_given:
            raise typer.BadParameter(
                f"found {option} too, which is for a move: with it, nothing moves in the lake.",
                param_hint="--mlflow-only",
            )


def _report_move(
    report: CommandOutput,
    body: dict[str, Any],
    lines: list[str],
    registry: Registry,
    ref: PolicyRef,
    alias: str,
    elsewhere: MlflowRegistry | None,
    lake: str,
) -> None:
    """Print a promotion, and repeat it in MLflow where that is configured.

    The alias of the lake stays as it is whatever MLflow does. Raises: typer.Exit (1) if MLflow
    failed.
    """
    result: dict[str, Any] | None = None
    failure: str | None = None
    if elsewhere is not None:
        from replaylake.serve.package.mlflow_registry import AliasMovedError

        try:
            with report.waiting(f"setting {alias} in MLflow"):
                found = elsewhere.set_alias(registry, ref, alias)
        except (ReplayLakeError, OSError) as error:
            text = f"MLflow: {elsewhere.model}@{alias} is not set: {str(error).rstrip('.')}."
            # To repeat it would fail again, and is up to whoever moved the alias since.
            if not isinstance(error, AliasMovedError):
                words = ["promote", str(ref), "--to", alias, "--mlflow-only"]
                words += ["--mlflow", elsewhere.model]
                if elsewhere.mlflow_source is not None:
                    words += ["--mlflow-source", elsewhere.mlflow_source]
                words += ["--lake", lake]
                text += (
                    f" The lake's {ref.name}@{alias} is {ref}. Repeat it for MLflow: replaylake "
                    f"{shlex.join(words)}"
                )
            failure = name_options(text)
            result = {"error": failure}
        else:
            result = found.to_json()
            new = ", a new version" if found.is_created else ""
            lines = [
                *lines,
                f"MLflow: {found.model}@{alias} is version {found.version}{new}: {found.url}",
            ]
    report.print_result({**body, "mlflow": result}, lines)
    if failure is not None:
        report.print_message(f"error: {failure}")
        raise typer.Exit(1)


def _candidate(registry: Registry, text: str) -> PolicyRef:
    """Return the version that is meant: of a bare name the newest, as its champion is there."""
    return registry.resolve(text) if set(text) & set(":@") else registry.newest(text)


def _check_gate_options(
    context: typer.Context, *, gate: bool, force: bool, dataset: str | None, measure: str | None
) -> None:
    """Refuse options that mean nothing together. Raises: typer.BadParameter (exit 2)."""
    if gate and dataset is None:
        raise typer.BadParameter(
            "required with --gate: the episodes to compare the policies on.", param_hint="--dataset"
        )
    if gate:
        _check_measure_options(context, measure)
        return
    if force:
        raise typer.BadParameter(
            "requires --gate, whose refusal it overrides.", param_hint="--force"
        )
    for parameter in context.command.params:
        is_of_gate = getattr(parameter, "rich_help_panel", None) in (_GATE, _TASKS)
        if is_of_gate and not _is_default(context, str(parameter.name)):
            raise typer.BadParameter("requires --gate.", param_hint=parameter.opts[0])


def _check_measure_options(context: typer.Context, measure: str | None) -> None:
    """Refuse options of the other kind of gate. Raises: typer.BadParameter (exit 2)."""
    for parameter in context.command.params:
        panel, name = getattr(parameter, "rich_help_panel", None), str(parameter.name)
        if _is_default(context, name):
            continue
        if measure is None and panel == _TASKS:
            raise typer.BadParameter("requires --measure.", param_hint=parameter.opts[0])
        if measure is not None and panel == _GATE and name not in _COMMON:
            raise typer.BadParameter(
                "cannot be used with --measure, which compares samples of the policies themselves.",
                param_hint=parameter.opts[0],
            )


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name != "COMMANDLINE"


def _promotion_lines(done: GatedPromotion) -> Iterator[str]:
    from replaylake.offline.evaluation.task_sets.gate import TaskGateResult

    if isinstance(done.gate, TaskGateResult):
        yield from _task_gate_lines(done.gate)
    else:
        yield from gate_lines(done.gate)
    if done.move is None:
        yield (
            f"{done.candidate} is not promoted to {done.alias}: use --force to promote it anyway"
        )
    else:
        yield _format_move(done.move)


def _format_move(move: Move) -> str:
    before = "" if move.from_version is None else f", was {move.policy}:{move.from_version}"
    forced = ", forced against the gate" if move.forced else ""
    return f"{move.policy}@{move.alias} is {move.policy}:{move.to_version}{before}{forced}"


def gate_lines(gate: GateResult | GateNotApplicable) -> Iterator[str]:
    """Yield what a gate found: the two policies, a table of the estimators, the reasons."""
    from replaylake.offline.evaluation.ope.promotion_gate import GateNotApplicable

    if isinstance(gate, GateNotApplicable):
        yield f"refused: {gate.reason}"
        return
    report = gate.candidate
    numbers = f"{count(report.num_episodes, 'episode')}, {count(report.num_steps, 'step')}"
    candidate = f"{report.policy['policy']}:{report.policy['policy_version']}"
    against = gate.against
    if gate.champion is None:
        yield (
            f"{report.policy['policy']} has no champion to compare with: compared with the mean "
            "return of the log"
        )
    else:
        against = f"{gate.champion.policy['policy']}:{gate.champion.policy['policy_version']}"
    yield (
        f"{candidate} against {against}, acting {report.policy['acts']}, on "
        f"{report.dataset}@{report.version}, {numbers}"
    )
    yield f"  reward: {reward_text(report)}"
    if gate.champion is not None and gate.champion.reward.training != report.reward.training:
        yield f"  reward of the champion: {reward_text(gate.champion)}"
    if report.left_out:
        drops = ", ".join(f"{num:,} {reason}" for reason, num in report.left_out.items())
        yield f"  left out: {drops}"
    # What is said of the log is in both.
    champion_notes = gate.champion.notes if gate.champion is not None else ()
    for note in dict.fromkeys((*report.notes, *champion_notes)):
        yield f"  note: {note}"
    is_lacking = any(one.no_interval for one in gate.comparisons)
    rows = [
        {
            "estimator": one.estimator,
            "candidate": _round_digits(one.candidate),
            "champion" if gate.champion is not None else "log": _round_digits(one.against),
            "difference": _round_digits(one.difference),
            "from": _round_digits(one.low),
            "to": _round_digits(one.high),
            **({"interval": "no interval" if one.no_interval else ""} if is_lacking else {}),
        }
        for one in gate.comparisons
    ]
    if rows:
        yield ""
        yield from table_lines(rows, list(rows[0]))
    for name, why in gate.refused.items():
        yield f"no {name}: {why}"
    for who, one in (("candidate", report), ("champion", gate.champion)):
        if one is not None:
            yield f"{who}: {one.verdict}"
    for reason in gate.reasons:
        yield f"{'passed' if gate.passed else 'refused'}: {reason}"


def _task_gate_lines(gate: TaskGateResult) -> Iterator[str]:
    report, comparison = gate.report, gate.comparison
    if report is not None and comparison is not None:
        candidate = report.policies[-1].samples.policy
        against = f" against {report.policies[0].samples.policy}" if gate.has_champion else ""
        yield (
            f"{candidate}{against} on {report.dataset}@{report.version}, "
            f"{count(comparison.num_tasks, 'task')}"
        )
        if not gate.has_champion:
            yield f"{candidate.name} has no champion to compare with: compared with the margin"
        row = {
            "estimator": comparison.estimator,
            "candidate": _round_digits(comparison.candidate),
            "champion": _round_digits(comparison.against),
            "difference": _round_digits(comparison.difference),
            "from": _round_digits(comparison.low),
            "to": _round_digits(comparison.high),
        }
        if not gate.has_champion:
            del row["champion"], row["difference"]
        yield ""
        yield from table_lines([row], list(row))
    for reason in gate.reasons:
        yield f"{'passed' if gate.passed else 'refused'}: {reason}"


def _round_digits(value: float | None) -> float | None:
    """Return four significant digits, for a table whose columns align."""
    return None if value is None else float(f"{value:.4g}")
