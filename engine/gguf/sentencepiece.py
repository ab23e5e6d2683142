"""Builds the SentencePiece tokenizer (of the BPE kind) that a GGUF file describes, as a fast tokenizer.

GGUF keeps pieces and their scores; a fast tokenizer wants the merges, in order. A piece can come of any two others, and
SentencePiece joins the pair whose piece has the best score, so the merges are all such pairs by the score of what they
make.
"""

from tokenizers import Tokenizer, decoders, models, normalizers

from engine.gguf.file import GGUFFile

_SPACE = "▁"


def build_sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """tokens: by id. Special tokens and BOS are the caller's."""
    scores: list[float] = file.metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab,
        _merges(vocab, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback="<0x00>" in vocab,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of pieces by the score of the piece they make, best first; of one piece, by the ids of its parts."""
    found = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right, piece[:cut], piece[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]
