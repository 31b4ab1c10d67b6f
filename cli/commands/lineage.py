"""`replaylake lineage`: from a decision down to what was learned, from an episode up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, cell_text, count


def lineage(
    decision: Annotated[
        str | None,
        typer.Option(
            "--decision",
            metavar="ID",
            help="Decision to trace, by the decision_id that /act returned.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="Policy to trace, as name:version, name@alias or name.",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="NAME",
            help="Dataset to trace, to its ingests and to the policies trained on it.",
        ),
    ] = None,
    episode: Annotated[
        str | None,
        typer.Option(
            "--episode",
            metavar="ID",
            help="Episode of --dataset to trace, to the policies trained on it.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Trace a decision, policy, dataset or episode.

    Decision -> policy version -> training run -> dataset version, SQL and content hash -> ingests;
    and back: episode -> versions and tags -> policies that learned from it -> when they served.

    Example:
      replaylake lineage --policy clone:1
      replaylake lineage --dataset cartpole --episode rollout/a1
      replaylake lineage --decision "$DECISION_ID" --json
    """
    sources = [option for option in (decision, policy, dataset) if option is not None]
    if len(sources) != 1:
        raise typer.BadParameter(
            "expected one of the three.", param_hint=["--decision", "--policy", "--dataset"]
        )
    if episode is not None and dataset is None:
        raise typer.BadParameter("expected --dataset beside it.", param_hint="--episode")
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.lineage import lineage as trace
    from replaylake.datastore.maintenance.lineage.episode_lineage import trace_episode

    report = CommandOutput(as_json)
    store = open_lake(lake)
    if decision is not None:
        body = trace.trace_decision(store, decision)
        report.print_result(body, _decision_lines(body))
    elif policy is not None:
        body = trace.trace_policy(store, policy)
        report.print_result(body, _policy_lines(body, ""))
    elif episode is not None:
        body = trace_episode(store, sources[0], episode)
        report.print_result(body, _episode_lines(body))
    else:
        body = trace.trace_dataset(store, sources[0])
        report.print_result(body, _dataset_lines(body))


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
        + (f", deleted at {policy['deleted_at']}" if policy["deleted_at"] else "")
    )
    yield (
        f"{indent}  run {run['run_id']}: {run['kind'] or 'not recorded'}, algorithm "
        f"{run['algorithm']}, seed {run['seed']}"
        + (f", in {run['env_id']}" if run["env_id"] else "")
    )
    for data in body["datasets"]:
        yield from _selection_lines(data, f"{indent}    ")
        for ingest in data["ingests"]:
            yield _ingest_line(ingest, f"{indent}      ")
    for move in body["moves"]:
        before = "" if move["from_version"] is None else f" from {move['from_version']}"
        by = "" if move["by"] is None else f" by {move['by']}"
        yield f"{indent}  {move['alias']} moved{before} to {move['to_version']} at {move['at']}{by}"
    yield from (f"{indent}  {_format_served(one)}" for one in body["served"])


def _episode_lines(body: Mapping[str, Any]) -> Iterator[str]:
    episode = body["episode"]
    yield f"episode {episode['episode_id']} of {episode['dataset']}"
    for span in body["versions"]:
        first, last = span["first"], span["last"]
        which = f"version {first}" if first == last else f"versions {first}-{last}"
        yield f"  in {which}" + (
            "" if span["holds"] == "yes" else ": unknown, its shards were deleted"
        )
    for tag in body["tags"]:
        yield f"  tag {tag['tag']}, version {tag['version']}"
    for ingest in body["ingests"]:
        yield _ingest_line(ingest, "  ")
    for policy in body["policies"]:
        suffix = ", deleted" if policy["deleted"] else ""
        learned = "learned from it" if policy["trained"] == "yes" else "unknown"
        yield f"  policy {policy['policy']}:{policy['version']}{suffix}: {learned}, {policy['why']}"
        yield from (f"    {_format_served(one)}" for one in policy["served"])
    if not body["policies"]:
        yield "  no policy learned from it"


def _format_served(one: Mapping[str, Any]) -> str:
    return (
        f"served into {one['dataset']}: {count(one['num_decisions'], 'decision')}, "
        f"{one['first_at']} to {one['last_at']}"
    )


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
    from replaylake.datastore.lake.holdout import describe_where

    name = f"dataset {data['dataset']}@{data['version']}"
    if data["since"] is not None:
        # Of a run that followed it: what it drew is not kept.
        name += f", followed from version {data['since']} on"
    if data["since"] is not None and data["content_hash"] is None:
        yield f"{indent}{name}"
    else:
        numbers = [
            f"an unknown number of {what}s"
            if data[f"num_{what}s"] is None
            else count(data[f"num_{what}s"], what)
            for what in (
                ("episode", "step")
                if data["num_sequences"] is None
                else ("episode", "sequence", "token")
            )
        ]
        yield f"{indent}{name}: {', '.join(numbers)}"
        yield f"{indent}  content {data['content_hash'] or 'unknown'}"
    for key in ("where", "where_steps", "where_sequences", "reward"):
        if data[key] is not None:
            value = describe_where(data[key]) if key == "where" else data[key]
            yield f"{indent}  {key} {value}"
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
    # What a run collects while it learns comes in pieces, of which each commit counts its own.
    what = "episode piece" if ingest["producer"].startswith("online/") else "episode"
    return (
        f"{indent}from {ingest['producer']}: {count(ingest['num_episodes'], what)}, "
        f"{count(ingest['num_steps'], 'step')}, {at}, {ingest['committed_at']}{source}"
    )


def _value(value: Any) -> str:
    return "unknown" if value is None else cell_text(value)
