"""P-EAGLE from the weights of an exported draft: all proposals in one pass over the text and a chain of masks after it.

P-EAGLE from exported files: the layout of speculators, which is EAGLE-3's with more layers and `mask_hidden`.

* `norm_before_residual` is false where the key is missing, in vLLM too (for EAGLE-3 vLLM takes true).
* `norm_output` changes nothing: it says what the next pass is fed, and there is one pass.
* The embedding may be the draft's own: the library trains it. The one in the file counts, and there must be one.
* `fc_norm` and `norm_before_fc` apply to `mask_hidden` as to a stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import gated_mlp
from draftworks.export.readers.files import DraftVocabulary, Expected, ExportFolder, check_speculators_header
from draftworks.export.readers.reader import ExportReader, Features, TargetTensors
from draftworks.export.readers.sizes import LayerSizes
from draftworks.storage.identity import LayerTap
from draftworks.strategies.eagle3.reader import SPECULATORS, Eagle3Norms, Eagle3Reader, read_eagle3


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


_LAYOUT = replace(SPECULATORS, export_format="speculators_peagle")


def read_speculators_peagle(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> PEagleReader:
    """A draft as speculators 0.9.0 and vLLM load it.

    Raises:
        StoreError: files that one of the two would load as another draft than the one that was trained.
    """
    check_speculators_header(folder, "peagle")
    folder.must_be(f"{_LAYOUT.section}model_type", "llama")
    norms = Eagle3Norms(
        norm_before_residual=folder.optional("norm_before_residual", bool, False),
        norm_before_fc=folder.optional("norm_before_fc", bool, False),
        fc_norm=folder.optional("fc_norm", bool, False),
    )
    folder.must_not_differ(f"{_LAYOUT.section}fc_norm", norms.fc_norm)
    sizes = LayerSizes.read(folder, _LAYOUT.section)
    first = read_eagle3(folder, _LAYOUT, norms, target, dtype, _more_tensors(folder, sizes))
    mask_token = folder.setting("mask_token_id", int)
    if not 0 <= mask_token < sizes.vocab:
        folder.refuse("mask_token_id", f"0 to {sizes.vocab - 1}", str(mask_token))
    return PEagleReader(first.taps, first.vocabulary, dtype, first, mask_token)


def _more_tensors(folder: ExportFolder, sizes: LayerSizes) -> dict[str, Expected]:
    """What the file holds beside the tensors of EAGLE-3."""
    taps = len(folder.setting(_LAYOUT.layer_ids, list))
    more = {"mask_hidden": Expected((1, 1, taps * sizes.hidden))}
    for layer in range(1, sizes.layers):
        more |= sizes.layer_tensors(f"layers.{layer}.", inputs=sizes.hidden)
    return more
