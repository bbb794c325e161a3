"""A target's vocabulary as the keys of a draft's GGUF file: llama.cpp loads no model without one.

A draft reads and proposes ids, and the server cuts text by the target's own file; what is wrong here still ends its start.
Kinds of tokens and names are those of llama.cpp's converter (`get_vocab_base` of conversion/base.py, b11434).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.hub import fetch_hub_file
from draftworks.storage.words import suggest_or_list
from draftworks.targets.gguf_tokenizer import PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_KEY = "tokenizer.ggml."
_USUAL = ("llama-bpe", "qwen2", "gpt-2", "smollm")
"""Names that converters write for cuts that llama.cpp knows by several names."""
_CASELESS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_EITHER_CASE = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}


def build_vocabulary_keys(target: TargetFiles, size: int, pre_tokenizer: str | None) -> dict[str, Any]:
    """Return the keys of a vocabulary of `size` ids: tokens, their kinds, merges or scores, and special ids.

    Args:
        pre_tokenizer: llama.cpp's name of how text is cut; None: it is recognised by the tokenizer's expressions.

    Raises:
        ConfigError: the tokenizer is neither byte-level BPE nor BPE over SentencePiece's tokens; the way in which it cuts
            text has no name here, and none was given; or the one that was given is not known.
        StoreError: a file cannot be read.
    """
    where = f"target {target.name}"
    tokenizer = _read(target, "tokenizer.json")
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or not model.get("vocab"):
        raise ConfigError(
            f"{where}: its tokenizer is {model.get('type', 'none')}: a GGUF file's vocabulary is written of BPE only. Make "
            "the draft's file with llama.cpp's own converter"
        )
    added = {each["id"]: each for each in tokenizer.get("added_tokens") or ()}
    names = {number: token for token, number in model["vocab"].items()} | {k: v["content"] for k, v in added.items()}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(size)]
    pieces = bool(model.get("byte_fallback"))
    keys: dict[str, Any] = {f"{_KEY}model": "llama" if pieces else "gpt2"}
    if not pieces:
        keys[f"{_KEY}pre"] = _choose_pre_tokenizer(where, tokenizer, pre_tokenizer)
    keys[f"{_KEY}tokens"] = tokens
    if pieces:
        keys[f"{_KEY}scores"] = [-float(number) for number in range(size)]  # of no use to who does not cut text
    unknown = model.get("unk_token")
    kinds = [_find_kind(names.get(i), added.get(i), unknown, pieces=pieces) for i in range(size)]
    keys[f"{_KEY}token_type"] = kinds
    if not pieces:
        keys[f"{_KEY}merges"] = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return keys | _list_special_ids(target, {token: number for number, token in enumerate(tokens)})


def find_pre_tokenizer(tokenizer: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of how a tokenizer.json cuts text; None if no name here stands for its expressions."""
    expressions = _list_expressions(tokenizer.get("pre_tokenizer") or {})
    if expressions is None:
        return None
    ignores = bool((tokenizer.get("model") or {}).get("ignore_merges"))
    found = [
        name
        for name, cut in PRE_TOKENIZERS.items()
        if tuple(map(_unify, cut.expressions)) == expressions and cut.ignore_merges == ignores
    ]
    return next((name for name in _USUAL if name in found), found[0] if found else None)


def _choose_pre_tokenizer(where: str, tokenizer: Mapping[str, Any], given: str | None) -> str:
    if given is not None and given not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{where}: export.gguf.pre_tokenizer: {given!r}: {suggest_or_list(given, sorted(PRE_TOKENIZERS))}"
        )
    found = given or find_pre_tokenizer(tokenizer)
    if found is None:
        raise ConfigError(
            f"{where}: llama.cpp's name for how its tokenizer cuts text is not known: set export.gguf.pre_tokenizer to what "
            f"the target's own GGUF file has as tokenizer.ggml.pre, one of {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return found


def _list_expressions(part: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the expressions by which a pre-tokenizer cuts, one after the other; None for one of another kind."""
    kind = part.get("type")
    if kind == "Sequence":
        parts = [_list_expressions(each) for each in part.get("pretokenizers") or ()]
        return None if None in parts else tuple(each for found in parts if found for each in found)
    if kind == "ByteLevel":
        return (_unify(PRE_TOKENIZERS["gpt-2"].expressions[0]),) if part.get("use_regex", True) else ()
    if kind == "Digits" and part.get("individual_digits"):
        return (r"\p{N}",)
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        expression = (part.get("pattern") or {}).get("Regex")
        return None if expression is None else (_unify(expression),)
    return None


def _unify(expression: str) -> str:
    """Return an expression in one spelling: what no alternative matches is a piece in any case."""
    return expression.replace(_CASELESS, _EITHER_CASE).removesuffix(r"|\s+")


def _find_kind(token: str | None, added: Mapping[str, Any] | None, unknown: str | None, *, pieces: bool) -> int:
    if token is None:
        return _UNUSED
    if token == unknown:
        return _UNKNOWN
    if added is not None:
        return _CONTROL if added.get("special") else _USER_DEFINED
    is_byte = pieces and token.startswith("<0x") and token.endswith(">") and len(token) == len("<0x00>")
    return _BYTE if is_byte else _NORMAL


def _list_special_ids(target: TargetFiles, ids: Mapping[str, int]) -> dict[str, int]:
    config = _read(target, "tokenizer_config.json", required=False)
    found: dict[str, int] = {}
    for name, key in _SPECIAL.items():
        token = config.get(f"{name}_token")
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str) and content in ids:
            found[f"{_KEY}{key}_token_id"] = ids[content]
    return found


def _read(target: TargetFiles, name: str, required: bool = True) -> dict[str, Any]:
    where = f"target {target.name}"
    if target.tokenizer_revision is None:
        path: Path | None = Path(target.tokenizer) / name
    else:
        path = fetch_hub_file(where, target.tokenizer, target.tokenizer_revision, name)
    if not required and (path is None or not path.is_file()):
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: {where}: its tokenizer cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise StoreError(f"{where}: {name}: expected a JSON object, found none")
    return found
