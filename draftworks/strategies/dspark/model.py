"""The DSpark draft model: a DFlash backbone, a Markov head that adds to its logits, and a confidence for every proposal.

As DeepSpec and SpecForge train it, and SGLang and vLLM serve it. Place i of a block, i from 0, proposes token
anchor + 1 + i: the anchor's own place proposes too. Its logits are head·z_i + w2·n_i, with z_i the backbone's normed state and
n_i the Markov head's features of z_i and the token anchor + i (see draftworks.strategies.dspark.heads): the true token in
training, the draft's own in serving. So one pass of the backbone makes a block's states, and its tokens are decoded one
after another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks
from draftworks.strategies.dflash.block_drafter import ChooseTokens, SequentialBlockDraft
from draftworks.strategies.dflash.model import BlockStates, DFlashDraft
from draftworks.strategies.dflash.teacher import locate_teachers
from draftworks.strategies.dspark.heads import MARKOV_HEADS, ConfidenceHead, NoMarkovHead
from draftworks.strategies.dspark.loss import DSparkLosses, DSparkObjective, DSparkStates, dspark_losses


class DSparkSizes(NamedTuple):
    """Sizes of the heads; `markov_rank` 0 is no Markov head."""

    markov_head_type: str
    markov_rank: int
    confidence_head: bool
    confidence_with_markov: bool


class DSparkDraft(SequentialBlockDraft):
    """The trainable draft.

    Args:
        backbone: its norm, and the target's embedding and head, are used here too.
        generator: the only source of randomness of the heads' initial weights.
    """

    def __init__(self, backbone: DFlashDraft, sizes: DSparkSizes, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone = backbone
        vocab, hidden = backbone.embed_tokens.shape
        rank = sizes.markov_rank
        make = MARKOV_HEADS[sizes.markov_head_type]
        self.markov_head = make(hidden, vocab, rank, generator) if rank else NoMarkovHead(vocab)
        self._with_markov = sizes.confidence_with_markov
        inputs = hidden + rank if self._with_markov else hidden
        self.confidence_head = ConfidenceHead(inputs) if sizes.confidence_head else None

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        last: Tensor,
        blocks: Blocks,
        labels: Tensor,
        label_mask: Tensor,
        objective: DSparkObjective,
    ) -> DSparkLosses:
        """Return the loss of the labels that count, each given the true token before it; called once per micro-batch.

        Args:
            last: (B, S, H), the target's last hidden states.
            labels, label_mask: (B, A, size), int64 and bool; in a block, the first labels count.
        """
        backbone, markov = self.backbone, self.markov_head
        taught = label_mask.any(-1)  # (B, A), on at N blocks
        states = backbone.compute_states(input_ids, backbone.fuse_context(features), blocks)[taught]  # (N, size, H)
        known = input_ids.gather(1, blocks.anchors)[taught]
        labels, label_mask = labels[taught], label_mask[taught]
        normed = backbone.norm(states)
        embedded = markov.embed(torch.cat([known[:, None], labels[:, :-1]], dim=1)).to(normed.dtype)  # (N, size, r)
        inputs = DSparkStates(
            states=normed[label_mask],
            narrow=markov.forward_block(embedded, normed)[label_mask],
            confidences=self._confidences(normed[label_mask], embedded[label_mask]),
            positions=locate_teachers(blocks, input_ids.shape[1])[taught][label_mask],
        )
        projection = markov.projection.to(normed.dtype)
        return dspark_losses(
            inputs, backbone.target_head, projection, last.flatten(0, 1), labels, label_mask, objective
        )

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
