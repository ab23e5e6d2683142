"""A mixture of experts in the MLP's place: each token goes to a few of many gated MLPs (Shazeer et al., 2017).

On a CPU tokens are sorted by expert, so that each expert that is needed runs once, over all of its tokens, and a
token's result is added up in the order of its experts' numbers, whatever else is in the batch. On a GPU all experts are
one operation (`kernels.experts`), over their weights in one piece.
"""

import torch
from torch import Tensor

from engine.layers.linear import Linear, Quantization
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.layers.target import Target
from engine.model_config import ModelConfig
from engine.parallel.shares import Shares
from kernels import experts


class Experts:
    """The router is never quantised: rounding it would send tokens elsewhere. Ranks share each expert's features.

    waits: whether the host waits for the device, to know how many tokens were routed to each expert.
    """

    def __init__(
        self,
        config: ModelConfig,
        shares: Shares,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        assert config.experts is not None
        self.per_token = config.experts.per_token
        self.normalize = config.experts.normalize
        self.router = Linear(config.hidden_size, {"gate": config.experts.count}, bias=False, dtype=dtype, device=device)
        self.group = shares.group
        self.experts = [
            MLP(config, shares.expert_inner, None, adds=False, dtype=dtype, device=device, quantization=quantization)
            for _ in range(config.experts.count)
        ]
        self.gelu = config.activation == "gelu_tanh"
        self.stacked = None if self.experts[0].gate_up.bias is not None else self._stack()
        self.waits = self.stacked is None or not experts.usable(self.stacked[0])

    def _stack(self) -> tuple[Tensor, Tensor] | None:
        """Put the experts' weights, still empty, into one piece of memory: [experts, rows, columns] each.

        None where they have a form of their own.
        """
        stacks = []
        for linears in ([mlp.gate_up for mlp in self.experts], [mlp.down for mlp in self.experts]):
            weight = linears[0].weight
            if not isinstance(weight, Tensor) or weight.is_meta:
                return None
            stack = weight.new_empty(len(linears), *weight.shape)
            for linear, part in zip(linears, stack, strict=True):
                linear.weight = part
            stacks.append(stack)
        return stacks[0], stacks[1]

    def __call__(self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, residual: [tokens, hidden] -> (experts of the norm of their sum, their sum), both [tokens, hidden].

        No residual counts as zero.
        """
        if norm is not None and residual is not None:
            x, residual = norm.add(x, residual)
        else:
            residual = x if residual is None else residual + x
            x = residual if norm is None else norm(residual)
        return self.mix(x, *self.route(x)), residual

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden] -> (experts, int64, and their weights, of x's type), both [tokens, per_token]."""
        weights, chosen = self.router(x).float().softmax(dim=-1).topk(self.per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights.to(x.dtype)

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """-> the sum of the chosen experts' results by their weights, [tokens, hidden]."""
        if self.stacked is not None and not self.waits:
            out = experts.experts_mlp(x, *self.stacked, chosen, weights, self.gelu)
        else:
            out = self._one_by_one(x, chosen, weights)
        return out if self.group is None else self.group.all_reduce(out)

    def _one_by_one(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)  # [tokens * per_token], tokens of one expert side by side
        token = order // self.per_token
        weight = weights.flatten()[order].unsqueeze(1)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        out = torch.zeros_like(x)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count == 0:
                continue
            mine = token[start : start + count]
            y = expert.down(expert.gate_up(x[mine]))
            out.index_add_(0, mine, y * weight[start : start + count])
            start += count
        return out

    def targets(self, prefix: str) -> dict[str, Target]:
        views = self.router.targets(prefix)
        for i, expert in enumerate(self.experts):
            views |= expert.targets(f"{prefix}experts.{i}.")
        return views
