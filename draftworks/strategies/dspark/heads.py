"""What DSpark puts on a DFlash backbone: a Markov head on the logits, and a confidence head beside them.

The Markov heads are those of speculators 0.9.0 (`models/dspark/model_definitions.py`) and SGLang 0.5.23 (`models/dspark.py`),
which agree in all three and in the order of what they concatenate. With e = w1[token before], h the backbone's state as the
head reads it, and [a; b] concatenation, n is what passes through the narrow width r, and w2·n is added to the logits:

    vanilla   n = e
    gated     n = σ(gate_proj·[h; e]) ⊙ e
    rnn       (g, c, o) = joint_proj·[m; e; h],   m' = σ(g) ⊙ m + (1 - σ(g)) ⊙ tanh(c),   n = tanh(o)

m is 0 at the start of a block; n takes o from the state before this token, so m' serves the next place. The confidence of a
place is σ(proj·[h; e]), of the normed state and the bare embedding whatever the Markov head. Where they part: SGLang refuses
a draft without a Markov head, and computes the confidence in float32.

Both heads begin as none: w2 and the confidence's projection are 0 at first, so an untrained DSpark proposes what its backbone
does, with confidence one half. w1 begins in the scale of the normed states that it is read beside; a smaller one learns more
slowly. (speculators draws w2 at random and w1 at a hundredth of that. No page says how they should begin; from 0 no noise
has to be unlearned.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.layers import seeded_linear, uninitialized


class MarkovStep(NamedTuple):
    """What a place adds, through the narrow width (n, r), and the state (n, r) for the next; None where there is none."""

    narrow: Tensor
    memory: Tensor | None


class MarkovHead(nn.Module):
    """`vanilla`, and what the others share. Parameter names are the peers'."""

    def __init__(self, hidden: int, vocab: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.markov_w1 = uninitialized(nn.Embedding, vocab, rank)
        nn.init.normal_(self.markov_w1.weight, generator=generator)
        self.markov_w2 = uninitialized(nn.Linear, rank, vocab, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    @property
    def projection(self) -> Tensor:
        """(V, r)."""
        return self.markov_w2.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """(…) int64 to (…, r)."""
        return self.markov_w1(tokens)

    def forward_block(self, embedded: Tensor, states: Tensor) -> Tensor:
        """What every place adds, through the narrow width: (n, k, r) from the tokens before (n, k, r) and states (n, k, H)."""
        return self._narrow(embedded, states)

    def step(self, embedded: Tensor, states: Tensor, memory: Tensor | None) -> MarkovStep:
        """The same for the next place of a block, (n, r) and (n, H); `memory` is None at the first."""
        return MarkovStep(self._narrow(embedded, states), None)

    def _narrow(self, embedded: Tensor, states: Tensor) -> Tensor:
        return embedded


class GatedMarkovHead(MarkovHead):
    def __init__(self, hidden: int, vocab: int, rank: int, generator: torch.Generator) -> None:
        super().__init__(hidden, vocab, rank, generator)
        self.gate_proj = _seeded_affine(hidden + rank, rank, generator)

    def _narrow(self, embedded: Tensor, states: Tensor) -> Tensor:
        return self.gate_proj(torch.cat([states, embedded], dim=-1)).sigmoid() * embedded


class RnnMarkovHead(MarkovHead):
    def __init__(self, hidden: int, vocab: int, rank: int, generator: torch.Generator) -> None:
        super().__init__(hidden, vocab, rank, generator)
        self.joint_proj = _seeded_affine(2 * rank + hidden, 3 * rank, generator)

    def forward_block(self, embedded: Tensor, states: Tensor) -> Tensor:
        """All places at once as far as they do not wait for each other."""
        rank = embedded.shape[-1]
        of_memory, of_inputs = self.joint_proj.weight.split([rank, self.joint_proj.in_features - rank], dim=1)
        inputs = F.linear(torch.cat([embedded, states], dim=-1), of_inputs, self.joint_proj.bias)
        memory, narrow = torch.zeros_like(embedded[:, 0]), []
        for of_place in inputs.unbind(1):
            step = _recur(of_place + F.linear(memory, of_memory), memory)
            memory = step.memory
            narrow.append(step.narrow)
        return torch.stack(narrow, dim=1)

    def step(self, embedded: Tensor, states: Tensor, memory: Tensor | None) -> MarkovStep:
        memory = torch.zeros_like(embedded) if memory is None else memory
        return _recur(self.joint_proj(torch.cat([memory, embedded, states], dim=-1)), memory)


class NoMarkovHead(nn.Module):
    """Of rank 0: adds nothing and has no parameters."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.register_buffer("projection", torch.zeros(vocab, 0), persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.projection.new_zeros(*tokens.shape, 0)

    def forward_block(self, embedded: Tensor, states: Tensor) -> Tensor:
        return embedded

    def step(self, embedded: Tensor, states: Tensor, memory: Tensor | None) -> MarkovStep:
        return MarkovStep(embedded, None)


class ConfidenceHead(nn.Module):
    """The logit of a proposal being accepted."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = uninitialized(nn.Linear, inputs, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, inputs) to (…)."""
        return self.proj(inputs).squeeze(-1)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}


def _recur(raw: Tensor, memory: Tensor) -> MarkovStep:
    """One step of `rnn` from what `joint_proj` gives, (n, 3r)."""
    gate, candidate, out = raw.chunk(3, dim=-1)
    gate = gate.sigmoid()
    return MarkovStep(out.tanh(), gate * memory + (1 - gate) * candidate.tanh())


def _seeded_affine(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """As `seeded_linear`, with a bias that begins as 0."""
    layer = seeded_linear(inputs, outputs, generator)
    layer.bias = nn.Parameter(torch.zeros(outputs))
    return layer
