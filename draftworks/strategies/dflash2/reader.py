"""DFlash 2 from exported files: z-lab's layout as SGLang 0.5.23 reads it, and that of speculators 0.9.0.

The tensors are the same; the sizes of convolutions and selector stand in `dflash_config`, or beside it with speculators.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftworks.export.readers.reader import ExportFolder, Features, TargetTensors
from draftworks.strategies.dflash.reader import DFlashReader, HeadReader, Sublayer, read_speculators, read_zlab


@dataclass(frozen=True)
class ConvolvedReader(DFlashReader):
    """Rows of a block whose sublayers read, and give, sums of a row and the rows just before it in the block.

    Attributes:
        taps_of_kernel: rows of such a sum.
        channels: consecutive channels with the same dynamic coefficient.
    """

    taps_of_kernel: int
    channels: int

    def run_sublayer(self, name: str, own: Tensor, sublayer: Sublayer) -> Tensor:
        convolution = name.replace("self_attn", "attention") + "_conv."
        fixed = self.weights[f"{convolution}base_kernel"]  # (2, taps, H)
        dynamic = own @ self.weights[f"{convolution}kernel_projection.weight"].T
        dynamic = dynamic.view(len(own), 2, self.taps_of_kernel, -1).repeat_interleave(self.channels, dim=-1)
        before, after = (fixed + dynamic).unbind(1)  # (block, taps, H) each
        return _sum_taps(sublayer(_sum_taps(own, before)), after)


def _sum_taps(rows: Tensor, kernels: Tensor) -> Tensor:
    """Return the convolved rows (block, H): row p is the sum over t of kernel (p, t) times row p - t."""
    return torch.stack([
        sum((kernels[p, t] * rows[p - t] for t in range(min(kernels.shape[1], p + 1))), torch.zeros_like(rows[p]))
        for p in range(len(rows))
    ])  # fmt: skip


@dataclass(frozen=True)
class DFlash2Reader(HeadReader):
    """Row 1 + i of a block proposes token i, among its `top_k` likeliest ones. To their logits comes how well each follows the
    token before it, the anchor or the proposal before."""

    top_k: int

    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        scores = self.scores(features, next_tokens, drawn)
        likeliest = self.backbone.logits(features, next_tokens, drawn).argsort(dim=-1, descending=True)[:, : self.top_k]
        allowed = torch.zeros_like(scores, dtype=torch.bool).scatter(1, likeliest, True)
        return scores.masked_fill(~allowed, -torch.inf)

    def scores(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        """Return the scores that all tokens would have, were they candidates, (k, V). Arguments as for `logits`."""
        rows = self.backbone.proposing_rows(features, next_tokens, len(drawn))
        before = torch.cat([next_tokens[-1:], drawn[:-1]])
        factor = self._weight("predecessor_codebook")[before] * (rows @ self._weight("hidden_projection.weight").T)
        return rows @ self.backbone.head.T + factor @ self._weight("successor_codebook").T

    def _weight(self, name: str) -> Tensor:
        return self.backbone.weights[f"candidate_selector.{name}"]


def read_zlab_dflash2(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DFlash2Reader:
    """Read a draft as z-lab's own code and SGLang do."""
    return _read(folder, read_zlab(folder, target, dtype, "zlab_dflash2", first_row=1), "dflash_config.")


def read_speculators_dflash2(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DFlash2Reader:
    """Read a draft as speculators 0.9.0 does."""
    return _read(
        folder, read_speculators(folder, target, dtype, "speculators_dflash2", from_anchor=False, both_ways=True), ""
    )


def _read(folder: ExportFolder, backbone: DFlashReader, section: str) -> DFlash2Reader:
    taps, channels = (folder.require_setting(f"{section}conv_{size}_size") for size in ("kernel", "group"))
    return select(convolve(backbone, taps, channels), folder.require_setting(f"{section}selector_top_k"))


def convolve(backbone: DFlashReader, taps: int, channels: int) -> ConvolvedReader:
    """Return the reader of a backbone with convolutions whose weights a reader of DFlash holds."""
    held = {each.name: getattr(backbone, each.name) for each in fields(backbone)}
    return ConvolvedReader(**held, taps_of_kernel=taps, channels=channels)


def select(backbone: DFlashReader, top_k: int) -> DFlash2Reader:
    """Return the reader of a draft whose weights, the selector's too, the reader of its backbone holds."""
    return DFlash2Reader(backbone, top_k)
