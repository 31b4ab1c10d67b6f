"""Names that lead elsewhere or mean something to a shell, SQL or a URL: refused, nothing touched.

For datasets, tags, policies and aliases, through the library and through the commands.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    InvalidNameError,
    NotFoundError,
    QueryError,
    QueryRefusedError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.manifest import GRAPH, MANIFEST, manifest_bytes
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.storage.storage import LocalStorage

HOSTILE = {
    "empty": "",
    "dot": ".",
    "parent": "..",
    "up and down": "a/../../x",
    "absolute": "/etc/passwd",
    "below": "a/b",
    "the lake's own": "_lake",
    "backslash": "..\\x",
    "percent": "%2e%2e",
    "percent slash": "a%2fb",
    "NUL": "a\0b",
    "newline": "a\n",
    "escape": "a\x1b[2J",
    "single quote": "a' or '1'='1",
    "double quote": 'a"."b',
    "statement": "a; drop table x",
    "comment": "a#x",
    "wildcard": "*",
    "shell": "$(touch x)",
    "home": "~root",
    "space": "a b",
    "letter of another alphabet": "\u0430bc",  # Cyrillic a
    "full width": "\uff41bc",
    "combining": "a\u0301",
    "zero width": "a\u200bb",
    "right to left": "\u202eabc",
    "digit of another alphabet": "a\u0661",
    "surrogate": "a\udc80",
    "upper case": "ABC",
    "too long": "a" * 64,
}
KEYWORDS = ("select", "from", "table", "order", "main", "temp", "information_schema", "pg_catalog")


def of_dataset(lake: Lake, name: str) -> None:
    lake.dataset(name)


def of_snapshot(lake: Lake, name: str) -> None:
    lake.snapshot(name)


def of_tag_set(lake: Lake, name: str) -> None:
    lake.tags.set("d", name, 0)


def of_tagged_dataset(lake: Lake, name: str) -> None:
    lake.tags.set(name, "t", 0)


def of_tag(lake: Lake, name: str) -> None:
    lake.snapshot(f"d@{name}")


def of_policy(lake: Lake, name: str) -> None:
    lake.registry.resolve(name)


def of_registration(lake: Lake, name: str) -> None:
    lake.registry.register(name, lake.path.parent / "package", run_id="r", lineage={})


def of_alias_set(lake: Lake, name: str) -> None:
    lake.registry.set_alias("p", name, 1)


def of_alias(lake: Lake, name: str) -> None:
    lake.registry.resolve(f"p@{name}")


USES = (
    of_dataset,
    of_snapshot,
    of_tag_set,
    of_tagged_dataset,
    of_tag,
    of_policy,
    of_registration,
    of_alias_set,
    of_alias,
)
COMMANDS: dict[str, Callable[[str, Path], list[str]]] = {
    "show": lambda name, log: ["show", name],
    "ingest": lambda name, log: ["ingest", str(log), "--dataset", name],
    "feedback join": lambda name, log: ["feedback", "join", name],
    "history": lambda name, log: ["history", name],
    "lineage": lambda name, log: ["lineage", "--dataset", name],
    "tag set": lambda name, log: ["datasets", "tag", "d@0", name],
    "tag of dataset": lambda name, log: ["datasets", "tag", f"{name}@0", "t"],
    "show tag": lambda name, log: ["show", f"d@{name}"],
    "policies show": lambda name, log: ["policies", "show", name],
    "package": lambda name, log: ["policies", "package", name, "--output", str(log.parent / "out")],
    "alias set": lambda name, log: ["promote", "p:1", "--to", name],
    "alias": lambda name, log: ["policies", "show", f"p@{name}"],
}


@pytest.fixture
def filled(lake: Path, tmp_path: Path) -> Lake:
    """A lake with a dataset d and a policy p, and a file beside it that a name might lead to."""
    opened = open_lake(lake, create=True)
    opened.dataset("d").append([Episode("e", [[0.0], [1.0]], [0, 1], [1.0, 1.0], terminated=True)])
    package = tmp_path / "package"
    package.mkdir()
    files = {GRAPH: b"graph"}
    spec = PolicySpec(Box((1,)), Discrete(2), "categorical")
    for name, data in {**files, MANIFEST: manifest_bytes(spec, {}, files)}.items():
        (package / name).write_bytes(data)
    opened.registry.register("p", package, run_id="r", lineage={"datasets": []})
    return opened


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_the_library_refuses(filled: Lake, tree, name: str) -> None:
    before = tree()
    for use in USES:
        with pytest.raises(InvalidNameError):
            use(filled, name)
    with pytest.raises((InvalidNameError, NotFoundError, QueryError, QueryRefusedError)):
        filled.sql('SELECT * FROM "{}".steps'.format(name.replace('"', '""')))
    assert tree() == before


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_the_commands_refuse(filled: Lake, tree, run, log: Path, name: str) -> None:
    before = tree()
    for make in COMMANDS.values():
        ran = run(*make(name, log))
        ran.failed("expected")
        assert ran.out == ""
    assert tree() == before
    assert not (log.parent / "out").exists()


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_dataset_is_no_word_of_sql(filled: Lake, run, log: Path, name: str) -> None:
    for use in (of_dataset, of_snapshot, of_tagged_dataset):
        with pytest.raises(InvalidNameError, match="no SQL keyword"):
            use(filled, name)
    run("ingest", log, "--dataset", name).failed("no SQL keyword")


def test_tags_policies_and_aliases_may_be_words_of_sql(filled: Lake) -> None:
    filled.tags.set("d", "select", 1)
    assert filled.snapshot("d@select").version == 1
    filled.registry.set_alias("p", "table", 1)
    assert filled.registry.resolve("p@table").version == 1


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Another lake's dataset."""
    other = open_lake(tmp_path / "other", create=True).dataset("d")
    other.append([Episode("theirs", [[0.0]], [0], [1.0], terminated=True)])
    return tmp_path / "other" / "d"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_dataset_linked_from_outside_is_neither_read_nor_written(
    filled: Lake, run, log: Path, outside: Path
) -> None:
    (filled.path / "linked").symlink_to(outside)
    before = files_of(outside)
    assert open_lake(filled.path).datasets() == ["d"]
    for command in (
        ["show", "linked"],
        ["sql", "select * from linked.steps"],
        ["ingest", str(log), "--dataset", "linked"],
        ["history", "linked"],
        ["feedback", "join", "linked"],
        ["datasets", "tag", "linked@0", "t"],
        ["lineage", "--dataset", "linked"],
    ):
        run(*command).failed("inside of the lake")
    assert files_of(outside) == before
    assert os.path.islink(filled.path / "linked")


@pytest.mark.parametrize("part", ["shards", "_delta_log", "_decisions"])
def test_a_part_of_a_dataset_linked_from_outside_is_refused(
    filled: Lake, outside: Path, part: str
) -> None:
    folder = filled.path / "d" / part
    if folder.exists():
        folder.rename(filled.path / "d" / "kept")
    target = outside / part
    target.mkdir(exist_ok=True)
    folder.symlink_to(target)
    before = files_of(outside)
    lake = open_lake(filled.path)
    episode = Episode("e2", [[0.0]], [0], [1.0], terminated=True)
    if part == "_decisions":
        with pytest.raises(InvalidNameError, match="inside of the lake"):
            lake.dataset("d").decisions.exists()
    else:
        with pytest.raises(InvalidNameError, match="inside of the lake"):
            lake.sql("SELECT * FROM d.steps")
        with pytest.raises(InvalidNameError, match="inside of the lake"):
            lake.dataset("d").append([episode])
    assert files_of(outside) == before


def test_a_file_linked_from_outside_is_neither_read_nor_written(
    filled: Lake, outside: Path
) -> None:
    (theirs,) = (outside / "shards").iterdir()
    (entry,) = filled.snapshot("d").files
    shard = filled.path / "d" / entry.path
    shard.unlink()
    shard.symlink_to(theirs)
    before = files_of(outside)
    with pytest.raises(InvalidNameError, match="inside of the lake"):
        open_lake(filled.path).sql("SELECT * FROM d.steps")
    storage = LocalStorage(filled.path)
    for attempt in (
        lambda: storage.get(f"d/{entry.path}"),
        lambda: storage.put(f"d/{entry.path}", b""),
        lambda: storage.delete([f"d/{entry.path}"]),
    ):
        with pytest.raises(InvalidNameError, match="inside of the lake"):
            attempt()
    assert files_of(outside) == before


def test_a_link_that_stays_inside_is_followed(filled: Lake) -> None:
    (entry,) = filled.snapshot("d").files
    shard = filled.path / "d" / entry.path
    shard.rename(shard.with_name("moved"))
    shard.symlink_to(shard.with_name("moved"))
    assert open_lake(filled.path).sql("SELECT count(*) AS n FROM d.steps")["n"][0].as_py() == 2
