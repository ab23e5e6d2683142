"""Builds the tokenizer that a GGUF file describes: byte-level BPE here, SentencePiece in `engine.gguf.sentencepiece`.

transformers can do this too, but takes seconds for it, and knows fewer rules for splitting text: SmolLM2's (each
digit alone) is not among them, so that some texts would get other tokens than in training.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ConfigError
from engine.gguf.file import GGUFFile
from engine.gguf.sentencepiece import build_sentencepiece

_CONTROL, _USER_DEFINED = 3, 4

# The published expression of the Llama 3 and Qwen 2 tokenizers, which differ in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Those of GPT-4o and of Mistral's Tekken tell upper from lower case.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased_split(suffix: str, digits: str) -> str:
    word = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{word}{_UPPER}*{_LOWER}+{suffix}|{word}{_UPPER}+{_LOWER}*{suffix}|"
        rf"\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DIGITS_APART = ("smollm", "refact", "starcoder")
"""GPT-2's own expression, after each digit has been cut off."""

_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Rules under which a word that is a token is not built of merges."""

SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    **dict.fromkeys(_DIGITS_APART, None),
    "llama-bpe": _SPLIT.format(digits="{1,3}"),
    "dbrx": _SPLIT.format(digits="{1,3}"),
    "smaug-bpe": _SPLIT.format(digits="{1,3}"),
    "qwen2": _SPLIT.format(digits=""),
    "gpt-4o": _cased_split(_SUFFIX, "{1,3}"),
    "tekken": _cased_split("", ""),
}
"""GGUF's name of a rule for splitting text before merging, and its expression; None is GPT-2's own."""


def build_tokenizer(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and its special tokens and chat template as arguments of transformers' tokenizers.

    Raises `ConfigError` naming what is missing or not supported.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    tokens = _required(file, "tokens")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, add_bos = build_sentencepiece(file, tokens), True
    else:
        raise ConfigError(
            f"{file.path}: a tokenizer of the kind {kind!r} is not supported from GGUF (byte-level BPE, 'gpt2', and "
            "SentencePiece, 'llama', are); use the model's folder in Hugging Face layout"
        )
    _add_special_tokens(tokenizer, file, tokens)
    special = {f"{name}_token": _special_token(file, key, tokens) for name, key in _SPECIAL_IDS.items()}
    bos = special["bos_token"]
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        begin = processors.TemplateProcessing(f"{bos} $A", None, [(bos, tokens.index(bos))])
        own = tokenizer.post_processor
        tokenizer.post_processor = begin if own is None else processors.Sequence([own, begin])
    settings = special | {
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        "model_max_length": file.get("context_length"),
        "clean_up_tokenization_spaces": False,
    }
    return tokenizer, {key: value for key, value in settings.items() if value is not None}


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """-> byte-level BPE, and whether BOS is added where the file does not say."""
    rule = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if rule not in SPLITS:
        raise ConfigError(
            f"{file.path}: the tokenizer's rule for splitting text, {rule!r} (tokenizer.ggml.pre), is not supported; "
            f"supported are {', '.join(SPLITS)}. Use the model's folder in Hugging Face layout"
        )
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _required(file, "merges"))]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=rule in _WHOLE_WORDS))
    except Exception as error:  # the library's errors are plain exceptions
        raise ConfigError(f"{file.path}: the tokenizer's merges do not fit its tokens ({error})") from error
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, rule in _WHOLE_WORDS


def _add_special_tokens(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


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
    if rule in _DIGITS_APART:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words
