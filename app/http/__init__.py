"""HTTP in and out: routes, who may come in, bodies and event streams."""
