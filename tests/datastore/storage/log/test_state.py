"""Change: a commit's actions as one value, and that nobody else reads Delta's files."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from replaylake.datastore.storage.log.state import Change, FileEntry, LogState

ROOT: Final = Path(__file__).parents[4]
# Keys of Delta's actions that are words of nothing else in the product.
DELTA_KEYS: Final = {"commitInfo", "dataChange", "domainMetadata", "metaData", "txn"}


def add(path: str, **fields: Any) -> dict[str, Any]:
    return {"add": {"path": path, "partitionValues": {}, "size": 3, **fields}}


def test_a_change_has_what_the_actions_say() -> None:
    change = Change.from_actions(
        7,
        [
            {"commitInfo": {"timestamp": 12, "operation": "TRIM", "num_steps": 4}},
            {"txn": {"appId": "trim/1#3", "version": 7}},
            add("a", stats='{"numRecords":9}', tags={"sha256": "f", "since": "2"}),
            {"remove": {"path": "b", "deletionTimestamp": 1}},
            {"domainMetadata": {"domain": "k", "configuration": "{}", "removed": False}},
            {"domainMetadata": {"domain": "l", "configuration": "", "removed": True}},
            {"unheardOf": {"path": "c"}},
        ],
    )
    assert change == Change(
        version=7,
        added=(FileEntry("a", 3, 9, "f"),),
        removed=("b",),
        transactions={"trim/1#3": 7},
        entries={"k": "{}", "l": None},
        info={"version": 7, "timestamp": 12, "operation": "TRIM", "num_steps": 4},
    )
    assert change.added[0].since == 2
    assert (change.timestamp_ms, change.operation, change.producer) == (12, "TRIM", "trim/1")
    assert change.changes_rows


def test_rows_that_only_move_are_told_apart_from_new_ones() -> None:
    moves = [add("a", dataChange=False), {"remove": {"path": "b", "dataChange": False}}]
    compaction = Change.from_actions(1, moves)
    assert (compaction.new_files, compaction.dropped_paths) == ([], [])
    assert not compaction.changes_rows
    both = Change.from_actions(1, [*moves, add("c"), {"remove": {"path": "d", "dataChange": True}}])
    assert [entry.path for entry in both.new_files] == ["c"]
    assert both.dropped_paths == ["d"]
    assert both.changes_rows
    assert [entry.path for entry in both.added] == ["a", "c"]
    assert both.removed == ("b", "d")


def test_a_commit_of_another_engine_may_have_no_info() -> None:
    change = Change.from_actions(5, [add("a")])
    assert change.info == {"version": 5}
    assert (change.timestamp_ms, change.operation, change.producer) == (0, None, "")
    assert change.added[0].since == 5


@pytest.mark.parametrize(
    "action",
    [
        {"add": {"partitionValues": {}}},
        {"remove": {"dataChange": True}},
        {"txn": {"version": 1}},
        {"domainMetadata": {"domain": "k"}},
        {"metaData": {"id": "x"}},
        {"commitInfo": 5},
    ],
)
def test_an_action_without_what_delta_requires_is_refused(action: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Change.from_actions(0, [action])


def test_a_state_takes_removals_and_additions_of_each_change() -> None:
    first = Change.from_actions(0, [add("a"), add("b"), {"txn": {"appId": "p#0", "version": 0}}])
    second = Change.from_actions(1, [add("c"), {"remove": {"path": "a"}}])
    state = LogState().apply([first, second])
    assert (state.version, sorted(state.files), dict(state.transactions)) == (
        1,
        ["b", "c"],
        {"p#0": 0},
    )


def _read_keys(tree: ast.AST) -> Iterator[str]:
    """Yield the texts that a module looks up, by index or `get`, or builds a dictionary with."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript):
            found = [node.slice]
        elif isinstance(node, ast.Dict):
            found = list(node.keys)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get":
            found = list(node.args[:1])
        for key in found:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


def test_no_module_outside_the_log_names_delta_actions() -> None:
    log = ROOT / "datastore" / "storage" / "log"
    for stage in ("cli", "datastore", "offline", "online", "serve"):
        for module in (ROOT / stage).rglob("*.py"):
            if module.is_relative_to(log):
                continue
            source = module.read_text(encoding="utf-8")
            # Parsing all modules takes seconds, and few have one of these words.
            if not any(word in source for word in (*DELTA_KEYS, '"add"', '"remove"', "_delta_log")):
                continue
            tree = ast.parse(source)
            constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            texts = {text for text in constants if isinstance(text, str)}
            assert not DELTA_KEYS & texts, module
            # `add` and `remove` alone are words of commands and parameters too.
            assert not {"add", "remove"} & set(_read_keys(tree)), module
            if stage == "datastore":
                assert not any("_delta_log" in text for text in texts), module
