"""Export format of DFlash for llama.cpp, and the base of those of drafts built on it: `llm_arch` dflash of b11434.

Its files are converted from z-lab's layout (conversion/qwen.py). A layer of the target is named by the stream that it reads.
There the whole draft is causal inside a block, or none of it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import require
from draftworks.export.conventions import from_format, to_format
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.export.gguf_file import to_single
from draftworks.export.gguf_format import LAYER, GgufFormat, require_kind
from draftworks.export.readers.gguf_file import DRAFT_FILE
from draftworks.strategies.dflash.export import DFlashFormat, build_block_options

_OUTER = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
_INNER = re.compile(r"layers\.(\d+)\.(.+)")
_MASK = "tokenizer.ggml.mask_token_id"


class GgufDFlashFormat(GgufFormat, DFlashFormat):
    """Base of the formats of the family; a mixin of a head follows it among the bases.

    Attributes:
        parts: names in the file of what comes to the backbone, by those of z-lab's layout; `blk.{}` is a layer.
        sizes: keys below the architecture's name, by the options that they hold.
    """

    architecture = "dflash"
    parts: ClassVar[Mapping[str, str]] = {}
    sizes: ClassVar[Mapping[str, str]] = {}

    def count_proposals(self, draft: CanonicalDraft) -> int:
        return self.count_tokens(draft)

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        return replace(super().derive_shape(draft), rope=self.simplify_rope(draft))

    def build_own_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        config, name, scale = draft.config, self.architecture, draft.parts.embedding_scale
        windows = draft.options.layer_windows()
        keys: dict[str, Any] = {
            f"{name}.target_layers": to_format(self.name, draft.taps),
            f"{name}.block_size": config["block_size"],
            _MASK: config["mask_token_id"],
        }
        if scale != 1:
            keys[f"{name}.embedding_scale"] = to_single(scale)
        if windows[0] is not None:
            keys[f"{name}.attention.sliding_window"] = windows[0]
            keys[f"{name}.attention.sliding_window_pattern"] = [True] * len(windows)
            keys[f"{name}.attention.causal"] = True
        options = self.list_head_options(draft)
        return keys | {f"{name}.{key}": options[option] for option, key in self.sizes.items()}

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        return {self._rename(name): tensor for name, tensor in super().build_tensors(draft).items()}

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        require_kind(config, self.architecture, target)
        prefix, sizes = f"{self.architecture}.", self.read_sizes(config)
        window = config.get(f"{prefix}attention.sliding_window")
        slides = config.get(f"{prefix}attention.sliding_window_pattern") or [False] * sizes["num_layers"]
        block = build_block_options(
            require(config, f"{prefix}block_size", DRAFT_FILE),
            require(config, _MASK, DRAFT_FILE),
            [window if each else None for each in slides],
            "token",
        )
        return DraftShape(
            strategy=self.strategy,
            taps=from_format(self.name, require(config, f"{prefix}target_layers", DRAFT_FILE)),
            options=block | self.read_head_options(config),
            **sizes,
        )

    def read_head_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the head that the metadata hold. Raises ConfigError for a key that is missing."""
        return {option: require(config, f"{self.architecture}.{key}", DRAFT_FILE) for option, key in self.sizes.items()}

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        return {self._rename(name): size for name, size in super().list_expected_tensors(shape).items()}

    def _rename(self, name: str) -> str:
        found = _INNER.fullmatch(name)
        if name in self.parts:
            return self.parts[name]
        if found is None:
            return f"{_OUTER[name.removesuffix('.weight')]}.weight"
        number, part = found.groups()
        if part in self.parts:
            return f"blk.{number}.{self.parts[part]}"
        return f"blk.{number}.{LAYER[part.removesuffix('.weight')]}.weight"


class GgufDFlash(GgufDFlashFormat):
    name = "gguf_dflash"
    spec_type = "draft-dflash"
