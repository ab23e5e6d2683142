"""Self-attention over the paged KV cache: projections, q/k norm, rotary embedding, cache, output."""

import torch
from torch import Tensor

from engine.layers.linear import Linear, Quantization, row_linear
from engine.layers.norm import RMSNorm, SharedRMSNorm
from engine.layers.target import Slices, Target
from engine.model_config import ModelConfig
from engine.parallel.shares import Shares, Span
from kernels.attention import AttentionBackend, AttentionMetadata, HeadNorms

KVCache = tuple[Tensor, Tensor]
RotaryTable = tuple[Tensor, Tensor]
"""cos and sin, of `kernels.rotary.rotary_table`."""


class Attention:
    """Of the heads that this rank holds.

    rotary: None where q and k do not turn. window: tokens that a token sees, 0 for all before it.
    adds: whether the output may go to the residual as it is.
    """

    def __init__(
        self,
        config: ModelConfig,
        shares: Shares,
        rotary: RotaryTable | None,
        window: int,
        backend: AttentionBackend,
        *,
        adds: bool,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        self.backend = backend
        self.adds = adds
        self.rotary = rotary
        self.window = window
        self.soft_cap = config.attention_soft_cap
        self.num_heads = shares.heads.size
        self.num_kv_heads = shares.kv_heads.size
        self.head_dim = config.head_dim
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.q_span, self.kv_span = shares.heads.times(config.head_dim), shares.kv_heads.times(config.head_dim)
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": self.q_span, "k_proj": self.kv_span, "v_proj": self.kv_span},
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
            stored_as="qkv_proj" if config.fused_projections else None,
            quantization=quantization,
        )
        self.output = row_linear(
            shares.group,
            self.q_span,
            {"o_proj": config.hidden_size},
            bias=config.output_bias,
            dtype=dtype,
            device=device,
            quantization=quantization,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.norms_all_heads = config.qk_norm == "all_heads"
        if config.qk_norm != "none":
            spans = (self.q_span, self.kv_span) if self.norms_all_heads else [Span.of(config.head_dim)] * 2
            self.q_norm, self.k_norm = (
                RMSNorm(span.size, config.rms_norm_eps, dtype=dtype, device=device)
                if shares.group is None or not self.norms_all_heads
                else SharedRMSNorm(span, config.rms_norm_eps, shares.group, dtype=dtype, device=device)
                for span in spans
            )
        self.head_norms = None
        if self.q_norm is not None and self.k_norm is not None and not self.norms_all_heads:
            self.head_norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps)
        self._sizes = (self.q_span.size, self.kv_span.size, self.kv_span.size)

    def __call__(
        self,
        norm: RMSNorm | None,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden] -> (attention of the norm of their sum, their sum), both [tokens, hidden].

        rows: int64 [K], the tokens of which that is wanted, and no more returned; None: all.
        No residual counts as zero, also where this has added the one that it would return, in its place; no norm leaves
        the sum as it is. Writes the tokens' KV.
        """
        qkv, residual = self.qkv.after_norm(norm, x, residual)
        if self.q_norm is None and self.rotary is not None:
            out = self.backend.rotary_attend(
                qkv, self.num_heads, self.num_kv_heads, self.rotary, positions, cache, metadata,
                self.scale, self.window, self.soft_cap,
            )  # fmt: skip
            return self._project(out, residual, rows)
        q, k, v = qkv.split(self._sizes, dim=-1)
        if self.norms_all_heads and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))  # [tokens, heads, head_dim]
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))  # [tokens, kv_heads, head_dim]
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        k_cache, v_cache = cache
        if self.rotary is None:
            if self.head_norms is not None:
                q, k = self.head_norms(q, k)
            self.backend.write(k, v, k_cache, v_cache, metadata.slots)
        else:
            q = self.backend.norm_rotary_write(
                q, k, v, self.head_norms, *self.rotary, positions, k_cache, v_cache, metadata.slots
            )
        out = self.backend.attend(q, k_cache, v_cache, metadata, self.scale, self.window, self.soft_cap)
        return self._project(out.flatten(1), residual, rows)

    def _project(self, out: Tensor, residual: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if rows is not None:
            out, residual = out.index_select(0, rows), residual.index_select(0, rows)
        return self.output.added(out, residual) if self.adds else (self.output(out), residual)

    def targets(self, prefix: str) -> dict[str, Target]:
        views = self.qkv.targets(prefix) | self.output.targets(prefix)
        for name, norm, span in (("q_norm", self.q_norm, self.q_span), ("k_norm", self.k_norm, self.kv_span)):
            if norm is None:
                continue
            weight: Target = norm.weight
            if self.norms_all_heads and not span.is_all:
                weight = Slices(norm.weight.device)
                weight.add(norm.weight, span)
            views[f"{prefix}{name}.weight"] = weight
        return views
