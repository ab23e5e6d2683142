"""Self-attention over the paged KV cache: projections, q/k norm, rotary embedding, cache, output."""

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.model_config import ModelConfig
from kernels.attention import AttentionBackend, AttentionMetadata

KVCache = tuple[Tensor, Tensor]


class Attention:
    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.backend = backend
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
        )
        self.output = Linear(
            q_size, {"o_proj": config.hidden_size}, bias=config.attention_bias, dtype=dtype, device=device
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        self._sizes = (q_size, kv_size, kv_size)

    def __call__(
        self,
        norm: RMSNorm,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """x, residual: [tokens, hidden] -> (attention of the norm of their sum, their sum), both [tokens, hidden].

        No residual counts as zero. Writes the tokens' KV.
        """
        qkv, residual = self.qkv.after_norm(norm, x, residual)
        q, k, v = qkv.split(self._sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))  # [tokens, heads, head_dim]
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))  # [tokens, kv_heads, head_dim]
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = rotary
        k_cache, v_cache = cache
        q = self.backend.rotary_write(q, k, v, cos, sin, positions, k_cache, v_cache, metadata.slots)
        out = self.backend.attend(q, k_cache, v_cache, metadata, self.scale)
        return self.output(out.flatten(1)), residual

    def targets(self, prefix: str) -> dict[str, Tensor]:
        views = self.qkv.targets(prefix) | self.output.targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            views |= {f"{prefix}q_norm.weight": self.q_norm.weight, f"{prefix}k_norm.weight": self.k_norm.weight}
        return views
