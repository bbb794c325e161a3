"""The contract of draft strategies: what training and evaluation call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Generator, Tensor, nn

from draftworks.config.decoding import Decoding
from draftworks.config.registry_files import TrainingSpec
from draftworks.drafts.documents import Documents
from draftworks.errors import ConfigError
from draftworks.features.contracts import FeatureStore, SampleRef, TrainBatch
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.schedule import PackLimits


@dataclass(frozen=True)
class StepContext:
    """What a forward pass is for, and the optimizer step, for losses that follow a schedule.

    Attributes:
        training: True where the batch is trained on, False where it is evaluated. Independent of autograd: an
            evaluation gives the same numbers with and without gradients.
        served: temperatures above 0 with the rules of servers, by which an evaluation also measures how likely these accept
            the draft's tokens, if the strategy reads the target's distributions.
    """

    global_step: int = 0
    total_steps: int = 0
    training: bool = field(kw_only=True)
    served: tuple[Decoding, ...] = ()


@dataclass
class StepOutput:
    """Loss and metrics of a micro-batch as sums, never means; whoever adds several divides once, at the end.

    Attributes:
        loss_sum: scalar, differentiable. The loss of a window (micro-steps x ranks) is sum(loss_sum) /
            sum(loss_weight).
        loss_weight: scalar, no gradient: supervised tokens, or 1 in modes that normalise per micro-batch.
        metric_sums: detached float64 sums by name, shape (T,) by draft step: `acc_corrects`, `acc_denoms` (accuracy),
            `loss_sums`, `loss_denoms` (loss per step), `acceptance_sums`, `acceptance_denoms` (probability that
            rejection sampling accepts, in evaluations; with a reduced vocabulary over the positions whose label is in
            it, and `unconditional_acceptance_sums`, `unconditional_acceptance_denoms` over all), over all labels the
            probability that a server accepts by each decoding of the context, see draftworks.drafts.sampling, and the
            strategy's own:
            `X_sums` with `X_denoms` are reported as `eval/X`.
    """

    loss_sum: Tensor
    loss_weight: Tensor
    metric_sums: dict[str, Tensor] = field(default_factory=dict)


class DraftStrategy(ABC):
    """A draft model with its collation and its loss.

    Built by the factory that the strategy's `StrategySpec` names: `factory(options, target: TargetParts, vocab:
    VocabMapping | None, seed: int) -> DraftStrategy`.
    """

    name: str
    model: nn.Module
    """The trainable model. Frozen tensors of the target are non-persistent buffers, so that checkpoints leave them out.
    """
    feature_names: tuple[str, ...]
    """Stored features that a sample needs beside `input_ids` and `loss_mask`."""
    draft_tokens: int = 1
    """Tokens it is trained to propose at once: what a server would ask for."""
    max_draft_tokens: int | None = None
    """Tokens it can propose at once; None if there is no limit."""
    reads_samples_again: bool = False
    """Whether its training has more than one epoch, so that what is found of a sample is worth keeping; set by `Trainer`.
    """
    model_methods: tuple[str, ...] = ()
    """Methods of `model` beside forward that use its parameters; FSDP gathers them for these too."""

    @abstractmethod
    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Pad samples to one batch. Each has `input_ids` (S,) int64, `loss_mask` (S,) bool and the features (S, H)."""

    def pack(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Lay samples one after the other in one batch row; `TrainBatch.documents` holds their lengths.

        `forward_loss` and `propose` keep them apart: the sums equal those of the padded batch, and no sample attends to
        another.

        Raises:
            ConfigError: the strategy cannot pack.
        """
        raise ConfigError(f"strategy {self.name} cannot pack its samples: leave training.pack_tokens out")

    @abstractmethod
    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return loss and metric sums of one micro-batch. Calls `self.model(...)` once, so that FSDP hooks run."""

    def find_share_done(self, step: int, total_steps: int) -> float:
        """Return the share of a training's work that is done after an optimizer step, 0 to 1; for estimates of time."""
        return step / total_steps

    @abstractmethod
    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        """Return the tokens that the draft proposes at the given positions, greedily and fed its own proposals.

        Args:
            position_mask: (B, S) bool. At position t the tokens up to t+1 and the features up to t are known.
            count: proposals per position.

        Returns:
            (B, S, count) int64 target ids: [b, t, i] is for token t+2+i. -1 at positions that were not asked.
        """

    @abstractmethod
    def drafter(self) -> Drafter:
        """Return a new `Drafter` for one sequence, on the device of the model."""

    @abstractmethod
    def fsdp_blocks(self) -> Sequence[nn.Module]:
        """Return the submodules that FSDP shards on their own, before the whole model."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return a JSON-able description that rebuilds this draft together with its weights."""


@dataclass(frozen=True)
class Proposal:
    """A chain of proposed tokens. (A tree would also hold each token's parent; in a chain it is the token before.)

    Attributes:
        tokens: (k,) int64 target ids.
        probabilities: (k, V), the distribution each was drawn from; None if the tokens are argmaxes.
    """

    tokens: Tensor
    probabilities: Tensor | None = None


class Drafter(ABC):
    """A draft that decodes one sequence with its own caches, as a server holds it for a request."""

    @abstractmethod
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        """Append positions that the target has accepted.

        Args:
            features: (n, H) each, of the n positions after those given so far.
            next_tokens: (n,) int64, the token after each of these positions.
        """

    @abstractmethod
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        """Propose `count` tokens after the last one given to `extend`. At temperature 0 these are argmaxes."""


class ChainStrategy(DraftStrategy):
    """A strategy whose draft proposes one token after the other: step i at position t proposes token t+2+i.

    Such a draft can be compared with a table of bigrams that makes the same proposals.
    """

    @abstractmethod
    def chain_label_mask(self, loss_mask: Tensor, documents: Documents) -> Tensor:
        """Return which positions are supervised at which step: loss mask (B, S) bool to (T, B, S) bool."""


def make_planned_loader(
    refs: Sequence[SampleRef],
    store: FeatureStore,
    strategy: DraftStrategy,
    training: TrainingSpec,
    rank: int = 0,
    world: int = 1,
    left_out: Sequence[int] = (),
) -> FeatureDataLoader:
    """Return the loader of a rank's shuffled micro-batches, padded or packed.

    Raises:
        ConfigError: the global batch does not divide into micro-batches, or is larger than the set.
        DataError: a sample does not fit into a packed row.
    """
    if training.pack_tokens is not None:
        return FeatureDataLoader.for_packed_training(
            refs,
            store,
            PackLimits(training.pack_tokens, training.pack_overlong),
            strategy.pack,
            global_batch_size=training.global_batch_size,
            rank=rank,
            world=world,
            seed=training.seed,
            left_out=left_out,
        )
    return FeatureDataLoader.for_training(
        refs,
        store,
        training.micro_batch_size,
        strategy.collate,
        global_batch_size=training.global_batch_size,
        rank=rank,
        world=world,
        seed=training.seed,
        left_out=left_out,
    )
