"""Numerical truth: transformers in float32, one sequence at a time."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

MIN_GAP = 1e-3
"""Logits that are closer than this may change places with the shape of a batch, in transformers itself too."""


@lru_cache(maxsize=8)
def load(path: Path) -> PreTrainedModel:
    if path.suffix == ".gguf":
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def logits(path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """-> [tokens, vocab]."""
    return load(path)(torch.tensor([list(token_ids)])).logits[0]


@torch.inference_mode()
def greedy(path: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The most likely continuation, EOS ignored. Asserts that no position was a close call."""
    model = load(path)
    cache, ids, output = None, torch.tensor([list(prompt)]), []
    for _ in range(num_tokens):
        result = model(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        best = result.logits[0, -1].topk(2)
        gap = float(best.values[0] - best.values[1])
        assert gap > MIN_GAP, f"token {len(output)} of this fixture is a close call ({gap:.1e}): choose another prompt"
        output.append(int(best.indices[0]))
        ids = best.indices[:1][None]
    return output
