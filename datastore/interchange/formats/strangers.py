"""Files of no format that is known: what they hold, so that a person knows what to do."""

from __future__ import annotations

from typing import Final

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.interchange.formats.hdf5.files import Hdf5File
from replaylake.datastore.interchange.formats.npz.arrays import npz_arrays
from replaylake.datastore.interchange.sources.refusal import listed
from replaylake.datastore.interchange.sources.source import SourceFile

_PICKLE: Final = (
    "Reading a pickle runs what is in it, so none is read: load it where you trust it, and save "
    "its arrays as npz or HDF5, or its rows as Parquet or JSON lines."
)
_MAP: Final = "If it has a row a step, say which is which: --format {} --map observation=NAME ..."
# By the first dataset's path.
_LAYOUTS: Final = {
    "data/demo_": "It is laid out as robomimic's and robosuite's files are, a group a "
    "demonstration, which are not read: write each as an episode of D4RL's or Minari's layout.",
    "observations/": "It is laid out as an episode of ACT (ALOHA), a file each, which are not "
    "read: convert the dataset with LeRobot, whose format is.",
}


def advice(file: SourceFile, kind: str) -> str | None:
    """Return what a file of a kind holds and what to do with it, or None where nothing is known."""
    if kind == "a pickle":
        return f"found a pickle. {_PICKLE}"
    try:
        if kind == "HDF5":
            with Hdf5File(file) as opened:
                paths = opened.arrays()
            layouts = [said for start, said in _LAYOUTS.items() if _begins(paths, start)]
            do = layouts[0] if layouts else _MAP.format("d4rl")
            return f"found HDF5 with the datasets {listed(paths) or 'none'}. {do}"
        if kind == "npz":
            names = listed([*npz_arrays(file)])
            return f"found npz with the arrays {names or 'none'}. {_MAP.format('npz')}"
    except ReplayLakeError:
        return None
    return None


def _begins(paths: list[str], start: str) -> bool:
    return any(path.startswith(start) for path in paths)
