"""Hugging Face's model files: config.json, its rotary embeddings, and generation_config.json, in the engine's terms."""
