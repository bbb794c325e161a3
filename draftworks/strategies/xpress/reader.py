"""XPress from exported files: the rows of a DFlash block, refined in passes over the tokens that the pass before chose.

speculators 0.9.0 has no serving code; the passes are those of vLLM's #54448: the anchor stands in for the token before it,
and every pass takes the first choices of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftworks.export.readers.reader import ExportFolder, Features, TargetTensors
from draftworks.strategies.dflash.reader import HeadReader, read_speculators


@dataclass(frozen=True)
class XPressReader(HeadReader):
    """Row p of the block, p from 1, proposes token p after the anchor. What was drawn before it is not looked at.

    Attributes:
        passes: how often the refiner is asked.
    """

    passes: int

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
        return self.backbone.weights[f"refiner_head.{name}"]


def read_speculators_xpress(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> XPressReader:
    """Read a draft in speculators' layout as vLLM's #54448 serves it."""
    backbone = read_speculators(folder, target, dtype, "speculators_xpress", from_anchor=False)
    passes = folder.find_setting("num_jacobi_passes", 6)
    return XPressReader(backbone, passes)
