from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaylake.datastore.errors import NotFoundError, SourceInvalidError
from replaylake.datastore.interchange.sources.source import find_source


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
    with pytest.raises(NotFoundError, match="nothing-here"):
        find_source([tmp_path / "nothing-here"])
    with pytest.raises(SourceInvalidError, match="no data file"):
        find_source([tmp_path])
    _write(tmp_path, empty__csv="")
    with pytest.raises(SourceInvalidError, match=r"empty\.csv: found 0 bytes"):
        find_source([tmp_path])


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, a__csv="1")
    (file,) = find_source([tmp_path]).files
    file.check_unchanged()
    (tmp_path / "a.csv").write_text("12")
    with pytest.raises(SourceInvalidError, match="changed while"):
        file.check_unchanged()


def test_patterns_find_files(tmp_path: Path) -> None:
    _write(tmp_path / "logs" / "a", x__csv="1", y__json="2", _SUCCESS="")
    _write(tmp_path / "logs" / "b", x__csv="3")
    _write(tmp_path / "logs", z__csv="4")

    def found(pattern: str) -> list[str]:
        return [file.relative for file in find_source([f"{tmp_path}/{pattern}"]).files]

    assert found("logs/*.csv") == ["z.csv"]
    assert found("logs/**/*.csv") == ["a/x.csv", "b/x.csv", "z.csv"]
    assert found("logs/**") == ["a/x.csv", "a/y.json", "b/x.csv", "z.csv"]
    assert found("logs/[ab]") == ["a/x.csv", "a/y.json", "b/x.csv"]
    assert found("lo*/z.csv") == ["logs/z.csv"]
    with pytest.raises(NotFoundError, match="matches"):
        found("logs/*.parquet")
    # A file that is really called so is that file.
    _write(tmp_path, **{"a[1]__csv": "5", "a1__csv": "6"})
    assert found("a[1].csv") == ["a[1].csv"]


def test_what_formats_need_beside_their_data_stays(tmp_path: Path) -> None:
    needed = ["metadata.json", "info.json", "dataset_info.json", "features.json"]
    _write(tmp_path, **{name.replace(".", "__"): name for name in needed})
    _write(tmp_path / "meta", episodes__jsonl="{}", tasks__jsonl="{ }")
    kept = {file.relative for file in find_source([tmp_path]).files}
    assert kept == {*needed, "meta/episodes.jsonl", "meta/tasks.jsonl"}


def test_litter_is_skipped_even_where_it_was_named(tmp_path: Path) -> None:
    _write(tmp_path, a__csv="1", _SUCCESS="", _own__csv="2")
    names = [tmp_path / name for name in ("a.csv", "_SUCCESS", "_own.csv")]
    assert [file.name for file in find_source(names).files] == ["_own.csv", "a.csv"]


def test_videos_are_references(tmp_path: Path) -> None:
    _write(tmp_path, a__csv="1")
    without = find_source([tmp_path])
    _write(tmp_path / "videos", one__mp4="frames", two__MOV="frames")
    source = find_source([tmp_path])
    assert source.content_hash == without.content_hash
    assert sorted(source.references) == ["videos/one.mp4", "videos/two.MOV"]
    assert "2 video files kept as references" in source.notes[0]
    with pytest.raises(SourceInvalidError, match="but 2 video files"):
        find_source([tmp_path / "videos"])


def test_standard_input_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, a__jsonl='{"a": 1}\n')
    with (tmp_path / "a.jsonl").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        source = find_source(["-"])
    (file,) = source.files
    assert file.name == "<stdin>"
    assert file.path.read_text() == '{"a": 1}\n'
    assert source.content_hash == find_source([tmp_path]).content_hash


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceInvalidError, match="found a pipe or device"):
        find_source([tmp_path / "pipe"])


def test_a_folder_that_cannot_be_listed_is_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may list everything, so the system's refusal is played.
    (tmp_path / "logs" / "closed").mkdir(parents=True)
    (tmp_path / "logs" / "a.csv").write_text("a")
    scandir = os.scandir

    def refusing(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(SourceInvalidError, match=r"logs/closed: .*Permission denied.*Correct"):
        find_source([tmp_path / "logs"])


def test_a_name_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(SourceInvalidError, match="File name too long"):
        find_source([tmp_path / ("a" * 5000)])
