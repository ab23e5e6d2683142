"""The simulation holds together, and our policy beats Serve's own where it says so."""

from benchmarks.autoscaling_sim import policies, simulate
from benchmarks.pools.simulated import Simulation, trace


def test_every_request_is_answered_or_refused_and_the_trace_is_the_same_each_time() -> None:
    arrivals = trace(2.0, length_s=300)
    assert arrivals == trace(2.0, length_s=300)
    pool = Simulation(arrivals, policies(0, 8)["ours, 2 s"](), 8)
    pool.run()
    assert len(pool.ttft) + pool.refused == len(arrivals)
    assert pool.target == 0, "and back to nothing"
    assert not pool.replicas


def test_bursts_are_answered_sooner_than_by_serves_policy_for_no_more_replicas() -> None:
    made = policies(0, 20)
    ours = simulate(5.0, "ours", made["ours, 2 s"](), 20)
    tuned = simulate(5.0, "Serve's", made["Serve's, set by hand"](), 20)
    assert ours.ttft_p99 < 0.8 * tuned.ttft_p99
    assert ours.ttft_p90 < 0.5 * tuned.ttft_p90
    assert ours.replica_s < 1.3 * tuned.replica_s
    assert ours.turns <= tuned.turns
