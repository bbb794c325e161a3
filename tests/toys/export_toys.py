"""A small target in a folder, and drafts of it with made-up weights: what exports, gates and imports are tried on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from strategy_cases import find_cases, list_options

from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.data.vocab import VocabMapping
from draftworks.drafts.draft_io import save_draft
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.export.canonical import CanonicalDraft
from draftworks.storage.files import publish_json

VOCAB, HIDDEN, DRAFT_VOCAB, LAYERS = 40, 16, 24, 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DFLASH = {"block_size": 4, "num_layers": 2, "num_anchors": 8, "num_taps": 3}
OPTIONS = {name: list_options(name, DFLASH) | cases.exported for name, cases in find_cases().items()}
EAGLE3 = OPTIONS["eagle3"]
FORMATS = {each.name: name for name in OPTIONS for each in resolve_strategy(name).usual_exports}


@dataclass(frozen=True)
class Toys:
    """A folder with a target `target/` and drafts of it."""

    folder: Path
    target: TargetFiles

    @classmethod
    def make(cls, folder: Path, tied: bool = False, rope: dict[str, Any] | None = None, **changes: Any) -> Toys:
        """`changes` are keys of the target's config.json."""
        target = folder / "target"
        target.mkdir(parents=True)
        config = _target_config(tied, rope or {"rope_type": "default", "rope_theta": 100.0}) | changes
        publish_json(target / "config.json", config)
        generator = torch.Generator().manual_seed(1)
        shape = (config["vocab_size"], config["hidden_size"])
        tensors = {"model.embed_tokens.weight": torch.randn(shape, generator=generator).bfloat16()}
        if not tied:
            tensors["lm_head.weight"] = torch.randn(shape, generator=generator).bfloat16()
        save_file(tensors, target / "model.safetensors")
        return cls(folder, _target_files(target, config))

    def draft(self, strategy: str, name: str = "draft", **options: Any) -> CanonicalDraft:
        """A canonical draft with weights that no initialisation has."""
        return self.saved(self.strategy(strategy, **options), name)

    def saved(self, made: DraftStrategy, name: str) -> CanonicalDraft:
        """A draft as it is, in a folder of that name."""
        save_draft(self.folder / name, made, self.target.digest, provenance={"steps": 3})
        return CanonicalDraft.load(self.folder / name, self.target)

    def strategy(self, strategy: str, **options: Any) -> DraftStrategy:
        spec = resolve_strategy(strategy)
        typed = spec.parse_options({**OPTIONS.get(strategy, {}), **options}, where="toys")
        parts = TargetParts.load(self.target)
        vocab = small_vocab(typed.draft_vocab_size, parts.vocab_size) if spec.uses_vocab_mapping else None
        made = spec.load_factory()(typed, parts, vocab, 3)
        _stir(made)
        return made


def small_vocab(size: int, of: int) -> VocabMapping:
    ids = np.sort(np.random.default_rng(2).permutation(of)[:size])
    return VocabMapping(ids - np.arange(size), np.isin(np.arange(of), ids))


def _stir(strategy: DraftStrategy) -> None:
    """Norms and base kernels away from 1, an embedding away from the target's, and what begins as 0 away from it, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in strategy.model.named_parameters():
            if any(part in name for part in ("norm", "embed_tokens", "base_kernel")) or not weight.any():
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))


def _target_config(tied: bool, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 20,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "rope_parameters": rope,
    }


def _target_files(folder: Path, config: dict[str, Any]) -> TargetFiles:
    return TargetFiles(
        name="small",
        model=str(folder),
        tokenizer=str(folder),
        digest="0123456789abcdef",
        tokenizer_digest="fedcba9876543210",
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        context=config["max_position_embeddings"],
    )


def assert_same_draft(found: CanonicalDraft, expected: CanonicalDraft, dtype: torch.dtype = torch.float32) -> None:
    """Weights are compared as they are after rounding to `dtype`, options by who wants to."""
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        wanted = tensor.to(dtype).float() if tensor.is_floating_point() else tensor
        assert torch.equal(found.weights[name], wanted), name
    assert {**found.config, "options": None} == {**expected.config, "options": None}


@dataclass(frozen=True)
class Case:
    """A draft in a format that can hold it."""

    format: str
    options: dict[str, Any]
    tied: bool = False
    rope: dict[str, Any] | None = None

    @property
    def strategy(self) -> str:
        return FORMATS[self.format]

    def __str__(self) -> str:
        """The test's id."""
        options = "-".join(f"{name}={value}" for name, value in self.options.items()) or "plain"
        target = ("-tied" if self.tied else "") + ("-llama3" if self.rope else "")
        return f"{self.format}-{options}{target}".translate(str.maketrans("", "", " '{}"))

    def toys(self, folder: Path) -> Toys:
        return Toys.make(folder, self.tied, self.rope)


_OWN_LAYER = {"head_dim": 4, "rms_norm_eps": 1e-3, "rope": {"rope_type": "default", "rope_theta": 7.0}}
CASES = (
    *(Case(name, {}) for name in FORMATS),
    *(Case(name, {}, tied=True, rope=LLAMA3_ROPE) for name in FORMATS),
    *(Case(name, _OWN_LAYER) for name in FORMATS),
    *(Case(name, each) for cases in find_cases().values() for name, all_of in cases.exports.items() for each in all_of),
)
