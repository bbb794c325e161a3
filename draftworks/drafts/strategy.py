"""What every draft strategy offers to training and evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Generator, Tensor, nn

from draftworks.drafts.documents import Documents
from draftworks.errors import ConfigError
from draftworks.features.contracts import TrainBatch


@dataclass(frozen=True)
class StepContext:
    """What a forward pass is for, and where training stands, for losses that follow a schedule.

    Attributes:
        training: whether the batch is trained on; False where it is evaluated. Whether autograd records is another matter: an
            evaluation gives the same numbers with it and without.
    """

    global_step: int = 0
    total_steps: int = 0
    training: bool = field(kw_only=True)


@dataclass
class StepOutput:
    """Sums, never means: whoever adds several of these up divides once, at the end.

    Attributes:
        loss_sum: scalar, differentiable. The loss of a window (micro-steps x ranks) is sum(loss_sum) / sum(loss_weight).
        loss_weight: scalar, no gradient: supervised tokens, or 1 in modes that normalise per micro-batch.
        metric_sums: detached float64 sums by name, shape (T,) per draft position: `acc_corrects`, `acc_denoms` (accuracy),
            `loss_sums`, `loss_denoms` (loss per position), `acceptance_sums`, `acceptance_denoms` (probability that
            rejection sampling accepts, in evaluations; of a reduced vocabulary over the rows whose label is in it, and
            `unconditional_acceptance_sums`, `unconditional_acceptance_denoms` over all), and whatever else the strategy
            counts: `X_sums` with `X_denoms` are reported as `eval/X`.
    """

    loss_sum: Tensor
    loss_weight: Tensor
    metric_sums: dict[str, Tensor] = field(default_factory=dict)


class DraftStrategy(ABC):
    """A draft model with its collation and its loss.

    Built by the factory that the strategy's `StrategySpec` names:
    `factory(options, target: TargetParts, vocab: VocabMapping | None, seed: int) -> DraftStrategy`.
    """

    name: str
    model: nn.Module
    """Trainable. Frozen tensors of the target are non-persistent buffers, so that checkpoints do not hold them."""
    feature_names: tuple[str, ...]
    """Stored features a sample needs, beside `input_ids` and `loss_mask`."""
    draft_tokens: int = 1
    """How many tokens it is made to propose in one go: what a server would ask for."""
    max_draft_tokens: int | None = None
    """How many it can propose in one go; None where there is no limit."""
    model_methods: tuple[str, ...] = ()
    """Methods of `model`, beside its forward, that compute with its parameters: FSDP gathers them for these too."""

    @abstractmethod
    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Pad samples to one batch. Each has `input_ids` (S,) int64, `loss_mask` (S,) bool and the features (S, H)."""

    def pack(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """The same samples one after the other in one row, for `forward_loss` and `propose` to tell them apart by
        `TrainBatch.documents`. The sums are those of the padded batch, and no sample knows of the others.

        Raises:
            ConfigError: the strategy has no such batches.
        """
        raise ConfigError(f"strategy {self.name} cannot pack its samples: leave training.pack_tokens out")

    @abstractmethod
    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Loss and metric sums of one micro-batch. Goes through `self.model(...)` once, so that FSDP hooks run."""

    @abstractmethod
    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        """What the draft proposes when a server asks it at a row, greedily and on its own words.

        Args:
            position_mask: (B, S) bool. At position t the tokens up to t+1 and the features up to t are known.
            count: proposals per row.

        Returns:
            (B, S, count) int64, ids of the target: [b, t, i] is for token t+2+i. -1 at positions that were not asked.
        """

    @abstractmethod
    def drafter(self) -> Drafter:
        """A draft at work on a new sequence, on the device of the model."""

    @abstractmethod
    def fsdp_blocks(self) -> Sequence[nn.Module]:
        """Submodules that FSDP shards on their own, before the whole model."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON-able description that, with the weights, rebuilds this draft."""


@dataclass(frozen=True)
class Proposal:
    """A chain of proposed tokens. (A tree would say for each token which one it follows; a chain follows the last.)

    Attributes:
        tokens: (k,) int64, ids of the target.
        probabilities: (k, V), what each was drawn from; None where the draft took its best guess.
    """

    tokens: Tensor
    probabilities: Tensor | None = None


class Drafter(ABC):
    """A draft at work on one sequence, with its own caches: what a server holds for a request."""

    @abstractmethod
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        """The target has said more.

        Args:
            features: (n, H) each, of the n positions that follow those given so far.
            next_tokens: (n,) int64, the token after each of these positions.
        """

    @abstractmethod
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        """Tokens after the last one that `extend` was given. At temperature 0 the draft's best guesses."""


class ChainStrategy(DraftStrategy):
    """A strategy whose draft proposes one token after the other: step i of row t proposes token t+2+i.

    Such a draft can be compared with a table of bigrams that makes the same proposals.
    """

    @abstractmethod
    def chain_label_mask(self, loss_mask: Tensor, documents: Documents) -> Tensor:
        """Which rows are supervised at which step: (B, S) bool, as collated, to (T, B, S) bool."""
