"""The decoder layers of P-EAGLE. The first reads tokens beside states, the others are plain Llama layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftworks.drafts.layers import GatedMlp, RmsNorm, Rotary, seeded_linear
from draftworks.drafts.rows import ActiveRows
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.dflash.attention import KeyValue
from draftworks.strategies.eagle3.attention import ttt_attention
from draftworks.strategies.peagle.attention import ChainAttention
from draftworks.strategies.peagle.chains import Chains


class PEagleSizes(NamedTuple):
    """Sizes of the draft; the rest is the target's."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    taps: int
    num_layers: int
    mask_token_id: int


class Rows(ABC):
    """What a layer is applied to: knows which of its rows look at which."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of projected rows (n, heads · width) with rotary positions: (T, heads · width)."""

    @abstractmethod
    def each(self, x: Tensor) -> Tensor:
        """The states of all rows (T, H) from those that a layer was given (n, H)."""


class BatchRows(Rows):
    """The N rows of a batch, then the R masked ones of its chains.

    All masks begin alike, so the first layer is given one for all of them, n = N + 1. Later ones get T = N + R.

    Args:
        width: of a head.
        backend: see draftworks.strategies.peagle.attention.
    """

    def __init__(self, chains: Chains, rotary: Rotary, width: int, dtype: torch.dtype, backend: str) -> None:
        self._chains, self._width, self._backend = chains, width, backend
        table = rotary(chains.documents.longest + chains.limit, dtype)
        self._at_batch = table.at(chains.documents.positions)
        self._at_chains = table.at(chains.positions)
        self._attend_chains = ChainAttention(chains, backend)

    @torch.compiler.disable  # how many chains there are is new in every batch
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = [self._masked(x)[None].transpose(1, 2) for x in (query, key, value)]
        query, key, value = (self._batched(x).transpose(1, 2) for x in (query, key, value))
        query, key = self._at_batch.apply(query), self._at_batch.apply(key)
        attended = ttt_attention(query, [key], [value], self._chains.documents, self._backend)
        rows = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        context = KeyValue(_in_one_row(key), _in_one_row(value))
        own_query, own_key = self._at_chains.apply(own[0]), self._at_chains.apply(own[1])
        masked = self._attend_chains(own_query, context, KeyValue(own_key, own[2]))
        return torch.cat([rows, masked[0].transpose(0, 1).flatten(1)])

    @torch.compiler.disable
    def each(self, x: Tensor) -> Tensor:
        count = self._chains.batch * self._chains.length
        return torch.cat([x[:count], x[count:].expand(self._chains.count, -1)])

    def _batched(self, x: Tensor) -> Tensor:
        """(n, heads · width) to (B, S, heads, width)."""
        count = self._chains.batch * self._chains.length
        return x[:count].unflatten(0, (self._chains.batch, -1)).unflatten(-1, (-1, self._width))

    def _masked(self, x: Tensor) -> Tensor:
        """(n, heads · width) to (R, heads, width)."""
        count = self._chains.batch * self._chains.length
        return x[count:].expand(self._chains.count, -1).unflatten(-1, (-1, self._width))


def _in_one_row(heads: Tensor) -> Tensor:
    """(B, heads, S, width) to (1, heads, B·S, width)."""
    return heads.transpose(0, 1).flatten(1, 2)[None]


class PEagleAttention(nn.Module):
    def __init__(self, inputs: int, target: TargetParts, sizes: PEagleSizes, generator: torch.Generator) -> None:
        super().__init__()
        width = target.head_dim
        self.q_proj = seeded_linear(inputs, sizes.num_heads * width, generator)
        self.k_proj = seeded_linear(inputs, sizes.num_kv_heads * width, generator)
        self.v_proj = seeded_linear(inputs, sizes.num_kv_heads * width, generator)
        self.o_proj = seeded_linear(sizes.num_heads * width, target.hidden_size, generator)


class PEagleLayer(nn.Module):
    """A Llama layer over rows (n, H)."""

    def __init__(
        self, target: TargetParts, sizes: PEagleSizes, generator: torch.Generator, reads_tokens: bool = False
    ) -> None:
        super().__init__()
        width, eps = target.hidden_size, target.rms_norm_eps
        self.self_attn = PEagleAttention(2 * width if reads_tokens else width, target, sizes, generator)
        self.mlp = GatedMlp(width, sizes.intermediate_size, generator)
        self.input_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)

    def forward(self, hidden: Tensor, rows: Rows, wanted: ActiveRows | None = None) -> Tensor:
        """States (T, H) of all rows, or of those that are wanted, from what they were (n, H)."""
        return self._over(self.input_layernorm(hidden), hidden, rows, wanted)

    def _over(self, read: Tensor, residual: Tensor, rows: Rows, wanted: ActiveRows | None) -> Tensor:
        attention = self.self_attn
        attended = rows.attend(attention.q_proj(read), attention.k_proj(read), attention.v_proj(read))
        residual = rows.each(residual)
        if wanted is not None:
            attended, residual = wanted.take(attended[None]), wanted.take(residual[None])
        hidden = residual + attention.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class PEagleFirstLayer(PEagleLayer):
    """Reads [token, state], each normed by itself. The residual stream begins as the state.

    Args:
        norm_before_residual: it begins as the normed state.
    """

    def __init__(
        self, target: TargetParts, sizes: PEagleSizes, generator: torch.Generator, norm_before_residual: bool
    ) -> None:
        super().__init__(target, sizes, generator, reads_tokens=True)
        self.hidden_norm = RmsNorm(target.hidden_size, target.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def forward(self, hidden: Tensor, embedded: Tensor, rows: Rows, wanted: ActiveRows | None = None) -> Tensor:
        """As of the other layers, with the tokens' embeddings (n, H)."""
        normed = self.hidden_norm(hidden)
        read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return self._over(read, normed if self._norm_before_residual else hidden, rows, wanted)
