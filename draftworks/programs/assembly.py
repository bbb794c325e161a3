"""Construction of drafts, samples and loaders from a run file, for training and evaluation."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.capture.engine import EnginePlace
from draftworks.config.registry_files import CaptureSpec, TrainingSpec
from draftworks.config.run_files import CaptureRun, FeatureSet, StoreSpec, TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.data.tokenized import TokenizedSet
from draftworks.data.vocab import VocabMapping
from draftworks.distributed.collectives import broadcast_from_rank_0, find_own_address, get_local_world_size
from draftworks.drafts.strategy import DraftStrategy, make_planned_loader
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError, DataError, StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.manifest import FeatureSetManifest, FeatureSource, read_feature_set
from draftworks.features.open_store import open_store
from draftworks.features.schedule import PackLimits, find_left_out
from draftworks.features.tensor_bytes import get_decoded_dtype
from draftworks.features.wrapped_store import JoinedStore, RoundedStore
from draftworks.programs.program import ProgramContext
from draftworks.sglang.job_servers import JobServers, make_servers_folder, remove_servers_folders
from draftworks.storage.identity import LayerTap


@dataclass(frozen=True)
class Draft:
    """An initialised draft, with the target's parts that it was built from."""

    strategy: DraftStrategy
    parts: TargetParts
    options: Any
    vocab: VocabMapping | None


def build_draft(
    target: TargetFiles, strategy: str, options: dict[str, Any], vocab_mapping: Path | None, seed: int
) -> Draft:
    """Build a draft: resolve the strategy, check its options, read the target's parts, initialise from `seed`.

    Raises:
        ConfigError: unknown strategy or option, or a vocabulary mapping is needed and not given.
        StoreError: a file of the target or the mapping is missing or damaged.
    """
    spec = resolve_strategy(strategy)
    typed = spec.parse_options(options, where=f"options of {strategy}")
    if spec.uses_vocab_mapping and vocab_mapping is None:
        raise ConfigError(f"strategy {strategy} needs a vocabulary mapping: set vocab_mapping in the run file")
    parts = TargetParts.load(target)
    vocab = VocabMapping.load(vocab_mapping) if spec.uses_vocab_mapping and vocab_mapping else None
    return Draft(spec.load_factory()(typed, parts, vocab, seed), parts, typed, vocab)


@dataclass(frozen=True)
class Samples:
    """Samples of a feature set, with the features that a strategy reads and the store that joins them with tokens."""

    refs: list[SampleRef]
    store: JoinedStore
    tokens: TokenizedSet
    manifest: FeatureSetManifest


def open_samples(
    features: FeatureSet,
    store: StoreSpec,
    strategy: DraftStrategy,
    target: TargetFiles,
    open_source: Callable[[FeatureSetManifest, Sequence[str]], FeatureSource] | None = None,
) -> Samples:
    """Open a feature set and its tokens, and check everything that can be checked before a sample is read.

    Args:
        open_source: from the feature set, and the sample ids of its tokenized set, to what is read instead of it.

    Raises:
        StoreError: a set is missing or damaged, of another target, lacks a feature, or does not belong to the tokens.
    """
    manifest = read_feature_set(features.features)
    origins = {ref.target_model_version for ref in manifest.refs}
    if origins != {target.digest}:
        raise StoreError(
            f"{features.features}: features of target {', '.join(sorted(origins))}, expected {target.digest} "
            f"({target.name}). Capture the features of this target"
        )
    missing = [name for name in strategy.feature_names if name not in manifest.streams]
    if missing:
        raise StoreError(
            f"{features.features}: strategy {strategy.name} needs the features {missing}, found "
            f"{list(manifest.streams)}. Capture them: what is stored already will not be captured again"
        )
    if "last" in strategy.feature_names and not manifest.identity.last_normed:
        raise StoreError(
            f"{features.features}: `last` was captured before the target's final norm, expected after it: the head "
            "would give other logits. Capture the features again"
        )
    dtypes = {get_decoded_dtype(spec.dtype) for ref in manifest.refs for spec in ref.feature_specs.values()}
    if len(dtypes) > 1:
        raise StoreError(
            f"{features.features}: features of several dtypes, {', '.join(sorted(dtypes))}: expected one. Capture the "
            "features again"
        )
    tokens = TokenizedSet.open(features.tokens)
    _require_same_tokens(features, manifest, tokens)
    if open_source is None:
        source = FeatureSource(manifest, open_store(store))
    else:
        source = open_source(manifest, tokens.sample_ids)
    refs = [ref.select(strategy.feature_names) for ref in source.manifest.refs]
    kept = source.store if features.read_as == "plain" else RoundedStore(source.store, features.read_as)
    return Samples(refs, JoinedStore(kept, tokens), tokens, source.manifest)


def require_same_dtype(train: Samples, held_out: Samples) -> None:
    """Raise StoreError if the two were captured in different dtypes: their losses would not compare."""
    found, expected = held_out.manifest.identity.dtype, train.manifest.identity.dtype
    if found != expected:
        raise StoreError(
            f"{held_out.manifest.store}: held-out features are {found}, training features {expected}: expected the "
            "same. Capture both with one capture.dtype"
        )


def _require_same_tokens(features: FeatureSet, manifest: FeatureSetManifest, tokens: TokenizedSet) -> None:
    """Raise StoreError if the features are of other tokens.

    Sample ids do not show it: an answer that was generated again keeps the id of its conversation.
    """
    found = {row.sample_id: row.token_digest for row in tokens}
    unknown = [ref.sample_id for ref in manifest.refs if ref.sample_id not in found]
    if unknown:
        raise StoreError(
            f"{features.features}: {len(unknown)} of {len(manifest.refs)} samples are not in the tokenized set "
            f"{features.tokens}, the first is {unknown[0]}. Capture the features of this tokenized set"
        )
    changed = [ref.sample_id for ref in manifest.refs if ref.metadata.get("tokens") != found[ref.sample_id]]
    if changed:
        raise StoreError(
            f"{features.features}: the features of {len(changed)} of {len(manifest.refs)} samples are of other tokens "
            f"than those in {features.tokens}, the first is {changed[0]}. Capture the features of this tokenized set: "
            "what is stored already will not be captured again"
        )


def get_peak_rss_bytes() -> int:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def temporary_engine_folder(path: Path) -> Iterator[Path]:
    """Give an engine the path of a folder to create. It is removed on success; after an error its logs remain."""
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def open_job_servers(capture: CaptureSpec, out: Path, ctx: ProgramContext) -> Iterator[JobServers | None]:
    """Prepare the servers of a job of several nodes: a folder for their addresses and a new key. A collective.

    None for a job on one node, where each rank's servers are its own and listen on loopback; and for one whose ranks start
    no servers. Rank 0 removes the folder at the end.

    Raises:
        ConfigError: it is not known by which address the other nodes reach this one.
    """
    if ctx.is_main:
        remove_servers_folders(out)
    if ctx.world_size == get_local_world_size() or not capture.starts_servers:
        yield None
        return
    head = os.environ["MASTER_ADDR"]
    host = find_own_address(head)
    if host is None:
        raise ConfigError(
            f"no route from host {socket.gethostname()} to {head}, where rank 0 of this job is: expected one address "
            "of each node by which the others reach it"
        )
    folder = Path(broadcast_from_rank_0(str(make_servers_folder(out)) if ctx.is_main else None))
    try:
        yield JobServers(folder, host, ctx.rank, ctx.world_size)
    finally:
        if ctx.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def make_engine_place(
    run: CaptureRun,
    ctx: ProgramContext,
    folder: Path,
    tokens: TokenizedSet,
    servers: JobServers | None = None,
) -> EnginePlace:
    """Return the resources of the engine that captures a tokenized set."""
    return EnginePlace(
        folder=folder,
        taps=tuple(map(LayerTap, sorted(set(run.taps)))),
        head=lambda: TargetParts.load(run.target).head,
        embedding=lambda: TargetParts.load(run.target).embedding,
        sglang=run.sglang,
        vllm=run.vllm,
        local_rank=ctx.local_rank,
        longest=max((len(row.input_ids) for row in tokens), default=0),
        servers=servers,
    )


def build_training_loader(
    samples: Samples, strategy: DraftStrategy, training: TrainingSpec, ctx: ProgramContext
) -> FeatureDataLoader:
    """Return the loader of this rank's shuffled micro-batches, padded or packed.

    Raises:
        ConfigError: the global batch does not divide into micro-batches, or is larger than the set.
        DataError: a sample does not fit into a packed row.
    """
    left_out = find_left_out(samples.tokens.sample_ids, (ref.sample_id for ref in samples.refs))
    return make_planned_loader(
        samples.refs, samples.store, strategy, training, ctx.rank, ctx.world_size, left_out=left_out
    )


def build_evaluation_loader(
    samples: Samples,
    strategy: DraftStrategy,
    micro_batch_size: int,
    ctx: ProgramContext,
    limits: PackLimits | None = None,
) -> FeatureDataLoader:
    """Return the loader of this rank's share of the samples, each once: in order, or in packed rows if `limits` is set.

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


def get_pack_limits(training: TrainingSpec) -> PackLimits | None:
    """Return the limits of a packed row; None if batches are padded."""
    return None if training.pack_tokens is None else PackLimits(training.pack_tokens, training.pack_overlong)


def make_empty_heldout_error(heldout: FeatureSet) -> DataError:
    """Make the error of a held-out set without a token that a draft could be measured on."""
    return DataError(
        f"{heldout.tokens}: the held-out set has no supervised token that a draft can be measured on: expected an "
        "answer of two or more tokens. Use other held-out data"
    )
