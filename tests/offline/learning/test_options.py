from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.offline.learning.options import from_options, to_options


@dataclass(frozen=True)
class Config:
    learning_rate: float = 0.1
    num_layers: int = 2
    is_dueling: bool = False
    head: Literal["gaussian", "deterministic"] = "gaussian"
    sizes: Sequence[int] = (1, 2)
    clip: float | None = None


def test_options_replace_defaults():
    config = from_options(Config, {"learning_rate": 1, "sizes": [3, 4], "clip": 2}, "test")
    assert config == Config(learning_rate=1.0, sizes=(3, 4), clip=2.0)
    assert isinstance(config.learning_rate, float)
    assert isinstance(config.sizes, tuple)


def test_none_is_kept_where_it_is_allowed():
    assert from_options(Config, {"clip": None}, "test").clip is None


def test_an_unknown_key_gets_the_near_match():
    with pytest.raises(
        ConfigInvalidError, match=r"test: found option 'learnin_rate'.*learning_rate"
    ):
        from_options(Config, {"learnin_rate": 1.0}, "test")


def test_an_unlike_key_gets_all_of_them():
    with pytest.raises(ConfigInvalidError, match="one of clip, head, "):
        from_options(Config, {"zzz": 1.0}, "test")


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": "fast"},
        {"learning_rate": True},
        {"num_layers": 2.5},
        {"num_layers": True},
        {"is_dueling": 1},
        {"head": "softmax"},
        {"sizes": 3},
        {"sizes": [1.5]},
        {"clip": "x"},
    ],
)
def test_a_value_of_another_type_is_refused_by_name(options):
    with pytest.raises(ConfigInvalidError, match=next(iter(options))):
        from_options(Config, options, "test")


def test_options_come_back_as_json_has_them():
    assert to_options(Config())["sizes"] == [1, 2]
