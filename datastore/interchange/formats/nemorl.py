"""NeMo-RL: the training data that it logs, `train_data_step{N}.jsonl`, one line a sample.

A line is one sequence of tokens with a loss mask and, as its writer takes samples apart in batches
of one, each value stands in a list of length 1. Arrays of tokens are padded to the longest of their
batch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.token_sequences import (
    TokenSequence,
    find_sampled,
    split_sequence,
)
from replaylake.datastore.errors import EpisodeInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.messages import shorten
from replaylake.datastore.interchange.formats.generations.rows import (
    declare_generations,
    iter_lines,
    read_first_line,
)
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile

_CHUNK_TOKENS: Final = 1 << 20
_NEEDED: Final = ("token_ids", "token_loss_mask", "input_lengths")
_LOG_PROBS: Final = "generation_logprobs"
_PROXIMAL: Final = "prev_logprobs"
_ADVANTAGES: Final = "advantages"
# What becomes columns; everything else of a line is kept as metadata.
_USED: Final = (*_NEEDED, _LOG_PROBS, _PROXIMAL, _ADVANTAGES, "sample_loss_mask", "idx")
# With dynamic sampling, samples are filtered: `rewards` are then those of all before the filter,
# and the value that stands in a line is another sample's.
_REWARDS: Final = ("filtered_rewards", "rewards")
_CONTENT: Final = "content"
_STEP: Final = re.compile(r"train_data_step(\d+)")
_DIGITS: Final = 16
_SCHEMA: Final = pa.schema(
    {
        "episode_id": pa.string(),
        "step": pa.int64(),
        "prompt_text": pa.string(),
        "final_text": pa.string(),
        "completion_text": pa.string(),
        "reward": pa.float64(),
        "terminated": pa.bool_(),
        "truncated": pa.bool_(),
        **{
            name: tokens.TOKEN_TYPES[name]
            for name in (
                tokens.OBSERVATION_TOKENS,
                tokens.ACTION_TOKENS,
                tokens.FINAL_OBSERVATION_TOKENS,
                tokens.ACTION_LOG_PROBS,
                tokens.ACTION_LOSS_MASK,
                tokens.PROXIMAL_LOG_PROBS,
                tokens.IS_TRAINABLE,
            )
        },
        "action_advantages": tokens.TOKEN_TYPES[tokens.ACTION_LOG_PROBS],
        "group_id": pa.string(),
        "group_id_source": pa.string(),
        "train_step": pa.int64(),
        "source_framework": pa.string(),
        "metadata": pa.string(),
    }
)


class NemoRlFormat:
    """Lines with token_ids, token_loss_mask and input_lengths, each in a list of length 1."""

    name = "nemorl"
    about = "NeMo-RL's train_data_step{N}.jsonl: token ids, loss masks and log-probs"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return is_sample(read_first_line(files[0]))

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        declared = declare_generations(options)
        return TabularReader(_SampleTables(files), options, files[0].name, declared)


class _SampleTables(TableSource):
    """Rows of the generations of the samples of some files."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for number, file in enumerate(self._files):
            file.check_unchanged()
            parts: list[pa.Table] = []
            damage: dict[int, str] = {}
            lines: list[int] = []
            first_row = num_tokens = 0
            for line, text in iter_lines(file):
                part, fault = _read_sample(file, number, line, text)
                if fault is not None:
                    damage[len(lines)] = f"malformed\0{file.name} line {line}: {fault}"
                parts.append(part)
                lines += [line] * part.num_rows
                num_tokens += len(text) // 8
                if num_tokens > _CHUNK_TOKENS:
                    yield Chunk(file, first_row, pa.concat_tables(parts), damage, lines=lines)
                    first_row += len(lines)
                    parts, damage, lines, num_tokens = [], {}, [], 0
            table = pa.concat_tables([_SCHEMA.empty_table(), *parts])
            yield Chunk(file, first_row, table, damage, lines=lines)


def is_sample(value: Any) -> bool:
    """Whether a line's value is a sample as NeMo-RL writes it."""
    return isinstance(value, dict) and all(_is_single(value.get(name)) for name in _NEEDED)


def read_sample(text: bytes) -> tuple[list[dict[str, Any]], Any]:
    """Return the rows of the sample in a line, and its `idx`, the number in its training step.

    The rows have no episode_id and no training step. The number is None where none is stated.
    Raises: SourceInvalidError, EpisodeInvalidError, OverflowError, RecursionError, ValueError.
    """
    record = _parse(text)
    rows = _to_table(_make_rows(record), "", None).to_pylist()
    own = [{k: v for k, v in row.items() if k not in ("episode_id", "train_step")} for row in rows]
    return own, record.get("idx")


def _parse(text: bytes) -> dict[str, Any]:
    record = json.loads(text.strip())
    if not isinstance(record, dict):
        raise SourceInvalidError(f"found {type(record).__name__}, expected an object")
    return record


def _read_sample(
    file: SourceFile, number: int, line: int, text: bytes
) -> tuple[pa.Table, str | None]:
    """Return the rows of a sample; for a malformed one an empty row, and what is wrong with it."""
    match = _STEP.search(file.base_name)
    train_step = int(match.group(1)) if match else None
    # The number of a training step names a file of a run, whatever files are read beside it.
    prefix = f"step{train_step}" if train_step is not None else str(number)
    try:
        record = _parse(text)
        own = record.get("idx", line - 1)
        return _to_table(_make_rows(record), f"{prefix}/{own}", train_step), None
    except (
        EpisodeInvalidError,
        OverflowError,
        RecursionError,
        SourceInvalidError,
        ValueError,  # also for texts that are no Unicode
    ) as error:
        return _to_table(_make_empty_row(), f"{prefix}/line{line}", train_step), str(error)


def _to_table(rows: Mapping[str, Any], episode_id: str, train_step: int | None) -> pa.Table:
    num = len(rows["step"])
    columns = {
        **rows,
        "episode_id": [episode_id] * num,
        "train_step": [train_step] * num,
        "source_framework": ["nemo-rl"] * num,
    }
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.nulls(num, field.type)
        for field in _SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _make_rows(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a sample's generations.

    Raises: SourceInvalidError or EpisodeInvalidError for values that do not go together.
    """
    sequence, num_padded = _read_sequence(record)
    columns: dict[str, Any] = {**split_sequence(sequence)}
    actions = columns[tokens.ACTION_TOKENS]
    num, sampled = len(actions), find_sampled(sequence)
    for name, theirs in (
        (tokens.PROXIMAL_LOG_PROBS, _PROXIMAL),
        ("action_advantages", _ADVANTAGES),
    ):
        if record.get(theirs) is not None:
            values = _numbers(record, theirs, num_padded)[: len(sequence)]
            columns[name] = pa.ListArray.from_arrays(
                actions.offsets,
                pa.array(_to_float32(values[sampled])),
                type=_SCHEMA.field(name).type,
            )
    # A sample that the loss leaves out whole, as one that was cut off.
    if record.get("sample_loss_mask") is not None and not _number(record, "sample_loss_mask"):
        columns[tokens.IS_TRAINABLE] = [False] * num
    rewards: list[float | None] = [None] * num
    reward_name = next((name for name in _REWARDS if record.get(name) is not None), None)
    if reward_name is not None:
        rewards = [*[0.0] * (num - 1), _number(record, reward_name)]
    prompt = np.asarray(columns[tokens.OBSERVATION_TOKENS][0].values)
    texts = _find_texts(record, num, tokens.FINAL_OBSERVATION_TOKENS in columns)
    used = {*_USED, reward_name, *((_CONTENT,) if texts is not None else ())}
    rest = {name: value for name, value in record.items() if name not in used}
    texts = texts or [""] * (2 * num)
    return {
        **columns,
        "step": np.arange(num),
        "prompt_text": texts[: 2 * num : 2],
        "completion_text": texts[1 : 2 * num : 2],
        "final_text": [*[None] * (num - 1), texts[2 * num] if len(texts) > 2 * num else None],
        "reward": rewards,
        "terminated": np.arange(num) == num - 1,
        "truncated": np.zeros(num, np.bool_),
        "group_id": [hashlib.sha256(prompt.tobytes()).hexdigest()[:_DIGITS]] * num,
        "group_id_source": ["derived"] * num,
        "metadata": [_dump(rest) if rest else None, *[None] * (num - 1)],
    }


def _make_empty_row() -> dict[str, Any]:
    """Return a row that stands for a line of which nothing could be read."""
    texts = {"prompt_text": [""], "completion_text": [""]}
    return {**texts, "step": [0], "terminated": [False], "truncated": [False]}


def _read_sequence(record: Mapping[str, Any]) -> tuple[TokenSequence, int]:
    """Return a sample's sequence without its padding, and its length with it."""
    length = int(_number(record, "input_lengths"))
    ids = np.asarray(_single(record, "token_ids"))
    if ids.ndim != 1 or ids.dtype.kind != "i" or not 0 < length <= len(ids):
        raise SourceInvalidError(
            f"token_ids: found {ids.dtype} {list(ids.shape)} of which input_lengths counts "
            f"{length}, expected a list of at least so many ids"
        )
    if (outside := (ids < 0) | (ids >= 2**31)).any():
        raise SourceInvalidError(
            f"token_ids: found {ids[outside][0]}, expected ids of 0 or more, in 32 bits"
        )
    mask = _numbers(record, "token_loss_mask", len(ids))
    others = mask[~np.isin(mask, (0, 1))]
    if len(others):
        raise SourceInvalidError(f"token_loss_mask: found {others[0]:g}, expected 0 and 1")
    if mask[length:].any():
        raise SourceInvalidError(
            f"token_loss_mask: found 1 after {length} tokens, where input_lengths says that there "
            "is padding, expected 0"
        )
    log_probs = None
    if record.get(_LOG_PROBS) is not None:
        log_probs = _to_float32(_numbers(record, _LOG_PROBS, len(ids))[:length])
    sequence = TokenSequence(
        ids[:length].astype(np.int32), mask[:length].astype(np.bool_), log_probs
    )
    return sequence, len(ids)


def _find_texts(record: Mapping[str, Any], num: int, has_final: bool) -> list[str] | None:
    """Return the texts of the messages, if there is one for each run of tokens; else None.

    They stand without roles: only by their number can one tell which of them were generated.
    """
    content: Any = record.get(_CONTENT)
    if not _is_single(content):
        return None
    texts = content[0]
    if not isinstance(texts, list) or len(texts) != 2 * num + has_final:
        return None
    return texts if all(isinstance(text, str) for text in texts) else None


def _is_single(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def _single(record: Mapping[str, Any], name: str) -> Any:
    value: Any = record.get(name)
    if not _is_single(value):
        raise SourceInvalidError(f"{name}: found {shorten(value)}, expected a list of one value")
    return value[0]


def _number(record: Mapping[str, Any], name: str) -> float:
    value = _single(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SourceInvalidError(f"{name}: found {shorten(value)}, expected a number")
    return float(value)


def _numbers(record: Mapping[str, Any], name: str, num: int) -> Array:
    values = np.asarray(_single(record, name))
    if values.shape != (num,) or values.dtype.kind not in "bif":
        raise SourceInvalidError(
            f"{name}: found {values.dtype} {list(values.shape)}, expected {num} numbers, one for "
            "each of the token_ids"
        )
    return values.astype(np.float64)


def _to_float32(values: Array) -> Array:
    with np.errstate(over="ignore"):  # what it cannot hold is infinite, and refused as such
        return values.astype(np.float32)


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
