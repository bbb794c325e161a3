"""Export format of DFlash 2 for llama.cpp: that of DFlash, with convolutions and selector."""

from __future__ import annotations

from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape
from draftworks.strategies.dflash.export_gguf import GgufDFlashFormat
from draftworks.strategies.dflash2.export import SIZES, DFlash2Parts


class GgufDFlash2(GgufDFlashFormat, DFlash2Parts):
    """llama.cpp takes 1 + --spec-draft-n-max as the convolutions' block, and loads a selector whose lattice fits into a state."""

    name = "gguf_dflash2"
    spec_type = "draft-dflash"
    sizes = {size: size for size in SIZES}
    parts = {
        "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight",
        "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
        "attention_conv.base_kernel": "attn_conv_base",
        "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
        "mlp_conv.base_kernel": "ffn_conv_base",
        "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
    }

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        """See the base. Raises ConfigError for more candidates than a hidden state has room for."""
        shape = super().derive_shape(draft)
        candidates = shape.options["selector_top_k"]
        if shape.hidden_size < candidates * (candidates + 1):
            raise ConfigError(
                f"{self.name}: selector_top_k {candidates}: llama.cpp keeps {candidates * (candidates + 1)} numbers of a place in "
                f"a state of {shape.hidden_size}. Train with a smaller one, or export the draft in another format"
            )
        return shape
