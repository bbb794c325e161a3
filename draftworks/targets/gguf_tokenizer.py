"""Files of a fast tokenizer from a GGUF file's metadata: the text is cut as llama.cpp cuts it. Standard library only.

`tokenizer.ggml.pre` names how text is cut before merges apply. The expressions of each kind, whether a whole piece that is
a token skips the merges, and whether a text begins with bos are those of llama.cpp (`llm_tokenizer_bpe` and
`llama_vocab::impl::load` in src/llama-vocab.cpp, 2026). Nothing is normalised, as llama.cpp does not. A SentencePiece
vocabulary (`tokenizer.ggml.model: llama`) has scores in place of merges, and is not cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.errors import ConfigError
from draftworks.storage.words import suggest
from draftworks.targets.gguf_header import GgufHeader

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS, _REST = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut.

    Attributes:
        expressions: applied one after the other, each to the pieces of those before; what lies between matches is a piece.
        ignore_merges: whether a piece that is a token is that token, even if no merges lead to it.
        add_bos: whether a text begins with bos, unless the file says otherwise.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3_CUT = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_DIGITS_APART = PreTokenizer((r"\p{N}", _GPT2))
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3_CUT
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_APART),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "exaone4"),
        PreTokenizer((_GPT2,)),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        PreTokenizer((_QWEN2,)),
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
}
"""By `tokenizer.ggml.pre`; a file without one is cut as `default`."""

_CONTROL, _USER_DEFINED = 3, 4
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
        *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"),
        "<｜end▁of▁sentence｜>",
    )
)
"""Control tokens at which llama.cpp ends an answer, whatever the file's ids say."""
_STATED_ENDS = ("eos", "eot", "eom")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SENTENCE_PIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
_KEY = "tokenizer.ggml."


def require_tokenizer(header: GgufHeader) -> None:
    """Raise ConfigError if no tokenizer can be made of the metadata: another kind of vocabulary, or of cutting text."""
    pieces = _is_sentence_piece(header)
    if not pieces:
        _find_pre_tokenizer(header)
    tokens, merges = _find_list(header, "tokens"), _find_list(header, "merges")
    ranks = _find_list(header, "scores") if pieces else merges
    if not tokens or not ranks or (pieces and len(ranks) != len(tokens)):
        told = "no vocabulary" if not tokens else "no scores for its tokens" if pieces else "no merges"
        raise ConfigError(f"{header.path}: has {told}{_ADVICE}")
    if len(set(tokens)) < len(tokens):
        raise ConfigError(f"{header.path}: its vocabulary has {len(tokens) - len(set(tokens))} tokens twice{_ADVICE}")
    if pieces:
        return
    known = set(tokens)
    strange = next((each for each in merges if "".join(_split_merge(header, each)) not in known), None)
    if strange is not None:
        raise ConfigError(f"{header.path}: the merge {strange!r:.40} gives no token{_ADVICE}")


def _is_sentence_piece(header: GgufHeader) -> bool:
    return header.metadata.get(f"{_KEY}model") == "llama"


_ADVICE = ": name the folder of this model's tokenizer.json as `tokenizer` of the target"


def _find_pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    model, pre = header.metadata.get(f"{_KEY}model"), header.metadata.get(f"{_KEY}pre") or "default"
    if model != "gpt2":
        raise ConfigError(f"{header.path}: a vocabulary of kind {model!r:.40} is not read from GGUF files{_ADVICE}")
    if pre not in PRE_TOKENIZERS:
        hint = suggest(str(pre), PRE_TOKENIZERS)
        raise ConfigError(
            f"{header.path}: tokenizer.ggml.pre {pre!r:.40} is not known here{f' ({hint})' if hint else ''}{_ADVICE}"
        )
    return PRE_TOKENIZERS[pre]


def _find_list(header: GgufHeader, name: str) -> list[Any]:
    found = header.metadata.get(f"{_KEY}{name}")
    return found if isinstance(found, list) else []


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if the file has a template, chat_template.jinja into a folder.

    Raises:
        ConfigError: as `require_tokenizer`.
    """
    require_tokenizer(header)
    _write_json(folder / "tokenizer.json", _make_tokenizer(header))
    named = {f"{name}_token": _find_token(header, key) for name, key in _SPECIAL.items()}
    config = {
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.metadata.get(f"{header.architecture}.context_length"),
        "add_bos_token": _adds(header, "bos"),
        "add_eos_token": _adds(header, "eos"),
        **{name: token for name, token in named.items() if token is not None},
    }
    _write_json(folder / "tokenizer_config.json", config)
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template.strip():
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def write_generation_config(header: GgufHeader, folder: Path) -> None:
    """Write generation_config.json: the tokens at which llama.cpp ends an answer, ascending."""
    ids = {f"{name}_token_id": _find_id(header, key) for name, key in _SPECIAL.items()}
    found = {name: each for name, each in ids.items() if each is not None and name != "unk_token_id"}
    _write_json(folder / "generation_config.json", {**found, "eos_token_id": list_ends(header)})


def list_ends(header: GgufHeader) -> list[int]:
    """Return the ids that end an answer, ascending: those that the file states, and control tokens known for it."""
    ids = [_find_id(header, name) for name in _STATED_ENDS]
    stated = {each for each in ids if each is not None}
    kinds = _find_list(header, "token_type")
    known = {
        number
        for number, (token, kind) in enumerate(zip(_find_list(header, "tokens"), kinds))
        if kind == _CONTROL and token in _ENDS
    }
    harmony = {"<|return|>", "<|call|>"} <= set(
        _find_list(header, "tokens")
    )  # there <|end|> ends a message, not an answer
    return sorted(
        stated | {each for each in known if not (harmony and header.metadata[f"{_KEY}tokens"][each] == "<|end|>")}
    )


def _make_tokenizer(header: GgufHeader) -> dict[str, Any]:
    """Return tokenizer.json as the library `tokenizers` 0.22 reads it."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_make_added(_find_list(header, "tokens"), _find_list(header, "token_type"))),
        "post_processor": _make_post_processor(header),
        **(_make_sentence_piece(header) if _is_sentence_piece(header) else _make_byte_level(header)),
    }


def _make_byte_level(header: GgufHeader) -> dict[str, Any]:
    cut = _find_pre_tokenizer(header)
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in cut.expressions
    ]
    in_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    merges = [_split_merge(header, each) for each in _find_list(header, "merges")]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, in_bytes]},
        "decoder": {**in_bytes, "use_regex": True},
        "model": _make_bpe(_find_list(header, "tokens"), merges, ignore_merges=cut.ignore_merges),
    }


def _make_sentence_piece(header: GgufHeader) -> dict[str, Any]:
    """Return the parts of a SentencePiece tokenizer: blanks are `▁`, one is put in front, unknown letters are bytes."""
    tokens, prefix = _find_list(header, "tokens"), header.metadata.get(f"{_KEY}add_space_prefix", True)
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    first, last = {"type": "Prepend", "prepend": "▁"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    merges = _derive_merges(tokens, _find_list(header, "scores"))
    unknown = {"unk_token": _find_token(header, "unknown"), "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [first, blanks] if prefix else [blanks]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *([last] if prefix else [])],
        },
        "model": _make_bpe(tokens, merges, **unknown),
    }


def _make_bpe(tokens: Iterable[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
        **options,
    }


def _derive_merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Return the merges that lead to each token, of the highest score first: llama.cpp joins neighbours by it."""
    known = {token: number for number, token in enumerate(tokens)}
    found = [
        (-score, known[token[:cut]], known[token[cut:]])
        for token, score in zip(tokens, scores)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    return [[tokens[left], tokens[right]] for _, left, right in sorted(found)]


def _split_merge(header: GgufHeader, merge: str) -> list[str]:
    left, space, right = merge[:1] + merge[1:].partition(" ")[0], *merge[1:].partition(" ")[1:]
    if not space or not right:
        raise ConfigError(f"{header.path}: the merge {merge!r:.40} is not two parts with a blank between{_ADVICE}")
    return [left, right]


def _make_added(tokens: Iterable[str], kinds: Iterable[int]) -> Iterable[dict[str, Any]]:
    """Yield the tokens that are found in a text before it is cut: control tokens, and those that the file calls user's own."""
    for number, (token, kind) in enumerate(zip(tokens, kinds)):
        if kind in (_CONTROL, _USER_DEFINED):
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": number, "content": token, **plain, "special": kind == _CONTROL}


def _make_post_processor(header: GgufHeader) -> dict[str, Any] | None:
    """Return what adds bos and eos around a text; None where neither is added."""
    bos, eos = (_find_token(header, name) if _adds(header, name) else None for name in ("bos", "eos"))
    if bos is None and eos is None:
        return None

    def surround(letter: str, kind: int) -> list[dict[str, Any]]:
        special = [None if each is None else {"SpecialToken": {"id": each, "type_id": kind}} for each in (bos, eos)]
        return [each for each in (special[0], {"Sequence": {"id": letter, "type_id": kind}}, special[1]) if each]

    ids = {each: header.metadata[f"{_KEY}tokens"].index(each) for each in (bos, eos) if each is not None}
    return {
        "type": "TemplateProcessing",
        "single": surround("A", 0),
        "pair": surround("A", 0) + surround("B", 1),
        "special_tokens": {each: {"id": each, "ids": [number], "tokens": [each]} for each, number in ids.items()},
    }


def _adds(header: GgufHeader, name: str) -> bool:
    """Whether a text is surrounded by bos or eos: as the file says, else as its kind of cutting has it."""
    stated = header.metadata.get(f"{_KEY}add_{name}_token")
    by_kind = _is_sentence_piece(header) or _find_pre_tokenizer(header).add_bos
    wanted = stated if isinstance(stated, bool) else name == "bos" and by_kind
    return wanted and _find_token(header, name) is not None


def _find_id(header: GgufHeader, name: str) -> int | None:
    """Return the id of a special token: the file's, or llama.cpp's default for a SentencePiece vocabulary."""
    default = _SENTENCE_PIECE_IDS.get(name) if _is_sentence_piece(header) else None
    found = header.metadata.get(f"{_KEY}{name}_token_id", default)
    return found if isinstance(found, int) else None


def _find_token(header: GgufHeader, name: str) -> str | None:
    number, tokens = _find_id(header, name), _find_list(header, "tokens")
    return tokens[number] if number is not None and number < len(tokens) else None


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
