"""Tensor parallelism: who starts the ranks, what of a model each holds, what they tell each other, how they sample."""
