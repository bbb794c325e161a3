"""EAGLE-3 that does not say it proposes a chain: what a strategy of another kind is to the evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from draftworks.drafts.eagle3 import Eagle3Strategy
from draftworks.drafts.strategy import Drafter, DraftStrategy, StepContext, StepOutput
from draftworks.features.contracts import TrainBatch


class Unchained(DraftStrategy):
    def __init__(self, *arguments: Any) -> None:
        self._inner = Eagle3Strategy(*arguments)
        self.name, self.model, self.feature_names = self._inner.name, self._inner.model, self._inner.feature_names
        self.model_methods, self.draft_tokens = self._inner.model_methods, self._inner.draft_tokens

    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        return self._inner.collate(samples, sample_ids)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        return self._inner.forward_loss(batch, ctx)

    def propose(self, batch: TrainBatch, rows: Tensor, count: int) -> Tensor:
        return self._inner.propose(batch, rows, count)

    def drafter(self) -> Drafter:
        return self._inner.drafter()

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        return self._inner.fsdp_blocks()

    def config(self) -> dict[str, Any]:
        return self._inner.config()
