"""XPress from exported files: the rows of a DFlash block, refined in passes over the tokens that the pass before chose.

speculators 0.9.0 has no serving code; the passes are those of vLLM's #54448: the anchor stands in for the token before it,
and every pass takes the first choices of the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftworks.export.readers.reader import ExportFolder, Features, TargetTensors
from draftworks.strategies.dflash.reader import HeadReader, read_speculators, read_zlab


@dataclass(frozen=True)
class XPressReader(HeadReader):
    """Row p of the block, p from 1, proposes token p after the anchor. What was drawn before it is not looked at.

    Attributes:
        passes: how often the refiner is asked.
        names: of the refiner's tensors in the file, by speculators' names; those that are missing are the same there.
    """

    passes: int
    names: Mapping[str, str]

    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        rows = self.backbone.rows(features, next_tokens)
        logits = rows[1:] @ self.backbone.head.T
        for _ in range(self.passes):
            chosen = self.vocabulary.ids[logits.argmax(-1)]
            logits = self.refine(rows, int(next_tokens[-1]), chosen)
        return logits[: len(drawn)]

    def refine(self, rows: Tensor, anchor: int, tokens: Tensor) -> Tensor:
        """Return the logits (block - 1, V_d) of a pass over tokens (block - 1,), which stand at the places of the proposals."""
        previous = [anchor, anchor, *tokens[:-1].tolist()]
        summary = self._weight("down_g.weight") @ (rows.sum(0) / len(rows))
        inputs = [
            self._weight("in_proj.weight")
            @ torch.cat([self._weight("down_h.weight") @ row, summary, self._weight("token_embed.weight")[token]])
            for row, token in zip(rows, previous, strict=True)
        ]
        refined = [self._read_place(place, inputs) for place in range(1, len(rows))]
        return rows[1:] @ self.backbone.head.T + torch.stack(refined) @ self._weight("readout.weight").T

    def _read_place(self, place: int, inputs: list[Tensor]) -> Tensor:
        """Return the narrow features of one place, (r,)."""
        mixed = inputs[place]
        for other in range(place + 1):
            mixed = mixed + self._weight("mix_l")[:, place, other] * inputs[other]
        gate = self._weight("mlp_gate.weight") @ mixed
        up = self._weight("mlp_up.weight") @ mixed
        return mixed + self._weight("mlp_down.weight") @ (gate * gate.sigmoid() * up)

    def _weight(self, name: str) -> Tensor:
        return self.backbone.weights[self.names.get(name, f"refiner_head.{name}")]


def read_speculators_xpress(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> XPressReader:
    """Read a draft in speculators' layout as vLLM's #54448 serves it."""
    backbone = read_speculators(folder, target, dtype, "speculators_xpress", from_anchor=False)
    passes = folder.find_setting("num_jacobi_passes", 6)
    return XPressReader(backbone, passes, {})


_OF_VLLM = {
    "token_embed.weight": "xpress_head.w1.weight",
    "down_h.weight": "xpress_head.down_h.weight",
    "down_g.weight": "xpress_head.down_g.weight",
    "in_proj.weight": "xpress_head.in_proj.weight",
    "mix_l": "xpress_head.mix.L",
    "mlp_gate.weight": "xpress_head.mlp.gate_proj.weight",
    "mlp_up.weight": "xpress_head.mlp.up_proj.weight",
    "mlp_down.weight": "xpress_head.mlp.down_proj.weight",
    "readout.weight": "xpress_head.w2.weight",
}


def read_vllm_xpress(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> XPressReader:
    """Read a draft in vLLM 0.33's own form, without its choice among the backbone's best (`xpress_topc` 0)."""
    backbone = read_zlab(folder, target, dtype, "vllm_xpress", first_row=1)
    return XPressReader(backbone, folder.find_setting("xpress_num_passes", 6), _OF_VLLM)
