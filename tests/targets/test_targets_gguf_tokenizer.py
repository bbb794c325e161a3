"""A GGUF file's text is cut as llama.cpp cuts it: ids equal those of a tokenizer that is built apart from the same merges."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from gguf_files import CONTROL, NORMAL, TEMPLATE, USER_DEFINED, GgufFile, Vocabulary
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from draftworks.errors import ConfigError
from draftworks.targets.gguf_header import GgufHeader
from draftworks.targets.gguf_tokenizer import (
    PRE_TOKENIZERS,
    list_ends,
    require_tokenizer,
    write_generation_config,
    write_tokenizer,
)

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Of Llama 3's published tokenizer.json."""


def split(expression: str) -> list[pre_tokenizers.PreTokenizer]:
    apart = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    return [apart, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


PUBLISHED = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": split(LLAMA3),
    "qwen2": split(PRETOKENIZE_REGEX),
}
"""How the models' own tokenizers cut text: SmolLM2's, GPT-2's, Llama 3's and Qwen2's, as published with them."""
TEXTS = [
    "12345 + 6789 = 19,134.5",
    "  two   blanks\n\n\n  and\ttabs \r\n end ",
    "I'll don't we've SHE'S HE'D o'clock 'tis",
    "Grüße, Жизнь, 日本語テキスト, العربية ١٢٣, ½ Ⅷ ²",
    "<|im_start|>user\nHi 42<|im_end|>\n",
    "def f(x):\n    return x**2  # 3.14",
    "👩‍👩‍👧 e\u0301 n\u0303 a\u00a0b\u2003c",
    " ",
    "",
]
LETTERS = [
    chr(n) for span in ((32, 127), (160, 591), (0x3B1, 0x3CA), (0x430, 0x450), (0x4E00, 0x4E30)) for n in range(*span)
]


def describe(pre: str | None, words: Vocabulary | None = None, **metadata: Any) -> GgufHeader:
    words = words or Vocabulary.of_tiny()
    found = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(words.tokens),
        "tokenizer.ggml.token_type": list(words.kinds),
        "tokenizer.ggml.merges": list(words.merges),
        "tokenizer.ggml.eos_token_id": words.tokens.index("<|im_end|>"),
        "tokenizer.chat_template": TEMPLATE,
    }
    given = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return GgufHeader(Path("model.gguf"), {k: v for k, v in {**found, **given}.items() if v is not None}, ())


def load(header: GgufHeader, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    write_tokenizer(header, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2048}))
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def build_apart(cut: list[pre_tokenizers.PreTokenizer]) -> Tokenizer:
    words = Vocabulary.of_tiny()
    merges = [(left, right) for left, _, right in (each.partition(" ") for each in words.merges)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(words.tokens)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(cut), decoders.ByteLevel()
    control = [token for token, kind in zip(words.tokens, words.kinds) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in control])
    return tokenizer


@pytest.mark.parametrize("pre", PUBLISHED)
def test_ids_are_those_of_the_published_way_to_cut(tmp_path: Path, pre: str):
    ours, theirs = load(describe(pre), tmp_path), build_apart(PUBLISHED[pre])
    chance = random.Random(0)
    many = ["".join(chance.choices([*LETTERS, *" \n\t'0123" * 8], k=60)) for _ in range(200)]
    for text in [*TEXTS, *many]:
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == text


def cut(pre: str, text: str, folder: Path) -> list[str]:
    write_tokenizer(describe(pre), folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [text[slice(*where)] for _, where in backend.pre_tokenizer.pre_tokenize_str(text)]


def test_pieces_by_hand(tmp_path: Path):
    text = "In 12345 I'll  go"
    digits = {"smollm": [" ", "1", "2", "3", "4", "5"], "gpt-2": [" 12345"], "llama-bpe": [" ", "123", "45"]}
    digits |= {"qwen2": digits["smollm"], "default": [" ", "123", "45"]}
    for pre, expected in digits.items():
        begin, *rest = cut(pre, text, tmp_path)
        assert begin == "In"
        assert rest[: len(expected)] == expected, pre
    assert cut("llama-bpe", text, tmp_path)[4:] == [" I", "'ll", " ", " go"]
    assert cut("llama-bpe", "SHE'LL?!\n\nx", tmp_path) == ["SHE", "'LL", "?!\n\n", "x"]
    assert cut("gpt-2", "SHE'LL?!\n\nx", tmp_path) == ["SHE", "'", "LL", "?!", "\n", "\n", "x"]
    assert cut("default", "a+b~", tmp_path) == ["a", "+", "b", "~"]


def test_every_kind_can_be_loaded_and_loses_nothing(tmp_path: Path):
    text = "".join(TEXTS[:4])
    for pre in PRE_TOKENIZERS:
        assert "".join(cut(pre, text, tmp_path)) == text, pre


def test_a_piece_that_is_a_token_skips_the_merges_where_llama_cpp_does(tmp_path: Path):
    words = Vocabulary.of_tiny()
    grown = Vocabulary((*words.tokens, "Ġzqxzq"), (*words.kinds, NORMAL), words.merges)
    whole = [len(words.tokens)]
    for pre, skips in (("llama-bpe", True), ("qwen2", False)):
        ids = load(describe(pre, grown, add_bos_token=False), tmp_path)(" zqxzq", add_special_tokens=False)["input_ids"]
        assert (ids == whole) == skips, pre


@pytest.mark.parametrize(
    ("pre", "stated", "added"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", True, True), ("qwen2", None, False)],
)
def test_a_text_begins_with_bos_as_the_file_says_or_else_its_kind(
    tmp_path: Path, pre: str, stated: bool | None, added: bool
):
    tokenizer = load(describe(pre, bos_token_id=1, add_bos_token=stated), tmp_path)
    assert tokenizer.bos_token_id == 1
    assert (tokenizer("Hi")["input_ids"][0] == 1) == added
    assert tokenizer("Hi")["input_ids"][added:] == tokenizer("Hi", add_special_tokens=False)["input_ids"]


def test_tokens_that_the_file_calls_the_users_own_are_found_whole_and_are_not_special(tmp_path: Path):
    words = Vocabulary.of_tiny()
    grown = Vocabulary((*words.tokens, "<think>"), (*words.kinds, USER_DEFINED), words.merges)
    tokenizer = load(describe("qwen2", grown), tmp_path)
    number = len(words.tokens)
    ids = tokenizer("a<think>b", add_special_tokens=False)["input_ids"]
    assert ids[1] == number
    assert len(ids) == 3
    assert number not in tokenizer.all_special_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_an_answer_ends_where_llama_cpp_ends_it():
    words = Vocabulary.of_tiny()
    ids = [words.tokens.index("<|endoftext|>"), words.tokens.index("<|im_end|>")]
    assert list_ends(describe("smollm", eos_token_id=None)) == sorted(ids)
    assert list_ends(describe("smollm", eot_token_id=300)) == sorted([*ids, 300])
    text = Vocabulary(("<|end|>", *words.tokens[1:]), (NORMAL, *words.kinds[1:]), words.merges)
    assert 0 not in list_ends(describe("smollm", text))  # an ordinary token of that text


def test_template_and_ends_are_files_of_their_own(tmp_path: Path):
    tokenizer = load(describe("smollm"), tmp_path)
    write_generation_config(describe("smollm"), tmp_path)
    assert tokenizer.get_chat_template() == TEMPLATE
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == list_ends(
        describe("smollm")
    )


PIECES = [
    "▁",
    *"abcdehlortwx12",
    "▁t",
    "he",
    "▁the",
    "lo",
    "el",
    "hel",
    "llo",
    "hello",
    "▁hello",
    "wor",
    "▁wor",
    "ld",
    "or",
]
PIECES += ["▁▁", "12", "re", "there", "▁there"]


def describe_pieces(**metadata: Any) -> GgufHeader:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *PIECES]
    scores = [0.0] * 259 + [-float(number * 7 % len(PIECES)) for number in range(len(PIECES))]
    kinds = [2, CONTROL, CONTROL, *([6] * 256), *([NORMAL] * len(PIECES))]
    found = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "merges": None, **metadata}
    return describe(None, **{"eos_token_id": None, **found})


def tokenize_as_llama_cpp(header: GgufHeader, text: str, prefix: bool = True) -> list[int]:
    """`llm_tokenizer_spm_session` of src/llama-vocab.cpp: neighbours of the highest score are joined, the leftmost first."""
    tokens, scores = (header.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    ids = {token: number for number, token in enumerate(tokens)}
    symbols = list((" " * prefix + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [(left, right) for left, right in zip(symbols, symbols[1:])]
        known = [(scores[ids[a + b]], -place) for place, (a, b) in enumerate(pairs) if a + b in ids]
        if not known:
            break
        place = -max(known)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    pieces = ([each] if each in ids else [f"<0x{byte:02X}>" for byte in each.encode()] for each in symbols)
    return [ids[each] for piece in pieces for each in piece]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_is_joined_by_its_scores(tmp_path: Path, prefix: bool):
    header = describe_pieces(**({} if prefix else {"add_space_prefix": False}))
    tokenizer, chance = load(header, tmp_path), random.Random(0)
    texts = [
        "hello there",
        "  the  world",
        "12 é 日",
        "",
        "x",
        *("".join(chance.choices(["a", *"elrtho wd1é"], k=30)) for _ in range(200)),
    ]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenize_as_llama_cpp(header, text, prefix), text
        assert tokenizer.decode(ids) == text
    assert tokenizer("a")["input_ids"][0] == 1  # bos, by llama.cpp's defaults
    assert list_ends(header) == [2]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (describe("kimi-k2"), "tokenizer.ggml.pre 'kimi-k2' is not known here"),
        (describe("lama-bpe"), "'lama-bpe' is not known here .*llama-bpe"),
        (describe("smollm", model="t5"), "a vocabulary of kind 't5' is not read"),
        (describe(None, model="llama"), "has no scores for its tokens"),
        (describe("smollm", merges=None), "has no merges"),
        (describe("smollm", tokens=["a", "a"]), "1 tokens twice"),
        (describe("smollm", merges=["a b", "x yz"]), "the merge 'x yz' gives no token"),
        (describe("smollm", merges=["ab"]), "the merge 'ab' is not two parts"),
    ],
)
def test_another_way_to_cut_is_refused_by_name(header: GgufHeader, message: str):
    with pytest.raises(
        ConfigError, match=f"model.gguf: .*{message}.*: name the folder of this model's tokenizer.json"
    ) as told:
        require_tokenizer(header)
    assert "\n" not in str(told.value)


def test_a_file_without_a_kind_is_cut_as_default(tmp_path: Path):
    ids = [load(describe(pre), tmp_path)("a 12345+b")["input_ids"] for pre in (None, "default")]
    assert ids[0] == ids[1]


def test_a_written_file_says_what_the_header_read(tmp_path: Path):
    from draftworks.targets.gguf_header import read_gguf_header

    header = read_gguf_header(GgufFile().write(tmp_path / "model.gguf"))
    expected = describe("smollm").metadata
    assert {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")} == {
        key: value for key, value in expected.items() if key.startswith("tokenizer.")
    }
