"""A small strategy, and samples in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftworks.drafts.strategy import Drafter, DraftStrategy, StepContext, StepOutput
from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef, TrainBatch
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.schedule import PackLimits

VOCAB, HIDDEN = 11, 6


class ToyModel(nn.Module):
    """Two linear layers, the first a block of its own, and a parameter of one row, which only one rank can hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.block = nn.Sequential(nn.utils.skip_init(nn.Linear, HIDDEN, HIDDEN), nn.Tanh())
        self.head = nn.utils.skip_init(nn.Linear, HIDDEN, VOCAB)
        self.offset = nn.Parameter(torch.zeros(1, HIDDEN))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)

    def forward(self, last: Tensor) -> Tensor:
        return self.head(self.block(last.to(self.head.weight.dtype)) + self.offset).log_softmax(-1).float()


class ToyStrategy(DraftStrategy):
    """Predicts each supervised token from the hidden state before it. `break_at` gives a NaN loss at that step."""

    name = "toy"
    feature_names = ("last",)

    def __init__(self, seed: int = 0, break_at: int | None = None) -> None:
        self.model = ToyModel(seed)
        self.break_at = break_at

    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        names = ("input_ids", "loss_mask", "last")
        padded = {n: nn.utils.rnn.pad_sequence([s[n] for s in samples], batch_first=True) for n in names}
        return TrainBatch(padded, tuple(sample_ids), sum(len(s["input_ids"]) for s in samples))

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        logits = self.model(batch["last"])[:, :-1]
        labels, mask = batch["input_ids"][:, 1:], batch["loss_mask"][:, 1:]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        loss_sum = (losses * mask).sum() * (float("nan") if ctx.global_step == self.break_at else 1.0)
        correct = ((logits.argmax(-1) == labels) & mask).sum(dtype=torch.float64)
        metric_sums = {"acc_corrects": correct[None], "acc_denoms": mask.sum(dtype=torch.float64)[None]}
        return StepOutput(loss_sum, mask.sum(), metric_sums)

    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        said = self.model(batch["last"]).argmax(-1)
        return torch.where(position_mask, said, -1)[..., None].expand(-1, -1, count)

    def drafter(self) -> Drafter:
        raise NotImplementedError

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        return (self.model.block,)

    def config(self) -> dict[str, Any]:
        return {"hidden_size": HIDDEN, "options": {"taps": (1, 2)}}


class MemoryStore(FeatureStore):
    """Samples that are in memory already."""

    lease_bound = False

    def __init__(self, samples: Mapping[str, dict[str, Tensor]]) -> None:
        self.samples = samples

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        return self.samples[ref.sample_id], FeatureHandle(ref.sample_id, "")

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        raise NotImplementedError

    def release(self, handle: FeatureHandle) -> None: ...

    def abort(self, sample_id: str) -> None: ...

    def gc(self) -> int:
        return 0

    def health(self) -> dict[str, Any]:
        return {}

    def estimate_bytes(self, ref: SampleRef) -> int:
        return 0


class CountingStore(MemoryStore):
    """Counts what is read, and breaks down when `limit` samples have been."""

    def __init__(self, samples: Mapping[str, dict[str, Tensor]], limit: int | None = None) -> None:
        super().__init__(samples)
        self.reads = 0
        self.limit = limit

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        if self.reads == self.limit:
            raise StoreError(f"the store broke down after {self.reads} samples")
        self.reads += 1
        return super().get(ref)


def ragged_samples(count: int, seed: int = 1, supervised: bool = True) -> dict[str, dict[str, Tensor]]:
    """Samples of 4 to 15 tokens whose labels can be learned from their hidden states."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(99))
    samples = {}
    for index in range(count):
        length = int(torch.randint(4, 16, (), generator=generator))
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        mask = (torch.arange(length) >= int(torch.randint(1, length - 1, (), generator=generator))) & supervised
        noise = 0.1 * torch.randn(length, HIDDEN, generator=generator)
        samples[f"s{index}"] = {"input_ids": ids, "loss_mask": mask, "last": embedding[ids.roll(-1)] + noise}
    return samples


def refs_of(samples: Mapping[str, dict[str, Tensor]]) -> list[SampleRef]:
    return [
        SampleRef(name, "run", name, "mem://", {}, {}, num_tokens=len(s["input_ids"])) for name, s in samples.items()
    ]


def train_loader(
    strategy: DraftStrategy,
    samples: Mapping[str, dict[str, Tensor]],
    micro: int,
    global_batch: int,
    rank: int = 0,
    world: int = 1,
    store: FeatureStore | None = None,
    pack_tokens: int | None = None,
) -> FeatureDataLoader:
    refs, store = refs_of(samples), store or MemoryStore(samples)
    cut = {"global_batch_size": global_batch, "rank": rank, "world": world, "seed": 3, "prefetch": 0}
    if pack_tokens is not None:
        return FeatureDataLoader.for_packed_training(
            refs, store, PackLimits(pack_tokens, "own_row"), strategy.pack, **cut
        )
    return FeatureDataLoader.for_training(refs, store, micro, strategy.collate, **cut)


def eval_loader(
    strategy: DraftStrategy,
    samples: Mapping[str, dict[str, Tensor]],
    micro: int,
    rank: int = 0,
    world: int = 1,
    store: FeatureStore | None = None,
    pack_tokens: int | None = None,
) -> FeatureDataLoader:
    refs, store = refs_of(samples), store or MemoryStore(samples)
    share = {"rank": rank, "world": world, "prefetch": 0}
    if pack_tokens is not None:
        return FeatureDataLoader.for_packed_evaluation(
            refs, store, PackLimits(pack_tokens, "own_row"), strategy.pack, **share
        )
    return FeatureDataLoader.for_evaluation(refs, store, micro, strategy.collate, **share)
