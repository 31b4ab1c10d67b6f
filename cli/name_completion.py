"""Shell completion of names: the datasets, policies and runs of the lake."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake


def complete_datasets(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of datasets that begin with a text."""
    return _complete(context, incomplete, lambda lake: lake.datasets())


def complete_policies(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of policies that begin with a text."""
    return _complete(
        context, incomplete, lambda lake: {str(row["name"]) for row in lake.registry.list()}
    )


def complete_runs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of training runs, and the policies of runs, that begin with a text."""

    def find(lake: Lake) -> set[str]:
        runs = lake.registry.runs()
        policies = {
            f"{run['policy']}:{run['policy_version']}"
            for run in runs
            if run.get("policy_version") is not None
        }
        return policies | {str(run["run_id"]) for run in runs}

    return _complete(context, incomplete, find)


def _complete(
    context: typer.Context, incomplete: str, find: Callable[[Lake], Iterable[str]]
) -> list[str]:
    from replaylake.datastore.lake.lake import open_lake

    try:
        names = find(open_lake(context.params["lake"]))
    except Exception:
        # A lake that cannot be opened has no names to offer, and a message would break the line.
        return []
    return sorted(name for name in names if name.startswith(incomplete))
