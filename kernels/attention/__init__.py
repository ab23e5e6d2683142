"""Paged attention: a step's metadata, the backend interface, and the choice of a backend."""

from kernels.attention.backend import AttentionBackend, HeadNorms
from kernels.attention.metadata import AttentionMetadata
from kernels.attention.select import select_backend

__all__ = ["AttentionBackend", "AttentionMetadata", "HeadNorms", "select_backend"]
