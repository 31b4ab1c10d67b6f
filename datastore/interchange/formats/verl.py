"""verl: the generations that it dumps, `{global_step}.jsonl`, one output of a model per line.

They are texts. The trainer of version 1 names the prompt's group, the session, and the position of
an output within it; the trainer before version 1 does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.episodes import tokens
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import dump_metadata
from replaylake.datastore.interchange.formats.generations.messages import (
    GIVEN,
    clean_text,
    derive_group,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    MappedPaths,
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

_NEEDED: Final = ("input", "output", "gts", "score", "step")
_KEY: Final = "uid"
# Fields that become columns; `gts` and the values of a reward function are metadata.
_USED: Final = frozenset(("input", "output", "score", "step"))


class VerlFormat:
    """Lines with input, output, gts, score and step."""

    name = "verl"
    about = "verl's dumps of rollouts and validation, {global_step}.jsonl: texts and scores"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return is_sample(read_first_line(files[0]))

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _SampleTables(files, options)
        return read_generations(tables, tables.notes, files, options)


@dataclass
class _Session:
    """The outputs of one session, as far as they were read, with their positions in it.

    line, last: the lines of its first and last output. texts: each one's prompt and answer.
    """

    name: str
    line: int
    last: int
    positions: list[int]
    rows: list[Row]
    texts: list[tuple[str, str]]
    fault: str | None = None


class _SampleTables(RecordTables):
    """Rows of the outputs of the sessions in some files."""

    noun = "sessions"

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        sessions = _find_sessions(file)
        for line, text in iter_lines(file):
            session = sessions.pop(line, None)
            one = session or _Session(str(line - 1), line, line, [0], [], [])
            try:
                (row,) = parse_line(text, self._read)
            except SourceInvalidError as error:
                where = "" if line == one.line else f"line {line}: "
                one.fault = one.fault or f"{where}{error}"
            else:
                one.texts.append((row.pop("prompt"), row.pop("answer")))
                one.rows.append(row)
            if line == one.last:
                yield self._finish(one)
                one.rows, one.texts = [], []

    def finish(self) -> Sequence[str]:
        return self._ids.notes()

    def _read(self, record: dict[str, Any]) -> list[Row]:
        return _read_output(record, self.paths)

    def _finish(self, session: _Session) -> Record:
        """Return the record of a session, whose score is that of its last output."""
        # Trainers reorder a batch: outputs stand in any order, and between those of others.
        order = sorted(range(len(session.positions)), key=session.positions.__getitem__)
        found = [session.positions[place] for place in order]
        fault = session.fault
        if fault is None and found != [*range(len(found))]:
            fault = (
                f"uid: found the outputs {shorten(found)} of session {shorten(session.name)}, "
                "expected 0, 1, 2 and so on, each once"
            )
        if fault is not None:
            return Record([empty_row(self._ids.next(None))], session.line, 0, fault)
        rows = [session.rows[place] for place in order]
        texts = [session.texts[place] for place in order]
        score, step = rows[-1]["reward"], rows[-1]["train_step"]
        # A dump of validation repeats the score on each output; verl itself takes the last one's.
        for number, row in enumerate(rows):
            row |= {"step": number, "env_step": number}
            if number:
                row |= _describe_next(texts[number - 1], texts[number])
            if score is not None:
                row["reward"] = 0.0
        self.paths.apply(rows, self._take_ends(rows))
        rows[-1]["reward"] = score
        rows[-1]["terminated"] = score is not None
        episode_id = self._ids.next(f"step{step}/{session.name}")
        for row in rows:
            row["episode_id"] = episode_id
        return Record(rows, session.line, sum(map(measure_row, rows)))

    def _take_ends(self, rows: Sequence[Row]) -> Row:
        """Return the mapped values of the reward and the end of a session: its last ones."""
        paths = {self.paths.get(ours) for ours in ("reward", "terminated", "truncated")}
        return {name: value for name, value in rows[-1].items() if name in paths}


def is_sample(value: Any) -> bool:
    """Whether a line's value is an output of a model as verl writes it."""
    if not isinstance(value, dict) or not all(name in value for name in _NEEDED):
        return False
    return isinstance(value["input"], str) and isinstance(value["output"], str)


def read_sample(text: bytes, paths: MappedPaths) -> Row:
    """Return the row of a line that is a whole episode, without an id.

    Raises: SourceInvalidError for a line that is malformed, or that is one output of a session.
    """
    (row,) = parse_line(text, lambda record: _read_output(record, paths))
    del row["prompt"], row["answer"]
    if "sample_id" in row:
        raise SourceInvalidError(
            f"uid: found session {row['sample_id']} of {shorten(row['group_id'])}, whose outputs "
            "are lines each, expected lines without a session. Ingest the file when it is complete"
        )
    return {**row, "step": 0, "env_step": 0, "terminated": row["reward"] is not None}


def _read_output(record: dict[str, Any], paths: MappedPaths) -> list[Row]:
    """Return the row of an output, with its `prompt` and `answer`; it has no number yet."""
    prompt, answer = (_read_text(record, name) for name in ("input", "output"))
    score = record.get("score")
    step = read_step(record.get("step"), "step")
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if score is not None and (not is_number or score != score):
        raise SourceInvalidError(f"score: found {shorten(score)}, expected a number or null")
    prompts = [{"role": "user", "content": prompt}]
    row: Row = {
        **describe_generation(prompts, {"role": "assistant", "content": answer}),
        **paths.find({"": record}),
        "prompt": prompt,
        "answer": answer,
        "agent_id": "",
        "reward": None if score is None else float(score),
        "terminated": False,
        "truncated": False,
        "train_step": step,
        "source_framework": "verl",
        "metadata": dump_metadata({k: v for k, v in record.items() if k not in _USED}),
    }
    if (parts := _split_uid(record)) is not None:
        row["group_id"], row["group_id_source"] = clean_text(parts[0]), GIVEN
        row["sample_id"] = parts[1]
    else:
        step_of = {"role": "step", "content": step}
        row["group_id"], row["group_id_source"] = derive_group([step_of, *prompts])
    return [row]


def _find_sessions(file: SourceFile) -> dict[int, _Session]:
    """Return the session of each line that names one. Cost: the file is parsed once more."""
    sessions: dict[tuple[int, str], _Session] = {}
    places: dict[int, _Session] = {}
    before: _Session | None = None
    for line, text in iter_lines(file):
        try:
            record = json.loads(text)
        except (RecursionError, ValueError):
            record = None
        step = record.get("step") if isinstance(record, dict) else None
        parts = _split_uid(record) if isinstance(record, dict) else None
        if not isinstance(step, int):
            # Its session is not known: it may be the last output of the one before it.
            if before is not None and before.fault is None:
                before.fault = f"line {line}, which may be an output of this session, is malformed"
            continue
        if parts is None:
            before = None  # a line without a session is an episode
            continue
        name = clean_text(f"{parts[0]}_{parts[1]}")
        session = sessions.setdefault((step, name), _Session(name, line, line, [], [], []))
        session.last = line
        session.positions.append(int(parts[2]))
        places[line] = before = session
    return places


def _split_uid(record: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the parts of `{uid}_{session}_{index}`; the first may have underscores."""
    parts = str(record.get(_KEY, "")).rsplit("_", 2)
    is_complete = len(parts) == 3 and all(p.isascii() and p.isdecimal() for p in parts[1:])
    # Only numbers of this length are certain to convert.
    return (parts[0], parts[1], parts[2]) if is_complete and len(parts[2]) < 19 else None


def _describe_next(before: tuple[str, str], after: tuple[str, str]) -> Row:
    """Return the texts of a later output of a session, whose prompt repeats what was before.

    before, after: the prompts and answers of two successive outputs.
    """
    prompt, answer = after
    read = "".join(before)
    new = prompt.removeprefix(read)
    prompts = [{"role": "user", "content": new}] if new else []
    texts = describe_generation(prompts, {"role": "assistant", "content": answer})
    return texts if prompt.startswith(read) else {**texts, tokens.IS_CONTINUATION: False}


def _read_text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise SourceInvalidError(f"{name}: found {shorten(value)}, expected text")
    return value
