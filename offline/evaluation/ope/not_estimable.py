"""NotEstimable: why one estimator has nothing to say of a log."""


class NotEstimableError(Exception):
    """Raised by an estimator, in words; estimate() collects it beside what the others found."""
