"""Erasure: after a subject has left, none of its texts is in any byte of the dataset's files.

Each subject has texts of its own in every column that takes one. They are looked for in the bytes
of each file, in every decompressed page of a Parquet file, whether a row has the value or not, in
its statistics, and in what is base64 inside of another file.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.copy.copy import copy
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.trim import trim
from replaylake.datastore.maintenance.vacuum import vacuum
from replaylake.datastore.query import summaries
from replaylake.datastore.storage.log.folder import LogFolder

PageBytes = Callable[[Path], bytes]
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{40,}={0,2}")
_WRITTEN_STEPS = 8  # of shorter ones no summary is kept
_ABSURDLY_LATE_MS = 1 << 43  # all that vacuum looks at is older than this


@dataclass(frozen=True)
class Subject:
    """The texts of one person: the ids of a written, a logged and two refused episodes, and more.

    `mark` stands in columns of all kinds, nested ones too.
    """

    agent_id: str
    policy: str
    written: str
    logged: str
    refused: str
    unfit: str
    mark: str
    note: str

    def texts(self) -> list[str]:
        return [getattr(self, field.name) for field in fields(self)]


def _subject() -> Subject:
    return Subject(*(f"{field.name}-{secrets.token_hex(8)}" for field in fields(Subject)))


def _written(subject: Subject) -> Episode:
    num = _WRITTEN_STEPS
    names = pa.array([subject.mark] * num).dictionary_encode()
    ends = pa.array(range(num + 1), pa.int32())
    return Episode(
        subject.written,
        np.zeros((num, 2), np.float32),
        np.arange(num) % 2,
        np.ones(num),
        agent_id=subject.agent_id,
        source_episode_id=subject.written,
        terminated=True,
        policies=np.array([subject.policy] * num, object),
        policy_versions=np.ones(num, np.int64),
        extras={
            "mark": names,
            "note": pa.array([subject.note] * num),
            "parts": pa.StructArray.from_arrays([names], ["mark"]),
            "tags": pa.ListArray.from_arrays(ends, names),
            "counts": pa.MapArray.from_arrays(ends, names, pa.array(range(num))),
        },
    )


def _lines(subject: Subject) -> list[dict[str, Any]]:
    """An episode, one whose last step is there twice, and one with an action of no space."""
    faults = {subject.logged: {}, subject.refused: {"step": 1}, subject.unfit: {"action": 7}}
    return [
        {
            "episode_id": name,
            "step": step,
            "agent_id": subject.agent_id,
            "who": subject.policy,
            "policy_version": 1,
            "observation": [0.5, step],
            "action": step % 2,
            "reward": 1.0,
            "terminated": step == 2,
            "note": subject.note,
            **(fault if step == 2 else {}),
        }
        for name, fault in faults.items()
        for step in range(3)
    ]


@pytest.fixture
def subjects() -> list[Subject]:
    return [_subject() for _ in range(3)]


@pytest.fixture
def filled(lake: Lake, subjects: list[Subject], tmp_path: Path) -> Lake:
    """Two commits of a writer and one of an ingest, with all that is derived from them."""
    dataset = lake.dataset("d")
    dataset.append([_written(one) for one in subjects[:2]])
    dataset.append([_written(subjects[2])])
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for one in subjects for line in _lines(one)))
    receipt = ingest(lake, [log], "d", options=ReadOptions({"policy": "who"}))
    assert (receipt.num_quarantined, receipt.steps.committed) == (18, 9)
    assert summaries.refresh(dataset.snapshot().table)
    dataset.snapshot().replay()
    return lake


def _bytes(path: Path, page_bytes: PageBytes) -> bytes:
    data = path.read_bytes()
    if data[:4] == b"PAR1":
        data += page_bytes(path)
    for found in _BASE64.findall(data):
        text = found.rstrip(b"=")
        data += base64.b64decode(text[: len(text) // 4 * 4])
    return data


def _holding(paths: list[Path], subject: Subject, page_bytes: PageBytes) -> dict[str, list[str]]:
    found = {}
    for path in paths:
        data = _bytes(path, page_bytes)
        if held := [text for text in subject.texts() if text.encode() in data]:
            found[path.name] = held
    return found


def _files(lake: Lake) -> list[Path]:
    return [path for path in Path(lake.path).rglob("*") if path.is_file()]


def _live(lake: Lake) -> list[Path]:
    tables = lake.dataset("d").tables()
    return [path for table in tables for path in table.snapshot().paths()]


def _checkpoint(lake: Lake) -> None:
    for table in lake.dataset("d").tables():
        LogFolder(lake.storage, table.root).write_checkpoint(table.log.newest())


def test_the_texts_are_found_where_they_are(
    filled: Lake, subjects: list[Subject], page_bytes: PageBytes
) -> None:
    for subject in subjects:
        held = _holding(_files(filled), subject, page_bytes)
        assert {text for texts in held.values() for text in texts} == set(subject.texts())


@pytest.mark.parametrize("column", ["agent_id", "policy"])
def test_purge_leaves_no_byte(
    filled: Lake, subjects: list[Subject], page_bytes: PageBytes, column: str
) -> None:
    gone, *others = subjects
    _checkpoint(filled)
    done = purge(filled, "d", f"{column} = '{getattr(gone, column)}'")
    _checkpoint(filled)
    assert (done.num_episodes, done.is_proven) == (4, True)
    assert _holding(_files(filled), gone, page_bytes) == {}
    assert filled.dataset("d").snapshot().num_steps == 22
    assert filled.sql("select count(*) as n from d.quarantine")["n"][0].as_py() == 12
    for other in others:
        held = _holding(_live(filled), other, page_bytes)
        assert {text for texts in held.values() for text in texts} == set(other.texts())


@pytest.mark.parametrize("column", ["agent_id", "policy"])
def test_delete_and_vacuum_leave_no_byte(
    filled: Lake, subjects: list[Subject], page_bytes: PageBytes, column: str
) -> None:
    gone = subjects[0]
    done = delete(filled, "d", f"{column} = '{getattr(gone, column)}'")
    assert (done.num_episodes, done.num_steps, done.num_rejected) == (4, 11, 6)
    assert _holding(_live(filled), gone, page_bytes) == {}
    compact(filled, "d", open_s=0)
    _checkpoint(filled)
    assert vacuum(filled, delete=True, now_ms=_ABSURDLY_LATE_MS).garbage
    assert _holding(_files(filled), gone, page_bytes) == {}
    assert filled.dataset("d").snapshot().sql("select sum(num_steps) as n from episodes")[
        "n"
    ].to_pylist() == [22]


def _compact(lake: Lake, _: Subject) -> None:
    assert any(table.num_rewritten for table in compact(lake, "d", open_s=0))


def _trim(lake: Lake, _: Subject) -> None:
    assert trim(lake, "d", max_steps=3).shards_rewritten


def _annotate(lake: Lake, other: Subject) -> None:
    labels = pa.table({"source_episode_id": [other.written], "label": ["good"]})
    annotate(lake, "d", labels, on=["source_episode_id"], add=["label"])


@pytest.mark.slow
@pytest.mark.parametrize("change", [_compact, _trim, _annotate])
def test_what_is_written_again_after_a_delete_has_no_byte(
    filled: Lake,
    subjects: list[Subject],
    page_bytes: PageBytes,
    change: Callable[[Lake, Subject], None],
) -> None:
    gone, other, _ = subjects
    delete(filled, "d", f"agent_id = '{gone.agent_id}'")
    change(filled, other)
    assert _holding(_live(filled), gone, page_bytes) == {}


@pytest.mark.slow
def test_a_shard_that_is_copied_without_some_rows_has_no_byte_of_them(
    filled: Lake, subjects: list[Subject], page_bytes: PageBytes, tmp_path: Path
) -> None:
    """Rows that the target has are left out: what is deleted from it then is in no later shard."""
    gone = subjects[0]
    target = open_lake(tmp_path / "target", create=True)
    target.dataset("d").append([_written(gone)])
    copy(filled, "d", target)
    delete(target, "d", f"agent_id = '{gone.agent_id}'")
    assert target.dataset("d").snapshot().num_steps == 22
    assert _holding(_live(target), gone, page_bytes) == {}


@pytest.mark.slow
def test_no_source_brings_a_byte_back(
    filled: Lake, subjects: list[Subject], page_bytes: PageBytes, tmp_path: Path
) -> None:
    """A longer log, the same writer, a backup: here, and in a lake that learns of it by a copy."""
    gone, other, _ = subjects
    dataset, target = filled.dataset("d"), open_lake(tmp_path / "target", create=True)
    copy(filled, "d", target)
    backup = Path(shutil.copytree(filled.path, tmp_path / "backup"))
    assert purge(filled, "d", f"agent_id = '{gone.agent_id}'").is_proven
    log = tmp_path / f"{gone.logged}.jsonl"
    lines = [line for one in (gone, other) for line in _lines(one)]
    log.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**lines[0], "step": 9}]))
    receipt = ingest(filled, [log], "d", options=ReadOptions({"policy": "who"}))
    assert receipt.episodes.committed == 1
    assert dataset.append([_written(gone), _written(other)]).num_deleted_before == 1
    assert copy(open_lake(backup), "d", filled).num_deleted_before_steps == 11
    copy(filled, "d", target)
    assert purge(target, "d", None).is_proven
    for lake in (filled, target):
        _checkpoint(lake)
        named = _holding(_files(lake), gone, page_bytes)
        # The name of the new file: whoever names files after people has to purge again.
        assert all(texts == [gone.logged] for texts in named.values())
    purge(filled, "d", f"source_episode_id = '{gone.logged}' OR agent_id = '{gone.agent_id}'")
    held = _holding(_files(filled), other, page_bytes)
    assert {text for texts in held.values() for text in texts} == set(other.texts())
