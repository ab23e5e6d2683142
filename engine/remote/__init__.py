"""Steps that other processes compute: the runner that leads them, plans and results as bytes, and their way there."""
