"""`replaylake formats`: what `ingest` reads and `export` writes."""

from __future__ import annotations

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, table_lines


def formats(
    lake: LakeOption = DEFAULT_LAKE, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List the file formats that are read and written.

    The list is the same for every lake.

    Example:
      replaylake formats
    """
    from replaylake.datastore.interchange.formats.catalog import FORMATS
    from replaylake.datastore.interchange.formats.format import WritableFormat

    rows = [
        {
            "name": known.name,
            "reads": True,
            "writes": isinstance(known, WritableFormat),
            "about": known.about,
        }
        for known in sorted(FORMATS, key=lambda known: known.name)
    ]
    texts = [{**row, "reads": "yes", "writes": "yes" if row["writes"] else "no"} for row in rows]
    CommandOutput(as_json).print_result(
        {"formats": rows}, table_lines(texts, ("name", "reads", "writes", "about"))
    )
