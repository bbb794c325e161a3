"""The part of the strategy that needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.documents import collate_features
from draftworks.drafts.layers import seeded_linear
from draftworks.drafts.objectives import token_mean_label_mask
from draftworks.drafts.strategy import Drafter, DraftStrategy, Proposal, StepContext, StepOutput
from draftworks.features.contracts import TrainBatch


class OneHead(nn.Module):
    def __init__(self, target, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.mix = seeded_linear(2 * target.hidden_size, target.hidden_size, generator)
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.register_buffer("head", target.head, persistent=False)

    def forward(self, features: Tensor, next_tokens: Tensor) -> Tensor:
        dtype = self.mix.weight.dtype
        seen = torch.cat([features.to(dtype), F.embedding(next_tokens, self.embedding).to(dtype)], dim=-1)
        return self.mix(seen) @ self.head.to(dtype).T


class OneHeadStrategy(DraftStrategy):
    name = "one_head"

    def __init__(self, options, target, vocab, seed: int) -> None:
        self._options, self._target = options, target
        self.feature_names = (f"hf{options.layer_id}",)
        self.model = OneHead(target, seed)

    def collate(self, samples, sample_ids) -> TrainBatch:
        batch = collate_features(samples, sample_ids, self.feature_names, self._target.hidden_size)
        return TrainBatch(batch, tuple(sample_ids), sum(len(sample["input_ids"]) for sample in samples))

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        rows = token_mean_label_mask(batch["loss_mask"], 1)[0]
        logits, labels = self._logits(batch)[rows], _ahead(batch["input_ids"], 2)[rows]
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        count = rows.sum(dtype=torch.float64)[None]
        metric_sums = {
            "acc_corrects": (logits.argmax(-1) == labels).sum(dtype=torch.float64)[None],
            "acc_denoms": count,
            "loss_sums": loss.detach().double()[None],
            "loss_denoms": count,
        }
        return StepOutput(loss, count[0].to(loss.dtype), metric_sums)

    @torch.no_grad()
    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        guesses = self._logits(batch).argmax(-1)
        return torch.where(position_mask, guesses, -1)[..., None].expand(-1, -1, count)

    def drafter(self) -> Drafter:
        return OneHeadDrafter(self)

    def fsdp_blocks(self) -> tuple[nn.Module, ...]:
        return ()

    def config(self) -> dict[str, Any]:
        return {
            "strategy": self.name,
            "options": self._options.to_identity(),
            "feature_names": list(self.feature_names),
        }

    def _logits(self, batch: TrainBatch) -> Tensor:
        return self.model(batch["features"], _ahead(batch["input_ids"], 1))


class OneHeadDrafter(Drafter):
    def __init__(self, strategy: OneHeadStrategy) -> None:
        self._strategy = strategy

    @torch.no_grad()
    def extend(self, features, next_tokens: Tensor) -> None:
        (tap,) = self._strategy.feature_names
        self._logits = self._strategy.model(features[tap][-1:], next_tokens[-1:])[0]

    def propose(self, count: int, temperature: float, generator) -> Proposal:
        return Proposal(self._logits.argmax()[None])


def _ahead(ids: Tensor, by: int) -> Tensor:
    return F.pad(ids[:, by:], (0, by))
