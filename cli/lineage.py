"""`replaylake lineage`: from a served decision down to the files it was learned from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.report import Report, cell_text, count


def lineage(
    decision: Annotated[
        str | None, typer.Option("--decision", metavar="ID", help="A decision_id that /act gave.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="POLICY", help="name:version, name@alias or name."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", metavar="NAME", help="Down and up from a dataset.")
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Trace a decision, policy or dataset.

    Decision -> policy version -> training run -> dataset version, SQL and content hash -> ingests.

    Example:
      replaylake lineage --policy clone:1
      replaylake lineage --decision "$DECISION_ID" --json
    """
    given = [option for option in (decision, policy, dataset) if option is not None]
    if len(given) != 1:
        raise typer.BadParameter(
            "expected one of the three.", param_hint=["--decision", "--policy", "--dataset"]
        )
    from replaylake.datastore import lineage as trace
    from replaylake.datastore.lake import open_lake

    report = Report(as_json)
    opened = open_lake(lake)
    if decision is not None:
        body = trace.of_decision(opened, decision)
        report.answer(body, _decision_lines(body))
    elif policy is not None:
        body = trace.of_policy(opened, policy)
        report.answer(body, _policy_lines(body, ""))
    else:
        body = trace.of_dataset(opened, given[0])
        report.answer(body, _dataset_lines(body))


def _decision_lines(body: Mapping[str, Any]) -> Iterator[str]:
    decision = body["decision"]
    yield f"decision {decision['decision_id']}"
    yield f"  served into {decision['dataset']} at {decision['decided_at']}"
    if decision["logged"]:
        keys = ("observation", "action", "log_prob")
        yield "  " + ", ".join(f"{key} {_value(decision[key])}" for key in keys)
    else:
        yield "  not in the table of decisions yet"
    for reward in decision["rewards"]:
        ends = [key for key in ("terminated", "truncated") if reward[key]]
        yield "  " + ", ".join([f"reward {_value(reward['reward'])}", *ends])
    if decision["step"] is not None:
        yield f"  step {decision['step']['step']} of episode {decision['step']['episode_id']}"
    yield from _policy_lines(body, "  ")


def _policy_lines(body: Mapping[str, Any], indent: str) -> Iterator[str]:
    policy, run = body["policy"], body["run"]
    yield (
        f"{indent}policy {policy['policy']}:{policy['version']} ({policy['selected_by']}), "
        f"registered at {policy['registered_at']}"
    )
    yield (
        f"{indent}  run {run['run_id']}: {run['kind'] or 'not recorded'}, algorithm "
        f"{run['algorithm']}, seed {run['seed']}"
    )
    for data in body["datasets"]:
        yield from _selection_lines(data, f"{indent}    ")
        for ingest in data["ingests"]:
            yield _ingest_line(ingest, f"{indent}      ")


def _dataset_lines(body: Mapping[str, Any]) -> Iterator[str]:
    dataset = body["dataset"]
    yield (
        f"dataset {dataset['dataset']}@{dataset['version']}: {count(dataset['num_steps'], 'step')}"
    )
    for ingest in body["ingests"]:
        yield _ingest_line(ingest, "  ")
    for policy in body["policies"]:
        yield (
            f"  policy {policy['policy']}:{policy['version']}, algorithm {policy['algorithm']}, "
            f"run {policy['run_id']}"
        )
        yield from _selection_lines(policy["trained_on"], "    ")


def _selection_lines(data: Mapping[str, Any], indent: str) -> Iterator[str]:
    yield (
        f"{indent}dataset {data['dataset']}@{data['version']}: "
        f"{count(data['num_episodes'], 'episode')}, {count(data['num_steps'], 'step')}"
    )
    yield f"{indent}  content {data['content_hash']}"
    for key in ("where", "where_steps", "reward"):
        if data[key] is not None:
            yield f"{indent}  {key} {data[key]}"
    if not data["reproducible"]:
        yield f"{indent}  not reproducible: a purge took shards out of this version"
    for one in data["purged"]:
        yield f"{indent}  trained on episodes that purge {one} has removed since"


def _ingest_line(ingest: Mapping[str, Any], indent: str) -> str:
    versions = ingest["versions"]
    at = (
        f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]}-{versions[-1]}"
    )
    source = "" if ingest["source"] is None else f", source {ingest['source']}"
    return (
        f"{indent}from {ingest['producer']}: {count(ingest['num_episodes'], 'episode')}, "
        f"{count(ingest['num_steps'], 'step')}, {at}, {ingest['committed_at']}{source}"
    )


def _value(value: Any) -> str:
    return "unknown" if value is None else cell_text(value)
