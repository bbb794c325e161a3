"""From the paths of a run file to the objects that training and evaluation work on."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.run_files import FeatureSet, StoreSpec, TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.data.tokenized import TokenizedSet
from draftworks.data.vocab import VocabMapping
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError, StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.joined import JoinedStore
from draftworks.features.manifest import FeatureSetManifest, read_feature_set
from draftworks.features.opening import open_store


@dataclass(frozen=True)
class Draft:
    """A freshly initialised draft, with the parts of the target it was built from."""

    strategy: DraftStrategy
    parts: TargetParts
    options: Any
    vocab: VocabMapping | None


def build_draft(
    target: TargetFiles, strategy: str, options: dict[str, Any], vocab_mapping: Path | None, seed: int
) -> Draft:
    """Resolve the strategy, check its options, read the target's parts, initialise from `seed`.

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
    """Samples with the features a strategy reads, and the store that gives them together with their tokens."""

    refs: list[SampleRef]
    store: JoinedStore
    tokens: TokenizedSet
    manifest: FeatureSetManifest


def open_samples(features: FeatureSet, store: StoreSpec, strategy: DraftStrategy, target: TargetFiles) -> Samples:
    """Open a feature set and its tokens; everything that can be wrong is found here, before any sample is read.

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
    if "last" in strategy.feature_names and not manifest.identity.get("last_normed", True):
        raise StoreError(
            f"{features.features}: `last` was captured before the target's final norm, expected after it: the head "
            "would give other logits. Capture the features again"
        )
    dtypes = {spec.dtype for ref in manifest.refs for spec in ref.feature_specs.values()}
    if len(dtypes) > 1:
        raise StoreError(
            f"{features.features}: features of several dtypes, {', '.join(sorted(dtypes))}: expected one. Capture the "
            "features again"
        )
    tokens = TokenizedSet.open(features.tokens)
    _require_same_tokens(features, manifest, tokens)
    refs = [ref.select(strategy.feature_names) for ref in manifest.refs]
    return Samples(refs, JoinedStore(open_store(store), tokens), tokens, manifest)


def require_same_dtype(train: Samples, held_out: Samples) -> None:
    """StoreError where the two were captured in different dtypes: their losses would not compare."""
    found, expected = held_out.manifest.identity.get("dtype"), train.manifest.identity.get("dtype")
    if found != expected:
        raise StoreError(
            f"{held_out.manifest.store}: held-out features are {found}, training features {expected}: expected the same. "
            "Capture both with one capture.dtype"
        )


def _require_same_tokens(features: FeatureSet, manifest: FeatureSetManifest, tokens: TokenizedSet) -> None:
    """Ids alone do not show it: an answer that was generated anew keeps the id of its conversation."""
    found = {row.sample_id: row.token_digest for row in tokens}
    strangers = [ref.sample_id for ref in manifest.refs if ref.sample_id not in found]
    if strangers:
        raise StoreError(
            f"{features.features}: {len(strangers)} of {len(manifest.refs)} samples are not in the tokenized set "
            f"{features.tokens}, the first is {strangers[0]}. Capture the features of this tokenized set"
        )
    changed = [ref.sample_id for ref in manifest.refs if ref.metadata.get("tokens") != found[ref.sample_id]]
    if changed:
        raise StoreError(
            f"{features.features}: the features of {len(changed)} of {len(manifest.refs)} samples are of other tokens "
            f"than those in {features.tokens}, the first is {changed[0]}. Capture the features of this tokenized set: "
            "what is stored already will not be captured again"
        )


def peak_rss_bytes() -> int:
    """The most memory this process has held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
