"""Fine-tuning of a target's own multi-token-prediction (MTP) layer as a draft strategy, and the layer's serving form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.documents import BatchLayout, Documents, collate_features, sample_lengths
from draftworks.drafts.objectives import token_mean_label_mask
from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import ChainStrategy, Drafter, Proposal, StepContext, StepOutput
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.mtp.model import KeyCache, MtpDraft, make_step_weights
from draftworks.strategies.mtp.options import MTP, MtpOptions
from draftworks.strategies.mtp.target_head import TargetHead

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class MtpDrafter(Drafter):
    """Drafter whose position t reads the target's last state at t and the token t+1; the chain begins at the last position."""

    def __init__(self, model: MtpDraft) -> None:
        self._model = model
        self._seen = KeyCache()
        self._length = 0
        self._last: Tensor | None = None

    @torch.no_grad()
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        self._last = self._step(features["last"], next_tokens, self._length, self._seen)[-1:]
        self._length += len(next_tokens)

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        if self._last is None:
            raise RuntimeError("propose was called before extend")
        seen, state, head = self._seen.fork(), self._last, self._model.target_head
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(count):
            if step > 0:
                state = self._step(state, tokens[-1][None], self._length - 1 + step, seen)
            logits = F.linear(state[0], head)
            if temperature == 0:
                tokens.append(logits.argmax())
            else:
                distributions.append(distribution(logits, temperature))
                tokens.append(draw(distributions[-1], generator))
        return Proposal(torch.stack(tokens), torch.stack(distributions) if distributions else None)

    def _step(self, states: Tensor, tokens: Tensor, start: int, seen: KeyCache) -> Tensor:
        """Return the normed states (n, H) of rows from position `start` on, which sees as many rows before it."""
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
        visible = positions[:, None] >= torch.arange(start + len(tokens), device=tokens.device)  # (n, start + n)
        return self._model.step(states[None], tokens[None], positions, visible, seen)[0]


class MtpStrategy(ChainStrategy):
    """The target's MTP layer, trained on its own states over `num_steps` steps; labels are the tokens themselves.

    Positions by `token_mean_label_mask`; loss_sum = Σ_i w_i Σ_positions CE with w_i = decay^i / Σ_j decay^j, loss_weight =
    positions supervised at step 0. (speculators 0.9.0 takes the mean of each step over the labels of its batch, before they
    are weighted and added.) Nothing is drawn: training begins with the target's own weights.
    """

    spec, name = MTP, MTP.name
    model: Any
    model_methods = ("propose",)

    def __init__(self, options: MtpOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        if vocab is not None:
            raise ConfigError("mtp predicts over the target's whole vocabulary: expected no vocabulary mapping")
        self.options, self.target = options, target
        self.feature_names = self.spec.list_features(target.num_layers, options)
        self.draft_tokens = options.num_steps
        head = TargetHead.find(target.source)
        self.model = MtpDraft(head, target)
        self._model_type = head.config.model_type
        self._step_weights = make_step_weights(options.step_decay, options.num_steps)

    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Right-pad samples with token 0, label mask off and `last` (B, S, H) 0."""
        return self._collate(samples, sample_ids, BatchLayout.padded(sample_lengths(samples)))

    def pack(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Return the same in one packed row without padding, B = 1."""
        return self._collate(samples, sample_ids, BatchLayout.packed(sample_lengths(samples)))

    def _collate(
        self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str], layout: BatchLayout
    ) -> TrainBatch:
        tensors = collate_features(samples, sample_ids, self.feature_names, self.target.hidden_size, layout)
        tensors["last"] = tensors.pop("features")
        return TrainBatch(tensors, tuple(sample_ids), sum(sample_lengths(samples)), layout.documents)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes. The loss follows no schedule."""
        documents = Documents.of(batch)
        label_mask = self.chain_label_mask(batch["loss_mask"], documents)
        supervised = label_mask.sum(dim=(1, 2), dtype=torch.float64)
        result = self.model(
            batch["input_ids"], batch["last"], label_mask, self._step_weights, self.options.attends, documents
        )
        sums = {**result.sums, "acc_denoms": supervised, "loss_denoms": supervised}
        return StepOutput(result.loss, supervised[0].to(result.loss.dtype), sums)

    def chain_label_mask(self, loss_mask: Tensor, documents: Documents) -> Tensor:
        return token_mean_label_mask(loss_mask, self.options.num_steps, documents)

    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        return self.model.propose(batch["input_ids"], batch["last"], position_mask, count, Documents.of(batch))

    def drafter(self) -> Drafter:
        return MtpDrafter(self.model)

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        """Return none: every step calls the one layer, so sharding it by itself would gather it at each."""
        return ()

    def config(self) -> dict[str, Any]:
        return {
            "strategy": self.name,
            "options": self.options.to_identity(),
            "feature_names": list(self.feature_names),
            "model_type": self._model_type,
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
        }
