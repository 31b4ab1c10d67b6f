"""TRL: the completions that its trainers log, `completions_{step:05d}.parquet`, one per row.

They are texts or messages. The other columns are one for each reward function, those that a
reward function logged itself, and the advantage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.formats.generations.messages import (
    Message,
    derive_group,
    format_messages,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    FINAL_MESSAGES,
    REWARD_COMPONENTS,
    Record,
    RecordTables,
    Row,
    describe_generation,
    empty_row,
    measure_row,
    read_generations,
    read_step,
)
from replaylake.datastore.interchange.formats.generic.parquet import (
    is_parquet,
    parquet_schema,
)
from replaylake.datastore.interchange.formats.generic.parquet_values import (
    drop_nulls,
    iter_rows,
    read_row,
    to_json_value,
)
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import format_names

_STEP, _PROMPT, _COMPLETION, _ADVANTAGE = "step", "prompt", "completion", "advantage"
_OWN: Final = frozenset((_STEP, _PROMPT, _COMPLETION, _ADVANTAGE))
_ASSISTANT: Final = "assistant"


class TrlFormat:
    """Parquet with the columns step, prompt, completion and advantage."""

    name = "trl"
    about = "TRL's log_completions, completions_{step}.parquet: texts, rewards and advantages"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if not is_parquet(files[0]):
            return False
        try:
            schema = parquet_schema(files[0])
        except SourceInvalidError:
            return False
        return _is_log(schema)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _CompletionTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _CompletionTables(RecordTables):
    """Rows of the generations of the completions in some files."""

    unit = "row"
    noun = "completions"

    def __init__(self, files: Sequence[SourceFile], options: ReadOptions) -> None:
        super().__init__(files, options)
        self._several: dict[str, None] = {}

    def begin(self) -> None:
        super().begin()
        self._several = {}

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        schema = parquet_schema(file)
        if not _is_log(schema):
            raise SourceInvalidError(
                f"{file.name}: found the columns {format_names(schema.names)}, expected "
                f"{', '.join(sorted(_OWN))} as TRL writes them. Leave the file out."
            )
        scored = _find_reward_functions(schema)
        if len(scored) > 1:
            self._several |= dict.fromkeys(scored)
        for place, row in enumerate(iter_rows(file)):
            try:
                rows = self._read(read_row(row), scored, place)
            except (OverflowError, SourceInvalidError, ValueError, pa.ArrowException) as error:
                yield Record([empty_row(self._ids.next(None))], place, 0, str(error))
            else:
                yield Record(rows, place, sum(map(measure_row, rows)))

    def finish(self) -> Sequence[str]:
        notes = self._ids.notes()
        if self._several and self.paths.get("reward") is None:
            notes.append(
                f"reward is the sum of {', '.join(self._several)}: the files do not state which "
                "of these columns are reward functions, nor their weights, and logged values such "
                "as lengths may be in the sum. `mapping` reward=COLUMN takes one of them"
            )
        return notes

    def _read(self, value: Mapping[str, Any], scored: Sequence[str], place: int) -> list[Row]:
        step = read_step(value[_STEP], "step")
        prompt = _read_messages(value[_PROMPT], _PROMPT, "user")
        answer = _read_messages(value[_COMPLETION], _COMPLETION, _ASSISTANT)
        components = [_read_score(name, value[name]) for name in scored]
        known = [one["score"] for one in components if one["score"] is not None]
        rest = {k: v for k, v in value.items() if k not in _OWN and k not in scored}
        group, source = derive_group([{"role": "step", "content": step}, *prompt])
        shared: Row = {
            **self.paths.find({"": value}),
            "agent_id": "",
            "terminated": False,
            "truncated": False,
            "group_id": group,
            "group_id_source": source,
            "train_step": step,
            "advantage": value[_ADVANTAGE],
            "source_framework": "trl",
        }
        rows: list[Row] = []
        pending = list(prompt)
        for message in answer:
            if message["role"] == _ASSISTANT:
                number = {"step": len(rows), "env_step": len(rows)}
                rows.append({**describe_generation(pending, message), **shared, **number})
                pending = []
            else:
                pending.append(message)
        if not rows:
            raise SourceInvalidError(
                f"completion: found {shorten(value[_COMPLETION])}, expected a message of the "
                "assistant"
            )
        if pending:
            rows[-1]["final_text"] = format_messages(pending)
            rows[-1][FINAL_MESSAGES] = dump_json(pending)
        for row in rows:
            row["reward"] = 0.0 if known else None
        self.paths.apply(rows, {k: v for k, v in shared.items() if k in self.paths.kinds})
        last = rows[-1]
        last["reward"] = sum(known) if known else None
        last[REWARD_COMPONENTS] = components or None
        last["terminated"] = bool(known)
        rows[0]["metadata"] = dump_json(to_json_value(rest)) if rest else None
        episode_id = self._ids.next(f"step{step}/{place}")
        return [{**row, "episode_id": episode_id} for row in rows]


def _is_log(schema: pa.Schema) -> bool:
    """Whether a file has the columns of such a log, with their types."""
    if not {*schema.names} >= _OWN or len({*schema.names}) < len(schema.names):
        return False
    kinds = [schema.field(name).type for name in (_PROMPT, _COMPLETION)]
    is_number = pa.types.is_floating(schema.field(_ADVANTAGE).type)
    return is_number and all(_is_text(kind) or _is_dialogue(kind) for kind in kinds)


def _find_reward_functions(schema: pa.Schema) -> list[str]:
    """Return the columns of reward functions: those of floating-point numbers."""
    return [
        field.name
        for field in schema
        if field.name not in _OWN
        and pa.types.is_floating(field.type)
        and not field.name.startswith("__")  # an index of pandas
    ]


def _read_score(name: str, value: Any) -> dict[str, Any]:
    """Return the score of a reward function; NaN or null means that it returned none."""
    is_known = value is not None and not math.isnan(value)
    return {"name": name, "score": value if is_known else None, "weight": None}


def _read_messages(value: Any, name: str, role: str) -> list[Message]:
    """Return messages without the fields that Arrow adds to all of them."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    several = value if isinstance(value, list) else [value]
    for one in several:
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise SourceInvalidError(f"{name}: found {shorten(one)}, expected text or messages")
    plain = [{k: drop_nulls(v) for k, v in one.items() if v is not None} for one in several]
    return [{"content": None, **one} for one in plain]


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_dialogue(kind: pa.DataType) -> bool:
    """Whether a column is of lists of messages."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    inner = kind.value_type
    return bool(pa.types.is_struct(inner) and inner.get_field_index("role") >= 0)
