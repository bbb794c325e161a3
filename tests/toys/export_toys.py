"""A small target in a folder, and drafts of it with made-up weights: what exports, gates and imports are tried on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

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
EAGLE3 = {"ttt_length": 3, "draft_vocab_size": DRAFT_VOCAB}
DFLASH = {"block_size": 4, "num_layers": 2, "num_anchors": 8, "num_taps": 3}
DFLASH2 = {**DFLASH, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
DOMINO = {**DFLASH, "emb_dim": 6, "gru_hidden_dim": 5}
DSPARK = {**DFLASH, "markov_rank": 6}
XPRESS = {**DFLASH, "refiner_rank": 6}
PEAGLE = {"num_depths": 3, "num_layers": 2, "draft_vocab_size": DRAFT_VOCAB}
LILICORR = {**DFLASH, "candidate_topk": 4, "lattice_heads": 2}
OPTIONS = {
    "eagle3": EAGLE3,
    "peagle": PEAGLE,
    "dflash": DFLASH,
    "dflash2": DFLASH2,
    "domino": DOMINO,
    "dspark": DSPARK,
    "lilicorr": LILICORR,
    "xpress": XPRESS,
}
FORMATS = {
    "sglang_eagle3": "eagle3",
    "speculators_eagle3": "eagle3",
    "speculators_peagle": "peagle",
    "zlab_dflash": "dflash",
    "speculators_dflash": "dflash",
    "zlab_dflash2": "dflash2",
    "speculators_dflash2": "dflash2",
    "zlab_domino": "domino",
    "zlab_dspark": "dspark",
    "speculators_dspark": "dspark",
    "speculators_xpress": "xpress",
    "sglang_lilicorr": "lilicorr",
}


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


_SIZES = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 12}
_EAGLE3_OPTIONS = (
    {},
    {"fc_norm": True},
    {"layer_ids": [1, 3, 4, 6]},
    {"draft_vocab_size": VOCAB},
    {**_SIZES, "ttt_length": 1},
)
_PEAGLE_OPTIONS = (
    {},
    {"fc_norm": True, "train_embeddings": False},
    {"norm_before_residual": True, "num_layers": 1, "layer_ids": [0, 1, 3, 6]},
    {**_SIZES, "draft_vocab_size": VOCAB, "mask_token_id": 5},
    {"num_depths": 1, "num_layers": 3},
)
_OWN_LAYER = {"head_dim": 4, "rms_norm_eps": 1e-3, "rope": {"rope_type": "default", "rope_theta": 7.0}}
_DFLASH_OPTIONS = ({}, {"layer_ids": [1, 4], "num_taps": 2}, {**_SIZES, "mask_token_id": 5})
_DFLASH2_OPTIONS = ({}, {**_SIZES, "conv_kernel_size": 3, "conv_group_size": 8, "selector_top_k": 7})
_DSPARK_OPTIONS = (
    {},
    {"markov_head_type": "gated", "confidence_with_markov": False, **_SIZES, "mask_token_id": 5},
    {"markov_head_type": "rnn", "confidence_head": False, "layer_ids": [1, 4], "num_taps": 2},
)
CASES = (
    *(Case(name, options) for name in ("sglang_eagle3", "speculators_eagle3") for options in _EAGLE3_OPTIONS),
    *(Case("speculators_peagle", options) for options in _PEAGLE_OPTIONS),
    *(Case(name, options) for name in ("zlab_dflash", "speculators_dflash") for options in _DFLASH_OPTIONS),
    *(Case(name, options) for name in ("zlab_dflash2", "speculators_dflash2") for options in _DFLASH2_OPTIONS),
    *(Case("zlab_domino", {**options, "shift_label": shift}) for options in _DFLASH_OPTIONS for shift in (True, False)),
    *(Case(name, options) for name in ("zlab_dspark", "speculators_dspark") for options in _DSPARK_OPTIONS),
    Case("speculators_xpress", {}),
    Case("speculators_xpress", {"mlp_ratio": 3, "jacobi_passes": 2, **_SIZES, "mask_token_id": 5}),
    Case("sglang_lilicorr", {"lattice_size": 6, "factor_dim": 5, "lattice_layers": 1, "candidate_topk": 8}),
    Case("sglang_lilicorr", {"sliding_window": 3, "block_size": 7, "margin_weight": 0.125, "logit_scale": 3.0}),
    Case("sglang_lilicorr", {"conv_kernel_size": 3, "conv_group_size": 4}),
    *(Case(name, {}, tied=True, rope=LLAMA3_ROPE) for name in FORMATS),
    *(Case(name, _OWN_LAYER) for name in FORMATS),
    Case("speculators_eagle3", {"feedback": "post_norm"}),
    Case("speculators_eagle3", {"fc_norm": True, "feedback": "post_norm"}),
    Case("speculators_eagle3", {"norm_before_fc": True, "sliding_window": 3}),
    Case("speculators_eagle3", {"norm_before_residual": True, "norm_before_fc": True, "feedback": "post_norm"}),
    Case("speculators_eagle3", {"layer_ids": [0, 3]}),
    Case("zlab_dflash", {"sliding_window": 3}),
    Case("zlab_dflash", {"sliding_window": 3, "sliding_layers": [1]}),
    Case("zlab_dflash2", {"sliding_window": 3, "block_size": 7}),
    Case("zlab_domino", {"sliding_window": 3, "block_size": 7}),
    Case("zlab_dspark", {"sliding_window": 3, "block_size": 7}),
    Case("speculators_dspark", {"markov_rank": 0, "confidence_with_markov": False}),
)
