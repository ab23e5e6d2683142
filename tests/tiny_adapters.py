"""Random LoRA adapters in PEFT's layout for tiny models, and the models that they make when merged by hand."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

PREFIX = "base_model.model."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 8,
    rank_pattern: Mapping[str, int] | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a random adapter for the model in `model` and return its folder. config: more keys of its config."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or module.rsplit(".", 1)[-1] not in targets:
            continue
        r = next((r for key, r in (rank_pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module)), rank)
        out_features, in_features = weight.shape
        a = torch.randn(r, in_features, generator=generator) * in_features**-0.5
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out_features, r, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    more = {"rank_pattern": dict(rank_pattern or {}), "modules_to_save": None} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings | more))
    return folder


@torch.no_grad()
def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """Write the model with W + scale * B A in the place of each W; returns its folder."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters = dict(merged.named_parameters())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A" not in name:
            continue
        module = name.removeprefix(PREFIX).split(".lora_A")[0]
        alphas = config.get("alpha_pattern", {})
        alpha = next((v for key, v in alphas.items() if re.match(rf"(.*\.)?({key})$", module)), config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        parameters[f"{module}.weight"] += scale * tensors[name.replace("lora_A", "lora_B")] @ a
    merged.save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
