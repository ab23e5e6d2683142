"""Token ids between ingress and engine replicas: calls, carriers, streams, and replicas that fall silent."""
