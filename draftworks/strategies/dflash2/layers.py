"""Dynamic convolutions inside a block, on the input and on the output of a sublayer (z-lab's DFlash 2).

With the channels in groups of g, x_p the normed state at place p of a block, t the taps and s the side (0 the sublayer's
input, 1 its output):

    delta_p = kernel_projection · x_p          a number per side, tap and group
    y_p = Σ_t (base_kernel[s, t] + delta_p[s, t, group]) ⊙ v_{p-t}      over the p - t inside the block

v is x itself on the input side, the sublayer's output on the other; both sides take delta from x. Definition and names of
the parameters are those of speculators 0.9.0 (`models/dflash2/model_definitions.py`) and SGLang 0.5.23 (`models/dflash.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.attention import DraftAttention, KeyValue, Window
from draftworks.drafts.layers import Rotation, uninitialized_linear
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.dflash.model import DFlashLayer, DFlashSizes

SIDES = 2


class BlockConvolution(nn.Module):
    """The convolutions around one sublayer; initially both are the identity.

    Args:
        hidden: H, a multiple of `group_size`.
    """

    def __init__(self, hidden: int, block_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self._block_size, self._groups = block_size, hidden // group_size
        base = torch.zeros(SIDES, taps, hidden)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = uninitialized_linear(hidden, SIDES * taps * self._groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the convolved output of a sublayer of the convolved normed states, (B, A · size, H) like these."""
        taps = self.base_kernel.shape[1]
        deltas = self.kernel_projection(normed).unflatten(-1, (SIDES, taps, self._groups))
        entering, leaving = deltas.unbind(-3)  # (B, A · size, taps, G)
        return self._convolve(sublayer(self._convolve(normed, entering, 0)), leaving, 1)

    def _convolve(self, x: Tensor, deltas: Tensor, side: int) -> Tensor:
        grouped = x.unflatten(1, (-1, self._block_size)).unflatten(-1, (self._groups, -1))  # (B, A, size, G, g)
        deltas = deltas.unflatten(1, (-1, self._block_size))[..., None]  # (B, A, size, taps, G, 1)
        bases = self.base_kernel[side].unflatten(-1, (self._groups, -1))  # (taps, G, g)
        total = torch.zeros_like(grouped)
        for tap, base in enumerate(bases):
            before = F.pad(grouped[:, :, : self._block_size - tap], (0, 0, 0, 0, tap, 0))
            total = total + (base + deltas[:, :, :, tap]) * before
        return total.view_as(x)


class DFlash2Layer(DFlashLayer):
    """A layer of DFlash with convolutions around its attention and around its MLP."""

    def __init__(
        self,
        target: TargetParts,
        sizes: DFlashSizes,
        window: Window | None,
        generator: torch.Generator,
        taps: int,
        group_size: int,
    ) -> None:
        super().__init__(target, sizes, window, generator)
        self.attention_conv = BlockConvolution(target.hidden_size, sizes.block_size, taps, group_size)
        self.mlp_conv = BlockConvolution(target.hidden_size, sizes.block_size, taps, group_size)

    def forward_cached(self, hidden: Tensor, context: KeyValue, at_blocks: Rotation, attend: DraftAttention) -> Tensor:
        def attention(normed: Tensor) -> Tensor:
            return self.attend(normed, context, at_blocks, attend)

        hidden = hidden + self.attention_conv(self.input_layernorm(hidden), attention)
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)
