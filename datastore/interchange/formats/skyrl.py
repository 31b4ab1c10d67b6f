"""SkyRL: the evaluations that it dumps, `dumped_evals/global_step_{N}_evals/{source}.jsonl`.

A line is one sample, as texts. The file of aggregated metrics beside them has no samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import dump_metadata
from replaylake.datastore.interchange.formats.generations.messages import (
    clean_text,
    derive_group,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    Record,
    RecordTables,
    Row,
    describe_generation,
    empty_row,
    iter_lines,
    measure_row,
    parse_line,
    read_first_line,
    read_generations,
)
from replaylake.datastore.interchange.sources.source import SourceFile

_NEEDED: Final = ("input_prompt", "output_response", "score", "env_class", "data_source")
# Fields that become columns; all others are metadata.
_USED: Final = frozenset(("input_prompt", "output_response", "score", "stop_reason"))
_STEP: Final = re.compile(r"global_step_(\d{1,18})_evals")
_CUT_OFF: Final = frozenset(("length", "abort"))
# The file of metrics comes before those of samples.
_NUM_LOOKED_AT: Final = 8


class SkyRlFormat:
    """Lines with input_prompt, output_response, score, env_class and data_source."""

    name = "skyrl"
    about = "SkyRL's dumped_evals/global_step_{N}_evals/{source}.jsonl: texts and scores"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return any(_is_sample(read_first_line(file)) for file in files[:_NUM_LOOKED_AT])

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _SampleTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _SampleTables(RecordTables):
    """Rows of the samples in some files."""

    def __init__(self, files: Sequence[SourceFile], options: ReadOptions) -> None:
        super().__init__(files, options)
        self._metrics: list[str] = []

    def begin(self) -> None:
        super().begin()
        self._metrics = []

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        if _is_metrics(read_first_line(file)):
            self._metrics.append(file.name)
            return
        match = _STEP.search(file.relative) or _STEP.search(file.stored.path.parent.name)
        step = None if match is None else int(match[1])
        prefix = file.base_name.removesuffix(".jsonl") if step is None else f"step{step}"
        for line, text in iter_lines(file):
            try:
                (row,) = parse_line(text, self._read)
            except SourceInvalidError as error:
                yield Record([empty_row(self._ids.next(None))], line, 0, str(error))
                continue
            name = f"{prefix}/{file.base_name.removesuffix('.jsonl')}/{line - 1}"
            row |= {"episode_id": self._ids.next(clean_text(name)), "train_step": step}
            yield Record([row], line, measure_row(row))

    def finish(self) -> Sequence[str]:
        notes = self._ids.notes()
        if self._metrics:
            notes.append(
                f"{len(self._metrics)} files have metrics and no samples: not read "
                f"({', '.join(self._metrics[:3])})"
            )
        return notes

    def _read(self, record: dict[str, Any]) -> list[Row]:
        for name in ("input_prompt", "output_response"):
            if not isinstance(record.get(name), str):
                raise SourceInvalidError(
                    f"{name}: found {shorten(record.get(name))}, expected text"
                )
        prompt = [{"role": "user", "content": record["input_prompt"]}]
        answer = {"role": "assistant", "content": record["output_response"]}
        reason = record.get("stop_reason")
        if reason is not None and not isinstance(reason, str):
            raise SourceInvalidError(f"stop_reason: found {shorten(reason)}, expected text or null")
        is_cut = reason in _CUT_OFF
        score, group = _read_score(record.get("score")), derive_group(prompt)
        rest = {k: v for k, v in record.items() if k not in _USED}
        return [
            {
                **describe_generation(prompt, answer),
                **self.paths.find({"": record}),
                "agent_id": "",
                "step": 0,
                "env_step": 0,
                "reward": score,
                "terminated": score is not None and not is_cut,
                "truncated": is_cut,
                "group_id": group[0],
                "group_id_source": group[1],
                "finish_reason": None if reason is None else clean_text(reason),
                "split": "eval",
                "source_framework": "skyrl",
                "metadata": dump_metadata(
                    {**rest, **({"score": record["score"]} if _is_list(record) else {})}
                ),
            }
        ]


def _is_list(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("score"), list)


def _is_sample(value: Any) -> bool:
    return isinstance(value, dict) and all(name in value for name in _NEEDED)


def _is_metrics(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(str(name).startswith("eval/") for name in value)
    )


def _read_score(value: Any) -> float | None:
    """Return a score; of a list, which has a value for each token, the sum."""
    several = value if isinstance(value, list) else [value]
    if value is None or not several:
        return None
    for one in several:
        is_number = isinstance(one, int | float) and not isinstance(one, bool)
        if not is_number or one != one:
            raise SourceInvalidError(f"score: found {shorten(value)}, expected numbers or null")
    return float(sum(several))
