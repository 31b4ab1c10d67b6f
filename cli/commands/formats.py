"""`replaylake formats`: what `ingest` reads and `export` writes."""

from __future__ import annotations

from typing import Any

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, table_lines


def formats(
    lake: LakeOption = DEFAULT_LAKE, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List the file formats that are read and written.

    The list is the same for every lake. Formats that are only written are for trainers of
    language models.

    Example:
      replaylake formats
    """
    from replaylake.datastore.interchange.export.trainers.targets import TARGETS
    from replaylake.datastore.interchange.formats.catalog import FORMATS
    from replaylake.datastore.interchange.formats.format import WritableFormat

    rows: list[dict[str, Any]] = [
        {
            "name": known.name,
            "reads": True,
            "writes": isinstance(known, WritableFormat),
            "about": known.about,
        }
        for known in sorted(FORMATS, key=lambda known: known.name)
    ]
    rows += [
        {"name": target.name, "reads": False, "writes": True, "about": target.about}
        for target in sorted(TARGETS.values(), key=lambda target: target.name)
    ]
    yes_no = {True: "yes", False: "no"}
    texts = [
        {**row, "reads": yes_no[row["reads"]], "writes": yes_no[row["writes"]]} for row in rows
    ]
    CommandOutput(as_json).print_result(
        {"formats": rows}, table_lines(texts, ("name", "reads", "writes", "about"))
    )
