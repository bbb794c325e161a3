"""XPress's refiner: what the tokens before a place, and the whole block's states, add to its logits.

As speculators 0.9.0 has it (`models/xpress/model_definitions.py`), with its names of parameters. In a width r,

    x_p = in_proj·[down_h·h_p; down_g·mean_j h_j; token_embed[previous_p]]
    y_p = x_p + Σ_{j ≤ p} mix_l[:, p, j] ⊙ x_j
    n_p = y_p + mlp_down·(silu(mlp_gate·y_p) ⊙ mlp_up·y_p)

and readout·n_p is added to the logits of place p of the block, the anchor's place being 0. h are the backbone's normed
states. previous_p is the token before place p; at place 0, which proposes nothing but is mixed into the others, it is the
anchor's own token, as vLLM's #54448 has it, because a server has no longer the one before. (speculators 0.9.0 trains with
the true token before the anchor there.)

Initially readout and mix_l are 0, so an untrained XPress proposes what its backbone does. (speculators draws all but mix_l
with a standard deviation of 0.02. From 0, no noise has to be unlearned.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.layers import UninitializedEmbedding, seeded_linear, uninitialized_linear


class RefinerSizes(NamedTuple):
    rank: int
    mlp_ratio: int
    block_size: int


class Refiner(nn.Module):
    """The part of a draft that is asked again in every pass."""

    def __init__(self, hidden: int, vocab: int, sizes: RefinerSizes, generator: torch.Generator) -> None:
        super().__init__()
        rank, wide = sizes.rank, sizes.rank * sizes.mlp_ratio
        self.token_embed = UninitializedEmbedding(vocab, rank)
        nn.init.normal_(self.token_embed.weight, generator=generator)
        self.down_h = seeded_linear(hidden, rank, generator)
        self.down_g = seeded_linear(hidden, rank, generator)
        self.in_proj = seeded_linear(3 * rank, rank, generator)
        self.mix_l = nn.Parameter(torch.zeros(rank, sizes.block_size, sizes.block_size))
        self.mlp_gate = seeded_linear(rank, wide, generator)
        self.mlp_up = seeded_linear(rank, wide, generator)
        self.mlp_down = seeded_linear(wide, rank, generator)
        self.readout = uninitialized_linear(rank, vocab, bias=False)
        nn.init.zeros_(self.readout.weight)

    @property
    def projection(self) -> Tensor:
        """readout, (V, r)."""
        return self.readout.weight

    def read_states(self, states: Tensor) -> Tensor:
        """Return what all passes over a block share, (n, size, 2r), from its normed states (n, size, H)."""
        whole = self.down_g(states.mean(1, keepdim=True))  # (n, 1, r)
        local = self.down_h(states)  # (n, size, r)
        return torch.cat([local, whole.expand_as(local)], dim=-1)

    def forward_block(self, read: Tensor, known: Tensor, tokens: Tensor) -> Tensor:
        """Return the narrow features (n, k, r) of the first k proposals, given the tokens before each.

        Args:
            read: (n, size, 2r) of `read_states`.
            known: (n,) int64, the anchors' tokens.
            tokens: (n, k) int64, the tokens at the places of the proposals; the last of them is not looked at.
        """
        places = 1 + tokens.shape[1]
        previous = torch.cat([known[:, None], known[:, None], tokens[:, :-1]], dim=1)  # (n, places)
        x = self.in_proj(torch.cat([read[:, :places], self.token_embed(previous).to(read.dtype)], dim=-1))
        mix = self.mix_l[:, :places, :places].tril().to(x.dtype)
        x = x + torch.einsum("rpj,njr->npr", mix, x)
        x = x[:, 1:]
        return x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))
