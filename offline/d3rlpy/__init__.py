"""The d3rlpy algorithms behind our Learner and Policy; the only place that imports d3rlpy."""
