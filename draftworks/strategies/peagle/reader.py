"""P-EAGLE from the weights of an exported draft: all proposals in one pass over the text and a chain of masks after it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import gated_mlp
from draftworks.export.readers.reader import ExportReader, Features
from draftworks.export.readers.vocabulary import DraftVocabulary
from draftworks.storage.identity import LayerTap
from draftworks.strategies.eagle3.reader import Eagle3Reader


@dataclass(frozen=True)
class PEagleReader(ExportReader):
    """Rows 0 … n-1 are EAGLE-3's. Row n-1 proposes the first token, and each of those after it, which reads the mask token
    and the learned `mask_hidden` in place of a stream, one more. A row sees those before it and itself; so a proposal is
    the same however many are asked for after it, and whatever was drawn before it.
    """

    taps: tuple[LayerTap, ...]
    vocabulary: DraftVocabulary
    dtype: torch.dtype
    first: Eagle3Reader = field(repr=False)
    """Fusion, first layer, norm and head, which are EAGLE-3's."""
    mask_token: int

    @torch.no_grad()
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        first, masks, given = self.first, len(drawn) - 1, len(next_tokens)
        tokens = torch.cat([next_tokens, torch.full((masks,), self.mask_token)])
        streams = torch.cat([first.joined(features), first.weights["mask_hidden"][0].expand(masks, -1)])
        hidden = first.layer_rows(tokens, first.fused(streams), given)
        for layer in range(1, first.sizes.layers):
            hidden = self._plain_layer(hidden, f"layers.{layer}.", given)
        return first.norm(hidden[-len(drawn) :], "norm") @ first.weights["lm_head.weight"].T

    def _plain_layer(self, hidden: Tensor, layer: str, given: int) -> Tensor:
        """A layer of Llama over rows (m, H)."""
        hidden = hidden + self.first.attended(self.first.norm(hidden, f"{layer}input_layernorm"), layer, given)
        after = self.first.norm(hidden, f"{layer}post_attention_layernorm")
        return hidden + gated_mlp(after, self.first.weights, f"{layer}mlp.")
