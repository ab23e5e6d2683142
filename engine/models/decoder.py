"""The Llama-shaped decoder: embed, layers of attention and MLP around a residual stream, norm, project to logits."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.attention import Attention, KVCache, RotaryTable
from engine.layers.experts import Experts
from engine.layers.linear import Linear, Quantization
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.layers.target import Parts, Slices, Target, check_finite
from engine.model_config import LayerConfig, ModelConfig, NormPlacement, RopeConfig
from engine.parallel.group import ParallelGroup
from engine.parallel.shares import Shares, Span, share
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.linear import PackedWeight
from kernels.quantized_weight import QuantizedWeight, exact_codes, quantize_weight
from kernels.rotary import rotary_table

NORM_NAMES: dict[NormPlacement, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""Checkpoint names of a layer's norms: before attention, after it, before the MLP, after it."""


class DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        shares: Shares,
        layer: LayerConfig,
        rotary: RotaryTable | None,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None,
    ) -> None:
        self.residual_scale = config.residual_scale
        self._norm_names = NORM_NAMES[config.norms]
        adds = config.norms == "before" and config.residual_scale == 1.0
        self.attention = Attention(
            config, shares, rotary, layer.window, backend,
            adds=adds, dtype=dtype, device=device, quantization=quantization,
        )  # fmt: skip
        self.mlp: MLP | Experts
        if layer.sparse:
            self.mlp = Experts(config, shares, dtype=dtype, device=device, quantization=quantization)
        else:
            self.mlp = MLP(
                config, shares.inner, shares.group,
                adds=adds, dtype=dtype, device=device, quantization=quantization,
            )  # fmt: skip
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device) if name else None
            for name in self._norm_names
        )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """x: what the layer before adds to the residual -> (what this one adds, the residual before it).

        No residual counts as zero: x is the sum, as it is before the first layer and where a layer has added.
        rows: int64 [K], the tokens that are wanted, None for all.
        """
        x, residual = self.attention(self.attention_norm, x, residual, positions, cache, metadata, rows)
        x, residual = self.mlp(self.mlp_norm, self._scaled(x, self.attention_post_norm), residual)
        return self._scaled(x, self.mlp_post_norm), residual

    def _scaled(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is not None:
            x = norm(x)
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    def targets(self, prefix: str) -> dict[str, Target]:
        norms = (self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        return {
            **{f"{prefix}{name}.weight": n.weight for name, n in zip(self._norm_names, norms, strict=True) if n},
            **self.attention.targets(f"{prefix}self_attn."),
            **self.mlp.targets(f"{prefix}mlp."),
        }


class Decoder:
    """Weights are made empty; `targets` says what fills them, each of which is laid out for the device as it comes.

    quantization: "int8" keeps every matrix in 8 bits or fewer, the embedding table too; norms and the routers of
        experts stay. For float32 on a CPU.
    group: whose other ranks hold the rest of the model; None: all is here. Raises `ConfigError` where it cannot be cut.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        group: ParallelGroup | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.quantization = quantization
        self.group = group
        self.shares = share(config, group, quantized=quantization is not None)
        self.head = Linear(
            config.hidden_size,
            {"lm_head": self.shares.vocabulary},
            bias=False,
            dtype=dtype,
            device=device,
            quantization=quantization,
        )
        self.embedding: Tensor | QuantizedWeight
        assert isinstance(self.head.weight, Tensor)
        self.embedding = self.head.weight
        if not config.tie_word_embeddings:
            place = self.head.weight.device  # empty_like of a meta tensor imports half a second of sympy
            self.embedding = torch.empty(self.head.weight.shape, dtype=dtype, device=place)
        self._embedding_parts = None
        if self.embedding.is_meta:
            self._embedding_parts = Parts(
                [len(self.embedding)], config.hidden_size, self._lay_out_embedding, rounded=quantization is not None
            )
        tables = _RotaryTables(config.head_dim, max_positions, device)
        self.layers = [
            DecoderLayer(
                config,
                self.shares,
                layer,
                tables.get(layer.rope),
                backend,
                dtype=dtype,
                device=device,
                quantization=quantization,
            )
            for layer in config.layers
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)

    def _lay_out_embedding(self, sources: list[Tensor]) -> None:
        """One copy of a table that is the head too, where the head's form can be read by rows."""
        (source,) = sources
        codes: object = None
        if self.config.tie_word_embeddings:
            self.head.lay_out(sources)
            head = self.head.weight
            codes = head.data if isinstance(head, PackedWeight) else head
        elif self.quantization:
            codes = quantize_weight(source)
        else:
            codes = exact_codes(source)
        if isinstance(codes, QuantizedWeight):
            self.embedding = codes
        else:
            self.embedding = source.to(source.dtype if source.dtype is torch.bfloat16 else self.dtype, copy=True)
            check_finite(self.embedding, source)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[KVCache],
        metadata: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        """token_ids, positions: [tokens]; caches: K and V by layer -> hidden states [tokens, hidden], normed.

        rows: int64 [K], the tokens whose hidden states are wanted, [K, hidden]; the last layer computes no others.
        """
        x, residual = self.embed(token_ids), None
        last = self.layers[-1]
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, positions, cache, metadata, rows if layer is last else None)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: [tokens] -> [tokens, hidden]."""
        x = self._rows(token_ids) if self.group is None else self._shared_rows(token_ids, self.group)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def _rows(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.embedding, QuantizedWeight):
            return self.embedding.rows(token_ids)
        return F.embedding(token_ids, self.embedding).to(self.dtype)

    def _shared_rows(self, token_ids: Tensor, group: ParallelGroup) -> Tensor:
        """Each row from the rank that holds it: what the others add is zero."""
        held = self.shares.vocabulary
        at = token_ids - held.start
        elsewhere = (at < 0) | (at >= held.size)
        x = self._rows(at.clamp(0, held.size - 1)).masked_fill_(elsewhere.unsqueeze(1), 0)
        return group.all_reduce(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocab], float32; only rank 0 gets them, others [0, vocab]."""
        if self.config.logit_scale != 1.0:
            hidden = hidden * self.config.logit_scale
        logits = self.head(hidden)
        if self.group is not None:
            logits = self.group.gather(logits, self.config.vocab_size)
        logits = logits.float()
        cap = self.config.logit_soft_cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def targets(self) -> dict[str, Target]:
        """Checkpoint name -> the parameter, or part of one, that it fills, for every parameter."""
        views: dict[str, Target] = {"model.norm.weight": self.norm.weight}
        table: Target
        if self._embedding_parts is not None:
            table = self._embedding_parts.targets[0]
        else:
            assert isinstance(self.embedding, Tensor)
            table = self.embedding
        if self.group is not None:
            rows = Slices(table.device)
            rows.add(table, self.shares.vocabulary, Span.of(self.config.hidden_size))
            table = rows
        views["model.embed_tokens.weight"] = table
        if not self.config.tie_word_embeddings:
            views |= self.head.targets("")
        for i, layer in enumerate(self.layers):
            views |= layer.targets(f"model.layers.{i}.")
        return views


class _RotaryTables:
    """One table for all layers that turn alike."""

    def __init__(self, head_dim: int, max_positions: int, device: torch.device) -> None:
        self._head_dim, self._max_positions, self._device = head_dim, max_positions, device
        self._made: list[tuple[RopeConfig, RotaryTable]] = []

    def get(self, rope: RopeConfig | None) -> RotaryTable | None:
        if rope is None:
            return None
        for made, table in self._made:
            if made == rope:
                return table
        rotary_dim = int(self._head_dim * rope.partial_rotary_factor)
        cos, sin = rotary_table(rotary_dim, self._max_positions, rope.theta, rope.kind, rope.parameters)
        self._made.append((rope, (cos.to(self._device), sin.to(self._device))))
        return self._made[-1][1]
