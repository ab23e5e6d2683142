"""Builds the byte-level BPE tokenizer that a GGUF file describes.

transformers can do this too, but takes seconds for it, and knows fewer rules for splitting text: SmolLM2's (each
digit alone) is not among them, so that some texts would get other tokens than in training.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ConfigError
from engine.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4

# The published expression of the Llama 3 and Qwen 2 tokenizers, which differ in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _SPLIT.format(digits="{1,3}"),
    "qwen2": _SPLIT.format(digits=""),
}
"""GGUF's name of a rule for splitting text before merging, and its expression; None is GPT-2's own."""


def build_tokenizer(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and its special tokens and chat template as arguments of transformers' tokenizers.

    Raises `ConfigError` naming what is missing or not supported.
    """
    metadata = file.metadata
    rule = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if rule not in SPLITS:
        raise ConfigError(
            f"{file.path}: the tokenizer's rule for splitting text, {rule!r} (tokenizer.ggml.pre), is not supported; "
            f"supported are {', '.join(SPLITS)}. Use the model's folder in Hugging Face layout"
        )
    tokens: list[str] = _required(file, "tokens")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _required(file, "merges"))]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=rule == "llama-bpe"))
    except Exception as error:  # the library's errors are plain exceptions
        raise ConfigError(f"{file.path}: the tokenizer's merges do not fit its tokens ({error})") from error
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    special = {f"{name}_token": _special_token(file, key, tokens) for name, key in _SPECIAL_IDS.items()}
    bos = special["bos_token"]
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", rule == "llama-bpe"):
        begin = processors.TemplateProcessing(f"{bos} $A", None, [(bos, vocab[bos])])
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, begin])
    settings = special | {
        "chat_template": metadata.get("tokenizer.chat_template"),
        "model_max_length": file.get("context_length"),
        "clean_up_tokenization_spaces": False,
    }
    return tokenizer, {key: value for key, value in settings.items() if value is not None}


_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' name of a special token, and GGUF's."""


def _special_token(file: GGUFFile, name: str, tokens: list[str]) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = file.metadata.get(key)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ConfigError(f"{file.path}: {key} is {token_id}, but there are {len(tokens)} tokens")
    token: str = tokens[token_id]
    return token


def _required(file: GGUFFile, name: str) -> list[str]:
    values: Any = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{file.path} has no tokenizer: tokenizer.ggml.{name} must be a list of strings")
    return values


def _pre_tokenizer(rule: str) -> Any:
    split = SPLITS[rule]
    if split is not None:
        cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
        return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words
