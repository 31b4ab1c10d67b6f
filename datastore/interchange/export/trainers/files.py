"""Files: functions that write rows into the kinds of file that trainers open."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.formats.generations.messages import clean_text
from replaylake.datastore.interchange.formats.tabular.tables import is_encodable

Row = Mapping[str, Any]
# Writes rows to a path that does not exist yet.
WriteRows = Callable[[Iterable[Row], Path], None]

_CHUNK_CHARS: Final = 16 << 20


def write_json_lines(rows: Iterable[Row], path: Path) -> None:
    """Write one JSON object per line."""
    with path.open("x", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(dump_json(row) + "\n")


def write_documents(rows: Iterable[Row], path: Path) -> None:
    """Write a folder with a JSON file for each row, named by its number."""
    path.mkdir()
    for number, row in enumerate(rows):
        document = path / f"trajectory-{number:06}.json"
        document.write_text(dump_json(row) + "\n", encoding="utf-8")


def write_parquet(rows: Iterable[Row], path: Path) -> None:
    """Write a Parquet file with all columns, and fields of columns, that any row has.

    Texts have to be encodable (`clean_texts`). The rows are first written next to it as JSON lines,
    because all fields have to be known.
    """
    scratch = path.with_name(f"{path.name}.jsonl")
    write_json_lines(rows, scratch)
    kinds = pa.schema([])
    for chunk in _chunks(scratch):
        own = pa.Table.from_pylist(chunk).schema
        kinds = pa.unify_schemas([kinds, own], promote_options="permissive")
    kinds = pa.schema([field.with_type(_fill_null(field.type)) for field in kinds])
    with pq.ParquetWriter(path, kinds) as writer:
        for chunk in _chunks(scratch):
            writer.write_table(pa.Table.from_pylist(chunk, kinds))
    scratch.unlink()


class GroupNumbers:
    """Numbers groups in the order in which they come; one without a name is a group of its own."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._num_groups = 0

    def number(self, name: str | None) -> int:
        """Return the number of the group with a name."""
        next_number = self._num_groups
        own = next_number if name is None else self._numbers.setdefault(name, next_number)
        self._num_groups += own == next_number
        return own


def write_grouped_parquet(rows: Iterable[Row], path: Path) -> None:
    """Write a Parquet file with the number of each row's group in place of its `group_id`."""
    groups = GroupNumbers()
    numbered = (
        {
            "group_index": groups.number(row["group_id"]),
            **{name: value for name, value in row.items() if name != "group_id"},
        }
        for row in rows
    )
    write_parquet(numbered, path)


def _fill_null(kind: pa.DataType) -> pa.DataType:
    """Return a type with text in place of null, the type of what has no value in any row."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_fill_null(field.type)) for field in kind])
    return pa.list_(_fill_null(kind.value_type)) if pa.types.is_list(kind) else kind


def _chunks(path: Path) -> Iterator[list[Any]]:
    rows: list[Any] = []
    num_chars = 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            rows.append(json.loads(line))
            num_chars += len(line)
            if num_chars > _CHUNK_CHARS:
                yield rows
                rows, num_chars = [], 0
    if rows:
        yield rows


def clean_texts(value: Any) -> Any:
    """Return a value of JSON with texts that UTF-8, and so Parquet, can hold."""
    if isinstance(value, str):
        return value if is_encodable(value) else clean_text(value)
    if isinstance(value, dict):
        return {clean_texts(key): clean_texts(one) for key, one in value.items()}
    return [clean_texts(one) for one in value] if isinstance(value, list) else value


def write_saved_dataset(rows: Iterable[Row], path: Path) -> None:
    """Write a folder that `datasets.load_from_disk` opens; values are lists of numbers."""
    path.mkdir()
    name = "data-00000-of-00001.arrow"
    with (path / name).open("xb") as file:
        writer: pa.RecordBatchStreamWriter | None = None
        for row in rows:
            lists = {key: pa.array([value], pa.list_(pa.int32())) for key, value in row.items()}
            table = pa.table(lists)
            if writer is None:
                writer = pa.ipc.new_stream(file, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()
    (path / "dataset_info.json").write_text("{}\n", encoding="utf-8")
    state: dict[str, Any] = {
        "_data_files": [{"filename": name}],
        "_fingerprint": "replaylake",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    (path / "state.json").write_text(dump_json(state) + "\n", encoding="utf-8")


def write_torch_samples(rows: Iterable[Row], path: Path) -> None:
    """Write what `torch.save({"rollout_id": 0, "samples": [...]}, path)` writes, without torch.

    torch.load opens it with weights_only=True, because rows have only lists, dictionaries, texts
    and numbers. They are written one by one, so that memory holds one.
    """
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as file:
            file.write(pickle.PROTO + b"\x02" + pickle.EMPTY_DICT)
            file.write(_dump("rollout_id") + _dump(0) + pickle.SETITEM)
            file.write(_dump("samples") + pickle.EMPTY_LIST)
            for row in rows:
                file.write(_dump(dict(row)) + pickle.APPEND)
            file.write(pickle.SETITEM + pickle.STOP)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")


def _dump(value: Any) -> bytes:
    """Return the opcodes that push a value, without those that open and end a pickle."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, 2)
    # Without a memo, because its indices would be those of other values.
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]
