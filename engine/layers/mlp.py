"""The gated feed-forward block (SwiGLU)."""

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.model_config import ModelConfig
from kernels.activation import silu_and_mul


class MLP:
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        inner = config.intermediate_size
        self.gate_up = Linear(
            config.hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=False, dtype=dtype, device=device
        )
        self.down = Linear(inner, {"down_proj": config.hidden_size}, bias=False, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        return self.down(silu_and_mul(self.gate_up(x)))

    def targets(self, prefix: str) -> dict[str, Tensor]:
        return self.gate_up.targets(prefix) | self.down.targets(prefix)
