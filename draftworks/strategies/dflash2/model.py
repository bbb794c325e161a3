"""The DFlash 2 draft model: DFlash's layers with convolutions, and a selector that joins the candidates of a block to a path.

As speculators 0.9.0 (`models/dflash2/`) trains it and SGLang 0.5.23 (`models/dflash.py`) serves it. Place i of a block, i
from 1, proposes token anchor + i. With h_i the backbone's state there, normed as the head reads it, and C_i the k likeliest
tokens of its logits u_i, the score of candidate c in C_i after the token `previous` is

    score_i(c) = u_i(c) + ⟨predecessor_codebook[previous] ⊙ hidden_projection·h_i, successor_codebook[c]⟩

The tokens of a block are chosen one after another, `previous` being the anchor and then the token that was just chosen: the
candidate of the highest score, or one drawn from the softmax of the k scores, which is then the q of rejection sampling. No
other token is ever proposed.

Initially `successor_codebook` is 0, so an untrained DFlash 2 proposes what DFlash does. (speculators draws all three factors
with a deviation of 0.02. From 0, no noise has to be unlearned.)

Its layers have dynamic convolutions inside a block, on the input and on the output of a sublayer.

With the channels in groups of g, x_p the normed state at place p of a block, t the taps and s the side (0 the sublayer's
input, 1 its output):

    delta_p = kernel_projection · x_p          a number per side, tap and group
    y_p = Σ_t (base_kernel[s, t] + delta_p[s, t, group]) ⊙ v_{p-t}      over the p - t inside the block

v is x itself on the input side, the sublayer's output on the other; both sides take delta from x. Definition and names of
the parameters are those of speculators 0.9.0 (`models/dflash2/model_definitions.py`) and SGLang 0.5.23 (`models/dflash.py`).

DFlash 2's loss: cross-entropies of the backbone's logits and of the selector's scores, in chunks of whole blocks.

With frozen head W and normed state z of a label y, its logits are u = W·z, C are the k likeliest tokens of u, and s the
selector's scores of C after the true token before the label. The label costs

    w(CE(u))·CE(u) + alpha·w(CE(s))·CE(s)

Where y is not in C it takes the place of the least likely candidate, so that CE(s) is always defined; what is counted as
right and as accepted demands that it was there, because a server proposes nothing else. Gradients of CE(s) also reach z, by u
and by the selector's context, as in speculators 0.9.0 (`models/dflash2/metrics.py`). Only labels that count get logits.
Shapes as in draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.attention import DraftAttention, KeyValue, Window
from draftworks.drafts.layers import Rotation, seeded_linear, uninitialized_linear
from draftworks.drafts.logit_losses import LossSums, as_logits, at_least_float32, find_largest, log_probs_at
from draftworks.drafts.objectives import LossSettings
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.dflash.loss import BlockChunk, TaughtBlocks, choose_weighting
from draftworks.strategies.dflash.model import (
    BlockDraft,
    BlockStates,
    ChooseTokens,
    DFlashDraft,
    DFlashLayer,
    DFlashSizes,
)
from draftworks.strategies.dflash2.options import DFlash2Options


def dflash2_cross_entropies(
    blocks: TaughtBlocks, contexts: Tensor, head: Tensor, successors: Tensor, settings: LossSettings
) -> LossSums:
    """Return the loss and the metric sums of the labels that count.

    Sums: `loss_sums` and `selector_loss_sums`, of CE(u) + alpha·CE(s) and of CE(s), before w; `acc_corrects`, labels that the
    selector chooses; `recall_sums`, labels among the candidates; `accept_len_sums` and `base_accept_len_sums`, total length of
    the blocks' prefixes that the selector, and u, get right.

    Args:
        contexts: (L, r), the selector's factors of the token before and of the state, multiplied.
        head: (V, H), frozen.
        successors: (V, r), trained.
    """
    options, weigh = settings.options, choose_weighting(settings.options)
    alpha = options.selector_loss_alpha

    def formula(chunk: BlockChunk, states: Tensor, contexts: Tensor, successors: Tensor) -> LossSums:
        logits = as_logits(F.linear(states, head))  # (l, V)
        served = find_largest(logits, options.selector_top_k)
        taught = teach_candidates(served, chunk.labels)
        log_probs = log_probs_at(logits, torch.cat([chunk.labels[:, None], taught.ids], dim=1))
        ce = -log_probs[:, 0]  # (l,)
        # log p in place of u moves all scores of a label by the same, which changes neither their softmax nor their order.
        scores = score_candidates(log_probs[:, 1:], contexts, successors, taught.ids)
        selector_ce = F.cross_entropy(scores, taught.label_at, reduction="none")
        loss = torch.dot(chunk.label_weights(weigh, ce), ce)
        loss = loss + alpha * torch.dot(chunk.label_weights(weigh, selector_ce), selector_ce)
        hits = taught.is_served & (scores.detach().argmax(-1) == taught.label_at)  # (l,)
        sums = {
            "acc_corrects": chunk.sum(hits),
            "loss_sums": chunk.sum(ce + alpha * selector_ce),
            "selector_loss_sums": chunk.sum(selector_ce),
            "recall_sums": chunk.sum(taught.is_served),
            "accept_len_sums": chunk.sum_prefixes(hits),
            "base_accept_len_sums": chunk.sum_prefixes(served[:, 0] == chunk.labels),
        }
        return LossSums(loss, sums)

    return blocks.sum_chunks(formula, [blocks.proposing, contexts], settings, [successors])


class TaughtCandidates(NamedTuple):
    """Candidates (l, k) int64 that hold every label, where it is among them (l,), and whether it was before (l,) bool."""

    ids: Tensor
    label_at: Tensor
    is_served: Tensor


def teach_candidates(served: Tensor, labels: Tensor) -> TaughtCandidates:
    """Return the candidates of training: a label (l,) that is not among the served ones (l, k) replaces the last."""
    matches = served == labels[:, None]
    is_served = matches.any(-1)
    last = served.shape[1] - 1
    ids = torch.cat([served[:, :-1], torch.where(is_served, served[:, -1], labels)[:, None]], dim=1)
    return TaughtCandidates(ids, torch.where(is_served, matches.int().argmax(-1), last), is_served)


def score_candidates(unary: Tensor, contexts: Tensor, successors: Tensor, candidates: Tensor) -> Tensor:
    """Return the scores (n, k) of candidates (n, k) from their logits (n, k), contexts (n, r) and factors (V, r)."""
    chosen = F.embedding(candidates, successors).to(contexts.dtype)  # (n, k, r)
    return unary + (chosen @ contexts[..., None]).squeeze(-1).to(unary.dtype)


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


class CandidateSelector(nn.Module):
    """The factors of the selector. Parameter names are those of speculators and SGLang."""

    def __init__(self, hidden: int, vocab: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        nn.init.normal_(self.predecessor_codebook, generator=generator)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = seeded_linear(hidden, rank, generator)

    def project(self, states: Tensor) -> Tensor:
        """Return (…, r) from normed states (…, H)."""
        return self.hidden_projection(states)

    def remember(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factor (…, r) of the tokens (…) before a place."""
        return F.embedding(tokens, self.predecessor_codebook).to(dtype)


class DFlash2Draft(BlockDraft):
    """The trainable draft.

    Args:
        backbone: its norm, and the target's embedding and head, are used here too.
        generator: the only source of randomness of the selector's initial weights.
    """

    def __init__(self, backbone: DFlashDraft, options: DFlash2Options, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone = backbone
        vocab, hidden = backbone.embed_tokens.shape
        self.candidate_selector = CandidateSelector(hidden, vocab, options.selector_rank, generator)
        self._top_k = options.selector_top_k

    def compute_loss(self, blocks: TaughtBlocks, settings: LossSettings) -> LossSums:
        """See the base. Each label is predicted given the true token before it."""
        selector, states = self.candidate_selector, blocks.proposing
        contexts = selector.remember(blocks.previous[blocks.label_mask], states.dtype) * selector.project(states)
        return dflash2_cross_entropies(
            blocks, contexts, self.backbone.target_head, selector.successor_codebook, settings
        )

    @torch.no_grad()
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        """See the base. Tokens that are no candidates have the logit -inf."""
        selector = self.candidate_selector
        normed = self.backbone.norm(blocks.states[:, 1 : 1 + count])
        unary, candidates = at_least_float32(F.linear(normed, self.backbone.target_head)).topk(self._top_k, dim=-1)
        projected, vocab = selector.project(normed), len(selector.successor_codebook)
        decoded, token = [], blocks.known
        for place in range(count):
            context = selector.remember(token, normed.dtype) * projected[:, place]  # (n, r)
            ids = candidates[:, place]
            scores = score_candidates(unary[:, place], context, selector.successor_codebook, ids)  # (n, k)
            token = choose(scores.new_full((len(scores), vocab), -torch.inf).scatter_(1, ids, scores))
            decoded.append(token)
        return torch.stack(decoded, dim=1)
