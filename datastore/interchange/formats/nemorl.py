"""NeMo-RL: the training data that it logs, `train_data_step{N}.jsonl`, one line a sample.

A line is one sequence of tokens with a loss mask and, as its writer takes samples apart in batches
of one, each value stands in a list of length 1. Arrays of tokens are padded to the longest of their
batch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.token_sequences import (
    TokenSequence,
    find_sampled,
    split_sequences,
)
from replaylake.datastore.errors import EpisodeInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.messages import shorten
from replaylake.datastore.interchange.formats.generations.number_lists import (
    map_ahead,
    parse_lines,
)
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
# Additional values of each token, by column.
_FURTHER: Final = {tokens.PROXIMAL_LOG_PROBS: _PROXIMAL, "action_advantages": _ADVANTAGES}
# What becomes columns; everything else of a line is kept as metadata.
_USED: Final = (*_NEEDED, _LOG_PROBS, _PROXIMAL, _ADVANTAGES, "sample_loss_mask", "idx")
# With dynamic sampling, samples are filtered: `rewards` are then those of all before the filter,
# and the value that stands in a line is another sample's.
_REWARDS: Final = ("filtered_rewards", "rewards")
_CONTENT: Final = "content"
_STEP: Final = re.compile(r"train_data_step(\d+)")
_DIGITS: Final = 16
_MALFORMED: Final = (
    EpisodeInvalidError,
    OverflowError,
    RecursionError,
    SourceInvalidError,
    ValueError,  # also for texts that are no Unicode
)
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
            first_row = 0
            read = _BlockReader(file, number).read
            with closing(map_ahead(read, _blocks(file))) as chunks:
                for chunk in chunks:
                    yield replace(chunk, first_row=first_row)
                    first_row += chunk.table.num_rows


def is_sample(value: Any) -> bool:
    """Whether a line's value is a sample as NeMo-RL writes it."""
    return isinstance(value, dict) and all(_is_single(value.get(name)) for name in _NEEDED)


def read_sample(text: bytes) -> tuple[list[dict[str, Any]], Any]:
    """Return the rows of the sample in a line, and its `idx`, the number in its training step.

    The rows have no episode_id and no training step. The number is None where none is stated.
    Raises: SourceInvalidError, EpisodeInvalidError, OverflowError, RecursionError, ValueError.
    """
    record = _parse(text)
    columns, num_steps = _make_rows([record])
    rows = _to_table(columns, num_steps, [""], None).to_pylist()
    own = [{k: v for k, v in row.items() if k not in ("episode_id", "train_step")} for row in rows]
    return own, record.get("idx")


def _parse(text: bytes) -> dict[str, Any]:
    record = json.loads(text.strip())
    if not isinstance(record, dict):
        raise SourceInvalidError(f"found {type(record).__name__}, expected an object")
    return record


@dataclass(frozen=True)
class _Line:
    """A line of a file. record: its value; None if `parse_lines` cannot parse it."""

    number: int
    text: bytes
    record: Any


class _BlockReader:
    """Reads blocks of lines of a file. number: the file's number in the source."""

    def __init__(self, file: SourceFile, number: int) -> None:
        self._file = file
        match = _STEP.search(file.base_name)
        self._train_step = int(match.group(1)) if match else None
        # Ids begin with the training step, which does not depend on the other files of the source.
        self._prefix = f"step{self._train_step}" if self._train_step is not None else str(number)

    def read(self, block: Sequence[tuple[int, bytes]]) -> Chunk:
        """Return the rows of a block, numbered as if it were the first of the file."""
        parts = [_SCHEMA.empty_table()]
        damage: dict[int, str] = {}
        numbers: list[int] = []
        records = parse_lines([text for _, text in block])
        lines = [_Line(*one, record) for one, record in zip(block, records, strict=True)]
        for _, alike in itertools.groupby(lines, key=lambda line: _find_form(line.record)):
            some = [*alike]
            try:
                table, num_steps = self._read_samples(some)
                parts.append(table)
                numbers += np.repeat([line.number for line in some], num_steps).tolist()
            except _MALFORMED:
                # Line by line, as one of them may be malformed.
                for line in some:
                    part, fault = self._read_sample(line)
                    if fault is not None:
                        where = f"{self._file.name} line {line.number}"
                        damage[len(numbers)] = f"malformed\0{where}: {fault}"
                    parts.append(part)
                    numbers += [line.number] * part.num_rows
        return Chunk(self._file, 0, pa.concat_tables(parts), damage, lines=numbers)

    def _read_samples(self, lines: Sequence[_Line]) -> tuple[pa.Table, Array]:
        """Return the rows of samples of one form, and the number of steps of each.

        Raises: one of `_MALFORMED`.
        """
        if _find_form(lines[0].record) is None:
            raise SourceInvalidError("lines that are to be read one by one")
        columns, num_steps = _make_rows([line.record for line in lines])
        ids = [self._name(line.record, line.number) for line in lines]
        return _to_table(columns, num_steps, ids, self._train_step), num_steps

    def _read_sample(self, line: _Line) -> tuple[pa.Table, str | None]:
        """Return the rows of a sample; for a malformed one, an empty row and the error."""
        try:
            record = _parse(line.text)
            columns, num_steps = _make_rows([record])
            ids = [self._name(record, line.number)]
            return _to_table(columns, num_steps, ids, self._train_step), None
        except _MALFORMED as error:
            ids = [f"{self._prefix}/line{line.number}"]
            return _to_table(_make_empty_row(), np.ones(1, int), ids, self._train_step), str(error)

    def _name(self, record: Mapping[str, Any], line: int) -> str:
        own = record.get("idx", line - 1)
        return f"{self._prefix}/{own.tolist() if isinstance(own, np.ndarray) else own}"


def _blocks(file: SourceFile) -> Iterator[list[tuple[int, bytes]]]:
    """Yield blocks of numbered lines; the last block may be empty."""
    block: list[tuple[int, bytes]] = []
    num_tokens = 0
    for line, text in iter_lines(file):
        block.append((line, text))
        num_tokens += len(text) // 8
        if num_tokens > _CHUNK_TOKENS:
            yield block
            block, num_tokens = [], 0
    yield block


def _find_form(record: Any) -> tuple[bool, ...] | None:
    """Return which of the optional values per token a sample has; None if it is no sample."""
    if not isinstance(record, dict):
        return None
    return tuple(record.get(name) is not None for name in (_LOG_PROBS, *_FURTHER.values()))


def _to_table(
    rows: Mapping[str, Any], num_steps: Array, episode_ids: Sequence[str], train_step: int | None
) -> pa.Table:
    """Return the columns of samples with those that each step of a sample has in common."""
    num = int(num_steps.sum())
    ids = pa.array(episode_ids, pa.string())
    columns = {
        **rows,
        "episode_id": ids.take(pa.array(np.repeat(np.arange(len(ids)), num_steps))),
        "train_step": pa.repeat(pa.scalar(train_step, pa.int64()), num),
        "source_framework": pa.repeat("nemo-rl", num),
    }
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.nulls(num, field.type)
        for field in _SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _make_rows(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], Array]:
    """Return the columns of the generations of samples of one form, and the steps of each sample.

    Raises: SourceInvalidError or EpisodeInvalidError for values that do not go together.
    """
    sequence, lengths, num_padded = _read_sequences(records)
    split, num_steps = split_sequences(sequence, lengths)
    columns: dict[str, Any] = {**split}
    actions = split[tokens.ACTION_TOKENS]
    num, sampled = len(actions), find_sampled(sequence)
    lasts = np.cumsum(num_steps) - 1
    firsts = lasts - num_steps + 1
    for name, theirs in _FURTHER.items():
        if records[0].get(theirs) is not None:
            values = _join_numbers(records, theirs, lengths, num_padded)[sampled]
            columns[name] = pa.ListArray.from_arrays(
                actions.offsets, pa.array(_to_float32(values)), type=_SCHEMA.field(name).type
            )
    # A sample that the loss leaves out whole, as one that was cut off.
    is_left_out = [
        one.get("sample_loss_mask") is not None and not _number(one, "sample_loss_mask")
        for one in records
    ]
    if any(is_left_out):
        known = split.get(tokens.IS_TRAINABLE, pa.nulls(num, pa.bool_()))
        left_out = pa.array(np.repeat(is_left_out, num_steps))
        columns[tokens.IS_TRAINABLE] = pc.if_else(left_out, pa.scalar(False), known)
    reward_names = [next((n for n in _REWARDS if one.get(n) is not None), None) for one in records]
    rewards = np.zeros(num)
    rewards[lasts] = [
        0 if name is None else _number(one, name)
        for one, name in zip(records, reward_names, strict=True)
    ]
    prompts = split[tokens.OBSERVATION_TOKENS]
    ids, begins = np.asarray(prompts.values), np.asarray(prompts.offsets)
    finals = split.get(tokens.FINAL_OBSERVATION_TOKENS)
    has_final = np.zeros(num, np.bool_) if finals is None else np.asarray(finals.is_valid())
    texts: list[Sequence[str] | None] = []
    metadata: list[str | None] = [None] * num
    for number, (one, reward_name) in enumerate(zip(records, reward_names, strict=True)):
        last = lasts[number]
        own = _find_texts(one, int(num_steps[number]), bool(has_final[last]))
        texts.append(own)
        used = {*_USED, reward_name, *((_CONTENT,) if own is not None else ())}
        if rest := {name: value for name, value in one.items() if name not in used}:
            metadata[firsts[number]] = _dump(rest)
    return {
        **columns,
        **_join_texts(texts, num_steps),
        "step": np.arange(num) - np.repeat(firsts, num_steps),
        "reward": pa.array(
            rewards, mask=np.repeat([name is None for name in reward_names], num_steps)
        ),
        "terminated": np.isin(np.arange(num), lasts),
        "truncated": np.zeros(num, np.bool_),
        "group_id": pa.array(
            [_hash_prompt(ids[begins[first] : begins[first + 1]]) for first in firsts.tolist()]
        ).take(pa.array(np.repeat(np.arange(len(records)), num_steps))),
        "group_id_source": pa.repeat("derived", num),
        "metadata": metadata,
    }, num_steps


def _hash_prompt(ids: Array) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()[:_DIGITS]


def _join_texts(
    texts: Sequence[Sequence[str] | None], num_steps: Array
) -> dict[str, list[str | None]]:
    """Return the columns of the texts of samples; they are empty where there are none."""
    prompts: list[str | None] = []
    completions: list[str | None] = []
    finals: list[str | None] = []
    for own, num in zip(texts, num_steps.tolist(), strict=True):
        known = own if own is not None else [""] * (2 * num)
        prompts += known[: 2 * num : 2]
        completions += known[1 : 2 * num : 2]
        finals += [*[None] * (num - 1), known[2 * num] if len(known) > 2 * num else None]
    return {"prompt_text": prompts, "completion_text": completions, "final_text": finals}


def _make_empty_row() -> dict[str, Any]:
    """Return a row that stands for a line of which nothing could be read."""
    texts = {"prompt_text": [""], "completion_text": [""]}
    return {**texts, "step": [0], "terminated": [False], "truncated": [False]}


def _read_sequences(
    records: Sequence[Mapping[str, Any]],
) -> tuple[TokenSequence, Array, Sequence[int]]:
    """Return the sequences of samples without their padding, one after the other.

    Beside them their lengths, int64 [L], and their lengths with padding.
    """
    lengths: list[int] = []
    num_padded: list[int] = []
    parts: list[Array] = []
    for record in records:
        length = int(_number(record, "input_lengths"))
        own = np.asarray(_single(record, "token_ids"))
        if own.ndim != 1 or own.dtype.kind != "i" or not 0 < length <= len(own):
            raise SourceInvalidError(
                f"token_ids: found {own.dtype} {list(own.shape)} with input_lengths {length}, "
                f"expected a list of at least {length} ids"
            )
        if length < len(own):
            _check_ids(own[length:])
        lengths.append(length)
        num_padded.append(len(own))
        parts.append(own[:length])
    ids = np.concatenate(parts)
    _check_ids(ids)
    num = np.asarray(lengths)
    mask = _join_numbers(records, "token_loss_mask", num, num_padded)
    others = mask[(mask != 0) & (mask != 1)]
    if len(others):
        raise SourceInvalidError(f"token_loss_mask: found {others[0]:g}, expected 0 and 1")
    for record, length, padded in zip(records, lengths, num_padded, strict=True):
        if length < padded:
            _check_padding(np.asarray(_single(record, "token_loss_mask")), length)
    log_probs = None
    if records[0].get(_LOG_PROBS) is not None:
        log_probs = _to_float32(_join_numbers(records, _LOG_PROBS, num, num_padded))
    return TokenSequence(ids.astype(np.int32), mask != 0, log_probs), num, num_padded


def _check_ids(ids: Array) -> None:
    if (outside := (ids < 0) | (ids >= 2**31)).any():
        raise SourceInvalidError(
            f"token_ids: found {ids[outside][0]}, expected ids of 0 or more, in 32 bits"
        )


def _check_padding(mask: Array, length: int) -> None:
    """Check that a mask has only 0 after the tokens."""
    padding = mask[length:].astype(np.float64)
    others = padding[(padding != 0) & (padding != 1)]
    if len(others):
        raise SourceInvalidError(f"token_loss_mask: found {others[0]:g}, expected 0 and 1")
    if padding.any():
        raise SourceInvalidError(
            f"token_loss_mask: found 1 after {length} tokens, where input_lengths says that there "
            "is padding, expected 0"
        )


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


def _join_numbers(
    records: Sequence[Mapping[str, Any]], name: str, lengths: Array, num_padded: Sequence[int]
) -> Array:
    """Return the numbers of samples without those of the padding, float64 [N]."""
    parts = []
    for record, length, padded in zip(records, lengths.tolist(), num_padded, strict=True):
        values = np.asarray(_single(record, name))
        if values.shape != (padded,) or values.dtype.kind not in "bif":
            raise SourceInvalidError(
                f"{name}: found {values.dtype} {list(values.shape)}, expected {padded} numbers, "
                "one for each of the token_ids"
            )
        parts.append(values[:length])
    return np.concatenate(parts, dtype=np.float64)


def _to_float32(values: Array) -> Array:
    with np.errstate(over="ignore"):  # what it cannot hold is infinite, and refused as such
        return values.astype(np.float32)


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=np.ndarray.tolist)
