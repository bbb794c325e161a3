"""The loaders of the programs that run a draft over stored features."""

from __future__ import annotations

from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import FeatureSet
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import DataError
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.packing import PackLimits
from draftworks.programs.assembly import Samples
from draftworks.programs.program import ProgramContext


def training_loader(
    samples: Samples, strategy: DraftStrategy, training: TrainingSpec, ctx: ProgramContext
) -> FeatureDataLoader:
    """This rank's shuffled micro-batches, or its packed rows.

    Raises:
        ConfigError: the global batch does not divide into micro-batches, or is larger than the set.
        DataError: a sample does not fit into a packed row.
    """
    limits = pack_limits(training)
    if limits is not None:
        return FeatureDataLoader.for_packed_training(
            samples.refs,
            samples.store,
            limits,
            strategy.pack,
            global_batch_size=training.global_batch_size,
            rank=ctx.rank,
            world=ctx.world_size,
            seed=training.seed,
        )
    return FeatureDataLoader.for_training(
        samples.refs,
        samples.store,
        training.micro_batch_size,
        strategy.collate,
        global_batch_size=training.global_batch_size,
        rank=ctx.rank,
        world=ctx.world_size,
        seed=training.seed,
    )


def evaluation_loader(
    samples: Samples,
    strategy: DraftStrategy,
    micro_batch_size: int,
    ctx: ProgramContext,
    limits: PackLimits | None = None,
) -> FeatureDataLoader:
    """This rank's share of every sample once: in order, or in packed rows if they are limited.

    Raises:
        DataError: a sample does not fit into a packed row.
    """
    if limits is not None:
        return FeatureDataLoader.for_packed_evaluation(
            samples.refs, samples.store, limits, strategy.pack, rank=ctx.rank, world=ctx.world_size
        )
    return FeatureDataLoader.for_evaluation(
        samples.refs, samples.store, micro_batch_size, strategy.collate, rank=ctx.rank, world=ctx.world_size
    )


def pack_limits(training: TrainingSpec) -> PackLimits | None:
    """What a packed row may hold; None where batches are padded."""
    return None if training.pack_tokens is None else PackLimits(training.pack_tokens, training.pack_overlong)


def nothing_to_measure(heldout: FeatureSet) -> DataError:
    """The error of a held-out set on which no draft can be measured."""
    return DataError(
        f"{heldout.tokens}: the held-out set has no supervised token a draft could be measured on: expected at least one "
        "answer longer than that of a single token. Give other held-out data"
    )
