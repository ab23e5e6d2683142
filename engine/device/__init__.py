"""What the model runner does on a device: memory and numbers chosen, plans as tensors, copies, padded steps, graphs."""
