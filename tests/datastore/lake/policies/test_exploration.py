import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.policies.exploration import Exploration, parse_exploration


@pytest.mark.parametrize(
    ("text", "expected", "is_on"),
    [
        (None, Exploration(0.0, None), False),
        ("epsilon=0", Exploration(0.0, None), False),
        ("epsilon=0.05", Exploration(0.05, None), True),
        ("epsilon=1", Exploration(1.0, None), True),
        ("temperature=0", Exploration(0.0, 0.0), False),
        ("temperature=2", Exploration(0.0, 2.0), True),
    ],
)
def test_both_forms(text, expected, is_on):
    parsed = parse_exploration(text)
    assert parsed == expected
    assert parsed.is_on == is_on


@pytest.mark.parametrize(
    "text",
    ["", "luck", "epsilon", "epsilon=", "epsilon=2", "epsilon=-0.1", "epsilon=nan",
     "temperature=-1", "temperature=nan", "temperature=inf", "noise=1"],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigInvalidError, match="explore: found"):
        parse_exploration(text)
