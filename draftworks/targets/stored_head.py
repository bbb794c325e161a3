"""Whether a target's files hold one output head: one of its own beside tied embeddings must equal them.

With `tie_word_embeddings` transformers keeps a stored head that differs from the embeddings, and servers (vLLM, SGLang)
drop it: features, answers and drafts would then be of two models. Torch-free to import.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.files import read_json
from draftworks.storage.hub import fetch_hub_header, find_cached_hub_file
from draftworks.targets.safetensors_headers import WEIGHTS, ModelFiles, read_header

OF_THE_MODEL = re.compile(r"^(?!mtp\.)(?!.*\.layers\.\d)(?!.*(vision|visual|audio))")
"""Names outside towers for other inputs and layers that predict further tokens, which have embeddings and heads too."""
_HEAD = re.compile(r"(?:^|\.)lm_head\.(?:weight|qweight|weight_packed)$")
_EMBEDDING = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_TIE = "tie_word_embeddings"
_ROWS = 2048
"""Rows that are compared at a time."""


@dataclass(frozen=True)
class _Matrix:
    """A tensor of a target's files: its name, and the name of its file."""

    name: str
    file: str


@dataclass(frozen=True)
class HeadCheck:
    """Whether a stored head is the embeddings where config.json ties them.

    Attributes:
        problem: which head differs, and what to do; None if none does.
        note: why the two were not compared; None if they were, or there is nothing to compare.
    """

    problem: str | None = None
    note: str | None = None


def require_one_head(target: TargetFiles) -> None:
    """Raise StoreError if config.json ties the head to the embeddings and the files hold another one.

    The matrices are read only where there are two; files of the hub are downloaded for it.

    Raises:
        StoreError: that, or a file is missing or damaged.
        ConfigError: the hub cannot be reached.
    """
    problem = compare_heads(target).problem
    if problem is not None:
        raise StoreError(problem)


def compare_heads(target: TargetFiles, download: bool = True) -> HeadCheck:
    """Compare a stored head with the embeddings where config.json ties them.

    Args:
        download: whether files of the hub that are not in the cache are fetched; otherwise a note says that they were not.

    Raises:
        StoreError: a file is missing or damaged.
        ConfigError: the hub cannot be reached.
    """
    files = ModelFiles(target)
    names = _list_tensors(files)
    head, embedding = _find(names, _HEAD), _find(names, _EMBEDDING)
    if head is None or embedding is None or not _claims_tie(files):
        return HeadCheck()
    if not head.name.endswith(".weight"):
        return HeadCheck(_describe(files, head, "is packed, and cannot be compared"))
    places = [_locate(files, each, download) for each in (head, embedding)]
    if None in places:
        return HeadCheck(note=f"{head.name} was not compared with the embeddings: {head.file} is not downloaded yet")
    difference = _find_difference(*((path, each.name) for path, each in zip(places, (head, embedding)) if path))
    return HeadCheck() if difference is None else HeadCheck(_describe(files, head, difference))


def _describe(files: ModelFiles, head: _Matrix, difference: str) -> str:
    return (
        f"{files.where}: config.json ties head and embeddings, but {head.name} {difference}: servers drop it, "
        f"transformers keeps it. Set {_TIE} to false, or remove the stored head"
    )


def _list_tensors(files: ModelFiles) -> dict[str, str]:
    """Return the file of each tensor: those of the index, and of a whole file, which transformers prefers.

    Of the hub one of both is enough, and without a network the cache holds only the one that exists.
    """
    target = files.target
    if target.revision is None:
        whole = files.find_file(WEIGHTS)
        return (files.read_index() or {}) | ({} if whole is None else dict.fromkeys(read_header(whole), WEIGHTS))
    with suppress(ConfigError):
        if names := files.read_index():
            return names
    with suppress(ConfigError):
        found = fetch_hub_header(f"target {target.name}", target.model, target.revision, WEIGHTS)
        header = read_header(found) if isinstance(found, Path) else found or {}
        return dict.fromkeys(header, WEIGHTS)
    return {}


def _find(names: Mapping[str, str], pattern: re.Pattern[str]) -> _Matrix | None:
    """Return the language model's only tensor of that name; None without one, or with several, which others refuse."""
    found = select_of_model(name for name in names if pattern.search(name))
    return _Matrix(found[0], names[found[0]]) if len(found) == 1 else None


def select_of_model(names: Iterable[str]) -> list[str]:
    """Return the names that belong to the language model itself."""
    return [name for name in names if OF_THE_MODEL.match(name)]


def _claims_tie(files: ModelFiles) -> bool:
    """Whether any part of config.json, or the default of its class for the language model, ties head and embeddings."""
    path = files.find_file("config.json")
    if path is None:
        return False
    try:
        config = read_json(path)
    except (OSError, ValueError):
        return False  # who reads the configuration says what is wrong with it
    if not isinstance(config, dict):
        return False
    text = config.get("text_config")
    own = text if isinstance(text, Mapping) else config
    if config.get(_TIE) is True or own.get(_TIE) is True:
        return True
    return own.get(_TIE) is None and bool(getattr(_read_class_defaults(path), _TIE, False))


def _read_class_defaults(path: Path) -> Any:
    """Return transformers' configuration of the language model; None if it does not know the family."""
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception:  # each configuration class may raise errors of its own; who builds the model reports them
        return None
    return whole.get_text_config()


def _locate(files: ModelFiles, matrix: _Matrix, download: bool) -> Path | None:
    target = files.target
    if target.revision is not None and not download:
        return find_cached_hub_file(target.model, target.revision, matrix.file)
    return files.require_file(matrix.file)


def _find_difference(head: tuple[Path, str], embedding: tuple[Path, str]) -> str | None:
    """Return how the head differs from the embeddings, compared in the narrower of their dtypes; None if it does not."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(head[0], framework="pt") as own, safe_open(embedding[0], framework="pt") as tied:
            one, other = own.get_slice(head[1]), tied.get_slice(embedding[1])
            shapes = tuple(one.get_shape()), tuple(other.get_shape())
            if shapes[0] != shapes[1]:
                return f"has the shape {list(shapes[0])}, they have {list(shapes[1])}"
            for start in range(0, shapes[0][0], _ROWS):
                rows, expected = one[start : start + _ROWS], other[start : start + _ROWS]
                narrow = min(rows.dtype, expected.dtype, key=lambda dtype: dtype.itemsize)
                if not torch.equal(rows.to(narrow).float(), expected.to(narrow).float()):
                    return "differs from them"
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{head[0]}: not a readable safetensors file ({error}); copy or download it again") from error
    return None
