"""The role table: whose token may do what with which dataset."""

import hashlib
from pathlib import Path

import pytest

from replaylake.datastore.errors import ConfigInvalidError, QueryRefusedError
from replaylake.datastore.lake.roles import read_role_table


def _table(path: Path, token: bytes) -> Path:
    path.write_text(
        f'[[tokens]]\nname = "ranker"\nsha256 = "{hashlib.sha256(token).hexdigest()}"\n'
        'writer = ["live"]\n'
    )
    return path


def test_a_token_has_its_roles_for_its_datasets(tmp_path: Path) -> None:
    table = read_role_table(_table(tmp_path / "roles.toml", b"0123456789abcdef"))
    grant = table.find(b"0123456789abcdef")
    assert grant is not None
    assert (grant.roles("live"), grant.roles("other")) == (frozenset({"writer"}), frozenset())
    assert table.find(b"0123456789abcdeF") is None


def test_a_reader_may_be_limited_to_columns(tmp_path: Path) -> None:
    path = _table(tmp_path / "roles.toml", b"0123456789abcdef")
    own = path.read_text()
    path.write_text(
        f'{own}reader = ["live", "old", "all"]\n'
        'columns = { live = ["step"], "*" = ["reward", "step"] }\n'
    )
    grant = read_role_table(path).find_reader(b"0123456789abcdef")
    assert grant.readable_columns("live") == {"step"}
    assert grant.readable_columns("old") == {"step", "reward"}
    assert [grant.can_read(name) for name in ("live", "other")] == [True, False]
    assert not grant.can_read_all()
    # Without the role there is nothing to limit.
    with pytest.raises(QueryRefusedError, match="'ranker': found no role reader"):
        read_role_table(_table(path, b"0123456789abcdef")).find_reader(b"0123456789abcdef")
    with pytest.raises(QueryRefusedError, match="not in the role table"):
        read_role_table(path).find_reader(b"")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('columns = { live = ["step"] }', "'live', expected a dataset of the role reader"),
        ('reader = ["old"]\ncolumns.live = ["step"]', "a dataset of the role reader"),
        ('reader = ["live"]\ncolumns = ["step"]', "expected lists of columns by dataset"),
        ('reader = ["live"]\ncolumns = {}', "expected lists of columns by dataset"),
        ('reader = ["live"]\ncolumns.live = []', r"live: found \[\], expected a list of columns"),
        ('reader = ["live"]\ncolumns.live = "step"', "expected a list of columns"),
    ],
)
def test_columns_that_limit_nothing(tmp_path: Path, entry: str, said: str) -> None:
    path = _table(tmp_path / "roles.toml", b"0123456789abcdef")
    path.write_text(path.read_text() + entry)
    with pytest.raises(ConfigInvalidError, match=said):
        read_role_table(path)


def test_no_token_and_a_short_one_open_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalidError, match="'ranker': found the SHA-256 of no text at all"):
        read_role_table(_table(tmp_path / "empty.toml", b""))
    assert read_role_table(_table(tmp_path / "short.toml", b"test")).find(b"test") is None
