"""slime: the rollouts that it saves for debugging, each in a file of torch.save.

A sample is one sequence of tokens; its response may hold several generations, and what
was read between them. A file is a pickle: it is loaded with `weights_only`, which executes nothing.
"""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.token_sequences import TokenSequence, split_sequence
from replaylake.datastore.errors import (
    EpisodeInvalidError,
    ExtraMissingError,
    SourceInvalidError,
)
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import dump_metadata
from replaylake.datastore.interchange.formats.generations.messages import (
    GIVEN,
    Message,
    clean_text,
    derive_group,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    REWARD_COMPONENTS,
    Record,
    RecordTables,
    Row,
    describe_generation,
    empty_row,
    measure_row,
    read_flags,
    read_floats,
    read_generations,
    read_ids,
)
from replaylake.datastore.interchange.sources.compression import UNPACKING_ERRORS
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.storage.arrow_values import numbers

# Python lists of numbers take five times the bytes of their pickle.
_MAX_BYTES: Final = 1 << 30
# A pickle states a list once and refers to it often: few bytes become any number of values.
_MAX_SAMPLE_BYTES: Final = 64 << 20
_VALUE_BYTES: Final = 8
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)
_ZIP: Final = b"PK\x03\x04"
_ENDED: Final = "completed"
_CUT_OFF: Final = frozenset(("truncated", "aborted", "failed"))
# Fields that become columns; all others of a sample are metadata.
_USED: Final = frozenset(
    (
        "group_index",
        "index",
        "loss_mask",
        "prompt",
        "response",
        "response_length",
        "reward",
        "rollout_log_probs",
        "status",
        "tokens",
    )
)
# Errors that torch raises for bytes that are not such a file, or that it refuses.
_TORCH_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
)
_SAMPLE_ERRORS: Final = (
    EpisodeInvalidError,
    OverflowError,
    RuntimeError,  # also for values nested too deeply, and tensors that have no data
    SourceInvalidError,
    TypeError,
    ValueError,  # also for texts that are not valid Unicode
)


class SlimeFormat:
    """Files of torch.save with rollout_id and samples."""

    name = "slime"
    about = "slime's debug rollouts: token ids, loss masks and log-probs (.pt)"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        # Any file of torch.save; `read` checks its content.
        if files[0].head(4) != _ZIP:
            return False
        try:
            with zipfile.ZipFile(files[0].path) as archive:
                return any(name.endswith("/data.pkl") for name in archive.namelist())
        except UNPACKING_ERRORS:
            return False

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _SampleTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _SampleTables(RecordTables):
    """Rows of the generations of the samples in some files."""

    unit = "sample"

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        rollout_id, samples = _load(file)
        for place, sample in enumerate(samples):
            try:
                rows = self._read(sample, rollout_id, place)
            except _SAMPLE_ERRORS as error:
                yield Record([empty_row(self._ids.next(None))], place, 0, str(error))
            else:
                yield Record(rows, place, sum(map(measure_row, rows)))

    def finish(self) -> Sequence[str]:
        return self._ids.notes()

    def _read(self, sample: Any, rollout_id: int | str | None, place: int) -> list[Row]:
        if not isinstance(sample, dict):
            raise SourceInvalidError(f"found {_show(sample)}, expected a dict")
        _refuse_large(sample)
        columns = _read_tokens(sample)
        num = len(columns[tokens.ACTION_TOKENS])
        messages = _read_prompt(sample.get("prompt"))
        answer = sample.get("response")
        rest = {k: v for k, v in sample.items() if k not in _USED}
        # A response with several generations also has the observations between them.
        said: list[Message] = []
        if isinstance(answer, str) and num == 1:
            said = [{"role": "assistant", "content": answer}]
        elif answer is not None:
            rest["response"] = answer
        group, source = derive_group(messages)
        if isinstance(sample.get("group_index"), int):
            group, source = f"rollout{rollout_id}/{sample['group_index']}", GIVEN
        status = sample.get("status")
        if status is not None and not isinstance(status, str):
            raise SourceInvalidError(f"status: found {shorten(status)}, expected text")
        versions = _read_versions(sample.get("weight_versions"))
        shared: Row = {
            **self.paths.find({"": sample}),
            "agent_id": "",
            "terminated": False,
            "truncated": False,
            "policy_version": min(versions) if versions else None,
            "group_id": group,
            "group_id_source": source,
            "status": None if status is None else clean_text(status),
            "source_framework": "slime",
            "train_step": rollout_id if isinstance(rollout_id, int) else None,
        }
        own = sample.get("index")
        own = own if isinstance(own, int) else f"sample{place}"
        reward, components = _read_reward(sample.get("reward"))
        rows = []
        for number in range(num):
            texts = describe_generation(messages if not number else [], said[0] if said else None)
            row = {name: _to_value(column[number]) for name, column in columns.items()}
            rows.append({**texts, **shared, **row, "step": number, "env_step": number})
            rows[-1]["reward"] = None if reward is None else 0.0
        self.paths.apply(rows, {k: v for k, v in shared.items() if k in self.paths.kinds})
        rows[0]["metadata"] = _dump_rest(rest)
        rows[-1]["reward"], rows[-1][REWARD_COMPONENTS] = reward, components
        rows[-1]["terminated"], rows[-1]["truncated"] = status == _ENDED, status in _CUT_OFF
        episode_id = self._ids.next(f"rollout{rollout_id}/{own}")
        return [{**row, "episode_id": episode_id} for row in rows]


def _load(file: SourceFile) -> tuple[int | str | None, list[Any]]:
    """Return a file's rollout_id and samples, without executing anything in it."""
    torch = _torch()
    try:
        with zipfile.ZipFile(file.path) as archive:
            num_bytes = sum(info.file_size for info in archive.infolist())
        if num_bytes <= _MAX_BYTES:
            value = torch.load(file.path, map_location="cpu", weights_only=True)
    except _TORCH_ERRORS as error:
        reason = " ".join(str(error).split())
        raise SourceInvalidError(
            f"{file.name}: torch.load with weights_only refused it ({reason[:300]}). None of it "
            "was executed: the file is damaged, or has objects besides numbers, texts and tensors."
        ) from error
    if num_bytes > _MAX_BYTES:
        raise SourceInvalidError(
            f"{file.name}: found {num_bytes:,} bytes, expected at most {_MAX_BYTES:,}, because a "
            "file is read as a whole. Save fewer samples in each."
        )
    samples = value.get("samples") if isinstance(value, dict) else None
    if not isinstance(samples, list):
        found = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise SourceInvalidError(
            f"{file.name}: found a file of torch.save with {shorten(found)}, expected slime's "
            "rollout_id and samples."
        )
    rollout_id = value.get("rollout_id")
    if isinstance(rollout_id, str):
        rollout_id = clean_text(rollout_id)
    return (rollout_id if isinstance(rollout_id, int | str) else None), samples


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise ExtraMissingError(
            "reading files of torch.save needs torch, which is not installed: "
            "pip install 'replaylake[learn]'"
        ) from error
    return torch


def _read_tokens(sample: Mapping[str, Any]) -> dict[str, pa.Array]:
    """Return the token columns of a sample's generations."""
    ids = read_ids(_to_list(sample.get("tokens"), "tokens"), "tokens")
    length = sample.get("response_length")
    is_length = isinstance(length, int) and not isinstance(length, bool)
    if not is_length or not 0 <= int(str(length)) <= len(ids):
        raise SourceInvalidError(
            f"response_length: found {shorten(length)}, expected 0 to {len(ids)}, the number of "
            "tokens"
        )
    num = int(str(length))
    start = len(ids) - num
    mask = np.zeros(len(ids), np.bool_)
    mask[start:] = True
    if sample.get("loss_mask") is not None:
        mask[start:] = read_flags(_to_list(sample["loss_mask"], "loss_mask"), "loss_mask", num)
    log_probs = None
    if sample.get("rollout_log_probs") is not None:
        log_probs = np.zeros(len(ids), np.float32)
        own = read_floats(
            _to_list(sample["rollout_log_probs"], "rollout_log_probs"), "rollout_log_probs", num
        )
        log_probs[start:] = own
    is_removed = sample.get("remove_sample") is True
    if not num:
        return _make_empty(ids)
    has_sampled = mask.any() or (log_probs is not None and bool(log_probs.any()))
    if not has_sampled:
        # The loss ignores the whole response, and which of its tokens were sampled is unknown.
        mask[start:], is_removed = True, True
    columns = split_sequence(TokenSequence(ids, mask, log_probs))
    if is_removed:
        columns[tokens.IS_TRAINABLE] = pa.array([False] * len(columns[tokens.ACTION_TOKENS]))
    return columns


def _make_empty(ids: Array) -> dict[str, pa.Array]:
    """Return the columns of a sample for which nothing was generated."""
    kinds = tokens.TOKEN_TYPES
    return {
        tokens.OBSERVATION_TOKENS: pa.array([ids], kinds[tokens.OBSERVATION_TOKENS]),
        tokens.ACTION_TOKENS: pa.array([[]], kinds[tokens.ACTION_TOKENS]),
        tokens.IS_TRAINABLE: pa.array([False]),
    }


def _to_value(scalar: pa.Scalar) -> Any:
    """Return a value of a token column; a list as an array of its numbers."""
    is_list = scalar.is_valid and isinstance(scalar, pa.ListScalar)
    return numbers(scalar.values) if is_list else scalar.as_py()


def _refuse_large(sample: Mapping[Any, Any]) -> None:
    """Refuse a sample whose values, each counted as often as it occurs, are too many.

    Tensors do not count: they are converted only where their own size is checked. Cost: each
    list or dict is visited once, however often it occurs. Raises: SourceInvalidError.
    """
    # A list that is measured is inside all those whose size is not known yet.
    sizes: dict[int, int | None] = {}
    ahead: list[Any] = [sample]
    while ahead:
        value = ahead[-1]
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        containers = [one for one in inner if isinstance(one, _CONTAINERS)]
        if id(value) not in sizes:
            sizes[id(value)] = None
            if any(sizes.get(id(one), 0) is None for one in containers):
                raise SourceInvalidError("found a list that contains itself, expected values")
            ahead += [one for one in containers if id(one) not in sizes]
            continue
        ahead.pop()
        num_bytes = _VALUE_BYTES * len(inner)
        num_bytes += sum(len(one) for one in inner if isinstance(one, str | bytes | bytearray))
        num_bytes += sum(sizes[id(one)] or 0 for one in containers)
        sizes[id(value)] = num_bytes
        if num_bytes > _MAX_SAMPLE_BYTES:
            raise SourceInvalidError(
                f"found more than {_MAX_SAMPLE_BYTES >> 20} MiB of values, each counted as often "
                "as it occurs, expected at most that many in a sample"
            )


def _show(value: Any) -> str:
    """Return a short text of a value whose size is unknown."""
    is_short = value is None or isinstance(value, bool | int | float)
    return shorten(value) if is_short else type(value).__name__


def _to_list(value: Any, name: str) -> Any:
    """Return a tensor as a list of its numbers; any other value unchanged.

    Raises: SourceInvalidError for one that is no row of stored numbers.
    """
    if not hasattr(value, "untyped_storage"):
        # NumPy would combine lists of lists, however many.
        if isinstance(value, list) and any(isinstance(one, list | tuple) for one in value):
            raise SourceInvalidError(f"{name}: found lists in it, expected a list of numbers")
        return value
    shape = list(value.shape)
    try:
        num_bytes = value.untyped_storage().nbytes()
        # A tensor may repeat what is stored, without end.
        is_stored = len(shape) == 1 and value.numel() * value.itemsize <= num_bytes
        numbers = value.tolist() if is_stored else None
    except RuntimeError:  # sparse, or without data
        numbers = None
    if numbers is None:
        raise SourceInvalidError(
            f"{name}: found a tensor of shape {shape}, layout {value.layout} on {value.device}, "
            "expected one dimension and every number stored"
        )
    return numbers


def _read_prompt(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    several = value if isinstance(value, list) else []
    if any(not isinstance(one, dict) or not isinstance(one.get("role"), str) for one in several):
        raise SourceInvalidError(f"prompt: found {shorten(value)}, expected text or messages")
    return list(several)


def _read_versions(value: Any) -> list[int]:
    several = value if isinstance(value, list) else []
    return [int(one) for one in several if str(one).isascii() and str(one).isdecimal()]


def _read_reward(value: Any) -> tuple[float | None, list[dict[str, Any]] | None]:
    """Return a reward, or the components of one that is a dict; which of them counts is unknown."""
    if value is None:
        return None, None
    if isinstance(value, dict):
        numbers = {k: v for k, v in value.items() if _is_number(v)}
        parts = [
            {"name": clean_text(str(name)), "score": float(score), "weight": None}
            for name, score in numbers.items()
        ]
        return None, parts or None
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            shape = list(value.shape)
            raise SourceInvalidError(
                f"reward: found a tensor of shape {shape}, expected a number or a dict"
            ) from None
    if not _is_number(value):
        raise SourceInvalidError(f"reward: found {shorten(value)}, expected a number or a dict")
    return float(value), None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _dump_rest(rest: Mapping[str, Any]) -> str:
    """Return fields that have no column as JSON; for a tensor, its type and shape."""

    def describe(value: Any) -> Any:
        if hasattr(value, "shape"):
            return {"tensor": str(value.dtype), "shape": list(value.shape)}
        return str(value)

    return dump_metadata(json.loads(json.dumps(rest, default=describe)))
