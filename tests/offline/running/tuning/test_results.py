import pytest

from replaylake.offline.running.tuning.results import (
    Combination,
    SweepResult,
    TrialResult,
    combine_trials,
    value_name,
)


def trials(*rows):
    """Rows of (combination, seed, status, value)."""
    return [
        TrialResult(
            number,
            combination,
            {"rate": combination},
            seed,
            status,
            value=value,
            policy=f"p:{number}" if status == "done" else None,
        )
        for number, (combination, seed, status, value) in enumerate(rows)
    ]


def test_the_mean_over_seeds_its_interval_and_the_best_seeds_policy():
    (found,) = combine_trials(trials((0, 5, "done", 1.0), (0, 6, "done", 3.0)), "max")
    # t of 0.975 with one degree of freedom is 12.7062, the standard error is 1.
    expected = Combination(
        0, {"rate": 0}, 2, 2, 2.0, pytest.approx(-10.7062), pytest.approx(14.7062), "p:1", 6
    )
    assert found == expected
    (found,) = combine_trials(trials((0, 5, "done", 1.0), (0, 6, "done", 3.0)), "min")
    assert (found.policy, found.seed) == ("p:0", 5)


def test_the_best_is_first_and_what_lacks_a_seed_last():
    rows = trials(
        (0, 0, "done", 9.0),
        (1, 0, "done", 2.0),
        (2, 0, "done", 3.0),
        (3, 0, "failed", 99.0),
        (0, 1, "failed", None),
        (1, 1, "done", 2.0),
        (2, 1, "done", 3.0),
        (3, 1, "skipped", None),
    )
    found = combine_trials(rows, "max")
    assert [one.number for one in found] == [2, 1, 0, 3]
    assert [(one.num_done, one.mean) for one in found] == [(2, 3.0), (2, 2.0), (1, 9.0), (0, None)]
    assert [one.number for one in combine_trials(rows, "min")] == [1, 2, 0, 3]


def test_differences_from_the_best_are_paired_by_seed():
    # Seeds differ by 10, options by 1 and 3: the mean's interval has the former, the pairs do not.
    rows = trials(
        (0, 0, "done", 1.0),
        (1, 0, "done", 2.0),
        (2, 0, "done", 9.0),
        (0, 1, "done", 11.0),
        (1, 1, "done", 14.0),
        (2, 1, "failed", None),
    )
    best, second, third = combine_trials(rows, "max")
    assert (best.number, best.difference, best.difference_low) == (1, None, None)
    # t of 0.975 with one degree of freedom is 12.7062; the standard error of -1 and -3 is 1.
    assert second.difference == -2
    assert second.difference_low == pytest.approx(-14.7062)
    assert second.difference_high == pytest.approx(10.7062)
    assert second.ci_high - second.ci_low == pytest.approx(10 * 12.7062, rel=1e-3)
    # One pair has no interval.
    assert (third.difference, third.difference_low, third.difference_high) == (7.0, None, None)
    # Without a best, there is nothing to compare with.
    (only,) = combine_trials(trials((0, 0, "done", 1.0), (0, 1, "failed", None)), "max")
    assert only.difference is None


def test_one_that_lacks_a_seed_is_never_the_best():
    rows = trials((0, 0, "done", 9.0), (0, 1, "stopped", 9.0))
    result = SweepResult("s", "m", "m", "max", tuple(rows), combine_trials(rows, "max"))
    assert result.best is None
    assert result.to_json()["best"] is None
    assert (result.combinations[0].ci_low, result.combinations[0].mean) == (None, 9.0)


def test_a_value_that_is_no_number_is_no_value():
    (found,) = combine_trials(trials((0, 0, "done", None), (0, 1, "done", 1.0)), "max")
    assert (found.num_done, found.mean) == (1, 1.0)


def test_policies_chosen_by_returns_are_compared_by_other_returns():
    assert value_name("selection/environment") == "evaluation/return"
    assert value_name("selection/fqe") == "selection/fqe"
