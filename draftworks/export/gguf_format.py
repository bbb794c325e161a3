"""Base of the formats that llama.cpp loads: a draft as one GGUF file, with the target's vocabulary.

What a config.json is to other formats, the file's metadata are here. Numbers there are of single precision, and rope is
described by llama.cpp's own keys; `draftworks.*` says what no key of llama.cpp does, and is ignored by it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.layers import rope_frequencies
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft, Checkpoint
from draftworks.export.config_keys import require
from draftworks.export.export_format import DraftShape, ExportFormat, Shapes
from draftworks.export.gguf_file import ARCHITECTURE, Rounding, require_gguf, to_single, write_gguf
from draftworks.export.gguf_vocabulary import build_vocabulary_keys
from draftworks.export.readers.gguf_file import DRAFT_FILE, read_gguf_folder
from draftworks.targets.gguf_model import ROPE_FACTORS, shorten

TARGET_FILE = "TARGET.gguf"
"""Placeholder in command lines for the target's own GGUF file."""
RELEASE = "b11434"
"""The release of llama.cpp whose sources were read, and whose server the tests start where it is built."""
_ROPE_TYPE, _DRAFT_VOCABULARY = "draftworks.rope_type", "draftworks.draft_vocab_size"
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
_ROPES: dict[str, set[str]] = {"default": set(), "linear": {"factor"}, "yarn": _YARN, "llama3": _LLAMA3}
"""Parameters of a rope by its type, beside `rope_theta`; llama.cpp computes others otherwise, or not at all."""
_SIZES = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
}
"""Fields of a `DraftShape`, and keys below the architecture's name."""
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names of a decoder layer's parts, in transformers and in GGUF."""


class GgufFormat(ExportFormat):
    """Base of the formats of llama.cpp.

    Attributes:
        architecture: llama.cpp's name of the draft's class.
        spec_type: of its server's `--spec-type`.
        divides_rope: whether the class reads `rope_freqs`, by which a rope is scaled as Llama 3.1's.
    """

    files = (DRAFT_FILE,)
    architecture: ClassVar[str]
    spec_type: ClassVar[str]
    divides_rope: ClassVar[bool] = False

    @abstractmethod
    def count_proposals(self, draft: CanonicalDraft) -> int:
        """Return how many tokens the server is to ask for."""

    @abstractmethod
    def build_own_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        """Return the keys of the metadata that only this kind of draft has."""

    def rounding(self, dtype: torch.dtype) -> Rounding:
        return Rounding(dtype, self.settings.gguf.quantise)

    @property
    def quantises(self) -> bool:
        return self.settings.gguf.quantise is not None

    def hold(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return self.rounding(dtype).hold(tensor)

    def build_strategy(self, draft: CanonicalDraft, dtype: torch.dtype) -> DraftStrategy:
        return draft.build_strategy(dtype, self.rounding(dtype).hold)

    def write_files(
        self, folder: Path, draft: CanonicalDraft, dtype: torch.dtype, provenance: Mapping[str, Any]
    ) -> None:
        """See the base. Raises ConfigError if the package gguf is not installed."""
        metadata, tensors = self.build_config(draft, dtype), self.build_tensors(draft)
        write_gguf(folder / DRAFT_FILE, metadata, tensors, self.rounding(dtype), provenance)

    def read_files(self, folder: Path) -> Checkpoint:
        found = read_gguf_folder(folder)
        return Checkpoint(folder, found.config, found.tensors)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return False: GGUF files are not imported."""
        return False

    def to_canonical_name(self, name: str) -> str:
        return name

    def find_vocabulary_problem(self, tensors: Mapping[str, Tensor], vocab_size: int) -> str | None:
        """See the base. llama.cpp reads the target's ids themselves."""
        ids = tensors.get("d2t")
        if ids is None:
            return "tensor d2t is missing"
        if ids.dtype != torch.int64 or ids.ndim != 1:
            return f"d2t: expected int64 of one dimension, found {ids.dtype} {tuple(ids.shape)}"
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            return f"d2t holds ids outside the target's vocabulary, 0..{vocab_size - 1}"
        return "d2t holds ids that do not ascend" if bool((ids.diff() <= 0).any()) else None

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return (
            f"llama.cpp's server ({RELEASE} was read) with `--spec-type {self.spec_type}`, beside the target's own GGUF file, "
            "which has to have the same tokens."
        )

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return {
            "llama.cpp": f"llama-server --model {TARGET_FILE} --spec-draft-model {folder}/{DRAFT_FILE} "
            f"--spec-type {self.spec_type} --spec-draft-n-max {self.count_proposals(draft)}"
        }

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """See the base.

        Raises:
            ConfigError: also if the package gguf is missing, or the target's vocabulary cannot be written.
        """
        shape, name = self.derive_shape(draft), self.architecture
        sizes = {f"{name}.{key}": getattr(shape, field) for field, key in _SIZES.items()}
        reduced = {} if shape.draft_vocab_size is None else {_DRAFT_VOCABULARY: shape.draft_vocab_size}
        own = {
            ARCHITECTURE: name,
            **sizes,
            f"{name}.attention.value_length": shape.head_dim,
            f"{name}.context_length": draft.config["max_position_embeddings"],
            f"{name}.attention.layer_norm_rms_epsilon": to_single(shape.rms_norm_eps),
            f"{name}.rope.dimension_count": shape.head_dim,
            **self._build_rope_keys(shape.rope),
            **reduced,
            **self.build_own_keys(draft),
        }
        return self.join_keys(draft, dtype, own, shape.vocab_size)

    def join_keys(
        self, draft: CanonicalDraft, dtype: torch.dtype, own: Mapping[str, Any], vocab_size: int
    ) -> dict[str, Any]:
        """Return the metadata of a draft: keys of its kind, which go first, and those of any file."""
        require_gguf(f"{draft.folder}: {self.name}")
        return {
            **own,
            "general.type": "model",
            "general.name": f"{draft.target.name} {draft.record.strategy} draft",
            "general.file_type": self.rounding(dtype).file_type,
            "general.quantization_version": 2,
            **{
                key: value
                for key, value in build_vocabulary_keys(
                    draft.target, vocab_size, self.settings.gguf.pre_tokenizer
                ).items()
                if key not in own
            },
        }

    def build_rope_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        """Return what each frequency is divided by, for a rope that is scaled as Llama 3.1's.

        Raises:
            ConfigError: a scaled rope that llama.cpp does not compute for such a draft.
        """
        rope = dict(draft.config["rope_parameters"])
        if self._read_type(rope) != "llama3":
            return {}
        parts = replace(draft.parts, rope=rope, head_dim=draft.config["head_dim"])
        plain = replace(parts, rope={"rope_type": "default", "rope_theta": rope["rope_theta"]})
        return {ROPE_FACTORS: rope_frequencies(plain).inverse / rope_frequencies(parts).inverse}

    def list_rope_tensors(self, shape: DraftShape) -> Shapes:
        return {ROPE_FACTORS: (shape.head_dim // 2,)} if shape.rope["rope_type"] == "llama3" else {}

    def simplify_rope(self, draft: CanonicalDraft) -> dict[str, Any]:
        """Return the rope parameters that the metadata hold; the rest of Llama 3.1's are in a tensor."""
        rope = dict(draft.config["rope_parameters"])
        kind, theta = self._read_type(rope), float(rope["rope_theta"])
        kept = {} if kind == "llama3" else {key: rope[key] for key in rope if key not in ("rope_type", "rope_theta")}
        return {"rope_type": kind, "rope_theta": theta, **kept}

    def read_sizes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what all metadata have, as fields of a `DraftShape`. Raises ConfigError for a key that is missing."""
        where, name = DRAFT_FILE, self.architecture
        kind, prefix = require(config, _ROPE_TYPE, where), f"{name}.rope.scaling."
        scaled = {theirs: config[prefix + ours] for theirs, ours in _SCALING.items() if prefix + ours in config}
        numbers = {key: shorten(each) if isinstance(each, float) else each for key, each in scaled.items()}
        return {
            **{field: require(config, f"{name}.{key}", where) for field, key in _SIZES.items()},
            "draft_vocab_size": config.get(_DRAFT_VOCABULARY),
            "rms_norm_eps": shorten(require(config, f"{name}.attention.layer_norm_rms_epsilon", where)),
            "rope": {
                "rope_type": kind,
                "rope_theta": shorten(require(config, f"{name}.rope.freq_base", where)),
                **numbers,
            },
        }

    def _read_type(self, rope: Mapping[str, Any]) -> str:
        kind = rope.get("rope_type", "default")
        known = [name for name in _ROPES if name != "llama3" or self.divides_rope]
        odd = sorted(rope.keys() - {"rope_type", "rope_theta", *_ROPES.get(kind, ())})
        if kind not in known or odd:
            more = f" with {', '.join(odd)}" if odd else ""
            raise ConfigError(
                f"{self.name}: a rope of type {kind}{more}: llama.cpp's {self.architecture} computes {', '.join(known)}. Export "
                "the draft in another format"
            )
        return kind

    def _build_rope_keys(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        prefix = f"{self.architecture}.rope."
        keys: dict[str, Any] = {_ROPE_TYPE: rope["rope_type"], f"{prefix}freq_base": to_single(rope["rope_theta"])}
        if rope["rope_type"] in ("linear", "yarn"):
            keys[f"{prefix}scaling.type"] = rope["rope_type"]
            for theirs, ours in _SCALING.items():
                if theirs in rope:
                    whole = theirs == "original_max_position_embeddings"
                    keys[f"{prefix}scaling.{ours}"] = int(rope[theirs]) if whole else to_single(rope[theirs])
        return keys


_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""Parameters of a scaled rope, in transformers and below `rope.scaling` in GGUF."""


def require_kind(config: Mapping[str, Any], architecture: str, target: TargetFiles) -> None:
    """Raise ConfigError for a file of another class, or of a target with another vocabulary."""
    found = config.get(ARCHITECTURE)
    if found != architecture:
        raise ConfigError(f"{DRAFT_FILE}: {ARCHITECTURE}: expected {architecture}, found {found!r}")
    size = len(config.get("tokenizer.ggml.tokens") or ())
    if size != target.vocab_size:
        raise ConfigError(f"{DRAFT_FILE}: a vocabulary of {size} tokens: the target has {target.vocab_size}")
