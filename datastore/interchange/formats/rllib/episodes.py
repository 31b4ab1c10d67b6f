"""RLlib's episode files: Parquet of one column `item`, a row the state of one SingleAgentEpisode.

A state is msgpack, arrays in it as msgpack_numpy writes them (packed.py). Layout: `get_state` in
ray/rllib/env/single_agent_episode.py and ray/rllib/env/utils/infinite_lookback_buffer.py (2.60). An
episode that was cut while it was recorded is several rows, each with the step that it starts at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

from replaylake.datastore.episodes.spaces import Values, num_values, take
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.generic.parquet import PARQUET_ERRORS
from replaylake.datastore.interchange.formats.packed.packed import UnreadPart, decode_message
from replaylake.datastore.interchange.formats.tabular.episode_rows import EpisodeRows, iter_chunks
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

ITEM: Final = "item"
# States held at a time; one is an episode of up to some MB.
_BATCH_ROWS: Final = 8
_MAX_STEPS: Final = 2**31 - 1
_PARTS: Final = ("observations", "actions", "rewards")


class EpisodeStateTables(TableSource):
    """Chunks of rows, from files of episode states; what is left out is said in `notes`."""

    def __init__(self, files: Sequence[SourceFile], notes: list[str]) -> None:
        self._files = files
        self._notes = notes

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            yield from iter_chunks(file, self._episodes(file))

    def _episodes(self, file: SourceFile) -> Iterator[EpisodeRows]:
        for number, state in enumerate(_states(file)):
            where = f"{file.name} row {number}"
            episode = _EpisodeState(decode_message(state, where), where)
            rows = episode.rows()
            for note in episode.notes:
                if note not in self._notes:
                    self._notes.append(note)
            if rows is not None:
                yield rows


def _states(file: SourceFile) -> Iterator[bytes]:
    file.check_unchanged()
    try:
        with pq.ParquetFile(
            file.path, pre_buffer=False, page_checksum_verification=True
        ) as parquet:
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=[ITEM]):
                for cell in batch.column(0):
                    if not isinstance(state := cell.as_py(), bytes):
                        raise SourceInvalidError(
                            f"{file.name}: column {ITEM!r} holds {cell.type}, expected RLlib's "
                            "episodes as bytes of msgpack. Write the log again, or map it as a "
                            "table with `format` parquet."
                        )
                    yield state
    except PARQUET_ERRORS as error:
        raise unreadable_error(file.name, error) from error


class _EpisodeState:
    """One row's state, on its way to rows."""

    def __init__(self, state: Any, where: str) -> None:
        self._where = where
        self.notes: list[str] = []
        if not isinstance(state, dict) or not {"id_", *_PARTS} <= set(state):
            kind = "the state of a multi-agent episode" if _is_multi(state) else "another message"
            raise SourceInvalidError(
                f"{where}: found {kind}, expected a SingleAgentEpisode's state. Write the log with "
                "RLlib's single-agent recorder, or one episode per agent."
            )
        self._state: dict[Any, Any] = state

    def rows(self) -> EpisodeRows | None:
        """Lay the steps out. None if there is no step. Raises: SourceInvalidError."""
        columns: dict[str, Values | None] = {}
        finals: dict[str, Values | None] = {}
        damage = None
        num = 0
        try:
            rewards = _numbers(self._steps("rewards"))
            num = len(rewards)
            if num == 0:
                self.notes.append("rows without a step, left out: RLlib's recorder had just reset")
                return None
            observations, actions = self._steps("observations"), self._steps("actions")
            self._check_length("observations", observations, num + 1)
            self._check_length("actions", actions, num)
            columns = {"obs": take(observations, slice(num)), "actions": actions}
            columns["rewards"] = rewards
            finals["final_observation"] = take(observations, slice(num, None))
        except (TypeError, ValueError) as error:
            damage = f"{self._where}: {error}"
            num = max(num, 1)
        columns |= self._ends(num)
        columns["t"] = self._first_step() + np.arange(num, dtype=np.int64)
        columns |= self._names(num)
        if damage is None:
            columns |= self._model_outputs(num, columns)
            columns |= self._infos(num)
        name = self._state.get("multi_agent_episode_id")
        return EpisodeRows(str(name or self._state["id_"]), num, columns, finals, damage)

    def _steps(self, part: str) -> Values:
        return _buffer(self._state[part], part)

    def _check_length(self, part: str, values: Values, expected: int) -> None:
        if (length := num_values(values)) != expected:
            raise ValueError(f"{part} has {length} entries, expected {expected}: one a reward")

    def _first_step(self) -> int:
        first = self._state.get("t_started", 0)
        if not isinstance(first, int | np.integer) or not 0 <= first <= _MAX_STEPS:
            raise SourceInvalidError(
                f"{self._where}: found t_started {str(first)[:40]}, expected the number of the "
                "episode's first step. Write the log again, or leave the file out."
            )
        return int(first)

    def _ends(self, num: int) -> dict[str, Values | None]:
        ends: dict[str, Values | None] = {}
        for column, key in (("terminateds", "is_terminated"), ("truncateds", "is_truncated")):
            flag = self._state.get(key, False)
            if not isinstance(flag, bool | np.bool_):
                raise SourceInvalidError(
                    f"{self._where}: found {key} {str(flag)[:40]}, expected true or false. Write "
                    "the log again, or leave the file out."
                )
            ends[column] = np.zeros(num, np.bool_)
            ends[column][-1] = bool(flag)  # type: ignore[index]
        return ends

    def _names(self, num: int) -> dict[str, Values | None]:
        pairs = (("agent_id", "agent_id"), ("policy", "module_id"))
        names = {column: self._state.get(key) for column, key in pairs}
        return {
            column: np.full(num, str(name), object)
            for column, name in names.items()
            if name is not None
        }

    def _model_outputs(self, num: int, taken: Mapping[str, Any]) -> dict[str, Values | None]:
        outputs = self._state.get("extra_model_outputs") or {}
        columns: dict[str, Values | None] = {}
        for key, buffer in outputs.items() if isinstance(outputs, dict) else ():
            name = f"output_{key}" if str(key) in taken or str(key) == "infos" else str(key)
            try:
                values = _buffer(buffer, name)
                self._check_length(name, values, num)
            except (TypeError, ValueError):
                self.notes.append(f"model output {name!r} is not one array a step, left out")
                continue
            columns[name] = values
        return columns

    def _infos(self, num: int) -> dict[str, Values]:
        """Return each step's info as JSON; nothing where none says anything."""
        buffer = self._state.get("infos")
        data = buffer.get("data") if isinstance(buffer, dict) else None
        if data is None:
            return {}
        if not isinstance(data, list):
            self.notes.append("infos are pickled Python objects: not read, left out")
            return {}
        infos = data[-num:]
        if not any(infos) or len(infos) < num:
            return {}
        try:
            texts = [json.dumps(info, default=_plain, skipkeys=True) for info in infos]
        except (TypeError, ValueError, RecursionError):
            self.notes.append("infos hold pickled Python objects: not read, left out")
            return {}
        return {"infos": np.asarray(texts, object)}


def _is_multi(state: Any) -> bool:
    return isinstance(state, dict) and "agent_episodes" in state


def _buffer(buffer: Any, name: str) -> Values:
    """Return the values [n, ...] of a lookback buffer, without those before the piece's start.

    Raises: ValueError if its entries differ in shape, or are not numbers.
    """
    if not isinstance(buffer, dict) or "data" not in buffer:
        raise ValueError(f"{name} is not a buffer of RLlib")
    lookback = buffer.get("lookback", 0)
    if not isinstance(lookback, int) or lookback < 0:
        raise ValueError(f"{name} has lookback {str(lookback)[:40]}")
    data = buffer["data"]
    # Finalized data is stacked already, or a structure of stacked arrays.
    is_stacked = isinstance(data, np.ndarray | dict) or buffer.get("finalized") is True
    values = _structure(data, name) if is_stacked else _stack(data, name)
    return values if lookback == 0 else _slice_from(values, lookback)


def _slice_from(values: Values, start: int) -> Values:
    rest: Values = take(values, slice(start, None))
    return rest


def _structure(data: Any, name: str) -> Values:
    if isinstance(data, dict):
        return {str(key): _structure(part, f"{name}.{key}") for key, part in data.items()}
    if isinstance(data, list) and data and not isinstance(data[0], int | float | bool | np.generic):
        return {f"_{i}": _structure(part, f"{name}.{i}") for i, part in enumerate(data)}
    array = np.asarray(data) if isinstance(data, list) else data
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise ValueError(f"{name} holds {_describe(data)}, expected an array")
    return array


def _stack(steps: Any, name: str) -> Values:
    """Stack one value a step: arrays, numbers, or dicts and tuples of them."""
    if not isinstance(steps, list):
        raise ValueError(f"{name} holds {_describe(steps)}, expected a list of steps")
    first = steps[0] if steps else 0.0
    if isinstance(first, dict):
        if not all(isinstance(step, dict) and set(step) == set(first) for step in steps):
            raise ValueError(f"{name} holds dicts of different keys")
        return {str(k): _stack([step[k] for step in steps], f"{name}.{k}") for k in first}
    if isinstance(first, list):
        if not all(isinstance(step, list) and len(step) == len(first) for step in steps):
            raise ValueError(f"{name} holds tuples of different lengths")
        return {
            f"_{i}": _stack([step[i] for step in steps], f"{name}.{i}") for i in range(len(first))
        }
    if isinstance(first, str):
        if not all(isinstance(step, str) for step in steps):
            raise ValueError(f"{name} holds texts and others")
        return np.asarray(steps, object)
    for step in steps:
        if not isinstance(step, np.ndarray | np.generic | int | float | bool):
            raise ValueError(f"{name} holds {_describe(step)}, expected numbers")
        if np.shape(step) != np.shape(first):
            raise ValueError(f"{name} holds shapes {np.shape(first)} and {np.shape(step)}")
    try:
        return np.stack(steps) if steps else np.zeros(0)
    except OverflowError as error:
        raise ValueError(f"{name}: {error}") from error


def _numbers(values: Values) -> Any:
    if isinstance(values, Mapping) or values.ndim != 1 or values.dtype.kind not in "fiub":
        raise ValueError("rewards are not one number per step")
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(_describe(value))


def _describe(value: Any) -> str:
    return value.what if isinstance(value, UnreadPart) else f"a {type(value).__name__}"
