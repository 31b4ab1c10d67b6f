"""`replaylake algorithms`: what `train offline --algorithm` takes."""

from __future__ import annotations

from dataclasses import asdict

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.report import Report, table_lines


def list_algorithms(
    lake: LakeOption = DEFAULT_LAKE, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List the learning algorithms.

    They do not depend on the lake; --lake is taken because every command takes it.

    Example:
      replaylake algorithms
    """
    from replaylake.offline.algorithms.catalog import algorithms

    rows = [asdict(info) for info in algorithms()]
    columns = ("name", "actions", "kind", "head", "provider", "paper")
    Report(as_json).answer({"algorithms": rows}, table_lines(rows, columns))
