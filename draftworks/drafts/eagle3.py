"""EAGLE-3 as a draft strategy (arXiv 2503.01840): batches, loss modes, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftworks.drafts.eagle3_drafter import Eagle3Drafter
from draftworks.drafts.eagle3_model import Eagle3Draft, Eagle3Sizes
from draftworks.drafts.strategy import ChainStrategy, Drafter, StepContext, StepOutput
from draftworks.drafts.supervision import specforge_gates, token_mean_gates
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError, DataError
from draftworks.features.contracts import TrainBatch
from draftworks.strategies import EAGLE3, Eagle3Options

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class Eagle3Strategy(ChainStrategy):
    """One decoder layer trained on its own outputs over `ttt_length` steps.

    With CE the cross-entropy of a row against the target's distribution over the draft vocabulary (0 for a row whose
    target argmax is outside it, which accuracy counts as wrong), the modes of `options.loss` are:

    `token_mean`: rows by `token_mean_gates`; loss_sum = Σ_i decay^i Σ_rows CE, loss_weight = rows supervised at step 0.
        Depends on supervised tokens only, however they are batched and padded. `loss_denoms` counts the supervised
        rows of each step, like `acc_denoms`.
    `specforge`: SpecForge's loss number for number. Rows by `specforge_gates`, the last position of every sample masked
        out; loss_sum = Σ_i decay^i (Σ_rows CE / (B·S)), padding and prompt counted in B·S; loss_weight = 1.
        `loss_denoms` is B·S at each step.

    When gradients are off, both also count the acceptance rate of each step over the supervised rows whose target argmax
    is in the draft vocabulary (`acceptance_denoms`): the sum of Σ_v min(q̃, p), see `Distilled.accepted`.
    """

    name = EAGLE3.name
    model_methods = ("propose",)

    def __init__(self, options: Eagle3Options, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        if vocab is None:
            raise ConfigError("eagle3 predicts over a reduced vocabulary: expected a vocabulary mapping, found none")
        _check_vocabulary(vocab, options, target)
        self.options = options
        self.draft_tokens = options.ttt_length
        self.feature_names = EAGLE3.features(target.num_layers, options)
        self._target = target
        self._sizes = _sizes(options, target, taps=len(self.feature_names) - 1)
        draft_ids = torch.from_numpy(vocab.target_ids)
        self.model = Eagle3Draft(target, self._sizes, draft_ids, torch.Generator().manual_seed(seed))
        self._step_weights = [options.step_decay**step for step in range(options.ttt_length)]

    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Right-pad with token 0, mask off and features 0; taps side by side in `features` (B, S, 3H), `last` (B, S, H)."""
        lengths = [len(sample["input_ids"]) for sample in samples]
        shape, width = (len(samples), max(lengths)), self._target.hidden_size
        taps, first = self.feature_names[:-1], samples[0]
        batch = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.zeros(shape, dtype=torch.bool),
            "features": torch.zeros((*shape, len(taps) * width), dtype=first[taps[0]].dtype),
            "last": torch.zeros((*shape, width), dtype=first["last"].dtype),
        }
        for row, (sample, length, name) in enumerate(zip(samples, lengths, sample_ids, strict=True)):
            self._check_sample(sample, length, name)
            batch["input_ids"][row, :length] = sample["input_ids"]
            batch["loss_mask"][row, :length] = sample["loss_mask"].bool()
            batch["last"][row, :length] = sample["last"]
            torch.cat([sample[tap] for tap in taps], dim=-1, out=batch["features"][row, :length])
            if self.options.loss == "specforge":
                batch["loss_mask"][row, length - 1] = False
        return TrainBatch(batch, tuple(sample_ids), sum(lengths))

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """See the class for what the sums mean. `ctx` is not used: the loss follows no schedule."""
        mask = batch["loss_mask"]
        gates = self.chain_gates(mask)
        if self.options.loss == "specforge":
            positions = torch.full((len(gates),), float(mask.numel()), dtype=torch.float64, device=mask.device)
            weights, loss_weight = [w / mask.numel() for w in self._step_weights], positions.new_ones(())
        else:
            weights, loss_weight = self._step_weights, gates[0].sum(dtype=torch.float64)
        supervised = gates.sum(dim=(1, 2), dtype=torch.float64)
        result = self.model(batch["input_ids"], batch["features"], batch["last"], gates, weights)
        counts = {
            "acc_corrects": result.corrects,
            "acc_denoms": supervised,
            "loss_sums": result.ce_sums,
            "loss_denoms": positions if self.options.loss == "specforge" else supervised,
        }
        if result.accepted is not None:
            counts |= {"acceptance_sums": result.accepted, "acceptance_denoms": result.taught}
        return StepOutput(result.loss, loss_weight.to(result.loss.dtype), counts)

    def chain_gates(self, loss_mask: Tensor) -> Tensor:
        gates = specforge_gates if self.options.loss == "specforge" else token_mean_gates
        return gates(loss_mask, self.options.ttt_length)

    def propose(self, batch: TrainBatch, rows: Tensor, count: int) -> Tensor:
        return self.model.propose(batch["input_ids"], batch["features"], rows, count)

    def drafter(self) -> Drafter:
        return Eagle3Drafter(self.model, self.feature_names[:-1])

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        """None: every step of the unroll calls the one layer, so sharding it by itself would gather it T times."""
        return ()

    def config(self) -> dict[str, Any]:
        return {
            "strategy": self.name,
            "options": self.options.model_dump(mode="json"),
            "feature_names": list(self.feature_names),
            "hidden_size": self._target.hidden_size,
            "head_dim": self._target.head_dim,
            **self._sizes._asdict(),
            "rms_norm_eps": self._target.rms_norm_eps,
            "rope_parameters": dict(self._target.rope),
            "max_position_embeddings": self._target.max_positions,
            "vocab_size": self._target.vocab_size,
            "draft_vocab_size": self.model.d2t.numel(),
        }

    def _check_sample(self, sample: Mapping[str, Tensor], length: int, name: str) -> None:
        expected = (length, self._target.hidden_size)
        for feature in self.feature_names:
            found = tuple(sample[feature].shape)
            if found != expected:
                raise DataError(f"sample {name}: feature {feature}: expected shape {expected}, found {found}")


def _sizes(options: Eagle3Options, target: TargetParts, taps: int) -> Eagle3Sizes:
    heads = options.num_heads or target.num_heads
    kv_heads = options.num_kv_heads or min(target.num_kv_heads, heads)
    if heads % kv_heads:
        raise ConfigError(f"eagle3: num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
    return Eagle3Sizes(heads, kv_heads, options.intermediate_size or target.intermediate_size, taps)


def _check_vocabulary(vocab: VocabMapping, options: Eagle3Options, target: TargetParts) -> None:
    target_size, draft_size = len(vocab.t2d), len(vocab.d2t)
    if target_size != target.vocab_size:
        raise ConfigError(f"vocabulary mapping is for {target_size} target tokens, the target has {target.vocab_size}")
    if draft_size != options.draft_vocab_size:
        raise ConfigError(
            f"eagle3: draft_vocab_size is {options.draft_vocab_size}, the vocabulary mapping holds {draft_size} tokens: "
            "make the mapping again for this size, or set the option to the mapping's"
        )
