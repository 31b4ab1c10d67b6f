import pytest
import typer

from replaylake.cli.options import parse_env_args, to_usage_error
from replaylake.datastore.errors import ConfigInvalidError


def test_values_are_json_or_else_texts():
    given = ["n=3", "rate=0.5", "map_name=8x8", "goal=[1, 2]", 'code="3"', "on=true", "x=null"]
    assert parse_env_args(given) == {
        "n": 3,
        "rate": 0.5,
        "map_name": "8x8",
        "goal": [1, 2],
        "code": "3",
        "on": True,
        "x": None,
    }


def test_pythons_words_are_no_texts():
    given = ["is_slippery=False", "is_cold=True", "seed=None", "name=Falsey", "url=a=b"]
    expected = {"is_slippery": False, "is_cold": True, "seed": None, "name": "Falsey", "url": "a=b"}
    assert parse_env_args(given) == expected
    assert parse_env_args(None) == {}


@pytest.mark.parametrize("texts", [["speed"], ["=3"], ["a=1", "a=2"]])
def test_another_form_is_wrong_usage(texts):
    with pytest.raises(typer.BadParameter):
        parse_env_args(texts)


def test_arguments_of_no_environment_are_wrong_usage():
    assert parse_env_args([], has_env=False) == {}
    with pytest.raises(typer.BadParameter, match="requires --env"):
        parse_env_args(["a=1"], has_env=False)


def test_the_parameter_is_taken_off_the_front_of_a_message_alone():
    texts = {
        "training: workers: found 0, expected 1.": "found 0, expected 1.",
        "workers: found 0, expected 1.": "found 0, expected 1.",
        "Ray: found 1, expected 2 for `workers`.": "Ray: found 1, expected 2 for --workers.",
    }
    for text, message in texts.items():
        refused = to_usage_error(ConfigInvalidError(text, parameter="workers"), {"--workers"})
        assert refused is not None
        assert refused.message == message
