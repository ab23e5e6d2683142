"""GGUF files: their header and tensors, and what is in them in Hugging Face's terms."""
