from __future__ import annotations

from pathlib import Path

import pytest

from replaylake.datastore.errors import NotFound, SourceInvalid
from replaylake.datastore.formats.source import find_source


def _write(folder: Path, **contents: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_files_come_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 100, 1):
        (tmp_path / f"part-{number}.csv").write_text(str(number))
    names = [file.name for file in find_source([tmp_path]).files]
    assert names == ["part-1.csv", "part-9.csv", "part-10.csv", "part-100.csv"]


def test_a_folder_and_a_list_in_any_order_are_one_source(tmp_path: Path) -> None:
    _write(tmp_path, a__csv="1", b__csv="2")
    whole = find_source([tmp_path])
    listed = find_source([tmp_path / "b.csv", str(tmp_path / "a.csv")])
    assert whole.content_hash == listed.content_hash


def test_names_do_not_count_in_the_hash_and_order_does(tmp_path: Path) -> None:
    _write(tmp_path / "one", a__csv="1", b__csv="2")
    _write(tmp_path / "two", x__csv="1", y__csv="2")
    _write(tmp_path / "three", a__csv="2", b__csv="1")
    first, second, third = (
        find_source([tmp_path / name]).content_hash for name in ("one", "two", "three")
    )
    assert first == second
    assert first != third


def test_junk_is_skipped_by_name_and_said_so(tmp_path: Path) -> None:
    _write(tmp_path, a__csv="1", _SUCCESS="", LICENSE="text")
    (tmp_path / ".a.csv.crc").write_text("x")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "__MACOSX" / "a.csv").write_text("x")
    source = find_source([tmp_path])
    assert [file.name for file in source.files] == ["a.csv"]
    assert "LICENSE" in source.notes[0]


def test_the_same_bytes_are_read_once(tmp_path: Path) -> None:
    _write(tmp_path, a__csv="1", b__csv="1")
    source = find_source([tmp_path, tmp_path / "a.csv"])
    assert [file.name for file in source.files] == ["a.csv"]
    assert any("b.csv holds the same bytes as a.csv" in note for note in source.notes)
    assert source.content_hash == find_source([tmp_path / "a.csv"]).content_hash


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing-here"):
        find_source([tmp_path / "nothing-here"])
    with pytest.raises(SourceInvalid, match="no data file"):
        find_source([tmp_path])
    _write(tmp_path, empty__csv="")
    with pytest.raises(SourceInvalid, match=r"empty\.csv: found 0 bytes"):
        find_source([tmp_path])


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, a__csv="1")
    (file,) = find_source([tmp_path]).files
    file.check_unchanged()
    (tmp_path / "a.csv").write_text("12")
    with pytest.raises(SourceInvalid, match="changed while"):
        file.check_unchanged()
