"""What each result of a target is made from, and its identity: read by the assets that make results and by plans that look
them up. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.capture import CaptureSpec
from draftworks.config.data import ResponseSpec
from draftworks.config.draft_options import read_draft_config
from draftworks.config.registry_files import StrategyEntry, TargetSpec, TrainingSpec
from draftworks.config.run_files import EVAL_PART, TOKENS_FOLDER, VOCAB_FILE, FeatureSet, TargetFiles
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.errors import StoreError
from draftworks.evaluation.eval_cache import EvalCache, EvalConfig
from draftworks.export.conventions import CARD
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import FileDigests, LastHidden, digest, file_digest
from draftworks.storage.names import (
    HELDOUT,
    HELDOUT_RESPONSES,
    RESPONSES,
    TOKENIZED_TRAIN,
    TRAINING_FEATURES,
    VOCAB_MAPPING,
    of_eval_set,
    of_strategy,
)
from draftworks.storage.records import (
    AnswersIdentity,
    DraftIdentity,
    EvalData,
    EvalFeaturesIdentity,
    ExportIdentity,
    FeaturesIdentity,
    Limits,
    ReportIdentity,
    read_captured_weights,
)
from draftworks.targets.registry import Registry, apply_overrides
from draftworks.targets.resolve import resolve_target
from draftworks.targets.training_data import (
    collect_taps,
    identify_arrival,
    identify_eval_data,
    make_answers_identity,
    make_greedy_settings,
    resolve_draft_vocab_size,
)


@dataclass(frozen=True)
class DraftInputs:
    """Resolved inputs of a draft.

    Attributes:
        feature_versions: content versions of the streams that this strategy reads, by name, as in `heldout_data`. A
            tap that only another strategy reads is not included, so it does not cause a new training.
        arrival: see `DraftIdentity`.
    """

    files: TargetFiles
    options: dict[str, Any]
    training: TrainingSpec
    train_tokens: Artifact
    train_features: Artifact
    heldout: FeatureSet
    feature_versions: dict[str, str]
    heldout_data: EvalData
    vocab_mapping: Artifact | None
    start_from: Path | None
    arrival: Mapping[str, Any] | None = None

    def to_identity(self, strategy: StrategySpec) -> DraftIdentity:
        options = strategy.parse_options(self.options, where=f"options of {strategy.name}")
        return DraftIdentity(
            strategy=strategy.name,
            options=strategy.identify_options(options, self.files.hidden_size, self.files.num_heads),
            start_from=None if self.start_from is None else read_draft_config(self.start_from).weights_digest,
            training=self.training.to_identity(strategy.batch_means(options)),
            target=self.files.digest,
            tokens=self.train_tokens.data_version,
            features=digest(self.feature_versions),
            vocab_mapping=None if self.vocab_mapping is None else self.vocab_mapping.data_version,
            heldout=self.heldout_data,
            arrival=self.arrival,
        )

    def locate_vocab_file(self) -> Path | None:
        """Return the vocabulary mapping's file: that of the draft to start from, if there is one, since its head was
        made for it."""
        if self.vocab_mapping is None:
            return None
        return (self.start_from or self.vocab_mapping.path) / VOCAB_FILE


TRAIN = "train"
"""The part of the prepared conversations that is trained on."""
PLANNED = "planned"
"""In the summary of a feature set whose features stream to the trainer."""
LAST = LastHidden().name
DRAFT_CODE_VERSION, REPORT_CODE_VERSION = "2", "4"


@dataclass(frozen=True)
class Results:
    """A registry, the results that are made from it, and digests of files that were read."""

    registry: Registry
    artifacts: ArtifactStore
    digests: FileDigests

    def resolve_target_files(self, target: str) -> TargetFiles:
        """Return files, digests and shape of a target as they are now."""
        return resolve_target(self.registry.load_target(target), self.registry, self.digests)


def list_eval_names(target: TargetSpec) -> list[str]:
    """Return `heldout` and the names of the target's other eval sets."""
    return [HELDOUT, *target.evals]


def identify_result(results: Results, target: TargetSpec, asset: str) -> dict[str, Any]:
    """Return the identity, as it is stored, that a result of an asset would have now.

    Raises:
        DraftworksError: something that it is made from does not exist yet, or the target's entry has a mistake.
        KeyError: the target has no such asset.
    """
    identify, *arguments = _list_identities(target)[asset]
    versions = {of_strategy(name).draft: DRAFT_CODE_VERSION for name in target.strategies}
    versions |= {of_strategy(name).report: REPORT_CODE_VERSION for name in target.strategies}
    return {**identify(results, target, *arguments), "code_version": versions.get(asset, "1")}


def _list_identities(target: TargetSpec) -> dict[str, tuple[Any, ...]]:
    """Return by asset the function that identifies its result, with arguments beside the results and the target."""
    found: dict[str, tuple[Any, ...]] = {
        RESPONSES: (_identify_answers, HELDOUT, TRAIN),
        HELDOUT_RESPONSES: (_identify_answers, HELDOUT, HELDOUT),
        TOKENIZED_TRAIN: (_identify_tokens,),
        VOCAB_MAPPING: (_identify_vocab_mapping,),
        TRAINING_FEATURES: (_identify_features,),
    }
    for name in list_eval_names(target):
        conversations, responses, features = of_eval_set(name)
        found.setdefault(responses, (_identify_answers, name, EVAL_PART))
        found |= {conversations: (_identify_conversations, name), features: (_identify_eval_features, name)}
    for strategy in map(resolve_strategy, target.strategies):
        draft, report, export, *_ = of_strategy(strategy.name)
        found |= {draft: (_identify_draft, strategy), report: (_identify_report, strategy)}
        found[export] = (_identify_export, strategy)
    return found


def _identify_conversations(results: Results, target: TargetSpec, eval_set: str) -> dict[str, Any]:
    vocab_size = results.resolve_target_files(target.name).vocab_size
    return identify_eval_data(eval_set, target, vocab_size, results.registry, results.digests).to_json()


@dataclass(frozen=True)
class Conversations:
    """One part of a prepared set of conversations; `name` is used in messages."""

    prepared: Artifact
    part: str
    name: str

    @classmethod
    def load(cls, results: Results, target: TargetSpec, eval_set: str, part: str) -> Conversations:
        """Return a part of the conversations of an eval set, or of those that are trained on with `heldout`.

        Raises:
            StoreError: they are not prepared yet.
        """
        prepared = results.artifacts.load_current(of_eval_set(eval_set).conversations, target.name)
        return cls(prepared, part, target.dataset if eval_set == HELDOUT else eval_set)

    @property
    def folder(self) -> Path:
        return self.prepared.path / self.part

    @property
    def kind(self) -> str:
        return self.prepared.summary["kind"]

    def choose_settings(self, target: TargetSpec) -> ResponseSpec:
        """Return how they are answered: the training part as the target's entry says, all others greedily."""
        return target.responses if self.part == TRAIN else make_greedy_settings(target, self.kind)


def identify_answers(
    target: TargetSpec, files: TargetFiles, source: Conversations, responses: ResponseSpec
) -> AnswersIdentity:
    """Return the identity of a set of answered conversations."""
    return make_answers_identity(target, files, source.prepared.data_version, source.part, responses)


def _identify_answers(results: Results, target: TargetSpec, eval_set: str, part: str) -> dict[str, Any]:
    source, files = Conversations.load(results, target, eval_set, part), results.resolve_target_files(target.name)
    return identify_answers(target, files, source, source.choose_settings(target)).to_json()


def _identify_tokens(results: Results, target: TargetSpec) -> dict[str, Any]:
    return {"responses": results.artifacts.load_current(RESPONSES, target.name).data_version}


def _identify_vocab_mapping(results: Results, target: TargetSpec) -> dict[str, Any]:
    return {
        "tokens": results.artifacts.load_current(TOKENIZED_TRAIN, target.name).data_version,
        "draft_vocab_size": resolve_draft_vocab_size(target),
        "vocab_size": results.resolve_target_files(target.name).vocab_size,
        "heldout": results.artifacts.load_current(HELDOUT_RESPONSES, target.name).data_version,
    }


def _identify_features(results: Results, target: TargetSpec) -> dict[str, Any]:
    files, tokens = (
        results.resolve_target_files(target.name),
        results.artifacts.load_current(TOKENIZED_TRAIN, target.name),
    )
    taps = collect_taps(target, files.num_layers)
    return FeaturesIdentity(tokens.data_version, files.digest, taps, target.capture.to_identity()).to_json()


def require_features(results: Results, asset_name: str, target: str) -> Artifact:
    """Return the newest features of an asset.

    Raises:
        StoreError: there are none, or they were captured from other weights than the target has now.
    """
    features, now = results.artifacts.load_current(asset_name, target), results.resolve_target_files(target).digest
    weights = read_captured_weights(features)
    if weights != now:
        raise StoreError(
            f"{asset_name} of target {target} was captured from other weights (digest {(weights or 'not known')[:12]}) than the target has now "
            f"({now[:12]}). Capture it again: draftworks run prepare --target {target}"
        )
    return features


def select_stream_versions(features: Artifact, names: Iterable[str]) -> dict[str, str]:
    """Return the content versions of the streams that one strategy reads, by name.

    Raises:
        StoreError: a stream was not captured.
    """
    known = features.summary.get("stream_versions", {})
    missing = [name for name in names if name not in known]
    if missing:
        raise StoreError(
            f"{features.asset} of target {features.target}: expected the features {missing}, found {sorted(known)}. Set the "
            "strategy's layer_ids in the registry, and materialize the features again: what is stored is not captured twice"
        )
    return {name: known[name] for name in names}


@dataclass(frozen=True)
class EvalSubject:
    """One eval set of one target: what its features are made from, and the key under which they are cached."""

    results: Results
    target: TargetSpec
    files: TargetFiles
    responses: Artifact
    taps: tuple[int, ...]

    @classmethod
    def of(cls, results: Results, target: TargetSpec, name: str) -> EvalSubject:
        files = results.resolve_target_files(target.name)
        responses = results.artifacts.load_current(of_eval_set(name).responses, target.name)
        return cls(results, target, files, responses, tuple(collect_taps(target, files.num_layers)))

    @property
    def config(self) -> EvalConfig:
        """The cache key. Its paths are relative, so that a moved checkout keeps its cache; `inputs` has the content."""
        return EvalConfig(
            eval_data_path=f"{self.responses.asset}/{self.target.name}",
            target_model_path=self.target.model,
            target_revision=self.target.revision,
            tokenizer_path=self.target.tokenizer or self.target.model,
            chat_template=self.target.chat_template or "",
            aux_hidden_state_layer_ids=self.taps,
            max_len=self.target.max_length,
            cache_dir=self.results.artifacts.root,
        )

    @property
    def inputs(self) -> dict[str, str]:
        """Content digests by name; a cache entry that was made from other content is replaced."""
        return {
            "eval_data": self.responses.data_version,
            "target": self.files.digest,
            "tokenizer": self.files.tokenizer_digest,
            "capture": digest(self.capture.to_identity()),
        }

    @property
    def capture(self) -> CaptureSpec:
        """Settings of the capture. Eval features are never encoded: drafts are compared on what the target computed."""
        return self.target.capture.as_plain()

    @property
    def identity(self) -> EvalFeaturesIdentity:
        return EvalFeaturesIdentity(eval_cache_key=self.config.cache_key, **self.inputs)


def _identify_eval_features(results: Results, target: TargetSpec, name: str) -> dict[str, Any]:
    return EvalSubject.of(results, target, name).identity.to_json()


def locate_cache_entry(results: Results, features: Artifact) -> Path:
    return EvalCache(results.artifacts.root).root / EvalFeaturesIdentity.of(features).eval_cache_key


def locate_feature_set(results: Results, target: str, name: str) -> FeatureSet:
    """Return the paths of an eval set's tokens and cached features, for a run file.

    Raises:
        StoreError: not materialized yet, or for other weights.
    """
    responses = results.artifacts.load_current(of_eval_set(name).responses, target)
    features = require_features(results, of_eval_set(name).features, target)
    return FeatureSet(tokens=responses.path / TOKENS_FOLDER, features=locate_cache_entry(results, features))


def read_eval_data(results: Results, target: str, name: str, streams: Iterable[str]) -> EvalData:
    """Return the content versions of an eval set as it is now.

    Raises:
        StoreError: not materialized yet or for other weights, or a stream was not captured.
    """
    responses = results.artifacts.load_current(of_eval_set(name).responses, target)
    features = require_features(results, of_eval_set(name).features, target)
    return EvalData(responses.data_version, select_stream_versions(features, streams))


def read_draft_inputs(
    results: Results, strategy: StrategySpec, target: TargetSpec, entry: StrategyEntry, tuned: Path | None = None
) -> DraftInputs:
    """Return the inputs of a draft.

    Args:
        entry: with every option filled in, see `apply_overrides`.
        tuned: folder of the draft to go on from, in place of the one that the entry names.

    Raises:
        ConfigError: unknown options.
        StoreError: an asset does not exist yet.
    """
    artifacts, files = results.artifacts, results.resolve_target_files(target.name)
    options = strategy.parse_options(entry.options, where=f"options of {strategy.name}")
    streams = strategy.list_features(files.num_layers, options)
    train_features = require_features(results, TRAINING_FEATURES, target.name)
    named = None if entry.start_from is None else results.registry.resolve_path(entry.start_from)
    return DraftInputs(
        files=files,
        options=entry.options,
        training=entry.training,
        train_tokens=artifacts.load_current(TOKENIZED_TRAIN, target.name),
        train_features=train_features,
        feature_versions=select_stream_versions(train_features, streams),
        heldout=locate_feature_set(results, target.name, HELDOUT),
        heldout_data=read_eval_data(results, target.name, HELDOUT, streams),
        vocab_mapping=artifacts.load_current(VOCAB_MAPPING, target.name) if strategy.uses_vocab_mapping else None,
        start_from=tuned or named,
        arrival=identify_arrival(target, results.registry),
    )


def _identify_draft(results: Results, target: TargetSpec, strategy: StrategySpec) -> dict[str, Any]:
    entry = apply_overrides(target.name, strategy, target.strategies[strategy.name], {}, {})
    return read_draft_inputs(results, strategy, target, entry).to_identity(strategy).to_json()


def identify_report(
    results: Results, strategy: StrategySpec, target: TargetSpec, draft: Artifact, train_tokens: Artifact
) -> ReportIdentity:
    """Return the identity of the report of a draft on every eval set. It reads the draft's streams, and `last`."""
    files, options = results.resolve_target_files(target.name), DraftIdentity.of(draft).options
    typed = strategy.parse_options(options, where=f"options of {draft.path}")
    streams = list(dict.fromkeys([*strategy.list_features(files.num_layers, typed), LAST]))
    measured = {name: read_eval_data(results, target.name, name, streams) for name in list_eval_names(target)}
    return ReportIdentity(
        draft=draft.data_version,
        draft_identity=draft.path.name,
        heldout=measured.pop(HELDOUT),
        evals=measured,
        evaluation=target.evaluation.to_identity((strategy.name,)),
        limits=read_limits(target),
        bigram_tokens=train_tokens.data_version,
    )


def _identify_report(results: Results, target: TargetSpec, strategy: StrategySpec) -> dict[str, Any]:
    draft = results.artifacts.load_current(of_strategy(strategy.name).draft, target.name)
    tokens = results.artifacts.load_current(TOKENIZED_TRAIN, target.name)
    return identify_report(results, strategy, target, draft, tokens).to_json()


def read_limits(target: TargetSpec) -> Limits:
    return Limits(target.responses.max_new_tokens, target.max_length)


def find_card(results: Results, strategy: StrategySpec, draft: Artifact) -> Path | None:
    """Return the path of the draft's model card; None if the newest report is of another draft."""
    report = results.artifacts.find(of_strategy(strategy.name).report, draft.target)
    if report is None or ReportIdentity.of(report).draft_identity != draft.path.name:
        return None
    return report.path / CARD


def _identify_quantised_walk(results: Results, target: TargetSpec, strategy: StrategySpec) -> dict[str, Any]:
    """Return what decides the walk of a quantised draft; {} for one that is not quantised."""
    if not target.strategies[strategy.name].export.quantises:
        return {}
    answers = results.artifacts.load_current(of_eval_set(HELDOUT).responses, target.name).data_version
    return {"walked": {"answers": answers, "draft_tokens": target.evaluation.draft_tokens}}


def _identify_export(results: Results, target: TargetSpec, strategy: StrategySpec) -> dict[str, Any]:
    draft = results.artifacts.load_current(of_strategy(strategy.name).draft, target.name)
    files, card = results.resolve_target_files(target.name), find_card(results, strategy, draft)
    settings = target.strategies[strategy.name].export
    return ExportIdentity(
        draft=draft.path.name,
        weights=draft.data_version,
        target=[files.digest, files.model, files.revision],
        settings=settings.model_dump() | _identify_quantised_walk(results, target, strategy),
        formats=strategy.identify_exports(settings.formats),
        card=None if card is None else file_digest(card),
    ).to_json()
