"""The gated feed-forward block (SwiGLU, GeGLU)."""

import torch
from torch import Tensor

from engine.layers.linear import Linear, Quantization, row_linear
from engine.layers.norm import RMSNorm
from engine.layers.target import Target
from engine.model_config import ModelConfig
from engine.parallel.group import ParallelGroup
from engine.parallel.shares import Span


class MLP:
    """inner: the features between the projections that this rank holds.

    group: None leaves the sum over the ranks to whoever uses this.
    adds: whether the output may go to the residual as it is.
    waits: whether it looks at what is on the device, so that no CUDA graph can have it.
    """

    waits = False

    def __init__(
        self,
        config: ModelConfig,
        inner: Span,
        group: ParallelGroup | None,
        *,
        adds: bool,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        self.adds = adds
        self.gate_up = Linear(
            config.hidden_size,
            {"gate_proj": inner, "up_proj": inner},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            gate=config.activation,
            stored_as="gate_up_proj" if config.fused_projections else None,
            quantization=quantization,
        )
        self.down = row_linear(
            group,
            inner,
            {"down_proj": config.hidden_size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            quantization=quantization,
        )

    def __call__(self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden] -> (MLP of the norm of their sum, their sum), both [tokens, hidden].

        No residual counts as zero, also where this has added the one that it would return, in its place.
        """
        gated, residual = self.gate_up.after_norm(norm, x, residual)
        return self.down.added(gated, residual) if self.adds else (self.down(gated), residual)

    def targets(self, prefix: str) -> dict[str, Target]:
        return self.gate_up.targets(prefix) | self.down.targets(prefix)
