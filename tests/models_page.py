"""Prints docs/models.md from the table of families and the tests: `python -m tests.models_page --write`."""

import argparse
from pathlib import Path

from engine.models.families import FAMILIES, Family
from tests import tiny_families
from tests.engine import test_gguf_families

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

_BEGIN = """# Models

Printed by `python -m tests.models_page --write` from `engine/models/families.py` and the tests; a test says when it is
out of date. [Adding a model](adding-a-model.md) says how a family is added.

A folder in Hugging Face layout (safetensors, whole or sharded; float32, bfloat16 or float16; output weights tied or
not) is served if its config.json names one of these architectures. Of a model of several parts (pictures beside text),
the text part is served, if its `text_config` has one of these model types. GGUF files may hold F32, F16, BF16, Q8_0,
Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K and IQ4_NL, in one file or several; their tokenizers may be byte-level BPE or
SentencePiece. A folder needs its tokenizer too, best as tokenizer.json.

Anything else is refused by name: other architectures, pickles, and weights quantised by GPTQ, AWQ, fp8 or bitsandbytes.
Refused too, naming the tensor, are numbers that no model can answer by: NaN, infinities, and what is beyond the type
that the weights are kept in.

| architecture | model type | models | beside Llama | GGUF |
|---|---|---|---|---|
"""

_COMPARED = """
## What was compared with what

Each line is a tiny random model made by transformers' own class. Of each, in float32: two prompts and 64 greedy tokens
after each (logits within 1e-4, the tokens the same), computed in chunks of 16 tokens, then again from the prefix cache
and two at a time (`tests/engine/test_families.py`). In int8: the logits stay within 15 % of those in float32. GGUF
files are written as llama.cpp's converter writes them, and give the config and the weights of the folder that they were
made from (`tests/engine/test_gguf_families.py`).

| model | transformers' class | fields of its config | GGUF |
|---|---|---|---|
"""

_END = """
## Scaled rotary embeddings

`default`, `linear`, `dynamic`, `llama3`, `yarn` and `longrope`. transformers chooses the frequencies of `dynamic` and
`longrope` by the length of each sequence, which would make cached keys wrong for longer ones. Here one choice holds for
all, by `max_model_len`: up to the length that the model was first trained for, both are what transformers has for such
sequences; beyond it, `longrope` takes its long factors, as vLLM does.
"""


def page() -> str:
    rows = [
        f"| `{architecture}` | `{family.model_type}` | {family.title} | {_differences(family)} | "
        f"{_gguf(architecture, family)} |"
        for architecture, family in FAMILIES.items()
    ]
    cases = [
        f"| {name} | `{family}ForCausalLM` | {_fields(fields)} | {'yes' if name in test_gguf_families.CASES else ''} |"
        for name, (family, fields) in tiny_families.CASES.items()
    ]
    return _BEGIN + "\n".join(rows) + "\n" + _COMPARED + "\n".join(cases) + "\n" + _END


def _differences(family: Family) -> str:
    said = {
        "biases of q, k, v": family.qkv_bias,
        "norm of each head of q and k": family.qk_norm == "head",
        "norm of q and k over all heads": family.qk_norm == "all_heads",
        "norms after attention and MLP": family.norms == "after",
        "norms before and after attention and MLP": family.norms == "around",
        "norm weights less 1": family.norm_offset,
        "sliding window": family.windows == "all",
        "sliding window in some layers": family.windows == "by layer",
        "RoPE by kind of layer": family.layer_rope,
        "RoPE over a part of a head": family.partial_rotary,
        "layers without RoPE": "no_rope_layers" in family.defaults,
        "scaled embeddings": family.scaled_embeddings,
        "multipliers": "residual_multiplier" in family.defaults,
        "soft caps": "attn_logit_softcapping" in family.defaults,
        "GeGLU": "hidden_activation" in family.defaults,
        "q, k, v and gate, up stored as one": family.fused_projections,
        "experts": "num_experts_per_tok" in family.defaults,
    }
    return ", ".join(words for words, is_true in said.items() if is_true) or "-"


def _gguf(architecture: str, family: Family) -> str:
    if family.gguf:
        return f"`{family.gguf}`"
    return {
        "MistralForCausalLM": "`llama`",
        "MixtralForCausalLM": "`llama` with experts",
        "Olmo3ForCausalLM": "`olmo2` with a window",
    }.get(architecture, "no")


def _fields(fields: dict[str, object]) -> str:
    return ", ".join(f"`{_field(name, value)}`" for name, value in fields.items())


def _field(name: str, value: object) -> str:
    if isinstance(value, dict):
        kinds = [value.get("rope_type"), *(rope["rope_type"] for rope in value.values() if isinstance(rope, dict))]
        return f"{name}: {' and '.join(kind for kind in kinds if kind)}"
    return name if isinstance(value, list) else f"{name}={value}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page rather than print it")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
