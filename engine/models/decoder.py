"""The Llama-shaped decoder: embed, layers of attention and MLP around a residual stream, norm, project to logits."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.attention import Attention, KVCache
from engine.layers.linear import Linear, Quantization
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.model_config import ModelConfig
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.quantized_linear import QuantizedWeight, quantize_weight
from kernels.rotary import rotary_table


class DecoderLayer:
    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(config, backend, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        return {
            f"{prefix}input_layernorm.weight": self.attention_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self.mlp_norm.weight,
            **self.attention.targets(f"{prefix}self_attn."),
            **self.mlp.targets(f"{prefix}mlp."),
        }


class Decoder:
    """Weights are made empty; `targets` says what fills them."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.embedding: Tensor | QuantizedWeight
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, bias=False, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding
        self.layers = [DecoderLayer(config, backend, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        rope = config.rope
        cos, sin = rotary_table(config.head_dim, max_positions, rope.theta, rope.kind, rope.parameters)
        self.rotary = (cos.to(device), sin.to(device))

    def pack(self, quantization: Quantization | None = None) -> None:
        """Lay the loaded weights out for the device, one by one; the `targets` are dead after this.

        quantization: "int8" keeps every matrix in 8 bits, the embedding table too (for float32 on a CPU); norms stay.
        """
        for layer in self.layers:
            for part in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
                part.pack(quantization)
        self.head.pack(quantization)
        if quantization:
            assert isinstance(self.embedding, Tensor)
            if self.config.tie_word_embeddings:
                assert isinstance(self.head.weight, QuantizedWeight)
                self.embedding = self.head.weight
            else:
                self.embedding = quantize_weight(self.embedding)

    def forward(
        self, token_ids: Tensor, positions: Tensor, caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """token_ids, positions: [tokens]; caches: K and V by layer -> hidden states [tokens, hidden], normed."""
        x, residual = self.embed(token_ids), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer.attention(layer.attention_norm, x, residual, positions, self.rotary, cache, metadata)
            x, residual = layer.mlp(layer.mlp_norm, x, residual)
        assert residual is not None
        x, _ = self.norm.add(x, residual)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: [tokens] -> [tokens, hidden]."""
        if isinstance(self.embedding, QuantizedWeight):
            return self.embedding.rows(token_ids)
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocab], float32."""
        return self.head(hidden).float()

    def targets(self) -> dict[str, Tensor]:
        """Checkpoint name -> the (view of a) parameter that it fills, for every parameter."""
        assert isinstance(self.embedding, Tensor)
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            views |= self.head.targets("")
        for i, layer in enumerate(self.layers):
            views |= layer.targets(f"model.layers.{i}.")
        return views
