"""The router under load that shares prefixes, in simulated time."""

from benchmarks.routing_sim import simulate


def test_ingresses_find_most_of_what_is_cached_without_talking() -> None:
    """Between them the caches hold all prefixes once, and hardly more: 0.69 where two ingresses copy them at will."""
    alone, two = simulate(seeds=3, callers=1), simulate(seeds=3, callers=2)
    assert alone["hit_rate"] > 0.79
    assert two["hit_rate"] > 0.75


def test_one_prefix_that_all_ask_for_is_spread_evenly() -> None:
    assert simulate(seeds=2, groups=1)["imbalance"] < 1.15
