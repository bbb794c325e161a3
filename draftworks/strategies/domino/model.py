"""The Domino draft model: a DFlash backbone, and a correction of its logits by the previous tokens of the block.

As SpecForge trains it and SGLang serves it (`domino_greedy_rollout` of SGLang 0.5.23). Place i of a block, i from 0,
proposes token anchor + 1 + i. With z_i the backbone's state for it, normed as the head reads it, and

    g_i = GRU(embeddings of the tokens anchor … anchor + i)        the state after the last of them, begun with 0
    logits_i = head·z_i + [i ≥ pure_draft_prefix_len] · embed_proj.2 · silu(embed_proj.0 · cat(z_i, g_i))

one pass of the backbone makes the states of a block; then its tokens are decoded one after another, each from its corrected
logits. With `shift_label`, z_i is the state at place i of the block, so the anchor's own place proposes too; without it, the
state at place i + 1, as in DFlash.

Initially `embed_proj.2` is 0, so an untrained Domino proposes what its backbone does. (SpecForge draws it at random. No
publication specifies the initial value; from 0, no noise has to be unlearned.)

Domino's loss: cross-entropies of the corrected and the base logits, in chunks of whole blocks.

With frozen head W, projection P, state z and bottleneck e of a label, its base logits are b = W·z, its corrected logits
f = b + P·e, and its loss is w·((1 - λ)·CE(f) + λ·CE(b)). Only labels that count get logits. Shapes as in
draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.layers import allocate, seeded_linear, uninitialized_linear
from draftworks.drafts.logit_losses import LossSums, as_logits, score_labels
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import BlockChunk, TaughtBlocks, choose_weighting, is_argmax
from draftworks.strategies.dflash.model import BlockDraft, BlockStates, ChooseTokens, DFlashDraft
from draftworks.strategies.domino.options import DominoOptions


def domino_cross_entropy(
    blocks: TaughtBlocks, bottlenecks: Tensor, head: Tensor, projection: Tensor, settings: LossSettings
) -> LossSums:
    """Return the loss and the metric sums of the labels that count.

    Sums: `acc_corrects`, `loss_sums` and `accept_len_sums` with the correction, `base_*` without. w is from the
    cross-entropies of the corrected logits, for both losses.

    Args:
        bottlenecks: (L, E), 0 where nothing is corrected.
        head: (V, H), frozen.
        projection: (V, E), trained.
    """
    weigh, share = choose_weighting(settings.options), _find_base_share(settings)

    def formula(chunk: BlockChunk, states: Tensor, bottlenecks: Tensor, projection: Tensor) -> LossSums:
        base = F.linear(states, head)  # (l, V)
        ce, hits = score_labels(as_logits(base.addmm(bottlenecks, projection.T)), chunk.labels)  # (l,) each
        if share > 0:
            base_ce, base_hits = score_labels(as_logits(base), chunk.labels)
            cost = (1 - share) * ce + share * base_ce
        else:
            cost, base_hits = ce, is_argmax(base, chunk.labels)
        sums = {
            "acc_corrects": chunk.sum(hits),
            "loss_sums": chunk.sum(ce),
            "base_acc_corrects": chunk.sum(base_hits),
            "accept_len_sums": chunk.sum_prefixes(hits),
            "base_accept_len_sums": chunk.sum_prefixes(base_hits),
        }
        return LossSums(torch.dot(chunk.label_weights(weigh, ce), cost), sums)

    return blocks.sum_chunks(formula, [blocks.proposing, bottlenecks], settings, [projection])


def _find_base_share(settings: LossSettings) -> float:
    """Return λ; 0 in evaluations."""
    ctx = settings.ctx
    return settings.options.compute_lambda_base(ctx.global_step, ctx.total_steps) if ctx.training else 0.0


class DominoCorrection(nn.Module):
    """What the previous tokens of a block add to a proposal's logits. Parameter names are those of SpecForge and SGLang."""

    def __init__(self, hidden: int, vocab: int, options: DominoOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.prefix_gru = _seeded_gru(hidden, options.gru_hidden_dim, generator)
        narrow = seeded_linear(hidden + options.gru_hidden_dim, options.emb_dim, generator)
        out = uninitialized_linear(options.emb_dim, vocab, bias=False)
        nn.init.zeros_(out.weight)
        self.embed_proj = nn.Sequential(narrow, nn.SiLU(), out)

    @property
    def projection(self) -> Tensor:
        """The output projection, (V, E)."""
        return cast(nn.Linear, self.embed_proj[2]).weight

    def encode_prefixes(self, embedded: Tensor) -> Tensor:
        """Return the GRU states after each token: (N, k, H) to (N, k, G)."""
        return self.prefix_gru(embedded)[0]

    def advance(self, embedded: Tensor, prefix: Tensor | None) -> Tensor:
        """Return the GRU state (n, G) after one more token, embedded (n, H), than `prefix` (n, G)."""
        return self.prefix_gru(embedded[:, None], None if prefix is None else prefix[None])[1][0]

    def compute_bottleneck(self, states: Tensor, prefixes: Tensor) -> Tensor:
        """Return (L, E) from states (L, H) and GRU states (L, G)."""
        narrow, activation, _ = self.embed_proj
        return activation(narrow(torch.cat([states, prefixes], dim=-1)))


class DominoDraft(BlockDraft):
    """The trainable draft.

    Args:
        backbone: its norm, and the target's embedding and head, are used here too.
        generator: the only source of randomness of the correction's initial weights.
    """

    def __init__(self, backbone: DFlashDraft, options: DominoOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone = backbone
        vocab, hidden = backbone.embed_tokens.shape
        self.correction = DominoCorrection(hidden, vocab, options, generator)
        self._first_place = options.block_size - options.labels
        self._pure_prefix = options.pure_draft_prefix_len

    def compute_loss(self, blocks: TaughtBlocks, settings: LossSettings) -> LossSums:
        """See the base. Each label is predicted given the true tokens before it."""
        mask, correction = blocks.label_mask, self.correction
        prefixes = correction.encode_prefixes(self._embedded(blocks.previous))[mask]  # (L, G)
        is_corrected = torch.arange(mask.shape[1], device=mask.device) >= self._pure_prefix
        bottlenecks = correction.compute_bottleneck(blocks.proposing, prefixes)
        bottlenecks = bottlenecks * is_corrected.expand_as(mask)[mask][:, None]
        return domino_cross_entropy(blocks, bottlenecks, self.backbone.target_head, correction.projection, settings)

    @torch.no_grad()
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        normed = self.backbone.norm(blocks.states[:, self._first_place : self._first_place + count])
        base = F.linear(normed, self.backbone.target_head)  # (n, count, V)
        decoded, token, prefix = [], blocks.known, None
        for place in range(count):
            logits = base[:, place]
            prefix = self.correction.advance(self._embedded(token), prefix)
            if place >= self._pure_prefix:
                bottleneck = self.correction.compute_bottleneck(normed[:, place], prefix)
                logits = logits + F.linear(bottleneck, self.correction.projection)
            token = choose(logits)
            decoded.append(token)
        return torch.stack(decoded, dim=1)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.backbone.embed(tokens).to(self.correction.projection.dtype)


class _Gru(nn.GRU):
    def flatten_parameters(self) -> None:
        """Do nothing. On CUDA, torch's own method moves the weights to another buffer at the first forward after they were
        replaced. FSDP replaces them by views of the buffer that it gathers into at every step: after the move they would
        no longer be updated, and the GRU would compute with its first weights. cuDNN joins scattered weights itself.
        """


def _seeded_gru(inputs: int, hidden: int, generator: torch.Generator) -> nn.GRU:
    """Return a GRU without biases, uniform in ±1/sqrt(hidden), drawn from `generator` alone."""
    gru = allocate(_Gru(inputs, hidden, batch_first=True, bias=False, device="meta"))
    bound = 1 / math.sqrt(hidden)
    for weight in gru.parameters():
        nn.init.uniform_(weight, -bound, bound, generator=generator)
    return gru
