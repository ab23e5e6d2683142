import copy
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.normalizers import NFC, Strip
from transformers import AutoTokenizer

from engine.errors import ConfigError, InvalidRequestError
from engine.gguf.file import open_gguf
from engine.hub import resolve_model
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny_models
from tests.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]
TEXTS = (
    "",
    "The quick brown fox jumps over the lazy dog.",
    "  leading and trailing   \n\n\t",
    "naïve café 日本語 🙂👩‍👩‍👧 \u200b \x00",
    "foo  1 12345 x2y don't I'M",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <think>",
    'def f(a, b):\n    return {"a": [1, 2.5e-3]}  # comment\r\n',
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is  2 + 2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("tokenizer"))


def test_a_folder_without_a_tokenizer_is_refused_in_every_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"has no tokenizer: put the model's tokenizer\.json there"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(params=["tiny", "smollm"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def copy_of(folder: Path, to: Path, **tokenizer_config: Any) -> Path:
    """The tokenizer files of `folder`, with changes of tokenizer_config.json; None removes a key."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    values = json.loads((to / "tokenizer_config.json").read_text()) | tokenizer_config
    (to / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return to


# ---- encode and decode


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_are_those_of_transformers(text: str, tokenizer: Tokenizer) -> None:
    hf = tokenizer.hf
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == hf(text, add_special_tokens=special).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=special) == hf.decode(
            ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
        )
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_left_out_of_decoded_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"
    assert {ids[0], ids[-1]} <= tokenizer.special_ids


def test_a_saved_truncation_does_not_cut_prompts(folder: Path, tmp_path: Path) -> None:
    copy_of(folder, tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    text = "The quick brown fox jumps over the lazy dog."
    assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(folder).encode(text)


# ---- the default model


def test_the_default_model_splits_text_as_it_was_trained(smollm: Tokenizer) -> None:
    """Each digit is cut out before GPT-2's rule applies, so that two spaces before one stay together."""
    pieces = [smollm.decode([i]) for i in smollm.encode("foo  1 12345 x2y don't")]
    assert pieces == ["foo", "  ", "1", " ", "1", "2", "3", "4", "5", " x", "2", "y", " don", "'t"]


def test_the_default_model_s_ids_and_template_come_from_its_file(smollm: Tokenizer) -> None:
    metadata = open_gguf(resolve_model("smollm2-135m")).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert smollm.vocab_size == len(tokens) == 49152
    assert smollm.hf.convert_ids_to_tokens(list(range(49152))) == tokens
    assert (smollm.bos_token_id, smollm.eos_token_ids) == (1, (2,))
    assert smollm.special_ids == {i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3}
    assert smollm.chat_template == metadata["tokenizer.chat_template"]
    assert smollm.encode("hi") == [6004]  # no BOS: add_bos_token is false


# ---- chat


def test_a_chat_becomes_the_ids_that_transformers_gives(tokenizer: Tokenizer) -> None:
    for messages, options in (
        (CHAT[:2], {"add_generation_prompt": True}),
        (CHAT[:2], {"add_generation_prompt": False}),
        (CHAT, {"add_generation_prompt": False, "continue_final_message": True}),
    ):
        expected = tokenizer.hf.apply_chat_template(messages, return_dict=False, **options)
        assert tokenizer.apply_chat_template(messages, **options) == expected


def test_a_chat_ends_with_the_assistant_s_turn_opened(tiny: Tokenizer) -> None:
    text = tiny.decode(tiny.apply_chat_template(CHAT[1:2]), skip_special_tokens=False)
    assert text == "<|im_start|>user\nWhat is  2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    text = tiny.decode(
        tiny.apply_chat_template(CHAT, add_generation_prompt=False, continue_final_message=True),
        skip_special_tokens=False,
    )
    assert text.endswith("<|im_start|>assistant\n4")


def test_a_template_that_writes_bos_gets_no_second_one(folder: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    copy_of(folder, tmp_path, chat_template=template)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer.encode("abc", add_special_tokens=False)
    assert tokenizer.encode("abc") == [1, *plain]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}]) == [1, *plain]


def test_tools_and_further_variables_reach_the_template(folder: Path, tmp_path: Path) -> None:
    template = "{{ tools[0]['function']['name'] }} {{ enable_thinking }}"
    tokenizer = load_tokenizer(copy_of(folder, tmp_path, chat_template=template))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    ids = tokenizer.apply_chat_template(CHAT, tools=tools, enable_thinking=False)
    assert tokenizer.decode(ids) == "add False"


def test_a_template_s_own_error_is_the_client_s_and_keeps_its_message(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="unknown role robot") as caught:
        tiny.apply_chat_template([{"role": "robot", "content": "hi"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"content": "hi"}]])
def test_messages_that_a_template_cannot_format_are_the_client_s_error(messages: list[Any], tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="The chat template refused the messages"):
        tiny.apply_chat_template(messages)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "padding", "return_tensors", "conversation"])
def test_a_client_cannot_set_transformers_own_arguments(name: str, tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        tiny.apply_chat_template(CHAT, **{name: "x"})


def test_a_model_without_a_template_says_so(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(copy_of(folder, tmp_path, chat_template=None))
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)


# ---- bytes


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_of_a_text_are_its_bytes(text: str, tokenizer: Tokenizer) -> None:
    table = tokenizer.token_bytes
    assert table is not None
    assert b"".join(table[i] or b"?" for i in tokenizer.encode(text)) == text.encode()


def test_every_byte_has_a_token(tiny: Tokenizer) -> None:
    assert {bytes([byte]) for byte in range(256)} <= set(tiny.token_bytes or [])


def test_special_tokens_give_their_text(tokenizer: Tokenizer) -> None:
    table = tokenizer.token_bytes
    assert table is not None
    assert len(table) == tokenizer.vocab_size
    assert [table[i] for i in (0, 1, 2)] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]


def test_a_hole_in_the_vocabulary_has_no_bytes(folder: Path, tmp_path: Path) -> None:
    copy_of(folder, tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["model"]["vocab"]["zz"] = 390
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    table = load_tokenizer(tmp_path).token_bytes
    assert table is not None
    assert table[384:] == [None] * 6 + [b"zz"]


def test_added_tokens_have_the_bytes_that_decode_gives_them(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.hf.add_tokens(["Ġfoo", "a b", "世"])
    tokenizer.vocab_size = len(tokenizer.hf)
    table = tokenizer.token_bytes
    assert table is not None
    for token_id in range(384, 387):
        assert (table[token_id] or b"").decode() == tokenizer.decode([token_id])


def test_a_tokenizer_that_is_not_byte_level_has_no_bytes(tmp_path: Path, folder: Path) -> None:
    copy_of(folder, tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    assert load_tokenizer(tmp_path).token_bytes is None


# ---- loading


def test_eos_ids_are_the_model_s_then_the_tokenizer_s(folder: Path, tmp_path: Path) -> None:
    copy_of(folder, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    tiny_models.edit_config(tmp_path, eos_token_id=5)
    assert load_tokenizer(tmp_path).eos_token_ids == (5, 0, 2)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_loading_opens_no_connection_and_imports_no_torch(kind: str, folder: Path) -> None:
    path = folder if kind == "folder" else resolve_model("smollm2-135m")
    code = """
import socket, sys
from pathlib import Path

def connect(*args):
    raise SystemExit(f"connected to {args[1:]}")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = connect
from engine.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]))
tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
tokenizer.token_bytes
print([m for m in ("torch", "gguf", "ray") if m in sys.modules])
"""
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", code, str(path)]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (child.returncode, child.stdout.strip()) == (0, "[]"), child.stderr


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_a_folder_s_tokenizer_is_the_one_that_transformers_would_choose(
    named: str, folder: Path, tmp_path: Path
) -> None:
    copy_of(folder, tmp_path, tokenizer_class=named)
    ours, hf = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in TEXTS:
        assert ours.encode(text) == hf(text).input_ids
        assert ours.decode(ours.encode(text)) == hf.decode(ours.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("rule", ["gpt-2", "qwen2", "llama-bpe"])
def test_a_gguf_s_splitting_rule_is_the_one_that_transformers_knows(rule: str, folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "m.gguf", pre=rule)
    ours, hf = load_tokenizer(file), AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == hf(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize(("flag", "first"), [(True, 1), (False, None), (None, None)])
def test_a_gguf_says_whether_bos_is_added(flag: bool | None, first: int | None, folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(folder, tmp_path / "m.gguf", add_bos=flag))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == ([first, *plain] if first is not None else plain)


def test_a_folder_without_tokenizer_json_is_converted_by_transformers(folder: Path, tmp_path: Path) -> None:
    copy_of(folder, tmp_path, tokenizer_class="GPT2Tokenizer")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    text = "The quick brown fox jumps over the lazy dog, 1234"
    assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(folder).encode(text)


def test_fewest_tokens_is_never_more_than_there_are(tokenizer: Tokenizer) -> None:
    table = tokenizer.token_bytes
    assert table is not None
    longest = max((token for token in table if token), key=len).decode()
    for text in (*TEXTS, longest * 50, longest, "a" * 5000):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.fewest_tokens("a" * 100_000) > 1000


def test_fewest_tokens_allows_for_what_a_tokenizer_takes_away(tiny: Tokenizer) -> None:
    def variant(change: Any) -> Tokenizer:
        hf = copy.deepcopy(tiny.hf)
        change(hf)
        return Tokenizer(hf, ())

    composed = variant(lambda hf: setattr(hf.backend_tokenizer, "normalizer", NFC()))
    letter = unicodedata.normalize("NFD", "\u1f82")  # one letter and three marks, and one character in NFC
    assert len(letter) == 4
    longest = max(len(token) for token in composed.token_bytes or () if token)
    assert composed.fewest_tokens(letter * longest) == 1
    other = variant(lambda hf: setattr(hf.backend_tokenizer, "normalizer", Strip()))
    stripping = variant(lambda hf: hf.add_tokens([AddedToken("<gap>", rstrip=True)]))
    assert len(stripping.encode("<gap>" + " " * 10_000)) == 1
    assert other.fewest_tokens(" " * 10_000) == stripping.fewest_tokens("<gap>" + " " * 10_000) == 0
