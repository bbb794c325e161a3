"""P-EAGLE from exported files: the layout of speculators, which is EAGLE-3's with more layers and `mask_hidden`.

* `norm_before_residual` is false where the key is missing, in vLLM too (for EAGLE-3 vLLM takes true).
* `norm_output` changes nothing: it says what the next pass is fed, and there is one pass.
* The embedding may be the draft's own, as the library trains it: that of the file is used.
* `fc_norm` and `norm_before_fc` apply to `mask_hidden` as to a stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import gated_mlp
from draftworks.export.readers.reader import DraftVocabulary, ExportFolder, ExportReader, Features, TargetTensors
from draftworks.storage.identity import LayerTap
from draftworks.strategies.eagle3.reader import Eagle3Norms, Eagle3Reader, read_speculators


@dataclass(frozen=True)
class PEagleReader(ExportReader):
    """Positions 0 … n-1 as in EAGLE-3, then one masked position for each proposal after the first.

    A masked position reads the mask token and the learned `mask_hidden` in place of a token and a stream. Every position
    sees itself and those before it, or the newest of these in a window that moves on with it, as in vLLM (speculators shows
    all of a chain to its places, which is the same if the window is as long as the chain). So a proposal depends neither on
    the number of proposals after it nor on the tokens drawn before it.

    Attributes:
        first: fusion, first layer, norm and head, which are EAGLE-3's.
    """

    taps: tuple[LayerTap, ...]
    vocabulary: DraftVocabulary
    dtype: torch.dtype
    first: Eagle3Reader = field(repr=False)
    mask_token: int

    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        first, masks = self.first, len(drawn) - 1
        tokens = torch.cat([next_tokens, torch.full((masks,), self.mask_token)])  # (n + masks,)
        streams = torch.cat([first.join_taps(features), first.weights["mask_hidden"][0].expand(masks, -1)])
        hidden = first.run_first_layer(tokens, first.fuse(streams), given=len(tokens))  # (n + masks, H)
        for layer in range(1, first.sizes.layers):
            hidden = self._run_layer(hidden, f"layers.{layer}.")
        return first.norm(hidden[-len(drawn) :], "norm") @ first.weights["lm_head.weight"].T

    def _run_layer(self, hidden: Tensor, layer: str) -> Tensor:
        """Return the output (m, H) of a layer of Llama."""
        read = self.first.norm(hidden, f"{layer}input_layernorm")
        hidden = hidden + self.first.attend(read, layer, given=len(read))
        after = self.first.norm(hidden, f"{layer}post_attention_layernorm")
        return hidden + gated_mlp(after, self.first.weights, f"{layer}mlp.")


def read_speculators_peagle(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> PEagleReader:
    """Read a draft as speculators 0.9.0 and vLLM do."""
    norms = Eagle3Norms(
        norm_before_residual=folder.find_setting("norm_before_residual", False),
        norm_before_fc=folder.find_setting("norm_before_fc", False),
        fc_norm=folder.find_setting("fc_norm", False),
    )
    first = read_speculators(folder, target, dtype, "speculators_peagle", norms)
    return PEagleReader(first.taps, first.vocabulary, dtype, first, folder.require_setting("mask_token_id"))
