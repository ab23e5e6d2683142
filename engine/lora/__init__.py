"""LoRA adapters: read from PEFT's folders, kept on the host, given slots on the device, applied beside the weights."""
