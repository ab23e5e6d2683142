"""The MLPs of a mixture of experts over the tokens that were routed to each, as one operation of static shape.

Used by `engine.layers.experts` on a GPU: nothing of it depends on how many tokens an expert got, so the host need not
know, and a decode step with experts can be a CUDA graph. (On a CPU the layer runs expert by expert.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import gpu
from kernels.activation import gelu_reference
from kernels.activation import reference as silu_reference


def usable(x: Tensor) -> bool:
    """Whether there is a kernel for x's device: tensor cores for Triton's products, from compute capability 8.0 on."""
    return x.is_cuda and gpu.available() and gpu.describe(x.device).capability >= (8, 0)


def experts_mlp(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, gelu: bool) -> Tensor:
    """-> [tokens, hidden], each token's sum of its experts' outputs by their weights.

    x: [tokens, hidden]; gate_up: [experts, 2 * inner, hidden], gate rows first; down: [experts, hidden, inner];
    chosen: int64 [tokens, per_token], weights: [tokens, per_token]; gelu: the gate goes through GELU, else SiLU.
    """
    out: Tensor = torch.ops.nanoserve_experts.mlp(x, gate_up, down, chosen, weights, gelu)
    return out


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, gelu: bool) -> Tensor:
    if x.is_cuda:
        from kernels.gpu import experts

        return experts.experts_mlp(x, gate_up, down, chosen, weights, gelu)
    return reference(x, gate_up, down, chosen, weights, gelu)


# An operator, so that torch.compile does not look into it.
_library = torch.library.Library("nanoserve_experts", "DEF")
_library.define("mlp(Tensor x, Tensor gate_up, Tensor down, Tensor chosen, Tensor weights, bool gelu) -> Tensor")
_library.impl("mlp", _mlp, "CompositeExplicitAutograd")


torch.library.register_fake("nanoserve_experts::mlp", lambda x, *rest: torch.empty_like(x))


def reference(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, gelu: bool) -> Tensor:
    """Every expert over every token: what was not routed to it counts nothing."""
    out = torch.zeros_like(x)
    activate = gelu_reference if gelu else silu_reference
    for expert in range(len(gate_up)):
        share = torch.where(chosen == expert, weights, 0).sum(dim=1, keepdim=True)  # [tokens, 1]
        out += share * F.linear(activate(F.linear(x, gate_up[expert])), down[expert])
    return out
