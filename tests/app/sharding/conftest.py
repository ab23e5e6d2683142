"""One cluster for all that is tested of shards."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Of one node, on which this process is."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "resources": {"first": 1}})
    try:
        ray.init(address=cluster.address, log_to_driver=False, namespace="serve")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def second_node(cluster: Cluster) -> Any:
    """Another node of the cluster, there from the first test that asks for it."""
    return next(iter(cluster.worker_nodes), None) or cluster.add_node(num_cpus=1, resources={"second": 1})
