"""Where in a set of measured values a share of them lies below."""

from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """values: in rising order, at least one. share: 0 to 1."""
    return values[min(len(values) - 1, int(share * len(values)))]
