"""Tiny random models in Hugging Face layout, written by transformers itself."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 384
BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore, and he reads the book again.",
    "In the beginning there was a small model that could count: one, two, three, four, five, 1, 2, 3, 10, 42, 1999.",
    'def add(a, b):\n    return a + b\n\n{"name": "value", "list": [1, 2, 3], "null": null, "true": true}\n',
)


def llama(folder: Path, *, shards: int = 1, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Llama to `folder` and return it. overrides: fields of `LlamaConfig`, over the tiny defaults.

    2 layers, hidden size 64, 4 heads of 16, 2 KV heads, untied, 1024 positions, 384 tokens.
    shards: weight files, about.
    """
    config = LlamaConfig(**(shape(head_dim=16) | overrides))
    return write(folder, LlamaForCausalLM, config, shards=shards, seed=seed)


def qwen3(folder: Path, *, shards: int = 1, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Qwen3 to `folder` and return it; as `llama`, but tied, and with heads of 32 (not 64 / 4)."""
    config = Qwen3Config(**(shape(head_dim=32, tie_word_embeddings=True) | overrides))
    return write(folder, Qwen3ForCausalLM, config, shards=shards, seed=seed)


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 384 tokens: three special, 256 bytes, and merges learned from a few sentences."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    assert backend.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def shape(**extra: Any) -> dict[str, Any]:
    """The tiny size, in the words of every config class."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        # Wider than usual, so that the logits of a random model are far enough apart to compare tokens.
        "initializer_range": 0.2,
    } | extra


def write(
    folder: Path,
    kind: type[PreTrainedModel],
    config: Any,
    *,
    shards: int = 1,
    seed: int = 0,
    norm_offset: float = 0.0,
) -> Path:
    """Write a random model of a transformers class. norm_offset: what that class adds to the weights of its norms."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):  # all ones would hide a norm that is mixed up or left out
                    parameter.uniform_(0.5 - norm_offset, 1.5 - norm_offset)
                elif name.endswith(".bias"):
                    parameter.normal_(0.0, 0.1)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder, max_shard_size=-(-size // shards))
    tokenizer().save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json; a value of None removes the key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
