import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.offline.learning.export import export_onnx


def test_options_are_d3rlpys_own_by_key(row_of, make):
    learner = make(
        row_of("cql", "discrete"),
        learning_rate=1e-2,
        alpha=2,
        n_critics=3,
        q_func_factory={"type": "qr", "params": {"n_quantiles": 8}},
        optim_factory={"type": "adam", "params": {"clip_grad_norm": 1.0}},
    )
    config = learner.config
    assert (config["learning_rate"], config["alpha"], config["n_critics"]) == (1e-2, 2.0, 3)
    assert config["q_func_factory"]["params"]["n_quantiles"] == 8
    assert config["encoder_factory"]["params"]["hidden_units"] == [16, 16]
    assert "gamma" not in config
    export_onnx(learner.policy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rat": 1.0}, "d3rlpy:cql: found option 'learning_rat', expected learning_rate"),
        ({"alpha": "high"}, "alpha: found 'high'"),
        ({"n_critics": 1.5}, "n_critics: found 1.5"),
        ({"gamma": 0.9}, "gamma.*discount"),
        ({"batch_size": 3}, "batch_size.*training option"),
        ({"action_scaler": {}}, "action_scaler.*always normalized"),
        ({"observation_scaler": {}}, "observation_scaler.*normalize_observations"),
        ({"q_func_factory": {"type": "quantum"}}, "q_func_factory: found.*quantum"),
        ({"q_func_factory": "qr"}, "q_func_factory: found 'qr'"),
        ({"compile_graph": True}, "CUDA"),
    ],
)
def test_options_it_does_not_have_are_refused_by_name(options, message, row_of, make):
    with pytest.raises(ConfigInvalidError, match=message):
        make(row_of("cql", "discrete"), **options)


def test_a_value_that_d3rlpy_refuses_is_named(row_of, make):
    with pytest.raises(ConfigInvalidError, match=r"policy_type.*magic"):
        make(row_of("bc", "continuous"), policy_type="magic")
