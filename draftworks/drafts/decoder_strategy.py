"""What draft strategies share whose models are decoder layers over taps of the target: batches, sizes, limits, config.

The contract of a strategy is `DraftStrategy`, which needs none of this.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from draftworks.config.draft_options import choose_served_heads
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.drafts.documents import BatchLayout, Documents, collate_features, collate_with_last, sample_lengths
from draftworks.drafts.layers import require_draft_ids
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
from draftworks.features.contracts import TrainBatch

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class HeadOptions(Protocol):
    num_heads: int | None
    num_kv_heads: int | None


class MaskOptions(Protocol):
    mask_token_id: int | None


class HeadCounts(NamedTuple):
    """Query heads, and key/value heads."""

    num_heads: int
    num_kv_heads: int


def resolve_head_counts(strategy: str, options: HeadOptions, target: TargetParts) -> HeadCounts:
    """Return the options' head counts, else the target's, or the nearest that servers accept.

    Raises:
        ConfigError: num_heads is not a multiple of num_kv_heads.
    """
    heads = options.num_heads or target.num_heads
    kv_heads = options.num_kv_heads or min(target.num_kv_heads, heads)
    if options.num_heads is None and resolve_strategy(strategy).heads_divide_hidden and target.hidden_size % heads:
        served = choose_served_heads(target.hidden_size, heads, kv_heads)
        heads, kv_heads = served.num_heads, options.num_kv_heads or served.num_kv_heads
    if heads % kv_heads:
        raise ConfigError(f"{strategy}: num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
    return HeadCounts(heads, kv_heads)


def resolve_mask_token(strategy: str, options: MaskOptions, target: TargetParts) -> int:
    """Return the option's mask token, else the target's last id. Raises ConfigError if the target has no such id."""
    token = target.vocab_size - 1 if options.mask_token_id is None else options.mask_token_id
    if token >= target.vocab_size:
        raise ConfigError(f"{strategy}: mask_token_id {token} is outside the target's {target.vocab_size} tokens")
    return token


class DecoderStrategy(DraftStrategy):
    """A strategy whose model is decoder layers over taps. A subclass adds `model`, `forward_loss` and `drafter`.

    Args:
        options: a subclass of `LayerOptions`; `num_heads`, `num_kv_heads` and `intermediate_size` default to the target's.
        vocab: required where the spec uses a vocabulary mapping, refused where it does not.
    """

    spec: ClassVar[StrategySpec]
    options: Any
    model: Any
    model_methods = ("propose",)

    def __init__(self, options: Any, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        self.draft_ids = self._require_draft_ids(options, target, vocab)
        self.options = options
        self.feature_names = self.spec.list_features(target.num_layers, options)
        self.target = target.with_layer_options(options)
        self.seed = seed

    def _require_draft_ids(self, options: Any, target: TargetParts, vocab: VocabMapping | None) -> Tensor | None:
        """Return (V_d,) int64 ids of the reduced vocabulary, or None for a draft that predicts over the whole one."""
        if self.spec.uses_vocab_mapping:
            return require_draft_ids(self.name, vocab, options.draft_vocab_size, target)
        if vocab is not None:
            raise ConfigError(
                f"{self.name} predicts over the target's whole vocabulary: expected no vocabulary mapping"
            )
        return None

    @property
    def tap_names(self) -> tuple[str, ...]:
        """The features that the model fuses, ascending: all but `last`."""
        return tuple(name for name in self.feature_names if name != "last")

    def resolve_layer_sizes(self) -> dict[str, int]:
        """Return the sizes that all decoder layers have: the options', or else the target's."""
        heads = resolve_head_counts(self.name, self.options, self.target)
        intermediate = self.options.intermediate_size or self.target.intermediate_size
        return {**heads._asdict(), "intermediate_size": intermediate, "taps": len(self.tap_names)}

    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Right-pad samples with token 0, label mask off and features 0.

        The taps are side by side in `features` (B, S, taps · H); `last` is (B, S, H) where the strategy has a teacher.
        """
        return self._collate(samples, sample_ids, BatchLayout.padded(sample_lengths(samples)))

    def pack(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Return the same in one packed row without padding, B = 1."""
        return self._collate(samples, sample_ids, BatchLayout.packed(sample_lengths(samples)))

    def _collate(
        self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str], layout: BatchLayout
    ) -> TrainBatch:
        collate = collate_with_last if self.spec.uses_last_hidden else collate_features
        tensors = collate(samples, sample_ids, self.feature_names, self.target.hidden_size, layout)
        tensors = self.complete_batch(tensors, sample_ids, layout)
        return TrainBatch(tensors, tuple(sample_ids), sum(sample_lengths(samples)), layout.documents)

    def complete_batch(
        self, tensors: dict[str, Tensor], sample_ids: Sequence[str], layout: BatchLayout
    ) -> dict[str, Tensor]:
        """Return the tensors of a batch with what the strategy adds to those that all have."""
        return tensors

    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        if self.max_draft_tokens is not None and count > self.max_draft_tokens:
            raise ConfigError(
                f"{self.name}: the draft proposes {self.max_draft_tokens} tokens, asked for {count}: "
                f"set evaluation.draft_tokens to at most {self.max_draft_tokens}"
            )
        return self.model.propose(batch["input_ids"], batch["features"], position_mask, count, Documents.of(batch))

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        return tuple(self.model.layers)

    def config(self) -> dict[str, Any]:
        target = self.target
        return {
            "strategy": self.name,
            "options": self.options.to_identity(),
            "feature_names": list(self.feature_names),
            "hidden_size": target.hidden_size,
            "head_dim": target.head_dim,
            **self.describe_sizes(),
            "rms_norm_eps": target.rms_norm_eps,
            "rope_parameters": dict(target.rope),
            "max_position_embeddings": target.max_positions,
            "vocab_size": target.vocab_size,
            **({} if self.draft_ids is None else {"draft_vocab_size": self.draft_ids.numel()}),
        }

    @abstractmethod
    def describe_sizes(self) -> dict[str, Any]:
        """Return the sizes of the draft that its config names, beside those of the target."""
