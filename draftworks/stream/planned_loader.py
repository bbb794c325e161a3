"""The training loader of a planned set."""

from __future__ import annotations

from collections.abc import Sequence

from draftworks.config.registry_files import TrainingSpec
from draftworks.drafts.strategy import DraftStrategy
from draftworks.features.contracts import FeatureStore, SampleRef
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.packing import PackLimits


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
