"""The draft of MTP fine-tuning: the target's own layer for further tokens, unrolled on its own states.

The layer reads, at position t, the state of position t and the token t+1: `fc` of both, normed, one decoder layer of the
target's class, a norm. The normed state gives the logits of token t+2 and is the state of the next step (SGLang 0.5.23 and
speculators 0.9.0; vLLM feeds DeepSeek's layer the state before the norm).

The loss of MTP fine-tuning: cross-entropy of the tokens at every step under the target's frozen head, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.drafts.layers import argmax_of_head, uninitialized_linear
from draftworks.drafts.logit_losses import LossSums, as_logits, chunked_loss, score_labels
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.dflash.model import CastHead
from draftworks.strategies.mtp.target_head import TargetHead, build_modules

CHUNK_ELEMENTS = 2**22
"""Logits held at a time; at least MIN_CHUNK_LABELS labels."""
MIN_CHUNK_LABELS = 64


@dataclass(frozen=True)
class LabelChunk:
    """Some of the labels, (n,) int64, with their steps, (n,) int64; a `LossChunk`."""

    index: slice
    labels: Tensor
    steps: Tensor


def make_step_weights(decay: float, steps: int) -> list[float]:
    """Return decay^i / Σ_j decay^j for i = 0 … steps − 1 (FastMTP, arXiv 2509.18362, equation 2)."""
    weights = [decay**step for step in range(steps)]
    return [weight / sum(weights) for weight in weights]


def next_token_losses(
    states: Tensor, head: Tensor, labels: Sequence[Tensor], step_weights: Sequence[float]
) -> LossSums:
    """Return the weighted cross-entropy of all labels; by step, (T,) each, those unweighted and the labels that are the argmax.

    Args:
        states: (L, H), normed, of the labels of step 0, then of step 1, …
        head: (V, H), frozen.
        labels: T tensors of token ids, L together.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    weights = torch.tensor(step_weights, dtype=wide, device=states.device)  # (T,)
    steps = torch.arange(len(labels), device=states.device)
    numbers = steps.repeat_interleave(torch.tensor([len(each) for each in labels], device=states.device))  # (L,)

    def formula(chunk: LabelChunk, states: Tensor) -> LossSums:
        ce, hits = score_labels(as_logits(F.linear(states, head)), chunk.labels)  # (n,) each, of logits (n, V)

        def by_step(values: Tensor) -> Tensor:
            sums = torch.zeros(len(weights), dtype=torch.float64, device=values.device)
            return sums.index_add_(0, chunk.steps, values.detach().double())

        return LossSums(torch.dot(weights[chunk.steps], ce), {"loss_sums": by_step(ce), "acc_corrects": by_step(hits)})

    return chunked_loss(formula, _split(torch.cat(list(labels)), numbers, len(head)), [states])


def _split(labels: Tensor, steps: Tensor, vocab_size: int) -> Iterator[LabelChunk]:
    """Yield chunks of labels; at least one, which may be empty."""
    at_once = max(MIN_CHUNK_LABELS, CHUNK_ELEMENTS // vocab_size)
    for start in range(0, max(len(labels), 1), at_once):
        part = slice(start, start + at_once)
        yield LabelChunk(part, labels[part], steps[part])


Attends = Literal["chain", "step"]


class KeyCache:
    """Keys and values of the rows seen so far, as a layer of transformers adds to them: the last but one dimension grows."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self._keys, self._values = keys, values

    def update(self, keys: Tensor, values: Tensor, *place: Any) -> tuple[Tensor, Tensor]:
        """Append rows (B, heads, n, ·), and return all."""
        self._keys = keys if self._keys is None else torch.cat([self._keys, keys], dim=-2)
        self._values = values if self._values is None else torch.cat([self._values, values], dim=-2)
        return self._keys, self._values

    def fork(self) -> KeyCache:
        """Return a cache of the same rows that grows by itself."""
        return KeyCache(self._keys, self._values)


class MtpDraft(nn.Module):
    """The trainable layer. Embedding and head of the target are buffers outside the checkpoint."""

    embed_tokens: Tensor
    own_target_head: Tensor | None

    def __init__(self, head: TargetHead, target: TargetParts) -> None:
        super().__init__()
        modules = build_modules(head.config)
        self.hidden_norm, self.token_norm, self.norm = modules.norms
        self.fc = uninitialized_linear(2 * target.hidden_size, target.hidden_size, bias=False)
        self.layer = modules.layer
        self._config = modules.config
        self._rotary = (modules.rotary,)  # in a tuple: no module of the draft, so its frequencies stay in float32
        head.require_complete(set(self.state_dict()))
        if not target.embedding.is_meta:
            self.to_empty(device=torch.get_default_device())
            self.load_state_dict(head.read())
        self.register_buffer("embed_tokens", target.embedding, persistent=False)
        self.register_buffer("own_target_head", None if target.tied else target.head, persistent=False)
        self._cast_head = CastHead(target.head, target.head)

    @property
    def target_head(self) -> Tensor:
        """The target's head (V, H) in the draft's dtype; if the files have another, it is cast once and kept."""
        stored = self.embed_tokens if self.own_target_head is None else self.own_target_head
        dtype = self.fc.weight.dtype
        if self._cast_head.of is not stored or self._cast_head.head.dtype != dtype:
            self._cast_head = CastHead(stored, stored.to(dtype))
        return self._cast_head.head

    def step(
        self, states: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor, cache: KeyCache | None
    ) -> Tensor:
        """Return the normed states (B, n, H) of one step.

        Args:
            states: (B, n, H), of the target or of the step before.
            tokens: (B, n), the token after each.
            positions: (n,), rotary.
            visible: (n, m) bool over the m rows of the cache, these n included.
        """
        dtype = self.fc.weight.dtype
        embedded = F.embedding(tokens, self.embed_tokens).to(dtype)
        hidden = self.fc(torch.cat([self.token_norm(embedded), self.hidden_norm(states.to(dtype))], dim=-1))
        # Grouped products of experts are for GPUs; on a CPU they are slower, and know no float64.
        self._config._experts_implementation = "grouped_mm" if hidden.is_cuda else "eager"
        rotation = self._rotary[0](hidden, positions.expand(len(hidden), -1))
        found = self.layer(
            hidden, position_embeddings=rotation, attention_mask=visible[None, None], past_key_values=cache
        )
        return self.norm(found)

    def unroll(
        self,
        last: Tensor,
        steps: int,
        documents: Documents,
        attends: Attends,
        choose_tokens: Callable[[int, Tensor | None], Tensor],
    ) -> list[Tensor]:
        """Return the normed states of every step, (B, S, H) each.

        Args:
            last: (B, S, H), the target's last hidden states, normed.
            choose_tokens: from the step, and the states of the step before it, to the tokens (B, S) that it reads.
        """
        ids, positions = documents.document_ids, documents.positions
        causal = (ids[:, None] == ids) & (positions[:, None] >= positions)  # (S, S)
        own = torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        cache = KeyCache() if attends == "chain" else None
        states: list[Tensor] = []
        for step in range(steps):
            before = states[-1] if states else None
            tokens = choose_tokens(step, before)
            visible = torch.cat([causal, *[own] * step], dim=1) if cache is not None else causal
            moved = positions + step if cache is not None else positions
            states.append(self.step(last if before is None else before, tokens, moved, visible, cache))
        return states

    @torch.no_grad()
    def propose(
        self, input_ids: Tensor, last: Tensor, position_mask: Tensor, count: int, documents: Documents
    ) -> Tensor:
        """Return the greedy chain that a server would propose at each of many positions.

        Args:
            position_mask: (B, S) bool: position t proposes tokens t+2 … t+1+count, having seen tokens up to t+1.

        Returns:
            (B, S, count) int64 ids of the target; -1 at other positions.
        """
        active, proposed = ActivePositions.where(position_mask), []

        def choose(states: Tensor) -> Tensor:
            proposed.append(argmax_of_head(self.target_head, active.gather(states)))
            tokens = torch.zeros_like(input_ids).flatten()
            tokens[active.index] = proposed[-1]
            return tokens.view_as(input_ids)

        def choose_tokens(step: int, states: Tensor | None) -> Tensor:
            return documents.shift_left(input_ids, 1) if states is None else choose(states)

        choose(self.unroll(last, count, documents, "chain", choose_tokens)[-1])
        proposals = input_ids.new_full((input_ids.numel(), count), -1)
        proposals[active.index] = torch.stack(proposed, dim=-1)
        return proposals.unflatten(0, input_ids.shape)

    def forward(
        self,
        input_ids: Tensor,
        last: Tensor,
        label_mask: Tensor,
        step_weights: Sequence[float],
        attends: Attends,
        documents: Documents,
    ) -> LossSums:
        """Unroll on the sample's own tokens, and compare with them; called once per micro-batch.

        Args:
            label_mask: (T, B, S) bool: step i at position t is compared with token t+2+i.
            step_weights: T weights of the steps' summed losses.
        """

        def choose_tokens(step: int, states: Tensor | None) -> Tensor:
            return documents.shift_left(input_ids, 1 + step)

        unrolled = self.unroll(last, len(label_mask), documents, attends, choose_tokens)
        states = torch.cat([each[mask] for each, mask in zip(unrolled, label_mask)])  # (L, H)
        labels = [documents.shift_left(input_ids, 2 + step)[mask] for step, mask in enumerate(label_mask)]
        return next_token_losses(states, self.target_head, labels, step_weights)
