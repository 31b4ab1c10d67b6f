import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.policies.exploration import (
    ActingMode,
    Exploration,
    parse_exploration,
)


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


EPSILON, HEAT = Exploration(epsilon=0.2), Exploration(temperature=2.0)


@pytest.mark.parametrize(
    ("exploration", "head", "request_options", "expected"),
    [
        (Exploration(), "categorical", {}, ActingMode(True, 1.0, 0.0, True)),
        (EPSILON, "categorical", {}, ActingMode(True, 1.0, 0.2, False)),
        (HEAT, "categorical", {}, ActingMode(False, 2.0, 0.0, False)),
        (HEAT, "categorical", {"deterministic": True}, ActingMode(True, 2.0, 0.0, True)),
        (HEAT, "categorical", {"temperature": 0.0}, ActingMode(True, 0.0, 0.0, True)),
        (EPSILON, "categorical", {"epsilon": 0.0}, ActingMode(True, 1.0, 0.0, True)),
        (Exploration(), "gaussian", {"deterministic": False}, ActingMode(False, 1.0, 0.0, False)),
        # Its action is the same whatever is requested; those of the last two are always drawn.
        (
            Exploration(),
            "deterministic",
            {"deterministic": False},
            ActingMode(False, 1.0, 0.0, True),
        ),
        (Exploration(), "sampled", {}, ActingMode(True, 1.0, 0.0, False)),
        (Exploration(), "uniform", {"deterministic": True}, ActingMode(True, 1.0, 0.0, False)),
    ],
)
def test_how_a_request_is_acted_for(exploration, head, request_options, expected):
    assert exploration.resolve(head, **request_options) == expected
