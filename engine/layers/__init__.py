"""Layers: tensors and the kernels that use them. Each says which checkpoint names fill which views of it."""
