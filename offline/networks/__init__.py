"""Networks: observations to features, perceptrons behind them, actors and critics made of both."""
