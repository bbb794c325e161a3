"""P-EAGLE from exported files: the layout of speculators, which is EAGLE-3's with more layers and `mask_hidden`.

* `norm_before_residual` is false where the key is missing, in vLLM too (for EAGLE-3 vLLM takes true).
* `norm_output` changes nothing: it says what the next pass is fed, and there is one pass.
* The embedding may be the draft's own: the library trains it. The one in the file counts, and there must be one.
* `fc_norm` and `norm_before_fc` apply to `mask_hidden` as to a stream.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from draftworks.export.readers.files import Expected, ExportFolder
from draftworks.export.readers.reader import TargetTensors
from draftworks.export.readers.sizes import LayerSizes
from draftworks.export.readers.speculators_header import check_speculators_header
from draftworks.strategies.eagle3.reader import Eagle3Norms
from draftworks.strategies.eagle3.reader_layouts import SPECULATORS, read_eagle3
from draftworks.strategies.peagle.reader import PEagleReader

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
