"""`replaylake train`: a policy from the lake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.config import read_options
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
)
from replaylake.cli.report import Report, count, interval_text, number_text
from replaylake.datastore.errors import ConfigInvalid

if TYPE_CHECKING:
    from replaylake.datastore.lake import Lake
    from replaylake.offline.train import TrainConfig, TrainResult
    from replaylake.offline.trainer import Progress


def offline(
    datasets: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[@VERSION]", show_default=False, help="Datasets of the same spaces."
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="NAME", help="Registered as its next version.", show_default=False
        ),
    ],
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            metavar="NAME",
            help="Required, here or in --config. bc, cql, iql, ...; d3rlpy:bc for d3rlpy's where "
            "we have our own.",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where", metavar="SQL", help="Whole episodes, by a condition over episodes."
        ),
    ] = None,
    where_steps: Annotated[
        str | None,
        typer.Option(
            "--where-steps", metavar="SQL", help="Which of their steps, by a condition over steps."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="SQL", help="Reward, as an expression over steps."),
    ] = None,
    weight: Annotated[
        str | None,
        typer.Option(
            "--weight",
            metavar="SQL",
            help="Draw steps in proportion to this expression over a step and its episode.",
        ),
    ] = None,
    updates: Annotated[
        int | None, typer.Option("--updates", metavar="N", help="Gradient steps.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Of weights and batches.")
    ] = None,
    env: Annotated[
        str | None,
        typer.Option("--env", metavar="ID", help="Evaluate the result in this Gymnasium id."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.toml", help="Options; flags and --set win."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="One option, as a TOML value or a bare word. Repeatable.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Learn a policy from datasets at rest.

    Registers it as a new version. Options in --config and --set are the training's (batch_size,
    discount, ...) or the algorithm's own.

    Example:
      replaylake train offline cartpole --algorithm bc --policy clone --env CartPole-v1
      replaylake train offline cartpole@1 live --algorithm cql --policy cql --set alpha=2.0
    """
    options = read_options(config, assignments or [])
    given = {"algorithm": algorithm, "updates": updates, "seed": seed}
    options |= {key: value for key, value in given.items() if value is not None}

    # After the options are parsed: torch takes a second to import.
    from replaylake.datastore.lake import open_lake
    from replaylake.offline.train import train

    report = Report(as_json)
    opened = open_lake(lake)
    settings = _settings(options)
    pinned = [_pinned(report, opened, text) for text in datasets]
    with (
        report.waiting("reading the episodes") as waiting,
        report.progress("read", "shards") as reading,
        report.progress("update", "") as progress,
    ):

        def tell_read(done: int, total: int) -> None:
            waiting.end()
            reading(done, total)

        def tell(done: Progress) -> None:
            waiting.end()
            rate = f"{done.updates_per_s:,.0f} updates/s"
            progress(done.update, done.updates, f"{_metrics(done.metrics)}  {rate}")

        result = train(
            opened,
            pinned,
            settings,
            policy_name=policy,
            where=where,
            where_steps=where_steps,
            reward=reward,
            weight=weight,
            env_id=env,
            on_reading=tell_read,
            on_progress=tell,
        )
    report.answer(_body(result, settings), _summary(result, settings))


def _settings(options: Mapping[str, Any]) -> TrainConfig:
    """Sort options into the training's own and the algorithm's.

    Raises: ConfigInvalid; typer.BadParameter (exit 2) where none is the algorithm.
    """
    from dataclasses import replace

    from replaylake.offline.options import from_options
    from replaylake.offline.train import OWN_OPTIONS, TrainConfig

    if "algorithm" not in options:
        raise typer.BadParameter(
            "found none, expected one such as bc, cql or iql, here or as `algorithm = ...` in "
            "--config.",
            param_hint="--algorithm",
        )
    own = set(OWN_OPTIONS)
    nested = options.get("options", {})
    if not isinstance(nested, dict):
        raise ConfigInvalid(f"training: options: found {nested!r}, expected a table of options.")
    theirs = {key: value for key, value in options.items() if key not in own | {"options"}}
    config = from_options(TrainConfig, {k: v for k, v in options.items() if k in own}, "training")
    return replace(config, options={**nested, **theirs})


def _pinned(report: Report, lake: Lake, text: str) -> str:
    """Say what a dataset holds; return it with that version, so that it is what is trained on."""
    snapshot = lake.snapshot(text)
    row = snapshot.sql(
        "SELECT count(*) AS n FROM (SELECT DISTINCT policy, policy_version FROM steps "
        "WHERE policy IS NOT NULL)"
    ).to_pylist()[0]
    policies = "behavior policy unknown"
    if row["n"]:
        policies = f"{row['n']:,} behavior " + ("policy" if row["n"] == 1 else "policies")
    report.say(
        f"snapshot {snapshot.dataset}@{snapshot.version}  {count(len(snapshot.files), 'shard')}  "
        f"{count(snapshot.num_steps, 'step')}  {policies}"
    )
    return f"{snapshot.dataset}@{snapshot.version}"


def _metrics(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:4])


def _body(result: TrainResult, config: TrainConfig) -> dict[str, Any]:
    return {
        "policy": result.policy.name,
        "version": result.policy.version,
        "run_id": result.run_id,
        "algorithm": config.algorithm,
        "datasets": result.datasets,
        "num_episodes": result.num_episodes,
        "num_steps": result.num_steps,
        "updates": config.updates,
        "seed": config.seed,
        "metrics": result.metrics,
        "updates_per_s": result.updates_per_s,
        "evaluation": None if result.evaluation is None else result.evaluation.to_json(),
    }


def _summary(result: TrainResult, config: TrainConfig) -> Iterator[str]:
    yield f"trained on {count(result.num_episodes, 'episode')}, {count(result.num_steps, 'step')}"
    yield (
        f"{count(config.updates, 'update')}  {_metrics(result.metrics)} (mean of the last tenth)  "
        f"{result.updates_per_s:,.0f} updates/s"
    )
    if result.evaluation is not None:
        done = result.evaluation
        yield (
            f"evaluated in {done.env_id}: mean return {number_text(done.mean_return)} over "
            f"{count(len(done.returns), 'episode')}{interval_text(done.ci_low, done.ci_high)}"
        )
    yield f"saved policy {result.policy}"
