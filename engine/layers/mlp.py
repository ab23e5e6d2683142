"""The gated feed-forward block (SwiGLU)."""

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.model_config import ModelConfig


class MLP:
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        inner = config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = Linear(config.hidden_size, parts, bias=False, dtype=dtype, device=device, gated=True)
        self.down = Linear(inner, {"down_proj": config.hidden_size}, bias=False, dtype=dtype, device=device)

    def __call__(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual: [tokens, hidden] -> (MLP of the norm of their sum, their sum), both [tokens, hidden]."""
        gated, residual = self.gate_up.after_norm(norm, x, residual)
        return self.down(gated), residual

    def targets(self, prefix: str) -> dict[str, Tensor]:
        return self.gate_up.targets(prefix) | self.down.targets(prefix)
