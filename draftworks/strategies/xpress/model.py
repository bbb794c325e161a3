"""The XPress draft model: a DFlash backbone, and a refiner that adds to its logits, asked again in a few parallel passes.

As speculators 0.9.0 trains it and vLLM's #54448 serves it. Place p of a block, p from 1, proposes token anchor + p. Its
logits are head·h_p + readout·n_p, with h_p the backbone's normed state and n_p the refiner's features of the block's states
and of the tokens before p. The first tokens are the argmaxes of head·h_p; then
every pass computes all places at once from the tokens of the pass before (Jacobi iteration). A place depends on earlier ones
only, so after `jacobi_passes` passes so many first tokens are those of decoding one after another.

What the tokens before a place, and the whole block's states, add to its logits:

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

XPress's loss: that of a pass on the true tokens, of passes on the draft's own, and of the backbone, in chunks of blocks.

With frozen head W, readout R, state h and refiner features n of a label, the logits of a pass are W·h + R·n, those of the
backbone W·h. p is the softmax of such logits, q = softmax(W·last) at the position before the label is its teacher, both of
logits divided by the teacher's temperature T, and a label costs

    c = ce_weight·CE + tv_weight·T²·½‖q - p‖₁

CE is that of the label, the token itself, at temperature 1. (speculators 0.9.0 takes the argmax of q, and the token with `ce_from_data`.) The
loss adds up, over the labels,

    w·c(true tokens) + consistency_weight·mean_j w_j·c(pass j on its own tokens) + base_weight·w_b·c(backbone)

where each weight w comes from the cross-entropies of its own logits. Only labels that count get logits. Shapes as in
draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.layers import UninitializedEmbedding, seeded_linear, uninitialized_linear
from draftworks.drafts.logit_losses import LossSums, as_logits, find_argmax
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import (
    JUDGED,
    BlockChunk,
    JudgedLabels,
    TaughtBlocks,
    Teacher,
    choose_weighting,
    is_argmax,
    judge_labels,
    sum_judged,
)
from draftworks.strategies.dflash.model import BlockDraft, BlockStates, ChooseTokens, DFlashDraft
from draftworks.strategies.xpress.options import XPressOptions


def xpress_losses(
    blocks: TaughtBlocks, narrow: Tensor, head: Tensor, projection: Tensor, settings: LossSettings
) -> LossSums:
    """Return the loss and the metric sums of the labels that count.

    Sums, all but the last of the pass on the true tokens, beside those of `sum_judged` and `acc_corrects`: `loss_sums`, what
    labels cost before w; `accept_len_sums`; `base_accept_len_sums`, without the refiner.

    Args:
        narrow: (L, 1 + rounds, r), the refiner's features on the true tokens and on those of each round.
        head: (V, H), frozen, of draft and teacher.
        projection: (V, r), trained.
    """
    assert blocks.last is not None, "the strategy reads the target's last hidden states"
    teacher, options, weigh = Teacher(blocks.last, head), settings.options, choose_weighting(settings.options)

    def make_formula(settings: LossSettings) -> Callable[..., LossSums]:
        def cost_of(judged: JudgedLabels) -> Tensor:
            return options.ce_weight * judged.ce + options.tv_weight * settings.loss_factor * judged.distance

        def weighted(chunk: BlockChunk, judged: JudgedLabels) -> Tensor:
            """Return the loss of each set of logits, (P,)."""
            weights = [chunk.label_weights(weigh, ce) for ce in judged.ce]
            return (torch.stack(weights) * cost_of(judged)).sum(-1)

        def formula(
            chunk: BlockChunk, states: Tensor, narrow: Tensor, positions: Tensor, projection: Tensor
        ) -> LossSums:
            base = F.linear(states, head)[None]  # (1, l, V)
            logits = as_logits(F.linear(narrow.transpose(0, 1).contiguous(), projection).add_(base))  # (P, l, V)
            base = as_logits(base)
            hits, base_hits = (is_argmax(each[0], chunk.labels) for each in (logits, base))  # (l,)
            served = teacher.measure_acceptance(positions, logits[0], settings.served)
            soft = teacher.teach(positions, settings.temperature)
            judged = judge_labels(logits, chunk.labels, soft, settings)
            loss, *rounds = weighted(chunk, judged).unbind()
            if rounds:
                loss = loss + options.consistency_weight * torch.stack(rounds).mean()
            if options.base_weight > 0:
                of_base = weighted(chunk, judge_labels(base, chunk.labels, soft, settings))
                loss = loss + options.base_weight * of_base.sum()
            sums = {
                "acc_corrects": chunk.sum(hits),
                "loss_sums": chunk.sum(cost_of(judged)[0]),
                "accept_len_sums": chunk.sum_prefixes(hits),
                "base_accept_len_sums": chunk.sum_prefixes(base_hits),
                **sum_judged(chunk, judged.acceptance[0], served, settings),
            }
            return LossSums(loss, sums)

        return formula

    inputs, passes = [blocks.proposing, narrow, blocks.positions[blocks.label_mask]], 1 + narrow.shape[1]
    return settings.measure(
        lambda each: blocks.sum_chunks(make_formula(each), inputs, each, [projection], passes), JUDGED
    )


class Refiner(nn.Module):
    """The part of a draft that is asked again in every pass."""

    def __init__(self, hidden: int, vocab: int, options: XPressOptions, generator: torch.Generator) -> None:
        super().__init__()
        rank, wide = options.refiner_rank, options.refiner_rank * options.mlp_ratio
        self.token_embed = UninitializedEmbedding(vocab, rank)
        nn.init.normal_(self.token_embed.weight, generator=generator)
        self.down_h = seeded_linear(hidden, rank, generator)
        self.down_g = seeded_linear(hidden, rank, generator)
        self.in_proj = seeded_linear(3 * rank, rank, generator)
        self.mix_l = nn.Parameter(torch.zeros(rank, options.block_size, options.block_size))
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


class XPressDraft(BlockDraft):
    """The trainable draft.

    Args:
        backbone: its norm, and the target's embedding and head, are used here too.
        generator: the only source of randomness of the refiner's initial weights.
    """

    def __init__(self, backbone: DFlashDraft, options: XPressOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone = backbone
        vocab, hidden = backbone.embed_tokens.shape
        self.refiner_head = Refiner(hidden, vocab, options, generator)
        self._passes = options.jacobi_passes

    def compute_loss(self, blocks: TaughtBlocks, settings: LossSettings) -> LossSums:
        refiner, states, known = self.refiner_head, blocks.states, blocks.known
        read = refiner.read_states(states)
        played = (blocks.labels, *self._play_rounds(states, read, known, settings.options))
        narrow = [refiner.forward_block(read, known, tokens)[blocks.label_mask] for tokens in played]
        projection = refiner.projection.to(states.dtype)
        return xpress_losses(blocks, torch.stack(narrow, dim=1), self.backbone.target_head, projection, settings)

    @torch.no_grad()
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        """See the base. All passes but the last take the argmax, so no token that `choose` returns is looked at."""
        normed = self.backbone.norm(blocks.states)
        read = self.refiner_head.read_states(normed)
        base = self._score_alone(normed, count)  # (n, count, V)
        logits = base
        for _ in range(self._passes):
            logits = self._refine(base, read, blocks.known, find_argmax(logits))
        return torch.stack([choose(place) for place in logits.unbind(1)], dim=1)

    def _score_alone(self, normed: Tensor, count: int) -> Tensor:
        """Return the backbone's logits (n, count, V) of the first `count` proposals."""
        # Of a slice, torch would multiply block by block, in twice the time.
        return F.linear(normed[:, 1 : 1 + count].contiguous(), self.backbone.target_head)

    def _refine(self, base: Tensor, read: Tensor, known: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits (n, k, V) after a pass over tokens (n, k)."""
        narrow = self.refiner_head.forward_block(read, known, tokens)
        return base + F.linear(narrow, self.refiner_head.projection.to(narrow.dtype))

    @torch.no_grad()
    def _play_rounds(self, normed: Tensor, read: Tensor, known: Tensor, options: XPressOptions) -> list[Tensor]:
        """Return the tokens (N, size - 1) that each pass on the draft's own tokens is given."""
        rounds = options.consistency_passes if options.consistency_weight > 0 else 0
        if rounds == 0:
            return []
        played: list[list[Tensor]] = []
        pieces = (part.split(options.choose_chunk_blocks(known.device)) for part in (normed, read, known))
        for states, shared, anchors in zip(*pieces, strict=True):
            base = self._score_alone(states, states.shape[1] - 1)
            tokens = [find_argmax(base)]
            while len(tokens) < rounds:
                tokens.append(find_argmax(self._refine(base, shared, anchors, tokens[-1])))
            played.append(tokens)
        return [torch.cat(tokens) for tokens in zip(*played, strict=True)]
