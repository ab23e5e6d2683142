"""Models: one Llama-shaped decoder, described by its `ModelConfig`."""
