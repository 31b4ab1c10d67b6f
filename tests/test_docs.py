"""Every SQL column and option is documented; test_documented_blocks.py runs the queries."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import open_lake

_ROOT = Path(__file__).parents[1]
_SQL = (_ROOT / "docs" / "SQL.md").read_text()


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    lake = open_lake(tmp_path_factory.mktemp("docs") / "lake", create=True)
    episode = Episode(
        "test/0",
        observations=np.zeros((2, 4), np.float32),
        actions=np.array([0, 1]),
        rewards=np.ones(2),
        terminated=True,
        behavior_log_probs=np.log([0.5, 0.5]),
        action_masks=np.ones((2, 2), bool),
        timestamps=np.array([0, 1]),
    )
    lake.dataset("cartpole").append([episode])
    tokens = {"observation_tokens": [[1]], "action_tokens": [[2]], "group_id": ["g"]}
    texts = {"observations": ["question"], "actions": ["answer"], "rewards": [1]}
    lake.dataset("talks").append([Episode("talk", **texts, extras=tokens)])
    return lake


def _documented(view):
    """Return the columns in the view's own table, row or, for transitions, sentence."""
    dataset, _, name = view.rpartition(".")
    if not dataset:
        (row,) = re.findall(rf"^\| {name} \| (.*) \|$", _SQL, re.MULTILINE)
        return set(re.sub(r" \(JSON\)", "", row).split(", "))
    section = _SQL.split(f"`<dataset>.{name}`")[1].split("`<dataset>.")[0].split("\n## ")[0]
    if name == "transitions":
        assert "the columns of steps and `next_observation`" in section
        return _documented(f"{dataset}.steps") | {"next_observation"}
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    names = {word.strip('"') for cell in cells for word in cell.split(", ")}
    return names - {"column"}


@pytest.mark.parametrize(
    "view",
    [
        "cartpole.steps",
        "cartpole.episodes",
        "cartpole.games",
        "cartpole.transitions",
        "cartpole.quarantine",
        "talks.sequences",
        "talks.groups",
        "talks.preference_pairs",
        "datasets",
        "commits",
        "shards",
        "evaluations",
        "policies",
        "promotions",
        "runs",
        "metrics",
    ],
)
def test_every_column_is_documented(lake, view):
    columns = lake.sql(f"select * from {view}").schema.names
    assert columns
    documented = _documented(view)
    assert [name for name in columns if name not in documented] == []
    assert documented - {*columns} <= {"any other"}


def _configs():
    for folder in ("datastore", "offline", "online", "serve", "cli"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            text = path.read_text()
            # Parsing all of the source takes 4 s of every collection.
            if not re.search(r"^ *class \w+Config\b", text, re.MULTILINE):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                    yield pytest.param(node, id=node.name)


@pytest.mark.parametrize("config", list(_configs()))
def test_every_config_field_is_documented(config):
    text = (_ROOT / "docs" / "CONFIG.md").read_text()
    section = text.split(f"`{config.name}`")[1].split("\n## ")[0]
    words = set(re.findall(r"^\| ([\w, ]+) \|", section, re.MULTILINE))
    documented = {word for cell in words for word in cell.split(", ")} - {"option"}
    fields = {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)}
    assert documented == fields


def test_comments_and_contributing_name_files_that_exist():
    folders = ("datastore", "offline", "online", "serve", "cli", "tests")
    modules = [path for folder in folders for path in (_ROOT / folder).rglob("*.py")]
    names = {path.name for path in modules}
    # With a folder before it, a name may be of another project.
    is_named = re.compile(r"(?<![\w/.$-])(?<!python )\w+\.py\b")
    missing = [
        f"{path.relative_to(_ROOT)}: {name}"
        for path in modules
        if path.parts[len(_ROOT.parts)] != "tests"
        for name in is_named.findall(path.read_text())
        if name not in names
    ]
    assert missing == []
    paths = re.findall(
        rf"`((?:{'|'.join(folders)})/[^`]*)`", (_ROOT / "CONTRIBUTING.md").read_text()
    )
    assert len(paths) > 50
    assert [path for path in paths if "<" not in path and not (_ROOT / path).exists()] == []


def test_decisions_name_code_that_exists_and_are_in_the_index():
    folder = _ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    pages = {path.name: path.read_text() for path in folder.glob("[0-9]*.md")}
    assert sorted(re.findall(r"\]\((\d{3}-[^)]+)\)", index)) == sorted(pages)
    for name, text in pages.items():
        (code,) = re.findall(r"^\*\*Code:\*\* (.+)$", text, re.MULTILINE)
        missing = [path for path in re.findall(r"`([^`]+)`", code) if not (_ROOT / path).exists()]
        assert missing == [], name
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Decision", "Why / measured", "Consequences"], name
