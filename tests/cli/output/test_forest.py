"""Forest plots of a sweep: its combinations, and their differences from the best."""

import pytest

pytest.importorskip("matplotlib")
from replaylake.cli.output.forest import draw_combinations
from replaylake.offline.running.tuning.results import SweepResult, TrialResult, combine_trials


def test_a_sweep_is_drawn_with_the_differences_from_its_best(tmp_path):
    values = {0: (1.0, 2.0), 1: (3.0, 5.0), 2: (None, None)}
    trials = [
        TrialResult(
            number=3 * seed + combination,
            combination=combination,
            options={"rate": combination, "note": "$x$ <b>"},
            seed=seed,
            status="failed" if of_seed[seed] is None else "done",
            value=of_seed[seed],
        )
        for seed in (0, 1)
        for combination, of_seed in values.items()
    ]
    result = SweepResult(
        "01sweep", "loss", "loss", "min", tuple(trials), combine_trials(trials, "min")
    )
    path = tmp_path / "sweep.svg"
    draw_combinations(path, result)
    text = path.read_text()
    assert "sweep 01sweep" in text
    assert "loss, less is better;" in text
    assert "difference from the best," in text
    # What no seed finished has nothing to draw.
    assert "rate=0, note=$x$ &lt;b&gt;" in text
    assert "rate=1, " in text
    assert "rate=2, " not in text
