"""Own columns: the further columns of an export of ours, under the names that they had.

They lie below `infos/`, as those of other people do, which become `infos_NAME`. An attribute of the
file lists which were ours, so that an export that is read again has the columns it was made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from replaylake.datastore.episodes.schema import STANDARD_COLUMNS
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.hdf5.files import Hdf5File
from replaylake.datastore.interchange.formats.hdf5.writer import Hdf5Writer
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES
from replaylake.datastore.interchange.formats.tabular.infos import INFOS
from replaylake.datastore.names import is_column_name

_LABEL: Final = "replaylake_columns"
# HDF5 keeps an attribute of 64 KiB at most in a file that old readers open.
_LONGEST: Final = 60_000


def label_columns(writer: Hdf5Writer, names: Iterable[str]) -> None:
    """List the further columns that a file is made of."""
    text = json.dumps([*names])
    if len(text) <= _LONGEST:
        writer.label("/", {_LABEL: text})


def restore_names(hdf5: Hdf5File, columns: Iterable[str], options: ReadOptions) -> ReadOptions:
    """Return options that give back their names to those columns that a file lists as ours.

    What `--map` says wins. Raises: SourceInvalidError on torn bytes.
    """
    try:
        listed = json.loads(hdf5.text_label("", _LABEL) or "[]")
    except (ValueError, RecursionError):
        return options
    known = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else ()
    present, mapped = {*columns}, {*options.mapping.values()}
    names = {
        name: theirs
        for name in sorted(known)
        if (theirs := f"{INFOS}/{name}") in present - mapped
        and is_column_name(name)
        and name not in {*STANDARD_COLUMNS, *ALIASES, *options.mapping}
    }
    return replace(options, mapping={**names, **options.mapping})
