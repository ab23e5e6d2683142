"""What replicas count, know and tell each other of themselves."""
