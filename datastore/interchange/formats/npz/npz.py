"""npz: arrays of all steps, one after the other, as stable-baselines and imitation save them.

Three layouts, told apart by the arrays' names: experts of stable-baselines 2 (`episode_starts`, no
next observations; stable_baselines/gail/dataset/record_expert.py), trajectories of imitation before
1.0 (`acts`, `indices`, one more observation than steps each; imitation/data/serialize.py), and
arrays that are called as columns are (docs/FORMATS.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.npz.arrays import NpzArray, npz_arrays
from replaylake.datastore.interchange.formats.tabular.episode_rows import CHUNK_BYTES, to_column
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES, DONE_ALIASES
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile

_EPISODE: Final = "episode_index"
_NEXT: Final = "next_obs"
_ZIP: Final = b"PK\x03\x04"
# Summed in float64 here, in float32 there.
_RETURN_TOLERANCE: Final = 1e-3
# One value a step: replay buffers keep them as [N, 1].
_SCALARS: Final = frozenset(
    name
    for ours in ("reward", "terminated", "truncated", "episode_id", "step", "behavior_log_prob")
    for name in ALIASES[ours]
) | {*DONE_ALIASES}

_RECORDED: Final = "terminals"

Arrays = Mapping[str, NpzArray]


class NpzFormat:
    """Arrays of steps in an npz."""

    name = "npz"
    about = "npz of arrays: stable-baselines experts, imitation trajectories, arrays of columns"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if files[0].head(len(_ZIP)) != _ZIP:
            return False
        try:
            arrays = npz_arrays(files[0])
        except SourceInvalidError:
            # A torn one is ours to name where it is called so.
            return files[0].relative.endswith(".npz")
        return _is_imitation(arrays) or _is_experts(arrays) or _is_columns(arrays)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        notes: list[str] = []
        tables = NpzTables(files, notes)
        arrays = npz_arrays(files[0])
        fields: dict[str, str] = {}
        observed = ""
        if _is_imitation(arrays):
            observed = "obs"
            fields = {"action": "acts", **({"reward": "rews"} if "rews" in arrays else {})}
        elif _are_recordings(arrays) and "terminated" not in options.mapping:
            fields = {"truncated": _RECORDED}
            notes.append(
                f"{_RECORDED} used as truncated: without rewards and timeouts they mark where a "
                "recording ends, not where a task does"
            )
        declared = Declaration(fields=fields, notes=notes, observed=observed)
        return TabularReader(tables, options, files[0].name, declared)


class NpzTables(TableSource):
    """Chunks of rows of npz files; what is left out is said in `notes`."""

    def __init__(self, files: Sequence[SourceFile], notes: list[str]) -> None:
        self._files = files
        self._notes = notes

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        first_episode = 0
        for file in self._files:
            arrays = npz_arrays(file)
            if _is_imitation(arrays):
                yield from _trajectories(file, arrays, first_episode, self._notes)
                first_episode += len(arrays["terminal"])
            elif _is_experts(arrays):
                for chunk in _experts(file, arrays, first_episode, self._notes):
                    yield chunk
                    last = chunk.table.column(_EPISODE)[-1].as_py()
                first_episode = last + 1 if len(arrays["obs"]) else first_episode
            else:
                yield from _columns(file, arrays, self._notes)


def _is_imitation(arrays: Arrays) -> bool:
    return {"obs", "acts", "terminal", "indices"} <= set(arrays)


def _is_experts(arrays: Arrays) -> bool:
    return {"obs", "actions", "episode_starts"} <= set(arrays)


def _is_columns(arrays: Arrays) -> bool:
    needed = (ALIASES["observation"], ALIASES["action"])
    return all(set(aliases) & set(arrays) for aliases in needed)


def _are_recordings(arrays: Arrays) -> bool:
    """Return whether `terminals` only mark the ends of recordings, as in OGBench."""
    others = ("reward", "truncated")
    names = {name for ours in others for name in ALIASES[ours]} | {*ALIASES["terminated"]}
    return names & set(arrays) == {_RECORDED}


def _trajectories(
    file: SourceFile, arrays: Arrays, first_episode: int, notes: list[str]
) -> Iterator[Chunk]:
    """Lay out imitation's obs [N + E], acts and rews [N], terminal [E], and indices [E - 1]."""
    num = _length(file, arrays["acts"], "acts")
    if not num and not len(arrays["terminal"]):
        return
    splits, terminal = _splits(file, arrays, num)
    _expect_length(file, arrays["obs"], num + len(terminal), "a row a step and one an episode")
    columns = _select_by_length(arrays, num, {"obs", "terminal", "indices"}, notes)
    readers = {name: array.rows() for name, array in columns.items()}
    observations = arrays["obs"].rows()
    ends = np.append(splits, num)
    num_read, last = 0, np.zeros(0)
    for start, stop in _blocks(num, [*columns.values(), arrays["obs"], arrays["obs"]]):
        episodes = np.searchsorted(splits, np.arange(start, stop), side="right")
        at = np.arange(start, stop) + episodes
        first, end = int(at[0]), int(at[-1]) + 2
        buffer = observations.take(end - num_read)
        if first < num_read:
            # The episode goes on: what followed the last block's steps is where this one starts.
            buffer = np.concatenate([last, buffer])
        num_read, last = end, buffer[-1:]
        is_end = np.arange(start + 1, stop + 1) == ends[episodes]
        table = {
            _EPISODE: pa.array(episodes + first_episode),
            "obs": to_column(buffer[at - first], "obs"),
            _NEXT: to_column(buffer[at - first + 1], _NEXT),
            "terminal": pa.array(terminal[episodes] & is_end),
            **{n: to_column(reader.take(stop - start), n) for n, reader in readers.items()},
        }
        yield Chunk(file, start, pa.table(table))


def _splits(file: SourceFile, arrays: Arrays, num: int) -> tuple[Array, Array]:
    for name, kinds in (("terminal", "b"), ("indices", "iu")):
        array = arrays[name]
        # No split at all, of one trajectory, has no kind.
        is_known = array.dtype.kind in kinds or array.shape == (0,)
        if not is_known or len(array.shape) != 1:
            raise SourceInvalidError(
                f"{file.name}: array {name!r} is {array.dtype} {list(array.shape)}, expected one "
                f"{'flag an episode' if name == 'terminal' else 'row number an episode'}, as "
                "imitation saves it. Save it again."
            )
    splits = arrays["indices"].read_all().astype(np.int64)
    terminal = arrays["terminal"].read_all()
    bounds = np.concatenate([[0], splits, [num]])
    if len(terminal) != len(splits) + 1 or (np.diff(bounds) <= 0).any():
        raise SourceInvalidError(
            f"{file.name}: found {len(terminal)} trajectories in `terminal` and {len(splits)} "
            f"splits of {num} steps in `indices`, expected one split fewer, in order. Save it "
            "again."
        )
    return splits, terminal


def _experts(
    file: SourceFile, arrays: Arrays, first_episode: int, notes: list[str]
) -> Iterator[Chunk]:
    """Lay out stable-baselines' obs, actions, rewards, episode_starts [N]; episode_returns [E]."""
    num = _length(file, arrays["actions"], "actions")
    for name in ("obs", "episode_starts", "rewards"):
        if name in arrays:
            _expect_length(file, arrays[name], num, "a row a step, as `actions` has them")
    if arrays["obs"].dtype.kind == "U":
        raise SourceInvalidError(
            f"{file.name}: array 'obs' has texts, expected numbers: stable-baselines "
            "saves only the paths of images, and these are not read. Save it with the "
            "images themselves."
        )
    starts = arrays["episode_starts"]
    if starts.dtype.kind not in "biu" or starts.shape not in ((num,), (num, 1)):
        raise SourceInvalidError(
            f"{file.name}: array 'episode_starts' is {starts.dtype} {list(starts.shape)}, expected "
            "one flag per step. Save it again."
        )
    _add_note(
        notes, "episode_starts say where episodes begin, not how they ended: the ends are open"
    )
    columns = _select_by_length(arrays, num, {"episode_starts", "episode_returns"}, notes)
    readers = {name: array.rows() for name, array in columns.items()}
    flags = starts.rows()
    episode = first_episode
    returns = np.zeros(0)
    for start, stop in _blocks(num, [*columns.values()]):
        begins = flags.take(stop - start).astype(bool).reshape(-1)
        if start == 0 and not begins[0]:
            _add_note(notes, f"{file.name}: the first step does not begin an episode")
            begins[0] = True
        if start == 0:
            episode -= 1
        episodes = episode + np.cumsum(begins)
        episode = int(episodes[-1])
        values = {
            name: _discrete(_flat(name, reader.take(stop - start)))
            for name, reader in readers.items()
        }
        if "rewards" in values and values["rewards"].ndim == 1:
            sums = np.zeros(episode + 1 - first_episode)
            sums[: len(returns)] = returns
            np.add.at(sums, episodes - first_episode, values["rewards"].astype(np.float64))
            returns = sums
        table = {name: to_column(value, name) for name, value in values.items()}
        yield Chunk(file, start, pa.table({_EPISODE: pa.array(episodes), **table}))
    if "episode_returns" in arrays:
        _add_note(notes, "episode_returns are compared with the sums of rewards, and not kept")
    _compare_returns(file, arrays.get("episode_returns"), returns, notes)


def _flat(name: str, values: Array) -> Array:
    """Undo the shape [n, 1] of what is one value a step."""
    return values[:, 0] if name in _SCALARS and values.shape[1:] == (1,) else values


def _discrete(values: Array) -> Array:
    """Undo stable-baselines' reshaping of Discrete values to [n, 1]."""
    return values[:, 0] if values.dtype.kind in "iu" and values.shape[1:] == (1,) else values


def _compare_returns(
    file: SourceFile, stated: NpzArray | None, returns: Array, notes: list[str]
) -> None:
    if stated is None or stated.unread_reason or len(stated.shape) != 1 or not len(returns):
        return
    own = stated.read_all()
    if len(own) != len(returns):
        _add_note(notes, f"{file.name}: {len(own)} episode_returns, but {len(returns)} episodes")
        return
    differ = ~np.isclose(own.astype(np.float64), returns, rtol=_RETURN_TOLERANCE, atol=1e-3)
    if differ.any():
        first = int(np.argmax(differ))
        _add_note(
            notes,
            f"{file.name}: episode_returns differ from the sums of rewards in {int(differ.sum())} "
            f"of {len(returns)} episodes, as in episode {first}: {own[first]:g} and "
            f"{returns[first]:g}",
        )


def _columns(file: SourceFile, arrays: Arrays, notes: list[str]) -> Iterator[Chunk]:
    """Arrays called as columns are: each that is as long as the actions is one."""
    names = [name for name in ALIASES["action"] if name in arrays] or [*arrays]
    num = _length(file, arrays[names[0]], names[0])
    for ours in ("observation", "reward", "terminated", "truncated"):
        for name in set(ALIASES[ours]) & set(arrays):
            _expect_length(file, arrays[name], num, f"a row a step, as {names[0]!r} has them")
    columns = _select_by_length(arrays, num, set(), notes)
    readers = {name: array.rows() for name, array in columns.items()}
    for start, stop in _blocks(num, [*columns.values()]):
        table = {
            n: to_column(_flat(n, reader.take(stop - start)), n) for n, reader in readers.items()
        }
        yield Chunk(file, start, pa.table(table))


def _length(file: SourceFile, array: NpzArray, name: str) -> int:
    if array.unread_reason is not None:
        raise SourceInvalidError(
            f"{file.name}: array {name!r} holds {array.unread_reason}, expected numbers, one row "
            "per step. Nothing is unpickled: save it as an array of numbers."
        )
    return len(array)


def _expect_length(file: SourceFile, array: NpzArray, expected: int, why: str) -> None:
    if (length := _length(file, array, array.name)) != expected:
        raise SourceInvalidError(
            f"{file.name}: array {array.name!r} has {length} rows, expected {expected}: {why}. "
            "Save it again, or leave the file out."
        )


def _select_by_length(
    arrays: Arrays, num: int, known: set[str], notes: list[str]
) -> dict[str, NpzArray]:
    """Return the arrays with a row a step; the others but the known ones are noted."""
    selection = {}
    for name, array in arrays.items():
        if name in known:
            continue
        if (reason := array.unread_reason) is None and len(array) == num:
            selection[name] = array
            continue
        _add_note(
            notes, f"array {name!r} left out: {reason or f'{len(array)} rows for {num} steps'}"
        )
    return selection


def _blocks(num: int, arrays: Sequence[NpzArray]) -> Iterator[tuple[int, int]]:
    row_bytes = max(1, sum(array.row_bytes for array in arrays))
    rows = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, num, rows):
        yield start, min(start + rows, num)


def _add_note(notes: list[str], note: str) -> None:
    """Say it once: the tables may be read more than once."""
    if note not in notes:
        notes.append(note)
