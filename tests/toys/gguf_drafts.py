"""Drafts of the embedded target with weights that no random generator makes, and what a GGUF file of one holds, shortened.

llama.cpp's own converter is asked for the same by tests/export/gguf_judge.py, and what it said is in gguf_judged.json there.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.data.vocab import VocabMapping
from draftworks.drafts.draft_io import save_draft
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.export.canonical import CanonicalDraft
from draftworks.targets.gguf_header import read_gguf_header

_ROOT = Path(__file__).resolve().parents[2]
LLAMA_CPP, JUDGE_PYTHON = _ROOT / ".llama-cpp", _ROOT / ".venv-vllm" / "bin" / "python"
"""Where `make test-long` builds the server, with its sources; an interpreter that has what the converter imports."""
_BLOCK = {"block_size": 5, "num_layers": 2, "layer_ids": [2, 4, 5]}
_LONGEST = 16
_OF_THE_FOLDER = ("general.name", "general.size_label", "tokenizer.chat_template")
"""Keys of the converter that are of the folder's name, or of no use in a draft."""


@dataclass(frozen=True)
class GgufCase:
    """A draft in a GGUF format, and the format from which llama.cpp's converter makes the same file."""

    strategy: str
    peer: str
    options: dict[str, Any]

    @property
    def format(self) -> str:
        return f"gguf_{self.strategy}"

    def __str__(self) -> str:
        """The test's id."""
        return self.format


CASES = (
    GgufCase("eagle3", "sglang_eagle3", {"ttt_length": 4, "draft_vocab_size": 410, "layer_ids": [1, 4, 5]}),
    GgufCase("dflash", "zlab_dflash", _BLOCK),
    GgufCase("dflash2", "zlab_dflash2", {**_BLOCK, "selector_rank": 32, "selector_top_k": 8}),
    GgufCase("dspark", "zlab_dspark", {**_BLOCK, "markov_rank": 32}),
)
ROUNDINGS = {"f32": ("float32", None), "bf16": ("bfloat16", None), "q8_0": ("float32", "q8_0")}
"""Dtype and quantisation, by what the converter calls the result."""


def make_gguf_draft(strategy: str, target: TargetFiles, folder: Path, **options: Any) -> CanonicalDraft:
    """Return a draft whose weights follow from their place alone, saved in a folder."""
    spec = resolve_strategy(strategy)
    parts, typed = TargetParts.load(target), spec.parse_options(options, where="gguf_drafts")
    vocab = None
    if spec.uses_vocab_mapping:
        ids = np.arange(typed.draft_vocab_size) * (parts.vocab_size // typed.draft_vocab_size)
        vocab = VocabMapping(ids - np.arange(len(ids)), np.isin(np.arange(parts.vocab_size), ids))
    made: DraftStrategy = spec.load_factory()(typed, parts, vocab, 1)
    with torch.no_grad():
        for number, (name, weight) in enumerate(made.model.named_parameters()):
            places = torch.arange(weight.numel(), dtype=torch.int64)
            value = ((places * (37 + 2 * number)) % 1009 - 504).float() / 4096
            weight.copy_((value + 1 if "norm" in name else value).reshape(weight.shape))
    save_draft(folder, made, target.digest)
    return CanonicalDraft.load(folder, target)


def convert(out: Path, target: Path, *asked: str) -> None:
    """Have llama.cpp's converter write a target, its MTP layer, exports of its drafts; see tests/export/gguf_judge.py."""
    judge = [JUDGE_PYTHON, _ROOT / "tests" / "export" / "gguf_judge.py"]
    subprocess.run([*judge, LLAMA_CPP / "llama.cpp", out, target, *asked], check=True, env={"PATH": "/usr/bin:/bin"})


def summarise(file: Path) -> dict[str, Any]:
    """Return the kind, shape and digest of each tensor, and the metadata, long lists as digests."""
    header, content = read_gguf_header(file), file.read_bytes()
    tensors = {
        each.name: [each.kind, list(each.shape), _digest(content[each.start : each.start + each.nbytes])]
        for each in header.tensors
    }
    metadata = {
        name: _digest(json.dumps(value).encode()) if isinstance(value, list) and len(value) > _LONGEST else value
        for name, value in header.metadata.items()
        if name not in _OF_THE_FOLDER
    }
    return {"metadata": dict(sorted(metadata.items())), "tensors": dict(sorted(tensors.items()))}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
