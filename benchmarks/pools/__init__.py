"""Pools of engine replicas to measure: on a local cluster, and simulated."""
