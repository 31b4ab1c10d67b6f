"""EasyR1: the generations that it logs, `generations.log`, a block of text for each.

A block is `[prompt] ...`, `[output] ...`, `[ground_truth] ...`, `[score] ...`, each from the start
of a line, and an empty line. Nothing in the texts is escaped, so one that has such a line itself
cannot be told from the next field: its block is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import dump_json
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
    measure_row,
    read_generations,
)
from replaylake.datastore.interchange.sources.source import SourceFile

_FIELDS: Final = ("prompt", "output", "ground_truth", "score")
_MARKER: Final = re.compile(rb"\[(prompt|output|ground_truth|score)\] ?")
_START: Final = b"[prompt] "
_NUMBER: Final = re.compile(r"-?(\d+(\.\d*)?([eE][-+]?\d+)?|nan|inf)")
_MAX_BLOCK_BYTES: Final = 64 << 20
_LOOK_BYTES: Final = 8 << 20


class EasyR1Format:
    """Blocks of text with the markers [prompt], [output], [ground_truth] and [score]."""

    name = "easyr1log"
    about = "EasyR1's generations.log: blocks of prompt, output, ground truth and score"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        head = files[0].head(_LOOK_BYTES) if files[0].head(len(_START)) == _START else b""
        return b"\n[output] " in head and b"\n[ground_truth] " in head

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _BlockTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _BlockTables(RecordTables):
    """Rows of the blocks in some files."""

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        for line, lines in _iter_blocks(file):
            try:
                row = self._read(lines, line)
            except (OverflowError, SourceInvalidError, ValueError) as error:
                yield Record([empty_row(self._ids.next(None))], line, 0, str(error))
            else:
                yield Record([row], line, measure_row(row))

    def finish(self) -> Sequence[str]:
        return self._ids.notes()

    def _read(self, lines: Sequence[bytes], first: int) -> Row:
        fields = _split(lines, first)
        text = fields["score"].strip()
        if not _NUMBER.fullmatch(text):
            raise SourceInvalidError(f"score: found {shorten(text)}, expected a number")
        score = float(text)
        if score - score != 0:
            raise SourceInvalidError(f"score: found {text}, expected a finite number")
        prompt = [{"role": "user", "content": fields["prompt"]}]
        group, source = derive_group(prompt)
        return {
            **describe_generation(prompt, {"role": "assistant", "content": fields["output"]}),
            **self.paths.find({"": {**fields, "score": score}}),
            "episode_id": self._ids.next(None),
            "agent_id": "",
            "step": 0,
            "env_step": 0,
            "reward": score,
            "terminated": True,
            "truncated": False,
            "group_id": group,
            "group_id_source": source,
            "source_framework": "easyr1",
            "metadata": dump_json({"ground_truth": clean_text(fields["ground_truth"])}),
        }


def _iter_blocks(file: SourceFile) -> Iterator[tuple[int, list[bytes]]]:
    """Yield blocks with the number of their first line: each ends at an empty line after a score.

    Raises: SourceInvalidError for one that is too long.
    """
    with file.open() as stream:
        lines: list[bytes] = []
        first = number = size = 0
        while line := stream.readline(_MAX_BLOCK_BYTES):
            number += 1
            is_end = not line.strip() and bool(lines) and lines[-1].startswith(b"[score]")
            if not lines and not line.strip():
                continue
            if not is_end:
                first = first if lines else number
                lines.append(line)
                size += len(line)
                if size >= _MAX_BLOCK_BYTES:
                    raise SourceInvalidError(
                        f"{file.name} line {first}: found a block of more than "
                        f"{_MAX_BLOCK_BYTES >> 20} MiB, expected a generation's texts."
                    )
                continue
            yield first, lines
            lines, size = [], 0
        if lines:
            yield first, lines


def _split(lines: Sequence[bytes], first: int) -> dict[str, str]:
    """Return the fields of a block.

    Raises: SourceInvalidError where they are not there once each, in their order: a text has a line
    that looks like a field, or the log is cut off.
    """
    starts: list[tuple[str, int, int]] = []
    for place, line in enumerate(lines):
        if (match := _MARKER.match(line)) is not None:
            starts.append((match[1].decode(), place, match.end()))
    found = [name for name, *_ in starts]
    if found != [*_FIELDS] or starts[0][1] != 0:
        # Where the text is ambiguous, say at which line.
        places = [p for (n, p, _), e in zip(starts, _FIELDS, strict=False) if n != e]
        places += [p for _, p, _ in starts[len(_FIELDS) :]]
        where = places[0] if places else 0
        raise SourceInvalidError(
            f"found the fields {', '.join(found) or 'none'} (line {first + where}), expected "
            f"{', '.join(_FIELDS)}, once each: texts that contain a field's marker are ambiguous"
        )
    ends = [place for _, place, _ in starts[1:]] + [len(lines)]
    fields = {}
    for (name, place, length), end in zip(starts, ends, strict=True):
        data = b"".join([lines[place][length:], *lines[place + 1 : end]])
        text = data.removesuffix(b"\n").decode("utf-8")
        fields[name] = text
    return fields
