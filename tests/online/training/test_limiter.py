import json

import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.online.training.limiter import RateLimiter, Ratio, min_size, sample_to_insert_ratio


def vector(shared_data):
    vectors = json.loads((shared_data / "vectors.json").read_text())
    return next(v for v in vectors if v["id"] == "rate_limiter_scenarios")


def ratio(config):
    return Ratio(
        config["samples_per_insert"],
        config["min_size_to_sample"],
        config.get("min_diff", -1.0),
        config.get("max_diff", 1.0),
    )


def done(limiter, operation):
    """Do an operation of Reverb's table where it is allowed; return whether it was."""
    name, _, num = operation.partition("_insert_")
    if operation.startswith("can_insert"):
        return limiter.can_insert(int(num) if name == "can" and num else 1)
    if operation == "try_insert":
        allowed = limiter.can_insert()
        limiter.insert(int(allowed))
        return allowed
    if operation == "try_sample":
        allowed = limiter.can_sample()
        limiter.sample(int(allowed))
        return allowed
    assert operation == "delete"
    limiter.delete()
    return True


def test_reverbs_scenarios(shared_data):
    scenarios = vector(shared_data)["scenarios"]
    assert len(scenarios) == 7
    for scenario in scenarios:
        limiter = RateLimiter(ratio(scenario["config"]))
        for number, (operation, expected) in enumerate(scenario["ops"]):
            assert done(limiter, operation) is expected, (scenario["name"], number, operation)


def test_reverbs_invalid_configs(shared_data):
    for config in vector(shared_data)["invalid_configs"]:
        with pytest.raises(ConfigInvalidError, match="rate limiter: found"):
            ratio({"min_size_to_sample": 1, **config})


@pytest.mark.parametrize("samples", [0, 7, 40])
@pytest.mark.parametrize("pending", [0, 3])
def test_as_many_are_insertable_as_can_be_inserted(samples, pending):
    limiter = RateLimiter(sample_to_insert_ratio(1.5, 4, 6.0))
    limiter.insert(5)
    limiter.sample(samples)
    allowed = limiter.num_insertable(50, pending=pending)
    most = [n for n in range(1, 51) if limiter.can_insert(n, pending=pending)]
    assert allowed == max(most, default=0)


def test_a_ratio_counts_from_the_first_items_on():
    limiter = RateLimiter(sample_to_insert_ratio(32, 1000, (0, 64 * 32)))
    limiter.insert(1000)
    assert not limiter.can_sample(32)
    limiter.insert(1)
    assert limiter.can_sample(32)
    limiter.sample(32)
    assert not limiter.can_sample(32)
    assert limiter.num_insertable(1000) == 64


def test_a_buffer_that_blocks_both_is_refused():
    with pytest.raises(ConfigInvalidError, match="error buffer of 0 below and 32 above"):
        sample_to_insert_ratio(32, 1000, (0, 32))


def test_only_a_minimum_lets_everything_else_go_on():
    limiter = RateLimiter(min_size(10))
    assert limiter.num_insertable(10**9) == 10**9
    limiter.insert(9)
    assert not limiter.can_sample()
    limiter.insert()
    assert limiter.can_sample(10**6)


def test_counts_are_saved():
    limiter = RateLimiter(min_size(1))
    limiter.insert(5)
    limiter.sample(3)
    limiter.delete(2)
    other = RateLimiter(min_size(1))
    other.load_state_dict(limiter.state_dict())
    assert other.state_dict() == {"num_inserts": 5, "num_samples": 3, "num_deletes": 2}
