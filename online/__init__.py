"""Learning while the dataset grows: rollout workers feeding the offline learner."""
