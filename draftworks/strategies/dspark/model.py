"""The DSpark draft model: a DFlash backbone, a Markov head that adds to its logits, and a confidence for every proposal.

As DeepSpec and SpecForge train it, and SGLang and vLLM serve it. Place i of a block, i from 0, proposes token
anchor + 1 + i: the anchor's own place proposes too. Its logits are head·z_i + w2·n_i, with z_i the backbone's normed state and
n_i the Markov head's features of z_i and the token anchor + i: the true token in
training, the draft's own in serving. So one pass of the backbone makes a block's states, and its tokens are decoded one
after another.

The Markov heads are those of speculators 0.9.0 (`models/dspark/model_definitions.py`) and SGLang 0.5.23
(`models/dspark.py`), which agree on all three kinds and on the order of concatenation. With e = w1[previous token], h the
backbone's normed state, and [a; b] concatenation, w2·n is added to the logits, where n has the narrow width r:

    vanilla   n = e
    gated     n = σ(gate_proj·[h; e]) ⊙ e
    rnn       (g, c, o) = joint_proj·[m; e; h],   m' = σ(g) ⊙ m + (1 - σ(g)) ⊙ tanh(c),   n = tanh(o)

m is 0 at the start of a block; n uses o computed from the memory before this token, and m' is for the next place. The
confidence of a place is σ(proj·[h; e]), of the normed state and the bare embedding e with any Markov head. The two
implementations differ in that SGLang refuses a draft without a Markov head, and computes the confidence in float32.

Initially w2 and the confidence's projection are 0, so an untrained DSpark proposes what its backbone does, with confidence
one half. w1 is initialised at the scale of the normed states that it is concatenated with; a smaller scale learns more
slowly. (speculators draws w2 at random and w1 at a hundredth of that scale. No publication specifies the initial values;
from 0, no noise has to be unlearned.)

DSpark's loss: cross-entropy, total variation and confidence error of labels, in chunks of whole blocks.

With frozen head W, projection P, state z and narrow Markov features n of a label, its logits are W·z + P·n, p is their
softmax, and its teacher is q = softmax(W·last) at the position before the label, where both divide their logits by the
teacher's temperature T first. The label costs

    w·(ce_weight·CE + tv_weight·T²·‖q - p‖₁ + confidence_weight·BCE(confidence, a)),   a = clamp(1 - ½‖q - p‖₁, 0, 1)

CE is that of the label, the token itself, at temperature 1. a = Σ_v min(q_v, p_v) is the probability that rejection sampling
at T accepts a token drawn from p; it has no gradient. Only labels that count get logits. Shapes as in
draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.layers import UninitializedEmbedding, seeded_linear, uninitialized_linear
from draftworks.drafts.logit_losses import LossSums, as_logits
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import (
    JUDGED,
    BlockChunk,
    TaughtBlocks,
    Teacher,
    choose_weighting,
    is_argmax,
    judge_labels,
    sum_judged,
)
from draftworks.strategies.dflash.model import BlockDraft, BlockStates, ChooseTokens, DFlashDraft
from draftworks.strategies.dspark.options import DSparkOptions


def dspark_losses(
    blocks: TaughtBlocks,
    narrow: Tensor,
    confidences: Tensor | None,
    head: Tensor,
    projection: Tensor,
    settings: LossSettings,
) -> LossSums:
    """Return the loss and the metric sums of the labels that count.

    Sums, beside those of `sum_judged` and `acc_corrects`: `loss_sums`, what labels cost before w; `accept_len_sums`;
    `confidence_error_sums`, of |σ(confidence) - a|, with a confidence head.

    Args:
        blocks: in a block, the first labels count.
        narrow: (L, r), what the Markov head adds before its projection; r is 0 without a Markov head.
        confidences: (L,) logits; None without a confidence head.
        head: (V, H), frozen, of draft and teacher.
        projection: (V, r), trained.
    """
    assert blocks.last is not None, "the strategy reads the target's last hidden states"
    teacher, options, weigh = Teacher(blocks.last, head), settings.options, choose_weighting(settings.options)

    def make_formula(settings: LossSettings) -> Callable[..., LossSums]:
        distance_weight = 2 * options.tv_weight * settings.loss_factor  # of ½‖q - p‖₁

        def formula(
            chunk: BlockChunk,
            states: Tensor,
            narrow: Tensor,
            confidences: Tensor | None,
            positions: Tensor,
            projection: Tensor,
        ) -> LossSums:
            logits = as_logits(F.linear(states, head).addmm(narrow, projection.T))  # (l, V)
            hits = is_argmax(logits, chunk.labels)
            served = teacher.measure_acceptance(positions, logits, settings.served)
            judged = judge_labels(logits, chunk.labels, teacher.teach(positions, settings.temperature), settings)
            a = judged.acceptance
            cost, errors = options.ce_weight * judged.ce + distance_weight * judged.distance, {}
            if confidences is not None:
                confidences = confidences.to(a.dtype)
                misjudged = F.binary_cross_entropy_with_logits(confidences, a, reduction="none")
                cost = cost + options.confidence_weight * misjudged
                errors = {"confidence_error_sums": chunk.sum((confidences.sigmoid() - a).abs())}
            sums = {
                "acc_corrects": chunk.sum(hits),
                "loss_sums": chunk.sum(cost),
                "accept_len_sums": chunk.sum_prefixes(hits),
                **errors,
                **sum_judged(chunk, a, served, settings),
            }
            return LossSums(torch.dot(chunk.label_weights(weigh, judged.ce), cost), sums)

        return formula

    inputs = [blocks.proposing, narrow, confidences, blocks.positions[blocks.label_mask]]
    return settings.measure(lambda each: blocks.sum_chunks(make_formula(each), inputs, each, [projection]), JUDGED)


class MarkovStep(NamedTuple):
    """Narrow features (n, r) of a place, and the memory (n, r) for the next place; None for heads without memory."""

    narrow: Tensor
    memory: Tensor | None


class MarkovHead(nn.Module):
    """The `vanilla` Markov head and the base of the others. Parameter names are those of speculators and SGLang."""

    def __init__(self, hidden: int, vocab: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.markov_w1 = UninitializedEmbedding(vocab, rank)
        nn.init.normal_(self.markov_w1.weight, generator=generator)
        self.markov_w2 = uninitialized_linear(rank, vocab, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    @property
    def projection(self) -> Tensor:
        """w2, (V, r)."""
        return self.markov_w2.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Return e of tokens: (…) int64 to (…, r)."""
        return self.markov_w1(tokens)

    def forward_block(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return the narrow features (n, k, r) of whole blocks, from embedded previous tokens (n, k, r), states (n, k, H)."""
        return self._narrow(embedded, states)

    def step(self, embedded: Tensor, states: Tensor, memory: Tensor | None) -> MarkovStep:
        """Return those of the next place, from (n, r) and (n, H); `memory` is None at the first place."""
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
        """Return the narrow features of whole blocks; only the part that depends on the memory runs place by place."""
        rank = embedded.shape[-1]
        # (3r, r), (3r, r + H)
        of_memory, of_inputs = self.joint_proj.weight.split([rank, self.joint_proj.in_features - rank], dim=1)
        inputs = F.linear(torch.cat([embedded, states], dim=-1), of_inputs, self.joint_proj.bias)  # (n, k, 3r)
        memory = torch.zeros_like(embedded[:, 0])
        narrow: list[Tensor] = []
        for of_place in inputs.unbind(1):
            step = _recur(of_place + F.linear(memory, of_memory), memory)
            assert step.memory is not None, "this head has a memory"
            memory = step.memory
            narrow.append(step.narrow)
        return torch.stack(narrow, dim=1)  # (n, k, r)

    def step(self, embedded: Tensor, states: Tensor, memory: Tensor | None) -> MarkovStep:
        memory = torch.zeros_like(embedded) if memory is None else memory
        return _recur(self.joint_proj(torch.cat([memory, embedded, states], dim=-1)), memory)


class NoMarkovHead(nn.Module):
    """A Markov head of rank 0, which adds nothing and has no parameters."""

    projection: Tensor

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
    """The logit of the probability that a proposal is accepted."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = uninitialized_linear(inputs, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (…) from (…, inputs)."""
        return self.proj(inputs).squeeze(-1)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}


def _recur(raw: Tensor, memory: Tensor) -> MarkovStep:
    """Return one step of `rnn` from the output of `joint_proj`, (n, 3r)."""
    gate, candidate, out = raw.chunk(3, dim=-1)
    gate = gate.sigmoid()
    return MarkovStep(out.tanh(), gate * memory + (1 - gate) * candidate.tanh())


def _seeded_affine(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a `seeded_linear` with a bias that is initially 0."""
    layer = seeded_linear(inputs, outputs, generator)
    layer.bias = nn.Parameter(torch.zeros(outputs))
    return layer


class DSparkDraft(BlockDraft):
    """The trainable draft.

    Args:
        backbone: its norm, and the target's embedding and head, are used here too.
        generator: the only source of randomness of the heads' initial weights.
    """

    def __init__(self, backbone: DFlashDraft, options: DSparkOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone = backbone
        vocab, hidden = backbone.embed_tokens.shape
        rank = options.markov_rank
        make = MARKOV_HEADS[options.markov_head_type]
        self.markov_head = make(hidden, vocab, rank, generator) if rank else NoMarkovHead(vocab)
        self._with_markov = options.confidence_with_markov
        inputs = hidden + rank if self._with_markov else hidden
        self.confidence_head = ConfidenceHead(inputs) if options.confidence_head else None

    def compute_loss(self, blocks: TaughtBlocks, settings: LossSettings) -> LossSums:
        """See the base. Each label is predicted given the true token before it."""
        markov, mask, dtype = self.markov_head, blocks.label_mask, blocks.states.dtype
        embedded = markov.embed(blocks.previous).to(dtype)  # (N, size, r)
        narrow = markov.forward_block(embedded, blocks.states)[mask]
        confidences = self._confidences(blocks.proposing, embedded[mask])
        projection = markov.projection.to(dtype)
        return dspark_losses(blocks, narrow, confidences, self.backbone.target_head, projection, settings)

    @torch.no_grad()
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        markov = self.markov_head
        head, projection = self.backbone.target_head, markov.projection.to(blocks.states.dtype)
        decoded, token, memory = [], blocks.known, None
        for state in self.backbone.norm(blocks.states[:, :count]).unbind(1):
            narrow, memory = markov.step(markov.embed(token).to(state.dtype), state, memory)
            token = choose(F.linear(state, head) + F.linear(narrow, projection))
            decoded.append(token)
        return torch.stack(decoded, dim=1)

    def _confidences(self, normed: Tensor, embedded: Tensor) -> Tensor | None:
        """Return logits (L,) from states (L, H) and embedded previous tokens (L, r); None without a confidence head."""
        if self.confidence_head is None:
            return None
        return self.confidence_head(torch.cat([normed, embedded], dim=-1) if self._with_markov else normed)
