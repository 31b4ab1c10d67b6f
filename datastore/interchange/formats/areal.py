"""AReaL: the trajectories that it dumps, `rollout/{version}/{task_id}.jsonl`, a sample per line.

They are texts. Two fields of its writer are not what their names say: `head_version` is that of the
prompt (-1), and `prompt_len` is where the prompt would end if all sampled tokens came after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import dump_metadata
from replaylake.datastore.interchange.formats.generations.messages import GIVEN, shorten
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
    read_step,
)
from replaylake.datastore.interchange.sources.source import SourceFile

_NEEDED: Final = ("task_id", "sample_idx", "seqlen", "tail_version", "prompt", "completion")
# Fields that become columns; all others are metadata.
_USED: Final = frozenset(
    ("task_id", "sample_idx", "tail_version", "reward", "prompt", "completion")
)


class ArealFormat:
    """Lines with task_id, sample_idx, seqlen, tail_version, prompt and completion."""

    name = "areal"
    about = "AReaL's rollout/{version}/{task_id}.jsonl: texts, rewards and policy versions"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        record = read_first_line(files[0])
        return isinstance(record, dict) and all(name in record for name in _NEEDED)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _SampleTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _SampleTables(RecordTables):
    """Rows of the samples in some files."""

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        for line, text in iter_lines(file):
            try:
                rows = parse_line(text, self._read)
            except SourceInvalidError as error:
                yield Record([empty_row(self._ids.next(None))], line, 0, str(error))
            else:
                yield Record(rows, line, sum(map(measure_row, rows)))

    def finish(self) -> Sequence[str]:
        return self._ids.notes()

    def _read(self, record: dict[str, Any]) -> list[Row]:
        texts = [record.get(name) for name in ("prompt", "completion")]
        for name, text in zip(("prompt", "completion"), texts, strict=True):
            if not isinstance(text, str):
                raise SourceInvalidError(f"{name}: found {shorten(text)}, expected text")
        task, sample, version = (
            read_step(record.get(name), name) for name in ("task_id", "sample_idx", "tail_version")
        )
        reward = record.get("reward")
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
        if reward is not None and (not is_number or reward != reward):
            raise SourceInvalidError(f"reward: found {shorten(reward)}, expected a number or null")
        prompt, completion = texts
        group = f"version{version}/{task}"
        rest = {k: v for k, v in record.items() if k not in _USED}
        return [
            {
                **describe_generation(
                    [{"role": "user", "content": prompt}],
                    {"role": "assistant", "content": completion},
                ),
                **self.paths.find({"": record}),
                "episode_id": self._ids.next(f"{group}/{sample}"),
                "agent_id": "",
                "step": 0,
                "env_step": 0,
                "reward": None if reward is None else float(reward),
                "terminated": reward is not None,
                "truncated": False,
                "policy_version": version,
                "group_id": group,
                "group_id_source": GIVEN,
                "sample_id": str(sample),
                "source_framework": "areal",
                "metadata": dump_metadata(rest) if rest else None,
            }
        ]
